//! Variables, calls, local memory, structures, switches, numbers of all widths, and what happens when kernels do wrong.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "what the tests compute anew is conversions"
)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use accel_ptx::{Launch, LaunchError};

use crate::device::{Args, Device, Random};

fn device() -> Device {
    Device::new(include_str!("../ptx/language.ptx"))
}

#[test]
fn variables_have_their_initial_values_and_keep_what_is_written() {
    let mut device = device();
    let out = device.upload(&[0f32; 8]);
    device.run("variables", 1, 8, &Args::new().pointer(out));
    device.run("variables", 1, 8, &Args::new().pointer(out));
    assert_eq!(device.download::<f32>(out, 4), [9.5, 6.0, 8.25, 16.0]);
    let (counter, size) = device.module.variable("counter").unwrap();
    assert_eq!(size, 4);
    assert_eq!(device.download::<i32>(counter, 1), [5 + 2 * 16]);
    // The host writes a constant, as cudaMemcpyToSymbol does.
    let (table, _) = device.module.variable("table").unwrap();
    device.write(table, &[0f32, 1.0, 2.0, 3.0]);
    device.run("variables", 1, 8, &Args::new().pointer(out));
    assert_eq!(device.download::<f32>(out, 4), [3.0, 4.0, 5.0, 6.0]);
}

#[test]
fn a_structure_is_a_parameter() {
    let mut device = device();
    let out = device.upload(&[0f32; 6]);
    let kernel = device.module.program().kernel("structure").unwrap();
    let layout: Vec<_> = kernel.parameters.iter().map(|p| (p.offset, p.size)).collect();
    assert_eq!(layout, [(0, 16), (16, 4), (24, 8)]);
    let mut structure = Vec::new();
    for scale in [1.5f32, -2.0, 4.0] {
        structure.extend(scale.to_le_bytes());
    }
    structure.extend((-7i16).to_le_bytes());
    structure.extend([(-3i8).cast_unsigned(), 0]);
    device.run("structure", 1, 6, &Args::new().raw(&structure).int(2).pointer(out));
    let wanted = [4.0f32, 1.5, -2.0].map(|scale| scale * -3.0 - 7.0);
    assert_eq!(device.download::<f32>(out, 6), [wanted, wanted].concat());
    device.run("grid_constant", 1, 6, &Args::new().raw(&structure).int(2).pointer(out));
    let wanted = [4.0f32, 1.5, -2.0].map(|scale| scale - 7.0);
    assert_eq!(device.download::<f32>(out, 6), [wanted, wanted].concat());
}

#[test]
fn functions_call_themselves_and_threads_at_different_depths_meet_again() {
    let mut device = device();
    let out = device.upload(&[0i32; 64]);
    device.run("recursion", 1, 64, &Args::new().pointer(out));
    let fibonacci = [0, 1, 1, 2, 3, 5, 8, 13, 21];
    let wanted: Vec<i32> = (0..64).map(|thread| fibonacci[thread % 9]).collect();
    assert_eq!(device.download::<i32>(out, 64), wanted);
}

#[test]
fn calls_without_end_end_with_an_error() {
    let mut device = device();
    let out = device.upload(&[0i32; 4]);
    let error = device
        .try_run("overflow", ([1, 1], [32, 1]), 0, &Args::new().pointer(out))
        .unwrap_err();
    assert!(matches!(error, LaunchError::StackOverflow { .. }), "{error}");
    assert_eq!(error.cuda(), ("cudaErrorHardwareStackError", 714));
}

#[test]
fn local_arrays_are_each_threads_own() {
    let mut device = device();
    let order = [3i32, 7, 3, 0, 15, 7, 3];
    let (dorder, out) = (device.upload(&order), device.upload(&[0i32; 40]));
    device.run("local_array", 1, 40, &Args::new().int(7).pointer(dorder).pointer(out));
    let wanted: Vec<i32> = (0..40)
        .map(|thread| {
            let mut values: Vec<i32> = (0..16).map(|i| i * i + thread).collect();
            let step = |(i, &at): (usize, &i32)| {
                std::mem::replace(&mut values[usize::try_from(at).unwrap()], i32::try_from(i).unwrap())
            };
            order.iter().enumerate().map(step).sum()
        })
        .collect();
    assert_eq!(device.download::<i32>(out, 40), wanted);
}

