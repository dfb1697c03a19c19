//! Memory that is filled ahead of being mapped: zeroing is most of what mapping costs, and needs no lock of the container's.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::mm::{Advice, madvise};
use rustix::process::setpriority_process;
use vfio::Piece;
use vm_memory::GuestRegionMmap;

use super::fill::FillPolicy;

/// Filled between two looks whether it is still wanted.
const STEP: u64 = 2 << 20;

/// How long one run is waited for that others fill: whoever maps it does so himself then, and is not held up by vCPUs that leave the fillers no
/// processor. Time in which one of them waits because of its rate does not count.
const PATIENCE: Duration = Duration::from_millis(300);

/// Between two looks whether what is being filled is still waited for.
const LOOK: Duration = Duration::from_millis(20);

/// How nice these threads are (setpriority(2)): beside a vCPU that wants the same processor one has a thirtieth of it. The least there is
/// would have whoever waits for one of them, or for a lock of the host's that it holds, wait for long.
const NICE: i32 = 15;

const STACK: usize = 64 << 10;

/// The log has it that no memory comes from the node that it was to come from: once, whatever number of threads there is.
static NODE_REFUSED: AtomicBool = AtomicBool::new(false);

/// What is to be filled.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) piece: Piece,
    /// There is nothing to zero, only to map, which no rate need limit.
    pub(super) is_zeroed: bool,
}

/// Nothing is known of it.
impl From<Piece> for Run {
    fn from(piece: Piece) -> Self {
        Self {
            piece,
            is_zeroed: false,
        }
    }
}

struct Shared {
    runs: Vec<Run>,
    next: AtomicUsize,
    stopped: AtomicBool,
    policy: FillPolicy,
    state: Mutex<State>,
    /// A run is filled, or it is stopped.
    changed: Condvar,
    // Their memory stays until the last thread has ended.
    _memory: Vec<Arc<GuestRegionMmap<()>>>,
}

