//! Lets clients and the host's server meet: passes on what they say, and gives a client its file of the window and its streams to the
//! host. Knows nothing of what is said.
//!
//! ```text
//!  client: hello ─► free files, FromGuest::Connect ─► Accept, and all of its streams ─► welcome with descriptors ─► gone, or Over
//!            ▲              │ the server's connection has ended                          served ──► cut ──► gone, or too late
//!            └──────────────┘ (by another number)                                           ▲         │ resumed, Accept, and
//!                                                                                           └─────────┘ all of its streams
//! ```
//! Each client has a thread, and one at a time is between its hello and its welcome: that the files are free is true for that time.
//!
//! When the machine was saved and is started again, every connection of the host's has ended, and another server goes on with clients.
//! That it was so is known by what the next server says ([`Begin::Control`]), so clients are left as they are until then, for a while.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::accelerator::{Begin, FromGuest, FromHost, VERSION, receive, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use wire::packet::{MAX_FDS, PacketError, PacketSocket};
use wire::{FrameReader, FrameWriter};

use super::slots;
use crate::{STACK_SIZE, say};

/// Clients at a time, with those that wait.
const MOST_CLIENTS: usize = 64;

/// How long a client has for its hello, a server to be there, and for its answer with all streams. A client waits 5 s for its welcome.
const HELLO: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_millis(4500);

/// How long clients stay whose server's connection has ended, until another server says that it goes on with them. They wait for 15 s.
const RESUME: Duration = Duration::from_secs(10);

/// How long the first message of a connection of the host's may take.
const BEGIN: Duration = Duration::from_secs(10);

/// The most streams of a client.
const MOST_PAIRS: u32 = 64;

/// What a packet has that carries only descriptors (accel-transport, `connect`).
const MORE: &[u8] = b"+";

const NO_SERVER: &str = r#"{"refused":"the server of this sandbox's accelerator does not answer; the host's log says why (`basalt accel ls`, on the host)"}"#;

/// What the server said about a client, and what has come for it.
#[derive(Debug, Default)]
struct Client {
    answer: Option<Answer>,
    streams: BTreeMap<u32, UnixStream>,
    /// Its socket, once it is served: shut down when the server is gone, or with it.
    socket: Option<Arc<PacketSocket>>,
    /// The server that was asked about it, or that goes on with it; told of its end.
    asked: Option<Arc<FrameWriter<UnixStream>>>,
    /// That server's connection has ended.
    cut: bool,
    over: bool,
}

/// What comes of a client's hello.
#[derive(Debug, PartialEq, Eq)]
enum Met {
    Served,
    /// It was told so.
    Refused,
    /// The server's connection ended before there was an answer: the next one is to be asked.
    ServerLost,
}

#[derive(Clone, Debug)]
enum Answer {
    Accept {
        file: Option<String>,
        pairs: u32,
        welcome: String,
    },
    Refuse(String),
}

#[derive(Debug, Default)]
struct State {
    clients: BTreeMap<u64, Client>,
    next: u64,
    /// The server's connection, and which one of all it is.
    server: Option<Arc<FrameWriter<UnixStream>>>,
    generation: u64,
}

/// Whoever lets them meet.
#[derive(Debug)]
pub(crate) struct Broker {
    window: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
    /// Held between a client's hello and its welcome.
    meeting: Mutex<()>,
    /// How long a server has to be there, and to answer.
    patience: Duration,
    /// How long clients stay without a server.
    resume: Duration,
}

/// A client that is not known any more when this is dropped, and of which the server is told.
struct Known {
    broker: Arc<Broker>,
    client: u64,
}

impl Drop for Known {
    fn drop(&mut self) {
        let known = self.broker.lock().clients.remove(&self.client);
        let server = known.and_then(|client| client.asked);
        // One that does not hear it has ended, and so have its clients.
        let told = server.map(|server| send(&server, &FromGuest::Gone { client: self.client }));
        drop(told);
    }
}

impl Broker {
    /// For clients that get files of this directory.
    pub(crate) fn new(window: &Path) -> Self {
        Self {
            window: window.to_owned(),
            state: Mutex::default(),
            changed: Condvar::new(),
            meeting: Mutex::new(()),
            patience: ANSWER,
            resume: RESUME,
        }
    }

