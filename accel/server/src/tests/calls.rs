//! Calls one by one: names, bounds, errors, maps, callbacks.

use std::time::{Duration, Instant};

use accel_proto::control::AwaitCompletions;
use accel_proto::{AnyHandle, Arguments, RECORD, Value};

use super::*;
use crate::api::Code;
use crate::objects::Sort;

#[test]
fn what_is_told_has_one_name_and_stays() {
    let client = client();
    let mut caller = Caller::new(&client);
    let first = caller.device();
    assert_eq!(first, caller.device());
    assert!(first.0.index() >= Handle::<Platform>::FIRST_TOLD && first.1.index() >= Handle::<Device>::FIRST_TOLD);
    // A whole device has no references (OpenCL API, clReleaseDevice).
    assert_eq!(caller.status(&ReleaseDevice { device: first.1 }), 0);
    let mut info = GetDeviceInfo {
        device: first.1,
        param_name: 0x1031,
        param_value_size: 8,
        param_value: true,
        param_value_size_ret: true,
        reply: REPLIES,
    };
    let bytes = caller.ask(&info);
    let reply = GetDeviceInfoReply::read(&mut Reader::new(&bytes, LIMITS), &info).unwrap();
    let platform = u64::from(first.0.raw()).to_le_bytes();
    assert_eq!(
        (reply.param_value.unwrap().bytes(), reply.param_value_size_ret),
        (&platform[..], Some(8))
    );
    // What only the client knows, such as references, would be the server's.
    info.param_name = 0x1047;
    assert_eq!(caller.status(&info), Code::INVALID_VALUE.0);
}

#[test]
fn answers_longer_than_a_record_go_where_the_client_says() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (_, device) = caller.device();
    let mut info = GetDeviceInfo {
        device,
        param_name: 0x1005,
        param_value_size: 1000,
        param_value: true,
        param_value_size_ret: true,
        reply: REPLIES,
    };
    let bytes = caller.ask(&info);
    let reply = GetDeviceInfoReply::read(&mut Reader::new(&bytes, LIMITS), &info).unwrap();
    assert_eq!(
        (reply.param_value.unwrap().len(), reply.param_value_size_ret),
        (24, Some(24))
    );
    info.param_name = 0x1031;
    info.param_value_size = u64::MAX;
    assert_eq!(caller.status(&info), 0);
    // One that has no room for it is told so, and nothing is written anywhere else.
    info.param_name = 0x1005;
    info.param_value_size = 1000;
    info.param_value_size_ret = false;
    info.reply = Span { offset: 8, length: 8 };
    info.param_value = true;
    let record = caller.record(&info, true);
    // 8 + 24 bytes fit into a record, so that no place is needed.
    assert!(!caller.worker.serve(&record).unwrap().as_bytes()[2..4].contains(&1));
}

#[test]
fn names_are_of_one_kind_one_index_and_one_generation() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (context, queue, buffer) = caller.buffer(4096);
    assert_eq!(caller.status(&write(queue, buffer, (0, 4096))), 0);
    for wrong in [name(1, 2), name(2, 1), name(Handle::<Mem>::FIRST_TOLD, 1), Handle::NULL] {
        assert_eq!(caller.status(&write(queue, wrong, (0, 1))), -38, "{wrong:?}");
    }
    assert_eq!(caller.status(&write(name(3, 1), buffer, (0, 1))), -36);
    // A name is taken until it is released, and never has the same generation twice.
    let mut again = CreateBuffer {
        context,
        flags: 1,
        size: 16,
        host_ptr: None,
        returned: buffer,
    };
    assert_eq!(caller.status(&again), Code::INVALID_VALUE.0);
    assert_eq!(caller.status(&ReleaseMemObject { memobj: buffer }), 0);
    assert_eq!(caller.status(&ReleaseMemObject { memobj: buffer }), -38);
    assert_eq!(caller.status(&write(queue, buffer, (0, 1))), -38);
    assert_eq!(caller.status(&again), Code::INVALID_VALUE.0);
    again.returned = name(1, 2);
    assert_eq!(caller.status(&again), 0);
    assert_eq!(caller.status(&write(queue, name(1, 2), (0, 16))), 0);
    // The client names its own below what it is told of.
    again.returned = name(Handle::<Mem>::FIRST_TOLD, 1);
    assert_eq!(caller.status(&again), Code::INVALID_VALUE.0);
    again.returned = Handle::NULL;
    assert_eq!(caller.status(&again), Code::INVALID_VALUE.0);
}

