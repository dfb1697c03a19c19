//! Lets clients and the host's server meet: passes on what they say, and gives a client its file of the window and its streams to the
//! host. Knows nothing of what is said.
//!
//! ```text
//!  client: hello ─► free files, FromGuest::Connect ─► Accept, and all of its streams ─► welcome with descriptors ─► gone, or Over
//! ```
//! Each client has a thread, and one at a time is between its hello and its welcome: that the files are free is true for that time.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::accelerator::{Begin, FromGuest, FromHost, VERSION, receive, send};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{Shutdown, shutdown};
use wire::packet::{MAX_FDS, PacketSocket};
use wire::{FrameReader, FrameWriter};

use super::slots;
use crate::{STACK_SIZE, say};

/// Clients at a time, with those that wait.
const MOST_CLIENTS: usize = 64;

/// How long a client has for its hello, a server to be there, and for its answer with all streams. A client waits 5 s for its welcome.
const HELLO: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_millis(4500);

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
    /// The server that was asked about it, with which it ends.
    asked: Option<Arc<FrameWriter<UnixStream>>>,
    over: bool,
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
}

/// A client that is not known any more when this is dropped, and of which the server is told.
struct Known<'a> {
    broker: &'a Broker,
    client: u64,
}

impl Drop for Known<'_> {
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
        }
    }

    /// The same for impatient tests.
    #[cfg(test)]
    pub(crate) fn within(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A program has connected.
    pub(crate) fn take_client(self: &Arc<Self>, socket: PacketSocket) {
        let client = {
            let mut state = self.lock();
            if state.clients.len() >= MOST_CLIENTS {
                say(format_args!(
                    "{MOST_CLIENTS} programs use the accelerator; one more is hung up"
                ));
                return;
            }
            state.next += 1;
            let client = state.next;
            state.clients.insert(client, Client::default());
            client
        };
        let broker = Arc::clone(self);
        spawn("accel-client", move || {
            let known = Known {
                broker: &broker,
                client,
            };
            if let Err(error) = broker.serve_client(client, socket) {
                say(format_args!("a client of the accelerator: {error}"));
            }
            drop(known);
        });
    }

    fn serve_client(&self, client: u64, socket: PacketSocket) -> Result<(), crate::Error> {
        let fail = |what| crate::Error::system(what);
        let hello = socket
            .wait_to_receive(Instant::now() + HELLO)
            .and_then(|()| socket.receive());
        let (hello, _) = hello.map_err(|error| fail("its hello")(std::io::Error::other(error)))?;
        let hello = String::from_utf8(hello).map_err(|error| fail("its hello")(std::io::Error::other(error)))?;
        let socket = Arc::new(socket);
        let welcomed = {
            let meeting = self.meeting.lock().unwrap_or_else(PoisonError::into_inner);
            let free = slots::free(&self.window).map_err(fail("looking for a free file of the window"))?;
            let welcomed = self.meet(client, &socket, hello, free);
            drop(meeting);
            welcomed
        };
        if !welcomed.map_err(|error| fail("its welcome")(std::io::Error::other(error)))? {
            return Ok(());
        }
        // Neither side says more: whatever there is, is its end, or was brought about by `end`.
        loop {
            match poll(&mut [PollFd::new(&*socket, PollFlags::IN)], None) {
                Err(rustix::io::Errno::INTR) => (),
                outcome => return outcome.map(drop).map_err(crate::Error::system("waiting for its end")),
            }
        }
    }

    /// Asks the server, and gives the client what it gets. Whether it is served then.
    fn meet(
        &self,
        client: u64,
        socket: &Arc<PacketSocket>,
        hello: String,
        free: Vec<(String, File)>,
    ) -> Result<bool, wire::packet::PacketError> {
        let deadline = Instant::now() + self.patience;
        let asked = FromGuest::Connect {
            client,
            hello,
            free: free.iter().map(|(name, _)| name.clone()).collect(),
        };
        let server = self.wait(deadline, |state| {
            let server = state.server.clone()?;
            state.clients.get_mut(&client)?.asked = Some(Arc::clone(&server));
            Some(server)
        });
        let answer = server.filter(|server| send(server, &asked).is_ok()).and_then(|_| {
            self.wait(deadline, |state| {
                let entry = state.clients.get_mut(&client)?;
                let complete = match (&entry.answer, entry.over) {
                    (_, true) | (Some(Answer::Refuse(_)), _) => true,
                    (Some(Answer::Accept { pairs, .. }), _) => entry.streams.len() >= *pairs as usize,
                    (None, _) => false,
                };
                complete.then(|| (entry.answer.take(), std::mem::take(&mut entry.streams)))
            })
        });
        let (file, welcome, streams) = match answer {
            Some((Some(Answer::Accept { file, welcome, .. }), streams)) => (file, welcome, streams),
            Some((Some(Answer::Refuse(welcome)), _)) => return socket.send(welcome.as_bytes(), &[]).map(|()| false),
            _ => return socket.send(NO_SERVER.as_bytes(), &[]).map(|()| false),
        };
        let mut fds: Vec<OwnedFd> = Vec::new();
        if let Some(wanted) = file {
            let Some((_, file)) = free.into_iter().find(|(name, _)| *name == wanted) else {
                return socket.send(NO_SERVER.as_bytes(), &[]).map(|()| false);
            };
            fds.push(file.into());
        }
        fds.extend(streams.into_values().map(OwnedFd::from));
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let (first, rest) = fds.split_at(fds.len().min(MAX_FDS));
        socket.send(welcome.as_bytes(), first)?;
        for more in rest.chunks(MAX_FDS) {
            socket.send(MORE, more)?;
        }
        let mut state = self.lock();
        let entry = state.clients.get_mut(&client);
        let lasts = entry.is_some_and(|entry| {
            entry.socket = Some(Arc::clone(socket));
            !entry.over
        });
        Ok(lasts)
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
                    self.changed.notify_all();
                }
                Ok(())
            }
            Some(Begin::Control { version, .. }) if version != VERSION => Err(agent_api::Error::Refused(format!(
                "it speaks version {version}, this guest's agent {VERSION}; start the sandbox anew"
            ))),
            Some(Begin::Control { .. }) => {
                let stream = reader.get_ref();
                stream.set_read_timeout(None).map_err(local("setting a timeout"))?;
                let again = stream.try_clone().map_err(local("copying a descriptor"))?;
                let generation = self.begin(FrameWriter::new(again));
                let outcome = self.listen(&mut reader);
                self.end(generation);
                outcome
            }
        }
    }

    /// There is a server; the one before it is over, with its clients.
    fn begin(&self, server: FrameWriter<UnixStream>) -> u64 {
        let mut state = self.lock();
        state.end_all();
        state.server = Some(Arc::new(server));
        state.generation += 1;
        self.changed.notify_all();
        state.generation
    }

    fn end(&self, generation: u64) {
        let mut state = self.lock();
        if state.generation == generation {
            state.end_all();
            self.changed.notify_all();
        }
    }

    fn listen(&self, reader: &mut FrameReader<UnixStream>) -> Result<(), agent_api::Error> {
        while let Some(said) = receive(reader)? {
            let mut state = self.lock();
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
                Some(answer) => entry.answer = Some(answer),
                None => entry.end(),
            }
            self.changed.notify_all();
        }
        Ok(())
    }
}

impl State {
    fn end_all(&mut self) {
        // Its thread ends as well.
        if let Some(server) = self.server.take() {
            // One that has hung up is not connected any more.
            drop(server.with(|stream| stream.shutdown(std::net::Shutdown::Both)));
        }
        let asked = self.clients.values_mut().filter(|client| client.asked.is_some());
        asked.for_each(Client::end);
    }
}

impl Client {
    /// Its program sees the end by its socket, and its thread, too.
    fn end(&mut self) {
        self.over = true;
        if let Some(Err(error)) = self.socket.as_ref().map(|socket| shutdown(&**socket, Shutdown::Both)) {
            say(format_args!("a client of the accelerator is not hung up: {error}"));
        }
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
