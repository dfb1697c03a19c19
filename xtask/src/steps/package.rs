//! The Debian package: a tree of the finished programs, what the CLI writes of itself, and `packaging/`, made into an archive
//! by dpkg-deb. The same inputs and the same SOURCE_DATE_EPOCH give the same bytes.
//!
//! Knows where files go on a Debian system; what units and maintainer scripts do is theirs to know.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::KERNEL;
use super::licences;
use super::sandbox::basalt;
use crate::context::Context;
use crate::runner::{Report, Step, Task};

const LIMIT: Duration = Duration::from_secs(10 * 60);

/// What the package is called.
const NAME: &str = "basalt";

/// Debian's names of the two ends of an upgrade in the lab's case `package` (`lab/cases/src/cases/package.rs`).
const TEST_PACKAGES: [&str; 2] = ["old.deb", "new.deb"];

/// The second one's version.
const NEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "+next");

/// A file, where it goes, and its mode. The first word says where it comes from: the programs, the assets, or the checkout.
const FILES: &[(Origin, &str, &str, u32)] = &[
    (Origin::Programs, "basalt", "usr/bin/basalt", 0o755),
    (Origin::Programs, "basaltd", "usr/sbin/basaltd", 0o755),
    (Origin::Assets, "basalt-vmm", "usr/lib/basalt/basalt-vmm", 0o755),
    (Origin::Assets, "vmlinux", "usr/lib/basalt/vmlinux", 0o644),
    (Origin::Assets, "initramfs.cpio", "usr/lib/basalt/initramfs.cpio", 0o644),
    (
        Origin::Tree,
        "packaging/systemd/basaltd.service",
        "lib/systemd/system/basaltd.service",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/systemd/basaltd.socket",
        "lib/systemd/system/basaltd.socket",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/systemd/basalt-sandboxes.service",
        "lib/systemd/system/basalt-sandboxes.service",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/debian/basaltd.8",
        "usr/share/man/man8/basaltd.8",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/debian/lintian-overrides",
        "usr/share/lintian/overrides/basalt",
        0o644,
    ),
    (Origin::Tree, "packaging/debian/postinst", "DEBIAN/postinst", 0o755),
    (Origin::Tree, "packaging/debian/prerm", "DEBIAN/prerm", 0o755),
    (Origin::Tree, "packaging/debian/postrm", "DEBIAN/postrm", 0o755),
];

/// The shells that `basalt completion` knows, and where each looks.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/basalt"),
    ("zsh", "usr/share/zsh/vendor-completions/_basalt"),
    ("fish", "usr/share/fish/vendor_completions.d/basalt.fish"),
];

#[derive(Clone, Copy)]
enum Origin {
    Programs,
    Assets,
    Tree,
}

/// The package of this tree, as a file for others.
pub(crate) fn package(version: Option<String>) -> Step {
    Step::new("package", move |context, task| {
        let version = version.as_deref().unwrap_or(env!("CARGO_PKG_VERSION"));
        let file = directory(context).join(format!("{NAME}_{version}_amd64.deb"));
        make(context, task, version, &file)?;
        let size = fs::metadata(&file)?.len() / 1000;
        Ok(Report {
            detail: format!("{} {size} kB", context.short(&file).display()),
            ..Report::default()
        })
    })
    .hint("dpkg-deb's messages are above; it must be Debian's own")
}

/// The same twice, which must be equal, and a next version for the lab's case.
pub(crate) fn packages_for_tests() -> Step {
    Step::new("package", |context, task| {
        let [old, new] = for_tests(context);
        fs::create_dir_all(old.parent().context("a package without a directory")?)?;
        make(context, task, env!("CARGO_PKG_VERSION"), &old)?;
        let again = directory(context).join("again.deb");
        make(context, task, env!("CARGO_PKG_VERSION"), &again)?;
        if fs::read(&old)? != fs::read(&again)? {
            bail!(
                "two packages of the same files differ; compare {} and {}",
                old.display(),
                again.display()
            );
        }
        fs::remove_file(&again)?;
        make(context, task, NEXT, &new)?;
        check(task, &old)?;
        Ok(Report {
            detail: format!("{} kB, twice the same bytes", fs::metadata(&old)?.len() / 1000),
            ..Report::default()
        })
    })
    .check()
    .hint("`cargo xtask package` makes the package alone")
}

