//! The calls that made an object and brought it to its state, kept with the object, so that another server can make it again.
//!
//! What a call does to which object is generated (`Call::effects`): a call that makes or changes one is kept with it, and goes with it. Bytes
//! of the arena that such a call reads are copied; those that memory is made of are not, as memory is saved as it is at the end.

use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use accel_proto::opencl::{
    AnyCall, BuildProgram, CloneKernel, CompileProgram, CreateBuffer, CreateBufferWithProperties, CreateImage,
    CreateImage2D, CreateImage3D, CreateImageWithProperties, CreateKernel, CreateKernelsInProgram, ImageDesc,
    LinkProgram, SetKernelArg, SetKernelArgSVMPointer, SetKernelExecInfo,
};
use accel_proto::{Callback, Effect, Limits, MESSAGE, Object as Touched, Span, Writer};

use super::query;
use crate::manual::without_host;
use crate::objects::{Held, Object, Sort};
use crate::session::Session;

/// The key of calls that build a program.
const BUILD: u64 = 3 << 32;

/// A call as it came.
#[derive(Debug, Clone)]
pub(crate) struct Logged {
    /// Calls are made again in this order.
    pub(crate) order: u64,
    pub(crate) op: u16,
    pub(crate) arguments: Box<[u8]>,
    /// Parts of the arena that it reads.
    pub(crate) bytes: Vec<(Span, Box<[u8]>)>,
    /// Objects that it names.
    uses: Vec<Weak<Object>>,
    /// A later call with the same key undoes what this one did.
    key: Option<u64>,
}

impl Logged {
    /// Whether it has built a program.
    pub(super) fn is_build(&self) -> bool {
        self.key == Some(BUILD)
    }

    /// Whether the objects that it names are there still, so that they are made again as well.
    pub(super) fn has_its_objects(&self) -> bool {
        self.uses.iter().all(|used| used.strong_count() > 0)
    }
}

/// Whether calls are kept, and in which order they come.
#[derive(Debug, Default)]
pub(crate) struct Order {
    next: AtomicU64,
}

impl Order {
    pub(crate) fn next(&self) -> u64 {
        self.next.fetch_add(1, Ordering::SeqCst)
    }
}

/// Keeps a call that was carried out.
pub(crate) fn log(cx: &Session<'_>, call: &AnyCall<'_>) {
    let Some(order) = cx.client.order.as_ref() else {
        return;
    };
    match call {
        AnyCall::CloneKernel(call) => return log_clone(cx, order, call),
        AnyCall::CreateKernelsInProgram(call) => return log_kernels(cx, order, call),
        // What is mapped is saved by itself.
        AnyCall::EnqueueMapBuffer(_) | AnyCall::EnqueueMapImage(_) | AnyCall::EnqueueUnmapMemObject(_) => return,
        _ => {}
    }
    let mut changed = Vec::new();
    call.effects(&mut |effect, object| {
        let Touched::Handle(handle) = object else { return };
        // Events are saved by their states.
        let sort = Sort::of(handle.c_type).filter(|sort| *sort != Sort::Event);
        if let (Effect::Creates | Effect::Changes, Some(sort)) = (effect, sort) {
            changed.extend(cx.client.find(sort, handle.raw).ok());
        }
    });
    if changed.is_empty() {
        return;
    }
    match logged(cx, order.next(), &plain(call)) {
        Some(logged) => changed.iter().for_each(|object| keep(object, logged.clone())),
        None => cx
            .client
            .cannot_be_saved("an object that was made by a call too long to be kept"),
    }
}

fn keep(object: &Held, logged: Logged) {
    let mut log = object.log.lock().unwrap_or_else(PoisonError::into_inner);
    if logged.key.is_some() {
        log.retain(|before| before.key != logged.key);
    }
    log.push(logged);
}

/// The same without what is said to the client, and without bytes that memory is made of.
fn plain<'a>(call: &AnyCall<'a>) -> AnyCall<'a> {
    let silent = Callback(0);
    let dense = |desc: Option<ImageDesc>| {
        desc.map(|desc| ImageDesc {
            image_row_pitch: 0,
            image_slice_pitch: 0,
            ..desc
        })
    };
    match call {
        AnyCall::CreateBuffer(call) => AnyCall::CreateBuffer(CreateBuffer {
            flags: without_host(call.flags),
            host_ptr: None,
            ..*call
        }),
        AnyCall::CreateBufferWithProperties(call) => AnyCall::CreateBufferWithProperties(CreateBufferWithProperties {
            flags: without_host(call.flags),
            host_ptr: None,
            ..*call
        }),
        AnyCall::CreateImage(call) if call.image_desc.is_some_and(|desc| desc.mem_object.is_null()) => {
            AnyCall::CreateImage(CreateImage {
                flags: without_host(call.flags),
                image_desc: dense(call.image_desc),
                host_ptr: None,
                ..*call
            })
        }
        AnyCall::CreateImageWithProperties(call) if call.image_desc.is_some_and(|desc| desc.mem_object.is_null()) => {
            AnyCall::CreateImageWithProperties(CreateImageWithProperties {
                flags: without_host(call.flags),
                image_desc: dense(call.image_desc),
                host_ptr: None,
                ..*call
            })
        }
        AnyCall::CreateImage2D(call) => AnyCall::CreateImage2D(CreateImage2D {
            flags: without_host(call.flags),
            image_row_pitch: 0,
            host_ptr: None,
            ..*call
        }),
        AnyCall::CreateImage3D(call) => AnyCall::CreateImage3D(CreateImage3D {
            flags: without_host(call.flags),
            image_row_pitch: 0,
            image_slice_pitch: 0,
            host_ptr: None,
            ..*call
        }),
        AnyCall::BuildProgram(call) => AnyCall::BuildProgram(BuildProgram {
            pfn_notify: silent,
            ..*call
        }),
        AnyCall::CompileProgram(call) => AnyCall::CompileProgram(CompileProgram {
            pfn_notify: silent,
            ..*call
        }),
        AnyCall::LinkProgram(call) => AnyCall::LinkProgram(LinkProgram {
            pfn_notify: silent,
            ..*call
        }),
        call => call.clone(),
    }
}

