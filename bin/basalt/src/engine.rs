//! Where sandboxes run: on this host's KVM, or in the lab.

use anyhow::{Result, bail};
use host::Verdict;

use crate::places;

/// Where sandboxes run.
pub(crate) enum Engine {
    /// On this host's KVM.
    Kvm,
    /// In the lab, and why.
    Lab(String),
}

/// What `$BASALT_ENGINE` says.
pub(crate) fn wanted() -> Result<Option<Engine>> {
    match std::env::var("BASALT_ENGINE").unwrap_or_default().as_str() {
        "" => Ok(None),
        "kvm" => Ok(Some(Engine::Kvm)),
        "lab" => Ok(Some(Engine::Lab("BASALT_ENGINE is `lab`".into()))),
        other => bail!("BASALT_ENGINE is `{other}`: set it to `kvm` or `lab`, or unset it"),
    }
}

/// What this host can do. Who asks the host's daemon need not have the rights to KVM that it has.
pub(crate) fn usable() -> Engine {
    if places::is_member() {
        return Engine::Kvm;
    }
    match host::usable_kvm() {
        Verdict::Kvm => Engine::Kvm,
        Verdict::Lab(reason) => Engine::Lab(reason),
    }
}
