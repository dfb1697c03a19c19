//! Modules of PTX that nvcc made (`accel/ptx/tests`), as programs hand them over: variables, pieces of a fat binary, kernels, launches.

use std::ffi::CString;
use std::sync::atomic::Ordering;
use std::time::Duration;

use accel_proto::cuda::*;
use accel_proto::{Handle, List, Span, SvmAddress};
use basalt_accel_cuda_reference::Error;

use crate::device::{Device, Random, int};

const BASICS: &str = include_str!("../../../ptx/tests/ptx/basics.ptx");
pub(crate) const LANGUAGE: &str = include_str!("../../../ptx/tests/ptx/language.ptx");

const MODULE: Handle<CudaModuleT> = Handle::from_raw(9000);

/// A fat binary of these texts, not compressed, each for a compute capability.
pub(crate) fn container(texts: &[(u32, &str)]) -> Vec<u8> {
    let mut entries = Vec::new();
    for (target, text) in texts {
        let mut entry = vec![0; 64];
        entry[0] = 1;
        entry[4] = 64;
        entry[8..16].copy_from_slice(&(text.len() as u64).to_le_bytes());
        entry[28..32].copy_from_slice(&target.to_le_bytes());
        entries.extend(entry);
        entries.extend(text.as_bytes());
    }
    let mut whole = 0xba55_ed50_u32.to_le_bytes().to_vec();
    whole.extend([1, 0, 16, 0]);
    whole.extend((entries.len() as u64).to_le_bytes());
    whole.extend(entries);
    whole
}

pub(crate) fn load(device: &mut Device) {
    device
        .put(&AnyCall::BasaltModuleLoad(BasaltModuleLoad {
            module: MODULE,
            index: 0,
        }))
        .unwrap();
}

pub(crate) fn variable(device: &mut Device, name: &str, address: u64, size: u64) -> Result<(), Error> {
    let name = CString::new(name).unwrap();
    let module = MODULE;
    device.put(&AnyCall::BasaltModuleVariable(BasaltModuleVariable {
        module,
        name: &name,
        address,
        size,
    }))
}

/// A piece of a module, by way of the arena.
pub(crate) fn piece(device: &mut Device, offset: usize, total: usize, bytes: &[u8]) -> Result<(), Error> {
    device.host.arena[64..64 + bytes.len()].copy_from_slice(bytes);
    let count = bytes.len() as u64;
    device.put(&AnyCall::BasaltModuleData(BasaltModuleData {
        module: MODULE,
        offset: offset as u64,
        total: total as u64,
        count,
        bytes: Span {
            offset: 64,
            length: count,
        },
    }))
}

pub(crate) fn send(device: &mut Device, bytes: &[u8]) {
    for (index, part) in bytes.chunks(100_000).enumerate() {
        piece(device, index * 100_000, bytes.len(), part).unwrap();
    }
}

/// What is answered about a kernel: the code, the size of all parameters, and where they are.
pub(crate) fn function(device: &mut Device, kernel: u32, name: &str, most: u32) -> (i32, u32, u32, Vec<(u32, u32)>) {
    let text = CString::new(name).unwrap();
    let call = AnyCall::BasaltModuleGetFunction(BasaltModuleGetFunction {
        kernel: Handle::from_raw(kernel),
        module: MODULE,
        name: &text,
        most,
        reply: Span { offset: 0, length: 0 },
    });
    device.ask(&call, |reply| match reply {
        AnyReply::BasaltModuleGetFunction(reply) => {
            let places = reply.offsets.iter().zip(reply.sizes.iter()).collect();
            (reply.status, reply.count, reply.size, places)
        }
        other => panic!("{other:?}"),
    })
}

fn launch_call<'a>(kernel: u32, dims: &'a [[u8; 12]; 2], args: &'a [u8]) -> AnyCall<'a> {
    AnyCall::CudaLaunchKernel(CudaLaunchKernel {
        kernel: Handle::from_raw(kernel),
        grid_dim: List::new(&dims[0]),
        block_dim: List::new(&dims[1]),
        args: List::new(args),
        shared_mem: 0,
        stream: Handle::NULL,
    })
}

fn dims(grid: u32, block: u32) -> [[u8; 12]; 2] {
    [grid, block].map(|size| {
        let mut bytes = [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0];
        bytes[..4].copy_from_slice(&size.to_le_bytes());
        bytes
    })
}

