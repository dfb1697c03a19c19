//! What is by hand of kernels (OpenCL API, section 5.9): their arguments, and making all of a program. Knows no ring.
//!
//! An argument crosses when it is set, and not again as long as it is the same. Whether eight bytes are an object is seen by their being
//! the address of one; no value of another kind is an address in this library's memory but by design.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock};

use accel_proto::{AnyHandle, Call, Kind as _, List, SvmAddress, Value, opencl as calls};

use crate::arguments::{In, Opaque, Out, Ref};
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::info::Query;
use crate::object::{Data, Object};
use crate::{lock, mapping, status};

/// `CL_KERNEL_NUM_ARGS`.
const NUM_ARGS: u32 = 0x1191;

/// `CL_KERNEL_ARG_ADDRESS_QUALIFIER`, of which `CL_KERNEL_ARG_ADDRESS_GLOBAL` and `CL_KERNEL_ARG_ADDRESS_CONSTANT`.
const ADDRESS_QUALIFIER: u32 = 0x1196;
const GLOBAL: u32 = 0x119b;
const CONSTANT: u32 = 0x119d;

/// `CL_KERNEL_EXEC_INFO_SVM_PTRS` and `CL_KERNEL_EXEC_INFO_SVM_FINE_GRAIN_SYSTEM`.
const EXEC_INFO_SVM_PTRS: u32 = 0x11b6;
const EXEC_INFO_SVM_FINE_GRAIN_SYSTEM: u32 = 0x11b7;

/// The longest argument that is kept to be compared.
const KEPT: u64 = 256;

/// So many shapes of launches of a kernel are known at a time.
const SHAPES: usize = 64;

/// NULL where a buffer can be.
const NO_BUFFER: AnyHandle = AnyHandle {
    c_type: calls::Mem::C_TYPE,
    raw: 0,
};

/// An argument as it was set last.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Argument {
    /// So many bytes of local memory.
    Local(u64),
    Bytes(Vec<u8>),
    /// Bytes that are not compared.
    Long,
    Object(AnyHandle),
    /// An address in shared virtual memory.
    Shared,
}

/// What a back end looks at in an argument: an argument that has taken one of a form takes all others of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Form {
    Local,
    Bytes {
        length: u64,
        /// No object's address is.
        is_zero: bool,
    },
    /// An object of a type of C.
    Object(&'static str),
    /// One that is an image.
    Image,
    /// No object.
    Null,
    Shared,
}

impl Form {
    fn of(arg_size: u64, bytes: Option<&[u8]>, object: Option<AnyHandle>, is_image: bool) -> Self {
        match (object, bytes) {
            (Some(AnyHandle { raw: 0, .. }), _) => Self::Null,
            (Some(_), _) if is_image => Self::Image,
            (Some(AnyHandle { c_type, .. }), _) => Self::Object(c_type),
            (None, None) => Self::Local,
            (None, Some(bytes)) => Self::Bytes {
                length: arg_size,
                is_zero: bytes.iter().all(|byte| *byte == 0),
            },
        }
    }
}

/// A kernel's arguments, by index, and how many there are.
#[derive(Debug, Default)]
pub(crate) struct KernelState {
    arguments: Mutex<BTreeMap<u32, Argument>>,
    /// Forms that arguments have taken.
    taken: Mutex<BTreeSet<(u32, Form)>>,
    launched: Mutex<Launched>,
    count: OnceLock<u32>,
    /// Which of them are known to be buffers, or not to be.
    buffers: Mutex<BTreeMap<u32, bool>>,
}

/// A kernel before its arguments are set.
pub(crate) fn fresh() -> Data {
    Data::Kernel(KernelState::default())
}

fn state(kernel: &Object) -> Result<&KernelState, Code> {
    match &kernel.data {
        Data::Kernel(state) => Ok(state),
        _ => Err(Code::INVALID_KERNEL),
    }
}

/// How many arguments it has; asked for once.
fn count(kernel: &Object) -> Result<u32, Code> {
    let known = &state(kernel)?.count;
    match known.get() {
        Some(count) => Ok(*count),
        None => asked_count(kernel).map(|count| *known.get_or_init(|| count)),
    }
}

fn asked_count(kernel: &Object) -> Result<u32, Code> {
    let query = Query {
        command: "clGetKernelInfo",
        object: kernel,
        param_name: NUM_ARGS,
        depends: Vec::new(),
        keeps: true,
    };
    let bytes = query.value(|connection, size| {
        let make = |reply| calls::GetKernelInfo {
            kernel: kernel.handle(),
            param_name: NUM_ARGS,
            param_value_size: size,
            param_value: true,
            param_value_size_ret: true,
            reply,
        };
        let (call, answer) = connection.call(make, &Touched::new(&[kernel], &[]), false)?;
        let value = answer.success(&call)?.param_value;
        Ok(value.map(|value| value.bytes().to_vec()).unwrap_or_default())
    })?;
    number(&bytes).ok_or(Code::OUT_OF_RESOURCES)
}

