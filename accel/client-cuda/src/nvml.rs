//! NVML's functions by hand: whether there is a device.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]
#![allow(non_snake_case, reason = "names are C's")]

use crate::connection::connection;
use crate::generated::values::NVML_ERROR_NOT_SUPPORTED;
use crate::stub;

pub(crate) unsafe fn nvmlInit_v2() -> i32 {
    if connection().is_ok() {
        0
    } else {
        NVML_ERROR_NOT_SUPPORTED
    }
}

pub(crate) unsafe fn nvmlShutdown() -> i32 {
    0
}

pub(crate) unsafe fn nvmlDeviceGetCount_v2(device_count: *mut u32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(device_count, u32::from(connection().is_ok())) };
    0
}

pub(crate) unsafe fn nvmlErrorString(_result: i32) -> *const u8 {
    c"not served by Basalt (docs/accel-cuda-calls.md)".as_ptr().cast()
}
