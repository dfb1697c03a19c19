//! Variables of modules, by the addresses that stand for them in the program.

use std::ffi::c_void;

use crate::abi::{P, raw};
use crate::cudart::memory::copy;
use crate::generated::values::{
    cudaErrorInvalidMemcpyDirection, cudaErrorInvalidValue, cudaMemcpyDefault as DEFAULT,
    cudaMemcpyDeviceToDevice as DEVICE_TO_DEVICE, cudaMemcpyDeviceToHost as DEVICE_TO_HOST,
    cudaMemcpyHostToDevice as HOST_TO_DEVICE,
};
use crate::registry;
use crate::stub::{self, Failure, status};

pub(crate) unsafe fn cudaGetSymbolAddress(dev_ptr: *mut *mut c_void, symbol: *const c_void) -> i32 {
    if dev_ptr.is_null() {
        return cudaErrorInvalidValue;
    }
    let found = registry::variable(symbol.addr()).map(|(address, _)| {
        let address = usize::try_from(address).unwrap_or_default();
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(dev_ptr, std::ptr::without_provenance_mut(address)) };
    });
    status::cudart(found)
}

pub(crate) unsafe fn cudaGetSymbolSize(size: *mut usize, symbol: *const c_void) -> i32 {
    if size.is_null() {
        return cudaErrorInvalidValue;
    }
    let found = registry::variable(symbol.addr()).map(|(_, bytes)| {
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(size, usize::try_from(bytes).unwrap_or(usize::MAX)) };
    });
    status::cudart(found)
}

/// The address of bytes in a variable.
fn part(symbol: *const c_void, count: usize, offset: usize) -> Result<*mut c_void, Failure> {
    let (address, size) = registry::variable(symbol.addr())?;
    let end = offset.checked_add(count).map(|end| end as u64);
    if end.is_none_or(|end| end > size) {
        return Err(Failure::Code(cudaErrorInvalidValue));
    }
    let address = usize::try_from(address + offset as u64).unwrap_or_default();
    Ok(std::ptr::without_provenance_mut(address))
}

/// A direction that a copy to or from a variable may have.
fn allowed(kind: i32, host: i32) -> Result<(), Failure> {
    if [host, DEVICE_TO_DEVICE, DEFAULT].contains(&kind) {
        Ok(())
    } else {
        Err(Failure::Code(cudaErrorInvalidMemcpyDirection))
    }
}

pub(crate) unsafe fn cudaMemcpyToSymbolAsync(
    symbol: *const c_void,
    src: *const c_void,
    count: usize,
    offset: usize,
    kind: i32,
    stream: P,
) -> i32 {
    let to = allowed(kind, HOST_TO_DEVICE).and_then(|()| part(symbol, count, offset));
    // SAFETY: 1. the program's memory has so many bytes.
    status::cudart(to.and_then(|to| unsafe { copy(to, src, count, kind, raw(stream)) }))
}

pub(crate) unsafe fn cudaMemcpyToSymbol(
    symbol: *const c_void,
    src: *const c_void,
    count: usize,
    offset: usize,
    kind: i32,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaMemcpyToSymbolAsync(symbol, src, count, offset, kind, std::ptr::null_mut()) }
}

pub(crate) unsafe fn cudaMemcpyFromSymbolAsync(
    dst: *mut c_void,
    symbol: *const c_void,
    count: usize,
    offset: usize,
    kind: i32,
    stream: P,
) -> i32 {
    let from = allowed(kind, DEVICE_TO_HOST).and_then(|()| part(symbol, count, offset));
    // SAFETY: 1. the program's memory has so many bytes.
    status::cudart(from.and_then(|from| unsafe { copy(dst, from, count, kind, raw(stream)) }))
}

pub(crate) unsafe fn cudaMemcpyFromSymbol(
    dst: *mut c_void,
    symbol: *const c_void,
    count: usize,
    offset: usize,
    kind: i32,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaMemcpyFromSymbolAsync(dst, symbol, count, offset, kind, std::ptr::null_mut()) }
}
