//! Bytes of memory objects: read from the back end into the file, and given to it again.
#![allow(unsafe_code, reason = "calls functions of a C API")]

use std::collections::BTreeMap;
use std::sync::Arc;

use accel_proto::opencl::{AnyCall, ImageDesc, ImageFormat};

use super::state::{Bytes, Writing};
use super::{Refusal, query};
use crate::api::{Code, P, check};
use crate::manual::{description2d, description3d, image_bytes, image_region};
use crate::objects::{Form, Held, Object, Sort, State};
use crate::session::Client;

/// Bytes that are read at a time.
const CHUNK: usize = 4 << 20;

/// What of zeroes alone is left out of the file.
const HOLE: usize = 64 << 10;

const NULL: P = std::ptr::null_mut();
const INVALID_OPERATION: Code = Code(-59);

/// Reads contents of a client's memory.
#[derive(Debug)]
pub(super) struct Contents<'c> {
    client: &'c Client,
    /// A queue for each context, by its address.
    queues: BTreeMap<usize, Held>,
    chunk: Vec<u8>,
}

impl<'c> Contents<'c> {
    pub(super) fn new(client: &'c Client) -> Self {
        Self {
            client,
            queues: BTreeMap::new(),
            chunk: Vec::new(),
        }
    }

    /// Writes the bytes of an object into the file; `made` is the call that has made it.
    pub(super) fn save(&mut self, object: &Held, made: &AnyCall<'_>, file: &mut Writing<'_>) -> Result<Bytes, Refusal> {
        let queue = self.queue(object)?;
        match object.memory().map_err(Refusal::code)?.form {
            Form::Buffer(size) => self.buffer((&queue, object), size, file),
            Form::Image => self.image((&queue, object), made, file),
            Form::Pipe => Err(Refusal::CannotBeMadeAgain("a pipe, whose packets nobody can read")),
        }
    }

    /// A queue on the object's context.
    fn queue(&mut self, object: &Held) -> Result<Held, Refusal> {
        let context = object.owner(Sort::Context).map(|context| Held(Arc::clone(context)));
        let context = context.ok_or(Refusal::CannotBeMadeAgain("memory of no context"))?;
        if let Some(queue) = self.queues.get(&context.address()) {
            return Ok(queue.clone());
        }
        let api = &self.client.backend.api;
        let devices = query::words(api, &context, query::CONTEXT_DEVICES).map_err(Refusal::code)?;
        let device = devices.first().copied().ok_or(Refusal::code(Code::INVALID_VALUE))?;
        let function = api.clCreateCommandQueue().map_err(Refusal::code)?;
        let mut status = 0_i32;
        let (device, place) = (query::address(device), (&raw mut status).cast());
        // SAFETY: 1. the context is held, and the device is its own; 2. the place is for an error code.
        let raw = unsafe { function(context.raw(), device, 0, place) };
        check(status).map_err(Refusal::code)?;
        let backend = &self.client.backend;
        let queue = Object::new(
            backend,
            (Sort::CommandQueue, raw),
            State::queue(true, None),
            &[&context],
        );
        let queue = Held(Arc::new(queue));
        self.queues.insert(context.address(), queue.clone());
        Ok(queue)
    }

    fn buffer(&mut self, (queue, buffer): (&Held, &Held), size: u64, file: &mut Writing<'_>) -> Result<Bytes, Refusal> {
        let room = file.room(size);
        self.chunk.resize(CHUNK, 0);
        let mut done = 0;
        while done < size {
            let length = (size - done).min(CHUNK as u64);
            let place = usize::try_from(length).unwrap_or(CHUNK);
            let chunk = self.chunk.get_mut(..place).unwrap_or_default();
            match read(queue, buffer, (done, length), chunk) {
                // The client has said that the host reads nothing of it: it is copied.
                Err(INVALID_OPERATION) => read_copied(queue, buffer, (done, length), chunk),
                read => read,
            }
            .map_err(Refusal::code)?;
            put(file, room.at + done, chunk)?;
            done += length;
        }
        Ok(room)
    }

