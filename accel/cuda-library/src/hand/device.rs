//! What a client is told of the device when it connects, and how a client's use of it ends.
#![allow(unsafe_code, reason = "these are calls of functions of C")]
#![allow(non_snake_case, reason = "names are C's")]

use std::sync::atomic::Ordering;

use accel_proto::List;
use accel_proto::cuda::{self as calls, AnyReply};

use super::Runtime;
use crate::Libraries;
use crate::bytes::Bytes;
use crate::failure::{Failure, check};
use crate::state::Context;

/// `cudaErrorInvalidDevice`.
const INVALID_DEVICE: Failure = Failure::Library(101);
/// Room for `cudaDeviceProp` of any version: it is 1 008 bytes in CUDA 13.0, and begins with the name.
const PROPERTIES: u64 = 4096;
/// How much of the name a client is told.
const NAME: usize = 64;
/// It takes code, and says where memory is (`accel/spec/cuda/cudart.toml`, basaltDeviceInfo).
const ADDRESSES_ARE_TOLD: u32 = 2;
/// How many attributes.
const ATTRIBUTES: i32 = 160;

impl Runtime {
    /// What is answered when devices are counted.
    pub(crate) fn devices(&self) -> (i32, i32) {
        let mut count = 0_i32;
        let Ok(function) = self.cudaGetDeviceCount() else {
            return (801, 0);
        };
        // SAFETY: 1. the function has these types; 2. there is a place for the number.
        let status = unsafe { function((&raw mut count).cast()) };
        (status, count)
    }
}

impl Libraries {
    /// Bytes of the device's memory: those that are free, and all.
    pub(crate) fn memory(&self) -> Result<(u64, u64), Failure> {
        let function = self.runtime.cudaMemGetInfo()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: 1. the function has these types; 2. there are places for both numbers.
        check(unsafe { function((&raw mut free).cast(), (&raw mut total).cast()) })?;
        Ok((free as u64, total as u64))
    }

    /// All that was asked of the device is done, or has failed. An error that is told again is the context's, and stays.
    pub(crate) fn synchronize(&self) {
        let Ok(function) = self.runtime.cudaDeviceSynchronize() else {
            return;
        };
        // SAFETY: 1. the function has no parameters.
        let wait = || unsafe { function() };
        let status = wait();
        if status == 0 {
            return;
        }
        if wait() == status {
            self.lost.store(status, Ordering::Relaxed);
        }
        log::warn!("the device's work ends with {status}");
    }

    /// With which code the context has failed for good: the runtime's documentation of such errors says that only another process gets
    /// another one.
    #[must_use]
    pub fn lost(&self) -> Option<i32> {
        let status = self.lost.load(Ordering::Relaxed);
        (status != 0).then_some(status)
    }
}

pub(crate) fn basaltDeviceInfo(cx: &mut Context<'_>, call: &calls::BasaltDeviceInfo) -> Result<(), Failure> {
    if call.device != 0 {
        return Err(INVALID_DEVICE);
    }
    let runtime = &cx.libraries.runtime;
    let mut properties = Bytes::zeroed(PROPERTIES)?;
    let function = runtime.cudaGetDeviceProperties()?;
    // SAFETY: 1. the function has these types; 2. there is room for the structure of any version.
    check(unsafe { function(properties.place(), 0) })?;
    let mut name = [0; NAME];
    // The last byte stays zero.
    let begin = properties.bytes().iter().take(NAME - 1).take_while(|byte| **byte != 0);
    name.iter_mut().zip(begin).for_each(|(place, byte)| *place = *byte);
    let function = runtime.cudaDeviceGetAttribute()?;
    let attribute = |index: i32| {
        let mut value = 0_i32;
        // SAFETY: 1. the function has these types; 2. there is a place for the number.
        let status = unsafe { function((&raw mut value).cast(), index, 0) };
        // Not every number is an attribute.
        if status == 0 { value } else { 0 }
    };
    let attributes: Vec<_> = (0..ATTRIBUTES).map(attribute).collect();
    let reply = AnyReply::BasaltDeviceInfo(calls::BasaltDeviceInfoReply {
        status: 0,
        name: List::new(&name),
        total_global_mem: cx.total()?,
        attributes: List::new(&attributes),
        takes_code: ADDRESSES_ARE_TOLD,
    });
    cx.answer(&reply);
    Ok(())
}
