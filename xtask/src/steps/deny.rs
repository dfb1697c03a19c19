//! The step `deny`: licences, sources and wildcards of dependencies, by cargo-deny. The rules are in deny.toml.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::context::Context;
use crate::runner::{Report, Step, Task};

const LIMIT: Duration = Duration::from_secs(30 * 60);

/// The version of cargo-deny that deny.toml is written for.
const DENY_VERSION: &str = "0.20.2";

/// Licences, sources and wildcards of dependencies.
pub(crate) fn deny() -> Step {
    Step::new("deny", |context, task| {
        let tool = deny_tool(context, task)?;
        let mut command = Command::new(tool);
        command
            .args(["--color", "never", "check", "licenses", "bans", "sources"])
            .current_dir(&context.root);
        task.run_within(&mut command, LIMIT)?;
        Ok(Report::default())
    })
    .after(&["apt-packages"])
    .check()
    .hint("deny.toml says what is allowed and why")
}

/// Built once into the cache. Without optimization, because it runs for a second and compiles for minutes.
fn deny_tool(context: &Context, task: &mut Task) -> Result<PathBuf> {
    let home = context.cache.join("tools").join(format!("cargo-deny-{DENY_VERSION}"));
    let tool = home.join("bin/cargo-deny");
    if tool.exists() {
        return Ok(tool);
    }
    let partial = home.with_extension(format!("{}.partial", std::process::id()));
    let mut command = Command::new("cargo");
    command
        .args([
            "install",
            "--locked",
            "--debug",
            "cargo-deny",
            "--version",
            DENY_VERSION,
            "--root",
        ])
        .arg(&partial);
    command
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_TARGET_DIR", partial.join("build"));
    let installed = task.run_within(&mut command, LIMIT);
    if installed.is_ok() {
        fs::remove_dir_all(partial.join("build"))?;
        fs::rename(&partial, &home)?;
    } else if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    installed?;
    Ok(tool)
}
