//! The kernel module (`kmod/`), built against the headers of the lab's kernel and of a newer one: where a warning is, it has
//! failed. The lab gets the first of the two.
//!
//! Knows how a module is built outside of the kernel's tree, and not what it does. The compiler's files stay in the build directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::build::publish;
use super::{HEADERS, LAB_HOST};
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Plan, Report, Step, Task};
use crate::tree;

/// Where its source is, from the checkout's root.
const SOURCE: &str = "kmod";
const MODULE: &str = "basalt.ko";
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// The step.
pub(crate) fn module() -> Step {
    Step::new("module", make)
        .plan(|context| {
            Ok(match context.kvm {
                true => Plan::NotNeeded("it is tested in the lab, and this machine has KVM".into()),
                false => Plan::Run,
            })
        })
        .hint("kmod/ is built with the headers that lab/host/recipe.sh and lab/headers/recipe.sh keep, and no warning is allowed, of the compiler or of sparse (W=1 C=2)")
}

fn make(context: &Context, task: &mut Task) -> Result<Report> {
    let (version, module) = build(context, task, LAB_HOST)?;
    let (newer, _) = build(context, task, HEADERS)?;
    fs::create_dir_all(context.assets())?;
    publish(&module, &context.assets().join(MODULE))?;
    Ok(Report {
        detail: format!("with {version} and {newer}"),
        ..Report::default()
    })
}

/// Builds it with the headers that a recipe has made; tells the kernel's version, and where the module is.
fn build(context: &Context, task: &mut Task, recipe: Recipe) -> Result<(String, PathBuf)> {
    let made = recipe.path(context)?;
    let (version, headers) = headers(&made)?;
    let work = context.target().join("module").join(&version);
    for file in tree::files(&context.root, Some(SOURCE))? {
        let name = file
            .strip_prefix(SOURCE)
            .map_or(file.as_str(), |rest| rest.trim_start_matches('/'));
        let to = work.join(name);
        fs::create_dir_all(to.parent().context("a file without a directory")?)?;
        publish(&context.root.join(&file), &to)?;
    }
    let mut command = Command::new("make");
    command
        .arg(format!("KDIR={}", headers.display()))
        .args(["W=1", "C=2"])
        .current_dir(&work);
    let finished = task.run_within(&mut command, LIMIT)?;
    let warnings: Vec<_> = finished
        .out
        .iter()
        .chain(&finished.err)
        .filter(|line| is_warning(line))
        .collect();
    if let Some(first) = warnings.first() {
        // What is compiled already would be silent the next time.
        fs::remove_dir_all(&work)?;
        bail!("{} warnings with {version}, the first: {first}", warnings.len());
    }
    let module = work.join(MODULE);
    Ok((version, module))
}

/// The compiler and sparse write it small, modpost large.
fn is_warning(line: &str) -> bool {
    line.to_ascii_lowercase().contains("warning:")
}

/// A kernel's version and headers, as a recipe leaves them.
fn headers(made: &Path) -> Result<(String, PathBuf)> {
    let version = fs::read_to_string(made.join("kernel-version"))
        .with_context(|| format!("{} has no kernel's version; make it first", made.display()))?;
    let version = version.trim().to_owned();
    let headers = made.join("headers/usr/src").join(format!("linux-headers-{version}"));
    if !headers.is_dir() {
        bail!("there are no kernel headers at {}", headers.display());
    }
    Ok((version, headers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_warn_are_heard() {
        for line in [
            "kmod/claim.c:12:5: warning: unused variable 'error' [-Wunused-variable]",
            "WARNING: modpost: missing MODULE_DESCRIPTION() in basalt.o",
            "basalt.o: warning: objtool: basalt_svm_enter+0x8: unreachable instruction",
        ] {
            assert!(is_warning(line), "{line}");
        }
        assert!(!is_warning("  CC [M]  warnings.o"));
    }

    #[test]
    fn headers_are_those_of_the_version() {
        let made = tempfile::tempdir().unwrap();
        assert!(headers(made.path()).is_err());
        fs::write(made.path().join("kernel-version"), "6.12.1\n").unwrap();
        assert!(headers(made.path()).is_err());
        let directory = made.path().join("headers/usr/src/linux-headers-6.12.1");
        fs::create_dir_all(&directory).unwrap();
        assert_eq!(headers(made.path()).unwrap(), ("6.12.1".to_owned(), directory));
    }
}
