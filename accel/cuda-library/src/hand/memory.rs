//! Memory within the quota, and copies between it and the arena.
//!
//! ```text
//!   to the device:  arena ──cudaMemcpyAsync──▶ stream, with an event behind it, which is waited for before anything is answered
//!   from it:        stream ──cudaMemcpyAsync──▶ arena, waited for
//! ```
//!
//! A client takes any answer for the end of what it has put into the arena before.
#![allow(unsafe_code, reason = "these are calls of functions of C")]
#![allow(non_snake_case, reason = "names are C's")]

use accel_proto::cuda::{self as calls, AnyReply};
use accel_proto::{Memory as Place, SvmAddress};

use crate::failure::{Failure, check, number};
use crate::state::{Context, address};
use crate::table::P;

/// `cudaMemcpyKind`.
const HOST_TO_DEVICE: i32 = 1;
const DEVICE_TO_HOST: i32 = 2;
const DEVICE_TO_DEVICE: i32 = 3;

/// A client that is to name addresses has asked for one, or knows another protocol.
pub(crate) fn cudaMalloc(_: &mut Context<'_>, _: &calls::CudaMalloc) -> Result<(), Failure> {
    Err(Failure::NotServed)
}

pub(crate) fn cudaFree(cx: &mut Context<'_>, call: &calls::CudaFree) -> Result<(), Failure> {
    let function = cx.libraries.runtime.cudaFree()?;
    let length = cx.state.memory.length(call.dev_ptr)?;
    // SAFETY: 1. the function has this type; 2. the address is of an allocation of the client's, and this is its last use here.
    check(unsafe { function(address(call.dev_ptr)) })?;
    cx.state.memory.remove(call.dev_ptr);
    cx.quota.give_back(length);
    Ok(())
}

/// An allocation, within the quota before the device is asked: where it is.
pub(crate) fn allocate(cx: &mut Context<'_>, size: u64) -> Result<u64, Failure> {
    if size == 0 {
        return Err(Failure::InvalidValue);
    }
    let function = cx.libraries.runtime.cudaMalloc()?;
    let bytes = number(size)?;
    cx.state.memory.has_room()?;
    if !cx.quota.charge(size) {
        return Err(Failure::OutOfMemory);
    }
    let mut made: P = std::ptr::null_mut();
    // SAFETY: 1. the function has these types; 2. there is a place for the address.
    let status = unsafe { function((&raw mut made).cast(), bytes) };
    if status != 0 || made.is_null() {
        cx.quota.give_back(size);
        return Err(check(status).err().unwrap_or(Failure::OutOfMemory));
    }
    let begin = made.expose_provenance() as u64;
    cx.state.memory.add(begin, size);
    Ok(begin)
}

pub(crate) fn cudaMemGetInfo(cx: &mut Context<'_>, _: &calls::CudaMemGetInfo) -> Result<(), Failure> {
    let (free, _) = cx.libraries.memory()?;
    let total = cx.total()?;
    let left = total.saturating_sub(cx.state.memory.used());
    cx.answer(&AnyReply::CudaMemGetInfo(calls::CudaMemGetInfoReply {
        status: 0,
        free: free.min(left),
        total,
    }));
    Ok(())
}

pub(crate) fn cudaMemset(cx: &mut Context<'_>, call: &calls::CudaMemset) -> Result<(), Failure> {
    if call.count == 0 {
        return Ok(());
    }
    let function = cx.libraries.runtime.cudaMemset()?;
    let to = cx.range(call.dev_ptr, call.count)?;
    // SAFETY: 1. the function has these types; 2. so many bytes from there on are the client's.
    check(unsafe { function(to, call.value, number(call.count)?) })
}

pub(crate) fn cudaMemsetAsync(cx: &mut Context<'_>, call: &calls::CudaMemsetAsync) -> Result<(), Failure> {
    if call.count == 0 {
        return Ok(());
    }
    let function = cx.libraries.runtime.cudaMemsetAsync()?;
    let to = cx.range(call.dev_ptr, call.count)?;
    let stream = cx.object(call.stream)?;
    // SAFETY: 1. the function has these types; 2. so many bytes from there on are the client's; 3. the stream is.
    check(unsafe { function(to, call.value, number(call.count)?, stream) })
}

