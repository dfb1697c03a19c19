//! The budget against a host that tests make: what is refused and in which words, that nothing is promised twice, and that all of it
//! comes back.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use node_api::{Class, MemoryMode};

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A host of any size.
#[derive(Debug)]
struct Host {
    total: AtomicU64,
    available: AtomicU64,
    huge: u64,
    reserved: u64,
    disk: u64,
    free: AtomicU64,
    descriptors: u64,
}

impl Host {
    fn new(total: u64) -> Self {
        Self {
            total: total.into(),
            available: total.into(),
            huge: 0,
            reserved: 0,
            disk: 100 * GIB,
            free: (100 * GIB).into(),
            descriptors: 20_000,
        }
    }

    fn budget(self) -> Budget {
        Budget::new(Arc::new(self), Overcommit::default(), Path::new("/"), 0)
    }
}

impl HostNumbers for Host {
    fn memory(&self) -> io::Result<MemInfo> {
        Ok(MemInfo {
            total: ByteSize(self.total.load(Ordering::SeqCst)),
            available: ByteSize(self.available.load(Ordering::SeqCst)),
            huge: ByteSize(self.huge),
        })
    }

    fn reserved_memory(&self) -> Option<ByteSize> {
        Some(ByteSize(self.reserved))
    }

    fn space(&self, _path: &Path) -> io::Result<Space> {
        Ok(Space {
            size: self.disk,
            free: self.free.load(Ordering::SeqCst),
        })
    }

    fn descriptors(&self) -> u64 {
        self.descriptors
    }
}

fn sandbox(memory: u64) -> SandboxConfig {
    let mut config = crate::testing::stored("aaaaaaaaaaaa", "web").sandbox.config;
    config.resources.memory = ByteSize(memory);
    config
}

fn wish() -> Wish {
    Wish::new("run", Some("web"))
}

fn promised(budget: &Budget, resource: Resource) -> u64 {
    let all = budget.promised();
    all.iter().find(|one| one.resource == resource).unwrap().promised
}

#[test]
fn the_second_large_one_is_refused_however_it_comes_up() {
    let budget = Host::new(5734 * MIB).budget();
    let config = sandbox(5 * GIB);
    let first = budget.machine(&wish(), &config, Start::Boot).unwrap();
    first.runs();
    for start in [Start::Boot, Start::Restore] {
        let error = budget.machine(&wish(), &config, start).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "cannot run 'web': it needs 5.1 GiB of memory, and 159.3 MiB of the 5.3 GiB that sandboxes can have"
            ),
            "{error}"
        );
        assert!(
            error.contains("raise memory.overcommit (basaltd --memory-overcommit, now 1)"),
            "{error}"
        );
    }
    drop(first);
    budget.machine(&wish(), &config, Start::Restore).unwrap();
}

#[test]
fn the_setting_is_how_many_times_over_memory_is_promised() {
    let overcommit = Overcommit {
        memory: "2".parse().unwrap(),
        ..Overcommit::default()
    };
    let budget = Budget::new(Arc::new(Host::new(5734 * MIB)), overcommit, Path::new("/"), 0);
    let two = [(); 2].map(|()| budget.machine(&wish(), &sandbox(5 * GIB), Start::Boot).unwrap());
    let third = budget.machine(&wish(), &sandbox(5 * GIB), Start::Boot).unwrap_err();
    assert!(third.to_string().contains("now 2)"), "{third}");
    // One that is larger than the host is no guest for it at all.
    let error = budget.machine(&wish(), &sandbox(6 * GIB), Start::Boot).unwrap_err();
    assert!(
        error.is_of_request() && error.to_string().contains("but this host has 5.5 GiB"),
        "{error}"
    );
    drop(two);
}

