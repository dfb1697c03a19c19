//! Making, building and asking for programs (OpenCL API, section 5.8). Knows no ring.
//!
//! A build is waited for; who asks to be notified is notified before the call returns, which the API allows.

use std::ffi::c_char;
use std::sync::Arc;

use accel_proto::{Call, Callback, List, Pieces, Span, opencl as calls};

use crate::arguments::{In, Opaque, Out, Ref};
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::info::{Query, Wanted};
use crate::object::{Data, Object};
use crate::{memory, returned, status};

/// `pfn_notify` of a build.
type Built = extern "C" fn(Ref, Opaque);

/// `CL_PROGRAM_BINARY_SIZES` and `CL_PROGRAM_BINARIES`.
const BINARY_SIZES: u32 = 0x1165;
const BINARIES: u32 = 0x1166;

/// Pieces of data, one behind the other in the arena, for as long as a call.
struct InArena {
    lengths: Vec<u64>,
    span: Span,
    block: Option<accel_window::Block>,
}

impl InArena {
    fn new(connection: &Connection, pieces: &[&[u8]]) -> Result<Self, Code> {
        let all = pieces.concat();
        let block = connection
            .take(all.len() as u64)
            .map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
        let span = Span {
            offset: block.offset(),
            length: all.len() as u64,
        };
        let shape = crate::bulk::Shape::line(span.length);
        shape.copy_in(connection, span.offset, all.as_ptr().expose_provenance());
        Ok(Self {
            lengths: pieces.iter().map(|piece| piece.len() as u64).collect(),
            span,
            block: Some(block),
        })
    }

    fn pieces(&self) -> Pieces<'_> {
        Pieces {
            lengths: List::new(&self.lengths),
            data: self.span,
        }
    }

    /// The server has copied it.
    fn over(mut self, connection: &Connection) {
        if let Some(block) = self.block.take() {
            connection.give_back(block);
        }
    }
}

/// The call that makes a program is made.
fn created<'c, C: Call<'c>>(
    connection: &'static Connection,
    call: C,
    touched: &Touched<'_>,
    made: Arc<Object>,
) -> Result<Ref, Code> {
    let (call, answer) = connection.call(|_| call, touched, true)?;
    answer.success(&call)?;
    Ok(made.publish())
}

fn fresh(connection: &'static Connection, context: &Object) -> Result<Arc<Object>, Code> {
    Object::make::<calls::Program>(connection, &[context], Data::None)
}

/// `clCreateProgramWithSource`.
pub(crate) extern "C" fn create_program_with_source(
    context: Ref,
    count: u32,
    strings: In<In<c_char>>,
    lengths: In<u64>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let context = context.object::<calls::Context>()?;
        let connection = context.connection()?;
        if count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let strings = strings.required(count.into())?;
        let lengths = lengths.list(count.into())?;
        let bytes: Vec<In<u8>> = strings.iter().map(|string| string.bytes()).collect();
        let mut pieces = Vec::new();
        for (index, (string, bytes)) in strings.iter().zip(&bytes).enumerate() {
            let length = lengths
                .and_then(|lengths| lengths.get(index))
                .copied()
                .filter(|length| *length != 0);
            pieces.push(match length {
                None => string.text().ok_or(Code::INVALID_VALUE)?.to_bytes(),
                Some(length) => bytes.required(length)?,
            });
        }
        let source = InArena::new(connection, &pieces)?;
        let made = fresh(connection, context)?;
        let call = calls::CreateProgramWithSource {
            context: context.handle(),
            count,
            strings: source.pieces(),
            returned: made.handle(),
        };
        let touched = [context];
        let touched = Touched::new(&touched, &[]).reads(Some(source.span));
        let program = created(connection, call, &touched, made);
        source.over(connection);
        program
    })
}

