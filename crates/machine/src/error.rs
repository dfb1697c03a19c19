//! Why a machine could not be built, moved or changed: each with what to do.

use std::time::Duration;

use base::ByteSize;
use boot::BootError;
use bus::BusError;
use device::CreateError;
use engine::EngineError;
use memory::MemoryError;
use pci::PciError;
use virtio::{DeviceError, TransportError};

/// Why a machine could not be built or moved.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Guest memory could not be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The guest could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Two platform devices overlap; a bug.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// A device could not be put on the PCI bus.
    #[error("device `{id}`: {source}")]
    Pci {
        /// Its name.
        id: String,
        /// Why.
        source: PciError,
    },
    /// A device could not be given its transport.
    #[error("device `{id}`: {source}")]
    Transport {
        /// Its name.
        id: String,
        /// Why.
        source: TransportError,
    },
    /// A function of the host's has no saved form.
    #[error("device `{0}` is the host's, and what is in it cannot be saved: run a guest without it")]
    NotToBeSaved(String),
    /// Its memory is nowhere else.
    #[error(
        "the guest's memory is where the host's bus has it, and goes on nowhere else: run a guest with the memory mode `translated`"
    )]
    IdentityMemory,
    /// What its vCPU's thread does, or not, is not what its guest does.
    #[error(
        "the VM is frozen or about to be: its clients run it, and it can neither be paused nor saved nor changed; end it, and start another"
    )]
    Frozen,
    /// A function would come to a guest that sees nothing come.
    #[error("PCI functions of the host's come to the VM or leave it just now: try again in a moment")]
    FunctionsComing,
    /// It was frozen otherwise.
    #[error(
        "the VM was frozen with a budget of {has:?}, which cannot become {budget:?}: ask with that one, or freeze another"
    )]
    OtherBudget {
        /// Its own.
        has: Duration,
        /// What was asked for.
        budget: Duration,
    },
    /// One that serves has no links: its vCPU loses them when it is frozen.
    #[error("the VM is frozen or about to be, and a server enters no other: link others to it, or end it")]
    ServerLinks,
    /// A server is one vCPU.
    #[error("a VM of {0} vCPUs cannot be frozen: run a server with one vCPU")]
    ServerVcpus(usize),
    /// Nobody translates its guest's addresses.
    #[error(
        "a VM whose memory is not translated can neither be frozen nor enter a frozen one: run it with the memory mode `translated`"
    )]
    IdentityServer,
    /// What it has of a server is nowhere else.
    #[error("the VM is linked to a server, and can neither be saved nor frozen with that: end its links")]
    Linked,
    /// It has a server of that number.
    #[error("the VM is linked to a server by the number {0} already: end that link, or take another number")]
    LinkTaken(u32),
    /// It has none of that number.
    #[error("the VM has no link of the number {0}")]
    NoLink(u32),
    /// A function of the host's could not be given to the guest.
    #[error("device `{id}`: {source}")]
    Function {
        /// Its name.
        id: String,
        /// Why.
        source: CreateError,
    },
    /// It has one of that name.
    #[error("the VM has a PCI function `{0}` of the host's already: detach it first, or choose another name")]
    FunctionTaken(String),
    /// It has none of that name.
    #[error("the VM has no PCI function `{0}` of the host's")]
    NoFunction(String),
    /// What was mapped for those that were detached is not unmapped yet.
    #[error("the mapping of memory for a PCI function that was detached has not ended: try again in a moment")]
    FunctionsLeave,
    /// A device could not go on.
    #[error("device `{id}`: {source}")]
    Device {
        /// Its name.
        id: String,
        /// Why.
        source: DeviceError,
    },
    /// A vCPU has ended without having been saved.
    #[error("a vCPU has failed and cannot be saved: end the VM")]
    VcpuGone,
    /// The saved state of a part makes no sense.
    #[error("the saved state of {what} cannot be used ({source}): it is damaged; take it anew")]
    Damaged {
        /// Which part.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The saved vCPUs make no sense.
    #[error("the saved state has {0} vCPUs that do not make up a machine: it is damaged; take it anew")]
    Vcpus(usize),
    /// Its memory is pinned from its boot on.
    #[error(
        "memory of a guest that owns its CPUs is pinned from its boot on, and none of it can be plugged: leave the device that plugs memory out, or its reservation"
    )]
    PinnedMemory,
    /// Functions reach all that a guest has, and do not reach these.
    #[error(
        "a PCI function of the host's cannot be given to a guest that has files as memory (pmem), as it does not reach these: leave out one of both"
    )]
    FunctionsAndPmem,
    /// There is no room for them, or nobody translates the guest's addresses.
    #[error("the VM cannot have files as memory (pmem): {0}")]
    NoPmem(&'static str),
    /// Memory that came zeroed would be lost, or somebody go on with the pages that it takes the place of.
    #[error("the VM cannot use memory that comes zeroed, as {0}: leave it to the host to zero it here")]
    NoZeroedMemory(&'static str),
    /// Saved with another amount of memory.
    #[error("{saved} of memory were saved, there are {here}: give the memory file that was written with the state")]
    OtherMemory {
        /// How much was saved.
        saved: ByteSize,
        /// How much there is.
        here: ByteSize,
    },
    /// Saved with other devices.
    #[error(
        "the machine was saved with the devices `{saved}`, and is to be restored with `{here}`: give the same ones, in that order"
    )]
    OtherDevices {
        /// Their names then.
        saved: String,
        /// Their names now.
        here: String,
    },
    /// The host refused a thread or a descriptor.
    #[error("the host refused {what}: {source}")]
    Host {
        /// What was asked for.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}
