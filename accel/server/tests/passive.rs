//! Clients that run their server themselves, with this test as both machines: the server has the processor while a client has entered it,
//! as far as a process can be kept from running.

#[allow(dead_code, reason = "each test uses what it needs")]
mod support;

use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use accel_proto::Span;
use accel_proto::control::AwaitCompletions;
use accel_proto::opencl::Finish;
use accel_server::{Backend, Server, serve_passive};
use accel_transport::{ClientConnection, Enter, Entered, Error, Offer, Protocol, Transport, connect_by_entering};
use accel_window::Greeting;

use support::*;

const WINDOW: u64 = 32 << 20;

#[derive(Debug, Default)]
struct Turn {
    entered: bool,
    waits: bool,
}

/// The processor that a server has when it was entered.
#[derive(Debug, Default)]
struct Cpu {
    turn: Mutex<Turn>,
    changed: Condvar,
    /// Of the client that has it there.
    one: Mutex<()>,
    entries: AtomicU64,
    gone: AtomicBool,
    late: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cpu {
    fn wait(&self) -> bool {
        let mut turn = lock(&self.turn);
        turn.waits = true;
        self.changed.notify_all();
        turn = self.changed.wait_while(turn, |turn| !turn.entered).unwrap();
        turn.entered = false;
        true
    }
}

impl Enter for Cpu {
    fn enter(&self) -> Entered {
        self.entries.fetch_add(1, Ordering::SeqCst);
        if self.gone.load(Ordering::SeqCst) {
            return Entered::Gone;
        }
        if self.late.load(Ordering::SeqCst) {
            return Entered::Late;
        }
        let Ok(_one) = self.one.try_lock() else {
            return Entered::Busy;
        };
        let mut turn = lock(&self.turn);
        (turn.entered, turn.waits) = (true, false);
        self.changed.notify_all();
        let (turn, waited) = self
            .changed
            .wait_timeout_while(turn, Duration::from_millis(50), |turn| !turn.waits)
            .unwrap();
        drop(turn);
        match waited.timed_out() {
            true => Entered::Interrupted,
            false => Entered::Done,
        }
    }
}

/// A file that nobody else may write.
fn memory() -> File {
    let window = base::memfd::sized("window", WINDOW).unwrap();
    window.set_permissions(Permissions::from_mode(0o600)).unwrap();
    window
}

/// A server of a window, and where it runs.
fn start_passive() -> (Arc<Cpu>, File) {
    let window = memory();
    (serve(&window), window)
}

fn serve(window: &File) -> Arc<Cpu> {
    let cpu = Arc::new(Cpu::default());
    let (its, file) = (Arc::clone(&cpu), window.try_clone().unwrap());
    std::thread::spawn(move || {
        let server = Arc::new(Server::new(Backend::null(), settings()));
        serve_passive(&server, vec![file], || Ok(()), || its.wait())
    });
    cpu
}

/// By a file of its own, as another program has.
fn enter(cpu: &Arc<Cpu>, window: &File, pairs: u32) -> Result<ClientConnection, Error> {
    let path = format!("/proc/self/fd/{}", window.as_raw_fd());
    let file = File::options().read(true).write(true).open(path).unwrap();
    let offer = Offer {
        transports: vec![Transport::Enter],
        pairs,
        patience: MOST,
    };
    let cpu: Arc<dyn Enter> = Arc::<Cpu>::clone(cpu);
    connect_by_entering(file, cpu, &offer)
}

fn threads(connection: &mut ClientConnection) -> Vec<Thread> {
    let (window, _) = connection.window.clone().unwrap();
    let thread = |end| Thread {
        end,
        window: window.clone(),
    };
    connection.ends.drain(..).map(thread).collect()
}

#[test]
fn a_client_runs_its_server_and_nobody_is_woken() {
    let (cpu, window) = start_passive();
    let mut connection = enter(&cpu, &window, 2).unwrap();
    assert_eq!((connection.transport, connection.ends.len()), (Transport::Enter, 2));
    let mut thread = threads(&mut connection).remove(0);
    let (context, queue) = thread.set_up();
    thread.buffer(context, 4096, name(1));
    let before = cpu.entries.load(Ordering::SeqCst);
    for _ in 0..100 {
        thread.done(&Finish { command_queue: queue });
    }
    let entries = cpu.entries.load(Ordering::SeqCst) - before;
    assert!(
        entries >= 100,
        "{entries} entries for 100 calls: something else has run the server"
    );
    // Whoever has the window has it alone.
    let refused = enter(&cpu, &window, 1).unwrap_err().to_string();
    assert!(refused.contains("another program has the window"), "{refused}");
}

#[test]
fn the_next_client_finds_nothing_of_the_last_one_whether_or_not_that_has_said_so() {
    let (cpu, window) = start_passive();
    let greeting = Greeting::of(&accel_window::map(&window).unwrap()).unwrap();
    for forgets in [false, true, false] {
        let mut connection = enter(&cpu, &window, 1).unwrap();
        let mut thread = threads(&mut connection).remove(0);
        // Of the client before.
        assert_eq!(thread.status(&Finish { command_queue: name(1) }), -36);
        let (_, queue) = thread.set_up();
        thread.done(&Finish { command_queue: queue });
        if forgets {
            // One that dies cannot enter any more.
            cpu.gone.store(true, Ordering::SeqCst);
        }
        drop((connection, thread));
        cpu.gone.store(false, Ordering::SeqCst);
        let (_, pairs) = greeting.asked();
        assert_eq!(pairs, 0, "it has not given the window back");
    }
}

#[test]
fn a_window_that_others_could_shrink_is_not_taken() {
    let (cpu, window) = start_passive();
    for mode in [0o620, 0o602, 0o666] {
        window.set_permissions(Permissions::from_mode(mode)).unwrap();
        let refused = enter(&cpu, &window, 1).unwrap_err().to_string();
        assert!(refused.contains("chmod go-w"), "{mode:o}: {refused}");
    }
    window.set_permissions(Permissions::from_mode(0o644)).unwrap();
    enter(&cpu, &window, 1).unwrap();
}

#[test]
fn who_waits_for_callbacks_is_answered_without_a_timer() {
    let (cpu, window) = start_passive();
    let mut connection = enter(&cpu, &window, 1).unwrap();
    let mut thread = threads(&mut connection).remove(0);
    let call = AwaitCompletions {
        most: 8,
        milliseconds: 500,
        reply: Span { offset: 0, length: 0 },
    };
    let took = |_| {
        let begun = Instant::now();
        thread.ask(&call);
        begun.elapsed()
    };
    // Of several, as a test may have to wait for a processor.
    let least = (0..4).map(took).min().unwrap();
    assert!(least < Duration::from_millis(400), "the server has waited: {least:?}");
}

#[test]
fn who_asks_before_there_is_a_server_is_answered() {
    let window = memory();
    let region = accel_window::map(&window).unwrap();
    let greeting = Greeting::of(&region).unwrap();
    let number = greeting.ask(2);
    let cpu = serve(&window);
    let limit = std::time::Instant::now() + MOST;
    while greeting.answer_to(number).is_none() {
        assert!(std::time::Instant::now() < limit, "it was not answered");
        cpu.enter();
    }
    assert_eq!(greeting.answer_to(number), Some(2));
}

#[test]
fn threads_of_a_client_enter_at_the_same_time() {
    let (cpu, window) = start_passive();
    let mut connection = enter(&cpu, &window, 3).unwrap();
    let mut all = threads(&mut connection);
    let (_, queue) = all[0].set_up();
    std::thread::scope(|scope| {
        for mut thread in all {
            scope.spawn(move || {
                for _ in 0..50 {
                    thread.done(&Finish { command_queue: queue });
                }
            });
        }
    });
}

#[test]
fn a_server_that_ends_or_takes_too_long_is_an_error_of_the_call() {
    let (cpu, window) = start_passive();
    let mut connection = enter(&cpu, &window, 2).unwrap();
    let mut all = threads(&mut connection);
    let (_, queue) = all[0].set_up();
    cpu.late.store(true, Ordering::SeqCst);
    let finish = Finish { command_queue: queue };
    let record = all[0].record(&finish, true);
    let error = all[0].end.call(&record, MOST).unwrap_err();
    assert!(matches!(error, Error::Deadline { .. }), "{error}");
    cpu.gone.store(true, Ordering::SeqCst);
    for thread in &mut all {
        let record = thread.record(&finish, true);
        let error = thread.end.call(&record, MOST).unwrap_err();
        assert!(matches!(error, Error::PeerGone), "{error}");
    }
    drop((connection, all));
    assert!(matches!(enter(&cpu, &window, 1), Err(Error::PeerGone)));
}

#[test]
fn what_a_hostile_client_asks_for_is_bounded_and_the_next_one_is_served() {
    let (cpu, window) = start_passive();
    let region = accel_window::map(&window).unwrap();
    let greeting = Greeting::of(&region).unwrap();
    let runs_until = |number| {
        let limit = std::time::Instant::now() + MOST;
        loop {
            cpu.enter();
            match greeting.answer_to(number) {
                Some(pairs) => return pairs,
                None => assert!(std::time::Instant::now() < limit, "it was not answered"),
            }
        }
    };
    // settings() has four.
    assert_eq!(runs_until(greeting.ask(u32::MAX)), 4);
    // What it writes into rings and header ends its own connection at most.
    region.write(0, &[0xff; 128]).unwrap();
    region.write(4096, &vec![0xa5; 64 << 10]).unwrap();
    for _ in 0..100 {
        greeting.ask(1);
        cpu.enter();
    }
    assert_eq!(runs_until(greeting.ask(0)), 0);
    let mut connection = enter(&cpu, &window, 1).unwrap();
    let mut thread = threads(&mut connection).remove(0);
    let (_, queue) = thread.set_up();
    thread.done(&Finish { command_queue: queue });
    // And one whose machine has no server.
    #[derive(Debug)]
    struct Nowhere;
    impl Enter for Nowhere {
        fn enter(&self) -> Entered {
            Entered::NoLink
        }
    }
    drop((connection, thread));
    let offer = Offer {
        transports: vec![Transport::Enter],
        pairs: 1,
        patience: MOST,
    };
    let refused = connect_by_entering(window, Arc::new(Nowhere), &offer).unwrap_err();
    assert!(matches!(refused, Error::Protocol(Protocol::Refused(_))), "{refused}");
}