#[test]
fn what_others_need_is_found_when_it_is_released() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (context, queue, buffer) = caller.buffer(64);
    assert_eq!(caller.status(&ReleaseContext { context }), 0);
    assert_eq!(caller.status(&ReleaseContext { context }), -34);
    // The queue and the buffer were made with it.
    let info = |command_queue| GetCommandQueueInfo {
        command_queue,
        param_name: 0x1090,
        param_value_size: 8,
        param_value: true,
        param_value_size_ret: false,
        reply: REPLIES,
    };
    assert_eq!(caller.status(&info(queue)), 0);
    let create = CreateBuffer {
        context,
        flags: 1,
        size: 16,
        host_ptr: None,
        returned: name(9, 1),
    };
    assert_eq!(caller.status(&create), 0);
    for memobj in [buffer, name(9, 1)] {
        assert_eq!(caller.status(&ReleaseMemObject { memobj }), 0);
    }
    assert_eq!(caller.status(&ReleaseCommandQueue { command_queue: queue }), 0);
    assert_eq!(caller.status(&create), -34);
}

#[test]
fn what_is_outside_of_a_buffer_does_not_reach_the_back_end() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (_, queue, buffer) = caller.buffer(100);
    for (part, status) in [
        ((0, 100), 0),
        ((100, 0), 0),
        ((1, 100), -30),
        ((101, 0), -30),
        ((u64::MAX, 1), -30),
        ((u64::MAX, 2), -30),
    ] {
        assert_eq!(caller.status(&write(queue, buffer, part)), status, "{part:?}");
    }
    let sub = |origin, size, index| CreateSubBuffer {
        buffer,
        flags: 0,
        buffer_create_type: 0x1220,
        buffer_create_info: Some(BufferRegion { origin, size }),
        returned: name(index, 1),
    };
    assert_eq!(caller.status(&sub(50, 51, 5)), -30);
    assert_eq!(caller.status(&sub(50, 50, 5)), 0);
    assert_eq!(caller.status(&write(queue, name(5, 1), (0, 51))), -30);
    let three = [[0; 3], [10, 10, 1], [10, 11, 1]];
    let mut rect = EnqueueReadBufferRect {
        command_queue: queue,
        buffer,
        blocking_read: 1,
        buffer_origin: List::new(&three[0]),
        host_origin: List::new(&three[0]),
        region: List::new(&three[1]),
        buffer_row_pitch: 0,
        buffer_slice_pitch: 0,
        host_row_pitch: 0,
        host_slice_pitch: 0,
        ptr: Some(Span { offset: 0, length: 100 }),
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    };
    assert_eq!(caller.status(&rect), 0);
    rect.region = List::new(&three[2]);
    assert_eq!(caller.status(&rect), -30);
}

#[test]
fn a_failure_that_nobody_waits_for_is_told_once_by_its_queue() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (_, queue, buffer) = caller.buffer(64);
    let mut wrong = write(queue, name(7, 1), (0, 1));
    wrong.event = name(3, 1);
    caller.send(&wrong);
    caller.send(&write(queue, buffer, (64, 1)));
    caller.send(&Flush { command_queue: queue });
    assert_eq!(caller.status(&Finish { command_queue: queue }), -38);
    assert_eq!(caller.status(&Finish { command_queue: queue }), 0);
    // The event was never made, and who waits for it hears why; its name is free again when it is released.
    let events = [name(3, 1)];
    let wait = WaitForEvents {
        num_events: 1,
        event_list: Some(List::new(&events)),
    };
    assert_eq!(caller.status(&wait), -38);
    caller.send(&ReleaseEvent { event: name(3, 1) });
    assert_eq!(caller.status(&wait), -58);
    // Also that of a blocking call on the queue.
    caller.send(&write(queue, buffer, (64, 1)));
    let mut read = write(queue, buffer, (0, 64));
    read.blocking_write = 1;
    assert_eq!(caller.status(&read), -30);
    assert_eq!(caller.status(&read), 0);
}

