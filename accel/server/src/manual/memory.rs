//! Buffers and pipes.

use std::sync::Arc;

use accel_proto::opencl::{BufferRegion, CreateBuffer, CreateBufferWithProperties, CreatePipe, CreateSubBuffer, Mem};
use accel_proto::{Handle, List, Memory, Span, SvmAddress};

use crate::api::{Code, P, check};
use crate::marshal::Bytes;
use crate::objects::{Form, Held, State};
use crate::quota::Charge;
use crate::saved::Contents as SavedContents;
use crate::session::Session;
use crate::svm::Allocation;
use crate::zeroes::Zeroes;

const USE_HOST_PTR: u64 = 1 << 3;
const ALLOC_HOST_PTR: u64 = 1 << 4;
const COPY_HOST_PTR: u64 = 1 << 5;

/// Flags of a memory object. The back end keeps no part of the arena, which is the client's to change and to use again: what is to be used
/// in place is copied.
fn flags(flags: u64, host: Option<Span>) -> u64 {
    let in_place = flags & (USE_HOST_PTR | ALLOC_HOST_PTR | COPY_HOST_PTR) == USE_HOST_PTR;
    match host {
        Some(_) if in_place => flags & !USE_HOST_PTR | COPY_HOST_PTR,
        _ => flags,
    }
}

/// The same without any bytes of the client's.
pub(crate) fn without_host(flags: u64) -> u64 {
    flags & !(USE_HOST_PTR | COPY_HOST_PTR)
}

/// What a new memory object is made of: bytes of the client's, or zeroes where the back end would take whatever its memory held before.
pub(super) struct Contents {
    pub(super) flags: u64,
    pub(super) at: P,
    _zeroes: Option<Zeroes>,
}

impl Contents {
    /// For so many bytes.
    pub(super) fn new(cx: &Session<'_>, wanted: u64, host: Option<Span>, length: u64) -> Result<Self, Code> {
        if let Some(saved) = cx.replay.as_ref().and_then(|replay| replay.contents) {
            return Self::saved(wanted, (saved, length), true);
        }
        let mut contents = Self {
            flags: flags(wanted, host),
            at: cx.arena(host)?,
            _zeroes: None,
        };
        // Flags that contradict the absence of bytes are the back end's to refuse.
        let none = host.is_none() && wanted & (USE_HOST_PTR | COPY_HOST_PTR) == 0;
        if none && length > 0 && cx.client.backend.calls_back {
            let zeroes = Zeroes::new(length)?;
            contents.at = zeroes.pointer();
            contents.flags |= COPY_HOST_PTR;
            contents._zeroes = Some(zeroes);
        }
        Ok(contents)
    }

    /// Bytes that were saved, which are to be as many as the object has. What the host does with them is the client's affair, and so are the
    /// flags that it is told of.
    fn saved(wanted: u64, (saved, length): (SavedContents, u64), in_place: bool) -> Result<Self, Code> {
        if saved.length < length {
            return Err(Code::INVALID_VALUE);
        }
        let host = if in_place && saved.in_place {
            USE_HOST_PTR
        } else {
            COPY_HOST_PTR
        };
        Ok(Self {
            flags: without_host(wanted) & !ALLOC_HOST_PTR | host,
            at: saved.at,
            _zeroes: None,
        })
    }

    /// The same for an image, which a back end may have in another form: `length` zeroes if nothing else is said; what was saved are all bytes,
    /// without gaps.
    pub(super) fn of_image(
        cx: &Session<'_>,
        wanted: u64,
        host: Option<Span>,
        (length, all): (u64, Option<u64>),
    ) -> Result<Self, Code> {
        match cx.replay.as_ref().and_then(|replay| replay.contents) {
            Some(saved) => Self::saved(wanted, (saved, all.ok_or(Code::INVALID_VALUE)?), false),
            None => Self::new(cx, wanted, host, length),
        }
    }
}

/// What a new buffer is made of: bytes that it is given or not, for which it is charged; or shared virtual memory, which it is.
enum Source {
    Own(Contents, Charge),
    Shared(Arc<Allocation>, P, u64),
}

impl Source {
    fn new(cx: &Session<'_>, context: &Held, flags: u64, size: u64, host: Option<Memory>) -> Result<Self, Code> {
        let span = match host {
            Some(Memory::Svm(address)) => return Self::shared(cx, context, (flags, size), address),
            Some(Memory::Arena(span)) => Some(span),
            None => None,
        };
        let charge = cx.charge(size)?;
        Ok(Self::Own(Contents::new(cx, flags, span, size)?, charge))
    }

