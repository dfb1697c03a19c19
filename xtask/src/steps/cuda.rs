//! The client's library of CUDA: one file, and links by the names that programs look for.
//!
//! rustc would give a library for C a version script of its own, so that this links what it has made as an archive: with the names and
//! versions that are generated beside it, against the same old glibc as OpenCL's. Does not know what the library does.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::build::cargo;
use super::driver::{checked, link_libraries, old_enough};
use crate::context::Context;
use crate::runner::Task;

/// What is generated for the linker, from the checkout's root.
const GENERATED: &str = "accel/client-cuda/src/generated";
const ARCHIVE: &str = "libbasalt_cuda.a";
/// What the file is called, to which all names are links.
pub(super) const LIBRARY: &str = "libbasalt_cuda.so";
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// Links it; the directory that a program has in LD_LIBRARY_PATH.
pub(crate) fn cuda_client(context: &Context, task: &mut Task) -> Result<PathBuf> {
    let mut command = cargo(
        context,
        &[
            "rustc",
            "--profile",
            "library",
            "-p",
            "basalt-accel-client-cuda",
            "--lib",
        ],
    );
    if context.ci {
        command.arg("--locked");
    }
    task.run_within(command.args(["--crate-type", "staticlib"]), LIMIT)?;
    let built = context.target().join("library");
    let directory = built.join("cuda");
    fs::create_dir_all(&directory)?;
    let glibc = context.target().join("glibc");
    let symbols = link_libraries(context, task, &glibc)?;
    let generated = context.root.join(GENERATED);
    let library = directory.join(LIBRARY);
    let mut link = Command::new("cc");
    link.args(["-shared", "-nodefaultlibs", "-o"]).arg(&library);
    link.arg(generated.join("symbols.s"));
    link.arg(format!(
        "-Wl,--version-script={},--gc-sections,-O1,-s,-z,defs",
        generated.join("symbols.map").display()
    ));
    // No DT_SONAME: a program that is linked with one of its names needs that name.
    link.arg(built.join(ARCHIVE)).arg(format!("-L{}", glibc.display()));
    task.run_within(link.args(["-lgcc_s", "-lpthread", "-ldl", "-lc"]), LIMIT)?;
    checked(&library, |needs| old_enough(&symbols, needs))?;
    let files = generated.join("files.txt");
    let files = fs::read_to_string(&files).with_context(|| format!("cannot read {}", files.display()))?;
    for file in files.lines() {
        let link = directory.join(file);
        if fs::read_link(&link).is_ok_and(|target| target.as_os_str() == LIBRARY) {
            continue;
        }
        symlink(LIBRARY, &link).with_context(|| format!("cannot make {}", link.display()))?;
    }
    Ok(directory)
}
