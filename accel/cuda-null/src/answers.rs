//! What is answered where zeroes are not plausible: one device, of compute capability 9.0, and what programs do not go on without.
//!
//! Knows no object.

use accel_proto::List;
use accel_proto::cuda::{
    AnyCall, AnyReply, BasaltDeviceInfoReply, CublasLtMatmulAlgoGetHeuristicReply, CudaFuncGetAttributesReply,
    CudaMemGetInfoReply, CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlagsReply,
    CudnnGetConvolutionBackwardDataAlgorithmV7Reply, CudnnGetConvolutionBackwardFilterAlgorithmV7Reply,
    CudnnGetConvolutionForwardAlgorithmV7Reply,
};

/// What the device is called, with zeroes behind.
pub const DEVICE_NAME: [u8; 64] = padded(b"Basalt null");
/// Bytes of its memory.
pub const TOTAL_MEMORY: u64 = 64 << 30;

/// Its attributes by their numbers (CUDA Runtime API, `cudaDeviceAttr`).
pub const ATTRIBUTES: [i32; 160] = attributes();

const fn padded(text: &[u8]) -> [u8; 64] {
    let mut name = [0; 64];
    let mut index = 0;
    while index < text.len() {
        name[index] = text[index];
        index += 1;
    }
    name
}

const fn attributes() -> [i32; 160] {
    let known = [
        (1, 1024),
        (2, 1024),
        (3, 1024),
        (4, 64),
        (5, i32::MAX),
        (6, 65_535),
        (7, 65_535),
        (8, 48 << 10),
        (9, 64 << 10),
        (10, 32),
        (12, 65_536),
        (13, 1_000_000),
        (16, 64),
        (38, 32 << 20),
        (39, 2048),
        (41, 1),
        (75, 9),
        (76, 0),
        (81, 228 << 10),
        (82, 65_536),
        (97, 227 << 10),
        (106, 32),
        (111, 1 << 10),
    ];
    let mut attributes = [0; 160];
    let mut index = 0;
    while index < known.len() {
        attributes[known[index].0] = known[index].1;
        index += 1;
    }
    attributes
}

/// `cudaFuncAttributes`: three sizes, then numbers, of which threads in a block, registers, and versions of PTX and of the binary.
const FUNCTION: [u8; 144] = {
    let mut bytes = [0; 144];
    // maxThreadsPerBlock 1024, numRegs 32, ptxVersion and binaryVersion 90, maxDynamicSharedSizeBytes 48 KiB.
    bytes[25] = 4;
    bytes[28] = 32;
    bytes[32] = 90;
    bytes[36] = 90;
    bytes[45] = 0xc0;
    bytes
};

/// One algorithm, the first, without a workspace: what cuDNN tells of convolutions.
const CONVOLUTION: [u8; 48] = [0; 48];
/// The same of cublasLt: an algorithm of 64 bytes, of which one is not zero, its workspace, a state of success, waves, and what is reserved.
const PRODUCT: [u8; 96] = {
    let mut bytes = [0; 96];
    bytes[0] = 1;
    bytes
};

/// The answer to a call that succeeds; the client has so many bytes of memory, and may have so many in all.
#[must_use]
pub fn answer(call: &AnyCall<'_>, used: u64, total: u64) -> AnyReply<'static> {
    match call {
        AnyCall::BasaltDeviceInfo(call) if call.device == 0 => AnyReply::BasaltDeviceInfo(BasaltDeviceInfoReply {
            status: 0,
            name: List::new(&DEVICE_NAME),
            total_global_mem: total,
            attributes: List::new(&ATTRIBUTES),
            takes_code: 0,
        }),
        AnyCall::BasaltDeviceInfo(_) => call.failed(101),
        // Its clients choose addresses.
        AnyCall::BasaltMalloc(_) => call.failed(801),
        AnyCall::CudaMemGetInfo(_) => AnyReply::CudaMemGetInfo(CudaMemGetInfoReply {
            status: 0,
            free: total.saturating_sub(used),
            total,
        }),
        AnyCall::CudaFuncGetAttributes(_) => AnyReply::CudaFuncGetAttributes(CudaFuncGetAttributesReply {
            status: 0,
            attr: List::new(&FUNCTION),
        }),
        AnyCall::CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(call) => {
            let blocks = 2048_i32.checked_div(call.block_size).unwrap_or_default().clamp(0, 32);
            AnyReply::CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
                CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlagsReply {
                    status: 0,
                    num_blocks: blocks,
                },
            )
        }
        AnyCall::CudnnGetConvolutionForwardAlgorithmV7(call) => {
            AnyReply::CudnnGetConvolutionForwardAlgorithmV7(CudnnGetConvolutionForwardAlgorithmV7Reply {
                status: 0,
                returned_algo_count: count(call.requested_algo_count),
                perf_results: first(call.requested_algo_count, &CONVOLUTION),
            })
        }
        AnyCall::CudnnGetConvolutionBackwardDataAlgorithmV7(call) => {
            AnyReply::CudnnGetConvolutionBackwardDataAlgorithmV7(CudnnGetConvolutionBackwardDataAlgorithmV7Reply {
                status: 0,
                returned_algo_count: count(call.requested_algo_count),
                perf_results: first(call.requested_algo_count, &CONVOLUTION),
            })
        }
        AnyCall::CudnnGetConvolutionBackwardFilterAlgorithmV7(call) => {
            AnyReply::CudnnGetConvolutionBackwardFilterAlgorithmV7(CudnnGetConvolutionBackwardFilterAlgorithmV7Reply {
                status: 0,
                returned_algo_count: count(call.requested_algo_count),
                perf_results: first(call.requested_algo_count, &CONVOLUTION),
            })
        }
        AnyCall::CublasLtMatmulAlgoGetHeuristic(call) => {
            AnyReply::CublasLtMatmulAlgoGetHeuristic(CublasLtMatmulAlgoGetHeuristicReply {
                status: 0,
                heuristic_results_array: first(call.requested_algo_count, &PRODUCT),
                return_algo_count: count(call.requested_algo_count),
            })
        }
        other => other.failed(0),
    }
}

fn count(asked: u32) -> i32 {
    i32::from(asked > 0)
}

fn first(asked: u32, one: &'static [u8]) -> List<'static, u8> {
    List::new(if asked > 0 { one } else { &[] })
}
