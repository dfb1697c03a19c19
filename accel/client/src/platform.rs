//! Platforms and devices (OpenCL API, sections 4.1 to 4.3): what the server tells of, and parts of devices. Knows no ring.

use accel_proto::{Handle, List, Sort, Span, opencl as calls};

use crate::arguments::{In, Out, Ref};
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::object::{Data, Object};
use crate::{process, status};

/// `CL_DEVICE_TYPE_ALL`.
const ALL: u64 = 0xffff_ffff;
/// More than any machine has.
const MOST: u32 = 1024;
/// `CL_DEVICE_PARTITION_BY_COUNTS`, whose list of counts has a zero of its own at its end.
const BY_COUNTS: i64 = 0x1087;

/// Platforms, each with its devices, in the order in which the server told of them.
#[derive(Debug)]
pub(crate) struct Told {
    platforms: Vec<(&'static Object, Vec<&'static Object>)>,
}

/// Asks a server that was just met.
pub(crate) fn refresh(connection: &'static Connection) -> Result<(), Code> {
    let platforms = platforms(connection)?.into_iter();
    let found: Result<Vec<_>, Code> = platforms
        .map(|platform| Ok((platform, devices(connection, platform, ALL)?)))
        .collect();
    let found = found?;
    process::told(|told| told.replace(connection, found));
    Ok(())
}

impl Told {
    pub(crate) const NONE: Self = Self { platforms: Vec::new() };

    /// The objects that the application has already stand for what is in their place now.
    fn replace(
        &mut self,
        connection: &'static Connection,
        found: Vec<(Handle<calls::Platform>, Vec<Handle<calls::Device>>)>,
    ) {
        for (index, (name, devices)) in found.into_iter().enumerate() {
            match self.platforms.get(index) {
                Some((platform, _)) => platform.tell_again(connection, name),
                None => {
                    let platform = Object::told::<calls::Platform>(connection, name, &[]);
                    self.platforms.push((platform, Vec::new()));
                }
            }
            let Some((platform, known)) = self.platforms.get_mut(index) else {
                continue;
            };
            for (index, name) in devices.into_iter().enumerate() {
                match known.get(index) {
                    Some(device) => device.tell_again(connection, name),
                    None => known.push(Object::told::<calls::Device>(connection, name, &[platform])),
                }
            }
        }
    }

    /// Those of a server.
    fn platforms(&self, connection: &Connection) -> Vec<&'static Object> {
        let all = self.platforms.iter().map(|(platform, _)| *platform);
        all.filter(|platform| platform.is_at(connection)).collect()
    }
}

fn platforms(connection: &Connection) -> Result<Vec<Handle<calls::Platform>>, Code> {
    let make = |reply: Span| calls::GetPlatformIDs {
        num_entries: MOST,
        platforms: true,
        num_platforms: true,
        reply,
    };
    let (call, answer) = connection.call(make, &Touched::default(), false)?;
    let reply = answer.success(&call)?;
    Ok(reply
        .platforms
        .map(|platforms| platforms.iter().collect())
        .unwrap_or_default())
}

/// Devices of a type. That there is none is no error here.
fn devices(
    connection: &Connection,
    platform: Handle<calls::Platform>,
    device_type: u64,
) -> Result<Vec<Handle<calls::Device>>, Code> {
    let make = |reply: Span| calls::GetDeviceIDs {
        platform,
        device_type,
        num_entries: MOST,
        devices: true,
        num_devices: true,
        reply,
    };
    let (call, answer) = connection.call(make, &Touched::default(), false)?;
    match answer.success(&call) {
        Ok(reply) => Ok(reply
            .devices
            .map(|devices| devices.iter().collect())
            .unwrap_or_default()),
        Err(Code::DEVICE_NOT_FOUND) => Ok(Vec::new()),
        Err(code) => Err(code),
    }
}

/// `clGetPlatformIDs` and `clIcdGetPlatformIDsKHR`.
pub(crate) extern "C" fn get_platform_ids(num_entries: u32, platforms: Out<Ref>, num_platforms: Out<u32>) -> i32 {
    status(|| {
        if (num_entries == 0 && !platforms.is_null()) || (platforms.is_null() && num_platforms.is_null()) {
            return Err(Code::INVALID_VALUE);
        }
        let connection = process::process()
            .connection()
            .map_err(|_| Code::PLATFORM_NOT_FOUND_KHR)?;
        let found = process::told(|told| told.platforms(connection));
        if found.is_empty() {
            return Err(Code::PLATFORM_NOT_FOUND_KHR);
        }
        platforms.put_list(found.iter().map(|platform| platform.as_ref()), num_entries.into());
        num_platforms.put(u32::try_from(found.len()).unwrap_or(u32::MAX));
        Ok(())
    })
}

