//! How a tree of files becomes a Debian package: the tree as it is to be on a host, with `DEBIAN/` beside it, made into an archive
//! by dpkg-deb. The same inputs and the same SOURCE_DATE_EPOCH give the same bytes.
//!
//! Knows what dpkg and Debian Policy want of any package, and of none what is in it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::runner::{Report, Task};

pub(super) const LIMIT: Duration = Duration::from_secs(10 * 60);

/// Where packages are, and the trees that they are made of.
pub(super) fn directory(context: &Context) -> PathBuf {
    context.target().join("package")
}

/// An empty place for a package's tree, beside the packages.
pub(super) fn empty_root(context: &Context, name: &str) -> Result<PathBuf> {
    let root = directory(context).join(name);
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    Ok(root)
}

/// Writes a file with its directories; modes do not depend on anybody's umask.
pub(super) fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let parent = path.parent().context("a file without a directory")?;
    let missing: Vec<&Path> = parent.ancestors().take_while(|directory| !directory.exists()).collect();
    for directory in missing.into_iter().rev() {
        fs::create_dir(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(0o755))?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

/// Seconds since 1970: SOURCE_DATE_EPOCH, or when the checkout's commit was made.
pub(super) fn epoch(context: &Context) -> Result<u64> {
    if let Ok(text) = std::env::var("SOURCE_DATE_EPOCH") {
        return text.parse().context("SOURCE_DATE_EPOCH is no number of seconds");
    }
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"]).current_dir(&context.root);
    match git.output() {
        Ok(output) if output.status.success() => Ok(String::from_utf8(output.stdout)?.trim().parse()?),
        _ => {
            bail!("this is no git checkout, so that its time is not known: set SOURCE_DATE_EPOCH to seconds since 1970")
        }
    }
}

/// A changelog of one entry (Policy 4.4); what has changed is told elsewhere. The maintainer is the one of the package's control file.
pub(super) fn changelog(name: &str, version: &str, epoch: u64, control: &str) -> Result<String> {
    let at = format!("@{epoch}");
    let date = captured(Command::new("date").args(["--utc", "--rfc-email", "--date", &at]))?;
    let maintainer = control.lines().find_map(|line| line.strip_prefix("Maintainer: "));
    Ok(format!(
        "{name} ({version}) unstable; urgency=medium\n\n  * What has changed stands in CHANGELOG.md of the source tree.\n\n -- {}  {}\n",
        maintainer.with_context(|| format!("the control file of {name} names no maintainer"))?,
        String::from_utf8(date)?.trim()
    ))
}

/// Man pages and long documents are compressed, as Debian Policy 12.1 and 12.3 want, without a time stamp.
pub(super) fn compress(task: &mut Task, files: &[PathBuf]) -> Result<()> {
    task.run_within(Command::new("gzip").args(["-9", "--no-name"]).args(files), LIMIT)?;
    Ok(())
}

/// Makes the archive: version, size and sums are filled in, and everything becomes root's.
pub(super) fn archive(
    task: &mut Task,
    root: &Path,
    (version, epoch): (&str, u64),
    template: &str,
    file: &Path,
) -> Result<()> {
    control(root, version, template)?;
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "-Zzstd", "-z12", "--threads-max=1", "--build"]);
    build.arg(root).arg(file).env("SOURCE_DATE_EPOCH", epoch.to_string());
    task.run_within(&mut build, LIMIT)?;
    Ok(())
}

pub(super) fn files_below(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries = fs::read_dir(directory)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        if entry.file_type()?.is_dir() {
            files_below(&entry.path(), found)?;
        } else {
            found.push(entry.path());
        }
    }
    Ok(())
}

