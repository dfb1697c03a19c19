//! What is done for a restore before anybody has asked for it: a VM is made, and the snapshot's files that were inherited are read and
//! mapped, while the driver makes disk, network and sockets. A `restore` of other files, or of another engine, finds nothing here.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use engine_kvm::KvmEngine;
use machine::MachineState;
use memory::Ram;
use observe::marks;
use snapshot::SnapshotError;

use super::restorer::Restorer;
use crate::vm::VMM_VERSION;

/// Both, as long as there has been no `create` and no `restore`.
#[derive(Default)]
pub(crate) struct Ahead {
    pub(super) restorer: Option<Restorer>,
    pub(super) snapshot: Option<Read>,
}

/// The files of a snapshot whose memory is mapped.
pub(crate) struct Files {
    pub(crate) state: File,
    /// The lowest first.
    pub(crate) memory: Vec<File>,
}

/// What was in them.
pub(super) struct Read {
    of: Vec<(u64, u64)>,
    pub(super) state: MachineState,
    pub(super) ram: Ram,
}

impl Ahead {
    /// Begins; what does not succeed, `restore` does again and says why.
    pub(crate) fn begin(engine: &KvmEngine, files: Option<Files>) -> Self {
        let restorer = Restorer::start(engine)
            .inspect_err(|error| log::warn!("no VM is made ahead: {error}"))
            .ok();
        let read = files.map(|files| Read::new(engine, files)).transpose();
        let snapshot = read
            .inspect_err(|error| log::warn!("no snapshot is read ahead: {error}"))
            .unwrap_or_default();
        Self { restorer, snapshot }
    }
}

impl Read {
    fn new(engine: &KvmEngine, files: Files) -> Result<Self, SnapshotError> {
        let of = identities(&files.state, &files.memory).map_err(|source| SnapshotError::File {
            what: "looked at",
            source,
        })?;
        let here = snapshot::host_traits(engine, VMM_VERSION)?;
        let (state, ram) = snapshot::read(&files.state, files.memory, &here, Ram::from_layers)?;
        marks::mark("snapshot read ahead");
        Ok(Self { of, state, ram })
    }

    /// Whether these are the files. What a snapshot consists of never changes.
    pub(super) fn is_of(&self, state: &File, memory: &[File]) -> bool {
        identities(state, memory).is_ok_and(|files| files == self.of)
    }
}

/// Device and inode of each.
fn identities(state: &File, memory: &[File]) -> io::Result<Vec<(u64, u64)>> {
    let identity = |file: &File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
    std::iter::once(state).chain(memory).map(identity).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_what_they_are_and_in_their_order() {
        let files: Vec<File> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let of = |order: [usize; 3]| {
            let [state, memory @ ..] = order.map(|index| files[index].try_clone().unwrap());
            identities(&state, &memory).unwrap()
        };
        assert_eq!(of([0, 1, 2]), of([0, 1, 2]));
        assert_ne!(of([0, 1, 2]), of([0, 2, 1]));
        assert_ne!(of([0, 1, 2]), of([1, 0, 2]));
    }
}