struct State {
    /// Which runs are filled.
    filled: Vec<bool>,
    /// How many threads wait because of their rate, and how often one has begun to.
    waiting: usize,
    waits: u64,
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
    pub(super) fn begin(
        runs: Vec<Run>,
        memory: Vec<Arc<GuestRegionMmap<()>>>,
        fillers: usize,
        policy: &FillPolicy,
    ) -> io::Result<Self> {
        let count = runs.len();
        let shared = Arc::new(Shared {
            runs,
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            policy: policy.clone(),
            state: Mutex::new(State {
                filled: vec![fillers == 0; count],
                waiting: 0,
                waits: 0,
            }),
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
        let mut state = self.shared.state();
        let (mut begun, mut waits) = (Instant::now(), state.waits);
        while !state.filled.get(index).is_none_or(|filled| *filled) && begun.elapsed() < PATIENCE {
            if is_given_up() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(state, LOOK);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if state.waiting > 0 || state.waits != waits {
                (begun, waits) = (Instant::now(), state.waits);
            }
        }
        !is_given_up()
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        {
            // Under the lock, so that whoever is about to wait sees it.
            let _state = self.shared.state();
            self.shared.stopped.store(true, Ordering::Relaxed);
        }
        self.shared.changed.notify_all();
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
        if let Err(error) = self.policy.prefer_node()
            && !NODE_REFUSED.swap(true, Ordering::Relaxed)
        {
            log::warn!("memory is not filled near to the devices that reach it: {error}");
        }
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(run) = self.runs.get(index) else { return };
            self.fill_run(*run);
            self.state().filled[index] = true;
            self.changed.notify_all();
        }
    }

    /// It makes no difference to what is in the memory. What cannot be filled here is filled by whoever maps it, or refused there.
    fn fill_run(&self, Run { piece, is_zeroed }: Run) {
        let mut done = 0;
        while done < piece.length && self.may_go_on(!is_zeroed) {
            let length = STEP.min(piece.length - done);
            if !is_zeroed {
                self.policy.spend(length);
            }
            let at = (piece.address + done) as *mut std::ffi::c_void;
            // SAFETY: 1. the range lies within a mapping that its region owns, which is kept; 2. the content of its pages stays what it is.
            let filled = unsafe { madvise(at, usize::try_from(length).unwrap_or(0), Advice::LinuxPopulateWrite) };
            if let Err(error) = filled {
                log::debug!("{length:#x} bytes are filled when they are mapped: {error}");
                return;
            }
            done += length;
        }
    }

    /// Waits as long as the rate demands of what it limits; `false` if it is stopped.
    fn may_go_on(&self, is_limited: bool) -> bool {
        while !self.stopped.load(Ordering::Relaxed) {
            let pause = if is_limited { self.policy.wait() } else { None };
            let Some(pause) = pause else { return true };
            let mut state = self.state();
            if self.stopped.load(Ordering::Relaxed) {
                break;
            }
            (state.waiting, state.waits) = (state.waiting + 1, state.waits + 1);
            let waited = self.changed.wait_timeout(state, pause);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        false
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Plain values, each set at once.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;
    use memory::Ram;
    use vm_memory::{Address, GuestMemoryRegion};

    /// A thread that fills 128 MiB, as one run.
    fn filling(policy: &FillPolicy) -> Ahead {
        filling_of(policy, false)
    }

    fn filling_of(policy: &FillPolicy, is_zeroed: bool) -> Ahead {
        let ram = Ram::allocate(ByteSize::mib(128)).unwrap();
        let memory = ram.regions().to_vec();
        let run = Piece {
            iova: memory[0].start_addr().raw_value(),
            address: memory[0].as_ptr() as u64,
            length: memory[0].len(),
        };
        let run = Run { piece: run, is_zeroed };
        Ahead::begin(vec![run], memory, 1, policy).unwrap()
    }

    /// With so many bytes a second.
    fn with_rate(rate: u64) -> FillPolicy {
        FillPolicy::with(Some(rate), None).unwrap()
    }

    /// Where pages of all threads of such a name come from (`/proc/PID/task/TID/numa_maps`: the first mapping says nothing else).
    fn preferred() -> Vec<String> {
        let policy = |task: std::path::PathBuf| {
            // A thread may end meanwhile.
            let name = std::fs::read_to_string(task.join("comm")).ok()?;
            let maps = std::fs::read_to_string(task.join("numa_maps")).ok()?;
            let policy = maps.split(' ').nth(1)?.to_owned();
            (name.trim() == "dma-zero0").then_some(policy)
        };
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.filter_map(|task| policy(task.unwrap().path())).collect()
    }

    #[test]
    fn what_is_filled_comes_from_the_node_that_is_near() {
        // At work for some seconds. No other test's thread has a node.
        let ahead = filling(&FillPolicy::with(Some(64 << 10), Some(0)).unwrap());
        waits("a wait", || ahead.shared.state().waiting > 0);
        let policies = preferred();
        assert!(policies.contains(&"prefer:0".to_owned()), "{policies:?}");
    }

    #[test]
    fn without_a_node_it_comes_from_where_the_host_likes() {
        // A node that there is not is none.
        let ahead = filling(&FillPolicy::with(Some(64 << 10), Some(u32::MAX)).unwrap());
        waits("a wait", || ahead.shared.state().waiting > 0);
        let policies = preferred();
        assert!(policies.contains(&"default".to_owned()), "{policies:?}");
    }

    fn waits(what: &str, until: impl Fn() -> bool) {
        let begun = Instant::now();
        while !until() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn memory_is_filled_no_faster_than_its_rate() {
        let begun = Instant::now();
        let ahead = filling(&with_rate(128 << 20));
        waits("the end", || ahead.shared.state().filled[0]);
        // A tenth of a second's share passes at once, and the last step.
        assert!(begun.elapsed() > Duration::from_millis(850), "{:?}", begun.elapsed());
    }

    #[test]
    fn what_came_zeroed_has_no_rate() {
        let (fresh, spent) = (with_rate(64 << 10), with_rate(64 << 10));
        spent.spend(STEP);
        for policy in [&fresh, &spent] {
            let ahead = filling_of(policy, true);
            let begun = Instant::now();
            assert!(ahead.wait_for(0, || begun.elapsed() > Duration::from_secs(20)));
            assert_eq!(ahead.shared.state().waits, 0);
        }
        assert_eq!(fresh.wait(), None, "it has taken of the others' share");
    }

    #[test]
    fn patience_does_not_end_while_the_rate_is_waited_for() {
        // One step leaves a debt of seconds.
        let ahead = filling(&with_rate(256 << 10));
        waits("a wait", || ahead.shared.state().waiting > 0);
        let begun = Instant::now();
        assert!(!ahead.wait_for(0, || begun.elapsed() > PATIENCE * 3));
        assert!(begun.elapsed() > PATIENCE * 3);
    }

    #[test]
    fn a_wait_for_the_rate_ends_with_what_is_filled() {
        // One step leaves a debt of half a minute.
        let ahead = filling(&with_rate(64 << 10));
        waits("a wait", || ahead.shared.state().waiting > 0);
        let begun = Instant::now();
        drop(ahead);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }
}
