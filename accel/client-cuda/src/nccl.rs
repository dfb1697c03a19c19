//! Functions by hand of a library that is not served: they return strings, where the library's code would be none.
#![allow(unsafe_code, reason = "all functions by hand have one form")]
#![allow(non_snake_case, reason = "names are C's")]

const NOT_SERVED: &std::ffi::CStr = c"not served by Basalt (docs/accel-cuda-calls.md)";

pub(crate) unsafe fn ncclGetErrorString(_result: i32) -> *const u8 {
    NOT_SERVED.as_ptr().cast()
}

pub(crate) unsafe fn ncclGetLastError(_comm: *mut std::ffi::c_void) -> *const u8 {
    NOT_SERVED.as_ptr().cast()
}
