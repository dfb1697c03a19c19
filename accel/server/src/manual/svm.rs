//! Shared virtual memory. Whatever address a client sends is looked up in the table of what it has; the back end hears of no other.

use std::sync::Arc;
use std::time::Duration;

use accel_proto::opencl::{
    EnqueueSVMMemFill, EnqueueSVMMemcpy, EnqueueSVMMigrateMem, SVMAlloc, SVMAllocReply, SVMFree,
    SetKernelArgSVMPointer, SetKernelExecInfo,
};
use accel_proto::{List, Memory, SvmAddress};

use super::event::waits;
use super::kernel::takes;
use crate::api::{Code, P, check};
use crate::arguments::Argument;
use crate::marshal::Bytes;
use crate::objects::{Held, State};
use crate::session::Session;
use crate::svm::{Allocation, PAGE};

/// Flags that there are: `CL_MEM_READ_WRITE`, `CL_MEM_WRITE_ONLY` and `CL_MEM_READ_ONLY`. Those of fine grain ask for memory that client and
/// kernels have at a time.
const FLAGS: u64 = 7;

/// Boundaries that can be asked for.
const ALIGNMENT: u32 = 4096;

/// Numbers of the API (cl.h).
const CONTEXT_DEVICES: u32 = 0x1081;
const DEVICE_SVM_CAPABILITIES: u32 = 0x1053;
const KERNEL_EXEC_INFO_SVM_PTRS: u32 = 0x11b6;
const MEM_COPY_OVERLAP: Code = Code(-8);

/// The longest pattern, which is a vector of sixteen numbers of 64 bits.
const PATTERN: u64 = 128;

/// `clSVMAlloc`.
pub(crate) fn svm_alloc(cx: &mut Session<'_>, call: &SVMAlloc) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    let is_boundary = call.alignment == 0 || call.alignment.is_power_of_two() && call.alignment <= ALIGNMENT;
    if call.size == 0 || call.flags & !FLAGS != 0 || !is_boundary {
        return Err(Code::INVALID_VALUE);
    }
    // Whole pages, wherever the back end begins.
    let whole = call.size.checked_next_multiple_of(PAGE).ok_or(Code::INVALID_VALUE)?;
    let all = whole.checked_add(PAGE).ok_or(Code::INVALID_VALUE)?;
    let charge = cx.charge(all)?;
    let function = cx.api().clSVMAlloc()?;
    // SAFETY: 1. and 2. as above.
    let base = unsafe { function(context.raw(), call.flags, all, call.alignment) };
    if base.is_null() {
        return Err(Code::MEM_OBJECT_ALLOCATION_FAILURE);
    }
    let allocation = cx.client.svm.allocated((base, &context), (PAGE, call.size), charge)?;
    let begin = allocation.begin();
    zero(cx, &context, allocation.at(begin), whole)?;
    cx.client.svm.insert(allocation)?;
    let reply = SVMAllocReply {
        status: 0,
        returned: SvmAddress(begin),
    };
    cx.answer(call, &reply, None)
}

/// Fills new memory with zeroes, as the back end may have had anything there: by a queue of its own.
fn zero(cx: &Session<'_>, context: &Held, at: P, length: u64) -> Result<(), Code> {
    if !cx.client.backend.calls_back {
        return Ok(());
    }
    let device = device(cx, context)?;
    let (create, fill) = (cx.api().clCreateCommandQueue()?, cx.api().clEnqueueSVMMemFill()?);
    let (finish, release) = (cx.api().clFinish()?, cx.api().clReleaseCommandQueue()?);
    let mut status = 0_i32;
    // SAFETY: 1. and 2. as above; 3. the place is that of a number.
    let queue = unsafe { create(context.raw(), device, 0, (&raw mut status).cast()) };
    check(status)?;
    let zeroes = Bytes::of(&[0; 16]);
    let (none, pattern) = (std::ptr::null_mut(), zeroes.pointer());
    // SAFETY: 1. and 2. as above; 3. the pattern has sixteen bytes, and the allocation so many behind this address, which are whole pages.
    let filled = unsafe { fill(queue, at, pattern, 16, length, 0, none, none) };
    // SAFETY: 1. and 2. the queue is this function's.
    let finished = unsafe { finish(queue) };
    // SAFETY: as before; it is used no more.
    check(unsafe { release(queue) })?;
    check(filled)?;
    check(finished)
}