    /// The same for impatient tests.
    #[cfg(test)]
    pub(crate) fn within(self, patience: Duration, resume: Duration) -> Self {
        Self {
            patience,
            resume,
            ..self
        }
    }

    /// The how manieth server it has.
    #[cfg(test)]
    pub(crate) fn generation(&self) -> u64 {
        self.lock().generation
    }

    /// Hears what such a server said, whether another is there meanwhile or not.
    #[cfg(test)]
    pub(crate) fn hear(&self, stream: UnixStream, generation: u64) -> Result<(), agent_api::Error> {
        self.listen(&mut FrameReader::new(stream), generation)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another client, unless there are too many.
    fn register(self: &Arc<Self>) -> Option<Known> {
        let mut state = self.lock();
        if state.clients.len() >= MOST_CLIENTS {
            say(format_args!(
                "{MOST_CLIENTS} programs use the accelerator; one more is hung up"
            ));
            return None;
        }
        state.next += 1;
        let client = state.next;
        state.clients.insert(client, Client::default());
        let broker = Arc::clone(self);
        Some(Known { broker, client })
    }

    /// A program has connected.
    pub(crate) fn take_client(self: &Arc<Self>, socket: PacketSocket) {
        let Some(known) = self.register() else {
            return;
        };
        spawn("accel-client", move || {
            let broker = Arc::clone(&known.broker);
            if let Err(error) = broker.serve_client(known, socket) {
                say(format_args!("a client of the accelerator: {error}"));
            }
        });
    }

    fn serve_client(self: &Arc<Self>, mut known: Known, socket: PacketSocket) -> Result<(), crate::Error> {
        let fail = |what| crate::Error::system(what);
        let hello = socket
            .wait_to_receive(Instant::now() + HELLO)
            .and_then(|()| socket.receive());
        let (hello, _) = hello.map_err(|error| fail("its hello")(std::io::Error::other(error)))?;
        let hello = String::from_utf8(hello).map_err(|error| fail("its hello")(std::io::Error::other(error)))?;
        let socket = Arc::new(socket);
        let mut deadline = None;
        let met = loop {
            let meeting = self.meeting.lock().unwrap_or_else(PoisonError::into_inner);
            let free = slots::free(&self.window).map_err(fail("looking for a free file of the window"))?;
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.patience);
            let met = self.meet(known.client, (&socket, &hello), &free, deadline);
            drop((free, meeting));
            match met.map_err(|error| fail("its welcome")(std::io::Error::other(error)))? {
                Met::ServerLost => (),
                met => break met,
            }
            // By another number: what still comes for this one is not for it.
            drop(known);
            match self.register() {
                Some(again) => known = again,
                None => return Ok(()),
            }
        };
        if met == Met::Refused {
            return Ok(());
        }
        // The client says no more: whatever there is, is its end, or was brought about by `end`.
        loop {
            match poll(&mut [PollFd::new(&*socket, PollFlags::IN)], None) {
                Err(rustix::io::Errno::INTR) => (),
                outcome => return outcome.map(drop).map_err(crate::Error::system("waiting for its end")),
            }
        }
    }

    /// Asks the server, and gives the client what it gets.
    fn meet(
        &self,
        client: u64,
        (socket, hello): (&Arc<PacketSocket>, &str),
        free: &[(String, File)],
        deadline: Instant,
    ) -> Result<Met, PacketError> {
        let asked = FromGuest::Connect {
            client,
            hello: hello.to_owned(),
            free: free.iter().map(|(name, _)| name.clone()).collect(),
        };
        let server = self.wait(deadline, |state| {
            let server = state.server.clone()?;
            state.clients.get_mut(&client)?.asked = Some(Arc::clone(&server));
            Some(server)
        });
        // One that does not hear it has ended, which its own thread finds out.
        let told = server.map(|server| send(&server, &asked));
        let met = told.and_then(|_| self.wait(deadline, |state| state.clients.get_mut(&client)?.meet(socket, free)));
        met.unwrap_or_else(|| refuse(socket, NO_SERVER))
    }