pub(crate) fn launch(device: &mut Device, kernel: u32, (grid, block): (u32, u32), args: &[u8]) -> Result<(), Error> {
    device.put(&launch_call(kernel, &dims(grid, block), args))
}

/// Numbers of four bytes, then addresses.
pub(crate) fn args(numbers: &[i32], addresses: &[SvmAddress]) -> Vec<u8> {
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes.extend(addresses.iter().flat_map(|address| address.0.to_le_bytes()));
    bytes
}

#[test]
fn kernels_are_found_described_and_compute() {
    let mut device = Device::new();
    load(&mut device);
    let bytes = container(&[(75, BASICS)]);
    send(&mut device, &bytes);
    assert_eq!(function(&mut device, 9100, &"x".repeat(5000), 1).0, 2);
    // int, float, two pointers.
    let wanted = (0, 4, 24, vec![(0, 4), (4, 4), (8, 8), (16, 8)]);
    assert_eq!(function(&mut device, 9100, "saxpy", 4096), wanted);
    assert_eq!(function(&mut device, 9101, "saxpy", 1), (0, 4, 24, vec![(0, 4)]));
    let (x, y): (Vec<f32>, Vec<f32>) = (0..1000_u16).map(|at| (f32::from(at), f32::from(at) / 4.0)).unzip();
    let [x_at, y_at] = [&x, &y].map(|values| device.upload(values));
    let parameters = args(&[1000, 2.5_f32.to_bits().cast_signed()], &[x_at, y_at]);
    launch(&mut device, 9100, (8, 128), &parameters).unwrap();
    let wanted: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 2.5 * x + y).collect();
    assert_eq!(device.download::<f32>(y_at, 1000), wanted);
    // Sums by shuffles, and a product by tiles.
    assert_eq!(function(&mut device, 9102, "reduce_shuffle", 8).0, 0);
    let sums = device.upload(&[0_f32; 2]);
    launch(&mut device, 9102, (2, 96), &args(&[1000], &[x_at, sums])).unwrap();
    assert_eq!(device.download::<f32>(sums, 2).iter().sum::<f32>(), 499_500.0);
    assert_eq!(function(&mut device, 9103, "gemm_tiled", 8).0, 0);
    let random = &mut Random(51);
    let [m, n, k] = [20, 17, 33];
    let (a, b) = (random.numbers(m * k), random.numbers(k * n));
    let single = |values: &[f64]| {
        values
            .iter()
            .map(|value| format!("{value}").parse().unwrap())
            .collect::<Vec<f32>>()
    };
    let [a_at, b_at] = [&a, &b].map(|values| device.upload(&single(values)));
    let c_at = device.upload(&vec![0_f32; m * n]);
    let parameters = args(&[int(m), int(n), int(k)], &[a_at, b_at, c_at]);
    let mut two = dims(2, 16);
    two[0][4] = 2;
    two[1][4] = 16;
    device.put(&launch_call(9103, &two, &parameters)).unwrap();
    for (at, computed) in device.download::<f32>(c_at, m * n).into_iter().enumerate() {
        let wanted: f64 = (0..k).map(|inner| a[at / n * k + inner] * b[inner * n + at % n]).sum();
        assert!((f64::from(computed) - wanted).abs() < 1e-4, "{at}");
    }
    let attributes = AnyCall::CudaFuncGetAttributes(CudaFuncGetAttributes {
        func: Handle::from_raw(9103),
        reply: Span { offset: 0, length: 0 },
    });
    let numbers = device.ask(&attributes, |reply| match reply {
        AnyReply::CudaFuncGetAttributes(reply) => {
            let bytes = reply.attr.bytes();
            [0, 24, 36, 44].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()))
        }
        other => panic!("{other:?}"),
    });
    // Two tiles of 16 x 16 floats; threads of a block, target, and what is left of 48 KiB.
    assert_eq!(numbers, [2048, 1024, 80, 46 << 10]);
}

