//! Programs: builds, and what a program is asked for.

use std::ffi::CStr;

use accel_proto::control::Completion;
use accel_proto::opencl::{
    BuildProgram, CompileProgram, GetProgramInfo, GetProgramInfoReply, LinkProgram, SetProgramSpecializationConstant,
};
use accel_proto::{Callback, Plain as _, Span};

use crate::api::{Code, P, check};
use crate::marshal::{Answer, Bytes, ask, text, there};
use crate::objects::{Held, Sort};
use crate::saved::{original, source};
use crate::session::Session;

const NULL: P = std::ptr::null_mut();

/// Queries (cl.h).
const PROGRAM_REFERENCE_COUNT: u32 = 0x1160;
const PROGRAM_CONTEXT: u32 = 0x1161;
const PROGRAM_NUM_DEVICES: u32 = 0x1162;
const PROGRAM_DEVICES: u32 = 0x1163;
const PROGRAM_SOURCE: u32 = 0x1164;
const PROGRAM_BINARY_SIZES: u32 = 0x1165;
const PROGRAM_BINARIES: u32 = 0x1166;
const PROGRAM_IL: u32 = 0x1169;

/// Most devices of a program.
const MOST_DEVICES: u32 = 1024;

/// Options of a build, and that what arguments are can be asked for: the server compares what clients send with it.
pub(crate) fn build_options(options: Option<&CStr>) -> Vec<u8> {
    let mut text = options.map(|options| options.to_bytes().to_vec()).unwrap_or_default();
    text.extend(b" -cl-kernel-arg-info\0");
    text
}

/// A build that has ended, to whom a callback tells it. The call waits for the end all the same.
fn ended(cx: &Session<'_>, callback: Callback, status: i32) {
    if callback.0 != 0 {
        cx.client.completions.push(Completion { callback, status });
    }
}

/// `clBuildProgram`.
pub(crate) fn build_program(cx: &mut Session<'_>, call: &BuildProgram<'_>) -> Result<(), Code> {
    let program = original(cx, call.program)?;
    there(call.device_list.is_some(), call.num_devices.into(), Code::INVALID_VALUE)?;
    let devices = cx.objects(call.device_list.as_ref())?;
    let options = build_options(call.options);
    let function = cx.api().clBuildProgram()?;
    let options = options.as_ptr().cast_mut().cast();
    // SAFETY: 1. to 3. as above; the options end with a zero.
    let status = unsafe { function(program.raw(), call.num_devices, devices.pointer(), options, NULL, NULL) };
    ended(cx, call.pfn_notify, status);
    check(status)
}

/// `clCompileProgram`.
pub(crate) fn compile_program(cx: &mut Session<'_>, call: &CompileProgram<'_>) -> Result<(), Code> {
    let program = original(cx, call.program)?;
    there(call.device_list.is_some(), call.num_devices.into(), Code::INVALID_VALUE)?;
    let devices = cx.objects(call.device_list.as_ref())?;
    let count = u64::from(call.num_input_headers);
    there(call.input_headers.is_some(), count, Code::INVALID_VALUE)?;
    there(call.header_include_names.is_some(), count, Code::INVALID_VALUE)?;
    let headers = cx.objects(call.input_headers.as_ref())?;
    let names = cx.pieces(call.header_include_names.as_ref())?;
    let options = build_options(call.options);
    let function = cx.api().clCompileProgram()?;
    // SAFETY: 1. to 3. as above; options and names end with a zero each.
    let status = unsafe {
        function(
            program.raw(),
            call.num_devices,
            devices.pointer(),
            options.as_ptr().cast_mut().cast(),
            call.num_input_headers,
            headers.pointer(),
            names.pointer(),
            NULL,
            NULL,
        )
    };
    ended(cx, call.pfn_notify, status);
    check(status)
}

/// `clLinkProgram`.
pub(crate) fn link_program(cx: &mut Session<'_>, call: &LinkProgram<'_>) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    there(call.device_list.is_some(), call.num_devices.into(), Code::INVALID_VALUE)?;
    let devices = cx.objects(call.device_list.as_ref())?;
    there(
        call.input_programs.is_some(),
        call.num_input_programs.into(),
        Code::INVALID_VALUE,
    )?;
    let programs = cx.objects(call.input_programs.as_ref())?;
    let function = cx.api().clLinkProgram()?;
    let mut status = 0_i32;
    // SAFETY: 1. to 3. as above.
    let made = unsafe {
        function(
            context.raw(),
            call.num_devices,
            devices.pointer(),
            text(call.options),
            call.num_input_programs,
            programs.pointer(),
            NULL,
            NULL,
            (&raw mut status).cast(),
        )
    };
    ended(cx, call.pfn_notify, status);
    if made.is_null() {
        return check(status).and(Err(Code::OUT_OF_RESOURCES));
    }
    // One that does not link is there all the same, and says why (OpenCL API, clLinkProgram).
    cx.insert(call.returned, made, &[&context])?;
    check(status)
}

