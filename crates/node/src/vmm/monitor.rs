//! One thread that waits for the end of all VMMs and of accelerators' servers, through their pidfds, and for what VMMs say without being
//! asked. Knows ids, not sandboxes.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Epoll, EventFd, Interest};

use crate::vmm::process;

/// The token of what VMMs have said to somebody who has asked them something else.
const SPOKEN: u64 = u64::MAX;

/// What is waited for.
#[derive(Debug)]
pub(crate) struct Monitor {
    epoll: Epoll,
    watched: Mutex<Watched>,
    spoken: Arc<Spoken>,
}

#[derive(Debug, Default)]
struct Watched {
    next: u64,
    by_token: HashMap<u64, Watch>,
}

/// Of whom, and what.
#[derive(Debug)]
struct Watch {
    id: String,
    what: What,
}

#[derive(Debug)]
enum What {
    /// A VMM's process, and its socket's token.
    Vmm(OwnedFd, u64),
    /// Its socket, which is its owner's, and leaves the set when that closes it.
    Socket,
    /// The process of an accelerator's server.
    Accelerator(OwnedFd),
}

/// What has happened to a VMM, by the id that it is watched as.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MonitorEvent {
    /// It has ended.
    Ended(String),
    /// There is something to be read at its control socket, or was.
    Readable(String),
    /// The server of its accelerator has ended.
    AcceleratorEnded(String),
}

#[derive(Debug)]
struct Spoken {
    event: EventFd,
    /// Nobody waits any more.
    closed: AtomicBool,
    ids: Mutex<Vec<String>>,
}

/// For whoever has come by something that a VMM has said without being asked.
#[derive(Debug)]
pub(crate) struct Ear {
    id: String,
    spoken: Arc<Spoken>,
}

impl Ear {
    /// The VMM has said something.
    pub(crate) fn tell(&self) {
        let mut ids = self.spoken.ids.lock().unwrap_or_else(PoisonError::into_inner);
        ids.push(self.id.clone());
        self.spoken.event.signal();
    }
}