#[test]
fn variables_are_where_the_program_says_and_others_have_places_too() {
    let mut device = Device::new();
    load(&mut device);
    let (table, counter) = (0x7100_0000_0000, 0x7100_0000_1000);
    variable(&mut device, "table", table, 16).unwrap();
    variable(&mut device, "counter", counter, 4).unwrap();
    variable(&mut device, "not_in_ptx", 0x7100_0000_2000, 4).unwrap();
    assert_eq!(
        variable(&mut device, "table", 0x7200_0000_0000, 16).unwrap_err().code(),
        1
    );
    assert_eq!(
        variable(&mut device, "other", counter, 4).unwrap_err().code(),
        1,
        "it is taken"
    );
    assert_eq!([device.synchronize(), device.synchronize()], [1, 0]);
    let long = "x".repeat(5000);
    let error = variable(&mut device, &long, 0x7300_0000_0000, 4).unwrap_err();
    assert_eq!(
        (error.code(), device.synchronize()),
        (2, 2),
        "a name that is longer than any"
    );
    send(&mut device, &container(&[(75, LANGUAGE)]));
    let ask = |device: &mut Device, name: &str| {
        let name = CString::new(name).unwrap();
        let call = AnyCall::BasaltModuleGetVariable(BasaltModuleGetVariable {
            module: MODULE,
            name: &name,
        });
        device.ask(&call, |reply| match reply {
            AnyReply::BasaltModuleGetVariable(reply) => (reply.status, reply.address, reply.size),
            other => panic!("{other:?}"),
        })
    };
    assert_eq!(ask(&mut device, "counter"), (0, counter, 4));
    assert_eq!(ask(&mut device, "not_in_ptx").0, 13);
    assert_eq!(ask(&mut device, "chosen").0, 13, "the program has not told of it");
    assert_eq!(function(&mut device, 9100, "variables", 8).0, 0);
    let out = device.upload(&[0_f32; 8]);
    launch(&mut device, 9100, (1, 8), &args(&[], &[out])).unwrap();
    // What the variables begin with: table[i & 3] + chosen[3], and chosen points to the table.
    assert_eq!(device.download::<f32>(out, 4), [9.5, 6.0, 8.25, 16.0]);
    assert_eq!(device.download::<i32>(SvmAddress(counter), 1), [5 + 16]);
    // As cudaMemcpyToSymbol.
    let numbers = device.upload(&[0_f32, 1.0, 2.0, 3.0]);
    let call = crate::device::copy(
        accel_proto::Memory::Svm(SvmAddress(table)),
        accel_proto::Memory::Svm(numbers),
        16,
    );
    device.put(&call).unwrap();
    launch(&mut device, 9100, (1, 8), &args(&[], &[out])).unwrap();
    assert_eq!(device.download::<f32>(out, 4), [3.0, 4.0, 5.0, 6.0]);
}

#[test]
fn a_module_without_what_can_run_says_so_and_again() {
    let bad = "not PTX at all";
    for (bytes, code) in [
        (container(&[]), 209),
        (container(&[(75, bad)]), 218),
        (b"no fat binary, but long enough for one".to_vec(), 200),
    ] {
        let mut device = Device::new();
        load(&mut device);
        assert_eq!(function(&mut device, 9100, "saxpy", 8).0, 200, "nothing has come");
        send(&mut device, &bytes);
        assert_eq!(function(&mut device, 9100, "saxpy", 8).0, code);
        assert_eq!(
            function(&mut device, 9100, "saxpy", 8).0,
            code,
            "the name is free, and the answer the same"
        );
        assert_eq!(device.synchronize(), 0, "whoever asked was told");
    }
    // The newest text that can be read is taken.
    let mut device = Device::new();
    load(&mut device);
    send(&mut device, &container(&[(75, BASICS), (90, bad)]));
    assert_eq!(function(&mut device, 9100, "none", 8).0, 98);
    assert_eq!(function(&mut device, 9100, "saxpy", 8).0, 0);
}

