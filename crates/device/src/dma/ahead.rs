//! Memory that is filled ahead of being mapped: zeroing is most of what mapping costs, and needs no lock of the container's.
//!
//! ```text
//!  run:  waits ── a filler comes to it ──▶ its steps are taken, one by one ──▶ filled
//!                     └── whoever maps it has waited for long ── another thread, which is not nice, takes steps, too ──▶ filled
//! ```
//! Whoever maps a run fills nothing itself but what is left of a step or two: so all is filled at the rate, near to the node.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::mm::{Advice, madvise};
use rustix::process::setpriority_process;
use vfio::Piece;
use vm_memory::GuestRegionMmap;

use super::fill::FillPolicy;
use super::progress::Work;

/// Filled between two looks whether it is still wanted.
const STEP: u64 = 2 << 20;

/// How long one run is waited for that the fillers fill, which vCPUs may leave no processor: another thread goes on with it then, that does not
/// give way to them. Time in which one of them waits because of its rate does not count.
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
    /// How far each run is taken by whoever fills steps of it.
    taken: Vec<AtomicU64>,
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
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// How many of them give way to vCPUs.
    fillers: usize,
    /// Its time counts as long as it is there.
    work: Option<Work>,
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
        let ahead = Self::with(runs, memory, fillers, policy);
        for number in 0..fillers {
            let shared = Arc::clone(&ahead.shared);
            ahead.spawn(number, move || shared.fill())?;
        }
        Ok(ahead)
    }

    /// The same before there is a thread.
    fn with(runs: Vec<Run>, memory: Vec<Arc<GuestRegionMmap<()>>>, fillers: usize, policy: &FillPolicy) -> Self {
        let filled = vec![fillers == 0; runs.len()];
        let shared = Shared {
            taken: runs.iter().map(|_| AtomicU64::new(0)).collect(),
            runs,
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            policy: policy.clone(),
            state: Mutex::new(State {
                filled,
                waiting: 0,
                waits: 0,
            }),
            changed: Condvar::new(),
            _memory: memory,
        };
        Self {
            shared: Arc::new(shared),
            threads: Mutex::default(),
            fillers,
            work: None,
        }
    }

    /// The same, whose time counts.
    pub(super) fn counted(mut self, work: Work) -> Self {
        self.work = Some(work);
        self
    }

    fn spawn(&self, number: usize, fill: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = base::thread::spawn(&format!("dma-zero{number}"), STACK, fill)?;
        self.threads().push(thread);
        Ok(())
    }

    /// Waits for a run to be filled, which somebody does in the end who does not give way to vCPUs; `false` if it is given up before that.
    pub fn wait_for(&self, index: usize, is_given_up: impl Fn() -> bool) -> bool {
        let mut patience = Some(PATIENCE);
        let mut state = self.shared.state();
        let (mut begun, mut waits) = (Instant::now(), state.waits);
        while !state.filled.get(index).is_none_or(|filled| *filled) {
            if is_given_up() {
                return false;
            }
            if patience.is_some_and(|patience| begun.elapsed() >= patience) {
                patience = None;
                drop(state);
                if !self.hurry(index) {
                    break;
                }
                state = self.shared.state();
                continue;
            }
            let waited = self.shared.changed.wait_timeout(state, LOOK);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if state.waiting > 0 || state.waits != waits {
                (begun, waits) = (Instant::now(), state.waits);
            }
        }
        !is_given_up()
    }

    /// Has a run filled by one more thread, which takes as much of the processors as others; whether there is such a thread.
    fn hurry(&self, index: usize) -> bool {
        let shared = Arc::clone(&self.shared);
        let spawned = self.spawn(self.fillers, move || {
            shared.prefer_node();
            shared.fill_run(index);
            shared.is_filled(index);
        });
        // Whoever maps it fills it then, as fast as the host can.
        let spawned = spawned.inspect_err(|error| log::warn!("memory is filled as it is mapped, at no rate: {error}"));
        spawned.is_ok()
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
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
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
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
        self.prefer_node();
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.runs.len() {
                return;
            }
            self.fill_run(index);
            self.is_filled(index);
        }
    }

    fn prefer_node(&self) {
        if let Err(error) = self.policy.prefer_node()
            && !NODE_REFUSED.swap(true, Ordering::Relaxed)
        {
            log::warn!("memory is not filled near to the devices that reach it: {error}");
        }
    }

    /// Nothing of it is left to take. A step that another thread has taken may be on its way yet: whoever maps it waits for that, or fills it.
    fn is_filled(&self, index: usize) {
        if let Some(filled) = self.state().filled.get_mut(index) {
            *filled = true;
        }
        self.changed.notify_all();
    }

    /// It makes no difference to what is in the memory. What cannot be filled here is filled by whoever maps it, or refused there.
    fn fill_run(&self, index: usize) {
        let (Some(Run { piece, is_zeroed }), Some(taken)) = (self.runs.get(index), self.taken.get(index)) else {
            return;
        };
        while taken.load(Ordering::Relaxed) < piece.length && self.may_go_on(!is_zeroed) {
            let done = taken.fetch_add(STEP, Ordering::Relaxed);
            if done >= piece.length {
                return;
            }
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
        let (run, memory) = run(is_zeroed);
        Ahead::begin(vec![run], memory, 1, policy).unwrap()
    }

    /// 128 MiB.
    fn run(is_zeroed: bool) -> (Run, Vec<Arc<GuestRegionMmap<()>>>) {
        let ram = Ram::allocate(ByteSize::mib(128)).unwrap();
        let memory = ram.regions().to_vec();
        let run = Piece {
            iova: memory[0].start_addr().raw_value(),
            address: memory[0].as_ptr() as u64,
            length: memory[0].len(),
        };
        (Run { piece: run, is_zeroed }, memory)
    }

    /// The same whose only filler gets no processor.
    fn starving(policy: &FillPolicy) -> Ahead {
        let (run, memory) = run(false);
        Ahead::with(vec![run], memory, 1, policy)
    }

    /// How nice threads of this name are (proc_pid_stat(5), field 19).
    fn nice(name: &str) -> Vec<i32> {
        let of = |task: std::path::PathBuf| {
            let stat = std::fs::read_to_string(task.join("stat")).ok()?;
            let (first, rest) = stat.rsplit_once(')')?;
            let nice = rest.split_ascii_whitespace().nth(16)?.parse().ok()?;
            first.ends_with(&format!("({name}")).then_some(nice)
        };
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.filter_map(|task| of(task.unwrap().path())).collect()
    }

    /// With so many bytes a second.
    fn with_rate(rate: u64) -> FillPolicy {
        FillPolicy::with(Some(rate), None).unwrap()
    }

    /// Where pages of all threads of such a name come from (`/proc/PID/task/TID/numa_maps`: the first mapping says nothing else).
    fn preferred(thread: &str) -> Vec<String> {
        let policy = |task: std::path::PathBuf| {
            // A thread may end meanwhile.
            let name = std::fs::read_to_string(task.join("comm")).ok()?;
            let maps = std::fs::read_to_string(task.join("numa_maps")).ok()?;
            let policy = maps.split(' ').nth(1)?.to_owned();
            (name.trim() == thread).then_some(policy)
        };
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.filter_map(|task| policy(task.unwrap().path())).collect()
    }

    #[test]
    fn what_is_filled_comes_from_the_node_that_is_near() {
        // At work for some seconds. No other test's thread has a node.
        let ahead = filling(&FillPolicy::with(Some(64 << 10), Some(0)).unwrap());
        waits("a wait", || ahead.shared.state().waiting > 0);
        let policies = preferred("dma-zero0");
        assert!(policies.contains(&"prefer:0".to_owned()), "{policies:?}");
    }

    #[test]
    fn what_no_filler_comes_to_is_filled_at_the_rate_near_to_the_node_by_one_that_is_not_nice() {
        let ahead = starving(&FillPolicy::with(Some(64 << 20), Some(0)).unwrap());
        let begun = Instant::now();
        let ours = rustix::process::getpriority_process(None).unwrap();
        let is_one = || preferred("dma-zero1").contains(&"prefer:0".to_owned()) && nice("dma-zero1").contains(&ours);
        std::thread::scope(|scope| {
            scope.spawn(|| waits("a thread with that node that is not nice", is_one));
            assert!(ahead.wait_for(0, || begun.elapsed() > Duration::from_secs(50)));
        });
        // A tenth of a second's share passes at once, and the last step.
        assert!(
            begun.elapsed() > PATIENCE + Duration::from_millis(1850),
            "{:?}",
            begun.elapsed()
        );
        assert!(ahead.shared.state().filled[0]);
        // A filler that comes late finds nothing to do.
        let before = ahead.shared.taken[0].load(Ordering::Relaxed);
        ahead.shared.fill_run(0);
        assert_eq!(ahead.shared.taken[0].load(Ordering::Relaxed), before);
    }

    #[test]
    fn whoever_waits_for_one_that_is_not_nice_can_give_it_up() {
        // One step leaves a debt of half a minute.
        let ahead = starving(&with_rate(64 << 10));
        let begun = Instant::now();
        assert!(!ahead.wait_for(0, || begun.elapsed() > PATIENCE * 2));
        assert!(ahead.shared.taken[0].load(Ordering::Relaxed) > 0, "nobody has begun");
        drop(ahead);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }

    #[test]
    fn without_a_node_it_comes_from_where_the_host_likes() {
        // A node that there is not is none.
        let ahead = filling(&FillPolicy::with(Some(64 << 10), Some(u32::MAX)).unwrap());
        waits("a wait", || ahead.shared.state().waiting > 0);
        let policies = preferred("dma-zero0");
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
