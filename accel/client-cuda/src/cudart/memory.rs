//! Memory: allocations, of which the client chooses the addresses, memory of the process for copies, and copies.

use std::ffi::c_void;

use accel_proto::cuda::{BasaltMalloc, CudaFree, CudaMalloc, CudaMemcpyAsync};
use accel_proto::{Handle, Memory, Span, SvmAddress};

use crate::abi::{P, raw};
use crate::connection::{Connection, connection};
use crate::generated::values::{
    cudaErrorInvalidMemcpyDirection, cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaMemcpyDefault as DEFAULT,
    cudaMemcpyDeviceToDevice as DEVICE_TO_DEVICE, cudaMemcpyDeviceToHost as DEVICE_TO_HOST,
    cudaMemcpyHostToDevice as HOST_TO_DEVICE, cudaMemcpyHostToHost as HOST_TO_HOST, cudaMemoryTypeDevice,
    cudaMemoryTypeHost, cudaMemoryTypeUnregistered,
};
use crate::memory::{self, Kind};
use crate::reserved;
use crate::stub::{self, Failure, status};

/// What memory for copies begins at a multiple of: a page, as natively.
const PAGE: usize = 4096;

pub(crate) unsafe fn cudaMalloc(dev_ptr: *mut *mut c_void, size: usize) -> i32 {
    let made = || -> Result<u64, Failure> {
        if size == 0 {
            return Ok(0);
        }
        let connection = connection()?;
        if connection.device.says_addresses {
            return told(connection, size as u64);
        }
        let begin = memory::allocate(size as u64, connection.device.memory)?;
        connection
            .send(&CudaMalloc {
                dev_ptr: begin,
                size: size as u64,
            })
            .inspect_err(|_| _ = memory::free(begin, || Ok(())))?;
        Ok(begin)
    };
    if dev_ptr.is_null() {
        return cudaErrorInvalidValue;
    }
    match made() {
        Ok(begin) => {
            let address = usize::try_from(begin).unwrap_or_default();
            // SAFETY: 1. the program has a place for it.
            unsafe { stub::put(dev_ptr, std::ptr::without_provenance_mut(address)) };
            0
        }
        Err(failure) => status::cudart(Err(failure)),
    }
}

/// How often an address is asked for until one is free in this process.
const MOST_TOLD: usize = 8;

/// An allocation where the server's library has put it. One where something of the process lies already is kept until another is found, as
/// the library would put the next one there, too.
fn told(connection: &Connection, size: u64) -> Result<u64, Failure> {
    let mut taken = Vec::new();
    let found = loop {
        match connection.ask(&BasaltMalloc { size }, |reply| reply.dev_ptr) {
            Err(failure) => break Err(failure),
            Ok(begin) if reserved::reserve(begin, size) => break Ok(begin),
            Ok(begin) => taken.push(begin),
        }
        if taken.len() >= MOST_TOLD {
            stub::say("the addresses of the device's memory are taken in this process; start it again");
            break Err(Failure::Code(cudaErrorMemoryAllocation));
        }
    };
    for begin in taken {
        stub::send(&CudaFree { dev_ptr: begin })?;
    }
    let begin = found?;
    memory::insert(begin, size, Kind::Device);
    Ok(begin)
}

/// What rows begin at multiples of: natively, too, what textures and copies of rows like best.
const PITCH: usize = 512;

pub(crate) unsafe fn cudaMallocPitch(dev_ptr: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize) -> i32 {
    let row = width.checked_next_multiple_of(PITCH);
    let Some((row, size)) = row.and_then(|row| Some((row, row.checked_mul(height)?))) else {
        return cudaErrorMemoryAllocation;
    };
    // SAFETY: 1. the program has a place for it.
    let status = unsafe { cudaMalloc(dev_ptr, size) };
    if status == 0 {
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(pitch, row) };
    }
    status
}

