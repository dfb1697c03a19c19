//! Streams, as far as they are not the server's: nothing can be captured.

use crate::generated::values::{cudaErrorInvalidValue, cudaStreamCaptureModeGlobal, cudaStreamCaptureStatusNone};
use crate::stub;

pub(crate) unsafe fn cudaStreamIsCapturing(p_capture_status: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(p_capture_status, cudaStreamCaptureStatusNone) };
    0
}

pub(crate) unsafe fn cudaStreamGetCaptureInfo(
    capture_status: *mut i32,
    id: *mut u64,
    num_dependencies: *mut usize,
) -> i32 {
    // SAFETY: 1. the program has places for them, or NULL.
    unsafe { stub::put(capture_status, cudaStreamCaptureStatusNone) };
    // SAFETY: 1. the same.
    unsafe { stub::put(id, 0) };
    // SAFETY: 1. the same.
    unsafe { stub::put(num_dependencies, 0) };
    0
}

pub(crate) unsafe fn cudaThreadExchangeStreamCaptureMode(mode: *mut i32) -> i32 {
    thread_local! {
        static MODE: std::cell::Cell<i32> = const { std::cell::Cell::new(cudaStreamCaptureModeGlobal) };
    }
    // SAFETY: 1. the program has it there, or NULL.
    let Some(mode) = (unsafe { mode.as_mut() }) else {
        return cudaErrorInvalidValue;
    };
    *mode = MODE.replace(*mode);
    0
}
