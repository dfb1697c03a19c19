//! A client that runs its server itself: both are virtual machines on CPUs of their own, the server's is frozen (docs/accel-switch.md), and
//! the client's thread enters it in the place of its own guest. The client's side; a server of this kind waits as any other does, with
//! words in the window, and one of its threads says to its machine that all others sleep.
//!
//! ```text
//!   ClientEnd ── record, bell's word ──▶ Enter::enter ═══▶ the server's machine runs until it waits
//!       ▲                                                   server's threads: records, answers
//!       └──────── answer ◀────────────── Done ◀════════════ all sleep: it waits
//! ```
//! Nobody wakes anybody by a system call or an interrupt. Who finds the server at work for another client tries again a little later.
#![allow(unsafe_code, reason = "hypercalls are made; each block says what it relies on")]

use std::arch::asm;
use std::fmt::Debug;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use accel_window::{Greeting, Side, VERSIONS, Window};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use wire::ring::Word;

use crate::connection::{Control, client_end, may_shrink};
use crate::end::Way;
use crate::peer::Peer;
use crate::{Agreement, ClientConnection, ClientEnd, Error, Offer, Protocol, Settings, Signal, Transport};

/// `BASALT_CALL_ENTER` and `BASALT_CALL_WAIT` of kmod/uapi/basalt.h.
const CALL_ENTER: u64 = 0x6261_7361_746c_0002;
const CALL_WAIT: u64 = 0x6261_7361_746c_0001;

/// How long who was told nothing new waits before it enters again: from this, doubled each time, to that.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// Bits of a file's mode: its group or others may write it, and so shrink it.
const WRITTEN_BY_OTHERS: u32 = 0o022;

/// How often one that only lets records go enters a server that is at work for another before it leaves them to the next call.
const ATTEMPTS: u32 = 64;

/// What came of entering a server (`BASALT_ENTERED_*` of kmod/uapi/basalt.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entered {
    /// It has nothing to do any more.
    Done,
    /// It goes on where it was when it is entered again: something was for the client's machine.
    Interrupted,
    /// Another client runs it, or its VMM does something for it.
    Busy,
    /// It has taken all the time that it may have at once.
    Late,
    /// It has halted, and nobody can wake it.
    Halted,
    /// It has ended.
    Gone,
    /// The client's machine is linked to none by that number, or it is no machine of that kind.
    NoLink,
}

impl Entered {
    fn of(status: u64) -> Self {
        match status {
            0 => Self::Done,
            1 => Self::Interrupted,
            2 => Self::Busy,
            3 => Self::Late,
            4 => Self::Halted,
            5 => Self::Gone,
            _ => Self::NoLink,
        }
    }
}

/// A way to run a server in this thread's place.
pub trait Enter: Debug + Send + Sync {
    /// Runs it until it has nothing to do, or cannot go on.
    fn enter(&self) -> Entered;
}

/// A server that this virtual machine is linked to by a number. On a machine of another kind the instruction may end the program
/// (SIGILL): whoever makes one knows where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link(pub u32);

impl Enter for Link {
    fn enter(&self) -> Entered {
        Entered::of(hypercall(CALL_ENTER, self.0.into()))
    }
}

/// For a server's virtual machine: lets all other threads run until they sleep, says that, and returns when a client has entered it. False if
/// it is no server, or not yet: it goes on at once. Of a thread that [runs behind all others](run_when_others_sleep).
#[must_use]
pub fn wait_to_be_entered() -> bool {
    // Each time that another had the processor there may be one more that wants it; nothing but this takes it from a thread.
    while gave_way() {}
    hypercall(CALL_WAIT, 0) == 0
}

/// Has another thread run, if one wants to; whether one did, by the kernel's count of what this thread was switched away from.
fn gave_way() -> bool {
    let before = switches();
    thread::yield_now();
    switches() != before
}

fn switches() -> libc::c_long {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the place has room for what is written.
    let told = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: zeroes are a value of all of its fields.
    let usage = unsafe { usage.assume_init() };
    match told {
        0 => usage.ru_nvcsw.wrapping_add(usage.ru_nivcsw),
        _ => 0,
    }
}

fn hypercall(call: u64, index: u64) -> u64 {
    let status;
    // SAFETY: all that it changes is RAX, and memory that others write, which is accessed as such.
    unsafe { asm!("vmmcall", inlateout("rax") call => status, in("rcx") index, options(nostack)) };
    status
}

