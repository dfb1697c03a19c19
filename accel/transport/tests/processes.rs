//! Two real processes and each way between them: calls, records without answers, a small ring that is full, and either side killed at any
//! moment while calls go on. Each test is both halves: it starts itself again as its server or its client.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use accel_transport::{
    ClientConnection, ClientEnd, Error, Offer, ServerConnection, ServerEnd, Settings, Transport, accept, connect,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use wire::packet::PacketSocket;
use wire::ring::Record;

/// Which half a process is that one of these tests started.
const HALF: &str = "BASALT_TEST_HALF";

/// No machine is so busy that something takes longer.
const MOST: Duration = Duration::from_secs(60);

/// By when a side knows that the other is gone, if it gets to run.
const SOON: Duration = Duration::from_millis(100);

/// The same where the machine does other things at that moment.
const AT_LAST: Duration = Duration::from_secs(5);

/// The kinds of requests, in the first word.
const ECHO: u64 = 0;
const COUNT: u64 = 1;
const ASK_COUNT: u64 = 2;
const LATE: u64 = 3;
const WHERE: u64 = 4;

fn settings() -> Settings {
    Settings {
        transports: Transport::ALL.to_vec(),
        pairs: 4,
        records: 8,
        arena: 1 << 20,
        patience: MOST,
        busy_poll: None,
    }
}

fn offer(transport: Transport) -> Offer {
    Offer {
        transports: vec![transport],
        pairs: 2,
        patience: MOST,
    }
}

/// Starts this test again as its other half, at the other end of a socket.
fn start_other_half(test: &str, half: &str) -> (PacketSocket, Child) {
    let (near, far) = PacketSocket::pair().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(HALF, half)
        .stdin(Stdio::from(OwnedFd::from(far)))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (near, child)
}

/// The socket that a half was started with.
fn inherited() -> PacketSocket {
    PacketSocket::from_fd(std::io::stdin().as_fd().try_clone_to_owned().unwrap())
}

fn half() -> Option<String> {
    std::env::var(HALF).ok()
}

fn record(kind: u64, value: u64) -> Record {
    Record::from_words([kind, 0, value, !value, value, value, value, value])
}

/// Serves until the client is gone; the error of each end.
fn serve(mut connection: ServerConnection) -> Vec<Error> {
    let serving = connection
        .ends
        .drain(..)
        .map(|end| std::thread::spawn(move || serve_end(end)));
    let serving: Vec<_> = serving.collect();
    serving.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn serve_end(mut end: ServerEnd) -> Error {
    let mut count = 0;
    let mut next = || -> Result<(), Error> {
        let request = end.receive(None)?;
        let [kind, _, value, inverse, ..] = *request.words();
        assert_eq!(value, !inverse, "a torn record");
        let answer = match kind {
            COUNT => {
                count += value;
                None
            }
            ASK_COUNT => Some(record(ASK_COUNT, count)),
            LATE => {
                std::thread::sleep(Duration::from_millis(value));
                Some(request)
            }
            WHERE => Some(record(WHERE, only_cpu())),
            _ => Some(request),
        };
        end.finish(&request, answer.as_ref(), MOST)
    };
    loop {
        if let Err(error) = next() {
            return error;
        }
    }
}

/// The CPU to which this thread has been moved; one that may run elsewhere has not been.
fn only_cpu() -> u64 {
    match sched_getaffinity(None).unwrap().count() {
        1 => rustix::thread::sched_getcpu() as u64,
        _ => u64::MAX,
    }
}

fn echo(end: &mut ClientEnd, value: u64) -> Result<(), Error> {
    let answer = end.call(&record(ECHO, value), MOST)?;
    assert_eq!(answer.words()[2..], record(ECHO, value).words()[2..]);
    Ok(())
}

#[test]
fn calls_are_answered_by_every_way() {
    if half().is_some() {
        let errors = serve(accept(inherited(), &settings()).unwrap());
        assert!(
            errors.iter().all(|error| matches!(error, Error::PeerGone)),
            "{errors:?}"
        );
        return;
    }
    for transport in Transport::ALL {
        let (socket, mut server) = start_other_half("calls_are_answered_by_every_way", "server");
        let mut connection = connect(socket, &offer(transport)).unwrap();
        assert_eq!((connection.transport, connection.ends.len()), (transport, 2));
        let threads: Vec<_> = connection
            .ends
            .drain(..)
            .map(|end| std::thread::spawn(move || client(end)))
            .collect();
        for thread in threads {
            let counters = thread.join().unwrap();
            assert!(counters.sent >= 1000 + 300 + 3, "{transport}: {counters:?}");
        }
        // A copy of the arena has no rings but those that every window has.
        let pairs = if transport.has_rings() { 2 } else { 1 };
        let (window, version) = connection.window.as_ref().unwrap();
        assert_eq!(
            (window.geometry().pairs(), window.geometry().arena(), *version),
            (pairs, 1 << 20, 1)
        );
        drop(connection);
        assert!(server.wait().unwrap().success(), "{transport}");
    }
}

/// Counts come in rings of eight that are full now and then, and answers to calls only.
fn client(mut end: ClientEnd) -> accel_transport::Counters {
    for value in 0..1000 {
        end.send(&record(COUNT, value), MOST).unwrap();
    }
    let answer = end.call(&record(ASK_COUNT, 0), MOST).unwrap();
    assert_eq!(answer.words()[2], 999 * 1000 / 2);
    (0..300).for_each(|value| echo(&mut end, value).unwrap());
    // An answer that comes too late is nobody's.
    let late = end.call(&record(LATE, 300), Duration::from_millis(60));
    assert!(matches!(late, Err(Error::Deadline { .. })), "{late:?}");
    echo(&mut end, 77).unwrap();
    end.counters()
}

#[test]
fn a_server_follows_its_client_from_cpu_to_cpu() {
    if half().is_some() {
        serve(accept(inherited(), &settings()).unwrap());
        return;
    }
    let (socket, mut server) = start_other_half("a_server_follows_its_client_from_cpu_to_cpu", "server");
    let mut connection = connect(socket, &offer(Transport::SameCpu)).unwrap();
    let mut end = connection.ends.remove(0);
    let allowed = sched_getaffinity(None).unwrap();
    let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).take(4);
    for cpu in cpus {
        let mut only = CpuSet::new();
        only.set(cpu);
        sched_setaffinity(None, &only).unwrap();
        // The server looks where its client is each time that it has slept.
        let at = (0..1000).map(|_| end.call(&record(WHERE, 0), MOST).unwrap().words()[2]);
        let there = at.skip_while(|at| *at != cpu as u64).take(10).collect::<Vec<_>>();
        assert_eq!(there, [cpu as u64; 10]);
    }
    drop((connection, end));
    assert!(server.wait().unwrap().success());
}

