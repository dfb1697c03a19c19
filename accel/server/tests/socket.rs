//! A client and a server in two threads, over a real socket: what a program does with OpenCL, by the null back end and by PoCL; and a client
//! that goes in the middle of its work.
//!
//! PoCL has to be there (Debian's pocl-opencl-icd and ocl-icd-libopencl1, which the step `apt-packages` of `cargo xtask test` installs).

#[allow(dead_code, reason = "each test uses what it needs")]
mod support;

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use accel_proto::control::{AwaitCompletions, AwaitCompletionsReply};
use accel_proto::opencl::*;
use accel_proto::{Callback, Handle, List, Reader, Reply as _, Span, Value};
use accel_server::{Backend, Server};
use accel_transport::{Offer, Transport, connect};
use wire::packet::PacketSocket;

use support::*;

/// What every back end does; whether bytes arrive is told.
fn buffers(path: &Path) -> bool {
    let (_connection, mut thread) = first_thread(path);
    let (platform, _) = thread.devices();
    assert!(!thread.text(platform, 0x0902).is_empty());
    let (context, queue) = thread.set_up();
    let length = 1_u64 << 20;
    let bytes: Vec<u8> = (0..length).map(|at| ((at * 7) >> 3).to_le_bytes()[0]).collect();
    thread.buffer(context, length, name(1));
    thread.put(DATA, &bytes);
    thread.send(&write(queue, name(1), length));
    thread.done(&Finish { command_queue: queue });
    thread.done(&read(queue, name(1), length));
    let same = thread.get(DATA + (4 << 20), bytes.len()) == bytes;
    thread.done(&ReleaseMemObject { memobj: name(1) });
    thread.done(&ReleaseCommandQueue { command_queue: queue });
    thread.done(&ReleaseContext { context });
    assert_eq!(thread.status(&Finish { command_queue: queue }), -36);
    same
}

#[test]
fn buffers_by_a_back_end_that_does_nothing() {
    let (_directory, path) = start(Backend::null());
    assert!(!buffers(&path));
}

#[test]
fn buffers_by_pocl() {
    let (_directory, path) = start(pocl());
    assert!(buffers(&path));
}

