//! The pool against a budget of a host that tests make, and a maker that makes pieces of nothing: how many there are, who gets one, and when
//! one is given up.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use host::MemInfo;
use node_api::SandboxConfig;

use super::*;
use crate::Error;
use crate::resources::budget::{HostNumbers, Overcommit, Promise, Refused, Space, Start, TO_ASK, TO_START, Wish};
use crate::resources::zeroed_memory::maker::Filled;

/// More than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

const MIB: u64 = 1 << 20;
const PIECE: u64 = ZEROED_PIECE.bytes();

/// How pieces come out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Outcome {
    #[default]
    Huge,
    Small,
    Fails,
    /// It takes until nobody wants it any more.
    Endless,
}

/// Makes files with nothing in them.
#[derive(Debug, Default)]
pub(crate) struct Files {
    outcome: Mutex<Outcome>,
    made: AtomicU64,
}

impl Files {
    pub(crate) fn come_out(&self, outcome: Outcome) {
        *self.outcome.lock().unwrap() = outcome;
    }
}

impl Maker for Files {
    fn make(&self, _: Option<&Root>, cancel: &Cancel) -> Result<Filled, Error> {
        self.made.fetch_add(1, Ordering::SeqCst);
        let outcome = *self.outcome.lock().unwrap();
        let end = Instant::now() + PATIENCE;
        while outcome == Outcome::Endless && !cancel.is_cancelled() {
            assert!(Instant::now() < end, "nobody gives it up");
            std::thread::sleep(Duration::from_millis(1));
        }
        let pages = match outcome {
            Outcome::Huge => Pages::Huge,
            Outcome::Small => Pages::Small,
            Outcome::Fails | Outcome::Endless => {
                return Err(Error::host("zeroing memory")(io::Error::other("no memory is left")));
            }
        };
        let file = base::memfd::sized("zeroed", PIECE).map_err(Error::host("making a file"))?;
        let file = File::into(file);
        Ok(Filled { file, pages })
    }

    fn why_small(&self) -> String {
        "shmem_enabled is `deny`".to_owned()
    }
}

/// A host with so much memory, of which so much is available.
#[derive(Debug)]
struct Host {
    total: u64,
    available: AtomicU64,
}

impl HostNumbers for Host {
    fn memory(&self) -> io::Result<MemInfo> {
        Ok(MemInfo {
            total: ByteSize(self.total),
            available: ByteSize(self.available.load(Ordering::SeqCst)),
            huge: ByteSize(0),
        })
    }

    fn reserved_memory(&self) -> Option<ByteSize> {
        None
    }

    fn space(&self, _: &Path) -> io::Result<Space> {
        Ok(Space { size: 0, free: 0 })
    }

    fn descriptors(&self) -> u64 {
        20_000
    }
}

/// A pool of such a host.
pub(crate) struct Node {
    host: Arc<Host>,
    pub(crate) maker: Arc<Files>,
    budget: Budget,
    pub(crate) pool: Arc<ZeroedMemory>,
}

/// Of 4 GiB 3840 MiB are for sandboxes, as many times over; 256 MiB the host keeps.
fn node_with(pieces: u64, memory: &str) -> Node {
    let host = Arc::new(Host {
        total: 4096 * MIB,
        available: (4096 * MIB).into(),
    });
    let overcommit = Overcommit {
        memory: memory.parse().unwrap(),
        ..Overcommit::default()
    };
    let budget = Budget::new(Arc::clone(&host) as _, overcommit, Path::new("/"), pieces);
    let maker = Arc::new(Files::default());
    let pool = ZeroedMemory::new(ByteSize(pieces * PIECE), Arc::clone(&maker) as _, budget.clone());
    Node {
        host,
        maker,
        budget,
        pool,
    }
}

pub(crate) fn node(pieces: u64) -> Node {
    node_with(pieces, "1")
}

impl Node {
    fn fill(&self) {
        while self.pool.make_one(None) == Attempt::Made {}
    }

    fn ready(&self) -> u64 {
        self.pool.numbers().ready.bytes() / PIECE
    }

    fn machine(&self, mib: u64) -> Result<Promise, Refused> {
        self.budget
            .machine(&Wish::new("run", Some("web")), &sandbox(mib), Start::Boot)
    }
}

fn sandbox(mib: u64) -> SandboxConfig {
    let mut config = crate::testing::stored("aaaaaaaaaaaa", "web").sandbox.config;
    config.resources.memory = ByteSize::mib(mib);
    config
}

#[test]
fn as_many_pieces_are_made_as_there_are_to_be_and_each_is_taken_once() {
    let node = node(3);
    assert!(node.pool.is_empty());
    node.fill();
    assert_eq!((node.ready(), node.pool.make_one(None)), (3, Attempt::Full));
    assert_eq!(node.maker.made.load(Ordering::SeqCst), 3);
    let (first, rest) = (node.pool.take(2), node.pool.take(2));
    assert_eq!((first.len(), rest.len(), node.pool.take(1).len()), (2, 1, 0));
    let told = node.pool.told().unwrap();
    assert_eq!(
        (
            told.size.bytes(),
            told.ready.bytes(),
            told.handed_out.bytes(),
            told.failed
        ),
        (3 * PIECE, 0, 3 * PIECE, None)
    );
    // Who gives pieces away has them no longer, and the pool none back.
    drop((first, rest));
    assert_eq!(node.ready(), 0);
    node.fill();
    assert_eq!(node.maker.made.load(Ordering::SeqCst), 6);
}

#[test]
fn without_a_size_nothing_is_made_and_nothing_told() {
    let node = node(0);
    assert_eq!(node.pool.make_one(None), Attempt::Full);
    assert_eq!(node.pool.told(), None);
}

