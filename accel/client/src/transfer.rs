//! Calls that move bytes between buffers and the application's memory (OpenCL API, section 5.2.2), and what all such calls have in common.
//!
//! Bytes travel through the arena: a write copies them there first, so the application may have its memory back at once; a read that is
//! not waited for is copied out by `pending`. What lies in the arena anyway, as mapped memory does, is used there. Data that the arena
//! cannot hold goes in pieces, each waited for.

use std::sync::Arc;

use accel_proto::{Call, Handle, List, Span, opencl as calls};

use crate::arguments::{In, Objects, Out, Ref};
use crate::bulk::{Lies, Shape};
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::object::{Object, handle_of_made};
use crate::pending::{self, Delivery, Left, Mark};
use crate::{checks, event, mapping, queue, status};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToServer,
    FromServer,
}

/// A command that moves data, before it is put.
pub(crate) struct Transfer<'a> {
    pub(crate) queue: &'a Object,
    /// A memory object, if it is one's.
    pub(crate) memory: Option<&'a Object>,
    pub(crate) waits: &'a Objects<'a, calls::Event>,
    pub(crate) blocking: bool,
    pub(crate) way: Way,
    pub(crate) address: usize,
    pub(crate) shape: Shape,
    /// What its event says that it is, where that is not what the server has carried out.
    pub(crate) kind: Option<u32>,
    /// Whether nobody has to wait for it although it is blocking, if others do not use the connection.
    pub(crate) may_go_ahead: bool,
}

impl Transfer<'_> {
    /// Puts it; `make` makes the call, of where the data is and of its event's name.
    pub(crate) fn run<'c, C: Call<'c> + Copy>(
        &self,
        event: Out<Ref>,
        make: impl Fn(Span, Handle<calls::Event>) -> C,
    ) -> Result<(), Code> {
        let connection = self.queue.connection()?;
        let length = self.shape.extent().ok_or(Code::INVALID_VALUE)?;
        if self.way == Way::ToServer {
            let (begin, length) = self.shape.at_address(self.address);
            pending::bring(connection, begin, length, |_| true)?;
        }
        let lies = lies(connection, self.address, length)?;
        let span = Span {
            offset: lies.offset(),
            length,
        };
        let is_taken = matches!(lies, Lies::Taken(_));
        if is_taken && self.way == Way::ToServer {
            self.shape.copy_in(connection, span.offset, self.address);
        }
        let is_delivered = is_taken && self.way == Way::FromServer;
        let has_event = !event.is_null() || (is_delivered && !self.blocking);
        let told = match has_event.then(|| event::made(connection, self.queue)).transpose() {
            Ok(told) => told,
            Err(code) => {
                lies.block().into_iter().for_each(|block| connection.give_back(block));
                return Err(code);
            }
        };
        let call = make(span, handle_of_made(told.as_ref()));
        let made: Vec<&Object> = told.iter().map(AsRef::as_ref).collect();
        let memory = self.memory.as_slice();
        let touched_lists = [self.waits.objects.as_slice(), &made, memory];
        let has = |way| (is_taken && self.way == way).then_some(span);
        let touched = Touched::new(std::slice::from_ref(&self.queue), &touched_lists)
            .reads(has(Way::ToServer))
            .writes(has(Way::FromServer));
        let mark = connection.pending.mark();
        let goes_ahead = self.may_go_ahead && is_taken && connection.pending.is_short();
        let put = match goes_ahead.then(|| connection.send_ahead(&call, &touched)).transpose() {
            Ok(Some(true)) => Ok(false),
            Ok(_) if self.blocking => connection
                .call(|_| call, &touched, true)
                .and_then(|(call, answer)| answer.success(&call).map(|_| true)),
            Ok(_) => connection.send(&call, &touched).map(|()| false),
            Err(code) => Err(code),
        };
        let was_waited_for = match put {
            Ok(waited) => waited,
            Err(code) => {
                lies.block().into_iter().for_each(|block| connection.give_back(block));
                return Err(code);
            }
        };
        if let Some(told) = &told {
            told.exists_from_now_on();
            self.kind.iter().for_each(|kind| event::is_of_kind(told, *kind));
        }
        if was_waited_for {
            self.after_waiting(connection, told.as_ref(), mark)?;
            if is_delivered {
                self.shape.copy_out(connection, span.offset, self.address);
            }
            lies.block().into_iter().for_each(|block| connection.give_back(block));
        } else if let Some(block) = lies.block() {
            connection.pending.push(Left {
                queue: self.queue.share(),
                event: told.clone(),
                block: Some(block),
                delivery: is_delivered.then_some(Delivery {
                    offset: span.offset,
                    address: self.address,
                    shape: self.shape,
                    kind: self.kind,
                }),
                frees: Vec::new(),
            });
        } else if self.way == Way::FromServer {
            connection.pending.put_in_place(self.queue);
        }
        if let Some(told) = told.filter(|_| !event.is_null()) {
            event.put(told.publish());
        }
        Ok(())
    }

    /// The command is complete, and in a queue that keeps order those before it.
    fn after_waiting(
        &self,
        connection: &'static Connection,
        told: Option<&Arc<Object>>,
        mark: Mark,
    ) -> Result<(), Code> {
        if let Some(told) = told {
            event::is_complete_now(told);
        }
        let finished = queue::is_in_order(self.queue).then_some((self.queue, mark));
        pending::settle(connection, finished)
    }
}