#[test]
fn a_burst_is_one_bell() {
    if half().is_some() {
        serve(
            accept(
                inherited(),
                &Settings {
                    records: 256,
                    ..settings()
                },
            )
            .unwrap(),
        );
        return;
    }
    for transport in [Transport::Bell, Transport::SameCpu, Transport::Spin] {
        let (socket, mut server) = start_other_half("a_burst_is_one_bell", "server");
        let mut connection = connect(socket, &offer(transport)).unwrap();
        let mut end = connection.ends.remove(0);
        for round in 1..20 {
            // So long that the server sleeps.
            std::thread::sleep(Duration::from_millis(2));
            let before = end.counters().bells;
            // Put without a pause, as bursts are; one that is held up by the machine goes in two.
            let begun = Instant::now();
            for value in 0..32 {
                end.send(&record(COUNT, value), MOST).unwrap();
            }
            let held_up = begun.elapsed() > Duration::from_micros(50);
            let bells = end.counters().bells - before;
            assert!(bells <= 1 || held_up, "{transport}: {bells} bells for a burst of 32");
            assert_eq!(
                end.call(&record(ASK_COUNT, 0), MOST).unwrap().words()[2],
                round * 31 * 32 / 2
            );
        }
        drop((connection, end));
        server.wait().unwrap();
    }
}

#[test]
fn a_server_that_takes_nothing_is_waited_for_until_the_deadline() {
    const TEST: &str = "a_server_that_takes_nothing_is_waited_for_until_the_deadline";
    if half().is_some() {
        let _connection = accept(inherited(), &settings()).unwrap();
        loop {
            std::thread::park();
        }
    }
    for transport in Transport::ALL {
        let (socket, mut server) = start_other_half(TEST, "server");
        let mut connection = connect(socket, &offer(transport)).unwrap();
        let mut end = connection.ends.remove(0);
        let short = Duration::from_millis(90);
        let begun = Instant::now();
        // A socket's buffers take some.
        let error = loop {
            if let Err(error) = end.send(&record(COUNT, 1), short) {
                break error;
            }
        };
        assert!(
            matches!(&error, Error::Deadline { waited, .. } if *waited >= short),
            "{transport}: {error}"
        );
        assert!(begun.elapsed() < MOST);
        let waiting = std::thread::spawn(move || (end.call(&record(ECHO, 1), MOST).unwrap_err(), Instant::now()));
        std::thread::sleep(Duration::from_millis(5));
        server.kill().unwrap();
        let killed = Instant::now();
        let (error, then) = waiting.join().unwrap();
        assert!(matches!(error, Error::PeerGone), "{transport}: {error}");
        assert!(then.saturating_duration_since(killed) < AT_LAST, "{transport}");
        server.wait().unwrap();
    }
}

/// Arenas of sizes that no other test has, in bytes; the rest of those windows is less than the difference.
const ODD: [u64; 2] = [4096 * 1237, 4096 * 2237];

fn with_arena(arena: u64) -> Settings {
    Settings { arena, ..settings() }
}

/// Mappings of windows with that arena: a memfd goes with its last descriptor and mapping, and these windows' descriptors were never
/// kept.
fn left_of_windows(arena: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let sizes = maps
        .lines()
        .filter(|line| line.contains("memfd:accel-window"))
        .map(|line| {
            let (start, end) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
            u64::from_str_radix(end, 16).unwrap() - u64::from_str_radix(start, 16).unwrap()
        });
    sizes.filter(|size| (arena..arena + 4096 * 1000).contains(size)).count()
}

