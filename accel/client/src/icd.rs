//! What a loader asks a client library for (OpenCL extension cl_khr_icd): the four functions that are found by name, and addresses of others.
//! Nothing else is exported, so that a program which has a loader's functions of the same names gets the loader's.
#![allow(
    unsafe_code,
    non_snake_case,
    reason = "functions that a loader finds have the names of C"
)]

use std::ffi::{c_char, c_void};

use accel_proto::opencl as calls;

use crate::arguments::{In, Out, Ref};
use crate::dispatch;
use crate::{guarded, platform, stubs};

/// The loader's way to the platforms.
// SAFETY: the name is the extension's, which no other library that a loader opens by itself shares a namespace with.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn clIcdGetPlatformIDsKHR(num_entries: u32, platforms: Out<Ref>, num_platforms: Out<u32>) -> i32 {
    platform::get_platform_ids(num_entries, platforms, num_platforms)
}

/// The loader's way to all other functions.
// SAFETY: as for clIcdGetPlatformIDsKHR.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn clGetExtensionFunctionAddress(func_name: In<c_char>) -> *const c_void {
    get_extension_function_address(func_name)
}

/// What the loader asks platforms for before it shows them.
// SAFETY: as for clIcdGetPlatformIDsKHR.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn clGetPlatformInfo(
    platform: Ref,
    param_name: u32,
    param_value_size: u64,
    param_value: Out<u8>,
    param_value_size_ret: Out<u64>,
) -> i32 {
    stubs::get_platform_info(
        platform,
        param_name,
        param_value_size,
        param_value,
        param_value_size_ret,
    )
}

/// `clGetExtensionFunctionAddress`.
pub(crate) extern "C" fn get_extension_function_address(func_name: In<c_char>) -> *const c_void {
    let found = guarded(|| Ok(func_name.text().and_then(|name| address(&name.to_string_lossy()))));
    found.ok().flatten().unwrap_or(std::ptr::null())
}

/// `clGetExtensionFunctionAddressForPlatform`.
pub(crate) extern "C" fn get_extension_function_address_for_platform(
    platform: Ref,
    func_name: In<c_char>,
) -> *const c_void {
    match guarded(|| platform.object::<calls::Platform>().map(drop)) {
        Ok(()) => get_extension_function_address(func_name),
        Err(_) => std::ptr::null(),
    }
}

/// A function by its name, if it is served.
fn address(name: &str) -> Option<*const c_void> {
    if name == "clIcdGetPlatformIDsKHR" {
        return Some(platform::get_platform_ids as *const c_void);
    }
    dispatch::address(name)
}
