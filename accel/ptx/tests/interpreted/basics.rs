//! Elementwise kernels, reductions, scan, histogram, softmax, matrix product, and what warps and blocks do together.

use crate::device::{Args, Device, Random, close};

fn device() -> Device {
    Device::new(include_str!("../ptx/basics.ptx"))
}

#[test]
fn saxpy_is_exact_and_leaves_what_is_beyond() {
    let mut device = device();
    let mut random = Random(1);
    let (x, mut y) = (random.reals(1000), random.reals(1024));
    let (dx, dy) = (device.upload(&x), device.upload(&y));
    let args = Args::new().int(1000).float(2.5).pointer(dx).pointer(dy);
    device.run("saxpy", 4, 256, &args);
    for (y, x) in y.iter_mut().zip(&x) {
        *y = 2.5f32.mul_add(*x, *y);
    }
    assert_eq!(device.download::<f32>(dy, 1024), y);
}

#[test]
fn sums_by_shuffles_are_the_sum() {
    let mut device = device();
    let x = Random(2).reals(5000);
    let (dx, sums) = (device.upload(&x), device.upload(&[0f32; 3]));
    device.run(
        "reduce_shuffle",
        3,
        224,
        &Args::new().int(5000).pointer(dx).pointer(sums),
    );
    let found: f32 = device.download::<f32>(sums, 3).iter().sum();
    close(&[found], &[x.iter().sum()]);
}

#[test]
fn atomic_reductions_of_all_types_are_exact() {
    let mut device = device();
    let mut random = Random(3);
    let x: Vec<i32> = (0..700).map(|_| random.below(1999) - 999).collect();
    let dx = device.upload(&x);
    let ints = device.upload(&[0i32, i32::MAX, i32::MIN]);
    let (wide, real, twice) = (device.upload(&[0u64]), device.upload(&[0f32]), device.upload(&[0f64]));
    let args = Args::new()
        .int(700)
        .pointer(dx)
        .pointer(ints)
        .pointer(ints + 4)
        .pointer(ints + 8);
    device.run(
        "reduce_atomic",
        6,
        128,
        &args.pointer(wide).pointer(real).pointer(twice),
    );
    let sum: i32 = x.iter().sum();
    let (least, most) = (*x.iter().min().unwrap(), *x.iter().max().unwrap());
    assert_eq!(device.download::<i32>(ints, 3), [sum, least, most]);
    assert_eq!(device.download::<u64>(wide, 1), [u64::try_from(sum + 700_000).unwrap()]);
    close(&device.download::<f32>(real, 1), &[x.iter().map(|&x| x as f32).sum()]);
    assert_eq!(device.download::<f64>(twice, 1), [f64::from(sum)]);
}

#[test]
fn atomic_bits_exchanges_and_a_lock_within_a_warp() {
    let mut device = device();
    let words = device.upload(
        &[u32::MAX, 0, 0, 0, 0, 77, 0, 0]
            .into_iter()
            .chain([0; 48])
            .collect::<Vec<u32>>(),
    );
    let count = device.upload(&[0u32]);
    device.run("atomics", 1, 48, &Args::new().pointer(words).pointer(count));
    let found = device.download::<u32>(words, 56);
    assert_eq!(found[..3], [0, u32::MAX, (0..48).fold(0, |all, i| all ^ i)]);
    // 48 steps of counters that wrap after 6: up from 0, down from 0.
    assert_eq!(found[3..5], [48 % 7, 7 - 48 % 7]);
    let mut exchanged: Vec<u32> = found[8..].iter().copied().chain([found[5]]).collect();
    exchanged.sort_unstable();
    let mut wanted: Vec<u32> = (0..48).chain([77]).collect();
    wanted.sort_unstable();
    assert_eq!(exchanged, wanted);
    assert_eq!(device.download::<u32>(count, 1), [48]);
}

#[test]
fn a_tiled_matrix_product_is_the_product() {
    let mut device = device();
    let mut random = Random(4);
    let (m, n, k) = (37, 29, 50);
    let (a, b) = (random.reals(m * k), random.reals(k * n));
    let (da, db, dc) = (device.upload(&a), device.upload(&b), device.upload(&vec![0f32; m * n]));
    let args = Args::new().int(m).int(n).int(k).pointer(da).pointer(db).pointer(dc);
    device.try_run("gemm_tiled", ([2, 3], [16, 16]), 0, &args).unwrap();
    let mut wanted = vec![0f32; m * n];
    for (index, wanted) in wanted.iter_mut().enumerate() {
        *wanted = (0..k).map(|i| a[index / n * k + i] * b[i * n + index % n]).sum();
    }
    close(&device.download(dc, m * n), &wanted);
}

