//! Slow artefacts: made once by a script in the tree, kept in the cache by the hash of everything that makes them.
//!
//! A recipe is a directory with an executable `recipe.sh OUT_DIR`. Files that it shares with others (a library of
//! shell functions) are named in `recipe.inputs`, one path from the checkout's root a line, and are hashed too. This
//! file knows no artefact's contents.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::mount::{UnmountFlags, unmount};
use sha2::{Digest, Sha256};

use crate::context::Context;
use crate::runner::{Report, Task};
use crate::tree;

/// The longest that a recipe may take; the slowest one (the kernel) is meant for five minutes.
const LIMIT: Duration = Duration::from_secs(45 * 60);

/// One recipe of the tree.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipe {
    /// The artefact's name in the cache.
    pub(crate) name: &'static str,
    /// Where the script is, from the checkout's root.
    pub(crate) dir: &'static str,
}

impl Recipe {
    /// Where this version of the artefact is, or will be.
    pub(crate) fn path(&self, context: &Context) -> Result<PathBuf> {
        Ok(self.home(context).join(self.hash(context)?))
    }

    /// Whether this version exists; if so, `current` names it.
    pub(crate) fn is_made(&self, context: &Context) -> Result<bool> {
        let path = self.path(context)?;
        let made = path.is_dir();
        if made {
            self.point_at(context, &path)?;
        }
        Ok(made)
    }

    /// Makes it, unless another run has made it meanwhile.
    pub(crate) fn make(&self, context: &Context, task: &mut Task) -> Result<Report> {
        let home = self.home(context);
        fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
        let _lock = lock(&home.join(".lock"), task)?;
        let path = self.path(context)?;
        if path.is_dir() {
            self.point_at(context, &path)?;
            return Ok(Report {
                cached: true,
                ..Report::default()
            });
        }
        let partial = path.with_extension("partial");
        clear(&partial)?;
        fs::create_dir_all(&partial)?;
        let script = context.root.join(self.dir).join("recipe.sh");
        let mut command = Command::new(&script);
        command.arg(&partial).current_dir(&context.root);
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("BASALT_CACHE", &context.cache);
        if std::env::var_os("APT_CONFIG").is_none() {
            command.env("APT_CONFIG", apt_config(context)?);
        }
        let made = task.run_within(&mut command, LIMIT);
        if made.is_err() {
            clear(&partial)?;
        }
        made?;
        if fs::read_dir(&partial)?.next().is_none() {
            bail!(
                "{} succeeded but left nothing in its output directory",
                context.short(&script).display()
            );
        }
        fs::rename(&partial, &path)?;
        self.point_at(context, &path)?;
        Ok(Report {
            detail: size_of(&path)?,
            ..Report::default()
        })
    }

    fn home(&self, context: &Context) -> PathBuf {
        context.cache.join(self.name)
    }

    /// Over names, executable bits and contents of the recipe's files and of what `recipe.inputs` names.
    fn hash(&self, context: &Context) -> Result<String> {
        let mut files = tree::files(&context.root, Some(self.dir))?;
        let inputs = context.root.join(self.dir).join("recipe.inputs");
        if inputs.exists() {
            let text = fs::read_to_string(&inputs)?;
            let named = text
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty() && !line.starts_with('#'));
            files.extend(named.map(str::to_owned));
        }
        if !files.iter().any(|file| file.ends_with("/recipe.sh")) {
            bail!("{}/recipe.sh is missing", self.dir);
        }
        hash_files(&context.root, files)
    }

    /// `current` always names a whole artefact: it is replaced, never rewritten.
    fn point_at(&self, context: &Context, path: &Path) -> Result<()> {
        let home = self.home(context);
        let current = home.join("current");
        let name = path.file_name().context("an artefact without a name")?;
        if fs::read_link(&current).is_ok_and(|to| to.as_os_str() == name) {
            return Ok(());
        }
        let fresh = home.join(format!(".current.{}", std::process::id()));
        remove_if_there(&fresh)?;
        symlink(name, &fresh)?;
        fs::rename(&fresh, &current)?;
        Ok(())
    }
}

fn hash_files(root: &Path, mut files: Vec<String>) -> Result<String> {
    files.sort();
    files.dedup();
    let mut sum = Sha256::new();
    for file in files {
        let path = root.join(&file);
        let meta = fs::metadata(&path).with_context(|| format!("{file} is an input of a recipe but cannot be read"))?;
        let contents = fs::read(&path)?;
        sum.update(format!(
            "{file}\0{}\0{}\0",
            meta.permissions().mode() & 0o111 != 0,
            contents.len()
        ));
        sum.update(contents);
    }
    Ok(hex::encode(sum.finalize()))
}

/// Two runs (also of two checkouts) do not make the same artefact at once.
fn lock(path: &Path, task: &mut Task) -> Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    let mut told = false;
    while file.try_lock().is_err() {
        if !told {
            task.say(&format!("another run holds {}; waiting for it", path.display()))?;
            told = true;
        }
        task.check_stop()?;
        thread::sleep(Duration::from_millis(200));
    }
    Ok(file)
}

