//! Shared virtual memory: what a client has, and what it says that it has.
#![allow(unsafe_code, reason = "functions of a C API that free memory while they are called")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use accel_proto::{Memory, SvmAddress};

use super::*;
use crate::api::P;
use crate::tenant::TenantLimits;

const INVALID_VALUE: i32 = -30;
const INVALID_ARG_VALUE: i32 = -50;
const ALLOCATION_FAILURE: i32 = -4;

fn alloc(caller: &mut Caller<'_>, context: Handle<Context>, size: u64) -> Result<u64, i32> {
    let call = SVMAlloc {
        context,
        flags: 1,
        size,
        alignment: 0,
    };
    let bytes = caller.ask(&call);
    let reply = SVMAllocReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
    if reply.status == 0 {
        Ok(reply.returned.0)
    } else {
        Err(reply.status)
    }
}

fn free(context: Handle<Context>, address: u64) -> SVMFree {
    SVMFree {
        context,
        svm_pointer: SvmAddress(address),
    }
}

fn fill<'a>(queue: Handle<CommandQueue>, address: u64, size: u64) -> EnqueueSVMMemFill<'a> {
    EnqueueSVMMemFill {
        command_queue: queue,
        svm_ptr: SvmAddress(address),
        pattern: Some(List::new(&[7])),
        pattern_size: 1,
        size,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    }
}

fn copy<'a>(queue: Handle<CommandQueue>, to: Memory, from: Memory, size: u64) -> EnqueueSVMMemcpy<'a> {
    EnqueueSVMMemcpy {
        command_queue: queue,
        blocking_copy: 1,
        dst_ptr: to,
        src_ptr: from,
        size,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    }
}

#[test]
fn the_back_end_hears_of_no_address_that_is_not_the_clients() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (context, queue, _) = caller.buffer(64);
    let begin = alloc(&mut caller, context, 5000).unwrap();
    let other = alloc(&mut caller, context, 100).unwrap();
    assert_eq!((begin % 4096, other % 4096), (0, 0));
    for (address, size, expected) in [
        (begin, 5000, 0),
        (begin + 4999, 1, 0),
        (begin, 5001, INVALID_VALUE),
        (begin + 5000, 1, INVALID_VALUE),
        (begin - 1, 1, INVALID_VALUE),
        (begin + 1, u64::MAX, INVALID_VALUE),
        (u64::MAX, 1, INVALID_VALUE),
        (0, 1, INVALID_VALUE),
    ] {
        assert_eq!(
            caller.status(&fill(queue, address, size)),
            expected,
            "{address:#x} {size}"
        );
        let (shared, arena) = (
            Memory::Svm(SvmAddress(address)),
            Memory::Arena(Span {
                offset: 4096,
                length: size.min(8192),
            }),
        );
        // More than the arena has is no call at all.
        if size < ARENA {
            assert_eq!(caller.status(&copy(queue, shared, arena, size)), expected);
            assert_eq!(caller.status(&copy(queue, arena, shared, size)), expected);
        }
    }
    let overlap = Memory::Svm(SvmAddress(begin + 50));
    let shared = Memory::Svm(SvmAddress(begin));
    assert_eq!(caller.status(&copy(queue, overlap, shared, 51)), -8);
    assert_eq!(caller.status(&copy(queue, overlap, shared, 50)), 0);
    // Patterns by which back ends divide.
    for (pattern_size, size, expected) in [
        (0, 64, INVALID_VALUE),
        (3, 63, INVALID_VALUE),
        (8, 63, INVALID_VALUE),
        (8, 64, 0),
    ] {
        let call = EnqueueSVMMemFill {
            pattern: Some(List::new(&[0; 8][..usize::try_from(pattern_size).unwrap()])),
            pattern_size,
            ..fill(queue, begin, size)
        };
        assert_eq!(caller.status(&call), expected);
    }
    // Another client's addresses are nothing here, and another context's are none of this queue's.
    let stranger = super::client();
    let mut theirs = Caller::new(&stranger);
    let (_, their_queue, _) = theirs.buffer(64);
    assert_eq!(theirs.status(&fill(their_queue, begin, 8)), INVALID_VALUE);
    caller.context(name(2, 1));
    let elsewhere = alloc(&mut caller, name(2, 1), 64).unwrap();
    assert_eq!(caller.status(&fill(queue, elsewhere, 8)), INVALID_VALUE);
    assert_eq!(caller.status(&free(context, elsewhere)), INVALID_VALUE);
    assert_eq!(caller.status(&free(context, begin + 8)), INVALID_VALUE);
    assert_eq!(caller.status(&free(context, begin)), 0);
    assert_eq!(caller.status(&free(context, begin)), INVALID_VALUE);
    assert_eq!(caller.status(&fill(queue, begin, 8)), INVALID_VALUE);
    stranger.end();
    client.end();
}

