//! `basalt env`: becomes `basalt-gateway env`, which knows where the gateway is reached. Knows no gateway itself.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::places;

/// Becomes the gateway's program.
pub(crate) fn environment(arguments: &[OsString], as_json: bool) -> Result<u8> {
    let program = places::gateway()?;
    let json = as_json.then_some("--json");
    let error = Command::new(&program).arg("env").args(json).args(arguments).exec();
    Err(error).with_context(|| format!("{} cannot be started", program.display()))
}
