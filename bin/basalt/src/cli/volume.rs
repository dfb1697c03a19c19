//! The arguments of `basalt volume`, and what `--volume` takes.

use clap::{Args, Subcommand};
use node_api::{VolumeMount, VolumeSource};

/// `basalt volume ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum VolumeVerb {
    /// Make named volumes; it is fine if they are there.
    Create(VolumesArgs),
    /// List the named volumes.
    Ls(VolumeLsArgs),
    /// Show all that is known of named volumes.
    Inspect(TenantVolumesArgs),
    /// Remove named volumes with their files; refused while a sandbox has them.
    Rm(TenantVolumesArgs),
    /// Remove all named volumes that no sandbox has.
    Prune,
}

/// Several named volumes.
#[derive(Args, Debug)]
pub(crate) struct VolumesArgs {
    /// The volumes' names.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

/// Which of them are listed.
#[derive(Args, Debug)]
pub(crate) struct VolumeLsArgs {
    /// Those of all tenants of gateways, in place of the node's own.
    #[arg(long)]
    pub(crate) tenants: bool,

    /// Those of one tenant.
    #[arg(long, value_name = "NAME", conflicts_with = "tenants")]
    pub(crate) tenant: Option<String>,
}

/// Several volumes, of the node or of a tenant.
#[derive(Args, Debug)]
pub(crate) struct TenantVolumesArgs {
    /// They are volumes of this tenant of a gateway, and not the node's own.
    #[arg(long, value_name = "NAME")]
    pub(crate) tenant: Option<String>,

    #[command(flatten)]
    pub(crate) volumes: VolumesArgs,
}

/// A volume whose directory is absolute, as only this program knows what it is relative to.
pub(super) fn mount(text: &str) -> Result<VolumeMount, String> {
    let volume: VolumeMount = text.parse().map_err(|error: node_api::VolumeError| error.to_string())?;
    let VolumeSource::Directory(path) = &volume.source else {
        return Ok(volume);
    };
    let absolute = std::path::absolute(path).map_err(|error| format!("`{path}` cannot be made absolute: {error}"))?;
    let absolute = absolute
        .into_os_string()
        .into_string()
        .map_err(|path| format!("{} is no UTF-8 text", path.display()))?;
    Ok(VolumeMount {
        source: VolumeSource::Directory(absolute),
        ..volume
    })
}

/// A volume as a program describes it.
pub(super) fn described(text: &str) -> Result<VolumeMount, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}
