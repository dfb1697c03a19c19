//! A client whose machine is saved, and a server that goes on with it: real objects of PoCL's, the window as it was, and this test as the VMM
//! and the guest's agent.

#[allow(dead_code, reason = "each test uses what it needs")]
mod support;

use std::os::unix::fs::FileExt;
use std::time::Duration;

use accel_proto::opencl::*;
use accel_proto::{Handle, List, Reader, Reply as _, Span, Value};
use accel_server::Backend;

use support::machine::*;
use support::*;

const SOURCE: &str = "kernel void add(global uint *all, uint what) { all[get_global_id(0)] += what; }";

fn status(thread: &mut Thread, event: Handle<Event>) -> (i32, i32) {
    let call = GetEventInfo {
        event,
        param_name: 0x11d3,
        param_value_size: 4,
        param_value: true,
        param_value_size_ret: false,
        reply: REPLIES,
    };
    let bytes = thread.ask(&call);
    let reply = GetEventInfoReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
    let value = reply
        .param_value
        .map_or(0, |value| i32::from_le_bytes(value.bytes().try_into().unwrap()));
    (reply.status, value)
}

/// A kernel with other arguments, one of which was released; what has its name now, which is mapped; an event, and a program that only
/// kernels need.
fn more_objects(
    thread: &mut Thread,
    (context, queue): (Handle<Context>, Handle<CommandQueue>),
    kernel: Handle<Kernel>,
) -> Handle<Mem> {
    thread.buffer(context, 64, name(2));
    thread.done(&CloneKernel {
        source_kernel: kernel,
        returned: name(2),
    });
    assert_eq!(thread.argument(name(2), 0, mem(name(2))), 0);
    thread.done(&CreateSubBuffer {
        buffer: name(1),
        flags: 1,
        buffer_create_type: 0x1220,
        buffer_create_info: Some(BufferRegion {
            origin: 1024,
            size: 1024,
        }),
        returned: name(3),
    });
    thread.done(&ReleaseMemObject { memobj: name(2) });
    let again = Handle::new(2, 2).unwrap();
    thread.buffer(context, 128, again);
    thread.done(&EnqueueMapBuffer {
        command_queue: queue,
        buffer: again,
        blocking_map: 1,
        map_flags: 2,
        offset: 16,
        size: 16,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
        returned: Span {
            offset: DATA + (8 << 20),
            length: 16,
        },
    });
    thread.put(DATA + (8 << 20), &[0x5a; 16]);
    thread.done(&CreateUserEvent {
        context,
        returned: name(9),
    });
    thread.done(&ReleaseProgram { program: name(1) });
    again
}

#[test]
fn a_client_goes_on_with_all_of_its_objects() {
    let (window, host, mut program) = serving(pocl());
    let thread = &mut program.thread;
    let (context, queue) = thread.set_up();
    let count = 1000_u64;
    thread.buffer(context, 4 * count, name(1));
    let kernel = thread.kernel(context, SOURCE, c"add");
    let bytes: Vec<u8> = (0..1000_u32).flat_map(u32::to_le_bytes).collect();
    thread.put(DATA, &bytes);
    thread.send(&write(queue, name(1), 4 * count));
    assert_eq!(thread.argument(kernel, 0, mem(name(1))), 0);
    assert_eq!(thread.argument(kernel, 1, Value::Bytes(&7_u32.to_le_bytes())), 0);
    launch(thread, queue, kernel, count, name(1));
    let again = more_objects(thread, (context, queue), kernel);

    host.guest.prepare_save();
    let (file, _held) = save(&host, MOST).unwrap();
    let next = Host::new(pocl(), &window);
    next.guest.restore(&file).unwrap();
    next.serve();
    program.go_on_with(&next);

    let thread = &mut program.thread;
    let found = numbers(&contents(thread, queue, name(1), 4 * count));
    assert_eq!(found, (7..1007).collect::<Vec<u32>>());
    // Arguments are there, and what is shared is.
    launch(thread, queue, kernel, count, name(4));
    let found = numbers(&contents(thread, queue, name(3), 16));
    assert_eq!(found, [270, 271, 272, 273]);
    launch(thread, queue, name(2), 16, Handle::NULL);
    thread.done(&Finish { command_queue: queue });
    thread.send(&EnqueueUnmapMemObject {
        command_queue: queue,
        memobj: again,
        mapped_ptr: Span {
            offset: DATA + (8 << 20),
            length: 16,
        },
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    });
    let found = contents(thread, queue, again, 48);
    assert_eq!(
        (&found[..16], &found[16..32], &found[32..]),
        (&[0; 16][..], &[0x5a; 16][..], &[0; 16][..])
    );
    // Names that are over are over, the events are what they were, and names are told as before.
    assert_eq!(thread.status(&ReleaseMemObject { memobj: name(2) }), -38);
    assert_eq!(thread.status(&ReleaseProgram { program: name(1) }), -44);
    assert_eq!(status(thread, name(1)), (0, 0));
    assert_eq!(status(thread, name(9)), (0, 2));
    thread.done(&SetUserEventStatus {
        event: name(9),
        execution_status: 0,
    });
    assert_eq!(status(thread, name(9)), (0, 0));
    let (platform, _) = thread.devices();
    assert!(thread.text(platform, 0x0902).contains("Portable"));

    // Saved once more, with what has changed since.
    let (file, _held) = save(&next, MOST).unwrap();
    let last = Host::new(pocl(), &window);
    last.guest.restore(&file).unwrap();
    last.serve();
    program.go_on_with(&last);
    let thread = &mut program.thread;
    launch(thread, queue, kernel, count, Handle::NULL);
    let found = numbers(&contents(thread, queue, name(1), 4 * count));
    assert_eq!(found, (21..1021).collect::<Vec<u32>>());
}