/// `clGetDeviceIDs`.
pub(crate) extern "C" fn get_device_ids(
    platform: Ref,
    device_type: u64,
    num_entries: u32,
    devices_out: Out<Ref>,
    num_devices: Out<u32>,
) -> i32 {
    status(|| {
        if (num_entries == 0 && !devices_out.is_null()) || (devices_out.is_null() && num_devices.is_null()) {
            return Err(Code::INVALID_VALUE);
        }
        let connection = process::process().connection()?;
        let platform = match platform.optional::<calls::Platform>()? {
            Some(platform) => platform,
            None => process::told(|told| told.platforms(connection).first().copied()).ok_or(Code::INVALID_PLATFORM)?,
        };
        let connection = platform.connection()?;
        let names = devices(connection, platform.handle(), device_type)?;
        let found: Vec<Ref> = (names.iter())
            .map(|name| connection.object(Sort::Device, name.raw()))
            .filter(|device| device.address() != 0)
            .collect();
        if found.is_empty() {
            // A type that is none at all is another error.
            let known = device_type == ALL || (device_type != 0 && device_type < 1 << 5);
            return Err(if known {
                Code::DEVICE_NOT_FOUND
            } else {
                Code::INVALID_DEVICE_TYPE
            });
        }
        num_devices.put(u32::try_from(found.len()).unwrap_or(u32::MAX));
        devices_out.put_list(found.into_iter(), num_entries.into());
        Ok(())
    })
}

/// A list of partition properties with all of its zeroes: of counts there is one zero more.
fn partition(properties: &In<i64>) -> Result<&[i64], Code> {
    let one = properties.one()?.ok_or(Code::INVALID_VALUE)?;
    match *one {
        BY_COUNTS => {
            let counts = properties.terminated(1)?.ok_or(Code::INVALID_VALUE)?;
            properties.required(counts.len() as u64 + 1)
        }
        _ => properties.terminated(2)?.ok_or(Code::INVALID_VALUE),
    }
}

/// `clCreateSubDevices`.
pub(crate) extern "C" fn create_sub_devices(
    in_device: Ref,
    properties: In<i64>,
    num_devices: u32,
    out_devices: Out<Ref>,
    num_devices_ret: Out<u32>,
) -> i32 {
    status(|| {
        let device = in_device.object::<calls::Device>()?;
        let connection = device.connection()?;
        let properties = partition(&properties)?;
        let wanted = if out_devices.is_null() {
            0
        } else {
            num_devices.min(MOST)
        };
        let make = |_| Object::make::<calls::Device>(connection, &[device], Data::None);
        let made: Result<Vec<_>, _> = (0..wanted).map(make).collect();
        let made = made?;
        let names: Vec<_> = made.iter().map(|part| part.handle()).collect();
        let call = calls::CreateSubDevices {
            in_device: device.handle(),
            properties: Some(List::new(properties)),
            num_devices: wanted,
            out_devices: (!out_devices.is_null()).then(|| List::new(&names)),
            num_devices_ret: true,
        };
        let (call, answer) = connection.call(|_| call, &Touched::new(&[device], &[]), false)?;
        let there = answer.success(&call)?.num_devices_ret.unwrap_or_default();
        num_devices_ret.put(there);
        let exist = usize::try_from(there).unwrap_or(usize::MAX);
        out_devices.put_list(made.into_iter().take(exist).map(Object::publish), wanted.into());
        Ok(())
    })
}

/// `clRetainDevice`: one that is there anyway is not counted.
pub(crate) extern "C" fn retain_device(device: Ref) -> i32 {
    status(|| {
        let device = device.object::<calls::Device>()?;
        if is_part(device) {
            device.retain();
        }
        Ok(())
    })
}

/// `clReleaseDevice`.
pub(crate) extern "C" fn release_device(device: Ref) -> i32 {
    status(|| {
        let device = device.object::<calls::Device>()?;
        if is_part(device) { device.release() } else { Ok(()) }
    })
}

/// Whether it is a part of another device.
fn is_part(device: &Object) -> bool {
    device.raw() != 0 && device.handle::<calls::Device>().index() < Handle::<calls::Device>::FIRST_TOLD
}

/// `clUnloadCompiler`: a hint, which the server does not need.
pub(crate) extern "C" fn unload_compiler() -> i32 {
    0
}

/// `clUnloadPlatformCompiler`: the same.
pub(crate) extern "C" fn unload_platform_compiler(platform: Ref) -> i32 {
    status(|| platform.object::<calls::Platform>().map(drop))
}
