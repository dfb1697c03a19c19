//! One command: what is queued for it, and what has become of it. Threads of connections change the state; the session's own
//! thread (`stream.rs`) moves the bytes. Knows nothing of requests other than those of an exec.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_api::message::STDIN_WINDOW;
use agent_api::{ExecFailure, ExecRequest, ExitStatus, FailureKind, OsText, OutputStream, Tty, WinSize};
use base::EventFd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::Error;
use crate::cgroup::{Cgroup, Cgroups};
use crate::identity::{self, Identity};
use crate::libraries;
use crate::lookup::{self, DEFAULT_PATH};
use crate::reaper::{Reaper, Target};
use crate::spawn::{self, Plan, c_strings, other};
use crate::stdin::{Offer, Queue, Source};

/// A command that was started.
pub(crate) struct Session {
    pid: i32,
    reaper: Reaper,
    shared: Arc<Shared>,
    /// For the size; `None` without a terminal.
    terminal: Option<OwnedFd>,
}

/// State that the threads share; every change signals `wake`.
pub(crate) struct Shared {
    state: Mutex<State>,
    pub(crate) wake: EventFd,
    /// Set just before `Exited` is sent: from then on the connection takes other requests.
    pub(crate) finished: AtomicBool,
}

/// See [`Shared`].
#[derive(Default)]
pub(crate) struct State {
    pub(crate) stdin: Queue,
    /// The client does not want the stream any more.
    pub(crate) unwanted: Vec<OutputStream>,
    /// The client is gone.
    pub(crate) lost: bool,
    pub(crate) exit: Option<ExitStatus>,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.wake.signal();
    }

    /// Nothing that comes from here on has an effect.
    pub(crate) fn finish(&self) {
        self.finished.store(true, Ordering::SeqCst);
        self.lock().stdin.discard();
    }
}

/// The agent's ends of the command's streams.
pub(crate) struct Streams {
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    /// All three are one terminal.
    pub(crate) tty: bool,
}

/// What the session's thread needs.
pub(crate) struct Ends<'a> {
    pub(crate) pid: i32,
    pub(crate) reaper: Reaper,
    pub(crate) shared: Arc<Shared>,
    pub(crate) streams: Streams,
    pub(crate) cgroup: Option<Cgroup<'a>>,
}

/// Starts the command of `request`.
pub(crate) fn start<'a>(
    request: &ExecRequest,
    reaper: &Reaper,
    cgroups: Option<&'a Cgroups>,
) -> Result<(Session, Ends<'a>), ExecFailure> {
    let identity = identity::resolve(request.user.as_deref()).map_err(|message| ExecFailure {
        kind: FailureKind::BadUser,
        message,
    })?;
    let cgroup = cgroups
        .map(Cgroups::create)
        .transpose()
        .map_err(|error| other("making a cgroup", error))?;
    let entrance = cgroup.as_ref().map(Cgroup::entrance).transpose();
    let entrance = entrance.map_err(|error| other("opening the cgroup", error))?;
    let (streams, theirs) = match &request.tty {
        Some(tty) => make_terminal(tty)?,
        None => make_pipes(request.stdin)?,
    };
    let terminal = streams
        .stdout
        .as_ref()
        .filter(|_| streams.tty)
        .map(OwnedFd::try_clone)
        .transpose();
    let terminal = terminal.map_err(|error| other("keeping the terminal", error))?;
    let wake = EventFd::new().map_err(|error| other("making an eventfd", error))?;
    let state = State {
        stdin: Queue::new(!request.stdin && request.tty.is_none()),
        ..State::default()
    };
    let shared = Arc::new(Shared {
        state: Mutex::new(state),
        wake,
        finished: AtomicBool::new(false),
    });

    let told = Arc::clone(&shared);
    let plan = make_plan(request, &identity, &theirs, entrance.as_ref())?;
    let pid = spawn::spawn(&plan, reaper, move |status| {
        told.change(|state| state.exit = Some(status))
    })?;
    let session = Session {
        pid,
        reaper: reaper.clone(),
        shared: Arc::clone(&shared),
        terminal,
    };
    Ok((
        session,
        Ends {
            pid,
            reaper: reaper.clone(),
            shared,
            streams,
            cgroup,
        },
    ))
}

/// The command's own ends; dropped once it has its copies.
struct Theirs([OwnedFd; 3]);

