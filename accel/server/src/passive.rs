//! Clients that run this server themselves: it is in a frozen virtual machine (docs/accel-switch.md), whose CPU it has only while a client has
//! entered it. Its clients' threads and windows are as everybody's; what differs is how it learns that there is something to do.
//!
//! ```text
//!   client: record, bell's word ─▶ enters ═▶ the last thread: wakes whoever waits for a word that has changed ─▶ they work, sleep
//!   client goes on ◀═════════════════════════ the last thread, which runs when all others sleep: waits to be entered
//! ```
//! A window is one client's at a time, in a part of the memory that both machines have. Nobody tells this server that a client has ended:
//! it says so itself, or its machine's next client asks for the window. All that clients write is what hostile clients write.

use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use accel_transport::{Agreement, Error};
use accel_window::{Greeting, Side, Window};
use wire::packet::PacketSocket;
use wire::ring::{Region, Word};

use crate::{Server, session};

/// How long a machine that is no server yet waits before it says again that it sleeps.
const AGAIN: Duration = Duration::from_millis(20);

/// Waits end by a question; this is for those that have no end.
const LONG: Duration = Duration::from_secs(3600);

/// A word that clients change, in place of waking whoever waits for it.
#[derive(Debug)]
struct Bell {
    word: Word,
    seen: u32,
    /// Whose it is: of a window, by its number.
    window: usize,
}

/// The words of all windows.
#[derive(Debug, Default)]
struct Bells(Mutex<Vec<Bell>>);

impl Bells {
    fn lock(&self) -> MutexGuard<'_, Vec<Bell>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, window: usize, word: Word) {
        let seen = word.load(std::sync::atomic::Ordering::Acquire);
        self.lock().push(Bell { word, seen, window });
    }

    /// Those of a client that has ended go.
    fn forget(&self, window: usize, kept: &Word) {
        self.lock()
            .retain(|bell| bell.window != window || bell.word.as_ptr() == kept.as_ptr());
    }

    /// Wakes who waits for those that have changed.
    fn ring(&self) {
        for bell in self.lock().iter_mut() {
            let now = bell.word.load(std::sync::atomic::Ordering::Acquire);
            if std::mem::replace(&mut bell.seen, now) != now
                && let Err(error) = bell.word.wake()
            {
                log::error!("a thread was not told that there is something to do: {error}");
            }
        }
    }
}

/// The client that has a window.
struct Client {
    /// Its connection is over when this is dropped.
    kept: PacketSocket,
    /// What its threads wait for.
    known: Arc<session::Client>,
    thread: JoinHandle<()>,
}

impl Client {
    fn end(self) {
        drop(self.kept);
        // By this thread: the client's own would look for the end by a timer when all of its threads wait in the back end.
        self.known.completions.end();
        self.known.abandon();
        if self.thread.join().is_err() {
            log::error!("a client's thread has panicked");
        }
    }
}

/// Serves clients that enter, in the windows of these files, for ever. `wait` says that all other threads sleep, and returns true when a client
/// has entered, and false if none can yet. It is called by this thread, which is to run only then; `begin` sees to that
/// ([`accel_transport::run_when_others_sleep`]), once the threads that others come from are there.
///
/// # Errors
/// A file cannot be mapped, or no thread be started; `begin` fails.
pub fn serve_passive(
    server: &Arc<Server>,
    windows: Vec<File>,
    begin: impl FnOnce() -> std::io::Result<()>,
    mut wait: impl FnMut() -> bool,
) -> Result<std::convert::Infallible, Error> {
    let bells = Arc::new(Bells::default());
    for (number, file) in windows.into_iter().enumerate() {
        let region = accel_window::map_file(&file)?;
        let greeting = Greeting::of(&region)?;
        bells.add(number, greeting.word());
        let place = Place {
            server: Arc::clone(server),
            bells: Arc::clone(&bells),
            number,
            region,
            greeting,
        };
        let started = thread::Builder::new()
            .name("accel-window".into())
            .spawn(move || place.serve());
        started.map_err(|source| Error::Io {
            what: "start a thread for a window",
            source,
        })?;
    }
    begin().map_err(|source| Error::Io {
        what: "run behind all other threads",
        source,
    })?;
    loop {
        match wait() {
            true => bells.ring(),
            false => thread::sleep(AGAIN),
        }
    }
}

/// One window, for one client after the other.
struct Place {
    server: Arc<Server>,
    bells: Arc<Bells>,
    number: usize,
    region: Region,
    greeting: Greeting,
}

impl Place {
    fn serve(&self) {
        // Whoever has asked before there was a server still waits, or is followed by another.
        let mut seen = self.greeting.answered();
        let mut client: Option<Client> = None;
        let word = self.greeting.word();
        loop {
            let (number, pairs) = self.greeting.asked();
            if number == seen {
                if let Err(error) = word.wait(number, LONG) {
                    return log::error!("nobody waits for a window's clients any more: {error}");
                }
                continue;
            }
            seen = number;
            // Whoever asks now is another, or has ended: nobody has the window, and all that was in it goes.
            if let Some(client) = client.take() {
                client.end();
                self.bells.forget(self.number, &word);
            }
            let begun = self.begin(pairs);
            let given = match begun {
                Ok(Some((next, pairs))) => {
                    client = Some(next);
                    pairs
                }
                Ok(None) => 0,
                Err(error) => {
                    log::warn!("a window's client cannot be served: {error}");
                    0
                }
            };
            self.greeting.answer(number, given);
        }
    }

    /// The window made anew, and a thread for its client; nothing for one that wants none.
    fn begin(&self, pairs: u32) -> Result<Option<(Client, u32)>, Error> {
        let settings = self.server.settings();
        let Some(agreed) = Agreement::entered(pairs, settings) else {
            return Ok(None);
        };
        let made = agreed.make_window(self.region.clone(), settings)?;
        self.know_bells(&made.1, agreed.pairs)?;
        let pair = PacketSocket::pair().map_err(|error| Error::Io {
            what: "have a pair of sockets",
            source: std::io::Error::other(error),
        });
        let (kept, watched) = pair?;
        let connection = agreed.serve(Some(made), Vec::new(), watched)?;
        let known = Arc::new(self.server.client(&connection));
        let (server, its) = (Arc::clone(&self.server), Arc::clone(&known));
        let serve = move || {
            if let Err(error) = server.serve_known(connection, &its) {
                log::warn!("a client's connection has ended: {error}");
            }
        };
        let thread = thread::Builder::new().name("accel-client".into()).spawn(serve);
        let thread = thread.map_err(|source| Error::Io {
            what: "start a thread for a client",
            source,
        })?;
        Ok(Some((Client { kept, known, thread }, agreed.pairs)))
    }

    fn know_bells(&self, window: &Window, pairs: u32) -> Result<(), Error> {
        for pair in 0..pairs {
            self.bells.add(self.number, window.bell(pair, Side::Server)?);
        }
        Ok(())
    }
}