#[test]
fn a_switch_goes_where_each_thread_says() {
    let mut device = device();
    let mut random = Random(11);
    let ops: Vec<i32> = (0..64).map(|i| i % 11 - 1).collect();
    let x: Vec<i32> = (0..64).map(|_| random.below(20_000) - 10_000).collect();
    let (dops, dx) = (device.upload(&ops), device.upload(&x));
    device.run("dispatch", 1, 64, &Args::new().pointer(dops).pointer(dx));
    let wanted: Vec<i32> = ops
        .iter()
        .zip(&x)
        .map(|(op, &v)| match op {
            0 => v + 7,
            1 => v - 3,
            2 => v * 5,
            3 => v / 3,
            4 => v % 10,
            5 => !v,
            6 => v << 3,
            7 => v >> 2,
            8 => v * v,
            _ => -1,
        })
        .collect();
    assert_eq!(device.download::<i32>(dx, 64), wanted);
}

/// What the kernel `integers` computes of one pair; names and order are the kernel's.
fn integers(a: i64, b: i64) -> [i64; 16] {
    let (ua, ub) = (a.cast_unsigned(), b.cast_unsigned());
    let low = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap();
    let (u, v) = (low(ua), low(ub));
    let (x, y) = (u.cast_signed(), v.cast_signed());
    let byte = |index: u32| (((u64::from(v) << 32) | u64::from(u)) >> (8 * index)) & 0xff;
    let short = |value: i32| i32::from(i16::from_le_bytes([value.to_le_bytes()[0], value.to_le_bytes()[1]]));
    let first = |value: i32| value.to_le_bytes()[0];
    let joined = (u64::from(v) << 32) | u64::from(u);
    [
        a.wrapping_mul(b),
        if b == 0 { 0 } else { a.wrapping_div(b) },
        (ua % (ub | 1)).cast_signed(),
        i64::from(i32::try_from((i64::from(x) * i64::from(y)) >> 32).unwrap()),
        u64::try_from((u128::from(ua) * u128::from(ub)) >> 64)
            .unwrap()
            .cast_signed(),
        i64::from(
            (u.count_ones() + 100 * x.leading_zeros() + 10000 * ua.count_ones() + 1_000_000 * b.leading_zeros())
                .cast_signed(),
        ),
        i64::from(u.reverse_bits()),
        i64::try_from((byte(3) << 24) | (byte(7) << 16) | (byte(1) << 8) | byte(5)).unwrap(),
        i64::from(low((joined << (v & 31)) >> 32)) + i64::from(v),
        i64::from(x.min(y)) + i64::from(u.max(v)) * 3,
        i64::from(short(x) * short(y) + i32::from(first(x).cast_signed()) - i32::from(first(y))),
        i64::from(
            (if x == 0 { 0 } else { x.trailing_zeros() + 1 })
                .wrapping_mul(100)
                .wrapping_add(x.abs_diff(y).wrapping_add(1)),
        ),
        i64::from((x & y).cast_unsigned() ^ (u | !v)),
        (a >> (b & 63))
            .wrapping_add((ub >> (a & 63)).cast_signed())
            .wrapping_add(a << (b & 31)),
        u64::try_from((u128::from(ua) * u128::from(ub) + u128::from(ua)) >> 64)
            .unwrap()
            .cast_signed(),
        i64::from(
            x.wrapping_abs()
                .wrapping_add(i32::from(x < y) + 2 * i32::from(u < v) + 4 * i32::from(a <= b)),
        ),
    ]
}

