//! The device: what the server told of it when the connection was made. There is one.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use accel_proto::cuda::CudaDeviceSynchronize;

use crate::connection::{Device, connection};
use crate::cudart::memory::free_all;
use crate::generated::values::{
    cudaDevAttrClockRate as CLOCK, cudaDevAttrComputeCapabilityMajor as MAJOR,
    cudaDevAttrComputeCapabilityMinor as MINOR, cudaDevAttrL2CacheSize as L2,
    cudaDevAttrMaxBlocksPerMultiprocessor as BLOCKS, cudaDevAttrMaxRegistersPerBlock as REGISTERS,
    cudaDevAttrMaxRegistersPerMultiprocessor as ALL_REGISTERS, cudaDevAttrMaxSharedMemoryPerBlock as SHARED,
    cudaDevAttrMaxSharedMemoryPerBlockOptin as SHARED_OPTIN, cudaDevAttrMaxSharedMemoryPerMultiprocessor as ALL_SHARED,
    cudaDevAttrMaxThreadsPerBlock as THREADS, cudaDevAttrMaxThreadsPerMultiProcessor as ALL_THREADS,
    cudaDevAttrMultiProcessorCount as PROCESSORS, cudaDevAttrReservedSharedMemoryPerBlock as RESERVED,
    cudaDevAttrTotalConstantMemory as CONSTANT, cudaDevAttrWarpSize as WARP, cudaDriverEntryPointSymbolNotFound,
    cudaErrorInvalidDevice, cudaErrorInvalidValue, cudaSuccess,
};
use crate::stub::{self, Failure, status};

/// The version of the runtime, and of the driver that it would need: 13.0.
pub(crate) const VERSION: i32 = 13_000;

/// What the program has set by `cudaSetDeviceFlags`.
static FLAGS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static CURRENT: Cell<i32> = const { Cell::new(0) };
}

/// The device of that number.
fn device(number: i32) -> Result<&'static Device, Failure> {
    match number {
        0 => connection().map(|connection| &connection.device),
        _ => Err(Failure::Code(cudaErrorInvalidDevice)),
    }
}

/// Writes what there is for a device, or tells why there is none.
unsafe fn of_device<T>(number: i32, place: *mut T, value: impl FnOnce(&Device) -> T) -> i32 {
    let told = device(number).map(|device| {
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(place, value(device)) };
    });
    status::cudart(told)
}

pub(crate) unsafe fn cudaGetDevice(device: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(device, CURRENT.get()) };
    cudaSuccess
}

pub(crate) unsafe fn cudaSetDevice(device: i32) -> i32 {
    let set = self::device(device).map(|_| CURRENT.set(device));
    status::cudart(set)
}

pub(crate) unsafe fn cudaGetDeviceCount(count: *mut i32) -> i32 {
    let there = connection();
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(count, i32::from(there.is_ok())) };
    status::cudart(there.map(drop))
}

pub(crate) unsafe fn cudaDeviceGetAttribute(value: *mut i32, attr: i32, device: i32) -> i32 {
    let known = |device: &Device| {
        usize::try_from(attr)
            .ok()
            .and_then(|attr| device.attributes.get(attr).copied())
    };
    let told = self::device(device).and_then(|device| known(device).ok_or(Failure::Code(cudaErrorInvalidValue)));
    let put = told.map(|told| {
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(value, told) };
    });
    status::cudart(put)
}

pub(crate) unsafe fn cudaGetDeviceProperties(prop: *mut c_void, device: i32) -> i32 {
    // SAFETY: 1. the program has the place of a structure of CUDA 13.
    unsafe { of_device(device, prop.cast::<[u8; SIZE_13]>(), |device| properties(device, true)) }
}

pub(crate) unsafe fn cudaGetDeviceProperties_v2(prop: *mut c_void, device: i32) -> i32 {
    // SAFETY: 1. the program has the place of a structure of CUDA 12.
    unsafe { of_device(device, prop.cast::<[u8; SIZE_12]>(), |device| properties(device, false)) }
}

/// Bytes of `cudaDeviceProp`.
const SIZE_13: usize = 1008;
const SIZE_12: usize = 1032;