/// Where they are.
pub(crate) fn for_tests(context: &Context) -> [PathBuf; 2] {
    TEST_PACKAGES.map(|name| context.release().join("basalt-packages").join(name))
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

fn directory(context: &Context) -> PathBuf {
    context.target().join("package")
}

/// Makes the package; the tree that it is made of stays beside it.
fn make(context: &Context, task: &mut Task, version: &str, file: &Path) -> Result<()> {
    let root = directory(context).join("root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    let epoch = epoch(context)?;
    for (from, name, to, mode) in FILES {
        let base = match from {
            Origin::Programs => context.release(),
            Origin::Assets => context.assets(),
            Origin::Tree => context.root.clone(),
        };
        let bytes = fs::read(base.join(name)).with_context(|| format!("cannot read {}", base.join(name).display()))?;
        put(&root.join(to), &bytes, *mode)?;
    }
    // Policy 10.1: without symbols.
    let programs = FILES
        .iter()
        .filter(|(.., mode)| *mode == 0o755)
        .map(|(_, _, to, _)| root.join(to));
    let mut strip = Command::new("strip");
    strip
        .arg("--strip-unneeded")
        .args(programs.filter(|path| !path.starts_with(root.join("DEBIAN"))));
    task.run_within(&mut strip, LIMIT)?;
    describe(context, task, &root)?;
    documents(context, &root, version, epoch)?;
    compress(task, &root)?;
    control(context, &root, version)?;
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "-Zxz", "-z3", "--threads-max=1", "--build"]);
    build.arg(&root).arg(file).env("SOURCE_DATE_EPOCH", epoch.to_string());
    task.run_within(&mut build, LIMIT)?;
    Ok(())
}