#[test]
fn the_command_that_tells_a_failure_is_not_carried_out() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (_, queue, buffer) = caller.buffer(64);
    caller.send(&write(queue, buffer, (64, 1)));
    let mut next = write(queue, buffer, (0, 64));
    next.event = name(3, 1);
    assert_eq!(caller.status(&next), -30);
    // Whoever heard of that gives the event's name to another.
    assert_eq!(caller.status(&next), 0, "the name is free");
}

#[test]
fn a_queue_on_a_device_that_has_none_does_not_reach_the_back_end() {
    let client = client();
    let mut caller = Caller::new(&client);
    let device = caller.context(name(1, 1));
    let words = [0x1093, 1 | 1 << 2, 0];
    let create = |properties| CreateCommandQueueWithProperties {
        context: name(1, 1),
        device,
        properties,
        returned: name(1, 1),
    };
    assert_eq!(caller.status(&create(Some(List::new(&words)))), -35);
    let plain = CreateCommandQueue {
        context: name(1, 1),
        device,
        properties: 1 | 1 << 2,
        returned: name(1, 1),
    };
    assert_eq!(caller.status(&plain), -35);
    assert_eq!(caller.status(&create(Some(List::new(&[0x1093, 1, 0])))), 0);
}

#[test]
fn maps_are_of_their_object() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (_, queue, buffer) = caller.buffer(64);
    let place = Span {
        offset: 8192,
        length: 32,
    };
    let map = EnqueueMapBuffer {
        command_queue: queue,
        buffer,
        blocking_map: 1,
        map_flags: 2,
        offset: 32,
        size: 32,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: name(4, 1),
        returned: place,
    };
    let unmap = |mapped_ptr| EnqueueUnmapMemObject {
        command_queue: queue,
        memobj: buffer,
        mapped_ptr,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    };
    assert_eq!(caller.status(&unmap(place)), -30);
    assert_eq!(caller.status(&map), 0);
    assert_eq!(
        caller.status(&unmap(Span {
            offset: 8193,
            length: 1
        })),
        -30
    );
    assert_eq!(caller.status(&unmap(place)), 0);
    assert_eq!(caller.status(&unmap(place)), -30);
}

#[test]
fn callbacks_that_are_due_are_told_to_who_asks() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (context, ..) = caller.buffer(64);
    let text = b"kernel void f() {}";
    let source = client.window.as_ref().unwrap().slice(0, text.len() as u64).unwrap();
    source.write(0, text).unwrap();
    let lengths = [text.len() as u64];
    let create = CreateProgramWithSource {
        context,
        count: 1,
        strings: accel_proto::Pieces {
            lengths: List::new(&lengths),
            data: Span {
                offset: 0,
                length: lengths[0],
            },
        },
        returned: name(1, 1),
    };
    assert_eq!(caller.status(&create), 0);
    let build = BuildProgram {
        program: name(1, 1),
        num_devices: 0,
        device_list: None,
        options: Some(c"-DN=4"),
        pfn_notify: Callback(77),
    };
    assert_eq!(caller.status(&build), 0);
    let wait = AwaitCompletions {
        most: 9,
        milliseconds: 0,
        reply: Span { offset: 0, length: 0 },
    };
    let bytes = caller.ask(&wait);
    assert_eq!(bytes, [0, 0, 0, 0, 1, 0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0]);
    let bytes = caller.ask(&wait);
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn bytes_that_are_no_call_are_answered_by_a_code() {
    let client = client();
    let mut caller = Caller::new(&client);
    let serve = |caller: &mut Caller<'_>, bytes: [u8; RECORD]| {
        let reply = caller.worker.serve(&Record::from_bytes(bytes)).unwrap();
        let Arguments::Inline(bytes) = reply.arguments(LIMITS).unwrap() else {
            panic!("{reply:?}");
        };
        i32::from_le_bytes(bytes.try_into().unwrap())
    };
    let mut bytes = [0; RECORD];
    bytes[2] = 4;
    // No such call.
    assert_eq!(serve(&mut caller, bytes), -59);
    // Flags that nobody knows, a reply, a message outside of the arena.
    bytes[2] = 0x80;
    assert_eq!(serve(&mut caller, bytes), -30);
    bytes[2] = 6;
    assert_eq!(serve(&mut caller, bytes), -30);
    bytes[2] = 5;
    bytes[4] = 1;
    bytes[16..24].copy_from_slice(&ARENA.to_le_bytes());
    assert_eq!(serve(&mut caller, bytes), -30);
    assert_eq!(caller.worker.refused, 4);
}

