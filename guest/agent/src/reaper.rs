//! The one place that waits for child processes. Every exit, of known children and of orphans that PID 1 inherits, is
//! taken here and told to whoever started the child. Knows neither connections nor containers.
//!
//! ```text
//!  waitid(WNOWAIT): somebody is a zombie ─► lock ─► kill its group if condemned ─► waitpid ─► unlock ─► tell
//! ```
//!
//! A child is forked and registered under the lock, and reaped under the lock: a process id that is in the registry
//! names that child and no other, so a signal can never hit a stranger that got the number later.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use agent_api::ExitStatus;

use crate::{Error, STACK_SIZE};

/// The handle; clones share one reaper. There can be one in a process, and nothing else in the process may wait for
/// children (`std::process::Child::wait` included): start them with [`Reaper::spawn`].
#[derive(Clone)]
pub struct Reaper(Arc<Inner>);

struct Inner {
    registry: Mutex<Registry>,
    spawned: Condvar,
}

#[derive(Default)]
struct Registry {
    children: HashMap<i32, Entry>,
    /// Counts spawns, so that the loop notices one that happened between "no children" and going to sleep.
    generation: u64,
}

struct Entry {
    on_exit: Box<dyn FnOnce(ExitStatus) + Send>,
    condemned: bool,
}

/// Whom a signal is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The child.
    Process,
    /// The child's process group (it leads one).
    Group,
}

impl Reaper {
    /// Starts the loop in a thread of its own.
    pub fn start() -> Result<Self, Error> {
        let inner = Arc::new(Inner {
            registry: Mutex::default(),
            spawned: Condvar::new(),
        });
        let reaper = Self(inner);
        let for_thread = reaper.clone();
        thread::Builder::new()
            .name("reaper".to_owned())
            .stack_size(STACK_SIZE)
            .spawn(move || for_thread.run())
            .map_err(Error::system("starting the reaper"))?;
        Ok(reaper)
    }

    /// Starts a command as the standard library does.
    pub fn spawn(&self, command: &mut Command) -> Result<Child, Error> {
        let what = format!("starting {:?}", command.get_program());
        let exit = Arc::new(Exit::default());
        let told = Arc::clone(&exit);
        let pid = self
            .fork_with(
                || {
                    let child = command.spawn()?;
                    i32::try_from(child.id()).map_err(io::Error::other)
                },
                move |status| told.set(status),
            )
            .map_err(Error::system(what))?;
        Ok(Child {
            pid,
            exit,
            reaper: self.clone(),
        })
    }

    /// Forks by `fork`, which returns the child's process id, and registers the child.
    pub(crate) fn fork_with(
        &self,
        fork: impl FnOnce() -> io::Result<i32>,
        on_exit: impl FnOnce(ExitStatus) + Send + 'static,
    ) -> io::Result<i32> {
        let mut registry = self.lock();
        let pid = fork()?;
        registry.children.insert(
            pid,
            Entry {
                on_exit: Box::new(on_exit),
                condemned: false,
            },
        );
        registry.generation += 1;
        self.0.spawned.notify_all();
        Ok(pid)
    }

    /// Sends a signal to a child that was started here; false if it is gone.
    pub fn signal(&self, pid: i32, target: Target, number: i32) -> bool {
        let registry = self.lock();
        registry.children.contains_key(&pid) && send(pid, target, number)
    }

    /// From now on the end of this child ends its whole process group; false if it is gone.
    pub(crate) fn condemn(&self, pid: i32) -> bool {
        match self.lock().children.get_mut(&pid) {
            Some(entry) => {
                entry.condemned = true;
                true
            }
            None => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.0.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let generation = self.lock().generation;
            match wait_for_zombie() {
                Ok(pid) => self.reap(pid),
                Err(errno) if errno == libc::ECHILD => {
                    let mut registry = self.lock();
                    while registry.generation == generation {
                        registry = self.0.spawned.wait(registry).unwrap_or_else(PoisonError::into_inner);
                    }
                }
                // EINTR; waitid(2) knows no other error for these arguments.
                Err(_) => {}
            }
        }
    }

    fn reap(&self, pid: i32) {
        let mut registry = self.lock();
        if registry.children.get(&pid).is_some_and(|entry| entry.condemned) {
            // The leader is still a zombie, so the group's number is still its own.
            send(pid, Target::Group, libc::SIGKILL);
        }
        let status = take_status(pid);
        let entry = registry.children.remove(&pid);
        drop(registry);
        if let (Some(entry), Some(status)) = (entry, status) {
            (entry.on_exit)(status);
        }
    }
}

/// A command started by [`Reaper::spawn`].
pub struct Child {
    pid: i32,
    exit: Arc<Exit>,
    reaper: Reaper,
}

impl Child {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for its end.
    pub fn wait(&self) -> ExitStatus {
        let mut status = self.exit.lock();
        loop {
            match *status {
                Some(status) => return status,
                None => status = self.exit.changed.wait(status).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// How it ended, if it has.
    pub fn try_wait(&self) -> Option<ExitStatus> {
        *self.exit.lock()
    }

    /// Sends it a signal; false if it is gone.
    pub fn signal(&self, number: i32) -> bool {
        self.reaper.signal(self.pid, Target::Process, number)
    }
}

#[derive(Default)]
struct Exit {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Exit {
    fn lock(&self) -> MutexGuard<'_, Option<ExitStatus>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, status: ExitStatus) {
        *self.lock() = Some(status);
        self.changed.notify_all();
    }
}

/// Waits until some child is a zombie, and leaves it one.
fn wait_for_zombie() -> Result<i32, i32> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: 1. `info` is writable and of the right type.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT) };
    if result != 0 {
        return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
    }
    // SAFETY: 1. Zeroed before and filled by the call: initialised either way.
    let info = unsafe { info.assume_init() };
    // SAFETY: 1. After a successful waitid(2) the union holds the fields of SIGCHLD.
    Ok(unsafe { info.si_pid() })
}

/// Reaps `pid`; `None` if somebody else has (a failed `Command::spawn` does).
fn take_status(pid: i32) -> Option<ExitStatus> {
    let mut status = 0;
    // SAFETY: 1. `status` is writable.
    let result = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    if result != pid {
        return None;
    }
    if libc::WIFSIGNALED(status) {
        return Some(ExitStatus::Signal(
            u8::try_from(libc::WTERMSIG(status)).unwrap_or(u8::MAX),
        ));
    }
    Some(ExitStatus::Code(
        u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(u8::MAX),
    ))
}

fn send(pid: i32, target: Target, number: i32) -> bool {
    let whom = match target {
        Target::Process => pid,
        Target::Group => -pid,
    };
    // SAFETY: 1. kill(2) touches no memory.
    unsafe { libc::kill(whom, number) == 0 }
}