/// `clCreateProgramWithBinary`.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn create_program_with_binary(
    context: Ref,
    num_devices: u32,
    device_list: In<Ref>,
    lengths: In<u64>,
    binaries: In<In<u8>>,
    binary_status: Out<i32>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let context = context.object::<calls::Context>()?;
        let connection = context.connection()?;
        let devices = device_list.objects::<calls::Device>(num_devices, Code::INVALID_VALUE, Code::INVALID_DEVICE)?;
        if num_devices == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (lengths, binaries) = (
            lengths.required(num_devices.into())?,
            binaries.required(num_devices.into())?,
        );
        let mut pieces = Vec::new();
        for (binary, length) in binaries.iter().zip(lengths) {
            if *length == 0 {
                return Err(Code::INVALID_VALUE);
            }
            pieces.push(binary.required(*length)?);
        }
        let data = InArena::new(connection, &pieces)?;
        let made = fresh(connection, context)?;
        let make = |reply| calls::CreateProgramWithBinary {
            context: context.handle(),
            num_devices,
            device_list: devices.list(),
            binaries: data.pieces(),
            binary_status: !binary_status.is_null(),
            returned: made.handle(),
            reply,
        };
        let (objects, lists) = ([context], [devices.objects.as_slice()]);
        let touched = Touched::new(&objects, &lists).reads(Some(data.span));
        let asked = connection.call(make, &touched, false);
        let done = asked.and_then(|(call, answer)| {
            // Of each device, also where the whole is an error.
            let reply = answer.read(&call)?;
            if let Some(each) = reply.binary_status {
                binary_status.put_list(each.iter(), num_devices.into());
            }
            Code::check(reply.status)
        });
        data.over(connection);
        done.map(|()| made.publish())
    })
}

/// `clCreateProgramWithIL`.
pub(crate) extern "C" fn create_program_with_il(context: Ref, il: In<u8>, length: u64, errcode_ret: Out<i32>) -> Ref {
    returned(errcode_ret, || {
        let context = context.object::<calls::Context>()?;
        let connection = context.connection()?;
        if length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let data = InArena::new(connection, &[il.required(length)?])?;
        let made = fresh(connection, context)?;
        let call = calls::CreateProgramWithIL {
            context: context.handle(),
            il: Some(data.span),
            length,
            returned: made.handle(),
        };
        let touched = [context];
        let touched = Touched::new(&touched, &[]).reads(Some(data.span));
        let program = created(connection, call, &touched, made);
        data.over(connection);
        program
    })
}

/// `clBuildProgram`.
pub(crate) extern "C" fn build_program(
    program: Ref,
    num_devices: u32,
    device_list: In<Ref>,
    options: In<c_char>,
    pfn_notify: Option<Built>,
    user_data: Opaque,
) -> i32 {
    status(|| {
        let object = program.object::<calls::Program>()?;
        check_notify(pfn_notify, user_data)?;
        let devices = device_list.objects::<calls::Device>(num_devices, Code::INVALID_VALUE, Code::INVALID_DEVICE)?;
        let call = calls::BuildProgram {
            program: object.handle(),
            num_devices,
            device_list: devices.list(),
            options: options.text(),
            pfn_notify: Callback(0),
        };
        let (objects, lists) = ([object], [devices.objects.as_slice()]);
        let (call, answer) = object
            .connection()?
            .call(|_| call, &Touched::new(&objects, &lists), true)?;
        let built = answer.success(&call).map(drop);
        if let Some(notify) = pfn_notify {
            notify(program, user_data);
        }
        built
    })
}

fn check_notify(pfn_notify: Option<Built>, user_data: Opaque) -> Result<(), Code> {
    match pfn_notify.is_none() && !user_data.is_null() {
        true => Err(Code::INVALID_VALUE),
        false => Ok(()),
    }
}