/// Whether an argument is an address of a buffer. Where nothing is known of arguments, as of some binaries, none is.
fn is_buffer(kernel: &Object, arg_index: u32) -> bool {
    let Ok(state) = state(kernel) else {
        return false;
    };
    if let Some(known) = lock(&state.buffers).get(&arg_index) {
        return *known;
    }
    let query = Query {
        command: "clGetKernelArgInfo",
        object: kernel,
        param_name: ADDRESS_QUALIFIER,
        depends: vec![arg_index.into()],
        keeps: false,
    };
    let qualifier = query.value(|connection, size| {
        let make = |reply| calls::GetKernelArgInfo {
            kernel: kernel.handle(),
            arg_index,
            param_name: ADDRESS_QUALIFIER,
            param_value_size: size,
            param_value: true,
            param_value_size_ret: true,
            reply,
        };
        let (call, answer) = connection.call(make, &Touched::new(&[kernel], &[]), false)?;
        let value = answer.success(&call)?.param_value;
        Ok(value.map(|value| value.bytes().to_vec()).unwrap_or_default())
    });
    let qualifier = qualifier.ok().and_then(|bytes| number(&bytes));
    let is_buffer = qualifier.is_some_and(|qualifier| [GLOBAL, CONSTANT].contains(&qualifier));
    lock(&state.buffers).insert(arg_index, is_buffer);
    is_buffer
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// What a back end refuses a launch for, but for the numbers themselves: the queue, the work-group's size in each dimension, and in which
/// dimensions there is no work, or a group that is not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    queue: u32,
    /// None of a task.
    dimensions: u32,
    has_size: bool,
    local: Option<[u64; 3]>,
    none: [bool; 3],
    uneven: [bool; 3],
}

impl Shape {
    fn of(queue: &Object, dimensions: u32, global: Option<&[u64]>, local: Option<&[u64]>) -> Self {
        let sizes = |sizes: Option<&[u64]>| {
            let mut all = [1; 3];
            sizes
                .into_iter()
                .flatten()
                .zip(&mut all)
                .for_each(|(size, at)| *at = *size);
            all
        };
        let (works, groups) = (sizes(global), sizes(local));
        let is_uneven = |index: usize| local.is_some() && !works[index].is_multiple_of(groups[index].max(1));
        Self {
            queue: queue.raw(),
            dimensions,
            has_size: global.is_some(),
            local: local.map(|_| groups),
            none: works.map(|size| size == 0),
            uneven: std::array::from_fn(is_uneven),
        }
    }
}

/// Launches that the back end has taken, and how often all of them were forgotten.
#[derive(Debug, Default)]
struct Launched {
    shapes: BTreeSet<Shape>,
    forgotten: u64,
}

impl Launched {
    fn forget(&mut self) {
        self.shapes.clear();
        self.forgotten += 1;
    }
}

/// A launch of a kernel. The first of each shape is waited for, so that who launches a kernel in a way in which it cannot be is told so by
/// that call, as natively; what the back end has taken once it takes again.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    state: &'a KernelState,
    shape: Shape,
}

impl<'a> Launch<'a> {
    /// About to be put in a queue; all arguments have to be set.
    pub(crate) fn of(
        kernel: &'a Object,
        queue: &Object,
        dimensions: u32,
        global: Option<&[u64]>,
        local: Option<&[u64]>,
    ) -> Result<Self, Code> {
        // A child of fork has no part in what its parent's threads have locked.
        kernel.connection()?;
        let count = count(kernel)?;
        let state = state(kernel)?;
        if lock(&state.arguments).len() < usize::try_from(count).unwrap_or(usize::MAX) {
            return Err(Code::INVALID_KERNEL_ARGS);
        }
        let shape = Shape::of(queue, dimensions, global, local);
        Ok(Self { state, shape })
    }

    /// Puts it, and waits until the back end has taken it if it is new.
    pub(crate) fn put<'c, C: Call<'c> + Copy>(
        &self,
        connection: &Connection,
        call: &C,
        touched: &Touched<'_>,
    ) -> Result<(), Code> {
        let before = {
            let launched = lock(&self.state.launched);
            if launched.shapes.contains(&self.shape) {
                drop(launched);
                return connection.send(call, touched);
            }
            launched.forgotten
        };
        let (call, answer) = connection.call(|_| *call, touched, false)?;
        answer.success(&call)?;
        let mut launched = lock(&self.state.launched);
        if launched.shapes.len() >= SHAPES {
            launched.shapes.clear();
        }
        // What was put with another size of local memory says nothing of this one.
        if launched.forgotten == before {
            launched.shapes.insert(self.shape);
        }
        Ok(())
    }
}