#[test]
fn integers_of_all_widths_are_exact() {
    let mut device = device();
    let mut random = Random(12);
    let mut pairs: Vec<i64> = vec![
        0,
        0,
        -1,
        1,
        i64::MIN,
        -1,
        i64::MAX,
        i64::MIN,
        5,
        0,
        i64::from(i32::MIN),
        -1,
    ];
    for _ in 0..122 {
        let shift = random.below(64);
        pairs.push(random.bits().cast_signed() >> shift);
    }
    let (input, out) = (device.upload(&pairs), device.upload(&[0i64; 16 * 64]));
    device.run("integers", 1, 64, &Args::new().pointer(input).pointer(out));
    for (pair, found) in pairs
        .chunks_exact(2)
        .zip(device.download::<i64>(out, 16 * 64).chunks_exact(16))
    {
        assert_eq!(found, integers(pair[0], pair[1]), "of {pair:?}");
    }
}

/// The binary32 at or next to `exact`, towards `direction`.
fn directed(exact: f64, direction: f64) -> f32 {
    let nearest = exact as f32;
    let there = f64::from(nearest);
    if direction < 0.0 && there > exact {
        nearest.next_down()
    } else if direction > 0.0 && there < exact {
        nearest.next_up()
    } else {
        nearest
    }
}

#[test]
fn floating_point_is_rounded_as_it_is_asked() {
    let mut device = device();
    let mut random = Random(13);
    let mut pairs: Vec<f32> = vec![0.5, -0.5, 2.5, 3.5, -1.5, 0.1, 1e30, 1e-3];
    pairs.extend(random.reals(56).iter().map(|x| x * 9.0));
    let input = device.upload(&pairs);
    let (out, wide, whole) = (
        device.upload(&[0f32; 384]),
        device.upload(&[0f64; 96]),
        device.upload(&[0i32; 192]),
    );
    device.run(
        "floats",
        1,
        32,
        &Args::new().pointer(input).pointer(out).pointer(wide).pointer(whole),
    );
    let (out, wide) = (device.download::<f32>(out, 384), device.download::<f64>(wide, 96));
    let whole = device.download::<i32>(whole, 192);
    for (thread, pair) in pairs.chunks_exact(2).enumerate() {
        let (a, b) = (pair[0], pair[1]);
        let (da, db) = (f64::from(a), f64::from(b));
        // Sums, products and what is below of them are exact in binary64 for these numbers, or nearly.
        let toward_zero = if da + db > 0.0 { -1.0 } else { 1.0 };
        let wanted = [
            directed(da + db, toward_zero),
            directed(da * db, 1.0),
            directed(da / db, -1.0),
            a.min(b),
            a.max(b),
            (1.0 / db.abs().sqrt()) as f32,
            a.abs().sqrt(),
            a.clamp(0.0, 1.0),
            a.round_ties_even() + b.floor() * 2.0,
            a.mul_add(b, a),
            directed(da.mul_add(db, db), -1.0),
            a.copysign(b),
        ];
        assert_eq!(out[thread * 12..][..12], wanted, "of {pair:?}");
        let millions = (a * 1e6) as i64 as f64;
        assert_eq!(
            wide[thread * 3..][..3],
            [da.mul_add(db, 1.0 / 3.0), da.abs().sqrt() / db, millions]
        );
        let bits = a.to_bits().cast_signed() + i32::from(a == b);
        let wanted = [
            a.round_ties_even() as i32,
            b.floor() as i32,
            (a * 1e10) as i32,
            (b.ceil() as u32).cast_signed(),
            bits,
            directed(f64::from(bits), 1.0).to_bits().cast_signed(),
        ];
        assert_eq!(whole[thread * 6..][..6], wanted, "of {pair:?}");
    }
}

