//! A client whose machine is saved and started again, with the server and the agent that is the test: sockets are cut, the rings stay, and
//! other sockets come. What a server has of the rings when it ends, the next one goes on with.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use accel_transport::{
    Agreement, ClientConnection, ClientEnd, Error, Offer, Protocol, Settings, Signal as _, SocketSignal, Transport,
    connect,
};
use accel_window::{Holder, ServerPair, Window};
use wire::packet::PacketSocket;
use wire::ring::Record;

/// No machine is so busy that something takes longer.
const MOST: Duration = Duration::from_secs(60);

/// By when a client knows that its server is gone, if it gets to run, and where the machine does other things at that moment.
const SOON: Duration = Duration::from_millis(100);
const AT_LAST: Duration = Duration::from_secs(5);

/// The kinds of requests, in the first word.
const ECHO: u64 = 0;
const COUNT: u64 = 1;
const ASK_COUNT: u64 = 2;

/// A pair at its server: its rings, and what a request adds to.
struct Half {
    rings: ServerPair,
    count: u64,
}

/// Serves one pair until its socket has ended; whatever is not done then is the next server's.
struct Serving {
    socket: UnixStream,
    cut: Arc<AtomicBool>,
    thread: JoinHandle<Half>,
}

impl Serving {
    /// One that `looks` at its ring first, or not before it is woken.
    fn new(mut half: Half, socket: UnixStream, looks: bool) -> Self {
        let cut = Arc::new(AtomicBool::new(false));
        let signal = SocketSignal::new(socket.try_clone().unwrap().into());
        let is_cut = Arc::clone(&cut);
        let thread = spawn(move || {
            let mut goes_on = looks || signal.wait(0, MOST).is_ok();
            while goes_on && !is_cut.load(Ordering::Relaxed) {
                // A wake-up that cannot be sent any more is lost, as it is when the machine is saved.
                let wakes = half.serve();
                let sleeps = !wakes && !half.rings.submissions.arm();
                goes_on = (!wakes || signal.wake().is_ok()) && (!sleeps || signal.wait(0, MOST).is_ok());
            }
            half
        });
        Self { socket, cut, thread }
    }

    fn cut(self) -> Half {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        self.thread.join().unwrap()
    }
}

impl Half {
    /// Answers what is there. Whether the client is to be woken.
    fn serve(&mut self) -> bool {
        let mut wakes = false;
        for _ in 0..5 {
            let Some(request) = self.rings.submissions.pop().unwrap() else {
                break;
            };
            let [kind, _, value, inverse, ..] = *request.words();
            assert_eq!(value, !inverse, "a torn record");
            self.count += value * u64::from(kind == COUNT);
            let answer = match kind {
                COUNT => None,
                ASK_COUNT => Some(record(ASK_COUNT, self.count)),
                _ => Some(request),
            };
            if let Some(answer) = answer {
                let answer = answer.with_sequence(request.sequence());
                // Each client waits for its answer before it puts more than the ring has.
                self.rings.completions.push(&answer).unwrap().unwrap();
            }
        }
        wakes |= self.rings.completions.publish();
        wakes | self.rings.submissions.release()
    }
}

fn record(kind: u64, value: u64) -> Record {
    Record::from_words([kind, 0, value, !value, value, value, value, value])
}

/// The server's and the agent's side of a client's connection.
struct Machine {
    agent: PacketSocket,
    holder: Option<Holder>,
    serving: Vec<Serving>,
    halves: Vec<Half>,
    /// The client's sockets of the beginning.
    theirs: Vec<OwnedFd>,
}

/// A stream for each pair: the server's ends, and the client's.
fn streams(pairs: usize) -> (Vec<UnixStream>, Vec<OwnedFd>) {
    let both = (0..pairs).map(|_| UnixStream::pair().unwrap());
    both.map(|(own, theirs)| (own, OwnedFd::from(theirs))).unzip()
}

