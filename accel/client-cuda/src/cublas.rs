//! cuBLAS' functions by hand: what a handle was told and is asked for.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]
#![allow(non_snake_case, reason = "names are C's")]

use accel_proto::Handle;
use accel_proto::cuda::CublasSetMathMode;

use crate::abi::{P, raw};
use crate::generated::values::{CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
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