fn make_pipes(stdin: bool) -> Result<(Streams, Theirs), ExecFailure> {
    let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(|errno| other("making a pipe", errno));
    let (stdin_near, stdin_far) = if stdin {
        let (read, write) = pipe()?;
        (Some(write), read)
    } else {
        let null = std::fs::File::open("/dev/null").map_err(|error| other("opening /dev/null", error))?;
        (None, null.into())
    };
    let (stdout_near, stdout_far) = pipe()?;
    let (stderr_near, stderr_far) = pipe()?;
    for fd in stdin_near.iter().chain([&stdout_near, &stderr_near]) {
        rustix::io::ioctl_fionbio(fd, true).map_err(|errno| other("making a pipe non-blocking", errno))?;
    }
    let streams = Streams {
        stdin: stdin_near,
        stdout: Some(stdout_near),
        stderr: Some(stderr_near),
        tty: false,
    };
    Ok((streams, Theirs([stdin_far, stdout_far, stderr_far])))
}

fn make_terminal(tty: &Tty) -> Result<(Streams, Theirs), ExecFailure> {
    let fail = |errno| other("making a terminal", errno);
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let near = openpt(flags).map_err(fail)?;
    unlockpt(&near).map_err(fail)?;
    let far = ioctl_tiocgptpeer(&near, flags).map_err(fail)?;
    set_size(near.as_fd(), tty.size).map_err(|error| other("setting the terminal's size", error))?;
    rustix::io::ioctl_fionbio(&near, true).map_err(fail)?;
    let copy = |fd: &OwnedFd| fd.try_clone().map_err(|error| other("making a terminal", error));
    let streams = Streams {
        stdin: Some(copy(&near)?),
        stdout: Some(near),
        stderr: None,
        tty: true,
    };
    Ok((streams, Theirs([copy(&far)?, copy(&far)?, far])))
}

fn set_size(terminal: BorrowedFd<'_>, size: WinSize) -> Result<(), std::io::Error> {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(tcsetwinsize(terminal, size)?)
}

fn make_plan<'a>(
    request: &ExecRequest,
    identity: &'a Identity,
    theirs: &'a Theirs,
    entrance: Option<&'a OwnedFd>,
) -> Result<Plan<'a>, ExecFailure> {
    let program = request
        .argv
        .first()
        .ok_or_else(|| other("no program", "the list of arguments is empty"))?;
    let env = environment(request, identity);
    let path = env
        .iter()
        .find_map(|entry| entry.strip_prefix(b"PATH="))
        .unwrap_or_default();
    let cwd: &[u8] = if request.cwd.as_bytes().is_empty() {
        b"/"
    } else {
        request.cwd.as_bytes()
    };
    if !cwd.starts_with(b"/") {
        let message = format!(
            "the working directory {:?} is not an absolute path: begin it with a slash",
            request.cwd.to_string()
        );
        return Err(ExecFailure {
            kind: FailureKind::BadCwd,
            message,
        });
    }
    let cwd_path = Path::new(OsStr::from_bytes(cwd));
    let file = lookup::find(program, path, cwd_path)?;
    let zero = |what: &'static str| move |_| other(what, "it contains a zero byte");
    let [stdin, stdout, stderr] = &theirs.0;
    Ok(Plan {
        program: CString::new(file.into_os_string().into_encoded_bytes()).map_err(zero("the program"))?,
        argv: c_strings(request.argv.iter().map(OsText::as_bytes)).map_err(zero("an argument"))?,
        env: c_strings(env.iter().map(Vec::as_slice)).map_err(zero("the environment"))?,
        cwd: CString::new(cwd).map_err(zero("the working directory"))?,
        identity,
        stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        tty: request.tty.is_some(),
        cgroup: entrance.map(AsFd::as_fd),
    })
}

/// The request's environment and what is missing in it.
fn environment(request: &ExecRequest, identity: &Identity) -> Vec<Vec<u8>> {
    let mut env: Vec<Vec<u8>> = request.env.iter().map(|entry| entry.as_bytes().to_vec()).collect();
    let mut add = |name: &str, value: &str| {
        let prefix = format!("{name}=");
        if !env.iter().any(|entry| entry.starts_with(prefix.as_bytes())) {
            env.push(format!("{prefix}{value}").into_bytes());
        }
    };
    add("PATH", DEFAULT_PATH);
    add("HOME", &identity.home);
    if let Some(name) = &identity.name {
        add("USER", name);
    }
    if let Some(tty) = &request.tty {
        add("TERM", tty.term.as_deref().unwrap_or("xterm"));
    }
    libraries::tell(&mut env);
    env
}