/// Gives back what is allocated, but for variables.
pub(crate) fn free_all() -> Result<(), Failure> {
    let mut allocations = memory::allocations().into_iter();
    allocations.try_for_each(|begin| memory::free(begin, || stub::send(&CudaFree { dev_ptr: begin })))
}

pub(crate) unsafe fn cudaMallocAsync(dev_ptr: *mut *mut c_void, size: usize) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaMalloc(dev_ptr, size) }
}

pub(crate) unsafe fn cudaFree(dev_ptr: *mut c_void) -> i32 {
    if dev_ptr.is_null() {
        // Programs use it to have the device set up.
        return status::cudart(connection().map(drop));
    }
    let begin = dev_ptr.addr() as u64;
    status::cudart(memory::free(begin, || stub::send(&CudaFree { dev_ptr: begin })))
}

pub(crate) unsafe fn cudaFreeAsync(dev_ptr: *mut c_void) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaFree(dev_ptr) }
}

pub(crate) unsafe fn cudaHostAlloc(p_host: *mut *mut c_void, size: usize) -> i32 {
    if p_host.is_null() {
        return cudaErrorInvalidValue;
    }
    let mut place = std::ptr::null_mut();
    // SAFETY: 1. there is a place for the address; 2. the alignment is a power of two.
    if unsafe { libc::posix_memalign(&raw mut place, PAGE, size.max(1)) } != 0 {
        return cudaErrorMemoryAllocation;
    }
    if let Err(failure) = memory::note(place.addr() as u64, size as u64, Kind::Host) {
        // SAFETY: 1. it was allocated above, and nobody has it.
        unsafe { libc::free(place) };
        return status::cudart(Err(failure));
    }
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(p_host, place) };
    0
}

pub(crate) unsafe fn cudaMallocHost(ptr: *mut *mut c_void, size: usize) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaHostAlloc(ptr, size) }
}

pub(crate) unsafe fn cudaFreeHost(ptr: *mut c_void) -> i32 {
    if ptr.is_null() {
        return 0;
    }
    match memory::forget(ptr.addr() as u64, Kind::Host) {
        Ok(_) => {
            // SAFETY: 1. it was allocated by cudaHostAlloc, and is forgotten there.
            unsafe { libc::free(ptr) };
            0
        }
        Err(failure) => status::cudart(Err(failure)),
    }
}

pub(crate) unsafe fn cudaHostRegister(ptr: *mut c_void, size: usize) -> i32 {
    if ptr.is_null() || size == 0 {
        return cudaErrorInvalidValue;
    }
    status::cudart(memory::note(ptr.addr() as u64, size as u64, Kind::Registered))
}

pub(crate) unsafe fn cudaHostUnregister(ptr: *mut c_void) -> i32 {
    status::cudart(memory::forget(ptr.addr() as u64, Kind::Registered).map(drop))
}

/// `cudaPointerAttributes`, without what is reserved behind (CUDA 13).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Attributes {
    of: i32,
    device: i32,
    on_device: *const c_void,
    on_host: *const c_void,
}

pub(crate) unsafe fn cudaPointerGetAttributes(attributes: *mut c_void, ptr: *const c_void) -> i32 {
    let (of, device, on_device, on_host) = match memory::find(ptr.addr() as u64) {
        Some((Kind::Device | Kind::Variable, _)) => (cudaMemoryTypeDevice, 0, ptr, std::ptr::null()),
        Some((Kind::Host | Kind::Registered, _)) => (cudaMemoryTypeHost, 0, ptr, ptr),
        // cudaInvalidDeviceId
        None => (cudaMemoryTypeUnregistered, -2, std::ptr::null(), ptr),
    };
    let found = Attributes {
        of,
        device,
        on_device,
        on_host,
    };
    // SAFETY: 1. the program has the place of such a structure.
    unsafe { stub::put(attributes.cast(), found) };
    0
}

pub(crate) unsafe fn cudaMemcpyAsync(dst: *mut c_void, src: *const c_void, count: usize, kind: i32, stream: P) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    status::cudart(unsafe { copy(dst, src, count, kind, raw(stream)) })
}

