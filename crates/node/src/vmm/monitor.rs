//! One thread that waits for the end of all VMMs, through their pidfds. Knows ids, not sandboxes.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::{Epoll, Interest};

/// What is waited for.
#[derive(Debug)]
pub(crate) struct Monitor {
    epoll: Epoll,
    watched: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    next: u64,
    by_token: HashMap<u64, (String, OwnedFd)>,
}

impl Monitor {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
            watched: Mutex::default(),
        })
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of a process; it is told once, as `id`'s.
    pub(crate) fn watch(&self, id: &str, pidfd: BorrowedFd<'_>) -> io::Result<()> {
        let pidfd = pidfd.try_clone_to_owned()?;
        let mut watched = self.watched();
        let token = watched.next;
        watched.next += 1;
        self.epoll.add(&pidfd, token, Interest::READ)?;
        watched.by_token.insert(token, (id.to_owned(), pidfd));
        Ok(())
    }

    /// Waits until some have ended; whose they were.
    pub(crate) fn wait(&self) -> io::Result<Vec<String>> {
        let mut ready = Vec::new();
        self.epoll.wait(&mut ready, None)?;
        let mut watched = self.watched();
        let mut ended = Vec::new();
        for event in ready {
            if let Some((id, pidfd)) = watched.by_token.remove(&event.token) {
                // Whoever else has the descriptor, a child between fork and exec even, would keep it in the set.
                if let Err(error) = self.epoll.remove(&pidfd) {
                    log::warn!("the end of {id} may be told again: {error}");
                }
                ended.push(id);
            }
        }
        Ok(ended)
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
        let mut pidfds = Vec::new();
        for (child, id) in children.iter().zip(["short", "long"]) {
            let process = crate::vmm::process::identify(i32::try_from(child.id()).unwrap()).unwrap();
            let pidfd = crate::vmm::process::open(process).unwrap().unwrap();
            monitor.watch(id, pidfd.as_fd()).unwrap();
            pidfds.push(pidfd);
        }
        children[0].kill().unwrap();
        assert_eq!(monitor.wait().unwrap(), ["short"]);
        children[1].kill().unwrap();
        assert_eq!(monitor.wait().unwrap(), ["long"]);
        for mut child in children {
            child.wait().unwrap();
        }
    }
}
