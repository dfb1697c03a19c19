//! Why a device cannot be bound, given back, or be a sandbox's: what is in the way, and the command that ends it.

use base::PciAddress;
use node_api::{DeviceState, ErrorKind};
use vfio::host::DeviceError;
use vfio::host::users::OpenFile;

/// An error of what is done with devices.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Of the host.
    #[error(transparent)]
    Host(#[from] DeviceError),
    /// A name of the Container Device Interface stands for nothing.
    #[error(transparent)]
    CdiName(#[from] cdi::Error),
    /// A name stands for what no sandbox can have.
    #[error("the device {name} ({path}) {why}")]
    Cdi {
        /// The name.
        name: String,
        /// Where it stands.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// It is not vfio-pci's.
    #[error("the device {0} is the host's: `basalt device bind {0}` takes it for sandboxes")]
    NotBound(PciAddress),
    /// A sandbox has it.
    #[error(
        "sandbox {sandbox} has the device {address}: take it back (`basalt device detach {sandbox} {address}`), or stop it first (`basalt stop \
         {sandbox}`)"
    )]
    InUse {
        /// The device.
        address: PciAddress,
        /// Whose it is.
        sandbox: String,
    },
    /// Somebody else has it.
    #[error(
        "a program that is no sandbox has the device {address} open by {}, and the kernel would wait for its end: {}",
        file.path.display(), to_end(file)
    )]
    Open {
        /// The device.
        address: PciAddress,
        /// By which file, and who has.
        file: OpenFile,
    },
    /// It has it.
    #[error("sandbox {sandbox} has the device {address} already")]
    HasAlready {
        /// The device.
        address: PciAddress,
        /// The sandbox's name.
        sandbox: String,
    },
    /// It does not.
    #[error("sandbox {sandbox} does not have the device {address}: `basalt device ls` shows who has it")]
    NotIts {
        /// The device.
        address: PciAddress,
        /// The sandbox's name.
        sandbox: String,
    },
    /// The guest has not plugged its memory.
    #[error(
        "the guest has plugged {plugged} MiB of {target} MiB within {limit:?}: see that its kernel has virtio-mem (`basalt logs --console`), or start \
         it without --memory-ready"
    )]
    NotPlugged {
        /// What it has.
        plugged: u64,
        /// What it was to have.
        target: u64,
        /// How long it was waited for.
        limit: std::time::Duration,
    },
    /// The VMM could not give it to its guest.
    #[error("the device {address} could not be given to the guest, and is not its any more: {why}")]
    NotGiven {
        /// The device.
        address: PciAddress,
        /// Why.
        why: String,
    },
    /// Mapping or unmapping takes too long.
    #[error(
        "{mapped} of {total} MiB of the guest's memory are mapped for the device after {limit:?}: see that the host has so much memory free, or run \
         a sandbox with less"
    )]
    Slow {
        /// MiB that are.
        mapped: u64,
        /// MiB in all.
        total: u64,
        /// How long was waited.
        limit: std::time::Duration,
    },
    /// The VMM does not close it.
    #[error(
        "the VMM has not closed {devices} within {limit:?}, and the sandbox has it still: `basalt device detach` again, or end the sandbox with \
         `basalt kill`"
    )]
    StaysOpen {
        /// The devices, apart by spaces.
        devices: String,
        /// How long was waited.
        limit: std::time::Duration,
    },
    /// Its guest does not let go of it.
    #[error(
        "the guest did not let go of the device {address} ({why}): end what uses it there, or take it away with `basalt device detach --force`"
    )]
    Held {
        /// The device.
        address: PciAddress,
        /// Why not.
        why: String,
    },
    /// It has devices, and what is asked cannot be done with them.
    #[error(
        "sandbox {sandbox} has devices of the host, whose state nobody can save ({devices}): add --detach-devices to have them detached for as \
         long as it takes, or take them from it first (`basalt device detach {sandbox} {devices}`)"
    )]
    Keeps {
        /// The devices, apart by spaces.
        devices: String,
        /// The sandbox's name.
        sandbox: String,
    },
    /// It was started with devices, and would go on without.
    #[error(
        "sandbox {0} is started with devices of the host, which a machine that goes on from a snapshot does not have: add --detach-devices to have \
         them attached behind it, or make a clone of the snapshot instead (`basalt clone`)"
    )]
    StartedWith(String),
    /// It is paused, and has devices.
    #[error(
        "sandbox {sandbox} is paused, and its devices cannot be detached as long as it is ({devices}): let it go on with `basalt unpause` first"
    )]
    HeldWhilePaused {
        /// The devices, apart by spaces.
        devices: String,
        /// The sandbox's name.
        sandbox: String,
    },
    /// What was asked is done, and devices that were detached for it could not be attached again.
    #[error(
        "{done}sandbox {sandbox} goes on without {devices}, which was detached and could not be attached again ({why}): see how it is (`basalt \
         device ls`), and attach it (`basalt device attach {sandbox} {devices}`)"
    )]
    NotReturned {
        /// What was done, where it was.
        done: String,
        /// The devices, apart by spaces.
        devices: String,
        /// The sandbox's name.
        sandbox: String,
        /// Why not.
        why: String,
    },
    /// What they were detached for has failed, and the sandbox has not come to rest.
    #[error(
        "the sandbox has not come to rest, and its devices are still detached: {devices}; they come back when it has, which is tried again, and at \
         once by `basalt device attach {sandbox} {devices}`; `basalt device ls` shows how they are"
    )]
    StillDetached {
        /// The devices, apart by spaces.
        devices: String,
        /// The sandbox's name.
        sandbox: String,
    },
    /// Nobody translates its guest's addresses.
    #[error(
        "the memory of sandbox {0} is not translated, and it can have no device of the host: run one with --memory-mode translated"
    )]
    Untranslated(String),
    /// Linux's VFIO refuses.
    #[error(transparent)]
    Vfio(vfio::VfioError),
    /// Something is under way with it, or was left on the way.
    #[error("the device {address} is {state}: try again in a moment; `basalt device ls` shows how it is")]
    Busy {
        /// The device.
        address: PciAddress,
        /// How it is.
        state: DeviceState,
    },
    /// It was not reset after a sandbox had it.
    #[error(
        "the device {address} is in quarantine, as it could not be reset after a sandbox had it ({why}): `basalt device unbind {address}` gives \
         it back to the host, and then it can be bound again"
    )]
    Quarantined {
        /// The device.
        address: PciAddress,
        /// Why not.
        why: String,
    },
    /// It could not be bound at this boot.
    #[error(
        "the device {address} is to be bound at each boot, and was not at this one ({why}): `basalt device bind {address}` tries again"
    )]
    Waiting {
        /// The device.
        address: PciAddress,
        /// Why not.
        why: String,
    },
    /// Others of its group are the host's.
    #[error(
        "no sandbox can have the device {address}: the IOMMU cannot tell it from {others} (group {group}), which the host uses; bind each of \
         them (`basalt device bind ADDRESS --force`)"
    )]
    NotViable {
        /// The device.
        address: PciAddress,
        /// Its group.
        group: u32,
        /// What is in the host's use, with the drivers.
        others: String,
    },
    /// Another of its group is not ready.
    #[error(
        "the device {address} goes to a sandbox only together with {other} of its IOMMU group {group}, which is {state}"
    )]
    GroupBusy {
        /// The device.
        address: PciAddress,
        /// Its group.
        group: u32,
        /// The other.
        other: PciAddress,
        /// How that is.
        state: DeviceState,
    },
    /// Virtual functions are bound.
    #[error(
        "the virtual functions of {physical} cannot be changed while {bound} is bound: `basalt device unbind {bound}` gives it back first"
    )]
    VfBound {
        /// The physical function.
        physical: PciAddress,
        /// The first of them that is.
        bound: PciAddress,
    },
    /// Virtual functions do not outlive a boot.
    #[error(
        "the device {0} is a virtual function, which is not there after a boot until somebody makes it: leave --persist out, or bind its \
         physical function"
    )]
    PersistentVf(PciAddress),
}