thread_local! {
    /// What another thread of the client does while the back end is about to take a command.
    static MEANWHILE: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

fn meanwhile() -> i32 {
    MEANWHILE.with_borrow(|what| what.as_ref().map_or((), |what| what()));
    0
}

unsafe extern "C" fn memcpy(_: P, _: u32, _: P, _: P, _: u64, _: u32, _: P, _: P) -> i32 {
    meanwhile()
}

unsafe extern "C" fn memfill(_: P, _: P, _: P, _: u64, _: u64, _: u32, _: P, _: P) -> i32 {
    meanwhile()
}

unsafe extern "C" fn migrate(_: P, _: u32, _: P, _: P, _: u64, _: u32, _: P, _: P) -> i32 {
    meanwhile()
}

#[test]
fn what_a_command_is_about_to_use_is_not_freed_before_the_queue_has_it() {
    let function = |name: &CStr| match name.to_bytes() {
        b"clEnqueueSVMMemcpy" => Some(memcpy as *const ()),
        b"clEnqueueSVMMemFill" => Some(memfill as *const ()),
        b"clEnqueueSVMMigrateMem" => Some(migrate as *const ()),
        _ => crate::null::function(name),
    };
    // SAFETY: 1. the three have the types of their names, and all others are the null back end's.
    let backend = unsafe { backend_of(&function) };
    let tenant = Tenant::unlimited();
    let (_, window) = Window::create(Geometry::new(1, 2, ARENA).unwrap()).unwrap();
    let client = Arc::new(Client::new(Arc::new(backend), Arc::clone(&tenant), Some(window)));
    let mut caller = Caller::new(&client);
    let (context, queue, _) = caller.buffer(64);
    for call in 0..4 {
        let begin = alloc(&mut caller, context, 100).unwrap();
        let used = tenant.quota.used();
        let (other, freed) = (Arc::clone(&client), Rc::new(Cell::default()));
        let seen = Rc::clone(&freed);
        MEANWHILE.set(Some(Box::new(move || {
            let status = Caller::new(&other).status(&free(context, begin));
            seen.set(Some((status, other.tenant.quota.used())));
        })));
        let (shared, arena) = (
            Memory::Svm(SvmAddress(begin)),
            Memory::Arena(Span {
                offset: 4096,
                length: 100,
            }),
        );
        let status = match call {
            0 => caller.status(&copy(queue, shared, arena, 100)),
            1 => caller.status(&copy(queue, arena, shared, 100)),
            2 => caller.status(&fill(queue, begin, 100)),
            _ => caller.status(&EnqueueSVMMigrateMem {
                command_queue: queue,
                num_svm_pointers: 1,
                svm_pointers: Some(List::new(&[SvmAddress(begin)])),
                sizes: None,
                flags: 0,
                num_events_in_wait_list: 0,
                event_wait_list: None,
                event: Handle::NULL,
            }),
        };
        MEANWHILE.take();
        assert_eq!(
            (status, freed.get()),
            (0, Some((0, used))),
            "call {call}: it is there still"
        );
        assert_eq!(caller.status(&free(context, 0)), 0);
        assert!(tenant.quota.used() < used, "it is freed behind the call");
    }
    client.end();
}

#[test]
fn it_is_charged_until_nobody_needs_it() {
    let limits = TenantLimits {
        memory: Some(100 << 10),
        ..TenantLimits::default()
    };
    let tenant = Tenant::new(&limits).unwrap();
    let client = client_of(&tenant);
    let mut caller = Caller::new(&client);
    let (context, ..) = caller.buffer(64);
    caller.kernel(context);
    // Each takes whole pages, and one more for where the back end begins.
    let one = alloc(&mut caller, context, 40 << 10).unwrap();
    assert_eq!(tenant.quota.used(), 64 + (44 << 10));
    let two = alloc(&mut caller, context, 40 << 10).unwrap();
    assert_eq!(alloc(&mut caller, context, 40 << 10), Err(ALLOCATION_FAILURE));
    let set = |address| SetKernelArgSVMPointer {
        kernel: name(1, 1),
        arg_index: 0,
        arg_value: SvmAddress(address),
    };
    assert_eq!(caller.status(&set(one + (40 << 10))), INVALID_ARG_VALUE);
    assert_eq!(caller.status(&set(one + 8)), 0);
    let addresses = two.to_le_bytes();
    let told = SetKernelExecInfo {
        kernel: name(1, 1),
        param_name: 0x11b6,
        param_value_size: 8,
        param_value: Some(List::new(&addresses)),
    };
    assert_eq!(caller.status(&told), 0);
    let unknown = 0x1234_u64.to_le_bytes();
    let wrong = SetKernelExecInfo {
        param_value: Some(List::new(&unknown)),
        ..told
    };
    assert_eq!(caller.status(&wrong), INVALID_VALUE);
    // The kernel can be launched with both still.
    assert_eq!(caller.status(&free(context, one)), 0);
    assert_eq!(caller.status(&free(context, two)), 0);
    assert_eq!(tenant.quota.used(), 64 + (88 << 10));
    assert_eq!(caller.status(&set(0)), 0);
    let three = alloc(&mut caller, context, 40 << 10).unwrap();
    assert_eq!(tenant.quota.used(), 64 + (88 << 10));
    assert_eq!(caller.status(&ReleaseKernel { kernel: name(1, 1) }), 0);
    assert_eq!(caller.status(&free(context, three)), 0);
    assert_eq!(tenant.quota.used(), 64);
    // A buffer that is shared memory is not charged, and keeps it.
    let four = alloc(&mut caller, context, 8192).unwrap();
    let buffer = |address, flags, size, index| CreateBuffer {
        context,
        flags,
        size,
        host_ptr: Some(Memory::Svm(SvmAddress(address))),
        returned: name(index, 1),
    };
    assert_eq!(caller.status(&buffer(four + 4096, 1 | 8, 4096, 5)), 0);
    assert_eq!(tenant.quota.used(), 64 + (12 << 10));
    // More than there is, a copy, another context's, and what is none.
    assert_eq!(caller.status(&buffer(four + 4096, 1 | 8, 4097, 6)), INVALID_VALUE);
    assert_eq!(caller.status(&buffer(four, 1 | 32, 4096, 6)), INVALID_VALUE);
    caller.context(name(2, 1));
    let elsewhere = CreateBuffer {
        context: name(2, 1),
        ..buffer(four, 1 | 8, 4096, 6)
    };
    assert_eq!(caller.status(&elsewhere), INVALID_VALUE);
    assert_eq!(caller.status(&buffer(0x1000, 1 | 8, 64, 6)), INVALID_VALUE);
    assert_eq!(caller.status(&free(context, four)), 0);
    assert_eq!(tenant.quota.used(), 64 + (12 << 10));
    assert_eq!(caller.status(&ReleaseMemObject { memobj: name(5, 1) }), 0);
    assert_eq!(caller.status(&free(context, 0)), 0);
    assert_eq!(tenant.quota.used(), 64);
    // What is left goes with the client.
    alloc(&mut caller, context, 1).unwrap();
    client.end();
    assert_eq!(tenant.quota.used(), 0);
}

/// Memory that is not shared, of about as many bytes each, with the names from 2 on.
fn others(context: Handle<Context>) -> (CreateBuffer, CreateImage, CreatePipe<'static>) {
    let buffer = CreateBuffer {
        context,
        flags: 1,
        size: 40 << 10,
        host_ptr: None,
        returned: name(2, 1),
    };
    let image = CreateImage {
        context,
        flags: 1,
        image_format: Some(ImageFormat {
            image_channel_order: 0x10b5,
            image_channel_data_type: 0x10da,
        }),
        image_desc: Some(ImageDesc {
            image_type: 0x10f1,
            image_width: 100,
            image_height: 100,
            image_depth: 0,
            image_array_size: 0,
            image_row_pitch: 0,
            image_slice_pitch: 0,
            num_mip_levels: 0,
            num_samples: 0,
            mem_object: Handle::NULL,
        }),
        host_ptr: None,
        returned: name(3, 1),
    };
    let pipe = CreatePipe {
        context,
        flags: 1,
        pipe_packet_size: 1 << 10,
        pipe_max_packets: 40,
        properties: None,
        returned: name(4, 1),
    };
    (buffer, image, pipe)
}

#[test]
fn what_is_freed_is_there_for_all_other_memory() {
    let limits = TenantLimits {
        memory: Some(64 << 10),
        ..TenantLimits::default()
    };
    let tenant = Tenant::new(&limits).unwrap();
    let client = client_of(&tenant);
    let mut caller = Caller::new(&client);
    let (context, ..) = caller.buffer(64);
    caller.kernel(context);
    let (buffer, image, pipe) = others(context);
    for which in 0..3 {
        let make = |caller: &mut Caller<'_>| match which {
            0 => caller.status(&buffer),
            1 => caller.status(&image),
            _ => caller.status(&pipe),
        };
        let address = alloc(&mut caller, context, 40 << 10).unwrap();
        let set = |address| SetKernelArgSVMPointer {
            kernel: name(1, 1),
            arg_index: 0,
            arg_value: SvmAddress(address),
        };
        assert_eq!(caller.status(&set(address)), 0);
        assert_eq!(caller.status(&free(context, address)), 0);
        // The kernel has it; then nobody has, and no call about shared memory comes behind.
        assert_eq!(make(&mut caller), ALLOCATION_FAILURE, "{which}");
        assert_eq!(caller.status(&set(0)), 0);
        assert_eq!(make(&mut caller), 0, "{which}");
        let memobj = name(2 + which, 1);
        assert_eq!(caller.status(&ReleaseMemObject { memobj }), 0);
    }
    client.end();
    assert_eq!(tenant.quota.used(), 0);
}

#[test]
fn what_is_no_memory_is_not_allocated() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (context, ..) = caller.buffer(64);
    let call = SVMAlloc {
        context,
        flags: 1,
        size: 64,
        alignment: 64,
    };
    assert_eq!(caller.status(&call), 0);
    for wrong in [
        SVMAlloc { size: 0, ..call },
        SVMAlloc {
            size: u64::MAX - 100,
            ..call
        },
        SVMAlloc { alignment: 3, ..call },
        SVMAlloc {
            alignment: 1 << 20,
            ..call
        },
        SVMAlloc {
            flags: 1 | 1 << 10,
            ..call
        },
    ] {
        assert_eq!(caller.status(&wrong), INVALID_VALUE, "{wrong:?}");
    }
    client.end();
}
