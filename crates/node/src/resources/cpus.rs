//! CPUs that sandboxes own: taken before their VMM is there, given back when it is gone; and those that an operator keeps free for
//! them. Does not know how a CPU is kept free, nor what an engine does with it.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use base::CpuSet;
use host::cgroup::{Cgroup, Root};
use host::isolation::{self, Isolation, Owner, Refused, Use};
use node_api::{Class, CpuUse, HostCpu};
use observe::span::span;
use reservation::{Device, Reservation, ReservationError};

use crate::error::words::with_causes;
use crate::sandbox::registry::Sandboxes;
use crate::store::database::Stored;

/// What taking them is called in a trace.
const SPAN: &str = "CPUs";

/// CPUs cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Of basalt.ko.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    /// Of the host.
    #[error(transparent)]
    Isolation(#[from] isolation::Error),
    /// Nothing keeps tasks off them.
    #[error("CPUs cannot be kept free for a sandbox without cgroups: mount cgroup v2, and start basaltd as root")]
    NoCgroups,
}

/// The host's CPUs, of which sandboxes own some.
pub(crate) trait OwnedCpus: fmt::Debug + Send + Sync {
    /// Makes the CPUs of a sandbox's cgroup what its class wants; the cgroup in which its VMM begins.
    fn cgroup_of_vmm(&self, stored: &Stored, cgroup: &Cgroup) -> Result<PathBuf, Error>;

    /// Reserves a sandbox's CPUs. They are its VMM's alone once that has the descriptor, and Linux's again when the VMM ends, however it
    /// does.
    fn reserve(&self, stored: &Stored) -> Result<OwnedFd, Error>;

    /// Takes the threads of a VMM's vCPUs to their CPUs, within `limit`; they are there, and run nothing yet. Only a dedicated sandbox has
    /// such CPUs.
    fn place_vcpus(&self, stored: &Stored, cgroup: &Cgroup, pid: u32, limit: Duration) -> Result<(), Error>;

    /// A sandbox's CPUs are the host's again. It is fine if it had none. What cannot be put back now is tried again by whatever takes
    /// or releases CPUs next; the sandbox has ended all the same.
    fn release(&self, sandbox: &str);

    /// Gives back what a daemon, or a sandbox without one, has left.
    fn sweep(&self);
}

/// Those of this host.
#[derive(Debug)]
pub(crate) struct OfHost;

impl OwnedCpus for OfHost {
    fn cgroup_of_vmm(&self, stored: &Stored, cgroup: &Cgroup) -> Result<PathBuf, Error> {
        cgroup_of_vmm(stored, cgroup)
    }

    fn reserve(&self, stored: &Stored) -> Result<OwnedFd, Error> {
        reserve(stored).map(OwnedFd::from)
    }

    fn place_vcpus(&self, stored: &Stored, cgroup: &Cgroup, pid: u32, limit: Duration) -> Result<(), Error> {
        Ok(isolation::place(cgroup.path(), pid, count(stored), limit)?)
    }

    fn release(&self, sandbox: &str) {
        if let Err(error) = Isolation::of_host().release(sandbox) {
            log::error!(
                "what sandbox {sandbox} owned is not all the host's again, until CPUs are taken or released next: {}",
                with_causes(&error)
            );
        }
    }

    fn sweep(&self) {
        if let Err(error) = Isolation::of_host().sweep() {
            log::warn!(
                "CPUs that sandboxes owned that are gone stay as they are: {}",
                with_causes(&error)
            );
        }
    }
}

fn cgroup_of_vmm(stored: &Stored, cgroup: &Cgroup) -> Result<PathBuf, Error> {
    if stored.sandbox.config.resources.class != Class::Dedicated {
        Isolation::of_host().admit(cgroup.path())?;
        return Ok(cgroup.path().to_owned());
    }
    let _span = span(SPAN);
    let owner = Owner::new(&stored.sandbox.id, cgroup.path());
    let cpus = Isolation::of_host().dedicate(&owner, count(stored))?;
    log::info!("CPUs {cpus} are sandbox {}'s", owner.sandbox);
    Ok(cgroup.path().join(isolation::CONTROL))
}

fn reserve(stored: &Stored) -> Result<Reservation, Error> {
    let _span = span(SPAN);
    let device = Device::open(Device::PATH)?;
    let reserve = |cpus: &CpuSet| {
        let cpus: Vec<u32> = cpus.iter().collect();
        device.reserve(&cpus).map_err(|error| match &error {
            ReservationError::Cpu { cpu, .. } => Refused::Cpu(*cpu, error),
            _ => Refused::All(error),
        })
    };
    Ok(Isolation::of_host().reserve(&stored.sandbox.id, count(stored), reserve)??)
}

fn count(stored: &Stored) -> usize {
    usize::try_from(stored.sandbox.config.resources.cpus).unwrap_or(usize::MAX)
}

/// What a sandbox owns now; nothing where the host does not tell, which a log says.
pub(crate) fn owned_by(sandbox: &str) -> CpuSet {
    let cpus = Isolation::of_host().cpus();
    let cpus = cpus.inspect_err(|error| {
        log::warn!(
            "cannot find out which CPUs sandbox {sandbox} owns: {}",
            with_causes(error)
        )
    });
    let own = cpus.unwrap_or_default().into_iter();
    own.filter(|cpu| cpu.sandbox.as_deref() == Some(sandbox))
        .map(|cpu| cpu.number)
        .collect()
}

/// The host's CPUs, and who has them.
pub(crate) fn list(sandboxes: &Sandboxes) -> Result<Vec<HostCpu>, Error> {
    let names = sandboxes.list();
    let told = |cpu: isolation::Cpu| HostCpu {
        name: cpu.sandbox.as_ref().and_then(|id| {
            let sandbox = names.iter().find(|sandbox| sandbox.id == *id)?;
            Some(sandbox.name.clone())
        }),
        number: cpu.number,
        node: cpu.node,
        used: used(cpu.used),
        sandbox: cpu.sandbox,
        tickless: cpu.tickless,
    };
    Ok(Isolation::of_host().cpus()?.into_iter().map(told).collect())
}

/// Keeps CPUs free for sandboxes that will own them, which needs `cgroups`.
pub(crate) fn isolate(cpus: &CpuSet, cgroups: Option<&Root>) -> Result<(), Error> {
    if cgroups.is_none() {
        return Err(Error::NoCgroups);
    }
    Ok(Isolation::of_host().isolate(cpus)?)
}

/// Gives these back to everything, or all that are kept free; which.
pub(crate) fn give_back(cpus: Option<&CpuSet>) -> Result<CpuSet, Error> {
    Ok(Isolation::of_host().give_back(cpus)?)
}

fn used(used: Use) -> CpuUse {
    match used {
        Use::Shared => CpuUse::Shared,
        Use::Isolated => CpuUse::Isolated,
        Use::Dedicated => CpuUse::Dedicated,
        Use::Bare => CpuUse::Bare,
        Use::Offline => CpuUse::Offline,
    }
}
