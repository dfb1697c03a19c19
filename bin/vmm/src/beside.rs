//! What the host's kernel takes long for when a VM is restored, done by a thread beside the one that reads the state and makes devices:
//! the VM itself, and copies of the pages that its guest will write soon. Knows nothing of what is restored.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use engine::{CpuModel, Engine, EngineError, Vm};
use memory::Ram;
use observe::marks;
use vmm_api::PageRuns;

/// Of the thread.
const NAME: &str = "restorer";
const STACK: usize = 128 << 10;

/// The thread's work, as seen from the other.
pub(crate) struct Beside {
    made: Receiver<Result<Arc<dyn Vm>, EngineError>>,
    memory: SyncSender<Ram>,
}

impl Beside {
    /// The VM that was made; one time.
    pub(crate) fn vm(&self) -> io::Result<Result<Arc<dyn Vm>, EngineError>> {
        self.made.recv().map_err(|_| io::Error::other("the VM was made before"))
    }

    /// Has the write set copied in this memory, beside whatever follows.
    pub(crate) fn copy_ahead(&self, ram: &Ram) {
        // It waits for this, unless there is no VM, which is an error already.
        drop(self.memory.send(ram.clone()));
    }
}

/// Does `work` beside the thread; both are over when it returns.
///
/// # Errors
/// There is no thread to be had.
pub(crate) fn restore_beside<T>(
    engine: &(dyn Engine + Sync),
    write_set: &PageRuns,
    work: impl FnOnce(&Beside) -> T,
) -> io::Result<T> {
    let (made, from_thread) = sync_channel(1);
    let (memory, to_copy) = sync_channel::<Ram>(1);
    std::thread::scope(|scope| {
        let body = move || {
            // Whoever asked is waiting for it, or has failed.
            drop(made.send(engine.create_vm(CpuModel::Host)));
            marks::mark("VM made");
            if let Ok(ram) = to_copy.recv() {
                ram.copy_ahead(write_set);
                marks::mark("write set copied");
            }
        };
        base::thread::spawn_scoped(scope, NAME, STACK, body)?;
        let beside = Beside {
            made: from_thread,
            memory,
        };
        let done = work(&beside);
        // Without memory there is nothing to copy.
        drop(beside);
        Ok(done)
    })
}