#[test]
fn a_kernel_by_pocl_and_arguments_that_are_none() {
    let (_directory, path) = start(pocl());
    let (mut connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    let count = 1000_u64;
    thread.buffer(context, 4 * count, name(1));
    let source =
        "kernel void scale(global uint *all, uint by) { size_t i = get_global_id(0); all[i] = all[i] * by + 1; }";
    let kernel = thread.kernel(context, source, c"scale");
    let bytes: Vec<u8> = (0..1000_u32).flat_map(u32::to_le_bytes).collect();
    thread.put(DATA, &bytes);
    thread.send(&write(queue, name(1), 4 * count));
    // An address is no buffer, a sampler is none, and there is no third argument.
    assert_eq!(thread.argument(kernel, 0, Value::Bytes(&[1; 8])), -50);
    assert_eq!(thread.argument(kernel, 1, mem(name(1))), -50);
    assert_eq!(thread.argument(kernel, 2, Value::Bytes(&[0; 4])), -49);
    assert_eq!(thread.argument(kernel, 0, mem(name(1))), 0);
    assert_eq!(thread.argument(kernel, 1, Value::Bytes(&3_u32.to_le_bytes())), 0);
    support::machine::launch(&mut thread, queue, kernel, count, name(7));
    // Before it is waited for, so that the callback is called in another thread.
    thread.send(&SetEventCallback {
        event: name(7),
        command_exec_callback_type: 0,
        pfn_notify: Callback(9),
    });
    thread.done(&read(queue, name(1), 4 * count));
    let expected: Vec<u8> = (0..1000_u32).flat_map(|value| (value * 3 + 1).to_le_bytes()).collect();
    assert!(thread.get(DATA + (4 << 20), bytes.len()) == expected);
    let mut waiting = Thread {
        end: connection.ends.remove(0),
        window: thread.window.clone(),
    };
    let mut due = Vec::new();
    while due.len() < 2 {
        let call = AwaitCompletions {
            most: 8,
            milliseconds: 500,
            reply: Span { offset: 0, length: 0 },
        };
        let bytes = waiting.ask(&call);
        let reply = AwaitCompletionsReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
        due.extend(reply.completions.iter().map(|due| (due.callback.0, due.status)));
    }
    assert_eq!(due, [(5, 0), (9, 0)]);
    // Binaries, one behind the other.
    let info = |param_name, size| GetProgramInfo {
        program: name(1),
        param_name,
        param_value_size: size,
        param_value: Some(Span {
            offset: DATA,
            length: size,
        }),
        param_value_size_ret: true,
    };
    thread.done(&info(0x1165, 8));
    let size = u64::from_le_bytes(thread.get(DATA, 8).try_into().unwrap());
    assert!(size > 0);
    thread.done(&info(0x1166, size));
    assert!(thread.get(DATA, 64).iter().any(|byte| *byte != 0));
    assert_eq!(thread.status(&info(0x1166, size - 1)), -30);
    thread.send(&ReleaseEvent { event: name(7) });
    thread.send(&ReleaseKernel { kernel });
    thread.done(&Finish { command_queue: queue });
}

#[test]
fn maps_by_pocl() {
    let (_directory, path) = start(pocl());
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    thread.buffer(context, 4096, name(1));
    thread.put(DATA, &[5; 4096]);
    thread.send(&write(queue, name(1), 4096));
    let place = Span {
        offset: DATA + 8192,
        length: 100,
    };
    thread.done(&EnqueueMapBuffer {
        command_queue: queue,
        buffer: name(1),
        blocking_map: 1,
        map_flags: 3,
        offset: 1000,
        size: 100,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
        returned: place,
    });
    assert_eq!(thread.get(place.offset, 100), [5; 100]);
    thread.put(place.offset, &[6; 100]);
    thread.send(&EnqueueUnmapMemObject {
        command_queue: queue,
        memobj: name(1),
        mapped_ptr: place,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    });
    thread.done(&read(queue, name(1), 4096));
    let found = thread.get(DATA + (4 << 20), 4096);
    assert!(found[..1000] == [5; 1000] && found[1000..1100] == [6; 100] && found[1100..] == [5; 2996]);
}

#[test]
fn images_by_pocl_and_memory_that_is_too_small() {
    let (_directory, path) = start(pocl());
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    let pixels: Vec<u8> = (0..64 * 4).map(|at: u32| at.to_le_bytes()[0]).collect();
    thread.put(DATA, &pixels);
    let mut create = CreateImage2D {
        context,
        flags: 1 | 1 << 3,
        // CL_RGBA, CL_UNSIGNED_INT8
        image_format: Some(ImageFormat {
            image_channel_order: 0x10b5,
            image_channel_data_type: 0x10da,
        }),
        image_width: 8,
        image_height: 8,
        image_row_pitch: 0,
        host_ptr: Some(Span {
            offset: DATA,
            length: 255,
        }),
        returned: name(1),
    };
    assert_eq!(thread.status(&create), -37);
    create.host_ptr = Some(Span {
        offset: DATA,
        length: 256,
    });
    thread.done(&create);
    // It was copied, though the client said that it may be used.
    thread.put(DATA, &[0; 256]);
    let place = DATA + 4096;
    let read = |region: &'static [u64; 3], row_pitch, length| EnqueueReadImage {
        command_queue: queue,
        image: name(1),
        blocking_read: 1,
        origin: List::new(&[0, 0, 0]),
        region: List::new(region),
        row_pitch,
        slice_pitch: 0,
        ptr: Some(Span { offset: place, length }),
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    };
    thread.done(&read(&[8, 8, 1], 0, 256));
    assert_eq!(thread.get(place, 256), pixels);
    assert_eq!(thread.status(&read(&[8, 8, 1], 0, 255)), -30);
    // Seven rows of 40 bytes, and one of 32.
    assert_eq!(thread.status(&read(&[8, 8, 1], 40, 311)), -30);
    thread.done(&read(&[8, 8, 1], 40, 312));
    assert_eq!(thread.get(place + 40, 32), pixels[32..64]);
    // A buffer is no image.
    thread.buffer(context, 4096, name(2));
    let mut buffer = read(&[1, 1, 1], 0, 64);
    buffer.image = name(2);
    assert_eq!(thread.status(&buffer), -38);
    let map = EnqueueMapImage {
        command_queue: queue,
        image: name(1),
        blocking_map: 1,
        map_flags: 3,
        origin: List::new(&[2, 2, 0]),
        region: List::new(&[4, 2, 1]),
        image_row_pitch: true,
        image_slice_pitch: true,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
        returned: Span {
            offset: place,
            length: 32,
        },
    };
    let bytes = thread.ask(&map);
    let reply = EnqueueMapImageReply::read(&mut Reader::new(&bytes, LIMITS), &map).unwrap();
    assert_eq!(
        (reply.status, reply.image_row_pitch, reply.image_slice_pitch),
        (0, Some(16), Some(0))
    );
    assert_eq!(thread.get(place, 16), pixels[2 * 32 + 8..][..16]);
    thread.put(place, &[9; 32]);
    thread.send(&EnqueueUnmapMemObject {
        command_queue: queue,
        memobj: name(1),
        mapped_ptr: map.returned,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    });
    thread.done(&read(&[8, 8, 1], 0, 256));
    assert_eq!(thread.get(place + 3 * 32 + 8, 16), [9; 16]);
}