    fn shared(cx: &Session<'_>, context: &Held, (flags, size): (u64, u64), address: SvmAddress) -> Result<Self, Code> {
        let found = cx.client.svm.find(address.0, size)?;
        let in_place = flags & (USE_HOST_PTR | ALLOC_HOST_PTR | COPY_HOST_PTR) == USE_HOST_PTR;
        if !in_place || !found.is_in(context) {
            return Err(Code::INVALID_VALUE);
        }
        let at = found.at(address.0);
        Ok(Self::Shared(found, at, flags))
    }

    fn flags(&self) -> u64 {
        match self {
            Self::Own(contents, _) => contents.flags,
            Self::Shared(_, _, flags) => *flags,
        }
    }

    fn at(&self) -> P {
        match self {
            Self::Own(contents, _) => contents.at,
            Self::Shared(_, at, _) => *at,
        }
    }

    /// The buffer is there.
    fn insert(self, cx: &Session<'_>, name: Handle<Mem>, made: P, context: &Held, size: u64) -> Result<(), Code> {
        let form = Form::Buffer(size);
        match self {
            Self::Own(_, charge) => cx.insert_memory(name, made, &[context], (form, Some(charge))),
            Self::Shared(memory, ..) => cx.insert_with(name, made, &[context], State::shared(form, memory)),
        }
    }
}

/// `clCreateBuffer`.
pub(crate) fn create_buffer(cx: &mut Session<'_>, call: &CreateBuffer) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    let source = Source::new(cx, &context, call.flags, call.size, call.host_ptr)?;
    let function = cx.api().clCreateBuffer()?;
    let mut status = 0_i32;
    let place = (&raw mut status).cast();
    // SAFETY: 1. to 3. as above; the back end copies what is in the arena, or zeroes, before it returns; shared memory is held by the buffer.
    let made = unsafe { function(context.raw(), source.flags(), call.size, source.at(), place) };
    check(status)?;
    source.insert(cx, call.returned, made, &context, call.size)
}

/// `clCreateBufferWithProperties`.
pub(crate) fn create_buffer_with_properties(
    cx: &mut Session<'_>,
    call: &CreateBufferWithProperties<'_>,
) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    let properties = cx.properties(call.properties.as_ref(), &[])?;
    let source = Source::new(cx, &context, call.flags, call.size, call.host_ptr)?;
    let function = cx.api().clCreateBufferWithProperties()?;
    let mut status = 0_i32;
    let (place, flags, at) = ((&raw mut status).cast(), source.flags(), source.at());
    // SAFETY: 1. to 3. as above; the back end copies what is in the arena, or zeroes, before it returns; shared memory is held by the buffer.
    let made = unsafe { function(context.raw(), properties.pointer(), flags, call.size, at, place) };
    check(status)?;
    source.insert(cx, call.returned, made, &context, call.size)
}

/// `clCreateSubBuffer`. Its part has to be within the buffer, whose memory it is.
pub(crate) fn create_sub_buffer(cx: &mut Session<'_>, call: &CreateSubBuffer) -> Result<(), Code> {
    let buffer = cx.object(call.buffer)?;
    let region = call.buffer_create_info.unwrap_or(BufferRegion { origin: 0, size: 0 });
    buffer.in_bounds((region.origin, region.size))?;
    let info = call.buffer_create_info.map(|region| [region]);
    let info = Bytes::new(info.as_ref().map(|region| List::new(region)).as_ref());
    let function = cx.api().clCreateSubBuffer()?;
    let mut status = 0_i32;
    let (kind, place) = (call.buffer_create_type, (&raw mut status).cast());
    // SAFETY: 1. to 3. as above; a cl_buffer_region is two numbers of 64 bits.
    let made = unsafe { function(buffer.raw(), call.flags, kind, info.pointer(), place) };
    check(status)?;
    cx.insert_memory(call.returned, made, &[&buffer], (Form::Buffer(region.size), None))
}

/// `clCreatePipe`. Of what a back end has beside the packets only it knows: a page is taken for it.
pub(crate) fn create_pipe(cx: &mut Session<'_>, call: &CreatePipe<'_>) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    let properties = cx.properties(call.properties.as_ref(), &[])?;
    let packets = u64::from(call.pipe_packet_size) * u64::from(call.pipe_max_packets);
    let charge = cx.charge(packets.saturating_add(4096))?;
    let function = cx.api().clCreatePipe()?;
    let mut status = 0_i32;
    let (size, count, place) = (call.pipe_packet_size, call.pipe_max_packets, (&raw mut status).cast());
    // SAFETY: 1. to 3. as above.
    let made = unsafe { function(context.raw(), call.flags, size, count, properties.pointer(), place) };
    check(status)?;
    cx.insert_memory(call.returned, made, &[&context], (Form::Pipe, Some(charge)))
}
