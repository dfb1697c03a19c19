//! A call of each kind that computes, with operands that are there. Knows not how calls are carried out.

use accel_proto::cuda::*;
use accel_proto::{Handle, List, Memory, Span, SvmAddress};

use super::{CUBLAS, CUDNN, GENERATOR, KERNEL, PLACES, encoded};

/// The number one, as scalars are.
const ONE: List<'static, u8> = List::new(&[0, 0, 0x80, 0x3f]);
const X: SvmAddress = PLACES[0];
const W: SvmAddress = PLACES[1];
const Y: SvmAddress = PLACES[2];

/// Descriptors as clients' libraries have them: of tensors, a filter and a convolution.
const TENSOR: i32 = parts::CUDNN_SET_TENSOR_ND_DESCRIPTOR;
const INPUT: List<'static, i32> = List::new(&[TENSOR, 10, 0, 4, 2, 4, 9, 8, 288, 72, 8, 1]);
const OUTPUT: List<'static, i32> = List::new(&[TENSOR, 10, 0, 4, 2, 6, 9, 8, 432, 72, 8, 1]);
const POOLED: List<'static, i32> = List::new(&[TENSOR, 10, 0, 4, 2, 4, 5, 4, 80, 20, 4, 1]);
const CHANNELS: List<'static, i32> = List::new(&[TENSOR, 10, 0, 4, 1, 4, 1, 1, 4, 1, 1, 1]);
const FILTER: List<'static, i32> = List::new(&[parts::CUDNN_SET_FILTER_ND_DESCRIPTOR, 7, 0, 0, 4, 6, 2, 3, 3]);
const CONVOLUTION: List<'static, i32> = List::new(&[
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
]);
const POOLING: List<'static, i32> = List::new(&[parts::CUDNN_SET_POOLING2D_DESCRIPTOR, 8, 1, 0, 3, 2, 1, 0, 2, 2]);
const ELU: List<'static, i32> = List::new(&[parts::CUDNN_SET_ACTIVATION_DESCRIPTOR, 4, 4, 0, 0, 0x3ff0_0000]);
const EPSILON: u64 = 0x3f50_624d_d2f1_a9fc;