#[test]
fn pieces_that_are_not_the_next_ones_are_refused() {
    let bytes = container(&[(75, BASICS)]);
    let total = bytes.len();
    let mut device = Device::new();
    load(&mut device);
    assert_eq!(
        piece(&mut device, 10, total, &bytes[10..20]).unwrap_err().code(),
        1,
        "not the first"
    );
    assert_eq!(
        piece(&mut device, 0, 5, &bytes[..10]).unwrap_err().code(),
        1,
        "longer than all"
    );
    piece(&mut device, 0, total, &bytes[..1000]).unwrap();
    assert_eq!(
        piece(&mut device, 0, total, &bytes[..1000]).unwrap_err().code(),
        1,
        "again"
    );
    assert_eq!(
        piece(&mut device, 1000, total + 1, &bytes[1000..2000])
            .unwrap_err()
            .code(),
        1,
        "of another length"
    );
    assert_eq!(function(&mut device, 9100, "saxpy", 8).0, 200, "it is not whole");
    piece(&mut device, 1000, total, &bytes[1000..]).unwrap();
    assert_eq!(function(&mut device, 9100, "saxpy", 8).0, 0);
    assert_eq!(
        piece(&mut device, total, total, &[]).unwrap_err().code(),
        1,
        "it has been read"
    );
    // A module takes of the quota, and one that is longer than all that there is is not waited for.
    let mut device = Device::with(64 << 20, 100_000);
    load(&mut device);
    assert_eq!(
        piece(&mut device, 0, total.max(100_001), &bytes[..1000])
            .unwrap_err()
            .code(),
        2
    );
    assert_eq!(piece(&mut device, 0, usize::MAX, &bytes[..1000]).unwrap_err().code(), 1);
    assert_eq!(device.host.left, 100_000);
}

#[test]
fn what_a_kernel_does_wrong_is_told_by_every_later_call() {
    for (name, code) in [("misaligned", 716), ("traps", 719), ("overflow", 714)] {
        let mut device = Device::new();
        load(&mut device);
        send(&mut device, &container(&[(75, LANGUAGE)]));
        assert_eq!(function(&mut device, 9100, name, 8).0, 0);
        let x = device.upload(&[3_i32; 64]);
        let free = device.upload(&[1_i32; 64]);
        // What was asked for wrongly is told once.
        assert_eq!(
            launch(&mut device, 9100, (1, 2048), &args(&[], &[x]))
                .unwrap_err()
                .code(),
            9
        );
        assert_eq!([device.synchronize(), device.synchronize()], [9, 0]);
        assert_eq!(launch(&mut device, 9100, (1, 1), &[0; 3]).unwrap_err().code(), 9);
        assert_eq!([device.synchronize(), device.synchronize()], [9, 0]);
        assert_eq!(
            launch(&mut device, 9100, (1, 32), &args(&[], &[x])).unwrap_err().code(),
            code,
            "{name}"
        );
        assert_eq!([device.synchronize(), device.synchronize()], [code, code]);
        let used = device.state.used();
        let call = AnyCall::CudaMalloc(CudaMalloc {
            dev_ptr: 0x1000,
            size: 64,
        });
        device.put(&call).unwrap();
        assert_eq!(
            (device.state.used(), device.status(&call)),
            (used, code),
            "nothing more is carried out"
        );
        device.free(free);
        assert_eq!(device.state.used(), used - 256, "but what is given back");
        assert_eq!(device.synchronize(), code);
    }
    let mut device = Device::new();
    load(&mut device);
    send(&mut device, &container(&[(75, BASICS)]));
    assert_eq!(function(&mut device, 9100, "saxpy", 8).0, 0);
    let x = device.upload(&[0_f32; 4]);
    let error = launch(&mut device, 9100, (1, 32), &args(&[5, 0], &[x, x])).unwrap_err();
    assert_eq!(error.code(), 700);
    assert!(error.to_string().contains("illegal address"), "{error}");
    assert_eq!(launch(&mut Device::new(), 9100, (1, 32), &[]).unwrap_err().code(), 400);
}

#[test]
fn a_client_that_is_gone_stops_its_kernel() {
    let mut device = Device::new();
    load(&mut device);
    send(&mut device, &container(&[(75, LANGUAGE)]));
    assert_eq!(function(&mut device, 9100, "endless_loop", 8).0, 0);
    let x = device.upload(&[0_i32]);
    let parameters = args(&[], &[x]);
    let dims = dims(1, 64);
    let Device { state, host, stop, .. } = &mut device;
    let stop = &*stop;
    let done = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            stop.store(true, Ordering::Relaxed);
        });
        state.carry_out(&launch_call(9100, &dims, &parameters), (host, stop), None)
    });
    assert_eq!(done, Err(Error::Launch(accel_ptx::LaunchError::Stopped)));
}