#[test]
fn commands_that_do_not_end_are_no_state_and_go_on() {
    let (_window, host, mut program) = serving(pocl());
    let thread = &mut program.thread;
    let (context, queue) = thread.set_up();
    thread.buffer(context, 64, name(1));
    thread.done(&CreateUserEvent {
        context,
        returned: name(1),
    });
    thread.put(DATA, &[3; 64]);
    let events = [name(1)];
    thread.send(&EnqueueWriteBuffer {
        num_events_in_wait_list: 1,
        event_wait_list: Some(List::new(&events)),
        ..write(queue, name(1), 64)
    });
    thread.done(&Flush { command_queue: queue });
    let refused = save(&host, Duration::from_millis(200)).unwrap_err().to_string();
    assert!(
        refused.contains("did not end in time") && refused.contains("an event"),
        "{refused}"
    );
    let thread = &mut program.thread;
    thread.done(&SetUserEventStatus {
        event: name(1),
        execution_status: 0,
    });
    assert_eq!(contents(thread, queue, name(1), 64), [3; 64]);
    // Now it can be; nothing is carried out meanwhile.
    let (_, go) = save(&host, MOST).unwrap();
    let finish = thread.record(&Finish { command_queue: queue }, true);
    thread.end.send(&finish, MOST).unwrap();
    thread.end.flush(MOST).unwrap();
    let early = thread.end.receive(Duration::from_millis(300));
    assert!(
        matches!(early, Err(accel_transport::Error::Deadline { .. })),
        "{early:?}"
    );
    drop(go);
    thread.end.receive(MOST).unwrap();
    assert_eq!(contents(&mut program.thread, queue, name(1), 64), [3; 64]);
}

#[test]
fn what_cannot_be_made_again_is_refused_with_the_reason() {
    let (_window, host, mut program) = serving(Backend::null());
    let (context, _) = program.thread.set_up();
    let (file, go) = save(&host, MOST).unwrap();
    drop(go);
    let pipe = CreatePipe {
        context,
        flags: 1,
        pipe_packet_size: 4,
        pipe_max_packets: 16,
        properties: None,
        returned: name(7),
    };
    program.thread.done(&pipe);
    let refused = save(&host, MOST).unwrap_err().to_string();
    assert!(
        refused.contains("a pipe") && refused.contains("end the program"),
        "{refused}"
    );

    let shared_window = self::window();
    let other = Host::new(pocl(), &shared_window);
    other.serve();
    let mut sharing = Running::start(&other, &shared_window);
    let (context, _) = sharing.thread.set_up();
    let call = SVMAlloc {
        context,
        flags: 1,
        size: 4096,
        alignment: 0,
    };
    let bytes = sharing.thread.ask(&call);
    let allocated = SVMAllocReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
    assert_eq!(allocated.status, 0);
    let refused = save(&other, MOST).unwrap_err().to_string();
    assert!(refused.contains("shared virtual memory"), "{refused}");
    sharing.thread.done(&SVMFree {
        context,
        svm_pointer: allocated.returned,
    });
    drop(save(&other, MOST).unwrap());

    let other = Host::new(pocl(), &self::window());
    let refused = other.guest.restore(&file).unwrap_err().to_string();
    assert!(
        refused.contains("null") && refused.contains("the same accelerator"),
        "{refused}"
    );
    let same = Host::new(Backend::null(), &self::window());
    same.guest.restore(&file).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let refused = same.guest.restore(&file).unwrap_err().to_string();
    assert!(refused.contains("no saved state"), "{refused}");
    file.set_len(10).unwrap();
    assert!(same.guest.restore(&file).unwrap_err().to_string().contains("too short"));
}

#[test]
fn a_window_gets_the_bytes_of_then() {
    let before = window();
    before.write_all_at(b"file system", 4096).unwrap();
    let host = Host::new(Backend::null(), &before);
    let (file, _held) = save(&host, MOST).unwrap();
    let after = window();
    let slots = accel_server::fill_window(&file, &after).unwrap();
    assert_eq!(
        (slots.len(), slots[0].name.as_str(), slots[0].length),
        (1, "slot-0", SIZE)
    );
    let mut found = [0; 11];
    after.read_exact_at(&mut found, 4096).unwrap();
    assert_eq!(&found, b"file system");
    use std::os::unix::fs::MetadataExt;
    assert!(file.metadata().unwrap().blocks() < 100, "what is zero takes no room");
    let short = base::memfd::sized("window", SIZE / 2).unwrap();
    let refused = accel_server::fill_window(&file, &short).unwrap_err().to_string();
    assert!(refused.contains("20971520 bytes"), "{refused}");
}
