//! Tenants and an arbiter in threads, over real sockets and pages: what each gets, and what happens when one of them ends.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accel_arbiter::{Arbiter, Gate, Priority, Refusal, Share};

const MOST: Duration = Duration::from_secs(20);

fn share(weight: u32) -> Share {
    Share {
        weight,
        priority: Priority::High,
    }
}

fn until(what: &str, is: impl Fn() -> bool) -> Duration {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < MOST, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    begin.elapsed()
}

/// An arbiter with two tenants.
fn arbiter(directory: &Path) -> (Arbiter, [PathBuf; 2]) {
    let arbiter = Arbiter::start().unwrap();
    let paths = ["a", "b"].map(|name| {
        let path = directory.join(name);
        arbiter
            .admit(name, share(if name == "a" { 1 } else { 3 }), &path)
            .unwrap();
        path
    });
    (arbiter, paths)
}

fn linked(path: &Path) -> Gate {
    let gate = Gate::new(path).unwrap();
    until("an arbiter", || gate.is_linked());
    gate
}

/// Waits for credit as a server does, and uses some.
fn use_some(gate: &Gate, over: &AtomicBool, microseconds: u64) -> bool {
    loop {
        let seen = gate.news();
        match gate.check(0) {
            Ok(()) => break,
            Err(_) if over.load(Ordering::Relaxed) => return false,
            Err(_) => gate.wait(seen, Duration::from_millis(20)),
        }
    }
    gate.end_wait();
    gate.spend(microseconds * 1000);
    true
}

#[test]
fn two_that_always_have_work_have_their_shares() {
    let directory = tempfile::tempdir().unwrap();
    let (arbiter, paths) = arbiter(directory.path());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for path in &paths {
            let over = &over;
            scope.spawn(move || {
                let gate = linked(path);
                gate.set_busy(true);
                until("both are linked", || gate.is_limited());
                // No device at all: whoever has credit uses it at once.
                while use_some(&gate, over, 500) && !over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
        }
        std::thread::sleep(Duration::from_secs(2));
        over.store(true, Ordering::Relaxed);
    });
    let report = arbiter.report();
    let part = report["b"].used.as_secs_f64() / (report["a"].used + report["b"].used).as_secs_f64();
    assert!((0.73..=0.77).contains(&part), "{part}: {report:?}");
}

#[test]
fn an_arbiter_that_ends_holds_nobody_up() {
    let directory = tempfile::tempdir().unwrap();
    let (arbiter, [a, b]) = arbiter(directory.path());
    let (a, b) = (linked(&a), linked(&b));
    a.set_busy(true);
    b.set_busy(true);
    until("both are seen", || a.is_limited() && b.is_limited());
    a.spend(1_000_000_000);
    assert_eq!(a.check(0), Err(Refusal::Credit));
    drop(arbiter);
    let took = until("its end is seen", || a.check(0).is_ok());
    assert!(took < Duration::from_millis(500), "{took:?}");
    // Another one is found.
    let other = Arbiter::start().unwrap();
    other.admit("a", share(1), &directory.path().join("a")).unwrap();
    until("another one", || a.is_linked());
    assert!(a.check(0).is_ok() && other.report()["a"].is_connected);
}

#[test]
fn a_server_that_ends_gives_back_what_it_held() {
    let directory = tempfile::tempdir().unwrap();
    let (arbiter, [a, b]) = arbiter(directory.path());
    let (a, b) = (linked(&a), linked(&b));
    a.set_busy(true);
    b.set_busy(true);
    until("both are seen", || a.is_limited() && b.is_limited());
    // It owes a second, and the other one has its credit and does not use it.
    a.spend(1_000_000_000);
    assert_eq!(a.check(0), Err(Refusal::Credit));
    drop(b);
    let begin = Instant::now();
    assert!(use_some(&a, &AtomicBool::new(false), 1));
    assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
    assert!(!arbiter.report()["b"].is_connected);
}

#[test]
fn what_is_on_the_device_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let (_arbiter, [a, b]) = arbiter(directory.path());
    let (a, b) = (linked(&a), linked(&b));
    a.set_busy(true);
    // Alone: ten milliseconds, however often.
    until("it is seen", || a.check(9_999).is_ok());
    assert_eq!(a.check(10_000), Err(Refusal::OnDevice));
    a.spend(1_000_000_000);
    assert_eq!(a.check(0), Ok(()));
    b.set_busy(true);
    until("both are seen", || a.is_limited() && b.is_limited());
    assert_eq!((a.check(0), a.check(500)), (Ok(()), Ok(())));
    assert_eq!(a.check(1000), Err(Refusal::OnDevice));
    // More than the credit of its round.
    assert_eq!(a.check(4001), Err(Refusal::Credit));
    b.set_busy(false);
    until("the other one has no more work", || a.check(9_999).is_ok());
}

#[test]
fn a_path_that_cannot_be_is_said_with_the_tenant() {
    let arbiter = Arbiter::start().unwrap();
    let text = arbiter
        .admit("web", share(1), Path::new("/nowhere/a"))
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("'web'") && text.contains("/nowhere/a") && text.contains("a directory that exists"),
        "{text}"
    );
}