/// Has the calling thread give way to all others: Linux has whoever it wakes run in its place, and whoever wants to when it yields (SCHED_IDLE,
/// sched(7)). Threads that it makes from then on are alike, and do not: there should be none.
///
/// # Errors
/// The kernel refuses.
pub fn run_when_others_sleep() -> io::Result<()> {
    // `struct sched_param` of the kernel: no priority. musl's own function for it does nothing.
    let (priority, policy) = (0_i32, libc::SCHED_IDLE);
    // SAFETY: 1. the parameters live through the call; 2. it is about the calling thread.
    match unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What all ends of a connection know of their server.
#[derive(Debug)]
pub(crate) struct Server {
    enter: Arc<dyn Enter>,
    gone: AtomicBool,
}

impl Server {
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn enter(&self) -> Entered {
        let entered = self.enter.enter();
        if matches!(entered, Entered::Halted | Entered::Gone | Entered::NoLink) {
            self.gone.store(true, Ordering::Release);
        }
        entered
    }
}

/// Runs the server, in place of waking it and of waiting for it.
#[derive(Debug)]
struct EnterSignal {
    server: Arc<Server>,
    /// The word by which the server's thread for this pair sees that there is something.
    bell: Word,
    /// In microseconds: how long was waited last for nothing new.
    paused: AtomicU32,
}

impl EnterSignal {
    /// A little longer each time, as long as nothing comes of it.
    fn pause(&self, most: Duration) {
        let before = Duration::from_micros(self.paused.load(Ordering::Relaxed).into());
        let pause = (before * 2).clamp(SHORTEST, LONGEST);
        self.paused
            .store(u32::try_from(pause.as_micros()).unwrap_or(u32::MAX), Ordering::Relaxed);
        thread::sleep(pause.min(most));
    }
}

impl Signal for EnterSignal {
    fn seen(&self) -> u32 {
        0
    }

    /// An end that comes of it is told by whoever waits.
    fn wake(&self) -> Result<(), Error> {
        self.bell.add(1, Ordering::Release);
        self.paused.store(0, Ordering::Relaxed);
        for _ in 0..ATTEMPTS {
            match self.server.enter() {
                Entered::Interrupted => (),
                Entered::Busy => self.pause(LONGEST),
                _ => break,
            }
        }
        Ok(())
    }

    /// Returns to have the rings looked at, whatever has come of it.
    fn wait(&self, _: u32, most: Duration) -> Result<bool, Error> {
        let begun = Instant::now();
        match self.server.enter() {
            Entered::Interrupted => (),
            Entered::Done | Entered::Busy => self.pause(most),
            Entered::Late => {
                return Err(Error::Deadline {
                    what: "what the server was entered for",
                    waited: begun.elapsed(),
                });
            }
            Entered::Halted | Entered::Gone | Entered::NoLink => return Ok(false),
        }
        Ok(true)
    }
}

/// A window that this process alone has of its machine's programs, until it is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    file: OwnedFd,
    greeting: Greeting,
    server: Arc<Server>,
}

