//! A snapshot: a machine that stands still as files, its state and its memory, and what a machine is restored from.
//! Knows no device, no engine but by its traits, and not who keeps the files.
//!
//! ```text
//!  Quiesced ── write ──▶ state: a container, one section a component      memory: sparse, pages as they were
//!               read  ◀── checked byte for byte                     ◀── mapped privately, known by some of its pages
//! ```
//! The memory of a machine that was restored itself can be written as one file more beside those that it was mapped from, with
//! what has changed since. The state is written last and says what the memory is like: a state file that is whole has whole
//! memory files.

mod memory_files;
mod sections;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use engine::{CpuModel, CpuidEntry, Engine, EngineError};
use machine::{Machine, MachineError, MachineState, Quiesced};
use memory::layout::MemorySize;
use memory::{Layer, MemoryError, Ram, Written};
use state::{Container, Fingerprint, StateError};

use crate::memory_files::MemoryFiles;

pub use memory::Layers;

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
    /// Another processor.
    #[error(
        "this host's CPU lacks {0}, which the snapshot's VM was shown: restore it on a host that has it, or take it of a VM with a CPU model \
         (--cpu-model) that both hosts have"
    )]
    Cpu(String),
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
    /// A machine's memory is mapped from other files than a snapshot's.
    #[error("the VM's memory is not mapped from this snapshot: restore another VM from it")]
    Elsewhere,
    /// Memory files are missing, or too many.
    #[error("the snapshot's memory is in {saved} files, {here} were given: give those that were written, in order")]
    Files {
        /// How many there were.
        saved: usize,
        /// How many there are.
        here: usize,
    },
}

/// What the host is on which snapshots are taken and restored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostTraits {
    /// What goes into a snapshot of it.
    pub fingerprint: Fingerprint,
    /// What its processor offers a guest.
    pub cpuid: Vec<CpuidEntry>,
    /// What stands for that in the fingerprint of a snapshot of this host that a former version has taken, whose hash had the host's own
    /// topology in it.
    pub former_cpuid: u64,
    /// Capabilities for which a vCPU's restore asks where it needs them.
    pub asked_by_vcpus: u64,
}

impl HostTraits {
    /// Whether a machine can go on here that was saved elsewhere. With a CPU model hosts may differ in what the guest was not shown
    /// and in their kernels; without one the guest has seen all there is, and everything has to be the same.
    fn check(&self, saved: &Fingerprint, machine: &MachineState) -> Result<(), SnapshotError> {
        let portable = machine.shape.cpu != CpuModel::Host;
        let mut saved = saved.clone();
        if saved.cpuid == self.former_cpuid {
            saved.cpuid = self.fingerprint.cpuid;
        }
        if portable || saved.cpuid != self.fingerprint.cpuid {
            let lacks = machine
                .vcpus
                .iter()
                .find_map(|vcpu| cpu::missing(&vcpu.cpuid, &self.cpuid));
            lacks.map_or(Ok(()), |lacks| Err(SnapshotError::Cpu(lacks)))?;
        }
        Ok(match portable {
            true => saved.check_portable(&self.fingerprint, self.asked_by_vcpus),
            false => saved.check(&self.fingerprint),
        }?)
    }
}