    /// What is looked for, as soon as it is there.
    fn wait<T>(&self, deadline: Instant, look: impl Fn(&mut State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            (state, _) = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The host has connected.
    pub(crate) fn take_host(self: &Arc<Self>, stream: UnixStream) {
        let broker = Arc::clone(self);
        spawn("accel-host", move || {
            if let Err(error) = broker.serve_host(stream) {
                say(format_args!("the accelerator's server: {error}"));
            }
        });
    }

    fn serve_host(&self, stream: UnixStream) -> Result<(), agent_api::Error> {
        let local = |what| move |source| agent_api::Error::Local { what, source };
        stream
            .set_read_timeout(Some(BEGIN))
            .map_err(local("setting a timeout"))?;
        let mut reader = FrameReader::new(stream);
        match receive(&mut reader)? {
            None => Ok(()),
            Some(Begin::Pair { client, pair }) => {
                // Nothing was read ahead.
                let stream = reader.into_inner();
                stream.set_read_timeout(None).map_err(local("setting a timeout"))?;
                let mut state = self.lock();
                if let Some(entry) = state.clients.get_mut(&client).filter(|_| pair < MOST_PAIRS) {
                    entry.streams.insert(pair, stream);
                    entry.hand_over();
                    self.changed.notify_all();
                }
                Ok(())
            }
            Some(Begin::Control { version, .. }) if version != VERSION => Err(agent_api::Error::Refused(format!(
                "it speaks version {version}, this guest's agent {VERSION}; start the sandbox anew"
            ))),
            Some(Begin::Control { resumed, .. }) => {
                let stream = reader.get_ref();
                stream.set_read_timeout(None).map_err(local("setting a timeout"))?;
                let again = stream.try_clone().map_err(local("copying a descriptor"))?;
                let generation = self.begin(FrameWriter::new(again), &resumed);
                if let Err(error) = self.listen(&mut reader, generation) {
                    say(format_args!("the accelerator's server: {error}"));
                }
                drop(reader);
                self.cut(generation);
                self.expire(generation);
                Ok(())
            }
        }
    }

    /// There is a server, which goes on with some of the clients that the one before it had; the others are over.
    fn begin(&self, server: FrameWriter<UnixStream>, resumed: &[u64]) -> u64 {
        let server = Arc::new(server);
        let mut state = self.lock();
        state.cut();
        for (client, entry) in state.clients.iter_mut().filter(|(_, entry)| entry.socket.is_some()) {
            match resumed.contains(client) {
                true => {
                    entry.asked = Some(Arc::clone(&server));
                    entry.cut = false;
                }
                false => entry.end(),
            }
        }
        let is_served = |client: &u64| state.clients.get(client).is_some_and(Client::is_served);
        let gone: Vec<u64> = resumed.iter().copied().filter(|client| !is_served(client)).collect();
        state.server = Some(Arc::clone(&server));
        state.generation += 1;
        let generation = state.generation;
        self.changed.notify_all();
        drop(state);
        for client in gone {
            // One that does not hear it has ended, which its own thread finds out.
            drop(send(&server, &FromGuest::Gone { client }));
        }
        generation
    }

    /// A server's connection has ended.
    fn cut(&self, generation: u64) {
        let mut state = self.lock();
        if state.generation == generation {
            state.cut();
            self.changed.notify_all();
        }
    }

    /// Ends the clients with which no other server goes on in time.
    fn expire(&self, generation: u64) {
        let is_last = |state: &mut State| state.generation == generation;
        let waited = self.changed.wait_timeout_while(self.lock(), self.resume, is_last);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.generation == generation {
            let cut = state.clients.values_mut().filter(|entry| entry.cut);
            cut.for_each(Client::end);
        }
    }

    fn listen(&self, reader: &mut FrameReader<UnixStream>, generation: u64) -> Result<(), agent_api::Error> {
        while let Some(said) = receive(reader)? {
            let mut state = self.lock();
            if state.generation != generation {
                return Ok(());
            }
            let (client, answer) = match said {
                FromHost::Accept {
                    client,
                    file,
                    pairs,
                    welcome,
                } => (client, Some(Answer::Accept { file, pairs, welcome })),
                FromHost::Refuse { client, welcome } => (client, Some(Answer::Refuse(welcome))),
                FromHost::Over { client } => (client, None),
            };
            // One that is gone already was told of.
            let Some(entry) = state.clients.get_mut(&client) else {
                continue;
            };
            match answer {
                Some(answer) => {
                    entry.answer = Some(answer);
                    entry.hand_over();
                }
                None => entry.end(),
            }
            self.changed.notify_all();
        }
        Ok(())
    }
}

impl State {
    /// There is no server.
    fn cut(&mut self) {
        // Its thread ends as well.
        if let Some(server) = self.server.take() {
            // One that has hung up is not connected any more.
            drop(server.with(|stream| stream.shutdown(std::net::Shutdown::Both)));
        }
        let asked = self.clients.values_mut().filter(|client| client.asked.is_some());
        asked.for_each(|client| client.cut = true);
    }
}

impl Client {
    fn is_served(&self) -> bool {
        self.socket.is_some() && !self.over
    }

    /// Gives it what there is for it, once that is all; from then on it is served. The state is locked meanwhile, so a server's end is
    /// before that or after it.
    fn meet(&mut self, socket: &Arc<PacketSocket>, free: &[(String, File)]) -> Option<Result<Met, PacketError>> {
        match &self.answer {
            _ if self.over => Some(refuse(socket, NO_SERVER)),
            _ if self.cut => Some(Ok(Met::ServerLost)),
            None => None,
            Some(Answer::Refuse(welcome)) => Some(refuse(socket, welcome)),
            Some(Answer::Accept { pairs, .. }) if self.streams.len() < *pairs as usize => None,
            Some(Answer::Accept { file, welcome, .. }) => {
                let given = file.as_ref().map(|wanted| free.iter().find(|(name, _)| name == wanted));
                let given = match given {
                    Some(None) => return Some(refuse(socket, NO_SERVER)),
                    Some(Some((_, file))) => Some(file.as_fd()),
                    None => None,
                };
                let fds: Vec<_> = given
                    .into_iter()
                    .chain(self.streams.values().map(AsFd::as_fd))
                    .collect();
                let sent = give(socket, welcome.as_bytes(), &fds);
                self.streams.clear();
                self.answer = None;
                self.socket = Some(Arc::clone(socket));
                Some(sent.map(|()| Met::Served))
            }
        }
    }

    /// Gives it its streams if it is served, and another server has dialled all of them.
    fn hand_over(&mut self) {
        let (Some(socket), Some(Answer::Accept { pairs, .. })) = (&self.socket, &self.answer) else {
            return;
        };
        // Some may be of a server that wanted to go on with it before, until the machine was saved again.
        self.streams.retain(|_, stream| is_connected(stream));
        if self.streams.len() < *pairs as usize {
            return;
        }
        let fds: Vec<_> = self.streams.values().map(AsFd::as_fd).collect();
        let sent = give(socket, MORE, &fds);
        self.streams.clear();
        self.answer = None;
        if let Err(error) = sent {
            say(format_args!(
                "a client of the accelerator does not take its sockets, and is hung up: {error}"
            ));
            self.end();
        }
    }

    /// Its program sees the end by its socket, and its thread, too.
    fn end(&mut self) {
        self.over = true;
        if let Some(Err(error)) = self.socket.as_ref().map(|socket| shutdown(&**socket, Shutdown::Both)) {
            say(format_args!("a client of the accelerator is not hung up: {error}"));
        }
    }
}

/// Sends descriptors, and what is said with the first of them, to a program that takes them at once.
fn give(socket: &PacketSocket, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
    let (first, rest) = fds.split_at(fds.len().min(MAX_FDS));
    let packets = std::iter::once((bytes, first)).chain(rest.chunks(MAX_FDS).map(|more| (MORE, more)));
    for (bytes, fds) in packets {
        socket.wait_to_send(Instant::now())?;
        socket.send(bytes, fds)?;
    }
    Ok(())
}

fn refuse(socket: &PacketSocket, welcome: &str) -> Result<Met, PacketError> {
    give(socket, welcome.as_bytes(), &[]).map(|()| Met::Refused)
}

/// Whether the host has not hung up.
fn is_connected(stream: &UnixStream) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ended = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    match poll(&mut polled, Some(&now)) {
        Ok(0) => true,
        Ok(_) => polled.iter().all(|polled| !polled.revents().intersects(ended)),
        Err(error) => error == rustix::io::Errno::INTR,
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    let builder = thread::Builder::new().name(name.to_owned()).stack_size(STACK_SIZE);
    if let Err(error) = builder.spawn(work) {
        say(format_args!(
            "no thread for a connection of the accelerator's: {error}; it is hung up"
        ));
    }
}