#[test]
fn softmax_in_dynamic_shared_memory() {
    let mut device = device();
    let x: Vec<f32> = Random(5).reals(3 * 100).iter().map(|x| x * 6.0).collect();
    let (dx, dy) = (device.upload(&x), device.upload(&[0f32; 300]));
    let args = Args::new().int(100).pointer(dx).pointer(dy);
    device.try_run("softmax", ([3, 1], [64, 1]), 64 * 4, &args).unwrap();
    let mut wanted = Vec::new();
    for row in x.chunks_exact(100) {
        let sum: f32 = row.iter().map(|x| x.exp()).sum();
        wanted.extend(row.iter().map(|x| x.exp() / sum));
    }
    close(&device.download(dy, 300), &wanted);
}

#[test]
fn a_scan_is_exact() {
    let mut device = device();
    let mut random = Random(6);
    let x: Vec<i32> = (0..200).map(|_| random.below(100)).collect();
    let (dx, dy) = (device.upload(&x), device.upload(&[0i32; 200]));
    let args = Args::new().int(200).pointer(dx).pointer(dy);
    device.try_run("scan", ([1, 1], [256, 1]), 256 * 4, &args).unwrap();
    let mut sum = 0;
    let wanted: Vec<i32> = x
        .iter()
        .map(|x| {
            sum += x;
            sum
        })
        .collect();
    assert_eq!(device.download::<i32>(dy, 200), wanted);
}

#[test]
fn a_histogram_is_exact() {
    let mut device = device();
    let mut random = Random(7);
    let x: Vec<u8> = (0..3000).map(|_| u8::try_from(random.bits() & 0x7f).unwrap()).collect();
    let (dx, bins) = (device.upload(&x), device.upload(&[0u32; 256]));
    device.run("histogram", 4, 96, &Args::new().int(3000).pointer(dx).pointer(bins));
    let mut wanted = vec![0u32; 256];
    for x in x {
        wanted[usize::from(x)] += 1;
    }
    assert_eq!(device.download::<u32>(bins, 256), wanted);
}

#[test]
fn warps_do_together_what_their_masks_say() {
    let mut device = device();
    let mut random = Random(8);
    let mut x: Vec<i32> = (0..64).map(|_| random.below(12) - 3).collect();
    // All of the first warp and not all of the second one are below 8; some of the second one and none of the first one are 5.
    for (thread, x) in x.iter_mut().enumerate() {
        if thread < 32 && matches!(*x, 5 | 8) {
            *x = 4;
        }
    }
    (x[40], x[50]) = (5, 8);
    let (dx, out) = (device.upload(&x), device.upload(&[0u32; 512]));
    device.run("warp_wide", 1, 64, &Args::new().pointer(dx).pointer(out));
    let found = device.download::<u32>(out, 512);
    for (thread, found) in found.chunks_exact(8).enumerate() {
        let warp = &x[thread / 32 * 32..][..32];
        let lane = thread % 32;
        let mask = |holds: &dyn Fn(i32) -> bool| {
            warp.iter()
                .enumerate()
                .fold(0u32, |mask, (lane, &x)| mask | u32::from(holds(x)) << lane)
        };
        let mine = x[thread];
        let half: Vec<i32> = warp.iter().skip(lane & 1).step_by(2).copied().collect();
        let parted = if lane & 1 == 1 {
            warp[lane ^ 2]
        } else {
            half.iter().min().unwrap() + 1000
        };
        let wanted = [
            mask(&|x| x > 3),
            if thread < 32 { 1 } else { 2 },
            mask(&|x| x == mine),
            warp.iter().sum::<i32>().cast_unsigned(),
            warp.iter().max().unwrap().cast_unsigned(),
            warp[lane / 8 * 8 + (lane + 5) % 8].cast_unsigned(),
            (if lane < 3 { mine } else { warp[lane - 3] }).cast_unsigned(),
            parted.cast_unsigned(),
        ];
        assert_eq!(found, wanted, "thread {thread}");
    }
}

#[test]
fn blocks_vote_after_their_threads_parted() {
    let mut device = device();
    let mut random = Random(9);
    let x: Vec<i32> = (0..80).map(|_| random.below(10)).collect();
    let (dx, out) = (device.upload(&x), device.upload(&[0i32; 240]));
    device.run("block_votes", 1, 80, &Args::new().pointer(dx).pointer(out));
    let count = i32::try_from(x.iter().filter(|&&x| x > 4).count()).unwrap();
    let votes = 1 + 2 * i32::from(x.contains(&7));
    for (found, x) in device.download::<i32>(out, 240).chunks_exact(3).zip(x) {
        assert_eq!(found, [count, votes, if x & 1 == 1 { 2 * x } else { 0 }]);
    }
}
