//! cuRAND's functions by hand: a generator, and versions.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]
#![allow(non_snake_case, reason = "names are C's")]

use accel_proto::Handle;
use accel_proto::cuda::CurandCreateGenerator;

use crate::abi::{P, address};
use crate::generated::values::{CURAND_STATUS_OUT_OF_RANGE, CURAND_STATUS_TYPE_ERROR};
use crate::stub::{self, status};

/// The version whose functions these are: 10.4, that of CUDA 13.0.
const VERSION: [i32; 3] = [10, 4, 0];

pub(crate) unsafe fn curandCreateGenerator(generator: *mut P, rng_type: i32) -> i32 {
    if generator.is_null() {
        return CURAND_STATUS_OUT_OF_RANGE;
    }
    let name = stub::name();
    let call = CurandCreateGenerator {
        generator: Handle::from_raw(name),
        rng_type,
    };
    match stub::ask(&call, false, |_| ()) {
        // cudaErrorInvalidValue: there is no such kind.
        Err(stub::Failure::Code(1)) => CURAND_STATUS_TYPE_ERROR,
        Ok(()) => {
            // SAFETY: 1. the program has a place for it.
            unsafe { stub::put(generator, address(name)) };
            0
        }
        failed => status::curand(failed),
    }
}

pub(crate) unsafe fn curandGetVersion(version: *mut i32) -> i32 {
    let [major, minor, patch] = VERSION;
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(version, major * 1000 + minor * 100 + patch) };
    0
}

pub(crate) unsafe fn curandGetProperty(type_: i32, value: *mut i32) -> i32 {
    // libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
    let number = usize::try_from(type_)
        .ok()
        .and_then(|place| VERSION.get(place).copied());
    let Some(number) = number else {
        return CURAND_STATUS_OUT_OF_RANGE;
    };
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(value, number) };
    0
}