/// What the connection's thread does with requests of a running command. After the end all of it is without effect.
impl Session {
    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        u32::try_from(self.pid).unwrap_or(0)
    }

    /// Queues standard input of the one client. More than the window is a broken client.
    pub(crate) fn push_stdin(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut state = self.shared.lock();
        if !state.stdin.is_wanted() {
            return Ok(());
        }
        let got = state.stdin.len() + bytes.len();
        if got > STDIN_WINDOW {
            return Err(Error::WindowExceeded {
                got,
                window: STDIN_WINDOW,
            });
        }
        state.stdin.push(Source::CLIENT, bytes);
        drop(state);
        self.shared.wake.signal();
        Ok(())
    }

    /// Queues standard input of one of several clients. What does not fit waits for its turn, in pieces of a window, until nobody wants
    /// it any more, or until the other side of `connection` has left.
    pub(crate) fn queue_stdin(&self, source: Source, bytes: &[u8], connection: BorrowedFd<'_>) -> Result<(), Error> {
        for piece in bytes.chunks(STDIN_WINDOW) {
            let mut place = None;
            let result = loop {
                let offered = self.shared.lock().stdin.offer(source, piece, &mut place);
                match offered {
                    Ok(Offer::Settled) => break Ok(()),
                    Ok(Offer::Wait(room)) => match wait_for_room(&room, connection) {
                        Ok(()) => {}
                        Err(error) => break Err(error),
                    },
                    Err(error) => break Err(Error::system("waiting to queue standard input")(error)),
                }
            };
            self.shared.lock().stdin.leave(&mut place);
            self.shared.wake.signal();
            result?;
        }
        Ok(())
    }

    pub(crate) fn close_stdin(&self) {
        self.shared.change(|state| state.stdin.close());
    }

    pub(crate) fn close_output(&self, stream: OutputStream) {
        self.shared.change(|state| {
            if !state.unwanted.contains(&stream) {
                state.unwanted.push(stream);
            }
        });
    }

    /// Signals that a terminal's keys make, and `SIGHUP` and `SIGKILL`, go to the whole process group, as they would
    /// locally; the others to the command itself.
    pub(crate) fn signal(&self, number: i32) {
        let target = match number {
            libc::SIGHUP | libc::SIGINT | libc::SIGQUIT | libc::SIGKILL => Target::Group,
            _ => Target::Process,
        };
        // Its number may be another's by now.
        if self.shared.lock().exit.is_some() {
            return;
        }
        // False only for a command that has just ended or a number that is none: nothing to do in either case.
        self.reaper.signal(self.pid, target, number);
    }

    /// Sets the terminal's size; the kernel sends `SIGWINCH`.
    pub(crate) fn resize(&self, size: WinSize) {
        if let Some(terminal) = &self.terminal {
            // Fails only for a terminal that has hung up.
            drop(set_size(terminal.as_fd(), size));
        }
    }

    /// The client is gone: the command is told, then killed.
    pub(crate) fn lost(&self) {
        self.shared.change(|state| state.lost = true);
    }

    /// Nobody moves its bytes any more.
    pub(crate) fn finish(&self) {
        self.shared.finish();
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.shared.finished.load(Ordering::SeqCst)
    }
}

/// Waits until `room` is signalled; an error if the other side of `connection` leaves before that.
fn wait_for_room(room: &EventFd, connection: BorrowedFd<'_>) -> Result<(), Error> {
    loop {
        let mut fds = [
            PollFd::new(room, PollFlags::IN),
            PollFd::from_borrowed_fd(connection, PollFlags::RDHUP),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::system("waiting to queue standard input")(errno)),
        }
        let [is_room, has_left] = fds.map(|fd| !fd.revents().is_empty());
        if has_left {
            // What it has sent after this would come without this.
            let aborted = std::io::Error::from(std::io::ErrorKind::ConnectionAborted);
            return Err(Error::Wire(wire::Error::Io(aborted)));
        }
        if is_room {
            room.consume();
            return Ok(());
        }
    }
}
