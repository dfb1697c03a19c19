//! From a record to its reply: decodes it, has it carried out, and tells what went wrong to whoever waits.
//!
//! Which function carries out which call is generated. Knows no call by name but the one that is no call of an API.

use std::time::Duration;

use accel_proto::control::{AwaitCompletions, AwaitCompletionsReply};
use accel_proto::opencl::AnyCall;
use accel_proto::{Arguments, Call, Effect, Limits, List, MESSAGE, Object, Reader, Record, Refused, Span};

use crate::api::Code;
use crate::cuda;
pub(crate) use crate::generated::carry_out;
use crate::generated::{queue_of, work_of};
use crate::objects::Held;
use crate::session::{Client, Session};

/// One line for each call: its name, and the function that carries it out.
macro_rules! dispatch {
    ($($name:ident => $function:path;)*) => {
        /// Carries a call out. What it gives but its error code is in the session afterwards.
        pub(crate) fn carry_out(
            cx: &mut crate::session::Session<'_>,
            call: &accel_proto::opencl::AnyCall<'_>,
        ) -> Result<(), crate::api::Code> {
            match call {
                $(accel_proto::opencl::AnyCall::$name(call) => $function(cx, call),)*
            }
        }
    };
}

/// One line for each call that a queue's errors are told by: its name, the queue, and what it is for the device.
macro_rules! queues {
    ($($name:ident $queue:ident $work:ident;)*) => {
        /// The queue that a call's errors belong to.
        pub(crate) fn queue_of(
            call: &accel_proto::opencl::AnyCall<'_>,
        ) -> Option<accel_proto::Handle<accel_proto::opencl::CommandQueue>> {
            match call {
                $(accel_proto::opencl::AnyCall::$name(call) => Some(call.$queue),)*
                _ => None,
            }
        }

        /// What a call is for the device; nothing if it takes no time there.
        pub(crate) fn work_of(call: &accel_proto::opencl::AnyCall<'_>) -> Option<crate::meter::Work> {
            match call {
                $(accel_proto::opencl::AnyCall::$name(_) => crate::meter::Work::$work,)*
                _ => None,
            }
        }
    };
}

pub(crate) use dispatch;
pub(crate) use queues;

/// A call that the server never carries out: docs/accel-server.md says what clients do in its place.
pub(crate) fn refused<'a, C: Call<'a>>(cx: &mut Session<'_>, _: &C) -> Result<(), Code> {
    cx.client.tenant.counters.not_served(C::OP);
    Err(Code::INVALID_OPERATION)
}

/// A thread of the server that carries out one client thread's calls.
#[derive(Debug)]
pub(crate) struct Worker<'c> {
    session: Session<'c>,
    /// The copy of a message that is decoded.
    message: Box<[u8]>,
    /// How many records were no calls.
    pub(crate) refused: u64,
}

impl<'c> Worker<'c> {
    pub(crate) fn new(client: &'c Client) -> Self {
        Self {
            session: Session::new(client),
            message: vec![0; MESSAGE].into(),
            refused: 0,
        }
    }

    /// Carries a record's call out: the reply, if the client waits for one.
    pub(crate) fn serve(&mut self, record: &Record) -> Option<Record> {
        self.session.clear();
        // A record that cannot say whether its sender waits has one that does.
        let waits = record.flags().map_or(true, |flags| flags.waits());
        let served = self.decode(record, waits);
        if let Err(refused) = served {
            self.refuse(record, &refused);
        }
        waits.then(|| self.reply(record))
    }

    fn decode(&mut self, record: &Record, waits: bool) -> Result<(), Refused> {
        let limits = Limits {
            arena: self.session.client.arena(),
        };
        if record.flags()?.is_reply() {
            return Err(Refused::Flags(u16::from_le_bytes([
                record.as_bytes()[2],
                record.as_bytes()[3],
            ])));
        }
        let bytes = match record.arguments(limits)? {
            Arguments::Inline(bytes) => bytes,
            Arguments::Message(span) => read_message(self.session.client, span, &mut self.message)?,
        };
        if record.op() == AwaitCompletions::OP {
            let mut reader = Reader::new(bytes, limits);
            let call = AwaitCompletions::read(&mut reader)?;
            reader.finish()?;
            await_completions(&mut self.session, &call);
            return Ok(());
        }
        if cuda::NUMBERS.contains(&record.op()) {
            return cuda::serve(&mut self.session, record.op(), bytes, limits, waits);
        }
        let call = AnyCall::decode(record.op(), bytes, limits)?;
        run(&mut self.session, &call, waits);
        Ok(())
    }

    /// Bytes that are no call are answered by an error code alone: what its reply would be, nobody knows.
    fn refuse(&mut self, record: &Record, refused: &Refused) {
        self.refused += 1;
        // The first few tell what is wrong; a client could fill a disk with more.
        if self.refused <= 8 {
            log::warn!("record {} of a client is refused: {refused}", record.seq());
        }
        let code = match refused {
            Refused::Op(_) => {
                self.session.client.tenant.counters.not_served(record.op());
                Code::INVALID_OPERATION
            }
            _ => Code::INVALID_VALUE,
        };
        self.session.client.tenant.counters.failed(code);
        self.session.encode(|writer| done(code, writer));
    }

