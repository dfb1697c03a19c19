//! Memory that is filled ahead of being mapped: zeroing is most of what mapping costs, and needs no lock of the container's.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::mm::{Advice, madvise};
use vfio::Piece;
use vm_memory::GuestRegionMmap;

use super::DmaMemory;

/// Filled between two looks whether it is still wanted.
const STEP: u64 = 16 << 20;

const STACK: usize = 64 << 10;

struct Shared {
    runs: Vec<Piece>,
    next: AtomicUsize,
    stopped: AtomicBool,
    /// Which of them are filled.
    filled: Mutex<Vec<bool>>,
    changed: Condvar,
    // Their memory stays until the last thread has ended.
    _memory: Vec<Arc<GuestRegionMmap<()>>>,
}

/// Threads that fill memory. They end when this is dropped.
pub(super) struct Ahead {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Ahead {
    /// Begins to fill these runs, in their order.
    ///
    /// # Errors
    /// No thread could be had.
    pub(super) fn begin(runs: &[Piece], memory: &DmaMemory) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            runs: runs.to_vec(),
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            filled: Mutex::new(vec![memory.fillers == 0; runs.len()]),
            changed: Condvar::new(),
            _memory: memory.regions.clone(),
        });
        let mut ahead = Self {
            shared,
            threads: Vec::new(),
        };
        for number in 0..memory.fillers {
            let shared = Arc::clone(&ahead.shared);
            ahead
                .threads
                .push(base::thread::spawn(&format!("dma-zero{number}"), STACK, move || {
                    shared.fill()
                })?);
        }
        Ok(ahead)
    }

    /// Waits until a run is filled.
    pub(super) fn wait_for(&self, index: usize) {
        let mut filled = self.shared.filled.lock().unwrap_or_else(PoisonError::into_inner);
        while !filled[index] {
            filled = self.shared.changed.wait(filled).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a thread that fills memory panicked");
            }
        }
    }
}

impl Shared {
    fn fill(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(run) = self.runs.get(index) else { return };
            self.fill_run(run);
            let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
            filled[index] = true;
            self.changed.notify_all();
        }
    }

    /// It makes no difference to what is in the memory. What cannot be filled here is filled by whoever maps it, or refused there.
    fn fill_run(&self, run: &Piece) {
        let mut done = 0;
        while done < run.length && !self.stopped.load(Ordering::Relaxed) {
            let length = STEP.min(run.length - done);
            let at = (run.address + done) as *mut std::ffi::c_void;
            // SAFETY: 1. the range lies within a mapping that its region owns, which is kept; 2. the content of its pages stays what it is.
            let filled = unsafe { madvise(at, usize::try_from(length).unwrap_or(0), Advice::LinuxPopulateWrite) };
            if let Err(error) = filled {
                log::debug!("{length:#x} bytes are filled when they are mapped: {error}");
                return;
            }
            done += length;
        }
    }
}
