//! Fat binaries that a program has in memory itself, and their kernels by name.

use std::ffi::{CStr, c_void};

use crate::abi::{P, address};
use crate::generated::values::{
    cudaErrorInvalidDeviceFunction as NO_FUNCTION, cudaErrorInvalidValue, cudaErrorSymbolNotFound,
};
use crate::registry;
use crate::stub::{self, Failure, status};

pub(crate) unsafe fn cudaLibraryLoadData(library: *mut P, code: *const c_void) -> i32 {
    if library.is_null() || code.is_null() {
        return cudaErrorInvalidValue;
    }
    // SAFETY: 1. the program's code is there.
    let added = unsafe { registry::add_container(code.expose_provenance()) };
    status::cudart(added.map(|module| {
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(library, std::ptr::without_provenance_mut(module)) };
    }))
}

pub(crate) unsafe fn cudaLibraryUnload(library: P) -> i32 {
    status::cudart(registry::unload(library.addr()))
}

pub(crate) unsafe fn cudaLibraryGetKernel(p_kernel: *mut P, library: P, name: *const u8) -> i32 {
    if p_kernel.is_null() || name.is_null() {
        return cudaErrorInvalidValue;
    }
    // SAFETY: 1. the program's string ends with a zero.
    let name = unsafe { CStr::from_ptr(name.cast()) };
    let told = registry::kernel_of(library.addr(), name).and_then(|kernel| {
        registry::tell(kernel)?;
        Ok(kernel)
    });
    status::cudart(told.map_err(not_found).map(|kernel| {
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(p_kernel, address(kernel)) };
    }))
}

/// A kernel that is asked for by its name is a symbol.
fn not_found(failure: Failure) -> Failure {
    match failure {
        Failure::Code(NO_FUNCTION) => Failure::Code(cudaErrorSymbolNotFound),
        other => other,
    }
}

pub(crate) unsafe fn cudaLibraryGetGlobal(dptr: *mut P, bytes: *mut usize, library: P, name: *const u8) -> i32 {
    if name.is_null() {
        return cudaErrorInvalidValue;
    }
    // SAFETY: 1. the program's string ends with a zero.
    let name = unsafe { CStr::from_ptr(name.cast()) };
    let found = registry::global(library.addr(), name).map(|(begin, size)| {
        let begin = usize::try_from(begin).unwrap_or_default();
        // SAFETY: 1. the program has a place for it, or NULL.
        unsafe { stub::put(dptr, std::ptr::without_provenance_mut(begin)) };
        // SAFETY: 1. the same.
        unsafe { stub::put(bytes, usize::try_from(size).unwrap_or(usize::MAX)) };
    });
    status::cudart(found)
}
