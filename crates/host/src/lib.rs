//! What this host can do: the checks behind `basalt doctor`, and the one question that `basalt run` asks before
//! anything else: is there a KVM that can really run a guest?
//!
//! Every finding is data ([`Check`]); nothing here prints. This crate knows no VMM and no guest kernel: its trial
//! guest is twenty bytes of its own.
#![allow(
    unsafe_code,
    reason = "the trial guest needs mapped memory that KVM writes to, and a signal that ends a stuck KVM_RUN; files are mapped for the page cache, and to be filled"
)]

pub mod cgroup;
pub mod check;
pub mod confine;
mod error;
pub mod isolation;
pub mod jail;
pub mod kvm;
mod mount_attributes;
pub mod page_cache;
pub mod resources;
pub mod share;
pub mod tools;
pub mod tree;
mod trial;
mod verdict_cache;
pub mod volume_files;
pub mod zeroed_memory;

use std::path::PathBuf;

use serde::Serialize;

pub use check::{Check, Status};
pub use error::Error;
pub use kvm::{Unusable, Verdict, emulated, usable_kvm};
pub use resources::{MemInfo, online_cpus};

/// Where things are that the checks look at.
#[derive(Clone, Debug)]
pub struct Places {
    /// The state directory; it need not exist yet.
    pub state: PathBuf,
    /// The cache directory with the lab's emulator and host image.
    pub cache: PathBuf,
    /// The `basalt-lab` program, where there is one.
    pub lab: Option<PathBuf>,
    /// The directory with the guest kernel, the guest initramfs and the VMM.
    pub assets: PathBuf,
}

/// Everything `basalt doctor` finds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Where `basalt run` would run a sandbox.
    pub verdict: Verdict,
    /// The single findings, in the order in which they are shown.
    pub checks: Vec<Check>,
}

impl Report {
    /// The worst status of all checks.
    pub fn worst(&self) -> Status {
        self.checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok)
    }

    /// A sandbox can run here in one way or the other.
    pub fn can_run(&self) -> bool {
        let passes = |name: &str| self.checks.iter().any(|c| c.name == name && c.status != Status::Fail);
        match self.verdict {
            Verdict::Kvm => true,
            Verdict::Lab(_) => passes(tools::LAB),
        }
    }
}

/// Makes every check; takes a few milliseconds, or up to [`kvm::TRIAL_LIMIT`] where KVM hangs.
pub fn doctor(places: &Places) -> Report {
    let (verdict, mut checks) = kvm::checks();
    let on_lab = matches!(verdict, Verdict::Lab(_));
    checks.push(resources::cpus());
    checks.push(resources::memory());
    checks.push(resources::thp());
    checks.push(resources::huge_pages());
    checks.push(resources::disk(&places.state));
    checks.push(resources::reflink(&places.state));
    checks.push(tools::io_uring());
    checks.push(tools::erofs());
    checks.push(tools::assets(&places.assets));
    checks.push(tools::lab(places.lab.as_deref(), &places.cache, on_lab));
    Report { verdict, checks }
}
