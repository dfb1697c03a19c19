//! Shared virtual memory (OpenCL API, section 5.6), which is not served yet: an address would have to be the same for the application and for
//! kernels elsewhere. Devices say that they have none (CL_DEVICE_SVM_CAPABILITIES is 0, `info`), and then the API's answer to these calls is
//! CL_INVALID_OPERATION, or no memory. Knows no ring.

use accel_proto::opencl as calls;

use crate::arguments::{Opaque, Ref};
use crate::codes::Code;
use crate::status;

fn refused(queue: Ref) -> i32 {
    status(|| queue.object::<calls::CommandQueue>().and(Err(Code::INVALID_OPERATION)))
}

/// `clSVMAlloc`.
pub(crate) extern "C" fn svm_alloc(_context: Ref, _flags: u64, _size: u64, _alignment: u32) -> Opaque {
    std::ptr::null_mut()
}

/// `clSVMFree`: of what was never given out.
pub(crate) extern "C" fn svm_free(_context: Ref, _svm_pointer: Opaque) {}

/// `clEnqueueSVMFree`.
pub(crate) extern "C" fn enqueue_svm_free(command_queue: Ref) -> i32 {
    refused(command_queue)
}

/// `clEnqueueSVMMemcpy`.
pub(crate) extern "C" fn enqueue_svm_memcpy(command_queue: Ref) -> i32 {
    refused(command_queue)
}

/// `clEnqueueSVMMemFill`.
pub(crate) extern "C" fn enqueue_svm_mem_fill(command_queue: Ref) -> i32 {
    refused(command_queue)
}

/// `clEnqueueSVMMap`.
pub(crate) extern "C" fn enqueue_svm_map(command_queue: Ref) -> i32 {
    refused(command_queue)
}

/// `clEnqueueSVMUnmap`.
pub(crate) extern "C" fn enqueue_svm_unmap(command_queue: Ref) -> i32 {
    refused(command_queue)
}

/// `clEnqueueSVMMigrateMem`.
pub(crate) extern "C" fn enqueue_svm_migrate_mem(command_queue: Ref) -> i32 {
    refused(command_queue)
}
