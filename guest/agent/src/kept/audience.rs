//! Who is attached to a kept command, and what each of them gets. A connection that does not read holds the command back; one
//! that has failed is left out from then on. Knows no command and no table.
//!
//! Two locks, and neither is held while another connection is waited for: that of the audience for the list alone, and each
//! attachment's gate while something is sent to it. Whoever has a gate may take the audience's lock, and not the other way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_api::message::{Reply, kind};
use agent_api::{ExitStatus, OutputStream};

use crate::Error;
use crate::outlet::{Sink, encode, frame_kind};
use crate::stdin::Source;

/// All who are attached to one command.
#[derive(Default)]
pub(crate) struct Audience(Mutex<State>);

#[derive(Default)]
struct State {
    attached: Vec<Arc<Attachment>>,
    /// What was told about the command's streams, for those who come later. Each is told once.
    past: Vec<Reply>,
    ended: bool,
}

/// One connection's part in a command.
pub(crate) struct Attachment {
    /// Whose input it sends.
    pub(crate) source: Source,
    sink: Arc<dyn Sink>,
    /// Whether anything is sent to it.
    output: bool,
    /// Of the two streams, those that it does not want any more.
    unwanted: [AtomicBool; 2],
    /// The command has ended: the connection takes other requests.
    ended: AtomicBool,
    gate: Mutex<Gate>,
}

/// See [`Attachment::gate`]; whoever has it locked decides what is sent next.
enum Gate {
    Open,
    /// The connection has left, has failed or was told the end.
    Shut,
}

/// An attachment to which nobody else sends anything yet.
pub(crate) struct Opening<'a> {
    attachment: &'a Attachment,
    gate: MutexGuard<'a, Gate>,
}

impl Audience {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more, and what he has to be told first; `None` if the command has ended.
    pub(crate) fn enter(&self, attachment: &Arc<Attachment>) -> Option<Vec<Reply>> {
        let mut state = self.lock();
        if state.ended {
            return None;
        }
        state.attached.push(Arc::clone(attachment));
        Some(state.past.clone())
    }

    /// One fewer. After this nothing is sent to him.
    pub(crate) fn leave(&self, attachment: &Arc<Attachment>) {
        *attachment.lock() = Gate::Shut;
        self.lock().attached.retain(|other| !Arc::ptr_eq(other, attachment));
    }

    /// Some output, to all who want it.
    pub(crate) fn output(&self, stream: OutputStream, bytes: &[u8]) {
        for attachment in self.attached() {
            if attachment.wants(stream) {
                attachment.send(frame_kind(stream), bytes);
            }
        }
    }

    /// A notice about the command's streams, to all who want it and to those who come later.
    pub(crate) fn tell(&self, notice: &Reply) {
        let attached = {
            let mut state = self.lock();
            if state.past.contains(notice) {
                return;
            }
            state.past.push(notice.clone());
            state.attached.clone()
        };
        for attachment in attached {
            attachment.tell(notice);
        }
    }

    /// A notice to the one who has sent this input, if he still is attached.
    pub(crate) fn tell_source(&self, source: Source, notice: &Reply) {
        for attachment in self.attached() {
            if attachment.source == source {
                attachment.tell(notice);
            }
        }
    }

    /// It is over; nobody can enter any more. Where nothing is known of the command's end, connections are ended instead.
    pub(crate) fn end(&self, status: Option<ExitStatus>) {
        let attached = {
            let mut state = self.lock();
            state.ended = true;
            std::mem::take(&mut state.attached)
        };
        for attachment in attached {
            attachment.end(status);
        }
    }

    fn attached(&self) -> Vec<Arc<Attachment>> {
        self.lock().attached.clone()
    }
}

impl Attachment {
    /// One to which `sink` leads, and nothing is sent to but `output`.
    pub(crate) fn new(sink: Arc<dyn Sink>, output: bool) -> Arc<Self> {
        Arc::new(Self {
            source: Source::new(),
            sink,
            output,
            unwanted: Default::default(),
            ended: AtomicBool::new(false),
            gate: Mutex::new(Gate::Open),
        })
    }