/// What dpkg reads: name, version, size, sums.
fn control(root: &Path, version: &str, template: &str) -> Result<()> {
    let mut files = Vec::new();
    files_below(root, &mut files)?;
    files.retain(|file| !file.starts_with(root.join("DEBIAN")));
    let mut bytes = 0;
    let mut sums = Command::new("md5sum");
    sums.current_dir(root);
    for file in &files {
        bytes += fs::metadata(file)?.len();
        sums.arg(file.strip_prefix(root)?);
    }
    let sums = captured(&mut sums)?;
    put(&root.join("DEBIAN/md5sums"), &sums, 0o644)?;
    let control = template
        .replace("@VERSION@", version)
        .replace("@SIZE@", &bytes.div_ceil(1024).to_string());
    put(&root.join("DEBIAN/control"), control.as_bytes(), 0o644)
}

/// What dpkg sees in the package, which has to have all that is wanted; lintian, where it is installed, says what Debian would.
pub(super) fn check(task: &mut Task, file: &Path, wanted: &[&str]) -> Result<()> {
    let listed = task
        .run_within(Command::new("dpkg-deb").arg("--contents").arg(file), LIMIT)?
        .out;
    let wrong = listed.iter().find(|line| !line.contains(" root/root "));
    if let Some(line) = wrong {
        bail!("a file of the package is not root's: {line}");
    }
    for to in wanted.iter().filter(|to| !to.starts_with("DEBIAN/")) {
        if !listed.iter().any(|line| line.contains(&format!(" ./{to}"))) {
            bail!("the package lacks {to}");
        }
    }
    let lintian = Command::new("lintian")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success());
    if lintian {
        let mut command = Command::new("lintian");
        task.run_within(
            command.args(["--allow-root", "--fail-on", "error,warning"]).arg(file),
            LIMIT,
        )?;
    }
    Ok(())
}

/// What a command prints that is quick and whose output is no news to anybody.
pub(super) fn captured(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().with_context(|| format!("{command:?} cannot be run"))?;
    if !output.status.success() {
        bail!(
            "{command:?} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(output.stdout)
}

/// What is told of a package that is there.
pub(super) fn made(context: &Context, file: &Path) -> Result<Report> {
    let size = fs::metadata(file)?.len() / 1000;
    Ok(Report {
        detail: format!("{} {size} kB", context.short(file).display()),
        ..Report::default()
    })
}

/// Makes a package twice, which must be equal.
pub(super) fn twice(file: &Path, mut make: impl FnMut(&Path) -> Result<()>) -> Result<()> {
    make(file)?;
    let again = file.with_extension("again");
    make(&again)?;
    if fs::read(file)? != fs::read(&again)? {
        bail!(
            "two packages of the same files differ; compare {} and {}",
            file.display(),
            again.display()
        );
    }
    Ok(fs::remove_file(&again)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_what_they_shall_be() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a/b/c");
        put(&file, b"x", 0o755).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&file), 0o755);
        assert_eq!(mode(&directory.path().join("a")), 0o755);
        put(&file, b"y", 0o644).unwrap();
        assert_eq!((mode(&file), fs::read(&file).unwrap()), (0o644, b"y".to_vec()));
    }

    #[test]
    fn sums_and_size_are_of_what_is_installed() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        put(&root.join("usr/share/x"), b"content", 0o644).unwrap();
        put(&root.join("DEBIAN/postinst"), &[b'#'; 5000], 0o755).unwrap();
        control(root, "1.2", "Version: @VERSION@\nInstalled-Size: @SIZE@\n").unwrap();
        let read = |name: &str| fs::read_to_string(root.join("DEBIAN").join(name)).unwrap();
        assert_eq!(read("control"), "Version: 1.2\nInstalled-Size: 1\n");
        assert_eq!(read("md5sums"), "9a0364b9e99bb480dd25e1f0284c8555  usr/share/x\n");
    }

    #[test]
    fn a_changelog_names_whom_the_control_file_names() {
        let text = changelog("x", "1.2", 86_400, "Package: x\nMaintainer: M <m@y.invalid>\n").unwrap();
        assert!(text.starts_with("x (1.2) unstable;"), "{text}");
        assert!(
            text.ends_with(" -- M <m@y.invalid>  Fri, 02 Jan 1970 00:00:00 +0000\n"),
            "{text}"
        );
        assert!(changelog("x", "1.2", 86_400, "Package: x\n").is_err());
    }
}