/// A structure of C's as it is filled: each member behind the one before, at a multiple of its size.
struct Members<const SIZE: usize> {
    bytes: [u8; SIZE],
    at: usize,
}

impl<const SIZE: usize> Members<SIZE> {
    fn put(&mut self, bytes: &[u8], alignment: usize) {
        self.at = self.at.next_multiple_of(alignment);
        if let Some(place) = self.bytes.get_mut(self.at..self.at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
        self.at += bytes.len();
    }

    fn int(&mut self, number: i32) {
        self.put(&number.to_le_bytes(), 4);
    }

    fn ints(&mut self, numbers: &[i32]) {
        numbers.iter().for_each(|number| self.int(*number));
    }

    fn size(&mut self, number: u64) {
        self.put(&number.to_le_bytes(), 8);
    }
}

/// `cudaDeviceProp`, with its members in their order; CUDA 13 has dropped some and has others behind. What nothing was told of is zero.
fn properties<const SIZE: usize>(device: &Device, of_13: bool) -> [u8; SIZE] {
    let attribute = |index: i32| {
        usize::try_from(index)
            .ok()
            .and_then(|index| device.attributes.get(index).copied())
            .unwrap_or_default()
    };
    let bytes = |index: i32| u64::try_from(attribute(index)).unwrap_or_default();
    let mut to = Members {
        bytes: [0; SIZE],
        at: 0,
    };
    let dropped = |to: &mut Members<SIZE>, number: i32| {
        if !of_13 {
            to.int(number);
        }
    };
    // name, uuid, luid, luidDeviceNodeMask
    let mut name = [0; 256];
    name[..device.name.len()].copy_from_slice(&device.name);
    to.put(&name, 1);
    to.put(&[0; 24], 1);
    to.int(0);
    to.size(device.memory);
    to.size(bytes(SHARED));
    to.ints(&[attribute(REGISTERS), attribute(WARP)]);
    // memPitch
    to.size(i32::MAX.unsigned_abs().into());
    to.int(attribute(THREADS));
    // maxThreadsDim, maxGridSize
    to.ints(&[2, 3, 4, 5, 6, 7].map(attribute));
    dropped(&mut to, attribute(CLOCK));
    to.size(bytes(CONSTANT));
    to.ints(&[attribute(MAJOR), attribute(MINOR)]);
    // textureAlignment, texturePitchAlignment, deviceOverlap
    to.size(512);
    to.size(32);
    dropped(&mut to, 1);
    to.int(attribute(PROCESSORS));
    dropped(&mut to, 0);
    // integrated, canMapHostMemory, computeMode
    to.ints(&[0, 1]);
    dropped(&mut to, 0);
    // Textures and surfaces: none; of CUDA 12, maxTexture1DLinear is among them.
    to.ints(&[0; 39]);
    dropped(&mut to, 0);
    to.size(512);
    // concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing
    to.ints(&[1, 0, 0, 0, 0, 0, 1, 1]);
    dropped(&mut to, 0);
    // memoryBusWidth, then what is told, streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported
    to.ints(&[0, attribute(L2), 0, attribute(ALL_THREADS), 1, 1, 1]);
    to.size(bytes(ALL_SHARED));
    // regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported
    to.ints(&[attribute(ALL_REGISTERS), 0, 0, 0, 0]);
    dropped(&mut to, 0);
    // pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem, cooperativeLaunch
    to.ints(&[0, 0, 0, 1, 0]);
    dropped(&mut to, 0);
    to.size(bytes(SHARED_OPTIN));
    // pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize
    to.ints(&[0, 0, attribute(BLOCKS), 0]);
    to.size(bytes(RESERVED));
    // hostRegisterSupported; nothing of what stands behind.
    to.int(1);
    to.bytes
}

pub(crate) unsafe fn cudaDeviceGetPCIBusId(pci_bus_id: *mut u8, len: i32, device: i32) -> i32 {
    let text: &CStr = c"0000:00:00.0";
    let bytes = text.to_bytes_with_nul();
    let fits = usize::try_from(len).is_ok_and(|len| len >= bytes.len());
    let room = if fits {
        Ok(())
    } else {
        Err(Failure::Code(cudaErrorInvalidValue))
    };
    let told = self::device(device).and(room);
    let put = told.map(|()| {
        // SAFETY: 1. the program has room for `len` bytes, which are enough.
        unsafe { stub::put_all(pci_bus_id, accel_proto::List::new(bytes)) };
    });
    status::cudart(put)
}

pub(crate) unsafe fn cudaDeviceGetStreamPriorityRange(least_priority: *mut i32, greatest_priority: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it, or NULL.
    unsafe { stub::put(least_priority, 0) };
    // SAFETY: 1. the same.
    unsafe { stub::put(greatest_priority, -5) };
    cudaSuccess
}

pub(crate) unsafe fn cudaDeviceCanAccessPeer(can_access_peer: *mut i32, device: i32, peer_device: i32) -> i32 {
    let told = self::device(device).and(self::device(peer_device)).map(|_| {
        // SAFETY: 1. the program has a place for it.
        unsafe { stub::put(can_access_peer, 0) };
    });
    status::cudart(told)
}

pub(crate) unsafe fn cudaDriverGetVersion(driver_version: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(driver_version, VERSION) };
    cudaSuccess
}