/// What this host, its engine and the program `vmm` are.
///
/// # Errors
/// The engine does not tell.
pub fn host_traits(engine: &dyn Engine, vmm: &str) -> Result<HostTraits, SnapshotError> {
    let traits = engine.traits()?;
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let fingerprint = Fingerprint {
        cpuid: cpu::hash(&traits.cpuid),
        capabilities: traits.capabilities,
        kernel,
        vmm: vmm.to_owned(),
    };
    Ok(HostTraits {
        fingerprint,
        cpuid: traits.cpuid,
        former_cpuid: traits.former_cpuid,
        asked_by_vcpus: traits.asked_by_vcpus,
    })
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> SnapshotError {
    move |source| SnapshotError::File { what, source }
}

/// Where a snapshot goes.
#[derive(Debug)]
pub struct Target {
    /// An empty file for the state.
    pub state: File,
    /// An empty file for the memory.
    pub memory: File,
    /// Files that lie beside it. If these are what the machine's memory was mapped from, only what has changed is written.
    pub base: Vec<File>,
}

/// Writes a machine that stands still; the files of its memory then, the one that was written last. `pagemap` is this process's
/// `/proc/self/pagemap`; without it all memory is read. What was written of a snapshot that failed is of no use to anybody.
///
/// # Errors
/// The machine cannot be saved, or the host refused.
pub fn write(
    machine: &Quiesced<'_>,
    fingerprint: Fingerprint,
    target: Target,
    pagemap: Option<&File>,
) -> Result<Layers, SnapshotError> {
    empty(&target.state)?;
    let saved = machine.save()?;
    let ram = machine.ram();
    let below = match ram.layers() {
        Some(layers) if same_files(layers, &target.base)? => Some(layers),
        _ => None,
    };
    let file = Arc::new(target.memory);
    let layers = match below {
        Some(below) => match ram.write_changes(&file, pagemap)? {
            Written::Changes(image, runs) => below.with(Layer { file, image }, &runs),
            Written::Whole(image) => Layers::single(file, image),
        },
        None => {
            let image = ram.write_image(&file, pagemap)?;
            Layers::single(file, image)
        }
    };
    store(
        &saved,
        &MemoryFiles::new(ram.sizes().all(), &layers),
        fingerprint,
        &target.state,
    )?;
    Ok(layers)
}

/// Whether these are the files of a memory.
fn same_files(layers: &Layers, files: &[File]) -> Result<bool, SnapshotError> {
    let identity = |file: &File| {
        let metadata = file.metadata().map_err(failed("compared"))?;
        Ok::<_, SnapshotError>((metadata.dev(), metadata.ino()))
    };
    if layers.files().len() != files.len() {
        return Ok(false);
    }
    for (layer, file) in layers.files().iter().zip(files) {
        if identity(&layer.file)? != identity(file)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn store(
    saved: &MachineState,
    memory: &MemoryFiles,
    fingerprint: Fingerprint,
    file: &File,
) -> Result<(), SnapshotError> {
    let bytes = contain(saved, memory, fingerprint)?.to_bytes()?;
    file.write_all_at(&bytes, 0).map_err(failed("written"))
}

fn contain(saved: &MachineState, memory: &MemoryFiles, fingerprint: Fingerprint) -> Result<Container, StateError> {
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
    let memory = MemoryFiles::without_content(saved.shape.memory_size().all());
    Ok(contain(saved, &memory, fingerprint)?)
}

fn empty(file: &File) -> Result<(), SnapshotError> {
    let metadata = file.metadata().map_err(failed("looked at"))?;
    if !metadata.is_file() || metadata.len() != 0 {
        return Err(SnapshotError::NotEmpty(metadata.len()));
    }
    Ok(())
}

/// Reads what [`write()`] wrote, on the host `here`: the machine's state, and what `memory_of` makes of its memory's files, which must
/// never change as long as there is such a machine.
///
/// # Errors
/// The files are no snapshot, damaged, not of one snapshot, or of another host.
pub fn read(
    state: &File,
    memory: Vec<File>,
    here: &HostTraits,
    memory_of: impl FnOnce(Layers, MemorySize) -> Result<Ram, MemoryError>,
) -> Result<(MachineState, Ram), SnapshotError> {
    let (saved, files) = read_state(state, here)?;
    let size = saved.shape.memory_size();
    if size.all() != files.size() {
        let (saved, here) = (size.all(), files.size());
        return Err(MachineError::OtherMemory { saved, here }.into());
    }
    let layers = files.layers(memory)?;
    layers.check_content(size)?;
    Ok((saved, memory_of(layers, size)?))
}

/// The same for a machine that is there, and whose memory is mapped from the very files that the snapshot consists of.
///
/// # Errors
/// The state is none, damaged or of another host, or the machine's memory is mapped from others: [`SnapshotError::Elsewhere`].
pub fn read_for(
    machine: &Machine,
    state: &File,
    memory: Vec<File>,
    here: &HostTraits,
) -> Result<MachineState, SnapshotError> {
    let (saved, files) = read_state(state, here)?;
    let layers = machine.layers().ok_or(SnapshotError::Elsewhere)?;
    let its = same_files(layers, &memory)? && files.layers(memory)?.segments() == layers.segments();
    its.then_some(saved).ok_or(SnapshotError::Elsewhere)
}

fn read_state(state: &File, here: &HostTraits) -> Result<(MachineState, MemoryFiles), SnapshotError> {
    let length = state.metadata().map_err(failed("looked at"))?.len();
    // One byte more than a snapshot can have is enough to be refused.
    let most = Container::max_bytes() as u64 + 1;
    let mut bytes = vec![0; usize::try_from(length.min(most)).unwrap_or(0)];
    state.read_exact_at(&mut bytes, 0).map_err(failed("read"))?;
    parse(&bytes, Some(here))
}

fn parse(bytes: &[u8], here: Option<&HostTraits>) -> Result<(MachineState, MemoryFiles), SnapshotError> {
    let mut container = Container::parse(bytes)?;
    let fingerprint = container.fingerprint.clone();
    if let Some(here) = here {
        // Another VMM may write its sections otherwise.
        fingerprint.check_vmm(&here.fingerprint)?;
    }
    let file = container.take(sections::MEMORY)?;
    let saved = sections::take(&mut container)?;
    container.finish()?;
    here.map_or(Ok(()), |here| here.check(&fingerprint, &saved))?;
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