/// A device of a context that has shared virtual memory.
fn device(cx: &Session<'_>, context: &Held) -> Result<P, Code> {
    let (devices_of, ask) = (cx.api().clGetContextInfo()?, cx.api().clGetDeviceInfo()?);
    let mut devices: [P; 64] = [std::ptr::null_mut(); 64];
    let (mut length, at) = (0_u64, devices.as_mut_ptr().cast());
    let size = size_of_val(&devices) as u64;
    // SAFETY: 1. and 2. as above; 3. there are as many bytes as are said, and a place for a number.
    check(unsafe { devices_of(context.raw(), CONTEXT_DEVICES, size, at, (&raw mut length).cast()) })?;
    let count = usize::try_from(length).unwrap_or_default() / size_of::<P>();
    let has = |device: &&P| {
        let mut capabilities = 0_u64;
        let (at, none) = ((&raw mut capabilities).cast(), std::ptr::null_mut());
        // SAFETY: 1. the device is the context's, which is held; 3. the place has eight bytes.
        let status = unsafe { ask(**device, DEVICE_SVM_CAPABILITIES, 8, at, none) };
        status == 0 && capabilities & 1 != 0
    };
    let found = devices.iter().take(count).find(has);
    found.copied().ok_or(Code::INVALID_OPERATION)
}

/// `clSVMFree`.
pub(crate) fn svm_free(cx: &mut Session<'_>, call: &SVMFree) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    if call.svm_pointer != SvmAddress::NULL {
        cx.client.svm.remove(call.svm_pointer.0, &context)?;
    }
    cx.client.svm.sweep(cx.client, Duration::ZERO);
    Ok(())
}

/// So many bytes of shared virtual memory for a command in that queue. The allocation is to be held until the queue has the command: another
/// thread may free it meanwhile, and then it stays for the commands that the queues have alone.
fn shared(cx: &Session<'_>, address: SvmAddress, length: u64, queue: &Held) -> Result<(P, Arc<Allocation>), Code> {
    let found = cx.client.svm.find(address.0, length)?;
    let is_of = found.is_of(queue);
    is_of.then(|| (found.at(address.0), found)).ok_or(Code::INVALID_VALUE)
}

/// The same, or bytes of the arena.
fn either(cx: &Session<'_>, memory: Memory, length: u64, queue: &Held) -> Result<(P, Option<Arc<Allocation>>), Code> {
    match memory {
        Memory::Svm(address) => shared(cx, address, length, queue).map(|(at, held)| (at, Some(held))),
        Memory::Arena(span) => cx.arena(Some(span)).map(|at| (at, None)),
    }
}

/// `clEnqueueSVMMemcpy`.
pub(crate) fn enqueue_svm_memcpy(cx: &mut Session<'_>, call: &EnqueueSVMMemcpy<'_>) -> Result<(), Code> {
    let queue = cx.object(call.command_queue)?;
    let (to, _to) = either(cx, call.dst_ptr, call.size, &queue)?;
    let (from, _from) = either(cx, call.src_ptr, call.size, &queue)?;
    if (to.addr().abs_diff(from.addr()) as u64) < call.size {
        return Err(MEM_COPY_OVERLAP);
    }
    let count = call.num_events_in_wait_list;
    let waits = waits(cx, count, call.event_wait_list.as_ref())?;
    let mut event = cx.place(call.event);
    let function = cx.api().clEnqueueSVMMemcpy()?;
    let (blocks, listed, place) = (call.blocking_copy, waits.pointer(), event.pointer());
    // SAFETY: 1. to 3. as above; both places have so many bytes, as was looked up, and stay until the command is complete (`svm`).
    check(unsafe { function(queue.raw(), blocks, to, from, call.size, count, listed, place) })?;
    cx.insert(call.event, event.raw(), &[&queue])
}

/// `clEnqueueSVMMemFill`.
pub(crate) fn enqueue_svm_mem_fill(cx: &mut Session<'_>, call: &EnqueueSVMMemFill<'_>) -> Result<(), Code> {
    let queue = cx.object(call.command_queue)?;
    let (at, _held) = shared(cx, call.svm_ptr, call.size, &queue)?;
    let length = call.pattern_size;
    // Back ends divide by it.
    let fits = length.is_power_of_two()
        && length <= PATTERN
        && call.size.is_multiple_of(length)
        && call.svm_ptr.0.is_multiple_of(length);
    if !fits || call.pattern.is_none() {
        return Err(Code::INVALID_VALUE);
    }
    let pattern = Bytes::new(call.pattern.as_ref());
    let count = call.num_events_in_wait_list;
    let waits = waits(cx, count, call.event_wait_list.as_ref())?;
    let mut event = cx.place(call.event);
    let function = cx.api().clEnqueueSVMMemFill()?;
    let (pattern, listed, place) = (pattern.pointer(), waits.pointer(), event.pointer());
    // SAFETY: 1. to 3. as above; the memory has so many bytes, as was looked up, and stays until the command is complete (`svm`).
    check(unsafe { function(queue.raw(), at, pattern, length, call.size, count, listed, place) })?;
    cx.insert(call.event, event.raw(), &[&queue])
}