    /// The reply as a record, or where the client wants it if it is longer than one.
    fn reply(&mut self, record: &Record) -> Record {
        let (encoded, place) = self.session.encoded();
        let (op, seq) = (record.op(), record.seq());
        if let Ok(reply) = Record::encoded_reply(op, encoded, seq) {
            return reply;
        }
        let length = encoded.len() as u64;
        let place = place.filter(|place| place.length >= length);
        let written = place
            .zip(self.session.client.window.as_ref())
            .and_then(|(place, window)| {
                let span = Span {
                    offset: place.offset,
                    length,
                };
                window.slice(span.offset, span.length).ok()?.write(0, encoded).ok()?;
                Some(span)
            });
        match written {
            Some(span) => Record::encoded_reply_in(op, span, seq),
            None => {
                self.session.encode(|writer| done(Code::OUT_OF_RESOURCES, writer));
                let (encoded, _) = self.session.encoded();
                Record::encoded_reply(op, encoded, seq).unwrap_or(Record::from_bytes([0; accel_proto::RECORD]))
            }
        }
    }
}

/// An error code alone.
fn done(code: Code, writer: &mut accel_proto::Writer<'_>) {
    accel_proto::Reply::<AwaitCompletions>::write(&accel_proto::Done { status: code.0 }, writer);
}

/// A copy of a message. The record was compared with the arena.
fn read_message<'m>(client: &Client, span: Span, message: &'m mut [u8]) -> Result<&'m [u8], Refused> {
    let outside = || Refused::Arena {
        what: "the message",
        offset: span.offset,
        length: span.length,
        arena: client.arena(),
    };
    let place = usize::try_from(span.length)
        .ok()
        .and_then(|length| message.get_mut(..length));
    let place = place.ok_or_else(outside)?;
    if let Some(window) = &client.window {
        let region = window.slice(span.offset, span.length).map_err(|_| outside())?;
        region.read(0, place).map_err(|_| outside())?;
    }
    Ok(place)
}

/// Has a call carried out, with what its queue has kept.
fn run(session: &mut Session<'_>, call: &AnyCall<'_>, waits: bool) {
    let queue = queue_of(call).and_then(|name| session.queue(name));
    let told = |queue: &Held| queue.take_failure();
    // What nobody has heard of yet comes first: it was before, and may be the cause. The command that tells it is not carried out, so that
    // whoever hears of an error has put nothing; but for the one that is there to wait.
    let is_there_to_wait = matches!(call, AnyCall::Finish(_));
    let before = match &queue {
        Some(queue) if waits && !is_there_to_wait => told(queue),
        _ => Ok(()),
    };
    let mut outcome = before.and_then(|()| carried_out(session, call));
    if waits && is_there_to_wait {
        outcome = queue.as_ref().map_or(Ok(()), told).and(outcome);
    } else if let (false, Err(code)) = (waits, outcome) {
        keep(session, call, code);
    }
    match outcome {
        Ok(()) if session.encoded().0.is_empty() => session.encode(|writer| call.failed(0).write(writer)),
        Ok(()) => {}
        Err(Code(status)) => session.encode(|writer| call.failed(status).write(writer)),
    }
}

/// Has a call carried out, kept if snapshots need it, and counted if it fails.
fn carried_out(session: &mut Session<'_>, call: &AnyCall<'_>) -> Result<(), Code> {
    let outcome = metered(session, call);
    match outcome {
        Ok(()) => crate::saved::log(session, call),
        Err(code) => session.client.tenant.counters.failed(code),
    }
    outcome
}

/// Has a call carried out, when the device may have it.
fn metered(session: &mut Session<'_>, call: &AnyCall<'_>) -> Result<(), Code> {
    let client = session.client;
    let Some(meter) = &client.tenant.meter else {
        return carry_out(session, call);
    };
    let Some(work) = work_of(call) else {
        let outcome = carry_out(session, call);
        // Calls that wait are those after which something is complete.
        meter.look_at_first();
        return outcome;
    };
    meter.enter(|| client.is_abandoned())?;
    session.begin_command();
    let outcome = carry_out(session, call);
    meter.leave(work, session.end_command(), std::ptr::from_ref(client).addr());
    outcome
}

/// A failure that nobody waits for is the queue's, the kernel's, and that of what was not made.
fn keep(session: &Session<'_>, call: &AnyCall<'_>, code: Code) {
    log::debug!(
        "a call that nobody waits for failed with {}: {:#06x}",
        code.0,
        call.op()
    );
    if let Some(queue) = queue_of(call).and_then(|name| session.queue(name)) {
        queue.keep_failure(code);
    }
    call.effects(&mut |effect, object| {
        let Object::Handle(handle) = object else { return };
        match effect {
            Effect::Creates => session.client.fail(handle, code),
            Effect::Changes => {
                let sort = crate::objects::Sort::of(handle.c_type);
                if let Some(Ok(object)) = sort.map(|sort| session.client.find(sort, handle.raw)) {
                    object.keep_failure(code);
                }
            }
            Effect::Content | Effect::Drops | Effect::Uses => {}
        }
    });
}

/// Callbacks that are due.
fn await_completions(session: &mut Session<'_>, call: &AwaitCompletions) {
    // What a record has room for, or the place that the client gives.
    let inline = (accel_proto::INLINE as u64).max(call.reply.length).saturating_sub(8) / 8;
    let most = u64::from(call.most).min(inline).min(1024);
    let patience = session.client.patience(Duration::from_millis(call.milliseconds.into()));
    let due = session
        .client
        .completions
        .wait(usize::try_from(most).unwrap_or_default(), patience);
    let reply = AwaitCompletionsReply {
        status: 0,
        completions: List::new(&due),
    };
    if session.answer(call, &reply, Some(call.reply)).is_err() {
        session.encode(|writer| done(Code::OUT_OF_RESOURCES, writer));
    }
}