/// Removes what an interrupted run left, after unmounting what is mounted below: removing through a mount would delete
/// files of the machine.
fn clear(dir: &Path) -> Result<()> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    for point in mounts_below(&text, dir) {
        unmount(&point, UnmountFlags::DETACH).with_context(|| format!("cannot unmount {}", point.display()))?;
    }
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Mount points below `dir`, the innermost first. Field 5 of a mountinfo line is the mount point (proc(5)), with
/// spaces as `\040`.
fn mounts_below(mountinfo: &str, dir: &Path) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    let mut below: Vec<_> = points
        .map(|point| PathBuf::from(point.replace("\\040", " ")))
        .filter(|point| point.starts_with(dir))
        .collect();
    below.reverse();
    below
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Recipes run at the same time and each calls apt-get: they wait for each other instead of failing.
pub(crate) fn apt_config(context: &Context) -> Result<PathBuf> {
    let path = context.cache.join("apt.conf");
    fs::create_dir_all(&context.cache)?;
    fs::write(&path, "DPkg::Lock::Timeout \"1200\";\nAcquire::Retries \"3\";\n")?;
    Ok(path)
}

fn size_of(dir: &Path) -> Result<String> {
    let mut bytes = 0;
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                open.push(entry.path())
            } else {
                bytes += meta.len()
            }
        }
    }
    Ok(format!("{} MB", bytes.div_ceil(1_000_000)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::board::Board;
    use crate::runner::interrupt::Stop;

    const RECIPE: Recipe = Recipe {
        name: "thing",
        dir: "thing",
    };

    struct Fixture {
        dir: tempfile::TempDir,
        context: Context,
    }

    fn fixture(script: &str) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let context = Context {
            root: dir.path().join("root"),
            cache: dir.path().join("cache"),
            kvm: false,
            ci: true,
        };
        fs::create_dir_all(context.root.join("thing")).unwrap();
        let path = context.root.join("thing/recipe.sh");
        fs::write(&path, format!("#!/bin/sh\nset -eu\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Fixture { dir, context }
    }

    fn task(fixture: &Fixture) -> Task {
        Task::new(0, &fixture.dir.path().join("log"), Board::silent(1), Stop::default()).unwrap()
    }

    #[test]
    fn is_made_once_and_named_by_current() {
        let fixture = fixture("echo made >\"$1/it\"; echo x >>\"$BASALT_CACHE/times\"");
        let context = &fixture.context;
        assert!(!RECIPE.is_made(context).unwrap());
        assert!(!RECIPE.make(context, &mut task(&fixture)).unwrap().cached);
        assert!(RECIPE.is_made(context).unwrap());
        assert!(RECIPE.make(context, &mut task(&fixture)).unwrap().cached);
        assert_eq!(
            fs::read_to_string(context.cache.join("thing/current/it")).unwrap(),
            "made\n"
        );
        assert_eq!(fs::read_to_string(context.cache.join("times")).unwrap(), "x\n");
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let fixture = fixture("echo half >\"$1/it\"; exit 1");
        assert!(RECIPE.make(&fixture.context, &mut task(&fixture)).is_err());
        let names: Vec<_> = fs::read_dir(fixture.context.cache.join("thing"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, [".lock"]);
    }

    #[test]
    fn an_empty_result_is_a_failure() {
        let fixture = fixture(":");
        let error = RECIPE.make(&fixture.context, &mut task(&fixture)).unwrap_err();
        assert!(format!("{error}").contains("left nothing"), "{error}");
    }

    #[test]
    fn the_hash_follows_contents_mode_and_named_inputs() {
        let fixture = fixture(":");
        let root = &fixture.context.root;
        let mut seen = vec![RECIPE.hash(&fixture.context).unwrap()];
        fs::write(root.join("lib.sh"), "a").unwrap();
        fs::write(root.join("thing/recipe.inputs"), "# shared\nlib.sh\n").unwrap();
        seen.push(RECIPE.hash(&fixture.context).unwrap());
        fs::write(root.join("lib.sh"), "b").unwrap();
        seen.push(RECIPE.hash(&fixture.context).unwrap());
        fs::set_permissions(root.join("lib.sh"), fs::Permissions::from_mode(0o755)).unwrap();
        seen.push(RECIPE.hash(&fixture.context).unwrap());
        assert_eq!(
            seen.iter().collect::<std::collections::BTreeSet<_>>().len(),
            4,
            "{seen:?}"
        );
        fs::remove_file(root.join("lib.sh")).unwrap();
        assert!(RECIPE.hash(&fixture.context).is_err());
    }

    #[test]
    fn mounts_are_found_innermost_first() {
        let text = "1 0 8:1 / / rw - ext4 x rw\n2 1 0:5 / /c/x.partial/proc rw - proc p rw\n\
                    3 2 0:6 / /c/x.partial/proc/a\\040b rw - proc p rw\n4 1 0:7 / /c/x.partially rw - t t rw\n";
        let found = mounts_below(text, Path::new("/c/x.partial"));
        assert_eq!(
            found,
            [Path::new("/c/x.partial/proc/a b"), Path::new("/c/x.partial/proc")]
        );
    }
}
