//! The driver's functions by hand: whether there is a device. Everything else of it is not served.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]
#![allow(non_snake_case, reason = "names are C's")]

use crate::abi::{P, raw};
use crate::connection::connection;
use crate::cudart::VERSION;
use crate::generated::values::{CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NO_DEVICE};
use crate::registry;
use crate::stub;

pub(crate) unsafe fn cuInit(_flags: u32) -> i32 {
    if connection().is_ok() { 0 } else { CUDA_ERROR_NO_DEVICE }
}

pub(crate) unsafe fn cuDriverGetVersion(driver_version: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(driver_version, VERSION) };
    0
}

pub(crate) unsafe fn cuDeviceGetCount(count: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(count, i32::from(connection().is_ok())) };
    0
}

pub(crate) unsafe fn cuDeviceGet(device: *mut i32, ordinal: i32) -> i32 {
    if ordinal != 0 || connection().is_err() {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(device, 0) };
    0
}

pub(crate) unsafe fn cuKernelGetParamInfo(
    kernel: P,
    param_index: usize,
    param_offset: *mut usize,
    param_size: *mut usize,
) -> i32 {
    let told = registry::tell(raw(kernel)).map(|layout| layout?.parameters.get(param_index).copied());
    match told {
        Ok(Some((begin, length))) => {
            // SAFETY: 1. the program has a place for it.
            unsafe { stub::put(param_offset, begin) };
            // SAFETY: 1. the program has a place for it, or NULL.
            unsafe { stub::put(param_size, length) };
            0
        }
        Ok(None) => CUDA_ERROR_INVALID_VALUE,
        Err(failure) => stub::status::cudart(Err(failure)),
    }
}

/// What stands for the one context.
const CONTEXT: usize = 1;

pub(crate) unsafe fn cuDevicePrimaryCtxGetState(dev: i32, flags: *mut u32, active: *mut i32) -> i32 {
    if dev != 0 || connection().is_err() {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(flags, 0) };
    // SAFETY: 1. the same.
    unsafe { stub::put(active, 1) };
    0
}

pub(crate) unsafe fn cuDevicePrimaryCtxRetain(pctx: *mut P, dev: i32) -> i32 {
    if dev != 0 {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    // SAFETY: 1. the program has a place for it.
    unsafe { cuCtxGetCurrent(pctx) }
}

pub(crate) unsafe fn cuCtxGetCurrent(pctx: *mut P) -> i32 {
    if connection().is_err() {
        return CUDA_ERROR_NO_DEVICE;
    }
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(pctx, std::ptr::without_provenance_mut(CONTEXT)) };
    0
}

pub(crate) unsafe fn cuCtxSetCurrent(ctx: P) -> i32 {
    if ctx.addr() > CONTEXT {
        CUDA_ERROR_INVALID_VALUE
    } else {
        0
    }
}

pub(crate) unsafe fn cuGetErrorString(_error: i32, p_str: *mut *mut u8) -> i32 {
    let text: P = c"an error of a driver that is not served by Basalt (docs/accel-cuda-calls.md)"
        .as_ptr()
        .cast_mut()
        .cast();
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(p_str, text.cast()) };
    0
}
