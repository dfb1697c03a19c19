//! Copies of rows, and rows that are set. In the arena rows lie one behind the other; their pitch is that of memory alone.

use std::ffi::c_void;

use accel_proto::cuda::{CudaMemcpy2DAsync, CudaMemset2DAsync};
use accel_proto::{Handle, Memory, SvmAddress};

use crate::abi::{P, raw};
use crate::connection::connection;
use crate::cudart::memory::{copy, direction};
use crate::generated::values::{
    cudaErrorInvalidMemcpyDirection, cudaErrorInvalidPitchValue, cudaErrorInvalidValue,
    cudaMemcpyDeviceToDevice as DEVICE_TO_DEVICE, cudaMemcpyDeviceToHost as DEVICE_TO_HOST,
    cudaMemcpyHostToDevice as HOST_TO_DEVICE, cudaMemcpyHostToHost as HOST_TO_HOST,
};
use crate::stub::{self, Failure, status};

/// Rows on both sides of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) dst: *mut c_void,
    pub(crate) dpitch: usize,
    pub(crate) src: *const c_void,
    pub(crate) spitch: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

pub(crate) unsafe fn cudaMemcpy2DAsync(
    dst: *mut c_void,
    dpitch: usize,
    src: *const c_void,
    spitch: usize,
    width: usize,
    height: usize,
    kind: i32,
    stream: P,
) -> i32 {
    let rows = Rows {
        dst,
        dpitch,
        src,
        spitch,
        width,
        height,
    };
    // SAFETY: 1. the arguments are the program's.
    status::cudart(unsafe { copy_rows(rows, kind, raw(stream)) })
}

pub(crate) unsafe fn cudaMemcpy2D(
    dst: *mut c_void,
    dpitch: usize,
    src: *const c_void,
    spitch: usize,
    width: usize,
    height: usize,
    kind: i32,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaMemcpy2DAsync(dst, dpitch, src, spitch, width, height, kind, std::ptr::null_mut()) }
}

pub(crate) unsafe fn cudaMemset2D(dev_ptr: *mut c_void, pitch: usize, value: i32, width: usize, height: usize) -> i32 {
    status::cudart(stub::send(&CudaMemset2DAsync {
        dev_ptr: SvmAddress(dev_ptr.addr() as u64),
        pitch: pitch as u64,
        value,
        width: width as u64,
        height: height as u64,
        stream: Handle::from_raw(0),
    }))
}

/// # Safety
///
/// What is the program's own memory of the two sides has so many rows.
pub(crate) unsafe fn copy_rows(rows: Rows, kind: i32, stream: u32) -> Result<(), Failure> {
    let Rows { width, height, .. } = rows;
    if width == 0 || height == 0 {
        return Ok(());
    }
    if rows.dpitch < width || rows.spitch < width {
        return Err(Failure::Code(cudaErrorInvalidPitchValue));
    }
    let whole = rows.dpitch.max(rows.spitch).checked_mul(height);
    let (Some(_), Some(bytes)) = (whole, width.checked_mul(height)) else {
        return Err(Failure::Code(cudaErrorInvalidValue));
    };
    if (rows.dpitch, rows.spitch) == (width, width) {
        // SAFETY: 1. the rows lie one behind the other.
        return unsafe { copy(rows.dst, rows.src, bytes, kind, stream) };
    }
    let kind = direction(kind, rows.dst.addr() as u64, rows.src.addr() as u64);
    match kind {
        HOST_TO_HOST => {
            for row in 0..height {
                let (to, from) = rows.at(row);
                // SAFETY: 1. the caller's memory has the row on both sides, which may overlap.
                unsafe { to.cast::<u8>().copy_from(from.cast(), width) };
            }
            Ok(())
        }
        DEVICE_TO_DEVICE => stub::send(&rows.call(rows.to(0), rows.from(0), (kind, stream))),
        HOST_TO_DEVICE | DEVICE_TO_HOST => {
            let most = connection()?.piece() / width;
            if most == 0 {
                return (0..height).try_for_each(|row| {
                    let (to, from) = rows.at(row);
                    // SAFETY: 1. the caller's memory has the row.
                    unsafe { copy(to, from, width, kind, stream) }
                });
            }
            let mut done = 0;
            while done < height {
                let count = most.min(height - done);
                let piece = Rows { height: count, ..rows };
                // SAFETY: 1. the caller's memory has these rows.
                unsafe { piece.copy_piece(done, kind, stream) }?;
                done += count;
            }
            Ok(())
        }
        _ => Err(Failure::Code(cudaErrorInvalidMemcpyDirection)),
    }
}

impl Rows {
    /// Where a row is on both sides.
    fn at(&self, row: usize) -> (*mut c_void, *const c_void) {
        let to = self.dst.wrapping_byte_add(row * self.dpitch);
        (to, self.src.wrapping_byte_add(row * self.spitch))
    }

    fn to(&self, row: usize) -> Memory {
        Memory::Svm(SvmAddress(self.at(row).0.addr() as u64))
    }

    fn from(&self, row: usize) -> Memory {
        Memory::Svm(SvmAddress(self.at(row).1.addr() as u64))
    }

    fn call(&self, dst: Memory, src: Memory, (kind, stream): (i32, u32)) -> CudaMemcpy2DAsync {
        CudaMemcpy2DAsync {
            dst,
            dpitch: self.dpitch as u64,
            src,
            spitch: self.spitch as u64,
            width: self.width as u64,
            height: self.height as u64,
            kind,
            stream: Handle::from_raw(stream),
        }
    }

    /// # Safety
    ///
    /// What is the program's own memory of the two sides has so many rows from the first one on.
    unsafe fn copy_piece(&self, first: usize, kind: i32, stream: u32) -> Result<(), Failure> {
        let connection = connection()?;
        let mut packed = vec![0; self.width * self.height];
        let places = packed.chunks_exact_mut(self.width).zip(first..);
        if kind == HOST_TO_DEVICE {
            for (place, row) in places {
                // SAFETY: 1. the caller's memory has the row; 2. `place` is as long, and nobody else's.
                unsafe {
                    self.at(row)
                        .1
                        .cast::<u8>()
                        .copy_to_nonoverlapping(place.as_mut_ptr(), self.width);
                };
            }
            return connection.send_data(&packed, |span| {
                self.call(self.to(first), Memory::Arena(span), (kind, stream))
            });
        }
        connection.fetch(&mut packed, stream, |span| {
            self.call(Memory::Arena(span), self.from(first), (kind, stream))
        })?;
        for (place, row) in packed.chunks_exact(self.width).zip(first..) {
            // SAFETY: 1. the caller's memory has the row; 2. `place` is as long, and nobody else's.
            unsafe {
                self.at(row)
                    .0
                    .cast::<u8>()
                    .copy_from_nonoverlapping(place.as_ptr(), self.width);
            };
        }
        Ok(())
    }
}