/// `clCompileProgram`.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn compile_program(
    program: Ref,
    num_devices: u32,
    device_list: In<Ref>,
    options: In<c_char>,
    num_input_headers: u32,
    input_headers: In<Ref>,
    header_include_names: In<In<c_char>>,
    pfn_notify: Option<Built>,
    user_data: Opaque,
) -> i32 {
    status(|| {
        let object = program.object::<calls::Program>()?;
        let connection = object.connection()?;
        check_notify(pfn_notify, user_data)?;
        let devices = device_list.objects::<calls::Device>(num_devices, Code::INVALID_VALUE, Code::INVALID_DEVICE)?;
        let headers =
            input_headers.objects::<calls::Program>(num_input_headers, Code::INVALID_VALUE, Code::INVALID_PROGRAM)?;
        if header_include_names.is_null() != (num_input_headers == 0) {
            return Err(Code::INVALID_VALUE);
        }
        let names = header_include_names.list(num_input_headers.into())?.unwrap_or_default();
        let texts: Option<Vec<_>> = names.iter().map(|name| Some(name.text()?.to_bytes())).collect();
        let data = InArena::new(connection, &texts.ok_or(Code::INVALID_VALUE)?)?;
        let call = calls::CompileProgram {
            program: object.handle(),
            num_devices,
            device_list: devices.list(),
            options: options.text(),
            num_input_headers,
            input_headers: headers.list(),
            header_include_names: (num_input_headers != 0).then(|| data.pieces()),
            pfn_notify: Callback(0),
        };
        let (objects, lists) = ([object], [devices.objects.as_slice(), headers.objects.as_slice()]);
        let touched = Touched::new(&objects, &lists).reads(Some(data.span));
        let asked = connection.call(|_| call, &touched, true);
        let compiled = asked.and_then(|(call, answer)| answer.success(&call).map(drop));
        data.over(connection);
        if let Some(notify) = pfn_notify {
            notify(program, user_data);
        }
        compiled
    })
}

/// `clLinkProgram`.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn link_program(
    context: Ref,
    num_devices: u32,
    device_list: In<Ref>,
    options: In<c_char>,
    num_input_programs: u32,
    input_programs: In<Ref>,
    pfn_notify: Option<Built>,
    user_data: Opaque,
    errcode_ret: Out<i32>,
) -> Ref {
    let mut failure = None;
    let program = returned(errcode_ret, || {
        let context = context.object::<calls::Context>()?;
        let connection = context.connection()?;
        check_notify(pfn_notify, user_data)?;
        let devices = device_list.objects::<calls::Device>(num_devices, Code::INVALID_VALUE, Code::INVALID_DEVICE)?;
        let programs =
            input_programs.objects::<calls::Program>(num_input_programs, Code::INVALID_VALUE, Code::INVALID_PROGRAM)?;
        if num_input_programs == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let made = fresh(connection, context)?;
        let call = calls::LinkProgram {
            context: context.handle(),
            num_devices,
            device_list: devices.list(),
            options: options.text(),
            num_input_programs,
            input_programs: programs.list(),
            pfn_notify: Callback(0),
            returned: made.handle(),
        };
        let (objects, lists) = ([context], [devices.objects.as_slice(), programs.objects.as_slice()]);
        let (call, answer) = connection.call(|_| call, &Touched::new(&objects, &lists), true)?;
        match answer.success(&call) {
            Ok(_) => {}
            // What does not link is a program all the same, which says why (OpenCL API, clLinkProgram).
            Err(Code::LINK_PROGRAM_FAILURE) => failure = Some(Code::LINK_PROGRAM_FAILURE),
            Err(code) => return Err(code),
        }
        let program = made.publish();
        if let Some(notify) = pfn_notify {
            notify(program, user_data);
        }
        Ok(program)
    });
    if let Some(code) = failure {
        errcode_ret.put(code.0);
    }
    program
}

/// `clSetProgramReleaseCallback`: this library ends the object, so it calls the function.
pub(crate) extern "C" fn set_program_release_callback(
    program: Ref,
    pfn_notify: Option<Built>,
    user_data: Opaque,
) -> i32 {
    status(|| memory::at_the_end(program.object::<calls::Program>()?, pfn_notify, user_data))
}