impl Monitor {
    pub(crate) fn new() -> io::Result<Self> {
        let (epoll, event) = (Epoll::new()?, EventFd::new()?);
        epoll.add(&event, SPOKEN, Interest::READ)?;
        let ids = Mutex::default();
        Ok(Self {
            epoll,
            watched: Mutex::default(),
            spoken: Arc::new(Spoken {
                event,
                closed: AtomicBool::new(false),
                ids,
            }),
        })
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How to say that the VMM that is watched as `id` has said something.
    pub(crate) fn ear(&self, id: &str) -> Ear {
        Ear {
            id: id.to_owned(),
            spoken: Arc::clone(&self.spoken),
        }
    }

    /// Waits for the end of a process, which is told once, as `id`'s; and each time that something comes to `socket`, as long as its
    /// owner has it open.
    pub(crate) fn watch(&self, id: &str, pidfd: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> io::Result<()> {
        let pidfd = pidfd.try_clone_to_owned()?;
        let mut watched = self.watched();
        let (process, said) = (watched.next, watched.next + 1);
        watched.next += 2;
        self.epoll.add(&pidfd, process, Interest::READ)?;
        self.epoll.add(socket, said, Interest::READ_EDGE)?;
        let watch = |what| Watch {
            id: id.to_owned(),
            what,
        };
        watched.by_token.insert(said, watch(What::Socket));
        watched.by_token.insert(process, watch(What::Vmm(pidfd, said)));
        Ok(())
    }

    /// Waits for the end of the process that serves `id`'s accelerator, which is told once.
    pub(crate) fn watch_accelerator(&self, id: &str, pidfd: BorrowedFd<'_>) -> io::Result<()> {
        let pidfd = pidfd.try_clone_to_owned()?;
        let mut watched = self.watched();
        let token = watched.next;
        watched.next += 1;
        self.epoll.add(&pidfd, token, Interest::READ)?;
        let id = id.to_owned();
        let what = What::Accelerator(pidfd);
        watched.by_token.insert(token, Watch { id, what });
        Ok(())
    }

    /// Whoever else has the descriptor, a child between fork and exec even, would keep it in the set.
    fn forget(&self, id: &str, pidfd: &OwnedFd) {
        if let Err(error) = self.epoll.remove(pidfd) {
            log::warn!("the end of {id} may be reported again: {error}");
        }
    }

    /// Whoever waits is told nothing more.
    #[cfg(test)]
    pub(crate) fn close(&self) {
        self.spoken.closed.store(true, Ordering::SeqCst);
        self.spoken.event.signal();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.spoken.closed.load(Ordering::SeqCst)
    }

    /// Waits until something has happened to some; what, and to whom.
    pub(crate) fn wait(&self) -> io::Result<Vec<MonitorEvent>> {
        let mut ready = Vec::new();
        self.epoll.wait(&mut ready, None)?;
        let mut watched = self.watched();
        let mut told = Vec::new();
        for event in ready {
            if event.token == SPOKEN {
                self.spoken.event.consume();
                let mut ids = self.spoken.ids.lock().unwrap_or_else(PoisonError::into_inner);
                told.extend(ids.drain(..).map(MonitorEvent::Readable));
                continue;
            }
            let Some(Watch { id, what }) = watched.by_token.remove(&event.token) else {
                continue;
            };
            told.push(match what {
                What::Socket => {
                    watched.by_token.insert(event.token, Watch { id: id.clone(), what });
                    MonitorEvent::Readable(id)
                }
                What::Vmm(pidfd, said) => {
                    watched.by_token.remove(&said);
                    self.forget(&id, &pidfd);
                    MonitorEvent::Ended(id)
                }
                What::Accelerator(pidfd) => {
                    self.forget(&id, &pidfd);
                    process::reap(&pidfd);
                    MonitorEvent::AcceleratorEnded(id)
                }
            });
        }
        Ok(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn an_end_is_told_once() {
        let monitor = Monitor::new().unwrap();
        let mut children: Vec<_> = (0..2)
            .map(|_| std::process::Command::new("sleep").arg("1000").spawn().unwrap())
            .collect();
        // Somebody else has them, too.
        let (mut pidfds, mut sockets) = (Vec::new(), Vec::new());
        for (child, id) in children.iter().zip(["short", "long"]) {
            let process = crate::vmm::process::identify(i32::try_from(child.id()).unwrap()).unwrap();
            let pidfd = crate::vmm::process::open(process).unwrap().unwrap();
            let socket = EventFd::new().unwrap();
            monitor.watch(id, pidfd.as_fd(), socket.as_fd()).unwrap();
            sockets.push(socket);
            pidfds.push(pidfd);
        }
        let ended = |id: &str| [MonitorEvent::Ended(id.to_owned())];
        let said = [MonitorEvent::Readable("long".to_owned())];
        // A server of an accelerator, which is reaped as well.
        let mut server = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = process::identify(i32::try_from(server.id()).unwrap()).unwrap();
        monitor
            .watch_accelerator("short", process::open(process).unwrap().unwrap().as_fd())
            .unwrap();
        server.kill().unwrap();
        let server_ended = MonitorEvent::AcceleratorEnded("short".to_owned());
        assert_eq!(monitor.wait().unwrap(), [server_ended]);
        assert!(server.wait().is_err(), "it was reaped");
        sockets[1].signal();
        assert_eq!(monitor.wait().unwrap(), said, "and what was told is told once");
        monitor.ear("long").tell();
        assert_eq!(monitor.wait().unwrap(), said, "what came is told once");
        children[0].kill().unwrap();
        assert_eq!(monitor.wait().unwrap(), ended("short"));
        sockets[0].signal();
        children[1].kill().unwrap();
        let mut told = Vec::new();
        while told.is_empty() {
            told = monitor.wait().unwrap();
        }
        assert_eq!(told, ended("long"), "nobody listens to one that has ended");
        for mut child in children {
            child.wait().unwrap();
        }
    }
}
