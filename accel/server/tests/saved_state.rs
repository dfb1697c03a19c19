//! What is in the file of a machine's accelerator: objects that are in an odd state, what is refused, and files that are wrong.

#[allow(dead_code, reason = "each test uses what it needs")]
mod support;

use std::fs::File;
use std::time::{Duration, Instant};

use accel_proto::control::{AwaitCompletions, AwaitCompletionsReply};
use accel_proto::opencl::*;
use accel_proto::{Callback, Handle, List, Reader, Reply as _, Span};
use accel_server::{Backend, Refusal};
use agent_api::accelerator::{FromGuest, send};

use support::machine::*;
use support::*;

fn image(context: Handle<Context>, returned: Handle<Mem>) -> CreateImage {
    CreateImage {
        context,
        flags: 1,
        image_format: Some(ImageFormat {
            image_channel_order: 0x10b5,
            image_channel_data_type: 0x10da,
        }),
        image_desc: Some(ImageDesc {
            image_type: 0x10f1,
            image_width: 16,
            image_height: 8,
            image_depth: 0,
            image_array_size: 0,
            image_row_pitch: 0,
            image_slice_pitch: 0,
            num_mip_levels: 0,
            num_samples: 0,
            mem_object: Handle::NULL,
        }),
        host_ptr: None,
        returned,
    }
}

/// A buffer and an image, mapped.
fn map_both(thread: &mut Thread, (context, queue): (Handle<Context>, Handle<CommandQueue>)) {
    thread.buffer(context, 8192, name(1));
    thread.done(&image(context, name(2)));
    thread.done(&EnqueueMapBuffer {
        command_queue: queue,
        buffer: name(1),
        blocking_map: 1,
        map_flags: 2,
        offset: 4096,
        size: 4096,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
        returned: Span {
            offset: DATA,
            length: 4096,
        },
    });
    thread.done(&EnqueueMapImage {
        command_queue: queue,
        image: name(2),
        blocking_map: 1,
        map_flags: 2,
        origin: List::new(&[0, 0, 0]),
        region: List::new(&[16, 8, 1]),
        image_row_pitch: true,
        image_slice_pitch: false,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
        returned: Span {
            offset: DATA + 4096,
            length: 512,
        },
    });
}

#[test]
fn a_state_that_has_less_than_it_says_is_refused() {
    let (_window, host, mut program) = serving(Backend::null());
    let thread = &mut program.thread;
    let (context, queue) = thread.set_up();
    map_both(thread, (context, queue));
    let (file, _held) = save(&host, MOST).unwrap();
    let restored = |file: &File| {
        let next = Host::new(Backend::null(), &support::machine::window());
        next.guest.restore(file)
    };
    restored(&changed(&file, |_| ())).unwrap();
    for (which, length) in [(0, 8192_u64), (1, 512)] {
        let short = changed(&file, |state| {
            let steps = state["clients"][0]["objects"]["steps"].as_array_mut().unwrap();
            let memory: Vec<_> = steps.iter_mut().filter_map(|step| step.get_mut("Memory")).collect();
            let said = &mut memory.into_iter().nth(which).unwrap()[1]["length"];
            assert_eq!(*said, length);
            *said = (length - 1).into();
        });
        assert!(matches!(restored(&short), Err(Refusal::Driver(_))), "{which}");
    }
    for (which, part, value) in [(0, "Buffer", 8192), (1, "Image", 511)] {
        let outside = changed(&file, |state| {
            let map = &mut state["clients"][0]["objects"]["maps"][which][1][0];
            map["region"][part]["length"] = value.into();
        });
        let refused = restored(&outside).unwrap_err().to_string();
        assert!(refused.contains("a map is not within its object"), "{refused}");
    }
}

#[test]
fn a_part_of_the_window_is_one_clients() {
    let (window, host, mut program) = serving(Backend::null());
    program.thread.set_up();
    let (file, _held) = save(&host, MOST).unwrap();
    let twice = changed(&file, |state| {
        let clients = state["clients"].as_array_mut().unwrap();
        let mut other = clients[0].clone();
        other["number"] = 2.into();
        clients.push(other);
    });
    let next = Host::new(Backend::null(), &window);
    let refused = next.guest.restore(&twice).unwrap_err().to_string();
    assert!(refused.contains("another client's"), "{refused}");
}

#[test]
fn no_client_is_left_out_that_is_on_its_way() {
    let (window, host, mut program) = serving(Backend::null());
    let (_, queue) = program.thread.set_up();
    // Another one waits for the part of the window that this one has, for 3 s.
    let other = FromGuest::Connect {
        client: 2,
        hello: program.hello.clone(),
        free: vec!["slot-0".to_owned()],
    };
    send(&program.controls[0].1, &other).unwrap();
    let refused = || {
        save(&host, Duration::from_millis(20))
            .err()
            .map(|refused| refused.to_string())
    };
    let begun = Instant::now();
    while !refused().is_some_and(|refused| refused.contains("about to get its accelerator")) {
        assert!(begun.elapsed() < MOST, "it is left out");
    }
    // Who prepares waits for it, while the guest runs.
    host.guest.prepare_save();
    let (file, _held) = save(&host, MOST).unwrap();
    // The guest's agent cannot be told of it at first, and then is.
    let next = Host::deaf_at_first(Backend::null(), &window, 1);
    next.guest.restore(&file).unwrap();
    let refused = save(&next, Duration::from_millis(50)).unwrap_err().to_string();
    assert!(refused.contains("about to get its accelerator"), "{refused}");
    next.serve();
    program.go_on_with(&next);
    let (file, go) = save(&next, MOST).unwrap();
    changed(&file, |state| assert_eq!(state["clients"][0]["number"], 1));
    drop(go);
    program.thread.done(&Finish { command_queue: queue });
}

