//! What a driver is told of a request that was not carried out: by whom the reason concerns, and in whose words.

use engine::EngineError;
use machine::MachineError;
use memory::MemoryError;
use snapshot::SnapshotError;
use vmm_api::{ApiError, ErrorKind};

/// A refusal.
pub(crate) fn refuse(kind: ErrorKind, message: impl std::fmt::Display) -> ApiError {
    ApiError {
        kind,
        message: message.to_string(),
    }
}

/// Sorts a machine's errors by whom they concern.
pub(crate) fn from_machine(error: &MachineError) -> ApiError {
    let kind = match error {
        MachineError::Boot(_) => ErrorKind::Boot,
        MachineError::Engine(EngineError::State(_))
        | MachineError::Pci { .. }
        | MachineError::Transport { .. }
        | MachineError::Damaged { .. }
        | MachineError::Vcpus(_)
        | MachineError::NotToBeSaved(_)
        | MachineError::ServerVcpus(_)
        | MachineError::IdentityServer
        | MachineError::LinkTaken(_)
        | MachineError::NoLink(_)
        | MachineError::IdentityMemory
        | MachineError::PinnedMemory
        | MachineError::FunctionsAndPmem
        | MachineError::NoPmem(_)
        | MachineError::OtherMemory { .. }
        | MachineError::FunctionTaken(_)
        | MachineError::NoFunction(_)
        | MachineError::Memory(MemoryError::ZeroedFile(_))
        | MachineError::OtherDevices { .. } => ErrorKind::Invalid,
        MachineError::FunctionsLeave
        | MachineError::NoZeroedMemory(_)
        | MachineError::Frozen
        | MachineError::FunctionsComing
        | MachineError::OtherBudget { .. }
        | MachineError::ServerLinks
        | MachineError::Linked => ErrorKind::WrongState,
        MachineError::Engine(_)
        | MachineError::Memory(_)
        | MachineError::Function { .. }
        | MachineError::Host { .. } => ErrorKind::Host,
        MachineError::Bus(_) | MachineError::Device { .. } | MachineError::VcpuGone => ErrorKind::Internal,
    };
    refuse(kind, error)
}

/// The same for a snapshot.
pub(crate) fn from_snapshot(error: &SnapshotError) -> ApiError {
    let kind = match error {
        SnapshotError::Machine(error) => return from_machine(error),
        // No file's fault.
        SnapshotError::Memory(MemoryError::Map { .. } | MemoryError::Userfault { .. } | MemoryError::Pager { .. }) => {
            ErrorKind::Host
        }
        SnapshotError::State(_)
        | SnapshotError::Memory(_)
        | SnapshotError::Cpu(_)
        | SnapshotError::NotEmpty(_)
        | SnapshotError::Files { .. } => ErrorKind::Invalid,
        SnapshotError::Elsewhere => ErrorKind::WrongState,
        SnapshotError::Engine(_) | SnapshotError::File { .. } => ErrorKind::Host,
    };
    refuse(kind, error)
}
