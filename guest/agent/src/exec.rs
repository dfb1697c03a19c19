//! A connection's commands: they are started, or attached to, and get their requests while they run. Knows neither how bytes
//! move (`stream.rs`) nor other requests (`server.rs`).
//!
//! ```text
//!            Exec ─► Own ── Exited, or the connection ends and with it the command ─┐
//!  idle ──┤                                                                         ├─► idle
//!            Exec of one that is kept, Attach ─► Kept ── Exited, or Detach ─────────┘
//! ```

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, mpsc};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use agent_api::message::{Reply, Request};
use agent_api::{Duplex, ExecFailure, ExecRequest, Kept, KeptCommand, RequestFailure, RequestFailureKind, Which};
use wire::{FrameReader, FrameWriter};

use crate::journal::Log;
use crate::kept::{self, Attachment, Place, Reservation};
use crate::outlet::{Outlet, Sink};
use crate::server::{Connection, NO_ROOT, Server};
use crate::session::{self, Session};
use crate::spawn::other;
use crate::stream::Streamer;
use crate::{Error, STACK_SIZE, say};

/// Bytes of notes and tags in one answer to `ListKept`. In JSON each may become six, and with the largest command that still is a frame.
const PAGE: usize = 64 * 1024;

/// The command that a connection has.
pub(crate) enum Busy<'scope> {
    /// It ends with the connection.
    Own {
        session: Arc<Session>,
        thread: ScopedJoinHandle<'scope, ()>,
    },
    /// It does not.
    Kept {
        command: Arc<kept::Command>,
        attachment: Arc<Attachment>,
    },
}

impl Busy<'_> {
    fn session(&self) -> &Session {
        match self {
            Self::Own { session, .. } => session,
            Self::Kept { command, .. } => &command.session,
        }
    }

    /// The connection takes other requests.
    fn is_over(&self) -> bool {
        match self {
            Self::Own { session, .. } => session.is_finished(),
            Self::Kept { attachment, .. } => attachment.has_ended(),
        }
    }

    /// Input, the payload that was read last. It may have to wait.
    pub(crate) fn push_stdin(&self, reader: &FrameReader<impl Duplex>) -> Result<(), Error> {
        let bytes = reader.last_payload();
        match self {
            Self::Own { session, .. } => session.push_stdin(bytes),
            Self::Kept { command, attachment } => {
                let connection = reader.get_ref().as_fd();
                command.session.queue_stdin(attachment.source, bytes, connection)
            }
        }
    }

    /// A request that is about the command, if it is one. It has no answer.
    fn take(&self, request: &Request) {
        match request {
            Request::Resize(size) => self.session().resize(*size),
            Request::Signal { number } => self.session().signal(*number),
            Request::CloseStdin => self.session().close_stdin(),
            Request::CloseOutput { stream } => match self {
                Self::Own { session, .. } => session.close_output(*stream),
                Self::Kept { attachment, .. } => attachment.close_output(*stream),
            },
            _ => {}
        }
    }

    /// The connection has nothing to do with the command any more. Nothing of the command is sent to it after this.
    fn leave(self) {
        match self {
            Self::Own { thread, .. } => join(thread),
            Self::Kept { command, attachment } => command.audience.leave(&attachment),
        }
    }

    /// The connection has ended.
    pub(crate) fn lose(self) {
        if let Self::Own { session, .. } = &self {
            session.lost();
        }
        self.leave();
    }
}

