//! A tenant's half: whether its server may put a command to the device, and the thread that listens to the arbiter.
//!
//! ```text
//!   alone ── the arbiter's page is there ──▶ linked ── it hangs up ──▶ alone, and tries again
//! ```
//!
//! Alone nothing is limited: a device without an arbiter is better than none. Knows no command.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use base::{StopSignal, Worker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

use crate::page::{HELLO, Page};

/// How often a server looks for an arbiter that is not there.
const AGAIN: Duration = Duration::from_millis(250);

/// How long an arbiter may take to greet.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a command has to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No credit is left.
    Credit,
    /// Enough is on the device already.
    OnDevice,
}

/// Whether a server may go on.
#[derive(Debug)]
pub struct Gate {
    state: Arc<State>,
    _listener: Worker<()>,
}

#[derive(Debug)]
struct State {
    path: PathBuf,
    link: RwLock<Option<Link>>,
    busy: AtomicBool,
    /// Whether the arbiter was told that somebody waits, and has not answered.
    told: AtomicBool,
    /// Nanoseconds that are used and are not yet a microsecond.
    rest: AtomicU64,
    /// How often there were news.
    news: Mutex<u64>,
    changed: Condvar,
}

/// A connection.
#[derive(Debug, Clone)]
struct Link {
    page: Page,
    socket: Arc<PacketSocket>,
}

impl Gate {
    /// Asks the arbiter that listens at a path, as soon as it does.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn new(path: &Path) -> io::Result<Self> {
        let state = Arc::new(State {
            path: path.to_owned(),
            link: RwLock::new(None),
            busy: AtomicBool::new(false),
            told: AtomicBool::new(false),
            rest: AtomicU64::new(0),
            news: Mutex::new(0),
            changed: Condvar::new(),
        });
        let listening = Arc::clone(&state);
        let listener = Worker::spawn("accel-share", (), move |(), stop| listen(&listening, stop))?;
        Ok(Self {
            state,
            _listener: listener,
        })
    }

    /// Whether there is an arbiter.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.state.with(|_| ()).is_some()
    }

    /// Whether somebody else has work, so that it matters what is on the device.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.state.with(|link| link.page.left()).flatten().is_some()
    }

    /// Whether a command may go to the device where commands of about `on_device` microseconds are already.
    ///
    /// # Errors
    /// Why not yet.
    pub fn check(&self, on_device: u64) -> Result<(), Refusal> {
        let Some((left, slice)) = self.state.with(|link| (link.page.left(), link.page.slice())) else {
            return Ok(());
        };
        if left.is_some_and(|left| i64::from(left).saturating_sub_unsigned(on_device) <= 0) {
            return Err(Refusal::Credit);
        }
        match on_device > 0 && on_device >= u64::from(slice) {
            true => Err(Refusal::OnDevice),
            false => Ok(()),
        }
    }

    /// Whether there is work, on the device or waiting for it.
    pub fn set_busy(&self, busy: bool) {
        self.state.busy.store(busy, Ordering::SeqCst);
        self.state.with(|link| {
            if link.page.set_busy(busy) {
                link.poke();
            }
        });
    }

    /// So much of the device's time was used. One thread at a time says so.
    pub fn spend(&self, nanoseconds: u64) {
        let all = self.state.rest.load(Ordering::Relaxed).saturating_add(nanoseconds);
        self.state.rest.store(all % 1000, Ordering::Relaxed);
        let microseconds = u32::try_from(all / 1000).unwrap_or(u32::MAX);
        self.state.with(|link| link.page.spend(microseconds));
    }

    /// How often there were news, to be read before [`Gate::check`].
    #[must_use]
    pub fn news(&self) -> u64 {
        *self.state.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for more credit, unless there were news since `seen`; no longer than that.
    pub fn wait(&self, seen: u64, most: Duration) {
        let state = &self.state;
        state.with(|link| link.page.set_waits(true));
        if !state.told.swap(true, Ordering::SeqCst) {
            state.with(Link::poke);
        }
        let news = state.news.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = state.changed.wait_timeout_while(news, most, |news| *news == seen);
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            // Whoever waits again asks again: the answer may have been lost with an arbiter.
            state.told.store(false, Ordering::SeqCst);
        }
    }

    /// Nobody waits for credit any more.
    pub fn end_wait(&self) {
        self.state.with(|link| link.page.set_waits(false));
    }
}

impl State {
    fn with<R>(&self, use_it: impl FnOnce(&Link) -> R) -> Option<R> {
        self.link
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(use_it)
    }

    fn set(&self, link: Option<Link>) {
        *self.link.write().unwrap_or_else(PoisonError::into_inner) = link;
        self.tell();
    }

    /// There are news.
    fn tell(&self) {
        self.told.store(false, Ordering::SeqCst);
        *self.news.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }
}

impl Link {
    /// Makes the arbiter look. One that is full will look anyway, and one that is gone is noticed by the listener.
    fn poke(&self) {
        _ = rustix::net::send(self.socket.as_ref(), &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

/// The listener's life.
fn listen(state: &State, stop: &StopSignal) {
    let mut said = false;
    loop {
        match meet(&state.path) {
            Ok(link) => {
                log::info!("time is shared by the arbiter at {}", state.path.display());
                said = false;
                // The page is new and knows nothing of work that is on the device already.
                let busy = link.page.set_busy(state.busy.load(Ordering::SeqCst));
                if busy {
                    link.poke();
                }
                state.set(Some(link.clone()));
                let stopped = follow(state, &link, stop);
                state.set(None);
                if stopped {
                    return;
                }
            }
            Err(error) if !said => {
                said = true;
                let path = state.path.display();
                log::warn!("no arbiter at {path}: {error}; nothing limits this server until there is one");
            }
            Err(_) => {}
        }
        let most = Timespec::try_from(AGAIN).unwrap_or_default();
        if poll(&mut [PollFd::new(stop.fd(), PollFlags::IN)], Some(&most)).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}

fn meet(path: &Path) -> io::Result<Link> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let socket = PacketSocket::from_fd(socket);
    socket
        .wait_to_receive(Instant::now() + PATIENCE)
        .map_err(io::Error::other)?;
    let (bytes, files) = socket.receive().map_err(io::Error::other)?;
    match (bytes.as_slice(), files.as_slice()) {
        (bytes, [file]) if *bytes == HELLO => Ok(Link {
            page: Page::map(file)?,
            socket: Arc::new(socket),
        }),
        _ => Err(io::Error::other("it speaks another version; use one release on a host")),
    }
}

/// Tells news until the arbiter hangs up, or until this is to stop.
fn follow(state: &State, link: &Link, stop: &StopSignal) -> bool {
    loop {
        let socket: &PacketSocket = &link.socket;
        let mut ready = [
            PollFd::new(stop.fd(), PollFlags::IN),
            PollFd::new(socket, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(Errno::INTR) => continue,
            Err(error) => {
                log::warn!("cannot wait for the arbiter: {error}");
                return false;
            }
            Ok(_) if !ready[0].revents().is_empty() => return true,
            Ok(_) => {}
        }
        match rustix::net::recv(socket, &mut [0; 64], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                log::warn!("the arbiter has ended; nothing limits this server until there is another one");
                return false;
            }
            Ok(_) => state.tell(),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                log::warn!("the arbiter is lost: {error}; nothing limits this server until there is another one");
                return false;
            }
        }
    }
}
