//! Devices that are parts of others.

use accel_proto::List;
use accel_proto::opencl::{CreateSubDevices, CreateSubDevicesReply};

use crate::api::{Code, check};
use crate::marshal::{Bytes, Places, ask};
use crate::session::Session;

/// `clCreateSubDevices`. A list of counts has an end of its own within the properties; behind all there are zeroes for both.
pub(crate) fn create_sub_devices(cx: &mut Session<'_>, call: &CreateSubDevices<'_>) -> Result<(), Code> {
    let device = cx.object(call.in_device)?;
    let properties: Option<Vec<i64>> = call.properties.map(|list| list.iter().chain([0, 0]).collect());
    let properties = Bytes::new(properties.as_deref().map(List::new).as_ref());
    let mut devices = Places::new(call.out_devices.as_ref())?;
    let mut count = 0_u32;
    let function = cx.api().clCreateSubDevices()?;
    let (places, counted) = (devices.pointer(), ask(&mut count, call.num_devices_ret));
    // SAFETY: 1. to 3. as above.
    check(unsafe { function(device.raw(), properties.pointer(), call.num_devices, places, counted) })?;
    cx.insert_all(call.out_devices.as_ref(), &devices, &[&device])?;
    let reply = CreateSubDevicesReply {
        status: 0,
        num_devices_ret: call.num_devices_ret.then_some(count),
    };
    cx.answer(call, &reply, None)
}
