//! Calls by hand: what is about memory and its quota, the device, modules and launches.
//!
//! Knows which functions of the runtime and the driver these need.

mod device;
mod memory;
mod module;

pub(crate) use device::basaltDeviceInfo;
pub(crate) use memory::*;
pub(crate) use module::*;

use crate::table::{Dim3, P, functions};

functions! {
    /// Functions of the runtime that are called by hand.
    Runtime {
        cudaGetDeviceCount(P);
        cudaGetDeviceProperties(P, i32);
        cudaDeviceGetAttribute(P, i32, i32);
        cudaDeviceSynchronize();
        cudaMemGetInfo(P, P);
        cudaMalloc(P, usize);
        cudaFree(P);
        cudaMemset(P, i32, usize);
        cudaMemsetAsync(P, i32, usize, P);
        cudaMemcpyAsync(P, P, usize, i32, P);
        cudaHostRegister(P, usize, u32);
        cudaHostUnregister(P);
        cudaStreamSynchronize(P);
        cudaEventCreateWithFlags(P, u32);
        cudaEventRecord(P, P);
        cudaEventSynchronize(P);
        cudaEventDestroy(P);
        cudaMemset2DAsync(P, usize, i32, usize, usize, P);
        cudaMemcpy2DAsync(P, usize, P, usize, usize, usize, i32, P);
        cudaLaunchKernel(P, Dim3, Dim3, P, usize, P);
        cudaLibraryLoadData(P, P, P, P, u32, P, P, u32);
        cudaLibraryUnload(P);
        cudaLibraryGetKernel(P, P, P);
        cudaLibraryGetGlobal(P, P, P, P);
    }
}

functions! {
    /// Functions of the driver.
    Driver {
        cuKernelGetParamInfo(P, usize, P, P);
    }
}