/// `clEnqueueSVMMigrateMem`.
pub(crate) fn enqueue_svm_migrate_mem(cx: &mut Session<'_>, call: &EnqueueSVMMigrateMem<'_>) -> Result<(), Code> {
    let queue = cx.object(call.command_queue)?;
    let pointers = call.svm_pointers.as_ref().filter(|pointers| !pointers.is_empty());
    let pointers = pointers.ok_or(Code::INVALID_VALUE)?;
    let sizes = call.sizes.as_ref().map(|sizes| sizes.iter().collect::<Vec<u64>>());
    let size_of = |index: usize| sizes.as_ref().and_then(|sizes| sizes.get(index)).copied();
    let mut addresses = Vec::new();
    let mut held = Vec::new();
    for (index, pointer) in pointers.iter().enumerate() {
        // Of a size that is not said, or is zero, all of the allocation is meant.
        held.push(shared(cx, pointer, size_of(index).unwrap_or_default(), &queue)?);
        addresses.push(pointer.0);
    }
    let found = Bytes::new(Some(&List::new(&addresses)));
    let sizes = Bytes::new(call.sizes.as_ref());
    let count = call.num_events_in_wait_list;
    let waits = waits(cx, count, call.event_wait_list.as_ref())?;
    let mut event = cx.place(call.event);
    let function = cx.api().clEnqueueSVMMigrateMem()?;
    let (listed, place) = (waits.pointer(), event.pointer());
    let (number, found, sizes) = (call.num_svm_pointers, found.pointer(), sizes.pointer());
    // SAFETY: 1. to 3. as above; both lists have as many elements, as the decoder has seen to.
    check(unsafe { function(queue.raw(), number, found, sizes, call.flags, count, listed, place) })?;
    drop(held);
    cx.insert(call.event, event.raw(), &[&queue])
}

/// `clSetKernelArgSVMPointer`.
pub(crate) fn set_kernel_arg_svm_pointer(cx: &mut Session<'_>, call: &SetKernelArgSVMPointer) -> Result<(), Code> {
    let kernel = cx.object(call.kernel)?;
    takes(&kernel, call.arg_index, &Argument::Null)?;
    let found = match call.arg_value {
        SvmAddress::NULL => None,
        address => Some(named(cx, address, &kernel)?),
    };
    let at = found
        .as_ref()
        .map_or(std::ptr::null_mut(), |found| found.at(call.arg_value.0));
    let _alone = kernel.alone();
    let function = cx.api().clSetKernelArgSVMPointer()?;
    // SAFETY: 1. to 3. as above; the memory is held by the kernel.
    check(unsafe { function(kernel.raw(), call.arg_index, at) })?;
    if let State::Kernel(launchable) = &kernel.state {
        launchable.hold(call.arg_index, None);
        launchable.use_memory(|used| match found {
            Some(found) => used.arguments.insert(call.arg_index, found),
            None => used.arguments.remove(&call.arg_index),
        });
    }
    Ok(())
}

/// An allocation that a kernel can reach.
fn named(cx: &Session<'_>, address: SvmAddress, kernel: &Held) -> Result<Arc<Allocation>, Code> {
    let found = cx.client.svm.find(address.0, 0).ok();
    found.filter(|found| found.is_of(kernel)).ok_or(Code::INVALID_ARG_VALUE)
}

/// `clSetKernelExecInfo`: which memory a kernel reaches by pointers in memory. Nothing else is there to be said: devices have no shared
/// virtual memory of fine grain.
pub(crate) fn set_kernel_exec_info(cx: &mut Session<'_>, call: &SetKernelExecInfo<'_>) -> Result<(), Code> {
    let kernel = cx.object(call.kernel)?;
    if call.param_name != KERNEL_EXEC_INFO_SVM_PTRS {
        return Err(Code::INVALID_OPERATION);
    }
    let bytes: Vec<u8> = call.param_value.as_ref().ok_or(Code::INVALID_VALUE)?.iter().collect();
    let (addresses, rest) = bytes.as_chunks::<8>();
    if addresses.is_empty() || !rest.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    let addresses = addresses.iter().map(|address| SvmAddress(u64::from_le_bytes(*address)));
    let found: Result<Vec<_>, Code> = addresses
        .map(|address| named(cx, address, &kernel).map_err(|_| Code::INVALID_VALUE))
        .collect();
    let found = found?;
    let value = Bytes::of(&bytes);
    let _alone = kernel.alone();
    let function = cx.api().clSetKernelExecInfo()?;
    // SAFETY: 1. to 3. as above; the value has so many bytes, of addresses that were looked up and that the kernel holds.
    check(unsafe { function(kernel.raw(), call.param_name, bytes.len() as u64, value.pointer()) })?;
    if let State::Kernel(launchable) = &kernel.state {
        launchable.use_memory(|used| used.told = found);
    }
    Ok(())
}
