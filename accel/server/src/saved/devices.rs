//! Which platforms and devices a back end has, by their places among all: another server's have other addresses.
#![allow(unsafe_code, reason = "calls functions of a C API")]

use std::sync::Arc;

use super::{Refusal, query};
use crate::api::{Backend, Code, P, check};
use crate::objects::{Held, Object, Sort};

const NULL: P = std::ptr::null_mut();
const DEVICE_TYPE_ALL: u64 = 0xffff_ffff;
const HOST_UNIFIED_MEMORY: u32 = 0x1035;
const DEVICE_NOT_FOUND: i32 = -1;

/// What is told of a device: CL_DEVICE_NAME, CL_DEVICE_VERSION, CL_DRIVER_VERSION.
const IDENTITY: [u32; 3] = [0x102b, 0x102f, 0x102d];

/// All platforms of a back end, and all of their devices.
#[derive(Debug)]
pub(super) struct Devices {
    all: Vec<(P, Vec<P>)>,
    /// The host's memory is that of all of them.
    pub(super) are_the_hosts: bool,
}

impl Devices {
    /// None of a back end that has nothing of OpenCL.
    pub(super) fn of(backend: &Backend) -> Result<Self, Code> {
        if backend.api.clGetPlatformIDs().is_err() {
            return Ok(Self {
                all: Vec::new(),
                are_the_hosts: true,
            });
        }
        let platforms = list(|count, at, found| {
            let function = backend.api.clGetPlatformIDs()?;
            // SAFETY: 1. the place has room for as many as are said; 2. the other one is for a number.
            check(unsafe { function(count, at, found) })
        })?;
        let devices = platforms.into_iter().map(|platform| {
            let devices = list(|count, at, found| {
                let function = backend.api.clGetDeviceIDs()?;
                // SAFETY: 1. the platform is one of the back end's; 2. the places are as above.
                match unsafe { function(platform, DEVICE_TYPE_ALL, count, at, found) } {
                    DEVICE_NOT_FOUND => Ok(()),
                    status => check(status),
                }
            });
            Ok((platform, devices?))
        });
        let mut devices = Self {
            all: devices.collect::<Result<_, Code>>()?,
            are_the_hosts: false,
        };
        let mut all = devices.all.iter().flat_map(|(_, devices)| devices);
        devices.are_the_hosts = all.all(|device| is_the_hosts(backend, *device));
        Ok(devices)
    }

    /// What each device is.
    pub(super) fn identities(&self, backend: &Arc<Backend>) -> Result<Vec<Vec<[String; 3]>>, Code> {
        let identity = |device: &P| {
            let object = Held(Arc::new(Object::told(backend, (Sort::Device, *device))));
            let [name, version, driver] = IDENTITY.map(|query| query::text(&backend.api, &object, query));
            Ok([name?, version?, driver?])
        };
        let of = |(_, devices): &(P, Vec<P>)| devices.iter().map(identity).collect();
        self.all.iter().map(of).collect()
    }

    pub(super) fn places_of_platforms(&self, told: &[P]) -> Result<Vec<usize>, Refusal> {
        let place = |raw: &P| self.all.iter().position(|(platform, _)| platform == raw);
        let places: Option<Vec<_>> = told.iter().map(place).collect();
        places.ok_or(Refusal::CannotBeMadeAgain("a platform that is not there any more"))
    }

    pub(super) fn places_of(&self, told: &[P]) -> Result<Vec<(usize, usize)>, Refusal> {
        let place = |raw: &P| {
            let mut platforms = self.all.iter().enumerate();
            platforms.find_map(|(index, (_, devices))| {
                let device = devices.iter().position(|device| device == raw)?;
                Some((index, device))
            })
        };
        let places: Option<Vec<_>> = told.iter().map(place).collect();
        places.ok_or(Refusal::CannotBeMadeAgain("a device that is not there any more"))
    }

    pub(super) fn platform(&self, place: usize) -> Option<P> {
        self.all.get(place).map(|(platform, _)| *platform)
    }

    pub(super) fn device(&self, (platform, device): (usize, usize)) -> Option<P> {
        self.all.get(platform)?.1.get(device).copied()
    }
}

/// Whether a device has no memory but the host's.
fn is_the_hosts(backend: &Backend, device: P) -> bool {
    let mut unified = 0_u32;
    let at = (&raw mut unified).cast();
    backend.api.clGetDeviceInfo().is_ok_and(|function| {
        // SAFETY: 1. the device is one of the back end's; 2. the place has the four bytes that are said.
        unsafe { function(device, HOST_UNIFIED_MEMORY, 4, at, NULL) == 0 && unified == 1 }
    })
}

/// A list whose length is asked for first.
fn list(ask: impl Fn(u32, P, P) -> Result<(), Code>) -> Result<Vec<P>, Code> {
    let mut count = 0_u32;
    ask(0, NULL, (&raw mut count).cast())?;
    let mut all = vec![NULL; count as usize];
    if count > 0 {
        ask(count, all.as_mut_ptr().cast(), NULL)?;
    }
    Ok(all)
}
