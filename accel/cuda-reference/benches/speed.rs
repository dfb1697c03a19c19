//! How fast products and convolutions are on one processor, as a client has them: with reading operands and writing results.
//!
//! `cargo bench -p basalt-accel-cuda-reference` prints, for each, the operations of floating point (a multiplication and an addition are
//! two) and how many of them were carried out in a second, in the fastest of several runs.

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use accel_cuda_null::Quota;
use accel_proto::cuda::{
    AnyCall, CublasCreateV2, CublasSgemmV2, CudaMalloc, CudnnConvolutionBackwardData, CudnnConvolutionBackwardFilter,
    CudnnConvolutionForward, CudnnCreate, parts,
};
use accel_proto::{Handle, List, SvmAddress};
use basalt_accel_cuda_reference::{Client, State};

/// How long each is repeated.
const TIME: Duration = Duration::from_millis(1500);

struct Host;

impl Quota for Host {
    fn charge(&mut self, _: u64) -> bool {
        true
    }

    fn give_back(&mut self, _: u64) {}
}

impl Client for Host {
    fn read(&mut self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&mut self, _: u64, _: &[u8]) -> bool {
        false
    }
}

const PLACES: [SvmAddress; 3] = [SvmAddress(1 << 32), SvmAddress(2 << 32), SvmAddress(3 << 32)];
const ONE: List<'static, u8> = List::new(&[0, 0, 0x80, 0x3f]);
const ZERO: List<'static, u8> = List::new(&[0; 4]);

struct Device {
    state: State,
    stop: AtomicBool,
}

impl Device {
    fn new() -> Self {
        let mut device = Self {
            state: State::new(1 << 32),
            stop: AtomicBool::new(false),
        };
        for place in PLACES {
            device.put(&AnyCall::CudaMalloc(CudaMalloc {
                dev_ptr: place.0,
                size: 64 << 20,
            }));
        }
        device.put(&AnyCall::CublasCreateV2(CublasCreateV2 {
            handle: Handle::from_raw(5000),
        }));
        device.put(&AnyCall::CudnnCreate(CudnnCreate {
            handle: Handle::from_raw(6000),
        }));
        device
    }

    fn put(&mut self, call: &AnyCall<'_>) {
        let done = self.state.carry_out(call, (&mut Host, &self.stop), None);
        assert_eq!(done, Ok(()));
    }

    /// Prints how fast a call of so many operations is.
    fn measure(&mut self, name: &str, operations: f64, call: &AnyCall<'_>) {
        let (begun, mut fastest) = (Instant::now(), Duration::MAX);
        while begun.elapsed() < TIME {
            let one = Instant::now();
            self.put(call);
            fastest = fastest.min(one.elapsed());
        }
        let rate = operations / fastest.as_secs_f64() / 1e9;
        println!(
            "{name:36} {:8.1} million operations {rate:8.2} GFLOP/s",
            operations / 1e6
        );
    }
}

fn product(device: &mut Device, size: i32) {
    let [a, b, c] = PLACES;
    let call = CublasSgemmV2 {
        handle: Handle::from_raw(5000),
        transa: 0,
        transb: 0,
        m: size,
        n: size,
        k: size,
        alpha: ONE,
        a,
        lda: size,
        b,
        ldb: size,
        beta: ZERO,
        c,
        ldc: size,
    };
    let operations = 2.0 * f64::from(size).powi(3);
    device.measure(
        &format!("sgemm {size} x {size} x {size}"),
        operations,
        &AnyCall::CublasSgemmV2(call),
    );
}

fn tensor(dims: [i32; 4]) -> Vec<i32> {
    let [_, c, h, w] = dims;
    let mut words = vec![parts::CUDNN_SET_TENSOR_ND_DESCRIPTOR, 10, 0, 4];
    words.extend(dims);
    words.extend([c * h * w, h * w, w, 1]);
    words
}

/// A convolution of a batch, in all three directions; the filter is square, and so are images.
fn convolution(device: &mut Device, name: &str, [images, inputs, size, outputs, filter, pad]: [i32; 6]) {
    let [x, w, y] = PLACES;
    let result = size + 2 * pad - filter + 1;
    let (x_words, y_words) = (
        tensor([images, inputs, size, size]),
        tensor([images, outputs, result, result]),
    );
    let w_words = [
        parts::CUDNN_SET_FILTER_ND_DESCRIPTOR,
        7,
        0,
        0,
        4,
        outputs,
        inputs,
        filter,
        filter,
    ];
    let words = [
        parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR,
        9,
        2,
        pad,
        pad,
        1,
        1,
        1,
        1,
        1,
        0,
    ];
    let (x_desc, y_desc) = (List::new(&x_words[..]), List::new(&y_words[..]));
    let (w_desc, conv_desc) = (List::new(&w_words[..]), List::new(&words[..]));
    let (handle, alpha, beta) = (Handle::from_raw(6000), ONE, ZERO);
    let (algo, work_space, work_space_size_in_bytes) = (0, SvmAddress::NULL, 0);
    let sizes = [images, outputs, result, result, inputs, filter, filter];
    let operations = 2.0 * sizes.into_iter().map(f64::from).product::<f64>();
    let forward = AnyCall::CudnnConvolutionForward(CudnnConvolutionForward {
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
    });
    let data = AnyCall::CudnnConvolutionBackwardData(CudnnConvolutionBackwardData {
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
    });
    let weights = AnyCall::CudnnConvolutionBackwardFilter(CudnnConvolutionBackwardFilter {
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
    });
    for (way, call) in [
        ("forward", forward),
        ("backward, data", data),
        ("backward, filter", weights),
    ] {
        device.measure(&format!("{name}, {way}"), operations, &call);
    }
}

fn main() {
    let mut device = Device::new();
    for size in [64, 256, 1024] {
        product(&mut device, size);
    }
    convolution(&mut device, "LeNet's second", [8, 6, 14, 16, 5, 0]);
    convolution(&mut device, "AlexNet's second", [8, 64, 27, 192, 5, 2]);
}
