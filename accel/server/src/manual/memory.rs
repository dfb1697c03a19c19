//! Buffers.

use accel_proto::opencl::{BufferRegion, CreateBuffer, CreateBufferWithProperties, CreateSubBuffer};
use accel_proto::{List, Span};

use crate::api::{Code, check};
use crate::marshal::Bytes;
use crate::objects::{Form, State};
use crate::session::Session;

const USE_HOST_PTR: u64 = 1 << 3;
const ALLOC_HOST_PTR: u64 = 1 << 4;
const COPY_HOST_PTR: u64 = 1 << 5;

/// Flags of a memory object. The back end keeps no part of the arena, which is the client's to change and to use again: what is to be used
/// in place is copied.
pub(super) fn flags(flags: u64, host: Option<Span>) -> u64 {
    let in_place = flags & (USE_HOST_PTR | ALLOC_HOST_PTR | COPY_HOST_PTR) == USE_HOST_PTR;
    match host {
        Some(_) if in_place => flags & !USE_HOST_PTR | COPY_HOST_PTR,
        _ => flags,
    }
}

/// The same without any bytes of the client's.
pub(super) fn without_host(flags: u64) -> u64 {
    flags & !(USE_HOST_PTR | COPY_HOST_PTR)
}

/// `clCreateBuffer`.
pub(crate) fn create_buffer(cx: &mut Session<'_>, call: &CreateBuffer) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    let host = cx.arena(call.host_ptr)?;
    let function = cx.api().clCreateBuffer()?;
    let mut status = 0_i32;
    let place = (&raw mut status).cast();
    // SAFETY: 1. to 3. as above; the back end copies what is in the arena before it returns.
    let made = unsafe { function(context.raw(), flags(call.flags, call.host_ptr), call.size, host, place) };
    check(status)?;
    cx.insert_with(call.returned, made, &[&context], State::memory(Form::Buffer(call.size)))
}

/// `clCreateBufferWithProperties`.
pub(crate) fn create_buffer_with_properties(
    cx: &mut Session<'_>,
    call: &CreateBufferWithProperties<'_>,
) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    let properties = cx.properties(call.properties.as_ref(), &[])?;
    let host = cx.arena(call.host_ptr)?;
    let function = cx.api().clCreateBufferWithProperties()?;
    let mut status = 0_i32;
    let (place, flags) = ((&raw mut status).cast(), flags(call.flags, call.host_ptr));
    // SAFETY: 1. to 3. as above; the back end copies what is in the arena before it returns.
    let made = unsafe { function(context.raw(), properties.pointer(), flags, call.size, host, place) };
    check(status)?;
    cx.insert_with(call.returned, made, &[&context], State::memory(Form::Buffer(call.size)))
}

/// `clCreateSubBuffer`. Its part has to be within the buffer.
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
    cx.insert_with(
        call.returned,
        made,
        &[&buffer],
        State::memory(Form::Buffer(region.size)),
    )
}