/// Where data of the application's can be in the arena. If it is full, commands are waited for.
pub(crate) fn lies(connection: &'static Connection, address: usize, length: u64) -> Result<Lies, Code> {
    if let Some(offset) = connection.offset_of(address, length) {
        return Ok(Lies::InPlace(offset));
    }
    if let Ok(block) = connection.take(length) {
        return Ok(Lies::Taken(block));
    }
    pending::reclaim(connection)?;
    connection.take(length).map(Lies::Taken)
}

/// How much of a transfer that is waited for goes at a time. Data is copied twice, into the arena and out of it: what is small enough is
/// still in a cache when it is copied again, and the same pages serve for all. Twice and half of it were slower (docs/accel-clients.md).
const PIECE: u64 = 4 << 20;

/// Pieces of data that do not go at once: where each begins, and how long it is. Each but the last is waited for, so only who `waits`
/// anyway gets more than the arena's size asks for; and an event has its times of the last one.
pub(crate) fn pieces(
    connection: &Connection,
    address: usize,
    size: u64,
    waits: bool,
) -> impl Iterator<Item = (u64, u64)> {
    let piece = match (connection.offset_of(address, size), waits) {
        (Some(_), _) => size.max(1),
        (None, true) => connection.piece().min(PIECE),
        (None, false) => connection.piece(),
    };
    let count = size.div_ceil(piece).max(1);
    (0..count).map(move |index| (index * piece, piece.min(size - index * piece)))
}

/// Whether the application may have data go this way.
pub(crate) fn may_go(memory: &Object, way: Way) -> Result<(), Code> {
    let state = mapping::state(memory)?;
    match way {
        Way::ToServer => state.may_be_written(),
        Way::FromServer => state.may_be_read(),
    }
}

/// Writes of no more bytes need not be waited for; of longer ones the copies take more than a wait does.
const SHORT: u64 = 64 << 10;

/// Whether this is a short write into a buffer that the server has no reason to refuse: then nothing but its end could be waited for.
fn may_go_ahead(queue: &Object, memory: &Object, size: u64) -> bool {
    let is_buffer = mapping::state(memory).is_ok_and(|state| state.size().is_some());
    (1..=SHORT).contains(&size) && is_buffer && memory.parent::<calls::Mem>().is_none() && queue::is_in_order(queue)
}