impl Taken {
    /// A file of root's, or of who is the same user, which nobody else may write: whoever shrank it would end this process (SIGBUS). Who has it is known by a lock, which
    /// goes with the process.
    fn new(file: OwnedFd, enter: Arc<dyn Enter>) -> Result<(Self, wire::ring::Region), Error> {
        let told = rustix::fs::fstat(&file).map_err(Error::io("ask whose the window is"))?;
        let owner = told.st_uid;
        if !may_shrink(rustix::fs::Uid::from_raw(owner), rustix::process::geteuid()) {
            return Err(Protocol::Refused(format!("the window is of user {owner}, who could shrink it")).into());
        }
        if told.st_mode & WRITTEN_BY_OTHERS != 0 {
            let reason = "others can shrink the window: take write permission from group and others (chmod go-w)";
            return Err(Protocol::Refused(reason.to_owned()).into());
        }
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => (),
            Err(Errno::WOULDBLOCK) => {
                let reason = "another program has the window: end it, or take another window";
                return Err(Protocol::Refused(reason.to_owned()).into());
            }
            Err(error) => return Err(Error::io("lock the window")(error)),
        }
        let region = accel_window::map_file(&file)?;
        let taken = Self {
            file,
            greeting: Greeting::of(&region)?,
            server: Arc::new(Server {
                enter,
                gone: AtomicBool::new(false),
            }),
        };
        Ok((taken, region))
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Asks for so many pairs until that is answered; how many there are.
    fn ask(&self, pairs: u32, patience: Duration) -> Result<u32, Error> {
        let number = self.greeting.ask(pairs);
        let begun = Instant::now();
        loop {
            let entered = self.server.enter();
            match (self.greeting.answer_to(number), entered) {
                (Some(given), _) => return Ok(given),
                (None, Entered::Gone | Entered::Halted) => return Err(Error::PeerGone),
                (None, Entered::NoLink) => {
                    let reason = "this machine is linked to no server by that number";
                    return Err(Protocol::Refused(reason.to_owned()).into());
                }
                (None, _) => (),
            }
            let waited = begun.elapsed();
            if waited > patience {
                return Err(Error::Deadline {
                    what: "the window",
                    waited,
                });
            }
            if entered != Entered::Interrupted {
                thread::sleep(LONGEST);
            }
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // The server ends what this client has there. One that does not hear of it does so for the window's next client.
        self.greeting.ask(0);
        for _ in 0..ATTEMPTS {
            if self.server.is_gone() || self.server.enter() != Entered::Interrupted {
                break;
            }
        }
    }
}

/// Takes a window, of a machine that is linked to the window's server.
///
/// # Errors
/// [`Protocol::Refused`] where another program has it, or the server gives none; each of [`Error`]'s.
pub fn connect_by_entering(
    file: impl Into<OwnedFd>,
    enter: Arc<dyn Enter>,
    offer: &Offer,
) -> Result<ClientConnection, Error> {
    let (taken, region) = Taken::new(file.into(), enter)?;
    let given = taken.ask(offer.pairs, offer.patience)?;
    if given == 0 {
        return Err(Protocol::Refused("the server gives this window to nobody now".to_owned()).into());
    }
    let (window, version) = Window::open(region, VERSIONS)?;
    let agreed = Agreement {
        transport: Transport::Enter,
        pairs: given.min(offer.pairs).min(window.geometry().pairs()),
        busy_poll: Duration::ZERO,
        arena: 0,
    };
    let server = Arc::clone(&taken.server);
    let control = Arc::new(Control::Window(taken));
    let mut ends = Vec::new();
    for pair in 0..agreed.pairs {
        let signal = EnterSignal {
            server: Arc::clone(&server),
            bell: window.bell(pair, Side::Server)?,
            paused: AtomicU32::new(0),
        };
        let peer = Peer::Entered {
            life: window.life()?,
            server: Arc::clone(&server),
        };
        let way = Way::Ring(Box::new(client_end(agreed, &window, pair, (Box::new(signal), peer))?));
        ends.push(ClientEnd::new(way, Transport::Enter).keeping(&control));
    }
    Ok(ClientConnection {
        transport: Transport::Enter,
        window: Some((window, version)),
        ends,
        socket: control,
    })
}

impl Agreement {
    /// With a client that has asked for so many pairs in a window's header, and enters; nothing if it has asked for none.
    #[must_use]
    pub fn entered(pairs: u32, settings: &Settings) -> Option<Self> {
        let pairs = pairs.min(settings.pairs);
        (pairs > 0).then_some(Self {
            transport: Transport::Enter,
            pairs,
            // Who looks for what its client has yet to write holds up the client.
            busy_poll: Duration::ZERO,
            arena: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Mutex, PoisonError};

    use accel_window::Geometry;

    use super::*;

    /// Ends each time as the next of these, and then well.
    #[derive(Debug, Default)]
    struct Script(Mutex<(VecDeque<Entered>, u32)>);

    impl Script {
        fn entries(&self) -> u32 {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).1
        }
    }

    impl Enter for Script {
        fn enter(&self) -> Entered {
            let mut script = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            script.1 += 1;
            script.0.pop_front().unwrap_or(Entered::Done)
        }
    }

    fn signal(script: &[Entered]) -> (EnterSignal, Arc<Script>, Word) {
        let (_, window) = Window::create(Geometry::new(1, 2, 4096).unwrap()).unwrap();
        let bell = window.bell(0, Side::Server).unwrap();
        let script = Arc::new(Script(Mutex::new((script.iter().copied().collect(), 0))));
        let enter: Arc<dyn Enter> = Arc::<Script>::clone(&script);
        let server = Server {
            enter,
            gone: AtomicBool::new(false),
        };
        let signal = EnterSignal {
            server: Arc::new(server),
            bell: bell.clone(),
            paused: AtomicU32::new(0),
        };
        (signal, script, bell)
    }

    #[test]
    fn what_is_to_go_goes_by_one_entry_and_more_if_that_was_in_vain() {
        use Entered::{Busy, Done, Gone, Interrupted, Late};
        for (script, entries) in [
            (vec![Done, Gone], 1),
            (vec![Interrupted, Busy, Interrupted, Done, Gone], 4),
            (vec![Late, Gone], 1),
            (vec![Gone], 1),
            (vec![Busy; 1000], ATTEMPTS),
        ] {
            let (signal, counted, bell) = signal(&script);
            signal.wake().unwrap();
            assert_eq!(
                (counted.entries(), bell.load(Ordering::SeqCst)),
                (entries, 1),
                "{script:?}"
            );
        }
    }

    #[test]
    fn what_is_waited_for_is_looked_for_after_each_entry_and_an_end_is_known() {
        use Entered::{Busy, Done, Gone, Halted, Interrupted, Late, NoLink};
        for (entered, woken, gone) in [
            (Done, true, false),
            (Interrupted, true, false),
            (Busy, true, false),
            (Halted, false, true),
            (Gone, false, true),
            (NoLink, false, true),
        ] {
            let (signal, counted, _) = signal(&[entered]);
            assert_eq!(signal.wait(0, Duration::from_secs(1)).unwrap(), woken, "{entered:?}");
            assert_eq!((signal.server.is_gone(), counted.entries()), (gone, 1), "{entered:?}");
        }
        let (signal, ..) = signal(&[Late]);
        let error = signal.wait(0, Duration::from_secs(1)).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        assert!(!signal.server.is_gone());
    }

    #[test]
    fn who_is_told_nothing_new_waits_longer_each_time_and_no_longer_than_it_may() {
        let (signal, ..) = signal(&[Entered::Busy; 12]);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            signal.wait(0, Duration::ZERO).unwrap();
            pauses.push(signal.paused.load(Ordering::Relaxed));
        }
        assert_eq!(pauses[..4], [20, 40, 80, 160]);
        assert_eq!(pauses[11], 1000);
        let begun = Instant::now();
        signal.pause(Duration::ZERO);
        assert!(begun.elapsed() < Duration::from_secs(1));
        signal.wake().unwrap();
        assert_eq!(signal.paused.load(Ordering::Relaxed), 0, "what comes next is new");
    }