impl<'scope, 'env, S: Duplex + 'static> Connection<'scope, 'env, S> {
    pub(crate) fn handle(&mut self, request: Request, reader: &mut FrameReader<S>) -> Result<(), Error> {
        match request {
            // Requests of a running command have no answer; when they come late, after its end, they mean nothing.
            Request::Resize(_) | Request::Signal { .. } | Request::CloseStdin | Request::CloseOutput { .. } => {
                if let Some(busy) = &self.busy {
                    busy.take(&request);
                }
                Ok(())
            }
            request => {
                let detaches = matches!((&request, &self.busy), (Request::Detach, Some(Busy::Kept { .. })));
                if !detaches && self.busy.as_ref().is_some_and(|busy| !busy.is_over()) {
                    return self.refuse("a command is running on this connection; use another one".to_owned());
                }
                if let Some(busy) = self.busy.take() {
                    busy.leave();
                }
                self.answer(request, reader)
            }
        }
    }

    pub(crate) fn exec(&mut self, mut request: ExecRequest) -> Result<(), Error> {
        if !self.has_root() {
            return self.refuse(NO_ROOT.to_owned());
        }
        // Until the command is in its cgroup.
        let may_start = match self.may_start() {
            Ok(may_start) => may_start,
            Err(error) => return self.refuse(error.to_string()),
        };
        if let Some(kept) = request.kept.take() {
            return self.exec_kept(request, kept);
        }
        let log = match self.take_main(&request) {
            Ok(log) => log,
            Err(message) => return self.refuse(message),
        };
        if request.detached {
            let reply = match self.server.start_detached(request, log) {
                Ok(pid) => Reply::Started { pid },
                Err(failure) => Reply::Failed(failure),
            };
            return self.reply(&reply);
        }
        let inner = &self.server.0;
        let (session, ends) = match session::start(&request, &inner.reaper, inner.config.cgroups.as_ref()) {
            Ok((session, ends)) => (Arc::new(session), ends),
            Err(failure) => return self.reply(&Reply::Failed(failure)),
        };
        drop(may_start);
        if request.main {
            *inner.main.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&session));
            self.has_main.store(true, Ordering::SeqCst);
        }
        // Before the thread that sends output: Started comes first.
        let announced = self.reply(&Reply::Started { pid: session.pid() });
        let writer: &'env FrameWriter<S> = self.writer;
        let work = move || stream(Streamer::new(ends, Outlet::Client(writer), log));
        let thread = thread::Builder::new()
            .name("command".to_owned())
            .stack_size(STACK_SIZE)
            .spawn_scoped(self.scope, work)
            .map_err(|error| {
                session.signal(libc::SIGKILL);
                Error::system("starting a thread for a command")(error)
            })?;
        self.busy = Some(Busy::Own { session, thread });
        announced
    }

    fn exec_kept(&mut self, request: ExecRequest, kept: Kept) -> Result<(), Error> {
        if request.main {
            return self.refuse("the sandbox's own command cannot be kept: the machine ends with it".to_owned());
        }
        let reservation = match self.server.0.kept.reserve(&kept) {
            Ok(reservation) => reservation,
            Err(message) => return self.refuse(message),
        };
        let started = |command: &kept::Command| Reply::Started {
            pid: command.session.pid(),
        };
        if request.detached {
            return match self.server.start_kept(request, kept, reservation, None) {
                Ok(command) => self.reply(&started(&command)),
                Err(failure) => self.reply(&Reply::Failed(failure)),
            };
        }
        let attachment = self.attachment(true);
        // Output waits until Started is sent.
        let opening = attachment.opening();
        let first = Some(Arc::clone(&attachment));
        let command = match self.server.start_kept(request, kept, reservation, first) {
            Ok(command) => command,
            Err(failure) => return self.reply(&Reply::Failed(failure)),
        };
        let announced = opening.announce(&started(&command), &[]);
        self.busy = Some(Busy::Kept { command, attachment });
        announced
    }

    pub(crate) fn attach(&mut self, which: &Which, output: bool) -> Result<(), Error> {
        let attachment = self.attachment(output);
        let opening = attachment.opening();
        let found = self.server.0.kept.find(which);
        let entered = found.and_then(|(pid, command)| {
            let past = command.audience.enter(&attachment)?;
            Some((pid, command, past))
        });
        let Some((pid, command, past)) = entered else {
            return self.reply(&Reply::RequestFailed(not_found(which)));
        };
        let announced = opening.announce(&Reply::Started { pid }, &past);
        self.busy = Some(Busy::Kept { command, attachment });
        announced
    }

    pub(crate) fn list_kept(&self) -> Result<(), Error> {
        let mut rest = self.server.0.kept.list();
        loop {
            let later = rest.split_off(page(&rest));
            let more = !later.is_empty();
            self.reply(&Reply::Kept { commands: rest, more })?;
            if !more {
                return Ok(());
            }
            rest = later;
        }
    }

    fn attachment(&self, output: bool) -> Arc<Attachment> {
        let sink: Arc<dyn Sink> = Arc::clone(self.writer) as _;
        Attachment::new(sink, output)
    }

    /// Whether `request` may be the sandbox's own command, and the log for it.
    fn take_main(&self, request: &ExecRequest) -> Result<Option<Log>, String> {
        let inner = &self.server.0;
        if !request.main {
            return Ok(None);
        }
        let Some(open) = &inner.log else {
            return Err("this agent has no sandbox whose command this could be".to_owned());
        };
        if inner.main.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Err("the sandbox has its command already".to_owned());
        }
        match Log::new(Arc::clone(open)) {
            Ok(log) => Ok(Some(log)),
            Err(error) => {
                // A host that keeps no log does not answer there.
                say(format_args!("the command's output is not logged: {error}"));
                Ok(None)
            }
        }
    }

    pub(crate) fn signal_main(&self, number: i32) -> Result<(), Error> {
        let main = self.server.0.main.lock().unwrap_or_else(PoisonError::into_inner);
        match main.as_ref() {
            Some(session) => {
                session.signal(number);
                Ok(())
            }
            None => Err(Error::Refused("the sandbox's command has not been started".to_owned())),
        }
    }
}