/// All of them, encoded.
pub(super) fn valid() -> Vec<Vec<u8>> {
    let saxpy = [
        &[100, 0, 0, 0, 0, 0, 0x80, 0x3f][..],
        &X.0.to_le_bytes(),
        &W.0.to_le_bytes(),
    ]
    .concat();
    let launch = AnyCall::CudaLaunchKernel(CudaLaunchKernel {
        kernel: KERNEL,
        grid_dim: List::new(&[4, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
        block_dim: List::new(&[32, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
        args: List::new(&saxpy),
        shared_mem: 0,
        stream: Handle::NULL,
    });
    let mut all = vec![encoded(&launch), matmul()];
    for calls in [products(), convolutions(), layers(), normalizations(), others()] {
        all.extend(calls.iter().map(encoded));
    }
    all
}

/// Rows and random numbers.
fn others() -> Vec<AnyCall<'static>> {
    vec![
        AnyCall::CudaMemcpy2DAsync(CudaMemcpy2DAsync {
            dst: Memory::Svm(X),
            dpitch: 40,
            src: Memory::Arena(Span { offset: 0, length: 200 }),
            spitch: 0,
            width: 20,
            height: 10,
            kind: 1,
            stream: Handle::NULL,
        }),
        AnyCall::CurandGenerateNormal(CurandGenerateNormal {
            generator: GENERATOR,
            output_ptr: X,
            num: 100,
            mean: 0,
            stddev: 1_f32.to_bits(),
        }),
        AnyCall::CurandGeneratePoisson(CurandGeneratePoisson {
            generator: GENERATOR,
            output_ptr: X,
            num: 100,
            lambda: 20_f64.to_bits(),
        }),
    ]
}

/// Of cuBLAS.
fn products() -> Vec<AnyCall<'static>> {
    vec![
        AnyCall::CublasGemmStridedBatchedEx(CublasGemmStridedBatchedEx {
            handle: CUBLAS,
            transa: 1,
            transb: 0,
            m: 5,
            n: 6,
            k: 7,
            alpha: ONE,
            a: X,
            atype: 2,
            lda: 8,
            stride_a: 64,
            b: W,
            btype: 2,
            ldb: 9,
            stride_b: 64,
            beta: ONE,
            c: Y,
            ctype: 0,
            ldc: 10,
            stride_c: 64,
            batch_count: 3,
            compute_type: 68,
            algo: -1,
        }),
        AnyCall::CublasSgemvV2(CublasSgemvV2 {
            handle: CUBLAS,
            trans: 1,
            m: 5,
            n: 6,
            alpha: ONE,
            a: X,
            lda: 8,
            x: W,
            incx: -2,
            beta: ONE,
            y: Y,
            incy: 3,
        }),
        AnyCall::CublasSdotV2(CublasSdotV2 {
            handle: CUBLAS,
            n: 6,
            x: X,
            incx: 2,
            y: W,
            incy: -1,
        }),
        AnyCall::CublasSgerV2(CublasSgerV2 {
            handle: CUBLAS,
            m: 5,
            n: 6,
            alpha: ONE,
            x: X,
            incx: 1,
            y: W,
            incy: 2,
            a: Y,
            lda: 8,
        }),
    ]
}

/// Of cublasLt, with an epilogue.
fn matmul() -> Vec<u8> {
    let layout = |rows, columns| {
        let create = parts::CUBLAS_LT_MATRIX_LAYOUT_CREATE;
        [create, 7, 0, rows, 0, columns, 0, rows, 0]
    };
    let (adesc, bdesc, cdesc) = (layout(5, 7), layout(7, 6), layout(5, 6));
    let (create, set) = (
        parts::CUBLAS_LT_MATMUL_DESC_CREATE,
        parts::CUBLAS_LT_MATMUL_DESC_SET_ATTRIBUTE,
    );
    let description = [
        &[create, 2, 68, 0][..],
        &[set, 4, 7, 36, 4, 0],
        &[set, 5, 8, 0x10_0000, 0, 8, 0],
    ]
    .concat();
    encoded(&AnyCall::CublasLtMatmul(CublasLtMatmul {
        compute_desc: List::new(&description),
        alpha: ONE,
        a: X,
        adesc: List::new(&adesc),
        b: W,
        bdesc: List::new(&bdesc),
        beta: ONE,
        c: Y,
        cdesc: List::new(&cdesc),
        d: Y,
        ddesc: List::new(&cdesc),
        algo: None,
        workspace: SvmAddress::NULL,
        workspace_size_in_bytes: 0,
        stream: Handle::NULL,
    }))
}

/// Of cuDNN, in all three directions.
fn convolutions() -> Vec<AnyCall<'static>> {
    vec![
        AnyCall::CudnnConvolutionForward(CudnnConvolutionForward {
            handle: CUDNN,
            alpha: ONE,
            x_desc: INPUT,
            x: X,
            w_desc: FILTER,
            w: W,
            conv_desc: CONVOLUTION,
            algo: 0,
            work_space: SvmAddress::NULL,
            work_space_size_in_bytes: 0,
            beta: ONE,
            y_desc: OUTPUT,
            y: Y,
        }),
        AnyCall::CudnnConvolutionBackwardData(CudnnConvolutionBackwardData {
            handle: CUDNN,
            alpha: ONE,
            w_desc: FILTER,
            w: W,
            dy_desc: OUTPUT,
            dy: Y,
            conv_desc: CONVOLUTION,
            algo: 0,
            work_space: SvmAddress::NULL,
            work_space_size_in_bytes: 0,
            beta: ONE,
            dx_desc: INPUT,
            dx: X,
        }),
        AnyCall::CudnnConvolutionBackwardFilter(CudnnConvolutionBackwardFilter {
            handle: CUDNN,
            alpha: ONE,
            x_desc: INPUT,
            x: X,
            dy_desc: OUTPUT,
            dy: Y,
            conv_desc: CONVOLUTION,
            algo: 0,
            work_space: SvmAddress::NULL,
            work_space_size_in_bytes: 0,
            beta: ONE,
            dw_desc: FILTER,
            dw: W,
        }),
    ]
}

/// Pooling and what works on each element.
fn layers() -> Vec<AnyCall<'static>> {
    vec![
        AnyCall::CudnnPoolingForward(CudnnPoolingForward {
            handle: CUDNN,
            pooling_desc: POOLING,
            alpha: ONE,
            x_desc: INPUT,
            x: X,
            beta: ONE,
            y_desc: POOLED,
            y: Y,
        }),
        AnyCall::CudnnPoolingBackward(CudnnPoolingBackward {
            handle: CUDNN,
            pooling_desc: POOLING,
            alpha: ONE,
            y_desc: POOLED,
            y: Y,
            dy_desc: POOLED,
            dy: Y,
            x_desc: INPUT,
            x: X,
            beta: ONE,
            dx_desc: INPUT,
            dx: W,
        }),
        AnyCall::CudnnActivationForward(CudnnActivationForward {
            handle: CUDNN,
            activation_desc: ELU,
            alpha: ONE,
            x_desc: INPUT,
            x: X,
            beta: ONE,
            y_desc: INPUT,
            y: Y,
        }),
        AnyCall::CudnnSoftmaxForward(CudnnSoftmaxForward {
            handle: CUDNN,
            algo: 2,
            mode: 1,
            alpha: ONE,
            x_desc: INPUT,
            x: X,
            beta: ONE,
            y_desc: INPUT,
            y: Y,
        }),
        AnyCall::CudnnAddTensor(CudnnAddTensor {
            handle: CUDNN,
            alpha: ONE,
            a_desc: CHANNELS,
            a: W,
            beta: ONE,
            c_desc: INPUT,
            c: X,
        }),
    ]
}

/// Batch normalization, in both directions.
fn normalizations() -> Vec<AnyCall<'static>> {
    vec![
        AnyCall::CudnnBatchNormalizationForwardTraining(CudnnBatchNormalizationForwardTraining {
            handle: CUDNN,
            mode: 1,
            alpha: ONE,
            beta: ONE,
            x_desc: INPUT,
            x: X,
            y_desc: INPUT,
            y: Y,
            bn_scale_bias_mean_var_desc: CHANNELS,
            bn_scale: W,
            bn_bias: W,
            exponential_average_factor: 0.5_f64.to_bits(),
            result_running_mean: W,
            result_running_variance: W,
            epsilon: EPSILON,
            result_save_mean: W,
            result_save_inv_variance: W,
        }),
        AnyCall::CudnnBatchNormalizationBackward(CudnnBatchNormalizationBackward {
            handle: CUDNN,
            mode: 1,
            alpha_data_diff: ONE,
            beta_data_diff: ONE,
            alpha_param_diff: ONE,
            beta_param_diff: ONE,
            x_desc: INPUT,
            x: X,
            dy_desc: INPUT,
            dy: Y,
            dx_desc: INPUT,
            dx: Y,
            d_bn_scale_bias_desc: CHANNELS,
            bn_scale: W,
            d_bn_scale_result: W,
            d_bn_bias_result: W,
            epsilon: EPSILON,
            saved_mean: W,
            saved_inv_variance: W,
        }),
    ]
}