pub(crate) fn cudaMemcpyAsync(cx: &mut Context<'_>, call: &calls::CudaMemcpyAsync) -> Result<(), Failure> {
    if call.count == 0 {
        return Ok(());
    }
    let function = cx.libraries.runtime.cudaMemcpyAsync()?;
    let stream = cx.object(call.stream)?;
    let side = |cx: &mut Context<'_>, place: Place| match place {
        Place::Svm(address) => cx.range(address, call.count),
        Place::Arena(span) => cx.arena(span),
    };
    let (to, from) = (side(cx, call.dst)?, side(cx, call.src)?);
    // Which way it goes follows from where the bytes are; what the client says of it is not looked at.
    let kind = kind(call.dst, call.src)?;
    // SAFETY: 1. the function has these types; 2. so many bytes are the client's on both sides: in an allocation, or in its arena, which
    // stays until its work is done; 3. the stream is the client's.
    check(unsafe { function(to, from, number(call.count)?, kind, stream) })?;
    cx.copied(kind == DEVICE_TO_HOST, kind == HOST_TO_DEVICE, stream)
}

pub(crate) fn cudaMemset2DAsync(cx: &mut Context<'_>, call: &calls::CudaMemset2DAsync) -> Result<(), Failure> {
    if call.width == 0 || call.height == 0 {
        return Ok(());
    }
    let function = cx.libraries.runtime.cudaMemset2DAsync()?;
    let (pitch, width, height) = (number(call.pitch)?, number(call.width)?, number(call.height)?);
    let memory = &cx.state.memory;
    memory.check_rows(call.dev_ptr.0, call.pitch, call.width, call.height)?;
    let stream = cx.object(call.stream)?;
    let to = address(call.dev_ptr.0);
    // SAFETY: 1. the function has these types; 2. all rows are in one allocation of the client's; 3. the stream is the client's.
    check(unsafe { function(to, pitch, call.value, width, height, stream) })
}

pub(crate) fn cudaMemcpy2DAsync(cx: &mut Context<'_>, call: &calls::CudaMemcpy2DAsync) -> Result<(), Failure> {
    if call.width == 0 || call.height == 0 {
        return Ok(());
    }
    let function = cx.libraries.runtime.cudaMemcpy2DAsync()?;
    let stream = cx.object(call.stream)?;
    let kind = kind(call.dst, call.src)?;
    // In the arena rows lie one behind the other.
    let side = |cx: &mut Context<'_>, place: Place, pitch: u64| match place {
        Place::Svm(begin) => {
            cx.state.memory.check_rows(begin.0, pitch, call.width, call.height)?;
            Ok((address(begin.0), number(pitch)?))
        }
        Place::Arena(span) => Ok((cx.arena(span)?, number(call.width)?)),
    };
    let (to, to_pitch) = side(cx, call.dst, call.dpitch)?;
    let (from, from_pitch) = side(cx, call.src, call.spitch)?;
    let (width, height) = (number(call.width)?, number(call.height)?);
    // SAFETY: 1. the function has these types; 2. all rows are in one allocation of the client's, or in its arena, which has as many bytes
    // as the call says and stays until its work is done; 3. the stream is the client's.
    check(unsafe { function(to, to_pitch, from, from_pitch, width, height, kind, stream) })?;
    cx.copied(kind == DEVICE_TO_HOST, kind == HOST_TO_DEVICE, stream)
}

/// Which way a copy goes.
pub(crate) fn kind(to: Place, from: Place) -> Result<i32, Failure> {
    match (to, from) {
        (Place::Svm(_), Place::Svm(_)) => Ok(DEVICE_TO_DEVICE),
        (Place::Svm(_), Place::Arena(_)) => Ok(HOST_TO_DEVICE),
        (Place::Arena(_), Place::Svm(_)) => Ok(DEVICE_TO_HOST),
        // A client copies within itself by itself.
        (Place::Arena(_), Place::Arena(_)) => Err(Failure::InvalidValue),
    }
}

impl Context<'_> {
    /// So many bytes from an address on, all of one allocation.
    pub(crate) fn range(&self, begin: SvmAddress, length: u64) -> Result<P, Failure> {
        self.state.memory.check(begin.0, length)?;
        Ok(address(begin.0))
    }

    /// Behind a copy: from the device it is waited for; to it, the arena's bytes are needed until it is done.
    pub(crate) fn copied(&mut self, from_device: bool, to_device: bool, stream: P) -> Result<(), Failure> {
        let runtime = &self.libraries.runtime;
        if from_device {
            let function = runtime.cudaStreamSynchronize()?;
            // SAFETY: 1. the function has this type; 2. the stream is the client's.
            return check(unsafe { function(stream) });
        }
        if !to_device {
            return Ok(());
        }
        self.state.copies.behind(runtime, stream)
    }
}