impl Server {
    /// Starts a command that nobody waits for.
    fn start_detached(&self, request: ExecRequest, log: Option<Log>) -> Result<u32, ExecFailure> {
        let server = self.clone();
        start_in_thread(move |tell| server.run_detached(&request, log, tell))
    }

    fn run_detached(&self, request: &ExecRequest, log: Option<Log>, tell: &Tell<u32>) {
        let inner = &self.0;
        let (session, ends) = match session::start(request, &inner.reaper, inner.config.cgroups.as_ref()) {
            Ok(started) => started,
            Err(failure) => return drop(tell.send(Err(failure))),
        };
        let pid = session.pid();
        if request.main {
            *inner.main.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(session));
        }
        // Whoever asked may be gone: the command runs nevertheless.
        drop(tell.send(Ok(pid)));
        stream(Streamer::new(ends, Outlet::Nobody, log));
        if request.main {
            self.end_machine();
        }
    }

    /// Starts a command that is kept, `first` attached to it.
    fn start_kept(
        &self,
        request: ExecRequest,
        kept: Kept,
        reservation: Reservation<kept::Command>,
        first: Option<Arc<Attachment>>,
    ) -> Result<Arc<kept::Command>, ExecFailure> {
        let server = self.clone();
        start_in_thread(move |tell| {
            let inner = &server.0;
            let (session, ends) = match session::start(&request, &inner.reaper, inner.config.cgroups.as_ref()) {
                Ok(started) => started,
                Err(failure) => return drop(tell.send(Err(failure))),
            };
            let limit = kept.limit_ms.map(Duration::from_millis);
            let place = Place::take(reservation, session, kept, first.as_ref());
            drop(first);
            drop(tell.send(Ok(Arc::clone(place.command()))));
            stream(Streamer::new(ends, Outlet::Attached(place), None).with_limit(limit));
        })
    }
}

/// How a command's thread says that it runs.
type Tell<T> = mpsc::Sender<Result<T, ExecFailure>>;

/// A thread that does `work`, until `work` has said what came of it.
fn start_in_thread<T: Send + 'static>(work: impl FnOnce(&Tell<T>) + Send + 'static) -> Result<T, ExecFailure> {
    let (tell, told) = mpsc::channel();
    let spawned = thread::Builder::new()
        .name("command".to_owned())
        .stack_size(STACK_SIZE)
        .spawn(move || work(&tell));
    spawned.map_err(|error| other("starting a thread for the command", error))?;
    told.recv()
        .unwrap_or_else(|error| Err(other("starting the command", error)))
}

fn stream(streamer: Streamer<'_>) {
    if let Err(error) = streamer.run() {
        say(format_args!("a command was killed: {error}"));
    }
}

fn join(thread: ScopedJoinHandle<'_, ()>) {
    if thread.join().is_err() {
        say(format_args!("a command's thread has panicked"));
    }
}

/// How many of `commands` go into one answer.
fn page(commands: &[KeptCommand]) -> usize {
    let mut text = 0;
    let fit = commands.iter().take_while(|command| {
        // The punctuation, too.
        text += 64 + command.kept.text_len();
        text <= PAGE
    });
    fit.count().max(1).min(commands.len())
}

fn not_found(which: &Which) -> RequestFailure {
    let named = match which {
        Which::Pid(pid) => format!("with the process id {pid}"),
        Which::Tag(tag) => format!("with the tag {tag:?}"),
    };
    RequestFailure {
        kind: RequestFailureKind::NotFound,
        message: format!("no command that is kept runs {named}: it has ended, or was never started so"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The worst that JSON makes of text: each byte is six.
    #[test]
    fn any_page_is_a_frame() {
        let command = |note: usize| KeptCommand {
            pid: u32::MAX,
            kept: Kept {
                tag: Some("\u{1}".repeat(4096)),
                note: "\u{1}".repeat(note),
                limit_ms: Some(u64::MAX),
            },
        };
        for notes in [vec![65_536; 3], vec![0; 4096], vec![30_000; 5], vec![1, 65_536, 1]] {
            let mut rest: Vec<_> = notes.into_iter().map(command).collect();
            while !rest.is_empty() {
                let later = rest.split_off(page(&rest));
                let reply = Reply::Kept {
                    commands: rest,
                    more: true,
                };
                let length = serde_json::to_vec(&reply).unwrap().len();
                assert!(length <= wire::MAX_PAYLOAD, "{length}");
                rest = later;
            }
        }
        assert_eq!(page(&[]), 0);
    }
}