/// An answer of any length: asked for its length first, then for its bytes, which come through the arena.
fn long_answer<'c, C: Call<'c>>(
    connection: &Connection,
    touched: &Touched<'_>,
    make: impl Fn(u64, Option<Span>) -> C,
    length: impl Fn(&C, &crate::answer::Answer) -> Result<u64, Code>,
) -> Result<Vec<u8>, Code> {
    let (call, answer) = connection.call(|_| make(0, None), touched, false)?;
    let needed = length(&call, &answer)?;
    if needed == 0 {
        return Ok(Vec::new());
    }
    let block = connection.take(needed).map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
    let span = Span {
        offset: block.offset(),
        length: needed,
    };
    let asked = connection.call(|_| make(needed, Some(span)), &touched.writes(Some(span)), false);
    let bytes = asked.and_then(|(call, answer)| {
        let given = length(&call, &answer)?.min(needed);
        connection.read(Span { length: given, ..span })
    });
    connection.give_back(block);
    bytes
}

fn info(program: &Object, param_name: u32) -> Result<Vec<u8>, Code> {
    let query = Query {
        command: "clGetProgramInfo",
        object: program,
        param_name,
        depends: Vec::new(),
        // Answers change when a build ends, which other clients' calls do not tell.
        keeps: false,
    };
    query.value(|connection, _| {
        let make = |param_value_size, param_value| calls::GetProgramInfo {
            program: program.handle(),
            param_name,
            param_value_size,
            param_value,
            param_value_size_ret: true,
        };
        long_answer(connection, &Touched::new(&[program], &[]), make, |call, answer| {
            Ok(answer.success(call)?.param_value_size_ret.unwrap_or_default())
        })
    })
}

/// `clGetProgramInfo`. Binaries come one behind the other, and go to where the application's list says.
pub(crate) extern "C" fn get_program_info(
    program: Ref,
    param_name: u32,
    size: u64,
    value: Out<u8>,
    size_ret: Out<u64>,
) -> i32 {
    status(|| {
        let program = program.object::<calls::Program>()?;
        let wanted = Wanted { size, value, size_ret };
        if param_name != BINARIES {
            return wanted.give(&info(program, param_name)?);
        }
        let sizes = info(program, BINARY_SIZES)?;
        let sizes: Vec<u64> = sizes
            .as_chunks()
            .0
            .iter()
            .map(|bytes| u64::from_ne_bytes(*bytes))
            .collect();
        let length = 8 * sizes.len() as u64;
        size_ret.put(length);
        if value.is_null() {
            return Ok(());
        }
        if size < length {
            return Err(Code::INVALID_VALUE);
        }
        let binaries = info(program, BINARIES)?;
        let mut rest = binaries.as_slice();
        for (place, size) in value.places(sizes.len()).zip(&sizes) {
            let length = usize::try_from(*size).unwrap_or(usize::MAX);
            let (binary, after) = rest.split_at_checked(length).ok_or(Code::OUT_OF_RESOURCES)?;
            place.put_bytes(binary, *size);
            rest = after;
        }
        Ok(())
    })
}

/// `clGetProgramBuildInfo`.
pub(crate) extern "C" fn get_program_build_info(
    program: Ref,
    device: Ref,
    param_name: u32,
    size: u64,
    value: Out<u8>,
    size_ret: Out<u64>,
) -> i32 {
    status(|| {
        let program = program.object::<calls::Program>()?;
        let device = device.object::<calls::Device>()?;
        let make = |param_value_size, param_value| calls::GetProgramBuildInfo {
            program: program.handle(),
            device: device.handle(),
            param_name,
            param_value_size,
            param_value,
            param_value_size_ret: true,
        };
        let objects = [program, device];
        let answer = long_answer(
            program.connection()?,
            &Touched::new(&objects, &[]),
            make,
            |call, answer| Ok(answer.success(call)?.param_value_size_ret.unwrap_or_default()),
        )?;
        Wanted { size, value, size_ret }.give(&answer)
    })
}