impl Machine {
    /// With a client that has met its server.
    fn new(transport: Transport, pairs: u32) -> (Self, ClientConnection) {
        let (near, agent) = PacketSocket::pair().unwrap();
        let offer = Offer {
            transports: vec![transport],
            pairs,
            patience: MOST,
        };
        let client = spawn(move || connect(near, &offer));
        agent.wait_to_receive(Instant::now() + MOST).unwrap();
        let (hello, _) = agent.receive().unwrap();
        let settings = Settings {
            transports: vec![transport],
            pairs,
            records: 8,
            arena: 4096,
            patience: MOST,
            busy_poll: None,
        };
        let agreed = Agreement::on(&hello, &settings).unwrap();
        let file = rustix::fs::memfd_create("slot", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        let region = accel_window::map_file(&file).unwrap();
        let (holder, window) = agreed.make_window(region, &settings).unwrap();
        let (own, theirs) = streams(pairs as usize);
        let fds: Vec<_> = std::iter::once(&file).chain(&theirs).map(AsFd::as_fd).collect();
        agent.send(&agreed.welcome_in_guest().unwrap(), &fds).unwrap();
        let mut machine = Self {
            agent,
            holder: Some(holder),
            serving: Vec::new(),
            halves: halves(&window, pairs),
            theirs,
        };
        machine.serve(own, true);
        (machine, client.join().unwrap().unwrap())
    }

    fn serve(&mut self, streams: Vec<UnixStream>, looks: bool) {
        let both = self.halves.drain(..).zip(streams);
        self.serving = both.map(|(half, stream)| Serving::new(half, stream, looks)).collect();
    }

    /// The server ends in the middle of whatever it does, with its sockets.
    fn cut(&mut self) {
        self.halves = self.serving.drain(..).map(Serving::cut).collect();
    }

    /// The server stops, and its sockets stay open: nobody hears of what is sent there.
    fn pause(&mut self) -> Vec<UnixStream> {
        let mut sockets = Vec::new();
        for (serving, theirs) in self.serving.drain(..).zip(&self.theirs) {
            serving.cut.store(true, Ordering::Relaxed);
            rustix::io::write(theirs, &[1]).unwrap();
            self.halves.push(serving.thread.join().unwrap());
            sockets.push(serving.socket);
        }
        sockets
    }

    /// Another server has the window, and the client gets other sockets.
    fn resume(&mut self, looks: bool) {
        let (own, theirs) = streams(self.halves.len());
        self.serve(own, looks);
        self.hand_over(&theirs);
    }

    fn hand_over(&self, sockets: &[impl AsFd]) {
        let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        self.agent.send(b"+", &sockets).unwrap();
    }
}

fn halves(window: &Window, pairs: u32) -> Vec<Half> {
    let half = |pair| Half {
        rings: window.server_pair(pair).unwrap(),
        count: 0,
    };
    (0..pairs).map(half).collect()
}

fn echo(end: &mut ClientEnd, value: u64) -> Result<(), Error> {
    let answer = end.call(&record(ECHO, value), MOST)?;
    assert_eq!(answer.words()[2..], record(ECHO, value).words()[2..]);
    Ok(())
}

/// A moment, another each time.
fn moment(round: u64) -> Duration {
    Duration::from_micros(round * 7919 % 13_000)
}

/// Threads that call, and threads that flood their rings, until they are told to stop; each tells what it has done.
struct Clients {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    fn new(connection: &mut ClientConnection) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let thread = |(which, mut end): (u64, ClientEnd)| {
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            spawn(move || {
                let mut sum = 0;
                for value in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    match which % 3 {
                        // Sleeps between its calls, so that both sides do.
                        0 => {
                            echo(&mut end, value).unwrap();
                            sleep(moment(value) / 20);
                        }
                        1 => echo(&mut end, value).unwrap(),
                        _ => {
                            end.send(&record(COUNT, value), MOST).unwrap();
                            sum += value;
                        }
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
                // Nothing was lost, and nothing came twice.
                let count = end.call(&record(ASK_COUNT, 0), MOST).unwrap();
                assert_eq!(count.words()[2], sum);
            })
        };
        let threads = (0..).zip(connection.ends.drain(..)).map(thread).collect();
        Self { stop, done, threads }
    }

