//! Memory that is filled ahead of being mapped: zeroing is most of what mapping costs, and needs no lock of the container's.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::mm::{Advice, madvise};
use rustix::process::setpriority_process;
use vfio::Piece;
use vm_memory::GuestRegionMmap;

/// Filled between two looks whether it is still wanted.
const STEP: u64 = 2 << 20;

/// How long one run is waited for that others fill: whoever maps it does so himself then, and is not held up by vCPUs that leave the fillers no
/// processor.
const PATIENCE: Duration = Duration::from_millis(300);

/// Between two looks whether what is being filled is still waited for.
const LOOK: Duration = Duration::from_millis(20);

/// How nice these threads are (setpriority(2)): beside a vCPU that wants the same processor one has a thirtieth of it. The least there is
/// would have whoever waits for one of them, or for a lock of the host's that it holds, wait for long.
const NICE: i32 = 15;

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

/// Threads that fill memory, which give way to whatever else runs in this process: vCPUs have the processors first. They end when this is
/// dropped.
pub struct Ahead {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Ahead {
    /// Begins to fill these runs of this memory, in their order, by so many threads; by none, they count as filled.
    ///
    /// # Errors
    /// No thread could be had.
    pub fn begin(runs: &[Piece], memory: Vec<Arc<GuestRegionMmap<()>>>, fillers: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            runs: runs.to_vec(),
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            filled: Mutex::new(vec![fillers == 0; runs.len()]),
            changed: Condvar::new(),
            _memory: memory,
        });
        let mut ahead = Self {
            shared,
            threads: Vec::new(),
        };
        for number in 0..fillers {
            let shared = Arc::clone(&ahead.shared);
            ahead
                .threads
                .push(base::thread::spawn(&format!("dma-zero{number}"), STACK, move || {
                    shared.fill()
                })?);
        }
        Ok(ahead)
    }

    /// Waits a while for a run to be filled; `false` if it is given up before that.
    pub fn wait_for(&self, index: usize, is_given_up: impl Fn() -> bool) -> bool {
        let mut filled = self.shared.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        while !filled.get(index).is_none_or(|filled| *filled) && begun.elapsed() < PATIENCE {
            if is_given_up() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(filled, LOOK);
            (filled, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        !is_given_up()
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
        if let Err(error) = setpriority_process(None, NICE) {
            log::debug!("filling memory does not give way to vCPUs: {error}");
        }
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
