//! Clients in a virtual machine: its agent passes on what they say, and they have parts of one memory that guest and host share.
//!
//! ```text
//!   control connection ── Connect ──▶ agreed ─▶ slot ─▶ window made in it ─▶ streams dialled ─▶ Accept ─▶ served ─▶ slot emptied, Over
//!                      ── Gone ─────▶ the client's connection is over
//! ```
//! The guest is trusted with nothing: which slots are free is what this side knows of them, and what the guest says besides can only make
//! it have fewer. A guest that has rebooted, or whose agent is not there yet, is dialled again and again.

mod saved;
mod slots;
mod vsock;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use accel_transport::{Agreement, Error, Protocol, Settings, Transport};
use agent_api::accelerator::{Begin, FromGuest, FromHost, VERSION, receive, send};
use wire::packet::PacketSocket;
use wire::{FrameReader, FrameWriter};

pub use slots::{Slot, SlotError, Slots};
pub(crate) use slots::{Taken, data};

use crate::Server;
use crate::saved::{Resumed, Saving};
use crate::session::Client;

/// How long between two attempts to reach the guest's agent.
const AGAIN: Duration = Duration::from_millis(50);

/// How long a client waits for a slot that is being emptied. Its guest's agent waits 4.5 s for the answer.
const FOR_SLOT: Duration = Duration::from_secs(3);

/// Threads for connections that are being made, or served, at a time: the server's limit is in [`Server`], this is for a guest that asks
/// without end, and takes back what it has asked.
const MOST_ASKED: usize = 128;

/// Serves a guest's clients.
#[derive(Debug)]
pub struct Guest {
    server: Arc<Server>,
    settings: Settings,
    slots: Arc<Slots>,
    /// The sandbox's vsock, as its VMM has it: a unix socket.
    vsock: PathBuf,
    /// Threads for its clients.
    asked: AtomicUsize,
    /// Those that are served, by the agent's numbers.
    serving: Mutex<BTreeMap<u64, Saving>>,
    /// Those of before the machine was saved, until its agent is there.
    resumed: Mutex<Vec<Resumed>>,
}

/// The control connection of one life of the agent.
#[derive(Debug)]
struct Control {
    writer: FrameWriter<UnixStream>,
    /// What is hung up when a client is gone.
    clients: Mutex<BTreeMap<u64, PacketSocket>>,
}

impl Control {
    fn clients(&self) -> MutexGuard<'_, BTreeMap<u64, PacketSocket>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, said: &FromHost) {
        // A guest that does not hear it is dialled anew, and begins anew.
        if let Err(error) = send(&self.writer, said) {
            log::debug!("the guest's agent was not told: {error}");
        }
    }
}

impl Guest {
    /// By this server, for the guest whose vsock this is.
    #[must_use]
    pub fn new(server: Arc<Server>, slots: Slots, vsock: PathBuf) -> Self {
        let mut settings = server.settings().clone();
        // The client's thread runs on a virtual CPU, where no thread of this process can go.
        settings.transports.retain(|transport| *transport != Transport::SameCpu);
        Self {
            server,
            settings,
            slots: Arc::new(slots),
            vsock,
            asked: AtomicUsize::new(0),
            serving: Mutex::default(),
            resumed: Mutex::default(),
        }
    }

    /// Serves it for ever.
    pub fn serve(self: &Arc<Self>) -> ! {
        let mut told = false;
        loop {
            match self.serve_agent() {
                Ok(()) => {
                    log::info!("the guest's agent has hung up; it is dialled again");
                    told = false;
                }
                // While it boots there is nobody.
                Err(error) if !told => {
                    log::info!("the guest's agent cannot be reached yet: {error}");
                    told = true;
                }
                Err(_) => (),
            }
            thread::sleep(AGAIN);
        }
    }

    /// Until the agent hangs up; then all clients are over.
    fn serve_agent(self: &Arc<Self>) -> Result<(), agent_api::Error> {
        let local = |what| move |source| agent_api::Error::Local { what, source };
        let stream = vsock::dial(&self.vsock).map_err(local("dialling the guest's agent"))?;
        let again = stream.try_clone().map_err(local("copying a descriptor"))?;
        let control = Arc::new(Control {
            writer: FrameWriter::new(again),
            clients: Mutex::default(),
        });
        let begin = Begin::Control {
            version: VERSION,
            resumed: self.resumed().iter().map(|resumed| resumed.number).collect(),
        };
        send(&control.writer, &begin)?;
        self.resume(&control).map_err(local("starting a thread for a client"))?;
        let mut reader = FrameReader::new(stream);
        let outcome = self.listen(&control, &mut reader);
        control.clients().clear();
        outcome
    }