#[test]
fn an_address_out_of_range_ends_the_launch_and_names_thread_and_address() {
    let mut device = device();
    let x = device.upload(&[0i32; 40]);
    let args = Args::new().pointer(x).signed(30);
    let error = device
        .try_run("out_of_bounds", ([1, 1], [32, 1]), 0, &args)
        .unwrap_err();
    let LaunchError::IllegalAddress {
        address, bytes, thread, ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((address, bytes, thread.thread), (x + 160, 4, [10, 0, 0]));
    assert_eq!(error.cuda().1, 700);
    // What came before it in the order of threads was written.
    assert_eq!(device.download::<i32>(x, 40)[29..], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    let args = Args::new().pointer(x).signed(32);
    let error = device
        .try_run("shared_out_of_bounds", ([1, 1], [32, 1]), 0, &args)
        .unwrap_err();
    assert!(
        matches!(
            error,
            LaunchError::IllegalAddress {
                space: "shared memory",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn what_is_not_aligned_ends_the_launch() {
    let mut device = device();
    let x = device.upload(&[0u8; 512]);
    let error = device
        .try_run("misaligned", ([1, 1], [32, 1]), 0, &Args::new().pointer(x))
        .unwrap_err();
    assert!(matches!(error, LaunchError::Misaligned { bytes: 4, .. }), "{error}");
    assert_eq!(error.cuda().1, 716);
}

#[test]
fn a_kernel_without_end_uses_its_budget_up() {
    let mut device = device();
    device.budget = 1_000_000;
    let x = device.upload(&[0i32]);
    let error = device
        .try_run("endless_loop", ([1, 1], [64, 1]), 0, &Args::new().pointer(x))
        .unwrap_err();
    assert!(matches!(error, LaunchError::Timeout { .. }), "{error}");
    assert_eq!(error.cuda(), ("cudaErrorLaunchTimeout", 702));
}

#[test]
fn a_kernel_without_end_is_stopped_by_another_thread() {
    let mut device = device();
    let x = device.upload(&[0i32]);
    let parameters = x.to_le_bytes();
    let launch = Launch {
        grid: [1; 3],
        block: [64, 1, 1],
        dynamic_shared: 0,
        parameters: &parameters,
        // Not stopped, it ends by this.
        budget: 1 << 32,
    };
    let stop = AtomicBool::new(false);
    let (module, memory) = (&device.module, &mut device.memory);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            stop.store(true, Ordering::Relaxed);
        });
        module.launch_until("endless_loop", &launch, &stop, memory)
    });
    assert_eq!(error, Err(LaunchError::Stopped));
}

#[test]
fn a_trap_names_its_thread() {
    let mut device = device();
    let x = device.upload(&[0i32, 0, 0, 3].into_iter().chain([0; 60]).collect::<Vec<i32>>());
    let error = device
        .try_run("traps", ([1, 1], [64, 1]), 0, &Args::new().pointer(x))
        .unwrap_err();
    let LaunchError::Trap { thread, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(thread.thread, [3, 0, 0]);
}

#[test]
fn threads_that_wait_for_ever_are_a_deadlock() {
    let mut device = device();
    let x = device.upload(&[0i32; 64]);
    let error = device
        .try_run("half_a_barrier", ([1, 1], [64, 1]), 0, &Args::new().pointer(x))
        .unwrap_err();
    let LaunchError::Deadlock { waiting, what, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((waiting, what), (32, "a barrier of the block"));
}

#[test]
fn a_barrier_for_two_warps_hands_over_what_one_wrote() {
    let mut device = device();
    let x = device.upload(&[0i32; 32]);
    device.run("named_barriers", 1, 96, &Args::new().pointer(x));
    let wanted: Vec<i32> = (0..32).map(|lane| (31 - lane) * 3).collect();
    assert_eq!(device.download::<i32>(x, 32), wanted);
}

#[test]
fn threads_that_wait_for_each_other_by_memory_all_have_their_turn() {
    let mut device = device();
    let x = device.upload(&[0i32, 1]);
    device.run("turns", 1, 48, &Args::new().pointer(x));
    let wanted = (0..48).fold(1i32, |value, thread| value.wrapping_mul(3).wrapping_add(thread));
    assert_eq!(device.download::<i32>(x, 2), [48, wanted]);
}
