//! What the back end says of objects, for whoever saves them.
#![allow(unsafe_code, reason = "asks functions of a C API")]

use crate::api::{Api, Code, P, check};
use crate::objects::{Held, Sort};

/// Queries (cl.h).
pub(super) const KERNEL_FUNCTION_NAME: u32 = 0x1190;
pub(super) const CONTEXT_DEVICES: u32 = 0x1081;
pub(super) const PROGRAM_DEVICES: u32 = 0x1163;
pub(super) const PROGRAM_BINARY_SIZES: u32 = 0x1165;
pub(super) const PROGRAM_BINARIES: u32 = 0x1166;
pub(super) const EVENT_COMMAND_TYPE: u32 = 0x11d1;
pub(super) const EVENT_STATUS: u32 = 0x11d3;
const BUILD_STATUS: u32 = 0x1181;
const BINARY_TYPE: u32 = 0x1184;
const BINARY_TYPE_EXECUTABLE: u32 = 4;
const PROFILING: [u32; 5] = [0x1280, 0x1281, 0x1282, 0x1283, 0x1284];

/// The longest answer.
const MOST: u64 = 1 << 20;

type Info = unsafe extern "C" fn(P, u32, u64, P, P) -> i32;

/// What is asked for by name, as bytes. The object is held by the caller.
pub(super) fn bytes(api: &Api, object: &Held, name: u32) -> Result<Vec<u8>, Code> {
    let function: Info = match object.sort() {
        Sort::Platform => api.clGetPlatformInfo()?,
        Sort::Device => api.clGetDeviceInfo()?,
        Sort::Context => api.clGetContextInfo()?,
        Sort::Program => api.clGetProgramInfo()?,
        Sort::Kernel => api.clGetKernelInfo()?,
        Sort::Event => api.clGetEventInfo()?,
        Sort::CommandQueue | Sort::Mem | Sort::Sampler => return Err(Code::INVALID_VALUE),
    };
    let mut length = 0_u64;
    // SAFETY: 1. the object is held and of this sort; 2. no bytes are asked for; 3. the place is one of 64 bits.
    check(unsafe { function(object.raw(), name, 0, std::ptr::null_mut(), (&raw mut length).cast()) })?;
    // Aligned as an address is, which may be what comes.
    let words = usize::try_from(length.min(MOST).div_ceil(8)).map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
    let mut answer = vec![0_u64; words];
    let (size, at) = (8 * words as u64, answer.as_mut_ptr().cast());
    // SAFETY: 1. as above; 2. the place has as many bytes as are said.
    check(unsafe { function(object.raw(), name, size, at, std::ptr::null_mut()) })?;
    let mut bytes: Vec<u8> = answer.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.truncate(usize::try_from(length).unwrap_or(usize::MAX));
    Ok(bytes)
}

/// A number of 32 bits.
pub(super) fn number(api: &Api, object: &Held, name: u32) -> Result<u32, Code> {
    let bytes = bytes(api, object, name)?;
    let number = bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    number.ok_or(Code::INVALID_VALUE)
}

/// Numbers of 64 bits, which are lengths or addresses.
pub(super) fn words(api: &Api, object: &Held, name: u32) -> Result<Vec<u64>, Code> {
    let bytes = bytes(api, object, name)?;
    let words = bytes.chunks_exact(8).map(|word| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        u64::from_ne_bytes(bytes)
    });
    Ok(words.collect())
}

/// Text.
pub(super) fn text(api: &Api, object: &Held, name: u32) -> Result<String, Code> {
    let bytes = bytes(api, object, name)?;
    let text = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// An address that was told as a number.
pub(super) fn address(word: u64) -> P {
    std::ptr::with_exposed_provenance_mut(usize::try_from(word).unwrap_or_default())
}

/// Whether a program is built for a device, and can be run.
pub(super) fn is_executable(api: &Api, program: &Held, device: P) -> bool {
    let ask = |name: u32| {
        let mut number = u32::MAX;
        let function = api.clGetProgramBuildInfo().ok()?;
        let at = (&raw mut number).cast();
        // SAFETY: 1. the program is held, and the device is one of its own; 2. the place has the four bytes that are said.
        let status = unsafe { function(program.raw(), device, name, 4, at, std::ptr::null_mut()) };
        (status == 0).then_some(number)
    };
    ask(BUILD_STATUS) == Some(0) && ask(BINARY_TYPE) == Some(BINARY_TYPE_EXECUTABLE)
}

/// A program's binaries, one for each of its devices.
pub(super) fn binaries(api: &Api, program: &Held) -> Result<Vec<Vec<u8>>, Code> {
    let sizes = words(api, program, PROGRAM_BINARY_SIZES)?;
    let mut binaries = Vec::new();
    for size in &sizes {
        let size = usize::try_from(*size).map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
        let mut binary = Vec::new();
        binary.try_reserve_exact(size).map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
        binary.resize(size, 0_u8);
        binaries.push(binary);
    }
    let mut places: Vec<P> = binaries.iter_mut().map(|binary| binary.as_mut_ptr().cast()).collect();
    let function = api.clGetProgramInfo()?;
    let (size, at) = (size_of_val(places.as_slice()) as u64, places.as_mut_ptr().cast());
    // SAFETY: 1. the program is held; 2. there is a place for each binary, of the length that the back end has said.
    check(unsafe { function(program.raw(), PROGRAM_BINARIES, size, at, std::ptr::null_mut()) })?;
    Ok(binaries)
}

/// When a command was queued, submitted, started, ended and complete, where that was measured.
pub(super) fn times(api: &Api, event: &Held) -> Option<[u64; 5]> {
    let function = api.clGetEventProfilingInfo().ok()?;
    let mut times = [0; 5];
    for (name, time) in PROFILING.into_iter().zip(&mut times) {
        let at = std::ptr::from_mut(time).cast();
        // SAFETY: 1. the event is held; 2. the place has the eight bytes that are said.
        let status = unsafe { function(event.raw(), name, 8, at, std::ptr::null_mut()) };
        // The last one is of version 2.0.
        if status != 0 && name != PROFILING[4] {
            return None;
        }
    }
    Some(times)
}