#[test]
fn many_clones_fit_where_few_would_that_boot() {
    let count = |start| {
        let budget = Host::new(16 * GIB).budget();
        let mut all = Vec::new();
        while let Ok(promise) = budget.machine(&wish(), &sandbox(2 * GIB), start) {
            promise.runs();
            all.push(promise);
        }
        all.len()
    };
    // 15.2 GiB for 2.1 GiB each; and one whole, the others by a sixteenth.
    assert_eq!((count(Start::Boot), count(Start::Restore)), (7, 98));
}

#[test]
fn a_clone_that_boots_after_all_needs_room_for_that_and_keeps_what_it_has_otherwise() {
    let budget = Host::new(4 * GIB).budget();
    let clones: Vec<_> = (0..3)
        .map(|_| budget.machine(&wish(), &sandbox(GIB), Start::Restore).unwrap())
        .collect();
    let before = promised(&budget, Resource::Memory);
    clones
        .first()
        .unwrap()
        .change(&wish(), &sandbox(GIB), Start::Boot)
        .unwrap();
    clones
        .get(1)
        .unwrap()
        .change(&wish(), &sandbox(GIB), Start::Boot)
        .unwrap();
    let between = promised(&budget, Resource::Memory);
    assert!(between > before);
    let fourth = budget.machine(&wish(), &sandbox(GIB), Start::Restore).unwrap();
    clones
        .get(2)
        .unwrap()
        .change(&wish(), &sandbox(2 * GIB), Start::Boot)
        .unwrap_err();
    drop(fourth);
    assert_eq!(promised(&budget, Resource::Memory), between);
    drop(clones);
    assert!(budget.0.ledger().is_empty());
}

#[test]
fn a_machine_that_is_another_for_a_while_is_what_it_was_unless_that_is_kept() {
    let budget = Host::new(16 * GIB).budget();
    let was = sandbox(2 * GIB);
    let mut bare = was.clone();
    bare.resources.class = Class::Bare;
    // Others, of which one is as large: what it counts for by itself is a sixteenth.
    let other = budget.machine(&wish(), &was, Start::Restore).unwrap();
    let promise = Arc::new(budget.machine(&wish(), &was, Start::Restore).unwrap());
    let before = promised(&budget, Resource::Memory);
    let other_machine = || Changed::new(Arc::clone(&promise), &wish(), &bare, None).unwrap();
    let changed = other_machine();
    let as_bare = promised(&budget, Resource::Memory);
    assert!(as_bare > before + GIB);
    drop(changed);
    assert_eq!(promised(&budget, Resource::Memory), before);
    other_machine().keep();
    assert_eq!(promised(&budget, Resource::Memory), as_bare);
    drop((other, promise));
    assert!(budget.0.ledger().is_empty());
}

#[test]
fn a_machine_that_runs_and_becomes_another_size_needs_nothing_to_start() {
    let budget = Host::new(16 * GIB).budget();
    let promise = Arc::new(budget.machine(&wish(), &sandbox(GIB), Start::Boot).unwrap());
    let at_once = || budget.0.ledger().machine(promise.number).unwrap().at_once;
    assert!(at_once() > 0, "it comes up");
    promise.runs();
    let larger = |start| Changed::new(Arc::clone(&promise), &wish(), &sandbox(2 * GIB), start).unwrap();
    larger(None).keep();
    assert_eq!((at_once(), promise.memory() > 2 * GIB), (0, true));
    let other = larger(Some(Start::Restore));
    assert!(at_once() > 0, "another one comes up");
    drop(other);
    assert_eq!(at_once(), 0);
}

#[test]
fn what_devices_reach_is_shared_with_nobody() {
    let with = |devices: &[&str]| {
        let mut config = sandbox(GIB);
        config.devices = devices.iter().map(|device| device.parse().unwrap()).collect();
        super::Machine::of(&config, Start::Restore)
    };
    assert!(with(&[]).shared);
    assert!(!with(&["0000:01:00.0"]).shared);
}