    fn listen(
        self: &Arc<Self>,
        control: &Arc<Control>,
        reader: &mut FrameReader<UnixStream>,
    ) -> Result<(), agent_api::Error> {
        while let Some(said) = receive(reader)? {
            match said {
                FromGuest::Gone { client } => drop(control.clients().remove(&client)),
                FromGuest::Connect { client, hello, free } => {
                    if let Err(error) = self.begin_client(control, client, hello, free) {
                        self.refuse(control, client, &error.to_string());
                    }
                }
            }
        }
        Ok(())
    }

    /// Serves a client in a thread of its own. Its connection is over when the end that is kept here is dropped.
    fn begin_client(
        self: &Arc<Self>,
        control: &Arc<Control>,
        client: u64,
        hello: String,
        free: Vec<String>,
    ) -> io::Result<()> {
        self.begin(control, client, move |guest, control, watched| {
            guest.serve_client(control, client, watched, &hello, &free);
        })
    }

    fn begin(
        self: &Arc<Self>,
        control: &Arc<Control>,
        client: u64,
        serve: impl FnOnce(&Self, &Control, PacketSocket) + Send + 'static,
    ) -> io::Result<()> {
        let (guest, its) = (Arc::clone(self), Arc::clone(control));
        let (kept, watched) = PacketSocket::pair().map_err(io::Error::other)?;
        if self.asked.fetch_add(1, Ordering::SeqCst) >= MOST_ASKED {
            self.asked.fetch_sub(1, Ordering::SeqCst);
            return Err(io::Error::other("the guest asks for too many connections at a time"));
        }
        control.clients().insert(client, kept);
        let work = move || {
            serve(&guest, &its, watched);
            drop(its.clients().remove(&client));
            its.say(&FromHost::Over { client });
            guest.asked.fetch_sub(1, Ordering::SeqCst);
        };
        let started = thread::Builder::new().name("accel-client".into()).spawn(work);
        started.map(drop).inspect_err(|_| {
            drop(control.clients().remove(&client));
            self.asked.fetch_sub(1, Ordering::SeqCst);
        })
    }

    fn refuse(&self, control: &Control, client: u64, reason: &str) {
        match Agreement::refusal(reason) {
            Ok(welcome) => control.say(&FromHost::Refuse {
                client,
                welcome: text(welcome),
            }),
            Err(error) => log::error!("a refusal cannot be written: {error}"),
        }
    }

    fn serve_client(&self, control: &Control, client: u64, watched: PacketSocket, hello: &str, free: &[String]) {
        let agreed = match Agreement::on(hello.as_bytes(), &self.settings) {
            Ok(agreed) => agreed,
            Err(Error::Protocol(Protocol::Refused(reason))) => return self.refuse(control, client, &reason),
            Err(error) => return self.refuse(control, client, &error.to_string()),
        };
        // Given back, and emptied, when this is dropped: behind all that has to do with the connection.
        let slot = match agreed.transport.has_rings().then(|| self.slots.take(free, FOR_SLOT)) {
            None => None,
            Some(Ok(slot)) => Some(slot),
            Some(Err(error)) => return self.refuse(control, client, &error.to_string()),
        };
        let connected = || -> Result<_, Error> {
            let window = match &slot {
                Some(slot) => Some(agreed.make_window(slot.region()?, &self.settings)?),
                None => None,
            };
            let streams = self.streams(client, agreed.pairs)?;
            let welcome = agreed.welcome_in_guest()?;
            let connection = agreed.serve(window, streams, watched)?;
            Ok((welcome, connection))
        };
        let (welcome, connection) = match connected() {
            Ok(connected) => connected,
            Err(error) => return self.refuse(control, client, &error.to_string()),
        };
        control.say(&FromHost::Accept {
            client,
            file: slot.as_ref().map(|slot| slot.name().to_owned()),
            pairs: agreed.pairs,
            welcome: text(welcome),
        });
        let saving = |served: &Arc<Client>| {
            self.know(Saving {
                number: client,
                slot: slot.as_ref().map(|slot| slot.name().to_owned()),
                agreed,
                client: Arc::clone(served),
            })
        };
        if let Err(error) = self.server.serve_saved(connection, None, saving) {
            log::warn!("a client's connection has ended: {error}");
        }
    }

    fn streams(&self, client: u64, pairs: u32) -> Result<Vec<OwnedFd>, Error> {
        let streams = (0..pairs).map(|pair| self.stream(client, pair));
        streams.collect::<io::Result<Vec<_>>>().map_err(|source| Error::Io {
            what: "dial the guest's agent",
            source,
        })
    }

    /// A stream to a client.
    fn stream(&self, client: u64, pair: u32) -> io::Result<OwnedFd> {
        let stream = vsock::dial(&self.vsock)?;
        let writer = FrameWriter::new(stream.try_clone()?);
        send(&writer, &Begin::Pair { client, pair }).map_err(io::Error::other)?;
        Ok(stream.into())
    }
}

/// What was written as JSON, which is text.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}