    /// Until it is announced everybody else waits.
    pub(crate) fn opening(&self) -> Opening<'_> {
        Opening {
            attachment: self,
            gate: self.lock(),
        }
    }

    /// The connection does not want this stream any more; others still get it.
    pub(crate) fn close_output(&self, stream: OutputStream) {
        // No lock: what is being sent just now may wait for the client.
        self.unwanted_flag(stream).store(true, Ordering::SeqCst);
    }

    /// The command has ended. What is told about it may still be under way.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unwanted_flag(&self, stream: OutputStream) -> &AtomicBool {
        let [stdout, stderr] = &self.unwanted;
        match stream {
            OutputStream::Stdout => stdout,
            OutputStream::Stderr => stderr,
        }
    }

    fn wants(&self, stream: OutputStream) -> bool {
        self.output && !self.unwanted_flag(stream).load(Ordering::SeqCst)
    }

    fn tell(&self, notice: &Reply) {
        let is_wanted = match notice {
            Reply::OutputClosed { stream } => self.wants(*stream),
            _ => self.output,
        };
        if is_wanted && let Ok(frame) = encode(notice) {
            self.send(kind::CONTROL, &frame);
        }
    }

    fn send(&self, kind: u16, payload: &[u8]) {
        let mut gate = self.lock();
        if matches!(*gate, Gate::Open) && self.sink.send(kind, payload).is_err() {
            *gate = Gate::Shut;
            // A frame may be torn: nothing else can come after it. The connection's own thread finds it closed.
            self.sink.close();
        }
    }

    fn end(&self, status: Option<ExitStatus>) {
        let mut gate = self.lock();
        self.ended.store(true, Ordering::SeqCst);
        let was_open = matches!(std::mem::replace(&mut *gate, Gate::Shut), Gate::Open);
        if !was_open || !self.output {
            return;
        }
        let exited = status.and_then(|status| encode(&Reply::Exited(status)).ok());
        let sent = exited.is_some_and(|frame| self.sink.send(kind::CONTROL, &frame).is_ok());
        if !sent {
            self.sink.close();
        }
    }
}

