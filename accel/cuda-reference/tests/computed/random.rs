//! Random numbers: the same for the same seed, wherever they are taken from, and distributed as asked for.

use accel_proto::Handle;
use accel_proto::SvmAddress;
use accel_proto::cuda::*;

use crate::device::Device;

const COUNT: usize = 200_000;

fn generator(device: &mut Device, kind: i32) -> (i32, Handle<CurandGeneratorT>) {
    let generator = Handle::from_raw(7000);
    let call = AnyCall::CurandCreateGenerator(CurandCreateGenerator {
        generator,
        rng_type: kind,
    });
    (device.status(&call), generator)
}

fn seed(device: &mut Device, generator: Handle<CurandGeneratorT>, seed: u64) {
    let call = CurandSetPseudoRandomGeneratorSeed { generator, seed };
    device.put(&AnyCall::CurandSetPseudoRandomGeneratorSeed(call)).unwrap();
}

fn words(device: &mut Device, generator: Handle<CurandGeneratorT>, count: usize) -> Vec<u32> {
    let output_ptr = device.upload(&vec![0_u32; count]);
    let num = count as u64;
    device
        .put(&AnyCall::CurandGenerate(CurandGenerate {
            generator,
            output_ptr,
            num,
        }))
        .unwrap();
    device.download(output_ptr, count)
}

#[test]
fn a_sequence_follows_from_its_seed_and_goes_on_from_any_place() {
    let mut device = Device::new();
    let (status, generator) = generator(&mut device, 161);
    assert_eq!(status, 0);
    seed(&mut device, generator, 42);
    let all = words(&mut device, generator, 1000);
    seed(&mut device, generator, 42);
    let mut again = words(&mut device, generator, 3);
    again.extend(words(&mut device, generator, 6));
    again.extend(words(&mut device, generator, 991));
    assert_eq!(again, all);
    for offset in [1, 4, 999_u64] {
        let call = CurandSetGeneratorOffset { generator, offset };
        device.put(&AnyCall::CurandSetGeneratorOffset(call)).unwrap();
        assert_eq!(
            words(&mut device, generator, 1)[0],
            all[usize::try_from(offset).unwrap()]
        );
    }
    seed(&mut device, generator, 43);
    assert_ne!(words(&mut device, generator, 1000), all);
    // Random123's own answer for seed and place zero.
    seed(&mut device, generator, 0);
    assert_eq!(words(&mut device, generator, 2), [0x6627_e8d5, 0xe169_c58d]);
}

#[test]
fn kinds_that_are_not_computed_and_generators_that_are_not_there_are_refused() {
    let mut device = Device::new();
    for kind in [121, 141, 142, 201, 7] {
        assert_eq!(generator(&mut device, kind).0, 801, "{kind}");
    }
    // What was refused left nothing behind.
    let (status, generator) = generator(&mut device, 100);
    assert_eq!(status, 0);
    let call = |generator, output_ptr, num| {
        AnyCall::CurandGenerate(CurandGenerate {
            generator,
            output_ptr,
            num,
        })
    };
    let place = device.upload(&[0_u32; 4]);
    let code = |error: Result<(), basalt_accel_cuda_reference::Error>| error.unwrap_err().code();
    assert_eq!(code(device.put(&call(Handle::from_raw(7001), place, 4))), 400);
    assert_eq!(code(device.put(&call(generator, place, u64::MAX / 2))), 1);
    assert_eq!(code(device.put(&call(generator, SvmAddress::NULL, 1))), 700);
}

/// Mean, variance, and the third and fourth moments about the mean by the second's powers.
fn moments(numbers: &[f64]) -> [f64; 4] {
    let count = f64::from(u32::try_from(numbers.len()).unwrap());
    let mean = numbers.iter().sum::<f64>() / count;
    let about = |power| numbers.iter().map(|number| (number - mean).powi(power)).sum::<f64>() / count;
    let variance = about(2);
    [
        mean,
        variance,
        about(3) / variance.powf(1.5),
        about(4) / variance.powi(2),
    ]
}

fn near(numbers: &[f64], wanted: [f64; 4], what: &str) {
    for (found, wanted) in moments(numbers).into_iter().zip(wanted) {
        assert!(
            (found - wanted).abs() < 0.05 * (1.0 + wanted.abs()),
            "{what}: {found} {wanted}"
        );
    }
}

/// A device with a generator that has a seed, and room for numbers.
fn prepared() -> (Device, Handle<CurandGeneratorT>, SvmAddress) {
    let mut device = Device::new();
    let (_, generator) = generator(&mut device, 101);
    seed(&mut device, generator, 7);
    let output_ptr = device.upload(&vec![0_f64; COUNT]);
    (device, generator, output_ptr)
}

fn singles(device: &mut Device, at: SvmAddress, call: &AnyCall<'_>) -> Vec<f64> {
    device.put(call).unwrap();
    device.download::<f32>(at, COUNT).into_iter().map(f64::from).collect()
}

fn doubles(device: &mut Device, at: SvmAddress, call: &AnyCall<'_>) -> Vec<f64> {
    device.put(call).unwrap();
    device.download(at, COUNT)
}