    #[test]
    fn answers_of_the_module_are_those_of_its_header() {
        let header = include_str!("../../../kmod/uapi/basalt.h");
        let number = |name: &str| {
            let line = header.lines().find(|line| line.split_whitespace().nth(1) == Some(name));
            let text = line.unwrap().split_whitespace().nth(2).unwrap().trim_end_matches("ULL");
            match text.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
                None => text.parse().unwrap(),
            }
        };
        use Entered::{Busy, Done, Gone, Halted, Interrupted, Late, NoLink};
        for (name, entered) in [
            ("BASALT_ENTERED_DONE", Done),
            ("BASALT_ENTERED_INTERRUPTED", Interrupted),
            ("BASALT_ENTERED_BUSY", Busy),
            ("BASALT_ENTERED_LATE", Late),
            ("BASALT_ENTERED_HALTED", Halted),
            ("BASALT_ENTERED_GONE", Gone),
            ("BASALT_ENTERED_NONE", NoLink),
        ] {
            assert_eq!(Entered::of(number(name)), entered, "{name}");
        }
        // What KVM answers (KVM_ENOSYS, KVM_EPERM).
        assert_eq!(
            [-1000_i64, -1].map(|status| Entered::of(status.cast_unsigned())),
            [NoLink; 2]
        );
        assert_eq!(
            (number("BASALT_CALL_ENTER"), number("BASALT_CALL_WAIT")),
            (CALL_ENTER, CALL_WAIT)
        );
    }
}