impl Opening<'_> {
    /// Sends what comes before everything else. Of `past` only what is wanted; `started` always.
    pub(crate) fn announce(self, started: &Reply, past: &[Reply]) -> Result<(), Error> {
        let wanted = past.iter().filter(|_| self.attachment.output);
        for reply in [started].into_iter().chain(wanted) {
            self.attachment.sink.send(kind::CONTROL, &encode(reply)?)?;
        }
        drop(self.gate);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    use super::*;

    /// Keeps what is sent to it, and fails or waits if it is to.
    #[derive(Default)]
    struct Kept {
        frames: Mutex<Vec<(u16, Vec<u8>)>>,
        closed: AtomicBool,
        fails: AtomicBool,
        /// Tells that something comes, and waits for leave to take it.
        turnstile: Option<(Sender<()>, Mutex<Receiver<()>>)>,
    }

    impl Kept {
        fn frames(&self) -> Vec<(u16, String)> {
            let frames = self.frames.lock().unwrap();
            let text = |bytes: &Vec<u8>| String::from_utf8(bytes.clone()).unwrap();
            frames.iter().map(|(kind, bytes)| (*kind, text(bytes))).collect()
        }
    }

    impl Sink for Kept {
        fn send(&self, kind: u16, payload: &[u8]) -> Result<(), Error> {
            if let Some((tell, wait)) = &self.turnstile {
                tell.send(()).unwrap();
                wait.lock().unwrap().recv().unwrap();
            }
            if self.fails.load(Ordering::SeqCst) {
                return Err(Error::Refused("it fails".to_owned()));
            }
            self.frames.lock().unwrap().push((kind, payload.to_vec()));
            Ok(())
        }

        fn close(&self) {
            self.closed.store(true, Ordering::SeqCst);
        }
    }

    fn attach(audience: &Audience, sink: &Arc<Kept>, output: bool) -> Arc<Attachment> {
        let attachment = Attachment::new(Arc::clone(sink) as _, output);
        audience.enter(&attachment).unwrap();
        attachment
    }

    fn output(bytes: &str) -> (u16, String) {
        (kind::STDOUT, bytes.to_owned())
    }

    fn control(json: &str) -> (u16, String) {
        (kind::CONTROL, json.to_owned())
    }

    #[test]
    fn nothing_is_sent_to_one_who_has_left_even_if_it_was_about_to_be() {
        let ((tell, told), (let_go, wait)) = (channel(), channel());
        let slow = Arc::new(Kept {
            turnstile: Some((tell, Mutex::new(wait))),
            ..Kept::default()
        });
        let (audience, leaving, staying) = (Audience::default(), Arc::default(), Arc::default());
        attach(&audience, &slow, true);
        let left = attach(&audience, &leaving, true);
        attach(&audience, &staying, true);
        thread::scope(|scope| {
            scope.spawn(|| audience.output(OutputStream::Stdout, b"x"));
            // All three are to get it, and the first one does just now.
            told.recv().unwrap();
            audience.leave(&left);
            let_go.send(()).unwrap();
        });
        assert!(leaving.frames().is_empty());
        assert_eq!(staying.frames(), [output("x")]);
    }

    #[test]
    fn one_that_fails_is_closed_and_left_out() {
        let (audience, failing, other) = (Audience::default(), Arc::<Kept>::default(), Arc::default());
        attach(&audience, &failing, true);
        attach(&audience, &other, true);
        audience.output(OutputStream::Stdout, b"1");
        failing.fails.store(true, Ordering::SeqCst);
        audience.output(OutputStream::Stdout, b"2");
        assert!(failing.closed.load(Ordering::SeqCst));
        failing.fails.store(false, Ordering::SeqCst);
        audience.output(OutputStream::Stdout, b"3");
        audience.end(Some(ExitStatus::Code(0)));
        assert_eq!(failing.frames(), [output("1")], "a torn frame had another after it");
        let exited = control(r#"{"exited":{"code":0}}"#);
        assert_eq!(other.frames(), [output("1"), output("2"), output("3"), exited]);
        assert!(!other.closed.load(Ordering::SeqCst));
    }

    #[test]
    fn what_was_taken_is_told_to_whom_it_was_from() {
        let (audience, mine, others, silent) = (Audience::default(), Arc::default(), Arc::default(), Arc::default());
        let me = attach(&audience, &mine, true);
        attach(&audience, &others, true);
        let no_output = attach(&audience, &silent, false);
        let taken = Reply::StdinTaken { bytes: 5 };
        audience.tell_source(me.source, &taken);
        audience.tell_source(no_output.source, &taken);
        assert_eq!(mine.frames(), [control(r#"{"stdin_taken":{"bytes":5}}"#)]);
        assert!(others.frames().is_empty() && silent.frames().is_empty());
    }

    #[test]
    fn one_who_comes_late_gets_what_is_still_true_and_others_get_it_once() {
        let (audience, early, late) = (Audience::default(), Arc::default(), Arc::<Kept>::default());
        attach(&audience, &early, true);
        let closed = Reply::OutputClosed {
            stream: OutputStream::Stderr,
        };
        for _ in 0..2 {
            audience.tell(&closed);
            audience.tell(&Reply::StdinClosed);
        }
        let attachment = Attachment::new(Arc::clone(&late) as _, true);
        let opening = attachment.opening();
        let past = audience.enter(&attachment).unwrap();
        thread::scope(|scope| {
            // Comes when it is open, not before.
            scope.spawn(|| audience.output(OutputStream::Stdout, b"x"));
            opening.announce(&Reply::Started { pid: 7 }, &past).unwrap();
        });
        let notices = [r#"{"output_closed":{"stream":"stderr"}}"#, r#""stdin_closed""#].map(control);
        assert_eq!(early.frames(), [&notices[..], &[output("x")]].concat());
        let started = control(r#"{"started":{"pid":7}}"#);
        assert_eq!(late.frames(), [&[started], &notices[..], &[output("x")]].concat());
    }

    #[test]
    fn nobody_comes_after_the_end_and_nobody_waits_where_it_is_not_known() {
        let (audience, reader, writer) = (Audience::default(), Arc::default(), Arc::default());
        let attachments = [attach(&audience, &reader, true), attach(&audience, &writer, false)];
        audience.end(None);
        assert!(attachments.iter().all(|attachment| attachment.has_ended()));
        assert!(reader.closed.load(Ordering::SeqCst) && !writer.closed.load(Ordering::SeqCst));
        audience.end(Some(ExitStatus::Code(0)));
        assert!(reader.frames().is_empty() && writer.frames().is_empty());
        let late = Attachment::new(Arc::<Kept>::default(), true);
        assert!(audience.enter(&late).is_none());
    }
}
