//! Builds the programs: static ones for lab and guest, copied to where README and CLI look for them.
//!
//! Knows which package makes which program only through cargo; does not know what programs do.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{cuda, driver};
use crate::context::{Context, MUSL};
use crate::runner::{Plan, Report, Step, Task};

const LIMIT: Duration = Duration::from_secs(40 * 60);

/// The standard library for static programs.
pub(crate) fn musl_target() -> Step {
    target("musl-target", MUSL)
}

/// What Rust has for programs of another target than this machine's.
pub(super) fn target(step: &'static str, target: &'static str) -> Step {
    Step::new(step, move |_, task| {
        task.run_within(Command::new("rustup").args(["target", "add", target]), LIMIT)?;
        if !has_target(target)? {
            bail!("`rustup target add {target}` succeeded, but this rustc does not see the target");
        }
        Ok(Report::default())
    })
    .plan(move |_| Ok(if has_target(target)? { Plan::Done } else { Plan::Run }))
    .hint(
        "rustc must come from rustup, and rustup must reach its server; a distribution's rustc needs its package of the target",
    )
}

/// What checking needs of a toolchain that may have been installed with the minimal profile.
pub(crate) fn components() -> Step {
    Step::new("rust-components", |_, task| {
        task.run_within(
            Command::new("rustup").args(["component", "add", "clippy", "rustfmt"]),
            LIMIT,
        )?;
        Ok(Report::default())
    })
    .plan(|_| {
        let runs = |tool| {
            Command::new("cargo")
                .args([tool, "--version"])
                .output()
                .is_ok_and(|out| out.status.success())
        };
        Ok(if runs("clippy") && runs("fmt") {
            Plan::Done
        } else {
            Plan::Run
        })
    })
    .hint("clippy and rustfmt are components of the toolchain; rustup must reach its server")
}

fn has_target(target: &str) -> Result<bool> {
    let output = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .output()
        .context("rustc is not on PATH; install Rust 1.95 by rustup")?;
    let dir = String::from_utf8_lossy(&output.stdout);
    let Ok(entries) = fs::read_dir(Path::new(dir.trim())) else {
        return Ok(false);
    };
    Ok(entries
        .flatten()
        .any(|entry| entry.file_name().to_string_lossy().starts_with("libcore-")))
}

/// A cargo command in the checkout, with the build directory where everything expects it.
pub(crate) fn cargo(context: &Context, args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(args)
        .arg("--target-dir")
        .arg(context.target())
        .current_dir(&context.root);
    // Set by the cargo that runs us; inherited, they would make crates rebuild that read them.
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST"))
        {
            command.env_remove(name);
        }
    }
    command
}

/// The programs, released and static.
pub(crate) fn binaries(programs: &[&'static str]) -> Step {
    let programs = programs.to_vec();
    Step::new("binaries", move |context, task| build(context, task, &programs))
        .hint("the compiler's messages are above; `cargo build --release` repeats them in colour")
}

/// What accelerators need: a server that loads drivers, which is for the C library of Debian as those are, and the driver that programs of
/// any image load.
pub(crate) fn accelerator() -> Step {
    Step::new("accelerator", |context, task| {
        let mut command = cargo(context, &["build", "--profile", "library"]);
        if context.ci {
            command.arg("--locked");
        }
        let server = task.run_within(command.args(["-p", "basalt-accel-server-bin"]), LIMIT)?;
        let (glibc, for_glibc) = driver::for_glibc(context, task)?;
        let (musl, for_musl) = driver::for_musl(context, task)?;
        let cuda = cuda::cuda_client(context, task)?;
        let built = context.target().join("library").join(ACCELERATOR);
        driver::loads(context, task, &built, [("cc", &glibc), ("musl-gcc", &musl)])?;
        let assets = context.assets();
        fs::create_dir_all(&assets)?;
        publish(&built, &assets.join(ACCELERATOR))?;
        publish(&glibc, &assets.join(driver::LIBRARY))?;
        publish(&musl, &assets.join(driver::MUSL_LIBRARY))?;
        publish(&cuda.join(cuda::LIBRARY), &assets.join(cuda::LIBRARY))?;
        let said = [server.err, for_glibc.err, for_musl.err].concat();
        Ok(compiled(&said))
    })
    .hint("the compiler's messages are above; a symbol that the linker misses is added to accel/client/glibc.toml, which says how")
}

/// The server, among the assets.
const ACCELERATOR: &str = "basalt-accel-server";

fn build(context: &Context, task: &mut Task, programs: &[&str]) -> Result<Report> {
    let mut command = cargo(context, &["build", "--release", "--target", MUSL]);
    if context.ci {
        command.arg("--locked");
    }
    for program in programs {
        command.args(["--bin", program]);
    }
    let finished = task.run_within(&mut command, LIMIT)?;
    let built = context.target().join(MUSL).join("release");
    fs::create_dir_all(context.release())?;
    for program in programs {
        publish(&built.join(program), &context.release().join(program))?;
    }
    Ok(compiled(&finished.err))
}

/// Whether anything had to be compiled, by what cargo has said.
fn compiled(said: &[String]) -> Report {
    Report {
        cached: !said.iter().any(|line| line.trim_start().starts_with("Compiling ")),
        ..Report::default()
    }
}

/// Puts a file in place under another name at once, so that nobody ever runs half of it; leaves equal files alone, so
/// that what is newer than they are stays newer.
pub(crate) fn publish(from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let partial = to.with_extension("partial");
    fs::copy(from, &partial).with_context(|| format!("cannot write {}", partial.display()))?;
    fs::rename(&partial, to)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publishing_replaces_a_changed_file_and_keeps_an_equal_one() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::write(&from, "one").unwrap();
        publish(&from, &to).unwrap();
        let inode = fs::metadata(&to).unwrap().ino();
        publish(&from, &to).unwrap();
        assert_eq!(fs::metadata(&to).unwrap().ino(), inode);
        fs::write(&from, "two").unwrap();
        publish(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "two");
    }
}