    fn image(
        &mut self,
        (queue, image): (&Held, &Held),
        made: &AnyCall<'_>,
        file: &mut Writing<'_>,
    ) -> Result<Bytes, Refusal> {
        let (format, of) = described(made).ok_or(Refusal::CannotBeMadeAgain("an image of an unknown kind"))?;
        if of.num_mip_levels > 1 || of.num_samples > 1 {
            return Err(Refusal::CannotBeMadeAgain("an image with mipmaps or samples"));
        }
        let length = image_bytes(&of, format).ok_or(Refusal::code(Code::INVALID_VALUE))?;
        let room = file.room(length);
        let place = usize::try_from(length).map_err(|_| Refusal::code(Code::OUT_OF_HOST_MEMORY))?;
        self.chunk.resize(place.max(CHUNK), 0);
        let chunk = self.chunk.get_mut(..place).unwrap_or_default();
        let origin = [0_u64; 3];
        let region = image_region(&of);
        let (from, at) = ((origin.as_ptr(), region.as_ptr()), chunk.as_mut_ptr().cast());
        let function = self.client.backend.api.clEnqueueReadImage().map_err(Refusal::code)?;
        let (origin, region) = (from.0.cast_mut().cast(), from.1.cast_mut().cast());
        // SAFETY: 1. both objects are held; 2. the place is as long as the whole image without gaps; 3. it is waited for.
        let status = unsafe { function(queue.raw(), image.raw(), 1, origin, region, 0, 0, at, 0, NULL, NULL) };
        check(status).map_err(Refusal::code)?;
        put(file, room.at, chunk)?;
        Ok(room)
    }
}

/// What an image is like, by the call that has made it.
fn described(made: &AnyCall<'_>) -> Option<(Option<ImageFormat>, ImageDesc)> {
    match made {
        AnyCall::CreateImage(call) => Some((call.image_format, call.image_desc?)),
        AnyCall::CreateImageWithProperties(call) => Some((call.image_format, call.image_desc?)),
        AnyCall::CreateImage2D(call) => Some((call.image_format, description2d(call))),
        AnyCall::CreateImage3D(call) => Some((call.image_format, description3d(call))),
        _ => None,
    }
}

fn read(queue: &Held, buffer: &Held, (offset, length): (u64, u64), into: &mut [u8]) -> Result<(), Code> {
    let function = queue.backend().api.clEnqueueReadBuffer()?;
    let at = into.as_mut_ptr().cast();
    // SAFETY: 1. both objects are held; 2. the place has `length` bytes; 3. it is waited for.
    check(unsafe { function(queue.raw(), buffer.raw(), 1, offset, length, at, 0, NULL, NULL) })
}

/// The same through another buffer.
fn read_copied(queue: &Held, buffer: &Held, (offset, length): (u64, u64), into: &mut [u8]) -> Result<(), Code> {
    let api = &queue.backend().api;
    let context = queue.owner(Sort::Context).ok_or(Code::INVALID_VALUE)?;
    let (create, copy, release) = (
        api.clCreateBuffer()?,
        api.clEnqueueCopyBuffer()?,
        api.clReleaseMemObject()?,
    );
    let mut status = 0_i32;
    // SAFETY: 1. the context is held; 2. the place is for an error code.
    let between = unsafe { create(context.raw(), 1, length, NULL, (&raw mut status).cast()) };
    check(status)?;
    // SAFETY: 1. all objects are held, or this function's; 2. no events are said.
    let copied = check(unsafe { copy(queue.raw(), buffer.raw(), between, offset, 0, length, 0, NULL, NULL) });
    let copied = copied.and_then(|()| {
        let function = api.clEnqueueReadBuffer()?;
        let at = into.as_mut_ptr().cast();
        // SAFETY: 1. as above; 2. the place has `length` bytes; 3. it is waited for, and the queue is in order.
        check(unsafe { function(queue.raw(), between, 1, 0, length, at, 0, NULL, NULL) })
    });
    // SAFETY: 1. the buffer is this function's, and its commands are complete or were refused.
    check(unsafe { release(between) }).and(copied)
}

/// Writes what is not zero, behind what is there.
pub(super) fn append(file: &mut Writing<'_>, bytes: &[u8]) -> Result<Bytes, Refusal> {
    let room = file.room(bytes.len() as u64);
    put(file, room.at, bytes).map(|()| room)
}

/// Writes what is not zero.
fn put(file: &mut Writing<'_>, at: u64, bytes: &[u8]) -> Result<(), Refusal> {
    for (index, part) in bytes.chunks(HOLE).enumerate() {
        if part.iter().any(|byte| *byte != 0) {
            file.put(at + (index * HOLE) as u64, part)?;
        }
    }
    Ok(())
}
