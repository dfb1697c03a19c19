//! The kernel modules (`kmod/`, `bench/probe/`), built against the headers of the lab's kernel, the first also against those of a newer
//! one: where a warning is, it has failed. The lab gets what is built for its kernel.
//!
//! Knows how a module is built outside of the kernel's tree, and not what it does. The compiler's files stay in the build directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::build::publish;
use super::{LAB_HOST, NEWER_KERNEL};
use crate::context::Context;
use crate::runner::{Plan, Report, Step, Task};
use crate::tree;

/// A module: where its source is, from the checkout's root, and what is made of it.
struct Module {
    source: &'static str,
    /// Its directory in the build directory.
    work: &'static str,
    file: &'static str,
    /// Whether newer kernels are to have it, too.
    newer: bool,
}

const MODULES: [Module; 2] = [
    Module {
        source: "kmod",
        work: "module",
        file: "basalt.ko",
        newer: true,
    },
    Module {
        source: "bench/probe",
        work: "module-probe",
        file: "basalt_probe.ko",
        newer: false,
    },
];
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
        .hint("kmod/ and bench/probe/ are built with the headers that lab/host/recipe.sh and lab/newer-kernel/recipe.sh keep, and no warning is allowed, of the compiler or of sparse (W=1 C=2)")
}

fn make(context: &Context, task: &mut Task) -> Result<Report> {
    let (version, headers) = headers(&LAB_HOST.path(context)?)?;
    let (newer_version, newer_headers) = self::headers(&NEWER_KERNEL.path(context)?)?;
    fs::create_dir_all(context.assets())?;
    for module in &MODULES {
        let built = module.build(context, task, (&version, &headers))?;
        publish(&built, &context.assets().join(module.file))?;
        if module.newer {
            module.build(context, task, (&newer_version, &newer_headers))?;
        }
    }
    Ok(Report {
        detail: format!("with {version} and {newer_version}"),
        ..Report::default()
    })
}

impl Module {
    /// Builds it for a kernel, by its version and headers; tells where it is.
    fn build(&self, context: &Context, task: &mut Task, (version, headers): (&str, &Path)) -> Result<PathBuf> {
        let work = context.target().join(self.work).join(version);
        for file in tree::files(&context.root, Some(self.source))? {
            let name = file
                .strip_prefix(self.source)
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
        let warnings: Vec<_> = lines.filter(|line| is_warning(line)).collect();
        if let Some(first) = warnings.first() {
            // What is compiled already would be silent the next time.
            fs::remove_dir_all(&work)?;
            bail!(
                "{}: {} warnings with {version}, the first: {first}",
                self.source,
                warnings.len()
            );
        }
        Ok(work.join(self.file))
    }
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
