//! Copies between a client's memory and its arena, and within its memory; rows, and filling.

use accel_proto::cuda::{CudaMemcpy2DAsync, CudaMemcpyAsync, CudaMemset2DAsync};
use accel_proto::{Memory as At, Span, SvmAddress};

use crate::memory::Memory;
use crate::numeric::Stop;
use crate::{Client, Error};

/// Bytes that are copied between two looks at whether the client is there.
const PIECE: u64 = 16 << 20;

/// The part of an arena that lies at such a place in a span.
fn part(span: Span, begin: u64, length: u64) -> Result<Span, Error> {
    let outside = Error::Invalid("a copy that is longer than its place in the arena");
    let end = begin.checked_add(length).filter(|end| *end <= span.length);
    match end {
        Some(_) => Ok(Span {
            offset: span.offset.saturating_add(begin),
            length,
        }),
        None => Err(outside),
    }
}

/// Bytes of one allocation, or of the arena.
fn copy_bytes([to, from]: [At; 2], length: u64, memory: &mut Memory, client: &mut dyn Client) -> Result<(), Error> {
    let arena = Error::Invalid("a copy outside of the arena");
    match (to, from) {
        (At::Svm(SvmAddress(to)), At::Svm(SvmAddress(from))) => Ok(memory.copy(to, from, length)?),
        (At::Svm(SvmAddress(to)), At::Arena(span)) => {
            let place = memory.bytes_mut(to, length)?;
            let span = part(span, 0, length)?;
            if client.read(span.offset, place) {
                Ok(())
            } else {
                Err(arena)
            }
        }
        (At::Arena(span), At::Svm(SvmAddress(from))) => {
            let bytes = memory.bytes(from, length)?;
            let span = part(span, 0, length)?;
            if client.write(span.offset, bytes) {
                Ok(())
            } else {
                Err(arena)
            }
        }
        (At::Arena(_), At::Arena(_)) => Err(Error::Invalid("a copy from the program's memory to itself")),
    }
}

/// `cudaMemcpyAsync`.
pub(crate) fn copy(
    call: &CudaMemcpyAsync,
    memory: &mut Memory,
    client: &mut dyn Client,
    stop: Stop<'_>,
) -> Result<(), Error> {
    if let (At::Svm(to), At::Svm(from)) = (call.dst, call.src) {
        // One that overlaps itself is not divided.
        return Ok(memory.copy(to.0, from.0, call.count)?);
    }
    let mut done = 0;
    // All of it is there, or nothing is copied.
    for at in [call.dst, call.src] {
        if let At::Svm(SvmAddress(address)) = at {
            memory.bytes(address, call.count)?;
        }
    }
    while let left @ 1.. = call.count - done {
        stop.check()?;
        let piece = left.min(PIECE);
        let moved = |at| moved(at, done, piece);
        copy_bytes([moved(call.dst)?, moved(call.src)?], piece, memory, client)?;
        done += piece;
    }
    Ok(())
}

/// A part of a place.
fn moved(at: At, by: u64, length: u64) -> Result<At, Error> {
    match at {
        At::Svm(SvmAddress(address)) => {
            let address = address.checked_add(by).ok_or(OUTSIDE)?;
            Ok(At::Svm(SvmAddress(address)))
        }
        At::Arena(span) => part(span, by, length).map(At::Arena),
    }
}

const OUTSIDE: Error = Error::Failure(accel_cuda_null::Failure::IllegalAddress);

/// Bytes from the first row's begin to the last one's end; none if there are no bytes.
fn rows(pitch: u64, width: u64, height: u64) -> Result<Option<u64>, Error> {
    if width == 0 || height == 0 {
        return Ok(None);
    }
    if pitch < width {
        return Err(Error::Invalid("rows that are longer than their pitch"));
    }
    let all = pitch
        .checked_mul(height - 1)
        .and_then(|others| others.checked_add(width));
    all.map(Some).ok_or(OUTSIDE)
}

/// `cudaMemcpy2DAsync`: rows in the arena lie one behind the other.
pub(crate) fn copy_rows(
    call: &CudaMemcpy2DAsync,
    memory: &mut Memory,
    client: &mut dyn Client,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let (width, height) = (call.width, call.height);
    let pitch = |at, pitch| if matches!(at, At::Arena(_)) { width } else { pitch };
    let pitches = [pitch(call.dst, call.dpitch), pitch(call.src, call.spitch)];
    for (at, pitch) in [call.dst, call.src].into_iter().zip(pitches) {
        // All of it is there, or nothing is copied.
        if let (At::Svm(SvmAddress(address)), Some(length)) = (at, rows(pitch, width, height)?) {
            memory.bytes(address, length)?;
        }
    }
    if width == 0 {
        return Ok(());
    }
    for row in 0..height {
        stop.check()?;
        let place = |at, pitch: u64| moved(at, row.checked_mul(pitch).ok_or(OUTSIDE)?, width);
        let places = [place(call.dst, pitches[0])?, place(call.src, pitches[1])?];
        copy_bytes(places, width, memory, client)?;
    }
    Ok(())
}

/// `cudaMemsetAsync`: of the value the lowest byte.
pub(crate) fn fill(at: SvmAddress, value: i32, count: u64, memory: &mut Memory) -> Result<(), Error> {
    memory.bytes_mut(at.0, count)?.fill(value.to_le_bytes()[0]);
    Ok(())
}

/// `cudaMemset2DAsync`.
pub(crate) fn fill_rows(call: &CudaMemset2DAsync, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let Some(length) = rows(call.pitch, call.width, call.height)? else {
        return Ok(());
    };
    memory.bytes(call.dev_ptr.0, length)?;
    for row in 0..call.height {
        stop.check()?;
        let address = call.dev_ptr.0 + row * call.pitch;
        fill(SvmAddress(address), call.value, call.width, memory)?;
    }
    Ok(())
}
