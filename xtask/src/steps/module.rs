//! The kernel module (`kmod/`), built against the headers of the lab's kernel: where a warning is, it has failed.
//!
//! Knows how a module is built outside of the kernel's tree, and not what it does. The compiler's files stay in the build directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::LAB_HOST;
use super::build::publish;
use crate::context::Context;
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
        .hint("kmod/ is built with the headers that lab/host/recipe.sh keeps, and no warning is allowed, of the compiler or of sparse (W=1 C=2)")
}

fn make(context: &Context, task: &mut Task) -> Result<Report> {
    let headers = headers(context)?;
    let work = context.target().join("module");
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
    let lines = finished.out.iter().chain(&finished.err);
    let warnings: Vec<_> = lines.filter(|line| line.contains("warning:")).cloned().collect();
    if let Some(first) = warnings.first() {
        // What is compiled already would be silent the next time.
        fs::remove_dir_all(&work)?;
        bail!("{} warnings, the first: {first}", warnings.len());
    }
    fs::create_dir_all(context.assets())?;
    publish(&work.join(MODULE), &context.assets().join(MODULE))?;
    let version = headers.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Report {
        detail: format!("with {version}"),
        ..Report::default()
    })
}

/// Of the kernel that the lab runs.
fn headers(context: &Context) -> Result<PathBuf> {
    let host = LAB_HOST.path(context)?;
    let version = fs::read_to_string(host.join("kernel-version"))
        .with_context(|| format!("{} has no kernel's version; make the lab's host first", host.display()))?;
    let headers = host
        .join("headers/usr/src")
        .join(format!("linux-headers-{}", version.trim()));
    if !headers.is_dir() {
        bail!("there are no kernel headers at {}", headers.display());
    }
    Ok(headers)
}
