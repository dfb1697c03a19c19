//! Sequences of CUDA's calls that a hostile client has carried out, on the back end that computes and on the one that does not. An input is
//! calls one behind the other, each as `number u16, length u16, arguments`; arguments that are none are skipped. Before them there are three
//! allocations, a handle of each library, a generator, and a module with a kernel.
//!
//! Besides a panic it is a fault if a call that waits has not one reply, if a reply is none of its call's, if more than the quota is charged,
//! or if a byte of it is nobody's. Half a second after an input began its client is gone, which ends what would take longer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use accel_cuda_null::Quota;
use accel_cuda_reference::{Client, State};
use accel_proto::cuda::*;
use accel_proto::samples::{Pool, Samples};
use accel_proto::{Handle, Limits, List, MESSAGE, Memory, Span, SvmAddress, Writer};

use crate::run::{Target, count, outcome};

const LIMITS: Limits = Limits { arena: 1 << 16 };
/// Bytes that a client may have charged, and those of each of its allocations.
const BYTES: u64 = 1 << 20;
const ALLOCATION: u64 = 64 << 10;
/// Calls of an input.
const MOST: usize = 64;
/// How long a client waits.
const PATIENCE: Duration = Duration::from_millis(500);

const PTX: &str = include_str!("../../../accel/ptx/tests/ptx/basics.ptx");

const CUBLAS: Handle<CublasHandleT> = Handle::from_raw(5000);
const CUDNN: Handle<CudnnHandleT> = Handle::from_raw(6000);
const GENERATOR: Handle<CurandGeneratorT> = Handle::from_raw(7000);
const MODULE: Handle<CudaModuleT> = Handle::from_raw(9000);
const KERNEL: Handle<CudaKernelT> = Handle::from_raw(9100);
const PLACES: [SvmAddress; 3] = [SvmAddress(0x10_0000), SvmAddress(0x20_0000), SvmAddress(0x30_0000)];

struct Host {
    left: u64,
    arena: Vec<u8>,
}

impl Quota for Host {
    fn charge(&mut self, bytes: u64) -> bool {
        self.left.checked_sub(bytes).map(|left| self.left = left).is_some()
    }

    fn give_back(&mut self, bytes: u64) {
        self.left += bytes;
    }
}

impl Client for Host {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> bool {
        let begin = usize::try_from(offset).expect("inside the arena");
        into.copy_from_slice(&self.arena[begin..begin + into.len()]);
        true
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> bool {
        let begin = usize::try_from(offset).expect("inside the arena");
        self.arena[begin..begin + from.len()].copy_from_slice(from);
        true
    }
}

fn written(write: impl Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; MESSAGE];
    let mut writer = Writer::new(&mut bytes);
    write(&mut writer);
    let length = writer.finish().expect("what was accepted is no longer than a message");
    bytes.truncate(length);
    bytes
}

/// Both back ends with what is there before an input.
struct Devices<'s> {
    computes: (State, Host),
    null: (accel_cuda_null::State, Host),
    stop: &'s AtomicBool,
    outcomes: u64,
}

impl<'s> Devices<'s> {
    fn new(stop: &'s AtomicBool) -> Self {
        let host = || Host {
            left: BYTES,
            arena: vec![0; 1 << 16],
        };
        let mut devices = Self {
            computes: (State::new(BYTES), host()),
            null: (accel_cuda_null::State::new(BYTES), host()),
            stop,
            outcomes: 0,
        };
        for place in PLACES {
            devices.carry_out(
                &AnyCall::CudaMalloc(CudaMalloc {
                    dev_ptr: place.0,
                    size: ALLOCATION,
                }),
                true,
            );
        }
        devices.carry_out(&AnyCall::CublasCreateV2(CublasCreateV2 { handle: CUBLAS }), false);
        devices.carry_out(&AnyCall::CudnnCreate(CudnnCreate { handle: CUDNN }), false);
        let generator = CurandCreateGenerator {
            generator: GENERATOR,
            rng_type: 100,
        };
        devices.carry_out(&AnyCall::CurandCreateGenerator(generator), true);
        devices.load();
        devices
    }

    fn load(&mut self) {
        let mut entry = vec![0; 64];
        (entry[0], entry[4], entry[28]) = (1, 64, 75);
        entry[8..16].copy_from_slice(&(PTX.len() as u64).to_le_bytes());
        let mut bytes = 0xba55_ed50_u32.to_le_bytes().to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((64 + PTX.len() as u64).to_le_bytes());
        bytes.extend(entry);
        bytes.extend(PTX.as_bytes());
        self.computes.1.arena[..bytes.len()].copy_from_slice(&bytes);
        let total = bytes.len() as u64;
        let data = BasaltModuleData {
            module: MODULE,
            offset: 0,
            total,
            count: total,
            bytes: Span {
                offset: 0,
                length: total,
            },
        };
        self.carry_out(
            &AnyCall::BasaltModuleLoad(BasaltModuleLoad {
                module: MODULE,
                index: 0,
            }),
            false,
        );
        self.carry_out(&AnyCall::BasaltModuleData(data), false);
        let function = BasaltModuleGetFunction {
            kernel: KERNEL,
            module: MODULE,
            name: c"saxpy",
            most: 8,
            reply: Span {
                offset: 0,
                length: 4096,
            },
        };
        self.carry_out(&AnyCall::BasaltModuleGetFunction(function), true);
    }