/// Puts an argument, and waits for whether it can be one if it is the first of its form.
fn put<'c, C: Call<'c> + Copy>(
    connection: &Connection,
    kernel: &Object,
    (arg_index, form): (u32, Form),
    call: &C,
) -> Result<(), Code> {
    let taken = &state(kernel)?.taken;
    let (objects, form) = ([kernel], (arg_index, form));
    let touched = Touched::new(&objects, &[]);
    if lock(taken).contains(&form) {
        return connection.send(call, &touched);
    }
    let (call, answer) = connection.call(|_| *call, &touched, false)?;
    answer.success(&call)?;
    lock(taken).insert(form);
    Ok(())
}

/// An object whose address the eight bytes are, and whether it is an image.
fn object(connection: &Connection, bytes: &[u8]) -> Option<(AnyHandle, bool)> {
    let address = u64::from_ne_bytes(*bytes.first_chunk()?);
    if bytes.len() != 8 || !connection.is_argument(address) {
        return None;
    }
    let object = Ref::at(address);
    [
        (calls::Mem::C_TYPE, object.object::<calls::Mem>()),
        (calls::Sampler::C_TYPE, object.object::<calls::Sampler>()),
        (calls::CommandQueue::C_TYPE, object.object::<calls::CommandQueue>()),
    ]
    .into_iter()
    .find_map(|(c_type, found)| {
        let found = found.ok()?;
        let is_image = mapping::state(found).is_ok_and(|state| state.image().is_some());
        let raw = found.raw();
        Some((AnyHandle { c_type, raw }, is_image))
    })
}

/// `clSetKernelArg`.
pub(crate) extern "C" fn set_kernel_arg(kernel: Ref, arg_index: u32, arg_size: u64, arg_value: In<u8>) -> i32 {
    status(|| {
        let kernel = kernel.object::<calls::Kernel>()?;
        let connection = kernel.connection()?;
        if arg_index >= count(kernel)? {
            return Err(Code::INVALID_ARG_INDEX);
        }
        if arg_size == 0 {
            return Err(Code::INVALID_ARG_SIZE);
        }
        let bytes = arg_value.list(if arg_value.is_null() { 0 } else { arg_size })?;
        let is_null = bytes.is_none_or(|bytes| bytes == [0; 8]);
        let found = match bytes {
            // A buffer of NULL, which eight zeroes of a number are not.
            _ if is_null && is_buffer(kernel, arg_index) => Some((NO_BUFFER, false)),
            bytes => bytes.and_then(|bytes| object(connection, bytes)),
        };
        let (found, is_image) = found.map_or((None, false), |(found, is_image)| (Some(found), is_image));
        let mut arguments = lock(&state(kernel)?.arguments);
        let is_same = arguments
            .get(&arg_index)
            .is_some_and(|known| match (known, bytes, found) {
                (Argument::Local(size), None, None) => *size == arg_size,
                (Argument::Object(known), _, Some(object)) => *known == object,
                (Argument::Bytes(known), Some(bytes), None) => known == bytes,
                _ => false,
            });
        if is_same {
            return Ok(());
        }
        let value = found.map(Value::Object).or(bytes.map(Value::Bytes));
        let call = calls::SetKernelArg {
            kernel: kernel.handle(),
            arg_index,
            arg_size,
            arg_value: value,
        };
        let form = Form::of(arg_size, bytes, found, is_image);
        put(connection, kernel, (arg_index, form), &call)?;
        let argument = match (bytes, found) {
            (_, Some(object)) => Argument::Object(object),
            (None, None) => {
                // A back end may have room for one size of a work-group's memory, and not for another.
                lock(&state(kernel)?.launched).forget();
                Argument::Local(arg_size)
            }
            (Some(bytes), None) if arg_size <= KEPT => Argument::Bytes(bytes.to_vec()),
            (Some(_), None) => Argument::Long,
        };
        arguments.insert(arg_index, argument);
        Ok(())
    })
}