    /// Until they have done something more.
    fn go_on(&self) {
        let (before, begun) = (self.done.load(Ordering::Relaxed), Instant::now());
        while self.done.load(Ordering::Relaxed) < before + 100 {
            assert!(begun.elapsed() < MOST, "nothing goes on");
            sleep(Duration::from_millis(1));
        }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn calls_go_on_in_both_directions_however_often_the_machine_is_saved() {
    for transport in [Transport::Spin, Transport::Bell] {
        let (mut machine, mut connection) = Machine::new(transport, 16);
        let clients = Clients::new(&mut connection);
        for round in 0..30 {
            clients.go_on();
            sleep(moment(round));
            machine.cut();
            // At once, or so late that all have found out.
            sleep(moment(round / 3) * 4);
            machine.resume(true);
        }
        // The machine is saved again before anybody has seen the sockets of the last time, or while these come.
        for round in 0..30 {
            machine.cut();
            machine.resume(round % 2 == 0);
        }
        clients.go_on();
        clients.end();
        machine.cut();
    }
}

#[test]
fn a_server_that_waits_to_be_woken_is_woken() {
    for transport in [Transport::Spin, Transport::Bell] {
        for paused in [false, true] {
            let (mut machine, mut connection) = Machine::new(transport, 2);
            let mut end = connection.ends.remove(0);
            echo(&mut end, 1).unwrap();
            let old = match paused {
                // It is woken, and the machine is saved before it sees that.
                true => machine.pause(),
                false => {
                    machine.cut();
                    Vec::new()
                }
            };
            let calling = spawn(move || echo(&mut end, 2).unwrap());
            sleep(Duration::from_millis(20));
            let cut = |socket: &UnixStream| socket.shutdown(std::net::Shutdown::Both).unwrap();
            old.iter().for_each(cut);
            sleep(Duration::from_millis(20));
            machine.resume(false);
            calling.join().unwrap();
            machine.cut();
        }
        let (mut machine, mut connection) = Machine::new(transport, 2);
        let mut end = connection.ends.remove(0);
        // Nobody waits for this one's answer, and it is done all the same.
        machine.cut();
        let sending = spawn(move || {
            end.send(&record(COUNT, 7), MOST).unwrap();
            end.flush(MOST).unwrap();
            end
        });
        sleep(moment(5));
        machine.resume(true);
        let end = sending.join().unwrap();
        let begun = Instant::now();
        loop {
            machine.cut();
            if machine.halves[0].count == 7 {
                break;
            }
            assert!(begun.elapsed() < MOST, "{transport}");
            machine.resume(true);
            sleep(Duration::from_millis(5));
        }
        drop(end);
    }
}

#[test]
fn sockets_come_before_the_old_ones_end_and_in_more_than_one_packet() {
    let (mut machine, mut connection) = Machine::new(Transport::Bell, 5);
    let mut end = connection.ends.remove(3);
    echo(&mut end, 1).unwrap();
    let _old = machine.pause();
    let calling = spawn(move || (echo(&mut end, 2), end));
    sleep(Duration::from_millis(20));
    let (own, theirs) = streams(5);
    machine.serve(own, true);
    machine.hand_over(&theirs[..1]);
    sleep(Duration::from_millis(60));
    machine.hand_over(&theirs[1..]);
    let (called, mut end) = calling.join().unwrap();
    called.unwrap();
    // It is asleep, and its client's wake-up goes to the new socket.
    sleep(Duration::from_millis(5));
    echo(&mut end, 2).unwrap();
    // An end that nobody had used has its new socket, too.
    echo(&mut end, 3).unwrap();
    echo(&mut connection.ends[0], 4).unwrap();
    machine.cut();
}

/// How long the error of each of these took to come after something was done.
fn errors(connection: &mut ClientConnection, before: impl FnOnce(), end: impl FnOnce()) -> Vec<(Error, Duration)> {
    let calling: Vec<_> = connection
        .ends
        .drain(..)
        .map(|mut end| {
            spawn(move || {
                let error = (0..).find_map(|value| echo(&mut end, value).err()).unwrap();
                let then = Instant::now();
                // It stays so.
                assert!(echo(&mut end, 0).is_err());
                (error, then)
            })
        })
        .collect();
    before();
    let ended = Instant::now();
    end();
    let told = calling.into_iter().map(|thread| thread.join().unwrap());
    let mut told: Vec<_> = told
        .map(|(error, then)| (error, then.saturating_duration_since(ended)))
        .collect();
    told.sort_by_key(|(_, took)| *took);
    assert!(told.last().unwrap().1 < AT_LAST, "{told:?}");
    assert!(told[told.len() / 2].1 < SOON, "{told:?}");
    told
}

#[test]
fn a_server_that_is_gone_is_an_error_at_once() {
    for transport in [Transport::Spin, Transport::Bell] {
        for waits in [0, 70] {
            let (mut machine, mut connection) = Machine::new(transport, 16);
            let holder = machine.holder.take();
            let cut = || {
                sleep(Duration::from_millis(5));
                machine.cut();
                // They wait for another server, or have not found out yet.
                sleep(Duration::from_millis(waits));
            };
            let told = errors(&mut connection, cut, || drop(holder));
            assert!(
                told.iter().all(|(error, _)| matches!(error, Error::PeerGone)),
                "{told:?}"
            );
        }
    }
}

#[test]
fn an_agent_that_hangs_up_ends_it() {
    for cut in [false, true] {
        let (mut machine, mut connection) = Machine::new(Transport::Bell, 4);
        let (agent, other) = PacketSocket::pair().unwrap();
        let agent = std::mem::replace(&mut machine.agent, agent);
        let before = || {
            sleep(Duration::from_millis(5));
            machine.cut();
            sleep(Duration::from_millis(5));
        };
        match cut {
            true => drop(errors(&mut connection, before, || drop(agent))),
            // Answers come, so nobody asks; one that waits finds out.
            false => {
                let mut end = connection.ends.remove(0);
                echo(&mut end, 1).unwrap();
                drop(agent);
                let error = end.receive(MOST).unwrap_err();
                assert!(matches!(error, Error::PeerGone), "{error}");
                machine.cut();
            }
        }
        drop(other);
    }
}

#[test]
fn what_is_no_socket_for_each_pair_ends_it() {
    let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let socket = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let packets = || OwnedFd::from(PacketSocket::pair().unwrap().0);
    let cases: [(&[u8], Vec<OwnedFd>, &str); 5] = [
        (
            b"+",
            vec![socket(), socket(), socket()],
            "3 descriptors came, 2 were due",
        ),
        (b"+", vec![socket(), file()], "no stream socket"),
        (b"+", vec![packets(), socket()], "no stream socket"),
        (b"+", vec![], "0 descriptors"),
        (b"more", vec![socket(), socket()], "4 bytes"),
    ];
    for (bytes, fds, words) in cases {
        let (mut machine, mut connection) = Machine::new(Transport::Bell, 2);
        let mut end = connection.ends.remove(0);
        echo(&mut end, 1).unwrap();
        machine.cut();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        machine.agent.send(bytes, &fds).unwrap();
        let error = echo(&mut end, 2).unwrap_err();
        assert!(
            matches!(
                &error,
                Error::Protocol(Protocol::Greeting {
                    packet: "resumption",
                    ..
                })
            ),
            "{error}"
        );
        assert!(error.to_string().contains(words), "{error}");
        // The agent hears of it, and every other end has it, too.
        machine.agent.wait_to_receive(Instant::now() + MOST).unwrap();
        assert!(machine.agent.receive().is_err());
        assert!(matches!(echo(&mut connection.ends[0], 3), Err(Error::PeerGone)));
    }
}

#[test]
fn a_call_waits_no_longer_than_it_is_to() {
    let (mut machine, mut connection) = Machine::new(Transport::Bell, 1);
    let mut end = connection.ends.remove(0);
    machine.cut();
    let begun = Instant::now();
    let error = end.receive(Duration::from_millis(90)).unwrap_err();
    assert!(matches!(error, Error::Deadline { .. }), "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(90) && begun.elapsed() < AT_LAST);
    machine.resume(false);
    echo(&mut end, 1).unwrap();
    machine.cut();
}