/// A server that goes on with a client as it is now.
fn go_on(program: &mut Running, host: &Host, window: &File) -> Host {
    let (file, _held) = save(host, MOST).unwrap();
    let next = Host::new(pocl(), window);
    next.guest.restore(&file).unwrap();
    next.serve();
    program.go_on_with(&next);
    next
}

const SOURCE: &str = "kernel void one(global uint *all) { all[get_global_id(0)] += 1; }";

#[test]
fn kernels_that_were_told_of_memory_that_is_freed_are_saved_without_it() {
    let (window, host, mut program) = serving(pocl());
    let thread = &mut program.thread;
    let (context, queue) = thread.set_up();
    let kernel = thread.kernel(context, SOURCE, c"one");
    let call = SVMAlloc {
        context,
        flags: 1,
        size: 4096,
        alignment: 0,
    };
    let bytes = thread.ask(&call);
    let svm_pointer = SVMAllocReply::read(&mut Reader::new(&bytes, LIMITS), &call)
        .unwrap()
        .returned;
    let value = svm_pointer.0.to_le_bytes();
    thread.done(&SetKernelExecInfo {
        kernel,
        param_name: 0x11b6,
        param_value_size: 8,
        param_value: Some(List::new(&value)),
    });
    thread.done(&CloneKernel {
        source_kernel: kernel,
        returned: name(2),
    });
    thread.done(&SVMFree { context, svm_pointer });
    let _next = go_on(&mut program, &host, &window);
    let thread = &mut program.thread;
    thread.buffer(context, 64, name(1));
    for kernel in [kernel, name(2)] {
        assert_eq!(thread.argument(kernel, 0, mem(name(1))), 0);
        launch(thread, queue, kernel, 16, Handle::NULL);
    }
    assert_eq!(numbers(&contents(thread, queue, name(1), 64)), [2; 16]);
}

#[test]
fn a_copied_kernel_whose_argument_has_lost_its_name_is_refused() {
    let (window, host, mut program) = serving(pocl());
    let thread = &mut program.thread;
    let (context, _) = thread.set_up();
    let kernel = thread.kernel(context, SOURCE, c"one");
    thread.buffer(context, 64, name(1));
    assert_eq!(thread.argument(kernel, 0, mem(name(1))), 0);
    thread.done(&ReleaseMemObject { memobj: name(1) });
    let copied = |returned| CloneKernel {
        source_kernel: kernel,
        returned,
    };
    // It is found still, as the kernel has it.
    thread.done(&copied(name(2)));
    let next = go_on(&mut program, &host, &window);
    let thread = &mut program.thread;
    thread.buffer(context, 64, Handle::new(1, 2).unwrap());
    drop(save(&next, MOST).unwrap());
    thread.done(&copied(name(3)));
    let refused = save(&next, MOST).unwrap_err().to_string();
    assert!(refused.contains("with another one, which was released"), "{refused}");
}

#[test]
fn what_has_lost_its_name_is_saved_without_maps_and_failures() {
    let (window, host, mut program) = serving(pocl());
    let thread = &mut program.thread;
    let (context, queue) = thread.set_up();
    let (_, device) = thread.devices();
    let kernel = thread.kernel(context, SOURCE, c"one");
    map_both(thread, (context, queue));
    assert_eq!(thread.argument(kernel, 0, mem(name(1))), 0);
    // Its event needs the queue, which has a failure that nobody is told of.
    thread.send(&EnqueueWriteBuffer {
        event: name(1),
        ..write(queue, name(1), 64)
    });
    thread.done(&Finish { command_queue: queue });
    thread.send(&write(queue, name(1), 9000));
    thread.done(&ReleaseCommandQueue { command_queue: queue });
    thread.done(&ReleaseMemObject { memobj: name(1) });
    let queue = Handle::new(1, 2).unwrap();
    thread.done(&CreateCommandQueue {
        context,
        device,
        properties: 0,
        returned: queue,
    });
    let buffer = Handle::new(1, 2).unwrap();
    thread.buffer(context, 64, buffer);
    let _next = go_on(&mut program, &host, &window);
    let thread = &mut program.thread;
    assert_eq!(contents(thread, queue, buffer, 64), [0; 64]);
    launch(thread, queue, kernel, 16, Handle::NULL);
    thread.done(&Finish { command_queue: queue });
}

#[test]
fn callbacks_of_events_are_due_behind_it_or_refused() {
    let (window, host, mut program) = serving(pocl());
    let thread = &mut program.thread;
    let (context, queue) = thread.set_up();
    thread.buffer(context, 64, name(1));
    thread.done(&CreateUserEvent {
        context,
        returned: name(1),
    });
    thread.send(&EnqueueWriteBuffer {
        event: name(2),
        ..write(queue, name(1), 64)
    });
    let told = |event, number| SetEventCallback {
        event,
        command_exec_callback_type: 0,
        pfn_notify: Callback(number),
    };
    thread.done(&told(name(2), 78));
    thread.done(&told(name(1), 77));
    let refused = save(&host, MOST).unwrap_err().to_string();
    assert!(refused.contains("a callback of an event"), "{refused}");
    let thread = &mut program.thread;
    thread.done(&SetUserEventStatus {
        event: name(1),
        execution_status: 0,
    });
    let _next = go_on(&mut program, &host, &window);
    let wait = AwaitCompletions {
        most: 9,
        milliseconds: 0,
        reply: REPLIES,
    };
    let bytes = program.thread.ask(&wait);
    let due = AwaitCompletionsReply::read(&mut Reader::new(&bytes, LIMITS), &wait).unwrap();
    let due: Vec<_> = due.completions.iter().map(|due| (due.callback.0, due.status)).collect();
    assert_eq!(due, [(78, 0), (77, 0)]);
}