#[test]
fn what_is_in_use_counts_too_and_what_is_being_started() {
    let host = Arc::new(Host::new(16 * GIB));
    let budget = Budget::new(
        Arc::clone(&host) as Arc<dyn HostNumbers>,
        Overcommit::default(),
        Path::new("/"),
        0,
    );
    // A twentieth is kept: 819 MiB; 96 MiB are for one that boots.
    host.available.store(1000 * MIB, Ordering::SeqCst);
    let one = budget.machine(&wish(), &sandbox(GIB), Start::Boot).unwrap();
    let error = budget.machine(&wish(), &sandbox(GIB), Start::Boot).unwrap_err();
    assert!(matches!(error, Refused::MemoryInUse { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("the host has 1000 MiB available, of which 819.1 MiB are kept"),
        "{error}"
    );
    // What the first one uses is among what is not available now.
    one.runs();
    budget.machine(&wish(), &sandbox(GIB), Start::Boot).unwrap();
}

#[test]
fn memory_that_linux_does_not_have_is_counted_by_itself() {
    let mut host = Host::new(4 * GIB);
    host.reserved = 2 * GIB;
    let budget = host.budget();
    let mut trusted = sandbox(GIB);
    (trusted.resources.class, trusted.resources.memory_mode) = (Class::Bare, MemoryMode::Identity);
    let two = [(); 2].map(|()| budget.machine(&wish(), &trusted, Start::Boot).unwrap());
    let error = budget.machine(&wish(), &trusted, Start::Boot).unwrap_err();
    assert!(
        error.to_string().contains("1 GiB of reserved memory, and 0 B of 2 GiB"),
        "{error}"
    );
    // More than all of it is for the module to refuse, which knows where the pieces lie.
    trusted.resources.memory = ByteSize(3 * GIB);
    drop(budget.machine(&wish(), &trusted, Start::Boot).unwrap());
    drop(two);

    let mut host = Host::new(4 * GIB);
    host.huge = 2 * GIB;
    let budget = host.budget();
    let mut pinned = sandbox(2 * GIB);
    pinned.resources.class = Class::Bare;
    // 2 GiB are Linux's, of which 256 MiB are kept. It lies in the others.
    let _bare = budget.machine(&wish(), &pinned, Start::Boot).unwrap();
    budget.machine(&wish(), &sandbox(GIB), Start::Boot).unwrap();
    budget.machine(&wish(), &pinned, Start::Boot).unwrap_err();
}

#[test]
fn sizes_of_disks_add_up_and_what_they_have_taken_is_part_of_them() {
    let directory = tempfile::tempdir().unwrap();
    let mut host = Host::new(4 * GIB);
    host.disk = 10 * GIB;
    host.free = (2 * GIB).into();
    let budget = host.budget();
    // 50 times what is free, but for a hundredth of the file system.
    let total = 50 * (2 * GIB - 10 * GIB / 100);
    let path = directory.path().join("disk");
    let first = budget.disk(&wish(), ByteSize(total - GIB), &path).unwrap();
    let error = budget.disk(&wish(), ByteSize(2 * GIB), &path).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it needs a disk of 2 GiB, and 1 GiB of the 95 GiB that disks can have together"),
        "{error}"
    );
    // What the first one has on the disk is not free, and was promised to it.
    fs::write(&path, vec![1; 32 << 20]).unwrap();
    budget.disk(&wish(), ByteSize(2 * GIB), &path).unwrap();
    drop(first);
    budget.disk(&wish(), ByteSize(total), &path).unwrap();
    assert!(budget.0.ledger().is_empty());
}

#[test]
fn descriptors_are_refused_before_they_are_gone_and_some_are_for_those_who_end_others() {
    let mut host = Host::new(64 * GIB);
    host.descriptors = 128;
    let budget = host.budget();
    assert_eq!(budget.connections(), 16);
    let mut all = Vec::new();
    let error = loop {
        match budget.machine(&wish(), &sandbox(32 * MIB), Start::Restore) {
            Ok(promise) => all.push(promise),
            Err(error) => break error,
        }
    };
    assert_eq!(all.len(), 8);
    assert!(error.to_string().contains("LimitNOFILE="), "{error}");
    // One of those can still be kept or started again, and beside it two others be ended.
    let starts = budget.lease(&wish(), TO_START, Duration::ZERO).unwrap();
    let error = budget.lease(&wish(), TO_START, Duration::ZERO).unwrap_err();
    assert!(
        matches!(error, Refused::Descriptors { needed: TO_START, .. }),
        "{error}"
    );
    let ask = [(); 2].map(|()| budget.lease(&wish(), TO_ASK, Duration::ZERO).unwrap());
    budget.lease(&wish(), TO_ASK, Duration::ZERO).unwrap_err();
    // Who waits gets it when another ends.
    let waits = std::thread::spawn({
        let budget = budget.clone();
        move || budget.lease(&wish(), TO_START, Duration::from_secs(90)).is_ok()
    });
    drop(starts);
    assert!(waits.join().unwrap());
    drop((all, ask));
    assert!(budget.0.ledger().is_empty());
}

#[test]
fn what_a_daemon_finds_is_counted_and_never_refused() {
    let budget = Host::new(2 * GIB).budget();
    let found: Vec<_> = (0..3)
        .map(|_| budget.count_machine(&sandbox(GIB), Start::Boot))
        .collect();
    let disk = budget.count_disk(ByteSize(1 << 50), Path::new("/nonexistent"));
    assert!(promised(&budget, Resource::Memory) > 3 * GIB);
    let error = budget.machine(&wish(), &sandbox(32 * MIB), Start::Boot).unwrap_err();
    assert!(error.to_string().contains("and 0 B of the"), "{error}");
    budget
        .disk(&wish(), ByteSize(1), Path::new("/nonexistent"))
        .unwrap_err();
    drop((found, disk));
    assert!(budget.0.ledger().is_empty());
}

/// Many threads at once make, change and drop promises and leases, at random: at no moment is more promised than there is.
#[test]
fn nothing_is_promised_twice_and_nothing_leaks() {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 400;
    let mut host = Host::new(8 * GIB);
    host.descriptors = 256;
    host.disk = GIB;
    host.free = GIB.into();
    let budget = host.budget();
    let refused = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (budget, refused) = (&budget, &refused);
            scope.spawn(move || {
                let mut machines: Vec<Promise> = Vec::new();
                let mut disks: Vec<Promise> = Vec::new();
                // xorshift, of a seed that a failure can be repeated with.
                let mut state = 0x9e37_79b9_7f4a_7c15 ^ (thread + 1);
                for _ in 0..ROUNDS {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let config = sandbox((state >> 8) % 2048 * MIB + 32 * MIB);
                    let start = if state & 16 == 0 { Start::Boot } else { Start::Restore };
                    let refusal = match state % 8 {
                        0..3 => budget
                            .machine(&wish(), &config, start)
                            .map(|made| machines.push(made))
                            .err(),
                        3 => machines
                            .last()
                            .and_then(|last| last.change(&wish(), &config, start).err()),
                        4 => {
                            machines.last().iter().for_each(|last| last.runs());
                            machines.pop();
                            None
                        }
                        5 => {
                            let made = budget.disk(&wish(), ByteSize(10 * GIB), Path::new("/nonexistent"));
                            made.map(|made| disks.push(made)).err()
                        }
                        6 => {
                            disks.pop();
                            None
                        }
                        _ => {
                            let cost = if state & 32 == 0 { TO_START } else { TO_ASK };
                            budget
                                .lease(&wish(), cost, Duration::from_millis(state % 3))
                                .map(drop)
                                .err()
                        }
                    };
                    refused.fetch_add(u64::from(refusal.is_some()), Ordering::SeqCst);
                    for one in budget.promised() {
                        assert!(one.promised <= one.total, "{one:?}");
                    }
                }
            });
        }
    });
    // Otherwise it has shown nothing.
    assert!(refused.load(Ordering::SeqCst) > THREADS, "{refused:?}");
    assert!(budget.0.ledger().is_empty());
}