/// Writes a file with its directories; modes do not depend on anybody's umask.
fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
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
fn epoch(context: &Context) -> Result<u64> {
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

/// Completions and man pages, from the CLI's own definition.
fn describe(context: &Context, task: &mut Task, root: &Path) -> Result<()> {
    for (shell, to) in COMPLETIONS {
        let script = captured(&mut basalt(context, &["completion", shell]))?;
        put(&root.join(to), &script, 0o644)?;
    }
    let written = directory(context).join("man");
    if written.exists() {
        fs::remove_dir_all(&written)?;
    }
    let path = written.to_str().context("the checkout's path is no text")?;
    task.run_within(&mut basalt(context, &["man", path]), LIMIT)?;
    for entry in fs::read_dir(&written)? {
        let entry = entry?;
        let to = root.join("usr/share/man/man1").join(entry.file_name());
        put(&to, &fs::read(entry.path())?, 0o644)?;
    }
    Ok(())
}

/// What is said of the package: its changes, its and others' licences.
fn documents(context: &Context, root: &Path, version: &str, epoch: u64) -> Result<()> {
    let at = format!("@{epoch}");
    let date = captured(Command::new("date").args(["--utc", "--rfc-email", "--date", &at]))?;
    let control = fs::read_to_string(context.root.join("packaging/debian/control"))?;
    let maintainer = control.lines().find_map(|line| line.strip_prefix("Maintainer: "));
    let changes = format!(
        "{NAME} ({version}) unstable; urgency=medium\n\n  * What has changed stands in CHANGELOG.md of the source tree.\n\n -- {}  {}\n",
        maintainer.context("packaging/debian/control names no maintainer")?,
        String::from_utf8(date)?.trim()
    );
    let documents = root.join("usr/share/doc").join(NAME);
    put(&documents.join("changelog"), changes.as_bytes(), 0o644)?;
    let facts = fs::read_to_string(KERNEL.path(context)?.join("facts"))?;
    let kernel = facts.lines().find_map(|line| line.strip_prefix("source "));
    let kernel = kernel.context("the kernel's facts name no source package")?;
    let copyright = fs::read_to_string(context.root.join("packaging/debian/copyright"))?.replace("@KERNEL@", kernel);
    put(&documents.join("copyright"), copyright.as_bytes(), 0o644)?;
    let others = licences::text(context, &["basalt", "basaltd", "basalt-vmm", "basalt-agent"])?;
    put(&documents.join("third-party"), others.as_bytes(), 0o644)
}

/// Man pages and long documents are compressed, as Debian Policy 12.1 and 12.3 want, without a time stamp.
fn compress(task: &mut Task, root: &Path) -> Result<()> {
    let mut files = vec![];
    files_below(&root.join("usr/share/man"), &mut files)?;
    let documents = root.join("usr/share/doc").join(NAME);
    files.extend([documents.join("changelog"), documents.join("third-party")]);
    task.run_within(Command::new("gzip").args(["-9", "--no-name"]).args(files), LIMIT)?;
    Ok(())
}

fn files_below(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
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
fn control(context: &Context, root: &Path, version: &str) -> Result<()> {
    let mut files = Vec::new();
    files_below(&root.join("lib"), &mut files)?;
    files_below(&root.join("usr"), &mut files)?;
    let mut bytes = 0;
    let mut sums = Command::new("md5sum");
    sums.current_dir(root);
    for file in &files {
        bytes += fs::metadata(file)?.len();
        sums.arg(file.strip_prefix(root)?);
    }
    let sums = captured(&mut sums)?;
    put(&root.join("DEBIAN/md5sums"), &sums, 0o644)?;
    let control = fs::read_to_string(context.root.join("packaging/debian/control"))?
        .replace("@VERSION@", version)
        .replace("@SIZE@", &bytes.div_ceil(1024).to_string());
    put(&root.join("DEBIAN/control"), control.as_bytes(), 0o644)
}

/// What dpkg sees in the package; lintian, where it is installed, says what Debian would.
fn check(task: &mut Task, file: &Path) -> Result<()> {
    let listed = task
        .run_within(Command::new("dpkg-deb").arg("--contents").arg(file), LIMIT)?
        .out;
    let wrong = listed.iter().find(|line| !line.contains(" root/root "));
    if let Some(line) = wrong {
        bail!("a file of the package is not root's: {line}");
    }
    for (_, _, to, _) in FILES.iter().filter(|(_, _, to, _)| !to.starts_with("DEBIAN/")) {
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
    fn files_of_the_tree_exist_and_scripts_are_programs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (from, name, _, mode) in FILES {
            if matches!(from, Origin::Tree) {
                let metadata = fs::metadata(root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(metadata.permissions().mode() & 0o111 != 0, mode & 0o111 != 0, "{name}");
            }
        }
    }

    /// The module's device has a number only when the module is loaded, and the unit's devices are told by number.
    #[test]
    fn the_module_is_loaded_before_the_daemon_may_have_its_device() {
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd/basaltd.service");
        let text = fs::read_to_string(unit).unwrap();
        let has = |line: &str, word: &str| {
            let found = text.lines().find(|text| text.starts_with(line) && text.contains(word));
            assert!(found.is_some(), "no {line} with {word}");
        };
        has("Wants=", "modprobe@basalt.service");
        has("After=", "modprobe@basalt.service");
        has("DeviceAllow=", "/dev/basalt rw");
    }

    /// The units and the maintainer scripts name the same things.
    #[test]
    fn units_agree_on_the_cgroup() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
        let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        let cgroup = "--cgroup /system.slice/basalt-sandboxes.service";
        assert!(read("basaltd.service").contains(cgroup) && read("basalt-sandboxes.service").contains(cgroup));
        // A mount namespace of its own would hide the node's network namespace from everybody else.
        for unit in ["basaltd.service", "basalt-sandboxes.service"] {
            for forbidden in [
                "\nProtect",
                "\nPrivate",
                "\nReadOnly",
                "\nInaccessible",
                "\nSystemCall",
                "\nRestrict",
            ] {
                let text = read(unit).replace("\nRestart", "\n");
                assert!(!text.contains(forbidden), "{unit} has {}", forbidden.trim());
            }
        }
    }
}
