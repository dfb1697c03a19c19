//! cuBLAS' functions by hand: what a handle was told and is asked for.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]
#![allow(non_snake_case, clippy::too_many_arguments, reason = "names and parameters are C's")]

use std::ffi::{CStr, c_void};

use accel_proto::cuda::{CublasSetMathMode, CublasSetStreamV2};
use accel_proto::{Call, Handle, Plain};

use crate::abi::{P, address, raw};
use crate::cudart::{Rows, copy_rows};
use crate::generated::values::{
    CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED,
    cudaMemcpyDeviceToHost as DEVICE_TO_HOST, cudaMemcpyHostToDevice as HOST_TO_DEVICE,
};
use crate::handles::{Setting, set, setting};
use crate::stub;

pub(crate) unsafe fn cublasSetMathMode(handle: P, mode: i32) -> i32 {
    let call = CublasSetMathMode {
        handle: Handle::from_raw(raw(handle)),
        mode,
    };
    let told = stub::send_once(&call);
    stub::status::cublas(told.map(|()| set(Setting::MathMode, raw(handle), mode.cast_unsigned())))
}

pub(crate) unsafe fn cublasGetMathMode(handle: P, mode: *mut i32) -> i32 {
    let kept = setting(Setting::MathMode, raw(handle)).unwrap_or_default();
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(mode, kept.cast_signed()) };
    0
}

pub(crate) unsafe fn cublasSetPointerMode_v2(_handle: P, mode: i32) -> i32 {
    // Scalars are read here when a function is called; those on the device would be addresses that mean nothing in this process.
    if mode == CUBLAS_POINTER_MODE_HOST {
        0
    } else {
        CUBLAS_STATUS_NOT_SUPPORTED
    }
}

pub(crate) unsafe fn cublasGetPointerMode_v2(_handle: P, mode: *mut i32) -> i32 {
    if mode.is_null() {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(mode, CUBLAS_POINTER_MODE_HOST) };
    0
}

/// The version whose functions these are: that of CUDA 13.0.
const VERSION: i32 = 130_000;

pub(crate) unsafe fn cublasGetVersion_v2(version: *mut i32) -> i32 {
    if version.is_null() {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(version, VERSION) };
    0
}

pub(crate) unsafe fn cublasGetStream_v2(handle: P, stream_id: *mut P) -> i32 {
    if stream_id.is_null() {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    let said = stub::said(CublasSetStreamV2::OP, raw(handle));
    let stream = said.map_or(0, |arguments| u32::get(&arguments));
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(stream_id, address(stream)) };
    0
}

/// A code's name, and what it means.
fn words(status: i32) -> (&'static CStr, &'static CStr) {
    match status {
        0 => (c"CUBLAS_STATUS_SUCCESS", c"success"),
        1 => (c"CUBLAS_STATUS_NOT_INITIALIZED", c"no accelerator, or no handle"),
        3 => (c"CUBLAS_STATUS_ALLOC_FAILED", c"out of memory"),
        7 => (c"CUBLAS_STATUS_INVALID_VALUE", c"invalid argument"),
        13 => (
            c"CUBLAS_STATUS_EXECUTION_FAILED",
            c"the accelerator's server has refused it",
        ),
        14 => (c"CUBLAS_STATUS_INTERNAL_ERROR", c"internal error"),
        15 => (
            c"CUBLAS_STATUS_NOT_SUPPORTED",
            c"not served by Basalt (docs/accel-cuda-calls.md)",
        ),
        _ => (c"CUBLAS_STATUS_UNKNOWN", c"unknown status"),
    }
}

pub(crate) unsafe fn cublasGetStatusName(status: i32) -> *const u8 {
    words(status).0.as_ptr().cast()
}

pub(crate) unsafe fn cublasGetStatusString(status: i32) -> *const u8 {
    words(status).1.as_ptr().cast()
}

/// Columns of a matrix: how many, how many bytes of each are copied, and how many bytes are from one to the next on either side.
struct Columns {
    count: i32,
    width: Option<usize>,
    from: Option<usize>,
    to: Option<usize>,
}

impl Columns {
    /// A matrix.
    fn of_matrix([rows, cols, elem_size, lda, ldb]: [i32; 5]) -> Self {
        let bytes = |count: i32| {
            let (count, size) = (usize::try_from(count).ok()?, usize::try_from(elem_size).ok()?);
            count.checked_mul(size).filter(|_| size > 0)
        };
        Self {
            count: cols,
            width: bytes(rows),
            from: bytes(lda),
            to: bytes(ldb),
        }
    }

    /// # Safety
    ///
    /// What is the program's own memory of the two sides has so many columns.
    unsafe fn copy(self, src: *const c_void, dst: *mut c_void, kind: i32) -> i32 {
        let sizes = (usize::try_from(self.count), self.width, self.from, self.to);
        let (Ok(height), Some(width), Some(spitch), Some(dpitch)) = sizes else {
            return CUBLAS_STATUS_INVALID_VALUE;
        };
        if spitch < width || dpitch < width {
            return CUBLAS_STATUS_INVALID_VALUE;
        }
        let rows = Rows {
            dst,
            dpitch,
            src,
            spitch,
            width,
            height,
        };
        // SAFETY: 1. the caller's.
        stub::status::cublas(unsafe { copy_rows(rows, kind, 0) })
    }
}

pub(crate) unsafe fn cublasSetVector(
    n: i32,
    elem_size: i32,
    x: *const c_void,
    incx: i32,
    y: *mut c_void,
    incy: i32,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { Columns::of_matrix([1, n, elem_size, incx, incy]).copy(x, y, HOST_TO_DEVICE) }
}

pub(crate) unsafe fn cublasGetVector(
    n: i32,
    elem_size: i32,
    x: *const c_void,
    incx: i32,
    y: *mut c_void,
    incy: i32,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { Columns::of_matrix([1, n, elem_size, incx, incy]).copy(x, y, DEVICE_TO_HOST) }
}

pub(crate) unsafe fn cublasSetMatrix(
    rows: i32,
    cols: i32,
    elem_size: i32,
    a: *const c_void,
    lda: i32,
    b: *mut c_void,
    ldb: i32,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { Columns::of_matrix([rows, cols, elem_size, lda, ldb]).copy(a, b, HOST_TO_DEVICE) }
}

pub(crate) unsafe fn cublasGetMatrix(
    rows: i32,
    cols: i32,
    elem_size: i32,
    a: *const c_void,
    lda: i32,
    b: *mut c_void,
    ldb: i32,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { Columns::of_matrix([rows, cols, elem_size, lda, ldb]).copy(a, b, DEVICE_TO_HOST) }
}
