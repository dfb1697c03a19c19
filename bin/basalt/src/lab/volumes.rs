//! Directories of this machine for sandboxes in the lab: `basalt-lab` serves them for as long as the lab is up.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use node_api::volume::Served;
use node_api::{VolumeMount, VolumeSource};

use super::program;
use crate::cli::RunArgs;

/// The same, with directories of this machine as they are found there.
pub(super) fn with_served_volumes(args: &RunArgs) -> Result<RunArgs> {
    let mut args = args.clone();
    let volumes = args.volume.drain(..);
    args.volume_json = volumes.map(|one| served(&one)).collect::<Result<_>>()?;
    Ok(args)
}

/// A volume as the lab can have it: a directory of this machine is served to it, for as long as the lab is up.
fn served(volume: &VolumeMount) -> Result<VolumeMount> {
    let VolumeSource::Directory(directory) = &volume.source else {
        return Ok(volume.clone());
    };
    let mut words = vec!["share", "--json"];
    words.extend(volume.read_only.then_some("--read-only"));
    words.extend(["--", directory]);
    let output = Command::new(program()?)
        .args(words)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("basalt-lab cannot be started")?;
    if !output.status.success() {
        bail!("{directory} cannot be shared with the lab: basalt-lab says why above");
    }
    let served: Served = serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "`basalt-lab share` printed {:?}: use basalt and basalt-lab of one build",
            String::from_utf8_lossy(&output.stdout)
        )
    })?;
    Ok(VolumeMount {
        source: VolumeSource::Served(served),
        ..volume.clone()
    })
}