pub(crate) unsafe fn cudaRuntimeGetVersion(runtime_version: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(runtime_version, VERSION) };
    cudaSuccess
}

pub(crate) unsafe fn cudaGetDriverEntryPointByVersion(func_ptr: *mut *mut c_void, driver_status: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(func_ptr, std::ptr::null_mut()) };
    // SAFETY: 1. the program has a place for it, or NULL.
    unsafe { stub::put(driver_status, cudaDriverEntryPointSymbolNotFound) };
    cudaSuccess
}

pub(crate) unsafe fn cudaChooseDevice(device: *mut i32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { of_device(0, device, |_| 0) }
}

pub(crate) unsafe fn cudaGetDeviceFlags(flags: *mut u32) -> i32 {
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(flags, FLAGS.load(Ordering::Relaxed)) };
    cudaSuccess
}

pub(crate) unsafe fn cudaSetDeviceFlags(flags: u32) -> i32 {
    FLAGS.store(flags, Ordering::Relaxed);
    cudaSuccess
}

pub(crate) unsafe fn cudaDeviceSetCacheConfig() -> i32 {
    cudaSuccess
}

pub(crate) unsafe fn cudaDeviceReset() -> i32 {
    let waited = stub::ask(&CudaDeviceSynchronize {}, false, |_| ());
    status::cudart(waited.and_then(|()| free_all()))
}

pub(crate) unsafe fn cudaProfilerStart() -> i32 {
    cudaSuccess
}

pub(crate) unsafe fn cudaProfilerStop() -> i32 {
    cudaSuccess
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_have_the_offsets_of_their_versions() {
        let mut device = Device {
            name: [0; 64],
            memory: 0x1122_3344_5566,
            attributes: [0; 160],
            takes_code: false,
            says_addresses: false,
        };
        for (index, value) in [
            (MAJOR, 9),
            (PROCESSORS, 64),
            (ALL_THREADS, 2048),
            (SHARED_OPTIN, 0x38c00),
            (WARP, 32),
        ] {
            device.attributes[usize::try_from(index).unwrap()] = value;
        }
        let int = |bytes: &[u8], at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        // Offsets as a C compiler gives them for the members' order in the documentation of each version.
        let of_13: [u8; SIZE_13] = properties(&device, true);
        assert_eq!(u64::from_le_bytes(of_13[288..296].try_into().unwrap()), device.memory);
        assert_eq!([308, 360, 384].map(|at| int(&of_13, at)), [32, 9, 64]);
        let of_12: [u8; SIZE_12] = properties(&device, false);
        assert_eq!([308, 360, 388].map(|at| int(&of_12, at)), [32, 9, 64]);
        let place = |bytes: &[u8], value: i32| bytes.windows(4).position(|four| four == value.to_le_bytes());
        assert_eq!([place(&of_13, 2048), place(&of_12, 2048)], [Some(604), Some(624)]);
        assert_eq!([place(&of_13, 0x38c00), place(&of_12, 0x38c00)], [Some(672), Some(696)]);
    }
}