/// `clSetProgramSpecializationConstant`, of programs that have an intermediate language. PoCL 3.1 ends the process at some others.
pub(crate) fn set_program_specialization_constant(
    cx: &mut Session<'_>,
    call: &SetProgramSpecializationConstant<'_>,
) -> Result<(), Code> {
    let program = cx.object(call.program)?;
    there(call.spec_value.is_some(), call.spec_size, Code::INVALID_VALUE)?;
    if query(cx, &program, PROGRAM_IL, (0, NULL))? == 0 {
        return Err(Code(Sort::Program.invalid()));
    }
    let value = Bytes::new(call.spec_value.as_ref());
    let function = cx.api().clSetProgramSpecializationConstant()?;
    // SAFETY: 1. to 3. as above.
    check(unsafe { function(program.raw(), call.spec_id, call.spec_size, value.pointer()) })
}

/// `clGetProgramInfo`. Binaries come one behind the other, in the lengths that `CL_PROGRAM_BINARY_SIZES` tells.
pub(crate) fn get_program_info(cx: &mut Session<'_>, call: &GetProgramInfo) -> Result<(), Code> {
    let program = cx.object(call.program)?;
    let size = match call.param_name {
        PROGRAM_REFERENCE_COUNT => return Err(Code::INVALID_VALUE),
        PROGRAM_BINARIES => binaries(cx, &program, call.param_value)?,
        PROGRAM_CONTEXT | PROGRAM_DEVICES => objects(cx, &program, call)?,
        PROGRAM_SOURCE if let Some(source) = source(&program) => {
            cx.give(call.param_value, &source)?;
            source.len() as u64
        }
        _ => {
            let at = cx.arena(call.param_value)?;
            query(cx, &program, call.param_name, (call.param_value_size, at))?
        }
    };
    let reply = GetProgramInfoReply {
        status: 0,
        param_value_size_ret: call.param_value_size_ret.then_some(size),
    };
    cx.answer(call, &reply, None)
}

/// Asks the back end: how long the answer is.
fn query(cx: &Session<'_>, program: &Held, name: u32, (size, at): (u64, P)) -> Result<u64, Code> {
    let mut length = 0_u64;
    let function = cx.api().clGetProgramInfo()?;
    let place = ask(&mut length, true);
    // SAFETY: 1. to 3. as above.
    check(unsafe { function(program.raw(), name, size, at, place) })?;
    Ok(length)
}

/// An answer of objects.
fn objects(cx: &Session<'_>, program: &Held, call: &GetProgramInfo) -> Result<u64, Code> {
    let mut answer = Answer::new(call.param_value.is_some(), call.param_value_size, u8::SIZE);
    let size = answer.limit(call.param_value_size);
    let length = query(cx, program, call.param_name, (size, answer.pointer()))?;
    let sorts = [PROGRAM_CONTEXT, PROGRAM_DEVICES]
        .map(i64::from)
        .into_iter()
        .zip([Sort::Context, Sort::Device]);
    cx.translate(&mut answer, length, call.param_name, &sorts.collect::<Vec<_>>());
    cx.give(call.param_value, &answer.bytes(length))?;
    Ok(length)
}

/// All binaries: how long they are together.
fn binaries(cx: &Session<'_>, program: &Held, place: Option<Span>) -> Result<u64, Code> {
    let mut count = 0_u32;
    query(cx, program, PROGRAM_NUM_DEVICES, (4, ask(&mut count, true)))?;
    let mut sizes = vec![0_u64; count.min(MOST_DEVICES) as usize];
    let length = size_of_val(sizes.as_slice()) as u64;
    query(cx, program, PROGRAM_BINARY_SIZES, (length, sizes.as_mut_ptr().cast()))?;
    let all = sizes
        .iter()
        .try_fold(0_u64, |all, size| all.checked_add(*size))
        .ok_or(Code::OUT_OF_RESOURCES)?;
    let Some(place) = place else {
        return Ok(all);
    };
    if place.length < all {
        return Err(Code::INVALID_VALUE);
    }
    let mut at = place.offset;
    let mut places = Vec::new();
    for size in sizes {
        places.push(cx.arena(Some(Span {
            offset: at,
            length: size,
        }))?);
        at += size;
    }
    let pointers = (length, places.as_mut_ptr().cast());
    query(cx, program, PROGRAM_BINARIES, pointers)?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_says_of_a_build_is_kept() {
        assert_eq!(build_options(Some(c"-DN=4")), b"-DN=4 -cl-kernel-arg-info\0");
        assert_eq!(build_options(None), b" -cl-kernel-arg-info\0");
    }
}