/// Calls that set something have a key for what they set.
fn key(call: &AnyCall<'_>) -> Option<u64> {
    let of = |kind: u64, number: u32| Some(kind << 32 | u64::from(number));
    match call {
        AnyCall::SetKernelArg(call) => of(1, call.arg_index),
        AnyCall::SetKernelArgSVMPointer(call) => of(1, call.arg_index),
        AnyCall::SetKernelExecInfo(call) => of(2, call.param_name),
        AnyCall::BuildProgram(_) | AnyCall::CompileProgram(_) => Some(BUILD),
        AnyCall::SetProgramSpecializationConstant(call) => of(4, call.spec_id),
        AnyCall::SetDefaultDeviceCommandQueue(_) => of(5, 0),
        _ => None,
    }
}

/// A call as it is kept; nothing if it does not fit.
pub(super) fn logged(cx: &Session<'_>, order: u64, call: &AnyCall<'_>) -> Option<Logged> {
    let mut scratch = cx.scratch.borrow_mut();
    scratch.resize(MESSAGE, 0);
    let mut writer = Writer::new(&mut scratch);
    call.write(&mut writer);
    let length = writer.finish().ok()?;
    let arguments: Box<[u8]> = scratch.get(..length)?.into();
    drop(scratch);
    let mut bytes = Vec::new();
    let mut missing = false;
    // Others read nothing of the arena but what memory is made of.
    let reads = matches!(
        call,
        AnyCall::CreateProgramWithSource(_)
            | AnyCall::CreateProgramWithBinary(_)
            | AnyCall::CreateProgramWithIL(_)
            | AnyCall::CompileProgram(_)
    );
    call.spans(&mut |span| match reads.then(|| cx.copy(span)) {
        Some(Ok(copy)) => bytes.push((span, copy.into())),
        Some(Err(_)) => missing = true,
        None => {}
    });
    (!missing).then(|| Logged {
        order,
        op: call.op(),
        arguments,
        bytes,
        uses: used(cx, call),
        key: key(call),
    })
}

/// Objects that a call names; one whose name is not found is gone.
fn used(cx: &Session<'_>, call: &AnyCall<'_>) -> Vec<Weak<Object>> {
    let mut used = Vec::new();
    call.effects(&mut |effect, object| {
        if let (Effect::Uses, Touched::Handle(handle)) = (effect, object)
            && let Some(sort) = Sort::of(handle.c_type)
            && handle.raw != 0
        {
            let found = cx.client.find(sort, handle.raw).ok();
            used.push(found.map_or_else(Weak::new, |found| Arc::downgrade(&found.0)));
        }
    });
    used
}

/// A kernel that was made of another one is a new one with the same arguments: the other one's may change.
fn log_clone(cx: &Session<'_>, order: &Order, call: &CloneKernel) {
    let limits = Limits {
        arena: cx.client.arena(),
    };
    let (Ok(old), Ok(new)) = (cx.object(call.source_kernel), cx.object(call.returned)) else {
        return;
    };
    let log = old.log.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for before in log {
        let again = AnyCall::decode(before.op, &before.arguments, limits).ok();
        let again = again.and_then(|again| of_kernel(again, call));
        match again.and_then(|again| logged(cx, order.next(), &again)) {
            Some(logged) => keep(&new, logged),
            None => cx
                .client
                .cannot_be_saved("a kernel that was made of one whose calls were not kept"),
        }
    }
}

/// Kernels that were made all at once are made again one by one: not all of them may be there still.
fn log_kernels(cx: &Session<'_>, order: &Order, call: &CreateKernelsInProgram<'_>) {
    for returned in call.kernels.iter().flat_map(|kernels| kernels.iter()) {
        // The client has room for more names than there are kernels.
        let Ok(kernel) = cx.object(returned) else { continue };
        let name = query::bytes(cx.api(), &kernel, query::KERNEL_FUNCTION_NAME).ok();
        let name = name.and_then(|name| CString::from_vec_with_nul(name).ok());
        let again = name.as_ref().map(|name| {
            AnyCall::CreateKernel(CreateKernel {
                program: call.program,
                kernel_name: Some(name),
                returned,
            })
        });
        match again.and_then(|again| logged(cx, order.next(), &again)) {
            Some(logged) => keep(&kernel, logged),
            None => cx.client.cannot_be_saved("a kernel whose name is not known"),
        }
    }
}

/// The same call of the new kernel.
fn of_kernel<'a>(call: AnyCall<'a>, clone: &CloneKernel) -> Option<AnyCall<'a>> {
    let kernel = clone.returned;
    Some(match call {
        AnyCall::CreateKernel(call) => AnyCall::CreateKernel(CreateKernel {
            returned: kernel,
            ..call
        }),
        AnyCall::SetKernelArg(call) => AnyCall::SetKernelArg(SetKernelArg { kernel, ..call }),
        AnyCall::SetKernelArgSVMPointer(call) => {
            AnyCall::SetKernelArgSVMPointer(SetKernelArgSVMPointer { kernel, ..call })
        }
        AnyCall::SetKernelExecInfo(call) => AnyCall::SetKernelExecInfo(SetKernelExecInfo { kernel, ..call }),
        _ => return None,
    })
}
