//! Registration of kernels, and launches.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;

use accel_proto::cuda::{
    CudaFuncGetAttributes, CudaFuncSetAttribute, CudaLaunchKernel as LaunchKernel,
    CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
};
use accel_proto::{Handle, List};

use crate::abi::{Dim3, P, address, raw};
use crate::connection::connection;
use crate::generated::values::{cudaErrorInvalidDeviceFunction, cudaErrorInvalidValue, cudaErrorNotSupported};
use crate::registry::{self, Layout};
use crate::stub::{self, Failure, status};

/// Launches whose configuration is pushed and not popped are one or two; more is no program.
const MOST_PUSHED: usize = 64;

thread_local! {
    static PUSHED: RefCell<Vec<(Dim3, Dim3, usize, P)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) unsafe fn __cudaRegisterFatBinary(fat_cubin: *mut c_void) -> *mut *mut c_void {
    std::ptr::without_provenance_mut(registry::add_module(fat_cubin.expose_provenance()))
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

pub(crate) unsafe fn __cudaRegisterVar(
    fat_cubin_handle: *mut *mut c_void,
    host_var: *mut u8,
    device_name: *const u8,
    size: usize,
) {
    let name = device_name.expose_provenance();
    registry::add_variable(fat_cubin_handle.addr(), host_var.addr(), name, size as u64);
}

pub(crate) unsafe fn __cudaRegisterManagedVar(fat_cubin_handle: *mut *mut c_void) {
    registry::add_managed(fat_cubin_handle.addr());
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

/// Where a launch goes, and how much of it there is.
#[derive(Debug, Clone, Copy)]
struct Shape {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: P,
}

pub(crate) unsafe fn __cudaLaunchKernel(
    kernel: P,
    grid_dim: Dim3,
    block_dim: Dim3,
    args: *mut *mut c_void,
    shared_mem: usize,
    stream: P,
) -> i32 {
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaLaunchKernel(kernel.cast_const(), grid_dim, block_dim, args, shared_mem, stream) }
}

pub(crate) unsafe fn cudaLaunchKernel(
    func: *const c_void,
    grid_dim: Dim3,
    block_dim: Dim3,
    args: *mut *mut c_void,
    shared_mem: usize,
    stream: P,
) -> i32 {
    let shape = Shape {
        grid: grid_dim,
        block: block_dim,
        shared: shared_mem,
        stream,
    };
    // SAFETY: 1. the arguments are the program's.
    status::cudart(unsafe { launch(func, shape, args) })
}

pub(crate) unsafe fn cudaLaunchCooperativeKernel(
    func: *const c_void,
    grid_dim: Dim3,
    block_dim: Dim3,
    args: *mut *mut c_void,
    shared_mem: usize,
    stream: P,
) -> i32 {
    let allowed = together();
    if allowed.is_err() {
        return status::cudart(allowed);
    }
    // SAFETY: 1. the arguments are the program's.
    unsafe { cudaLaunchKernel(func, grid_dim, block_dim, args, shared_mem, stream) }
}

/// Whether blocks may wait for one another: not where the server carries kernels out, one block after the other.
fn together() -> Result<(), Failure> {
    if connection()?.device.takes_code {
        stub::say("a cooperative launch, or one with clusters, is not served: blocks run one after the other");
        return Err(Failure::Code(cudaErrorNotSupported));
    }
    Ok(())
}

/// `cudaLaunchConfig_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: P,
    attributes: *const Attribute,
    count: u32,
}

/// `cudaLaunchAttribute`, whose value is a union of 64 bytes.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy)]
struct Attribute {
    id: i32,
    padding: [u8; 4],
    value: [u32; 16],
}

/// Of `cudaLaunchAttributeID`; all others are hints, or about what is not served anyway.
const COOPERATIVE: i32 = 2;
const CLUSTER_DIMENSION: i32 = 4;
/// More attributes than there are kinds of are no configuration.
const MOST_ATTRIBUTES: usize = 64;

pub(crate) unsafe fn cudaLaunchKernelExC(config: *const c_void, func: *const c_void, args: *mut *mut c_void) -> i32 {
    // SAFETY: 1. the program has a configuration there, or NULL.
    let Some(config) = (unsafe { config.cast::<Configuration>().as_ref() }) else {
        return cudaErrorInvalidValue;
    };
    let count = usize::try_from(config.count).unwrap_or(usize::MAX);
    if count > MOST_ATTRIBUTES {
        return cudaErrorInvalidValue;
    }
    // SAFETY: 1. the configuration has so many attributes, or none.
    let attributes = unsafe { stub::memory::<Attribute, _>(&config.attributes, count) };
    let waits = |attribute: &Attribute| match (attribute.id, attribute.value) {
        (COOPERATIVE, [on, ..]) => on != 0,
        (CLUSTER_DIMENSION, [x, y, z, ..]) => [x, y, z].into_iter().any(|blocks| blocks > 1),
        _ => false,
    };
    if attributes.iter().any(waits) {
        let allowed = together();
        if allowed.is_err() {
            return status::cudart(allowed);
        }
    }
    let shape = Shape {
        grid: config.grid,
        block: config.block,
        shared: config.shared,
        stream: config.stream,
    };
    // SAFETY: 1. the arguments are the program's.
    status::cudart(unsafe { launch(func, shape, args) })
}

/// # Safety
///
/// At `arguments` is NULL, or an address for each of the kernel's parameters.
unsafe fn launch(function: *const c_void, shape: Shape, arguments: *mut *mut c_void) -> Result<(), Failure> {
    let (kernel, layout) = known(function)?;
    let arguments = match layout {
        // SAFETY: 1. the caller's.
        Some(layout) => unsafe { layout.gather(arguments) }?,
        None => Vec::new(),
    };
    let (grid, block) = (shape.grid.bytes(), shape.block.bytes());
    stub::send(&LaunchKernel {
        kernel: Handle::from_raw(kernel),
        grid_dim: List::new(&grid),
        block_dim: List::new(&block),
        args: List::new(&arguments),
        shared_mem: shape.shared as u64,
        stream: Handle::from_raw(raw(shape.stream)),
    })
}

/// The name of a kernel that the server knows; where the server takes code, with where its parameters are.
fn known(function: *const c_void) -> Result<(u32, Option<Arc<Layout>>), Failure> {
    let kernel = registry::name(function.addr()).ok_or(Failure::Code(cudaErrorInvalidDeviceFunction))?;
    Ok((kernel, registry::tell(kernel)?))
}

pub(crate) unsafe fn cudaFuncSetCacheConfig(func: *const c_void) -> i32 {
    let known = registry::name(func.addr()).ok_or(Failure::Code(cudaErrorInvalidDeviceFunction));
    status::cudart(known.map(drop))
}

pub(crate) unsafe fn cudaFuncGetAttributes(attr: *mut c_void, func: *const c_void) -> i32 {
    let asked = known(func).and_then(|(kernel, _)| {
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
    let sent = known(func).and_then(|(kernel, _)| {
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
    let asked = known(func).and_then(|(kernel, _)| {
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