    fn carry_out(&mut self, call: &AnyCall<'_>, waits: bool) {
        let is_reply = |reply: &AnyReply<'_>| {
            let encoded = written(|writer| reply.write(writer));
            assert_eq!(call.decode_reply(&encoded, LIMITS).as_ref(), Ok(reply), "a reply to it");
        };
        let (null, host) = &mut self.null;
        is_reply(&null.carry_out(call, waits, host).0);
        assert_eq!(null.used() + host.left, BYTES, "each byte is somebody's");
        let (state, host) = &mut self.computes;
        let mut answered = 0;
        let mut answer = |reply: &AnyReply<'_>| {
            is_reply(reply);
            answered += 1;
        };
        let taken: Option<&mut dyn FnMut(&AnyReply<'_>)> = if waits { Some(&mut answer) } else { None };
        let done = state.carry_out(call, (host, self.stop), taken);
        assert_eq!(answered, u32::from(waits), "whoever waits is answered once");
        assert_eq!(state.used() + host.left, BYTES, "each byte is somebody's");
        let code = done.map_or_else(|error| error.code(), |()| 0);
        self.outcomes = outcome(format!("{} {} {code}", self.outcomes, call.op()));
    }
}

/// Calls one behind the other.
pub(crate) fn calls() -> Target {
    let mut seeds: Vec<Vec<u8>> = valid();
    // All of them in one, and calls at random.
    seeds.push(seeds.concat());
    let pool = Pool::new(5);
    for op in OPS {
        for seed in 0..3 {
            if let Ok(call) = AnyCall::read(*op, &mut Samples::new(seed, &pool, LIMITS)) {
                seeds.push(encoded(&call));
            }
        }
    }
    Target {
        name: "accel-cuda-computes",
        seeds,
        parse: take,
    }
}

fn encoded(call: &AnyCall<'_>) -> Vec<u8> {
    let arguments = written(|writer| call.write(writer));
    let length = u16::try_from(arguments.len()).expect("a seed is short");
    [&call.op().to_le_bytes(), &length.to_le_bytes(), &arguments[..]].concat()
}

fn take(input: &[u8]) -> u64 {
    let stop = AtomicBool::new(false);
    let (done, waits) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(|| {
            let waits = waits;
            if let Err(RecvTimeoutError::Timeout) = waits.recv_timeout(PATIENCE) {
                stop.store(true, Ordering::Relaxed);
            }
        });
        let done = done;
        let mut devices = Devices::new(&stop);
        let (mut rest, mut number) = (input, 0);
        while let [op_low, op_high, low, high, behind @ ..] = rest {
            let length = usize::from(u16::from_le_bytes([*low, *high])).min(behind.len());
            let (arguments, next) = behind.split_at(length);
            rest = next;
            number += 1;
            if number > MOST {
                break;
            }
            let op = u16::from_le_bytes([*op_low, *op_high]);
            if let Ok(call) = AnyCall::decode(op, arguments, LIMITS) {
                count(1);
                devices.carry_out(&call, number % 2 == 0);
            }
        }
        drop(done);
        devices.outcomes
    })
}

/// Descriptors: of a tensor, a filter, a convolution and others, as clients' libraries have them.
fn tensor(dims: [i32; 4]) -> Vec<i32> {
    let [_, c, h, w] = dims;
    let mut words = vec![parts::CUDNN_SET_TENSOR_ND_DESCRIPTOR, 10, 0, 4];
    words.extend(dims);
    words.extend([c * h * w, h * w, w, 1]);
    words
}