pub(crate) unsafe fn cudaMemcpy(dst: *mut c_void, src: *const c_void, count: usize, kind: i32) -> i32 {
    // What was copied to the device is in the arena, so that the program has its memory back; an error is told by the next call that waits.
    // SAFETY: 1. the arguments are the program's.
    status::cudart(unsafe { copy(dst, src, count, kind, 0) })
}

pub(crate) unsafe fn cudaMemcpyPeerAsync(
    dst: *mut c_void,
    dst_device: i32,
    src: *const c_void,
    src_device: i32,
    count: usize,
    stream: P,
) -> i32 {
    if (dst_device, src_device) != (0, 0) {
        return crate::generated::values::cudaErrorInvalidDevice;
    }
    // SAFETY: 1. the arguments are the program's.
    status::cudart(unsafe { copy(dst, src, count, DEVICE_TO_DEVICE, raw(stream)) })
}

pub(crate) unsafe fn cudaMemcpyPeer(
    dst: *mut c_void,
    dst_device: i32,
    src: *const c_void,
    src_device: i32,
    count: usize,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaMemcpyPeerAsync(dst, dst_device, src, src_device, count, std::ptr::null_mut()) }
}

/// The direction of a copy, where the program leaves that to what lies at the addresses.
pub(crate) fn direction(kind: i32, to: u64, from: u64) -> i32 {
    match kind {
        DEFAULT => match (memory::is_device(to), memory::is_device(from)) {
            (false, false) => HOST_TO_HOST,
            (true, false) => HOST_TO_DEVICE,
            (false, true) => DEVICE_TO_HOST,
            (true, true) => DEVICE_TO_DEVICE,
        },
        kind => kind,
    }
}

/// # Safety
///
/// What is the program's own memory of the two has so many bytes.
pub(crate) unsafe fn copy(
    dst: *mut c_void,
    src: *const c_void,
    count: usize,
    kind: i32,
    stream: u32,
) -> Result<(), Failure> {
    if count == 0 {
        return Ok(());
    }
    let (to, from) = (dst.addr() as u64, src.addr() as u64);
    let kind = direction(kind, to, from);
    let stream = Handle::from_raw(stream);
    let device = |address: u64| Memory::Svm(SvmAddress(address));
    let connection = connection()?;
    match kind {
        HOST_TO_HOST => {
            // SAFETY: 1. the caller's memory has so many bytes on both sides, which may overlap.
            unsafe { dst.cast::<u8>().copy_from(src.cast(), count) };
            Ok(())
        }
        DEVICE_TO_DEVICE => stub::send(&CudaMemcpyAsync {
            dst: device(to),
            src: device(from),
            count: count as u64,
            kind,
            stream,
        }),
        HOST_TO_DEVICE => {
            // SAFETY: 1. the caller's memory has so many bytes.
            let bytes = unsafe { std::slice::from_raw_parts(src.cast::<u8>(), count) };
            let mut at = to;
            for piece in bytes.chunks(connection.piece()) {
                let count = piece.len() as u64;
                let call = |span: Span| CudaMemcpyAsync {
                    dst: device(at),
                    src: Memory::Arena(span),
                    count,
                    kind,
                    stream,
                };
                connection.send_data(piece, call)?;
                at += count;
            }
            Ok(())
        }
        DEVICE_TO_HOST => {
            // SAFETY: 1. the caller's memory has so many bytes, which are nobody else's meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts_mut(dst.cast::<u8>(), count) };
            let mut at = from;
            for piece in bytes.chunks_mut(connection.piece()) {
                let count = piece.len() as u64;
                let call = |span: Span| CudaMemcpyAsync {
                    dst: Memory::Arena(span),
                    src: device(at),
                    count,
                    kind,
                    stream,
                };
                connection.fetch(piece, stream.raw(), call)?;
                at += count;
            }
            Ok(())
        }
        _ => Err(Failure::Code(cudaErrorInvalidMemcpyDirection)),
    }
}
