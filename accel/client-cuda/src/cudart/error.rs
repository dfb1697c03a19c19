//! The last error of a thread, and what codes are called.

use std::ffi::CStr;

use crate::stub;

pub(crate) unsafe fn cudaGetLastError() -> i32 {
    stub::take_last_error()
}

pub(crate) unsafe fn cudaPeekAtLastError() -> i32 {
    stub::last_error()
}

pub(crate) unsafe fn cudaGetErrorName(error: i32) -> *const u8 {
    words(error).0.as_ptr().cast()
}

pub(crate) unsafe fn cudaGetErrorString(error: i32) -> *const u8 {
    words(error).1.as_ptr().cast()
}

/// A code's name, and what it means.
pub(crate) fn words(error: i32) -> (&'static CStr, &'static CStr) {
    match error {
        0 => (c"cudaSuccess", c"no error"),
        1 => (c"cudaErrorInvalidValue", c"invalid argument"),
        2 => (c"cudaErrorMemoryAllocation", c"out of memory"),
        3 => (
            c"cudaErrorInitializationError",
            c"the connection is the parent process' and does not survive a fork",
        ),
        9 => (
            c"cudaErrorInvalidConfiguration",
            c"a grid, a block or shared memory beyond the device's limits",
        ),
        12 => (c"cudaErrorInvalidPitchValue", c"rows that are longer than their pitch"),
        13 => (c"cudaErrorInvalidSymbol", c"no variable of a registered module"),
        21 => (
            c"cudaErrorInvalidMemcpyDirection",
            c"a direction of copies that is none",
        ),
        46 => (c"cudaErrorDevicesUnavailable", c"the accelerator's server is gone"),
        98 => (c"cudaErrorInvalidDeviceFunction", c"no kernel of a registered module"),
        100 => (
            c"cudaErrorNoDevice",
            c"no accelerator: BASALT_ACCEL_SOCKET names the server, BASALT_ACCEL_DEBUG=1 says why",
        ),
        101 => (c"cudaErrorInvalidDevice", c"no device of that number"),
        200 => (
            c"cudaErrorInvalidKernelImage",
            c"a fat binary that cannot be read; link the program with nvcc 12 or 13 (BASALT_ACCEL_DEBUG=1 says why)",
        ),
        209 => (
            c"cudaErrorNoKernelImageForDevice",
            c"the program has no PTX; compile it with -gencode arch=compute_75,code=compute_75, and without -rdc=true",
        ),
        218 => (
            c"cudaErrorInvalidPtx",
            c"PTX that cannot be read (docs/accel-ptx.md); the server's log says where",
        ),
        400 => (
            c"cudaErrorInvalidResourceHandle",
            c"a stream, an event or a library's handle that does not exist",
        ),
        500 => (c"cudaErrorSymbolNotFound", c"no symbol of that name"),
        600 => (c"cudaErrorNotReady", c"not ready"),
        700 => (c"cudaErrorIllegalAddress", c"an address in no allocation"),
        701 => (
            c"cudaErrorLaunchOutOfResources",
            c"a launch with more threads or arguments than the kernel can have",
        ),
        702 => (
            c"cudaErrorLaunchTimeout",
            c"a kernel that has used up its time, or whose threads wait for each other for ever",
        ),
        710 => (c"cudaErrorAssert", c"an assertion of a kernel has failed"),
        712 => (
            c"cudaErrorHostMemoryAlreadyRegistered",
            c"memory that is registered already",
        ),
        713 => (c"cudaErrorHostMemoryNotRegistered", c"memory that is not registered"),
        714 => (c"cudaErrorHardwareStackError", c"calls of a kernel that are too deep"),
        715 => (
            c"cudaErrorIllegalInstruction",
            c"an instruction that its thread may not carry out",
        ),
        716 => (
            c"cudaErrorMisalignedAddress",
            c"an address that is no multiple of the access's size",
        ),
        719 => (c"cudaErrorLaunchFailure", c"a kernel has ended with a trap"),
        800 => (c"cudaErrorNotPermitted", c"not permitted"),
        801 => (
            c"cudaErrorNotSupported",
            c"not served by Basalt (docs/accel-cuda-calls.md)",
        ),
        _ => (c"cudaErrorUnknown", c"unknown error"),
    }
}