/// Which program to end.
fn to_end(file: &OpenFile) -> String {
    let users: Vec<_> = file
        .users
        .iter()
        .map(|user| format!("{} (process {})", user.name, user.process))
        .collect();
    match users.is_empty() {
        true => format!(
            "the daemon does not see which, as that is of another PID namespace: find it in the host with `fuser -v {}` and end it",
            file.path.display()
        ),
        false => format!("end {}", users.join(" and ")),
    }
}

impl Error {
    /// For machines.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Host(DeviceError::NotFound(_)) | Self::CdiName(cdi::Error::Unknown { .. }) => ErrorKind::NotFound,
            Self::Cdi { .. } => ErrorKind::Invalid,
            Self::Host(DeviceError::TooManyVfs { .. } | DeviceError::NoSrIov(_)) | Self::PersistentVf(_) => {
                ErrorKind::Invalid
            }
            Self::Host(_)
            | Self::NotViable { .. }
            | Self::NotGiven { .. }
            | Self::NotPlugged { .. }
            | Self::Slow { .. }
            | Self::StaysOpen { .. }
            | Self::NotReturned { .. }
            | Self::StillDetached { .. }
            | Self::Vfio(_) => ErrorKind::Host,
            Self::CdiName(cdi::Error::Twice { .. })
            | Self::HasAlready { .. }
            | Self::Held { .. }
            | Self::InUse { .. }
            | Self::Open { .. }
            | Self::VfBound { .. } => ErrorKind::Conflict,
            Self::NotIts { .. }
            | Self::Keeps { .. }
            | Self::StartedWith(_)
            | Self::HeldWhilePaused { .. }
            | Self::Untranslated(_)
            | Self::NotBound(_)
            | Self::Busy { .. }
            | Self::Quarantined { .. }
            | Self::Waiting { .. }
            | Self::GroupBusy { .. } => ErrorKind::WrongState,
        }
    }
}
