//! A snapshot: a machine that stands still as two files, its state and its memory, and what a machine is restored from.
//! Knows no device, no engine but by its traits, and not who keeps the files.
//!
//! ```text
//!  Quiesced ── write ──▶ state: a container, one section a component      memory: sparse, pages as they were
//!               read  ◀── checked byte for byte                     ◀── mapped privately, known by some of its pages
//! ```
//! The state is written last and says what the memory is like: a state file that is whole has a whole memory file.

mod sections;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use base::ByteSize;
use engine::{Engine, EngineError};
use machine::{MachineError, MachineState, Quiesced};
use memory::{Image, MemoryError, Ram, Witness};
use serde::{Deserialize, Serialize};
use state::{Container, Fingerprint, Schema, StateError};

/// Why a snapshot cannot be taken or restored.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The state cannot be written or used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The memory cannot be written or used.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The machine cannot be saved.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The host does not tell what it is.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The state's file could not be read or written.
    #[error("the state file cannot be {what}: {source}")]
    File {
        /// What was to be done with it.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// States are written to empty files only.
    #[error("the state file is no empty regular file ({0} bytes): give one")]
    NotEmpty(u64),
}

/// What the state says of the memory file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct MemoryFile {
    bytes: u64,
    /// Pages with content.
    pages: u64,
    /// Page numbers and CRC-32 of some of them.
    witnesses: Vec<(u64, u32)>,
}

impl Schema for MemoryFile {
    const KIND: &'static str = "memory-file";
    const VERSION: u32 = 1;
}

impl MemoryFile {
    fn new(ram: &Ram, image: &Image) -> Self {
        let witnesses = image.witnesses.iter();
        Self {
            bytes: ram.size().bytes(),
            pages: image.pages,
            witnesses: witnesses.map(|witness| (witness.page, witness.checksum)).collect(),
        }
    }

    fn image(&self) -> Image {
        let witnesses = self.witnesses.iter();
        Image {
            pages: self.pages,
            witnesses: witnesses.map(|&(page, checksum)| Witness { page, checksum }).collect(),
        }
    }
}

/// What this host, its engine and the program `vmm` are.
///
/// # Errors
/// The engine does not tell.
pub fn fingerprint(engine: &dyn Engine, vmm: &str) -> Result<Fingerprint, SnapshotError> {
    let traits = engine.traits()?;
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    Ok(Fingerprint {
        cpuid: traits.cpuid,
        capabilities: traits.capabilities,
        kernel,
        vmm: vmm.to_owned(),
    })
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> SnapshotError {
    move |source| SnapshotError::File { what, source }
}

/// Writes a machine that stands still to two empty files. `pagemap` is this process's `/proc/self/pagemap`; without it all
/// memory is read. What was written of a snapshot that failed is of no use to anybody.
///
/// # Errors
/// The machine cannot be saved, or the host refused.
pub fn write(
    machine: &Quiesced<'_>,
    fingerprint: Fingerprint,
    state: &File,
    memory: &File,
    pagemap: Option<&File>,
) -> Result<(), SnapshotError> {
    empty(state)?;
    let saved = machine.save()?;
    let image = machine.ram().write_image(memory, pagemap)?;
    store(&saved, &MemoryFile::new(machine.ram(), &image), fingerprint, state)
}

fn store(
    saved: &MachineState,
    memory: &MemoryFile,
    fingerprint: Fingerprint,
    file: &File,
) -> Result<(), SnapshotError> {
    let bytes = contain(saved, memory, fingerprint)?.to_bytes()?;
    file.write_all_at(&bytes, 0).map_err(failed("written"))
}

fn contain(saved: &MachineState, memory: &MemoryFile, fingerprint: Fingerprint) -> Result<Container, StateError> {
    let mut container = Container::new(fingerprint);
    container.put(sections::MEMORY, memory)?;
    sections::put(saved, &mut container)?;
    Ok(container)
}

/// A state as its file has it, of a machine with nothing in its memory: for tools that make files.
///
/// # Errors
/// It has no form in a file.
pub fn to_container(saved: &MachineState, fingerprint: Fingerprint) -> Result<Container, SnapshotError> {
    let memory = MemoryFile {
        bytes: saved.shape.memory,
        ..MemoryFile::default()
    };
    Ok(contain(saved, &memory, fingerprint)?)
}

fn empty(file: &File) -> Result<(), SnapshotError> {
    let metadata = file.metadata().map_err(failed("looked at"))?;
    if !metadata.is_file() || metadata.len() != 0 {
        return Err(SnapshotError::NotEmpty(metadata.len()));
    }
    Ok(())
}

/// Reads what [`write`] wrote, on a host with the fingerprint `here`: the machine's state, and its memory mapped privately
/// from the file, which must never change as long as there is such a machine.
///
/// # Errors
/// The files are no snapshot, damaged, not of one snapshot, or of another host.
pub fn read(state: &File, memory: File, here: &Fingerprint) -> Result<(MachineState, Ram), SnapshotError> {
    let length = state.metadata().map_err(failed("looked at"))?.len();
    // One byte more than a snapshot can have is enough to be refused.
    let most = Container::max_bytes() as u64 + 1;
    let mut bytes = vec![0; usize::try_from(length.min(most)).unwrap_or(0)];
    state.read_exact_at(&mut bytes, 0).map_err(failed("read"))?;
    let (saved, file) = parse(&bytes, Some(here))?;
    let ram = Ram::from_image(memory, ByteSize(file.bytes))?;
    ram.check_image(&file.image())?;
    Ok((saved, ram))
}

fn parse(bytes: &[u8], here: Option<&Fingerprint>) -> Result<(MachineState, MemoryFile), SnapshotError> {
    let mut container = Container::parse(bytes)?;
    if let Some(here) = here {
        container.fingerprint.check(here)?;
    }
    let file = container.take(sections::MEMORY)?;
    let saved = sections::take(&mut container)?;
    container.finish()?;
    Ok((saved, file))
}

/// Reads the state alone, whatever host it is of: for looking at files.
///
/// # Errors
/// They are no state of a machine.
pub fn parse_state(bytes: &[u8]) -> Result<MachineState, SnapshotError> {
    Ok(parse(bytes, None)?.0)
}

#[cfg(test)]
mod tests;
