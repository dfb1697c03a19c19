//! Registration of kernels, and launches.

use std::cell::RefCell;
use std::ffi::c_void;

use accel_proto::cuda::{
    CudaFuncGetAttributes, CudaFuncSetAttribute, CudaLaunchKernel as LaunchKernel,
    CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
};
use accel_proto::{Handle, List};

use crate::abi::{Dim3, P, address, raw};
use crate::generated::values::{cudaErrorInvalidDeviceFunction, cudaErrorInvalidValue};
use crate::registry;
use crate::stub::{self, Failure, status};

/// Launches whose configuration is pushed and not popped are one or two; more is no program.
const MOST_PUSHED: usize = 64;

thread_local! {
    static PUSHED: RefCell<Vec<(Dim3, Dim3, usize, P)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) unsafe fn __cudaRegisterFatBinary() -> *mut *mut c_void {
    std::ptr::without_provenance_mut(registry::add_module())
}

pub(crate) unsafe fn __cudaRegisterFatBinaryEnd() {}

pub(crate) unsafe fn __cudaUnregisterFatBinary(fat_cubin_handle: *mut *mut c_void) {
    registry::remove_module(fat_cubin_handle.addr());
}

pub(crate) unsafe fn __cudaInitModule() -> u8 {
    1
}

pub(crate) unsafe fn __cudaRegisterFunction(
    fat_cubin_handle: *mut *mut c_void,
    host_fun: *const u8,
    device_name: *const u8,
) {
    registry::add_function(
        fat_cubin_handle.addr(),
        host_fun.addr(),
        device_name.expose_provenance(),
    );
}

pub(crate) unsafe fn __cudaRegisterVar() {
    registry::add_variable();
}

pub(crate) unsafe fn __cudaPushCallConfiguration(grid_dim: Dim3, block_dim: Dim3, shared_mem: usize, stream: P) -> u32 {
    PUSHED.with_borrow_mut(|pushed| {
        if pushed.len() >= MOST_PUSHED {
            return cudaErrorInvalidValue.cast_unsigned();
        }
        pushed.push((grid_dim, block_dim, shared_mem, stream));
        0
    })
}

pub(crate) unsafe fn __cudaPopCallConfiguration(
    grid_dim: *mut Dim3,
    block_dim: *mut Dim3,
    shared_mem: *mut usize,
    stream: *mut c_void,
) -> i32 {
    let Some((grid, block, shared, of)) = PUSHED.with_borrow_mut(Vec::pop) else {
        return cudaErrorInvalidValue;
    };
    // SAFETY: 1. the program has places for them.
    unsafe { stub::put(grid_dim, grid) };
    // SAFETY: 1. the same.
    unsafe { stub::put(block_dim, block) };
    // SAFETY: 1. the same.
    unsafe { stub::put(shared_mem, shared) };
    // SAFETY: 1. the same; it is a stream's.
    unsafe { stub::put(stream.cast::<P>(), of) };
    0
}

pub(crate) unsafe fn __cudaGetKernel(kernel: *mut *mut c_void, entry_func_addr: *const c_void) -> i32 {
    let Some(name) = registry::name(entry_func_addr.addr()) else {
        return cudaErrorInvalidDeviceFunction;
    };
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(kernel, address(name)) };
    0
}

pub(crate) unsafe fn __cudaLaunchKernel(
    kernel: P,
    grid_dim: Dim3,
    block_dim: Dim3,
    shared_mem: usize,
    stream: P,
) -> i32 {
    status::cudart(launch(kernel.cast_const(), grid_dim, block_dim, shared_mem, stream))
}

pub(crate) unsafe fn cudaLaunchKernel(
    func: *const c_void,
    grid_dim: Dim3,
    block_dim: Dim3,
    shared_mem: usize,
    stream: P,
) -> i32 {
    status::cudart(launch(func, grid_dim, block_dim, shared_mem, stream))
}

pub(crate) use self::cudaLaunchKernel as cudaLaunchCooperativeKernel;

/// `cudaLaunchConfig_t` up to its attributes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: P,
}

pub(crate) unsafe fn cudaLaunchKernelExC(config: *const c_void, func: *const c_void) -> i32 {
    // SAFETY: 1. the program has a configuration there, or NULL.
    let Some(config) = (unsafe { config.cast::<Configuration>().as_ref() }) else {
        return cudaErrorInvalidValue;
    };
    status::cudart(launch(func, config.grid, config.block, config.shared, config.stream))
}

fn launch(function: *const c_void, grid: Dim3, block: Dim3, shared: usize, stream: P) -> Result<(), Failure> {
    let kernel = known(function)?;
    let (grid, block) = (grid.bytes(), block.bytes());
    stub::send(&LaunchKernel {
        kernel: Handle::from_raw(kernel),
        grid_dim: List::new(&grid),
        block_dim: List::new(&block),
        shared_mem: shared as u64,
        stream: Handle::from_raw(raw(stream)),
    })
}

/// The name of a kernel that the server knows.
fn known(function: *const c_void) -> Result<u32, Failure> {
    let kernel = registry::name(function.addr()).ok_or(Failure::Code(cudaErrorInvalidDeviceFunction))?;
    registry::tell(kernel)?;
    Ok(kernel)
}

pub(crate) unsafe fn cudaFuncGetAttributes(attr: *mut c_void, func: *const c_void) -> i32 {
    let asked = known(func).and_then(|kernel| {
        let call = CudaFuncGetAttributes {
            func: Handle::from_raw(kernel),
            reply: stub::reply_place(),
        };
        stub::ask(&call, true, |reply| {
            // SAFETY: 1. the program has the place of a structure of that size.
            unsafe { stub::put_all(attr.cast::<u8>(), reply.attr) };
        })
    });
    status::cudart(asked)
}

pub(crate) unsafe fn cudaFuncSetAttribute(func: *const c_void, attr: i32, value: i32) -> i32 {
    let sent = known(func).and_then(|kernel| {
        stub::send(&CudaFuncSetAttribute {
            func: Handle::from_raw(kernel),
            attr,
            value,
        })
    });
    status::cudart(sent)
}

pub(crate) unsafe fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    num_blocks: *mut i32,
    func: *const c_void,
    block_size: i32,
    dynamic_smem_size: usize,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe {
        cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks, func, block_size, dynamic_smem_size, 0)
    }
}

pub(crate) unsafe fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    num_blocks: *mut i32,
    func: *const c_void,
    block_size: i32,
    dynamic_smem_size: usize,
    flags: u32,
) -> i32 {
    let asked = known(func).and_then(|kernel| {
        let call = CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags {
            func: Handle::from_raw(kernel),
            block_size,
            dynamic_smem_size: dynamic_smem_size as u64,
            flags,
        };
        stub::ask(&call, true, |reply| {
            // SAFETY: 1. the program has a place for it.
            unsafe { stub::put(num_blocks, reply.num_blocks) };
        })
    });
    status::cudart(asked)
}