/// `clSetKernelArgSVMPointer`: an address in shared virtual memory, or NULL.
pub(crate) extern "C" fn set_kernel_arg_svm_pointer(kernel: Ref, arg_index: u32, arg_value: Opaque) -> i32 {
    status(|| {
        let kernel = kernel.object::<calls::Kernel>()?;
        let connection = kernel.connection()?;
        if arg_index >= count(kernel)? {
            return Err(Code::INVALID_ARG_INDEX);
        }
        if !arg_value.is_null() && !connection.regions.has(arg_value.addr(), 1) {
            return Err(Code::INVALID_ARG_VALUE);
        }
        let address = SvmAddress(arg_value.addr() as u64);
        let mut arguments = lock(&state(kernel)?.arguments);
        // One that is the same is set again: its memory may have been freed, and allocated, since.
        let call = calls::SetKernelArgSVMPointer {
            kernel: kernel.handle(),
            arg_index,
            arg_value: address,
        };
        put(connection, kernel, (arg_index, Form::Shared), &call)?;
        arguments.insert(arg_index, Argument::Shared);
        Ok(())
    })
}

/// `clSetKernelExecInfo`: which shared virtual memory a kernel reaches by pointers in memory.
pub(crate) extern "C" fn set_kernel_exec_info(kernel: Ref, name: u32, size: u64, value: In<u8>) -> i32 {
    status(|| {
        let kernel = kernel.object::<calls::Kernel>()?;
        let connection = kernel.connection()?;
        let bytes = value.list(size)?.ok_or(Code::INVALID_VALUE)?;
        match name {
            EXEC_INFO_SVM_PTRS => {}
            // Of all memory of the application's no device has it.
            EXEC_INFO_SVM_FINE_GRAIN_SYSTEM if bytes.len() == 4 => {
                return if bytes == [0; 4] {
                    Ok(())
                } else {
                    Err(Code::INVALID_OPERATION)
                };
            }
            _ => return Err(Code::INVALID_VALUE),
        }
        let (addresses, rest) = bytes.as_chunks::<8>();
        let mut addresses = addresses.iter().map(|address| u64::from_ne_bytes(*address));
        let has = |address: u64| usize::try_from(address).is_ok_and(|address| connection.regions.has(address, 1));
        if bytes.is_empty() || !rest.is_empty() || !addresses.all(has) {
            return Err(Code::INVALID_VALUE);
        }
        let call = calls::SetKernelExecInfo {
            kernel: kernel.handle(),
            param_name: name,
            param_value_size: size,
            param_value: Some(List::new(bytes)),
        };
        let (call, answer) = connection.call(|_| call, &Touched::new(&[kernel], &[]), false)?;
        answer.success(&call).map(drop)
    })
}

/// `clCloneKernel`: the arguments come along.
pub(crate) extern "C" fn clone_kernel(source_kernel: Ref, errcode_ret: Out<i32>) -> Ref {
    crate::returned(errcode_ret, || {
        let source = source_kernel.object::<calls::Kernel>()?;
        let connection = source.connection()?;
        let arguments = lock(&state(source)?.arguments).clone();
        let program = source.parent::<calls::Program>().ok_or(Code::INVALID_KERNEL)?;
        let data = Data::Kernel(KernelState {
            arguments: Mutex::new(arguments),
            ..KernelState::default()
        });
        let made = Object::make::<calls::Kernel>(connection, &[program], data)?;
        let call = calls::CloneKernel {
            source_kernel: source.handle(),
            returned: made.handle(),
        };
        let (call, answer) = connection.call(|_| call, &Touched::new(&[source], &[]), false)?;
        answer.success(&call)?;
        Ok(made.publish())
    })
}

/// `clCreateKernelsInProgram`.
pub(crate) extern "C" fn create_kernels_in_program(
    program: Ref,
    num_kernels: u32,
    kernels: Out<Ref>,
    num_kernels_ret: Out<u32>,
) -> i32 {
    status(|| {
        let program = program.object::<calls::Program>()?;
        let connection = program.connection()?;
        let wanted = if kernels.is_null() { 0 } else { num_kernels };
        // Names are for as many as there can be: no more are made than a message carries.
        let room = u32::try_from(accel_proto::MESSAGE / 8).unwrap_or(u32::MAX);
        if wanted > room {
            return Err(Code::OUT_OF_HOST_MEMORY);
        }
        let make = |_| Object::make::<calls::Kernel>(connection, &[program], fresh());
        let made: Result<Vec<_>, _> = (0..wanted).map(make).collect();
        let made = made?;
        let names: Vec<_> = made.iter().map(|kernel| kernel.handle()).collect();
        let call = calls::CreateKernelsInProgram {
            program: program.handle(),
            num_kernels: wanted,
            kernels: (!kernels.is_null()).then(|| List::new(&names)),
            num_kernels_ret: true,
        };
        let (call, answer) = connection.call(|_| call, &Touched::new(&[program], &[]), false)?;
        let there = answer.success(&call)?.num_kernels_ret.unwrap_or_default();
        num_kernels_ret.put(there);
        let exist = usize::try_from(there).unwrap_or(usize::MAX);
        kernels.put_list(made.into_iter().take(exist).map(Object::publish), wanted.into());
        Ok(())
    })
}
