//! Arguments of kernels.

use accel_proto::opencl::SetKernelArg;
use accel_proto::{AnyHandle, Value};

use crate::api::{Code, P, check};
use crate::arguments::{Argument, Parameter};
use crate::marshal::Bytes;
use crate::objects::{Held, Launchable, Sort, State};
use crate::session::Session;

/// `clSetKernelArg`. What is no object for the server is none for the back end.
pub(crate) fn set_kernel_arg(cx: &mut Session<'_>, call: &SetKernelArg<'_>) -> Result<(), Code> {
    let kernel = cx.object(call.kernel)?;
    let object = match call.arg_value {
        Some(Value::Object(AnyHandle { c_type, raw })) if raw != 0 => {
            let sort = Sort::of(c_type).ok_or(Code::INVALID_ARG_VALUE)?;
            Some((sort, cx.client.find(sort, raw)?))
        }
        _ => None,
    };
    let argument = match (call.arg_value, &object) {
        (_, Some((sort, object))) => Argument::Object(*sort, object),
        (Some(Value::Bytes(bytes)), _) if bytes.iter().all(|byte| *byte == 0) => Argument::Zeroes(bytes.len() as u64),
        (Some(Value::Bytes(bytes)), _) => Argument::Bytes(bytes.len() as u64),
        (Some(Value::Object(_)), None) => Argument::Null,
        (None, _) => Argument::Nothing,
    };
    takes(&kernel, call.arg_index, &argument)?;
    let raw = object.as_ref().map_or(std::ptr::null_mut(), |(_, object)| object.raw());
    let (size, value) = match call.arg_value {
        Some(Value::Object(_)) => (
            size_of::<P>() as u64,
            Some(Bytes::of(&raw.expose_provenance().to_ne_bytes())),
        ),
        Some(Value::Bytes(bytes)) => (bytes.len() as u64, Some(Bytes::of(bytes))),
        None => (call.arg_size, None),
    };
    let value = value.as_ref().map_or(std::ptr::null_mut(), Bytes::pointer);
    let _alone = kernel.alone();
    let function = cx.api().clSetKernelArg()?;
    // SAFETY: 1. to 3. as above; the back end copies the argument, and an object that it is was found by its name.
    check(unsafe { function(kernel.raw(), call.arg_index, size, value) })?;
    if let State::Kernel(launchable) = &kernel.state {
        launchable.hold(call.arg_index, object.map(|(_, object)| object));
        launchable.use_memory(|used| used.arguments.remove(&call.arg_index));
    }
    Ok(())
}

/// Whether the kernel has an argument that this can be.
pub(super) fn takes(kernel: &Held, index: u32, argument: &Argument<'_>) -> Result<(), Code> {
    let State::Kernel(Launchable {
        parameters: Some(parameters),
        ..
    }) = &kernel.state
    else {
        return Ok(());
    };
    let parameter: Option<&Parameter> = parameters.get(index as usize);
    parameter.ok_or(Code::INVALID_ARG_INDEX)?.takes(argument)
}