#[test]
fn nothing_is_made_while_a_sandbox_is_started() {
    let node = node(1);
    let lease = |descriptors| {
        node.budget
            .lease(&Wish::request(), descriptors, Duration::ZERO)
            .unwrap()
    };
    let starts = lease(TO_START);
    assert_eq!(node.pool.make_one(None), Attempt::Busy);
    let waits = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| node.budget.wait_for_change(Duration::from_secs(600)));
        drop(starts);
        // On a busy machine the thread may not wait yet; it does not see what ended before.
        while !waiting.is_finished() {
            std::thread::sleep(Duration::from_millis(20));
            drop(lease(TO_START));
        }
    });
    assert!(waits.elapsed() < Duration::from_secs(300), "the end of a start is seen");
    let _asks = lease(TO_ASK);
    assert_eq!(node.pool.make_one(None), Attempt::Made);
}

#[test]
fn nothing_is_made_of_memory_that_the_host_keeps_or_that_others_are_promised() {
    let node = node(4);
    node.host.available.store(256 * MIB + PIECE - 1, Ordering::SeqCst);
    assert_eq!(node.pool.make_one(None), Attempt::Busy);
    node.host.available.store(256 * MIB + PIECE, Ordering::SeqCst);
    assert_eq!(node.pool.make_one(None), Attempt::Made);
    // Beside this one and its tables there is room for two pieces, and not for three.
    node.host.available.store(4096 * MIB, Ordering::SeqCst);
    let machine = node.machine(3400).unwrap();
    node.fill();
    assert_eq!(node.ready(), 2);
    drop(machine);
    node.fill();
    assert_eq!(node.ready(), 4);
}

#[test]
fn what_may_be_promised_over_is_not_zeroed() {
    let node = node_with(4, "2");
    let _machine = node.machine(3400).unwrap();
    node.fill();
    assert_eq!(node.ready(), 2);
}

#[test]
fn a_sandbox_is_refused_for_no_memory_that_lies_ready() {
    let node = node(4);
    node.fill();
    // It fits beside all of it; the next takes as much of it as it needs.
    let small = node.machine(1024).unwrap();
    assert_eq!(node.ready(), 4);
    let large = node.machine(2200).unwrap();
    assert_eq!(node.ready(), 2);
    // What would not fit without it takes nothing of it, and is told what would.
    let refused = node.machine(512).unwrap_err().to_string();
    assert_eq!(node.ready(), 2);
    assert!(refused.contains("needs 644 MiB of memory, and 334.8 MiB"), "{refused}");
    // Nor does it when the host itself has none left but that.
    drop((small, large));
    node.host.available.store(256 * MIB, Ordering::SeqCst);
    let error = node.machine(512).err().map(|error| error.to_string());
    assert_eq!(
        (node.ready(), error.is_some()),
        (0, true),
        "the host says that nothing has become free"
    );
}

#[test]
fn a_machine_that_becomes_larger_comes_before_it_too() {
    let node = node(4);
    node.fill();
    let machine = node.machine(1024).unwrap();
    let wish = Wish::new("update", Some("web"));
    machine.change(&wish, &sandbox(3600), Start::Boot).unwrap();
    assert_eq!(node.ready(), 0);
    assert!(machine.memory() > 3600 * MIB);
}

#[test]
fn what_is_being_made_is_given_up_for_a_sandbox() {
    let node = node(1);
    node.maker.come_out(Outcome::Endless);
    std::thread::scope(|scope| {
        let making = scope.spawn(|| node.pool.make_one(None));
        while node.maker.made.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        // All that sandboxes can have.
        let _machine = node.machine(3600).unwrap();
        assert_eq!(making.join().unwrap(), Attempt::Busy);
    });
    let told = node.pool.told().unwrap();
    assert_eq!((told.ready, told.failed), (ByteSize(0), None), "that is no failure");
}

#[test]
fn what_has_been_taken_counts_no_more_when_it_is_given_away() {
    let node = node(4);
    node.fill();
    let pieces = node.pool.take(4);
    let refused = node.machine(3600);
    assert!(refused.is_err(), "nobody can give it up any more");
    drop(pieces);
    node.machine(3600).unwrap();
}

#[test]
fn small_pages_are_no_piece_and_are_told_of_until_there_is_one() {
    let node = node(2);
    for (outcome, small, why) in [
        (Outcome::Small, 1, "deny"),
        (Outcome::Small, 2, "deny"),
        (Outcome::Fails, 2, "no memory is left"),
    ] {
        node.maker.come_out(outcome);
        assert_eq!(node.pool.make_one(None), Attempt::Failed);
        let numbers = node.pool.numbers();
        assert!(numbers.failed.is_some_and(|failed| failed.contains(why)));
        assert_eq!((numbers.small, numbers.ready), (small, ByteSize(0)));
    }
    // None of that counts.
    drop(node.machine(3600).unwrap());
    node.maker.come_out(Outcome::Huge);
    assert_eq!(node.pool.make_one(None), Attempt::Made);
    assert_eq!(node.pool.numbers().failed, None);
}

#[test]
fn a_pool_that_is_closed_has_nothing_and_makes_nothing() {
    let node = node(2);
    node.fill();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| node.pool.wait_until_one_is_missing());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished(), "all of it is ready");
        node.pool.close();
        assert!(!waiting.join().unwrap());
    });
    assert_eq!((node.ready(), node.pool.make_one(None)), (0, Attempt::Full));
    node.machine(3600).unwrap();
}

#[test]
fn a_piece_that_is_taken_is_missing() {
    let node = node(1);
    node.fill();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| node.pool.wait_until_one_is_missing());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        drop(node.pool.take(1));
        assert!(waiting.join().unwrap());
    });
}