/// What it took until the other side's end was known, of several rounds.
fn judge(transport: Transport, mut took: Vec<Duration>) {
    took.sort();
    assert!(*took.last().unwrap() < AT_LAST, "{transport}: {took:?}");
    assert!(took[took.len() / 2] < SOON, "{transport}: {took:?}");
}

/// A moment for a kill, another each time.
fn moment(round: u64) -> Duration {
    Duration::from_micros(round * 7919 % 13_000)
}

#[test]
fn a_server_that_is_killed_is_an_error_at_once() {
    if half().is_some() {
        serve(accept(inherited(), &with_arena(ODD[0])).unwrap());
        return;
    }
    for transport in Transport::ALL {
        let mut took = Vec::new();
        for round in 1..6 {
            let (socket, mut server) = start_other_half("a_server_that_is_killed_is_an_error_at_once", "server");
            let mut connection = connect(socket, &offer(transport)).unwrap();
            let ends = connection.ends.drain(..).zip(0..);
            let calling: Vec<_> = ends
                .map(|(mut end, which)| {
                    std::thread::spawn(move || {
                        for value in 0.. {
                            // One end calls, the other one floods the ring.
                            let went = match which {
                                0 => echo(&mut end, value),
                                _ => end.send(&record(COUNT, 1), MOST).map(drop),
                            };
                            if let Err(error) = went {
                                let again = echo(&mut end, 0).unwrap_err();
                                return (error, again, Instant::now());
                            }
                        }
                        unreachable!("numbers have ended")
                    })
                })
                .collect();
            std::thread::sleep(moment(round));
            server.kill().unwrap();
            let killed = Instant::now();
            for thread in calling {
                let (error, again, then) = thread.join().unwrap();
                assert!(matches!(error, Error::PeerGone), "{transport}: {error}");
                assert!(matches!(again, Error::PeerGone), "{transport}: {again}");
                took.push(then.saturating_duration_since(killed));
            }
            server.wait().unwrap();
        }
        judge(transport, took);
    }
    assert_eq!(left_of_windows(ODD[0]), 0);
}

#[test]
fn a_client_that_is_killed_is_an_error_at_once() {
    if half().is_some() {
        let transport = half().unwrap().parse().unwrap();
        let mut connection = connect(inherited(), &offer(transport)).unwrap();
        let ends = connection.ends.drain(..);
        let calling: Vec<_> = ends
            .map(|mut end| std::thread::spawn(move || (0..u64::MAX).for_each(|value| echo(&mut end, value).unwrap())))
            .collect();
        calling.into_iter().for_each(|thread| thread.join().unwrap());
        return;
    }
    for transport in Transport::ALL {
        let mut took = Vec::new();
        for round in 1..6 {
            let (socket, mut client) =
                start_other_half("a_client_that_is_killed_is_an_error_at_once", &transport.to_string());
            let mut connection = accept(socket, &with_arena(ODD[1])).unwrap();
            let ends = connection.ends.drain(..);
            let serving: Vec<_> = ends
                .map(|end| std::thread::spawn(move || (serve_end(end), Instant::now())))
                .collect();
            std::thread::sleep(moment(round));
            assert!(!connection.is_over());
            client.kill().unwrap();
            let killed = Instant::now();
            for thread in serving {
                let (error, then) = thread.join().unwrap();
                assert!(matches!(error, Error::PeerGone), "{transport}: {error}");
                took.push(then.saturating_duration_since(killed));
            }
            client.wait().unwrap();
            // The watch's thread is woken as well as these were.
            while !connection.is_over() {
                assert!(killed.elapsed() < AT_LAST, "{transport}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        judge(transport, took);
    }
    assert_eq!(left_of_windows(ODD[1]), 0);
}

#[test]
fn a_connection_that_its_server_drops_is_over_for_both() {
    if half().is_some() {
        let mut connection = accept(inherited(), &settings()).unwrap();
        let mut ends = connection.ends.drain(..).collect::<Vec<_>>();
        let request = ends[0].receive(None).unwrap();
        ends[0].finish(&request, Some(&request), MOST).unwrap();
        ends[0].flush(MOST).unwrap();
        let idle = std::thread::spawn(move || ends.pop().unwrap().receive(None));
        drop(connection);
        assert!(matches!(idle.join().unwrap(), Err(Error::PeerGone)));
        // It goes on, so that nobody hangs up.
        std::thread::sleep(MOST);
        return;
    }
    for transport in [Transport::Spin, Transport::Bell, Transport::SameCpu] {
        let (socket, mut server) = start_other_half("a_connection_that_its_server_drops_is_over_for_both", "server");
        let mut connection: ClientConnection = connect(socket, &offer(transport)).unwrap();
        let mut end = connection.ends.remove(0);
        echo(&mut end, 5).unwrap();
        let error = end.call(&record(ECHO, 6), MOST).unwrap_err();
        assert!(matches!(error, Error::PeerGone), "{transport}: {error}");
        server.kill().unwrap();
        server.wait().unwrap();
    }
}