#[test]
fn a_kernel_holds_what_its_arguments_are() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (context, queue, buffer) = caller.buffer(64);
    caller.kernel(context);
    let mut set = SetKernelArg {
        kernel: name(1, 1),
        arg_index: 3,
        arg_size: 8,
        arg_value: Some(Value::Object(AnyHandle {
            c_type: "cl_mem",
            raw: buffer.raw(),
        })),
    };
    assert_eq!(caller.status(&set), 0);
    let clone = CloneKernel {
        source_kernel: name(1, 1),
        returned: name(2, 1),
    };
    assert_eq!(caller.status(&clone), 0);
    assert_eq!(caller.status(&ReleaseMemObject { memobj: buffer }), 0);
    // The clone holds it when the kernel does not any more.
    set.arg_value = Some(Value::Bytes(&[1; 8]));
    assert_eq!(caller.status(&set), 0);
    assert_eq!(caller.status(&write(queue, buffer, (0, 1))), 0);
    set.kernel = name(2, 1);
    assert_eq!(caller.status(&set), 0);
    assert_eq!(caller.status(&write(queue, buffer, (0, 1))), -38);
}

/// What a client says over and over takes no more room than what it said last.
#[test]
fn calls_that_undo_each_other_are_kept_once() {
    let client = client().saved(1, None);
    let mut caller = Caller::new(&client);
    let (context, ..) = caller.buffer(64);
    caller.kernel(context);
    for value in 0..100 {
        for arg_index in [0, 1] {
            let set = SetKernelArg {
                kernel: name(1, 1),
                arg_index,
                arg_size: 4,
                arg_value: Some(Value::Bytes(&[value; 4])),
            };
            assert_eq!(caller.status(&set), 0);
        }
    }
    let kernel = client.find(Sort::Kernel, name::<Kernel>(1, 1).raw()).unwrap();
    assert_eq!(kernel.log.lock().unwrap().len(), 3);
    assert_eq!(client.unsaved(), None);
}

#[test]
fn a_number_without_its_list_does_not_reach_the_back_end() {
    let client = client();
    let mut caller = Caller::new(&client);
    let (context, queue, _) = caller.buffer(64);
    let marker = |num_events_in_wait_list| EnqueueMarkerWithWaitList {
        command_queue: queue,
        num_events_in_wait_list,
        event_wait_list: None,
        event: Handle::NULL,
    };
    assert_eq!(caller.status(&marker(0)), 0);
    assert_eq!(caller.status(&marker(3)), -57);
    let context = CreateContext {
        properties: None,
        num_devices: 2,
        devices: None,
        pfn_notify: Callback(0),
        returned: name(context.index() + 1, 1),
    };
    assert_eq!(caller.status(&context), -30);
    // What drivers do not have since OpenCL 1.1.
    let property = SetCommandQueueProperty {
        command_queue: queue,
        properties: 1,
        enable: 1,
        old_properties: false,
    };
    assert_eq!(caller.status(&property), -59);
}

#[test]
fn an_argument_of_another_client_is_none_of_this_one() {
    let (one, two) = (client(), client());
    let mut first = Caller::new(&one);
    let (_, queue, buffer) = first.buffer(64);
    let mut second = Caller::new(&two);
    assert_eq!(second.status(&write(queue, buffer, (0, 1))), -36);
    let set = SetKernelArg {
        kernel: name(1, 1),
        arg_index: 0,
        arg_size: 8,
        arg_value: Some(Value::Object(AnyHandle {
            c_type: "cl_mem",
            raw: buffer.raw(),
        })),
    };
    assert_eq!(second.status(&set), -48);
}

#[test]
fn who_waits_for_callbacks_is_not_held_for_long() {
    let client = client();
    let mut caller = Caller::new(&client);
    let wait = AwaitCompletions {
        most: 1,
        milliseconds: u32::MAX,
        reply: Span { offset: 0, length: 0 },
    };
    let begin = Instant::now();
    assert_eq!(caller.status(&wait), 0);
    assert!(begin.elapsed() < Duration::from_secs(30));
}