macro_rules! buffer_transfer {
    ($(#[$doc:meta])* $function:ident $call:ident $blocking:ident $way:expr) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "the API's own")]
        pub(crate) extern "C" fn $function(
            command_queue: Ref,
            buffer: Ref,
            $blocking: u32,
            offset: u64,
            size: u64,
            ptr: In<u8>,
            num_events_in_wait_list: u32,
            event_wait_list: In<Ref>,
            event: Out<Ref>,
        ) -> i32 {
            status(|| {
                let queue = command_queue.object::<calls::CommandQueue>()?;
                let memory = buffer.object::<calls::Mem>()?;
                let waits = event::wait_list(&event_wait_list, num_events_in_wait_list)?;
                checks::in_bounds(memory, offset, size)?;
                may_go(memory, $way)?;
                if ptr.is_null() {
                    return Err(Code::INVALID_VALUE);
                }
                let waits_for_it = $blocking != 0 && event.is_null();
                let may_go_ahead = waits_for_it
                    && $way == Way::ToServer
                    && num_events_in_wait_list == 0
                    && may_go_ahead(queue, memory, size);
                let pieces: Vec<_> = pieces(queue.connection()?, ptr.address(), size, waits_for_it).collect();
                for (index, &(begin, length)) in pieces.iter().enumerate() {
                    let is_last = index + 1 == pieces.len();
                    let transfer = Transfer {
                        queue,
                        memory: Some(memory),
                        waits: &waits,
                        blocking: $blocking != 0 || !is_last,
                        way: $way,
                        address: ptr.address() + usize::try_from(begin).map_err(|_| Code::INVALID_VALUE)?,
                        shape: Shape::line(length),
                        kind: None,
                        may_go_ahead,
                    };
                    transfer.run(if is_last { event } else { Out::NULL }, |span, event| calls::$call {
                        command_queue: queue.handle(),
                        buffer: memory.handle(),
                        $blocking: transfer.blocking.into(),
                        offset: offset + begin,
                        size: length,
                        ptr: Some(span),
                        num_events_in_wait_list,
                        event_wait_list: waits.list(),
                        event,
                    })?;
                }
                Ok(())
            })
        }
    };
}

buffer_transfer! {
    /// `clEnqueueReadBuffer`.
    enqueue_read_buffer EnqueueReadBuffer blocking_read Way::FromServer
}
buffer_transfer! {
    /// `clEnqueueWriteBuffer`.
    enqueue_write_buffer EnqueueWriteBuffer blocking_write Way::ToServer
}

/// Three numbers, as lists of the API have them.
pub(crate) fn three(list: &In<u64>) -> Result<[u64; 3], Code> {
    list.required(3)?.first_chunk().copied().ok_or(Code::INVALID_VALUE)
}

macro_rules! rect_transfer {
    ($(#[$doc:meta])* $function:ident $call:ident $blocking:ident $way:expr) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "the API's own")]
        pub(crate) extern "C" fn $function(
            command_queue: Ref,
            buffer: Ref,
            $blocking: u32,
            buffer_origin: In<u64>,
            host_origin: In<u64>,
            region: In<u64>,
            buffer_row_pitch: u64,
            buffer_slice_pitch: u64,
            host_row_pitch: u64,
            host_slice_pitch: u64,
            ptr: In<u8>,
            num_events_in_wait_list: u32,
            event_wait_list: In<Ref>,
            event: Out<Ref>,
        ) -> i32 {
            status(|| {
                let queue = command_queue.object::<calls::CommandQueue>()?;
                let memory = buffer.object::<calls::Mem>()?;
                let waits = event::wait_list(&event_wait_list, num_events_in_wait_list)?;
                let (in_buffer, in_host, region) = (three(&buffer_origin)?, three(&host_origin)?, three(&region)?);
                if ptr.is_null() {
                    return Err(Code::INVALID_VALUE);
                }
                checks::rect_in_bounds(memory, &in_buffer, &region, buffer_row_pitch, buffer_slice_pitch)?;
                may_go(memory, $way)?;
                let transfer = Transfer {
                    queue,
                    memory: Some(memory),
                    waits: &waits,
                    blocking: $blocking != 0,
                    way: $way,
                    address: ptr.address(),
                    shape: Shape::rows(region, host_row_pitch, host_slice_pitch)?.at(in_host)?,
                    kind: None,
                    may_go_ahead: false,
                };
                transfer.run(event, |span, event| calls::$call {
                    command_queue: queue.handle(),
                    buffer: memory.handle(),
                    $blocking,
                    buffer_origin: List::new(&in_buffer),
                    host_origin: List::new(&in_host),
                    region: List::new(&region),
                    buffer_row_pitch,
                    buffer_slice_pitch,
                    host_row_pitch,
                    host_slice_pitch,
                    ptr: Some(span),
                    num_events_in_wait_list,
                    event_wait_list: waits.list(),
                    event,
                })
            })
        }
    };
}

rect_transfer! {
    /// `clEnqueueReadBufferRect`.
    enqueue_read_buffer_rect EnqueueReadBufferRect blocking_read Way::FromServer
}
rect_transfer! {
    /// `clEnqueueWriteBufferRect`.
    enqueue_write_buffer_rect EnqueueWriteBufferRect blocking_write Way::ToServer
}