/// A call of each kind that computes.
fn valid() -> Vec<Vec<u8>> {
    let mut all = products();
    all.extend(networks());
    let [x, y, _] = PLACES;
    let num = 100;
    let (mean, stddev, lambda) = (0, 1_f32.to_bits(), 20_f64.to_bits());
    let saxpy = [
        &[100, 0, 0, 0, 0, 0, 0x80, 0x3f][..],
        &x.0.to_le_bytes(),
        &y.0.to_le_bytes(),
    ]
    .concat();
    let rows = CudaMemcpy2DAsync {
        dst: Memory::Svm(x),
        dpitch: 40,
        src: Memory::Arena(Span { offset: 0, length: 200 }),
        spitch: 0,
        width: 20,
        height: 10,
        kind: 1,
        stream: Handle::NULL,
    };
    let generate = |call: AnyCall<'_>| encoded(&call);
    all.extend([
        generate(AnyCall::CurandGenerateNormal(CurandGenerateNormal {
            generator: GENERATOR,
            output_ptr: x,
            num,
            mean,
            stddev,
        })),
        generate(AnyCall::CurandGeneratePoisson(CurandGeneratePoisson {
            generator: GENERATOR,
            output_ptr: x,
            num,
            lambda,
        })),
        generate(AnyCall::CudaMemcpy2DAsync(rows)),
        generate(AnyCall::CudaLaunchKernel(CudaLaunchKernel {
            kernel: KERNEL,
            grid_dim: List::new(&[4, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
            block_dim: List::new(&[32, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
            args: List::new(&saxpy),
            shared_mem: 0,
            stream: Handle::NULL,
        })),
    ]);
    all
}

/// Of cuBLAS and cublasLt.
fn products() -> Vec<Vec<u8>> {
    let [a, b, c] = PLACES;
    let one = 1_f32.to_le_bytes();
    let (alpha, beta) = (List::new(&one[..]), List::new(&one[..]));
    let (handle, transa, transb) = (CUBLAS, 1, 0);
    let (m, n, k, lda, ldb, ldc) = (5, 6, 7, 8, 9, 10);
    let (stride_a, stride_b, stride_c, batch_count) = (64, 64, 64, 3);
    let (atype, btype, ctype, compute_type, algo) = (2, 2, 0, 68, -1);
    let layout = |rows, columns| {
        [
            parts::CUBLAS_LT_MATRIX_LAYOUT_CREATE,
            7,
            0,
            rows,
            0,
            columns,
            0,
            rows,
            0,
        ]
    };
    let (adesc, bdesc, cdesc) = (layout(5, 7), layout(7, 6), layout(5, 6));
    let set = parts::CUBLAS_LT_MATMUL_DESC_SET_ATTRIBUTE;
    let description = [
        parts::CUBLAS_LT_MATMUL_DESC_CREATE,
        2,
        68,
        0,
        set,
        4,
        7,
        36,
        4,
        0,
        set,
        5,
        8,
        0x10_0000,
        0,
        8,
        0,
    ];
    [
        AnyCall::CublasGemmStridedBatchedEx(CublasGemmStridedBatchedEx {
            handle,
            transa,
            transb,
            m,
            n,
            k,
            alpha,
            a,
            atype,
            lda,
            stride_a,
            b,
            btype,
            ldb,
            stride_b,
            beta,
            c,
            ctype,
            ldc,
            stride_c,
            batch_count,
            compute_type,
            algo,
        }),
        AnyCall::CublasSgemvV2(CublasSgemvV2 {
            handle,
            trans: 1,
            m,
            n,
            alpha,
            a,
            lda,
            x: b,
            incx: -2,
            beta,
            y: c,
            incy: 3,
        }),
        AnyCall::CublasSdotV2(CublasSdotV2 {
            handle,
            n,
            x: a,
            incx: 2,
            y: b,
            incy: -1,
        }),
        AnyCall::CublasSgerV2(CublasSgerV2 {
            handle,
            m,
            n,
            alpha,
            x: a,
            incx: 1,
            y: b,
            incy: 2,
            a: c,
            lda,
        }),
        AnyCall::CublasLtMatmul(CublasLtMatmul {
            compute_desc: List::new(&description),
            alpha,
            a,
            adesc: List::new(&adesc),
            b,
            bdesc: List::new(&bdesc),
            beta,
            c,
            cdesc: List::new(&cdesc),
            d: c,
            ddesc: List::new(&cdesc),
            algo: None,
            workspace: SvmAddress::NULL,
            workspace_size_in_bytes: 0,
            stream: Handle::NULL,
        }),
    ]
    .iter()
    .map(encoded)
    .collect()
}

/// Of cuDNN.
fn networks() -> Vec<Vec<u8>> {
    let [x, w, y] = PLACES;
    let one = 1_f32.to_le_bytes();
    let (alpha, beta) = (List::new(&one[..]), List::new(&one[..]));
    let (handle, algo, work_space, work_space_size_in_bytes) = (CUDNN, 0, SvmAddress::NULL, 0);
    let tensors = [
        tensor([2, 4, 9, 8]),
        tensor([2, 6, 9, 8]),
        tensor([2, 4, 4, 4]),
        tensor([1, 4, 1, 1]),
    ];
    let [x_desc, y_desc, small, parameters] = [0, 1, 2, 3].map(|at| List::new(&tensors[at][..]));
    let filter = [parts::CUDNN_SET_FILTER_ND_DESCRIPTOR, 7, 0, 0, 4, 6, 2, 3, 3];
    let w_desc = List::new(&filter);
    let words = [
        parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR,
        9,
        2,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
        parts::CUDNN_SET_CONVOLUTION_GROUP_COUNT,
        1,
        2,
    ];
    let conv_desc = List::new(&words);
    let pooling = [parts::CUDNN_SET_POOLING2D_DESCRIPTOR, 8, 1, 0, 3, 2, 1, 0, 2, 2];
    let pooling_desc = List::new(&pooling);
    let activation = [parts::CUDNN_SET_ACTIVATION_DESCRIPTOR, 4, 4, 0, 0, 0x3ff0_0000];
    let (epsilon, factor) = (1e-3_f64.to_bits(), 0.5_f64.to_bits());
    [
        AnyCall::CudnnConvolutionForward(CudnnConvolutionForward {
            handle,
            alpha,
            x_desc,
            x,
            w_desc,
            w,
            conv_desc,
            algo,
            work_space,
            work_space_size_in_bytes,
            beta,
            y_desc,
            y,
        }),
        AnyCall::CudnnConvolutionBackwardData(CudnnConvolutionBackwardData {
            handle,
            alpha,
            w_desc,
            w,
            dy_desc: y_desc,
            dy: y,
            conv_desc,
            algo,
            work_space,
            work_space_size_in_bytes,
            beta,
            dx_desc: x_desc,
            dx: x,
        }),
        AnyCall::CudnnConvolutionBackwardFilter(CudnnConvolutionBackwardFilter {
            handle,
            alpha,
            x_desc,
            x,
            dy_desc: y_desc,
            dy: y,
            conv_desc,
            algo,
            work_space,
            work_space_size_in_bytes,
            beta,
            dw_desc: w_desc,
            dw: w,
        }),
        AnyCall::CudnnPoolingForward(CudnnPoolingForward {
            handle,
            pooling_desc,
            alpha,
            x_desc,
            x,
            beta,
            y_desc: small,
            y,
        }),
        AnyCall::CudnnPoolingBackward(CudnnPoolingBackward {
            handle,
            pooling_desc,
            alpha,
            y_desc: small,
            y,
            dy_desc: small,
            dy: y,
            x_desc,
            x,
            beta,
            dx_desc: x_desc,
            dx: w,
        }),
        AnyCall::CudnnActivationForward(CudnnActivationForward {
            handle,
            activation_desc: List::new(&activation),
            alpha,
            x_desc,
            x,
            beta,
            y_desc: x_desc,
            y,
        }),
        AnyCall::CudnnSoftmaxForward(CudnnSoftmaxForward {
            handle,
            algo: 2,
            mode: 1,
            alpha,
            x_desc,
            x,
            beta,
            y_desc: x_desc,
            y,
        }),
        AnyCall::CudnnAddTensor(CudnnAddTensor {
            handle,
            alpha,
            a_desc: parameters,
            a: w,
            beta,
            c_desc: x_desc,
            c: x,
        }),
        AnyCall::CudnnBatchNormalizationForwardTraining(CudnnBatchNormalizationForwardTraining {
            handle,
            mode: 1,
            alpha,
            beta,
            x_desc,
            x,
            y_desc: x_desc,
            y,
            bn_scale_bias_mean_var_desc: parameters,
            bn_scale: w,
            bn_bias: w,
            exponential_average_factor: factor,
            result_running_mean: w,
            result_running_variance: w,
            epsilon,
            result_save_mean: w,
            result_save_inv_variance: w,
        }),
        AnyCall::CudnnBatchNormalizationBackward(CudnnBatchNormalizationBackward {
            handle,
            mode: 1,
            alpha_data_diff: alpha,
            beta_data_diff: beta,
            alpha_param_diff: alpha,
            beta_param_diff: beta,
            x_desc,
            x,
            dy_desc: x_desc,
            dy: y,
            dx_desc: x_desc,
            dx: y,
            d_bn_scale_bias_desc: parameters,
            bn_scale: w,
            d_bn_scale_result: w,
            d_bn_bias_result: w,
            epsilon,
            saved_mean: w,
            saved_inv_variance: w,
        }),
    ]
    .iter()
    .map(encoded)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seeds reach what they are for: each succeeds on the back end that computes.
    #[test]
    fn valid_calls_are_computed() {
        let stop = AtomicBool::new(false);
        let seeds = valid();
        assert_eq!(seeds.len(), 19);
        for seed in seeds {
            let mut devices = Devices::new(&stop);
            let op = u16::from_le_bytes([seed[0], seed[1]]);
            let call = AnyCall::decode(op, &seed[4..], LIMITS).unwrap();
            let (state, host) = &mut devices.computes;
            assert_eq!(state.carry_out(&call, (host, &stop), None), Ok(()), "{call:?}");
        }
    }
}