/// Four threads of one process with objects of their own and one that they share.
#[test]
fn threads_of_a_client_are_served_side_by_side() {
    let (_directory, path) = start(pocl());
    let mut connection = meet(&path, 4);
    let window = connection.window.as_ref().unwrap().0.clone();
    let mut threads: Vec<_> = connection
        .ends
        .drain(..)
        .map(|end| Thread {
            end,
            window: window.clone(),
        })
        .collect();
    let (context, _) = threads[0].set_up();
    let (_, device) = threads[0].devices();
    std::thread::scope(|scope| {
        for (thread, number) in threads.iter_mut().zip(10..) {
            scope.spawn(move || {
                let (queue, buffer) = (name(number), name(number));
                let place = DATA + u64::from(number) * 65536;
                thread.done(&CreateCommandQueue {
                    context,
                    device,
                    properties: 0,
                    returned: queue,
                });
                for round in 0..200_u32 {
                    let buffer = Handle::new(number, round + 1).unwrap_or(buffer);
                    thread.buffer(context, 4096, buffer);
                    let bytes = [round.to_le_bytes()[0]; 4096];
                    thread.put(place, &bytes);
                    let mut put = write(queue, buffer, 4096);
                    put.ptr = Some(Span {
                        offset: place,
                        length: 4096,
                    });
                    thread.send(&put);
                    let mut get = read(queue, buffer, 4096);
                    get.ptr = Some(Span {
                        offset: place + 4096,
                        length: 4096,
                    });
                    thread.done(&get);
                    assert!(thread.get(place + 4096, 4096) == bytes);
                    thread.send(&ReleaseMemObject { memobj: buffer });
                }
                thread.done(&Finish { command_queue: queue });
            });
        }
    });
}

/// Work that waits for an event that its client sets, and the client goes: the work ends, and so do the server's threads.
#[test]
fn a_client_that_goes_leaves_nothing_that_waits() {
    let server = Arc::new(Server::new(pocl(), settings()));
    let (near, far) = PacketSocket::pair().unwrap();
    let serving: JoinHandle<_> = std::thread::spawn(move || server.serve_client(far));
    let offer = Offer {
        transports: vec![Transport::Bell],
        pairs: 1,
        patience: MOST,
    };
    let mut connection = connect(near, &offer).unwrap();
    let mut thread = Thread {
        end: connection.ends.remove(0),
        window: connection.window.as_ref().unwrap().0.clone(),
    };
    let (context, queue) = thread.set_up();
    thread.buffer(context, 4096, name(1));
    thread.send(&CreateUserEvent {
        context,
        returned: name(1),
    });
    let events = [name(1)];
    let mut waits = write(queue, name(1), 4096);
    waits.num_events_in_wait_list = 1;
    waits.event_wait_list = Some(List::new(&events));
    thread.send(&waits);
    // Released with work in it.
    thread.send(&ReleaseCommandQueue { command_queue: queue });
    thread.send(&ReleaseMemObject { memobj: name(1) });
    // The server's only thread for this client waits in the back end.
    let record = thread.record(
        &WaitForEvents {
            num_events: 1,
            event_list: Some(List::new(&events)),
        },
        true,
    );
    let waited = thread.end.call(&record, Duration::from_millis(300));
    assert!(
        matches!(waited, Err(accel_transport::Error::Deadline { .. })),
        "{waited:?}"
    );
    drop((thread, connection));
    let (ended, news) = std::sync::mpsc::channel();
    std::thread::spawn(move || ended.send(serving.join()));
    news.recv_timeout(MOST)
        .expect("the server's threads end")
        .unwrap()
        .unwrap();
}