#[test]
fn numbers_are_distributed_as_they_are_asked_for() {
    let (mut device, generator, output_ptr) = prepared();
    let num = COUNT as u64;
    let uniform = [0.5, 1.0 / 12.0, 0.0, 1.8];
    let call = AnyCall::CurandGenerateUniform(CurandGenerateUniform {
        generator,
        output_ptr,
        num,
    });
    let numbers = singles(&mut device, output_ptr, &call);
    assert!(numbers.iter().all(|number| *number > 0.0 && *number <= 1.0));
    near(&numbers, uniform, "uniform");
    let call = AnyCall::CurandGenerateUniformDouble(CurandGenerateUniformDouble {
        generator,
        output_ptr,
        num,
    });
    near(&doubles(&mut device, output_ptr, &call), uniform, "uniform double");
    let (mean, stddev) = (3.0_f32, 2.0_f32);
    let normal = [3.0, 4.0, 0.0, 3.0];
    let (mean, stddev) = (mean.to_bits(), stddev.to_bits());
    let call = AnyCall::CurandGenerateNormal(CurandGenerateNormal {
        generator,
        output_ptr,
        num,
        mean,
        stddev,
    });
    near(&singles(&mut device, output_ptr, &call), normal, "normal");
    let (mean, stddev) = (3.0_f64.to_bits(), 2.0_f64.to_bits());
    let call = CurandGenerateNormalDouble {
        generator,
        output_ptr,
        num,
        mean,
        stddev,
    };
    near(
        &doubles(&mut device, output_ptr, &AnyCall::CurandGenerateNormalDouble(call)),
        normal,
        "normal double",
    );
    // Neighbours, which come in pairs, have nothing to do with each other.
    let numbers = device.download::<f64>(output_ptr, COUNT);
    let products: f64 = numbers
        .chunks_exact(2)
        .map(|pair| (pair[0] - 3.0) * (pair[1] - 3.0) / 4.0)
        .sum();
    assert!((products / 1e5).abs() < 0.02, "{products}");
}

#[test]
fn logarithms_of_log_normal_numbers_are_normal_and_pairs_are_whole() {
    let (mut device, generator, output_ptr) = prepared();
    let num = COUNT as u64;
    let (mean, stddev) = (0.5_f32.to_bits(), 0.25_f32.to_bits());
    let call = AnyCall::CurandGenerateLogNormal(CurandGenerateLogNormal {
        generator,
        output_ptr,
        num,
        mean,
        stddev,
    });
    let logs: Vec<f64> = singles(&mut device, output_ptr, &call)
        .into_iter()
        .map(f64::ln)
        .collect();
    near(&logs, [0.5, 0.0625, 0.0, 3.0], "log-normal");
    let (mean, stddev) = (0.5_f64.to_bits(), 0.25_f64.to_bits());
    let call = CurandGenerateLogNormalDouble {
        generator,
        output_ptr,
        num,
        mean,
        stddev,
    };
    let logs = doubles(&mut device, output_ptr, &AnyCall::CurandGenerateLogNormalDouble(call));
    let logs: Vec<f64> = logs.into_iter().map(f64::ln).collect();
    near(&logs, [0.5, 0.0625, 0.0, 3.0], "log-normal double");
    let odd = CurandGenerateUniform {
        generator,
        output_ptr,
        num: 3,
    };
    device.put(&AnyCall::CurandGenerateUniform(odd)).unwrap();
    let odd = CurandGenerateNormalDouble {
        generator,
        output_ptr,
        num: 3,
        mean,
        stddev,
    };
    assert_eq!(
        device
            .put(&AnyCall::CurandGenerateNormalDouble(odd))
            .unwrap_err()
            .code(),
        1
    );
}

#[test]
fn poisson_numbers_have_the_probabilities_that_they_shall_have() {
    let mut device = Device::new();
    let (_, generator) = generator(&mut device, 100);
    seed(&mut device, generator, 9);
    let output_ptr = device.upload(&vec![0_u32; COUNT]);
    let call = |lambda: f64| {
        let (num, lambda) = (COUNT as u64, lambda.to_bits());
        AnyCall::CurandGeneratePoisson(CurandGeneratePoisson {
            generator,
            output_ptr,
            num,
            lambda,
        })
    };
    for lambda in [0.5, 4.0, 9.9, 10.1, 35.0, 200_000.0] {
        device.put(&call(lambda)).unwrap();
        let numbers: Vec<f64> = device
            .download::<u32>(output_ptr, COUNT)
            .into_iter()
            .map(f64::from)
            .collect();
        near(
            &numbers,
            [lambda, lambda, lambda.powf(-0.5), 3.0 + 1.0 / lambda],
            "poisson",
        );
        if lambda > 100.0 {
            continue;
        }
        // How often each number is, by the probabilities: chi squared, which is about as large as there are numbers.
        let (mut probability, mut chi, mut kinds) = ((-lambda).exp(), 0.0, 0.0);
        for k in 0..100_u32 {
            let expected = probability * 2e5;
            if expected > 20.0 {
                let found = numbers.iter().filter(|number| **number == f64::from(k)).count();
                chi += (f64::from(u32::try_from(found).unwrap()) - expected).powi(2) / expected;
                kinds += 1.0;
            }
            probability *= lambda / f64::from(k + 1);
        }
        assert!(
            chi < kinds + 6.0 * (2.0_f64 * kinds).sqrt(),
            "{lambda}: {chi} of {kinds}"
        );
    }
    for lambda in [0.0, -1.0, 400_001.0, f64::NAN] {
        assert_eq!(device.put(&call(lambda)).unwrap_err().code(), 1, "{lambda}");
    }
}
