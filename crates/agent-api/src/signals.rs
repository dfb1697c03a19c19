//! Signals as bytes in a pipe: the handler writes the number, a thread reads it when it likes. Installing is a value;
//! dropping it restores the handlers that were there before. Does not know what the signals are for.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::Error;

/// What is caught.
const CAUGHT: [i32; 5] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGWINCH];

/// The pipe's write end for the handler; -1 if nothing is installed.
static WRITE_END: AtomicI32 = AtomicI32::new(-1);

/// `SIGHUP`, `SIGINT`, `SIGQUIT`, `SIGTERM` and `SIGWINCH`, caught from when this was made until it is dropped. Make it
/// before the terminal's size is read, so that no change is missed. One at a time in a process.
#[derive(Debug)]
pub struct Signals {
    read: OwnedFd,
    /// Kept open for the handler.
    _write: OwnedFd,
    before: Vec<(i32, libc::sigaction)>,
}

impl Signals {
    /// Starts catching.
    pub fn install() -> Result<Self, Error> {
        let (read, write) =
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(Error::local("making a pipe for signals"))?;
        WRITE_END
            .compare_exchange(-1, write.as_raw_fd(), Ordering::SeqCst, Ordering::SeqCst)
            .map_err(|_| Error::SignalsTaken)?;
        let mut signals = Self {
            read,
            _write: write,
            before: Vec::new(),
        };
        for number in CAUGHT {
            let old = set_action(number, &our_action())?;
            signals.before.push((number, old));
        }
        Ok(signals)
    }

    /// The next caught signal's number, if there is one; does not wait (poll the descriptor for that).
    pub fn take(&self) -> Option<i32> {
        let mut byte = [0_u8];
        match rustix::io::read(&self.read, &mut byte) {
            Ok(1) => Some(i32::from(byte[0])),
            _ => None,
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (number, old) in &self.before {
            // Cannot fail: the number was accepted when the handler was installed.
            drop(set_action(*number, old));
        }
        WRITE_END.store(-1, Ordering::SeqCst);
    }
}

fn our_action() -> libc::sigaction {
    // SAFETY: 1. `libc::sigaction` is plain data for which all zeros is a valid value (no handler, no flags, empty mask).
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    action
}

fn set_action(number: i32, action: &libc::sigaction) -> Result<libc::sigaction, Error> {
    let mut old = MaybeUninit::zeroed();
    // SAFETY: 1. `action` is a valid reference, `old` is writable and of the right type. 2. The handler is either
    // `on_signal`, which does only what a signal handler may, or what this very function reported as installed before.
    let result = unsafe { libc::sigaction(number, action, old.as_mut_ptr()) };
    if result != 0 {
        return Err(Error::Local {
            what: "installing a signal handler",
            source: std::io::Error::last_os_error(),
        });
    }
    // SAFETY: 1. sigaction(2) has succeeded and filled `old`; zeros, with which it began, were valid too.
    Ok(unsafe { old.assume_init() })
}

/// Writes the signal's number into the pipe. A full pipe loses it, after 65 536 others that nobody read.
extern "C" fn on_signal(number: i32) {
    let fd = WRITE_END.load(Ordering::SeqCst);
    let byte = [u8::try_from(number).unwrap_or(0)];
    // SAFETY: 1. `__errno_location` returns the thread's own errno, valid as long as the thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: 1. As above; the interrupted code must find its errno unchanged.
    let saved = unsafe { *errno };
    // SAFETY: 1. write(2) is async-signal-safe. 2. `byte` is one readable byte. 3. A stale descriptor is impossible: the
    // handlers are removed before the pipe is closed.
    unsafe { libc::write(fd, byte.as_ptr().cast(), 1) };
    // SAFETY: 1. As for the read.
    unsafe { *errno = saved };
}
