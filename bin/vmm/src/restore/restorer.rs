//! What the host's kernel takes long for when a VM is restored, done by a thread beside the one that reads the state and makes devices:
//! the VM itself, copies of the pages that its guest will write soon, and their place in the guest's second stage of translation. Knows
//! nothing of what is restored.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use engine::{CpuModel, Engine, EngineError, Vm};
use engine_kvm::KvmEngine;
use memory::Ram;
use vmm_api::PageRuns;

/// Of the thread.
const NAME: &str = "restorer";
const STACK: usize = 128 << 10;

/// What of a memory is to be there before anybody touches it.
pub(crate) struct Prefetch {
    pub(crate) ram: Ram,
    /// Pages of its own.
    pub(crate) write_set: PageRuns,
    /// Everything else that has content, too.
    pub(crate) all: bool,
}

/// The thread, which makes a VM at once.
pub(crate) struct Restorer {
    made: Receiver<Result<Arc<dyn Vm>, EngineError>>,
    memory: SyncSender<Prefetch>,
    has_memory: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl Restorer {
    /// # Errors
    /// There is no thread to be had.
    pub(crate) fn start(engine: &KvmEngine) -> io::Result<Self> {
        let (made, from_thread) = sync_channel(1);
        let (memory, to_copy) = sync_channel::<Prefetch>(1);
        let (has_memory, vm_has_memory) = sync_channel(1);
        let engine = engine.clone();
        let body = move || {
            let vm = match engine.create_vm(CpuModel::Host) {
                Ok(vm) => vm,
                // Whoever wants it is told.
                Err(error) => return drop(made.send(Err(error))),
            };
            drop(made.send(Ok(Arc::clone(&vm))));
            let Ok(Prefetch { ram, write_set, all }) = to_copy.recv() else {
                return;
            };
            ram.populate_write(&write_set);
            if all {
                ram.populate_read();
            }
            if vm_has_memory.recv().is_ok() {
                machine::map_ahead(vm.as_ref(), &ram, &write_set);
            }
        };
        Ok(Self {
            made: from_thread,
            memory,
            has_memory,
            thread: base::thread::spawn(NAME, STACK, body)?,
        })
    }

    /// The VM, when it is made.
    ///
    /// # Errors
    /// It cannot be made, or was taken before.
    pub(crate) fn vm(&self) -> Result<Arc<dyn Vm>, EngineError> {
        let gone = |_| EngineError::Call {
            call: "KVM_CREATE_VM",
            source: io::Error::other("the thread that makes it is gone, or it was taken before"),
        };
        self.made.recv().map_err(gone)?
    }

    /// Has pages copied and read, beside whatever follows.
    pub(crate) fn prepare(&self, ahead: Prefetch) {
        // A thread that is over has made no VM, which whoever takes that learns.
        drop(self.memory.send(ahead));
    }

    /// Tells that the VM has its memory and vCPU 0, whose guest does not run yet: what was copied can be mapped for it.
    pub(crate) fn has_memory(&self) {
        // A thread that is over waits for nothing.
        self.has_memory.send(()).unwrap_or_default();
    }

    /// Waits until nothing is done beside any more.
    pub(crate) fn finish(self) {
        drop((self.memory, self.has_memory));
        if let Err(panic) = self.thread.join() {
            std::panic::resume_unwind(panic);
        }
    }
}
