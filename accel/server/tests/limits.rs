//! What a tenant's clients may have of an accelerator, and what is told of it: memory, time, commands in flight, statistics; by PoCL, and by
//! a simulated device.

#[allow(dead_code, reason = "each test uses what it needs")]
mod support;

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accel_arbiter::{Arbiter, Priority, Share};
use accel_proto::opencl::*;
use accel_proto::{Handle, List, Memory, Reader, Reply as _};
use accel_server::{Backend, Server, TenantLimits};

use support::*;

const ALLOCATION_FAILURE: i32 = -4;

fn memory(bytes: u64) -> TenantLimits {
    TenantLimits {
        memory: Some(bytes),
        ..TenantLimits::default()
    }
}

fn measured() -> TenantLimits {
    TenantLimits {
        measures_time: true,
        ..TenantLimits::default()
    }
}

fn until(what: &str, is: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < MOST, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn create(context: Handle<Context>, size: u64, returned: Handle<Mem>) -> CreateBuffer {
    CreateBuffer {
        context,
        flags: 1,
        size,
        host_ptr: None,
        returned,
    }
}

fn launch<'a>(
    queue: Handle<CommandQueue>,
    kernel: Handle<Kernel>,
    sizes: &'a [u64; 1],
    event: Handle<Event>,
) -> EnqueueNDRangeKernel<'a> {
    EnqueueNDRangeKernel {
        command_queue: queue,
        kernel,
        work_dim: 1,
        global_work_offset: None,
        global_work_size: Some(List::new(sizes)),
        local_work_size: None,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event,
    }
}

/// A context, a queue, and a kernel that nothing was compiled for.
fn simulated(thread: &mut Thread) -> (Handle<CommandQueue>, Handle<Kernel>) {
    let (context, queue) = thread.set_up();
    thread.done(&CreateProgramWithSource {
        context,
        count: 0,
        strings: accel_proto::Pieces {
            lengths: List::new(&[]),
            data: REPLIES,
        },
        returned: name(1),
    });
    thread.done(&CreateKernel {
        program: name(1),
        kernel_name: Some(c"any"),
        returned: name(1),
    });
    (queue, name(1))
}

#[test]
fn memory_that_a_command_still_needs_is_not_given_back_by_pocl() {
    const BYTES: u64 = 4 << 20;
    let (_directory, path, server) = start_with(pocl(), &memory(3 * BYTES / 2));
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    thread.buffer(context, BYTES, name(1));
    assert_eq!(server.stats().memory.used, BYTES);
    assert_eq!(thread.status(&create(context, BYTES, name(2))), ALLOCATION_FAILURE);
    thread.done(&CreateUserEvent {
        context,
        returned: name(1),
    });
    let waits = [name(1)];
    let mut command = write(queue, name(1), BYTES);
    command.num_events_in_wait_list = 1;
    command.event_wait_list = Some(List::new(&waits));
    command.size = 4096;
    command.ptr = command.ptr.map(|span| accel_proto::Span { length: 4096, ..span });
    thread.done(&command);
    thread.done(&ReleaseMemObject { memobj: name(1) });
    // Released, and still there.
    assert_eq!(server.stats().memory.used, BYTES);
    assert_eq!(thread.status(&create(context, BYTES, name(2))), ALLOCATION_FAILURE);
    thread.done(&SetUserEventStatus {
        event: name(1),
        execution_status: 0,
    });
    thread.done(&Finish { command_queue: queue });
    until("the memory is given back", || server.stats().memory.used == 0);
    // By a new name: the one of before has failed.
    thread.buffer(context, BYTES, name(3));
    let stats = server.stats().memory;
    assert_eq!((stats.used, stats.most, stats.refused), (BYTES, BYTES, 2));
}

#[test]
fn shared_memory_that_a_command_still_needs_is_not_freed_by_pocl() {
    const BYTES: u64 = 64 << 10;
    let (_directory, path, server) = start_with(pocl(), &memory(3 * BYTES / 2));
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    let alloc = SVMAlloc {
        context,
        flags: 1,
        size: BYTES,
        alignment: 0,
    };
    let bytes = thread.ask(&alloc);
    let reply = SVMAllocReply::read(&mut Reader::new(&bytes, LIMITS), &alloc).unwrap();
    assert_eq!((reply.status, reply.returned.0 % 4096), (0, 0));
    thread.done(&CreateUserEvent {
        context,
        returned: name(1),
    });
    let waits = [name(1)];
    let arena = accel_proto::Span {
        offset: DATA,
        length: BYTES,
    };
    let command = EnqueueSVMMemcpy {
        command_queue: queue,
        blocking_copy: 0,
        dst_ptr: Memory::Arena(arena),
        src_ptr: Memory::Svm(reply.returned),
        size: BYTES,
        num_events_in_wait_list: 1,
        event_wait_list: Some(List::new(&waits)),
        event: Handle::NULL,
    };
    thread.put(DATA, &vec![0xa5; usize::try_from(BYTES).unwrap()]);
    thread.done(&command);
    thread.done(&SVMFree {
        context,
        svm_pointer: reply.returned,
    });
    // Freed, and still there.
    assert_eq!(server.stats().memory.used, BYTES + 4096);
    assert_eq!(thread.status(&alloc), ALLOCATION_FAILURE);
    thread.done(&SetUserEventStatus {
        event: name(1),
        execution_status: 0,
    });
    thread.done(&Finish { command_queue: queue });
    let read = thread.get(DATA, usize::try_from(BYTES).unwrap());
    assert!(read.iter().all(|byte| *byte == 0), "the copy was not made");
    // The next one waits for what is on its way back.
    assert_eq!(thread.status(&alloc), 0);
    assert_eq!(server.stats().memory.used, BYTES + 4096);
}

#[test]
fn a_client_that_ends_leaves_nothing_charged_by_pocl() {
    let (_directory, path, server) = start_with(pocl(), &memory(64 << 20));
    let (connection, mut thread) = first_thread(&path);
    let (context, _) = thread.set_up();
    for index in 1..20 {
        thread.buffer(context, 1 << 20, name(index));
    }
    assert_eq!(server.stats().memory.used, 19 << 20);
    assert_eq!(server.stats().objects["cl_mem"], 19);
    drop((connection, thread));
    until("everything is released", || {
        let stats = server.stats();
        stats.memory.used == 0 && !stats.objects.contains_key("cl_mem") && stats.clients.is_empty()
    });
}

#[test]
fn new_memory_has_nobodys_bytes_by_pocl() {
    let (_directory, path, _server) = start_with(pocl(), &memory(64 << 20));
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    for (round, size) in (1..40).zip([4096_u64, 64 << 10, 100_000].into_iter().cycle()) {
        let buffer = name(round);
        thread.buffer(context, size, buffer);
        thread.done(&read(queue, buffer, size));
        let found = thread.get(DATA + (4 << 20), usize::try_from(size).unwrap());
        assert!(found.iter().all(|byte| *byte == 0), "{size} bytes");
        // The next one gets this memory, as malloc(3) has it at hand.
        thread.put(DATA, &vec![0xa5; found.len()]);
        thread.done(&write(queue, buffer, size));
        thread.done(&Finish { command_queue: queue });
        thread.done(&ReleaseMemObject { memobj: buffer });
    }
}

#[test]
fn new_shared_memory_has_nobodys_bytes_by_pocl() {
    let (_directory, path, _server) = start_with(pocl(), &memory(64 << 20));
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    for size in [64_u64, 4096, 64 << 10].into_iter().cycle().take(30) {
        let alloc = SVMAlloc {
            context,
            flags: 1,
            size,
            alignment: 0,
        };
        let bytes = thread.ask(&alloc);
        let reply = SVMAllocReply::read(&mut Reader::new(&bytes, LIMITS), &alloc).unwrap();
        assert_eq!(reply.status, 0);
        let copy = |dst_ptr, src_ptr| EnqueueSVMMemcpy {
            command_queue: queue,
            blocking_copy: 1,
            dst_ptr,
            src_ptr,
            size,
            num_events_in_wait_list: 0,
            event_wait_list: None,
            event: Handle::NULL,
        };
        let (shared, arena) = (
            Memory::Svm(reply.returned),
            Memory::Arena(accel_proto::Span {
                offset: DATA,
                length: size,
            }),
        );
        thread.put(DATA, &vec![0xa5; usize::try_from(size).unwrap()]);
        thread.done(&copy(arena, shared));
        let found = thread.get(DATA, usize::try_from(size).unwrap());
        assert!(found.iter().all(|byte| *byte == 0), "{size} bytes");
        // The next one gets this memory, as malloc(3) has it at hand.
        thread.put(DATA, &vec![0xa5; found.len()]);
        thread.done(&copy(shared, arena));
        thread.done(&SVMFree {
            context,
            svm_pointer: reply.returned,
        });
    }
}

#[test]
fn commands_that_wait_for_their_own_client_do_not_stop_it_by_pocl() {
    let limits = TenantLimits {
        in_flight: Some(4),
        ..TenantLimits::default()
    };
    let (_directory, path, server) = start_with(pocl(), &limits);
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    thread.buffer(context, 4096, name(1));
    thread.done(&CreateUserEvent {
        context,
        returned: name(1),
    });
    let waits = [name(1)];
    // More than may be in flight, none of which can go on before the next call of this thread.
    for _ in 0..40 {
        let mut command = write(queue, name(1), 4096);
        command.num_events_in_wait_list = 1;
        command.event_wait_list = Some(List::new(&waits));
        thread.done(&command);
    }
    assert_eq!(server.stats().time.unwrap().in_flight, 40);
    thread.done(&SetUserEventStatus {
        event: name(1),
        execution_status: 0,
    });
    thread.done(&Finish { command_queue: queue });
    let time = server.stats().time.unwrap();
    assert_eq!((time.in_flight, time.transfers), (0, 40));
}

#[test]
fn times_are_told_to_whoever_has_asked_for_them_by_pocl() {
    let (_directory, path, server) = start_with(pocl(), &measured());
    let (_connection, mut thread) = first_thread(&path);
    let (context, plain) = thread.set_up();
    let (_, device) = thread.devices();
    thread.buffer(context, 1 << 20, name(1));
    for (index, properties) in [(2, 0_u64), (3, 2)] {
        let list = [0x1093, properties, 0];
        thread.done(&CreateCommandQueueWithProperties {
            context,
            device,
            properties: (index == 3).then(|| List::new(&list)),
            returned: name(index),
        });
    }
    for (index, queue, code, properties) in [(1, plain, -7, 0_u64), (2, name(2), -7, 0), (3, name(3), 0, 2)] {
        let mut command = write(queue, name(1), 1 << 20);
        command.event = name(index);
        thread.done(&command);
        thread.done(&Finish { command_queue: queue });
        let info = GetEventProfilingInfo {
            event: name(index),
            param_name: 0x1282,
            param_value_size: 8,
            param_value: true,
            param_value_size_ret: false,
            reply: REPLIES,
        };
        assert_eq!(thread.status(&info), code, "queue {index}");
        let mut info = GetCommandQueueInfo {
            command_queue: queue,
            param_name: 0x1093,
            param_value_size: 64,
            param_value: true,
            param_value_size_ret: true,
            reply: REPLIES,
        };
        let bytes = thread.ask(&info);
        let reply = reply_of(&bytes, &info);
        assert_eq!(reply, properties.to_le_bytes(), "queue {index}");
        info.param_name = 0x1098;
        let bytes = thread.ask(&info);
        if index == 3 {
            assert_eq!(
                reply_of(&bytes, &info),
                [0x1093_u64, 2, 0].map(u64::to_le_bytes).concat()
            );
        } else if index == 2 {
            assert!(reply_of(&bytes, &info).is_empty());
        }
    }
    let time = server.stats().time.unwrap();
    assert!(time.transfers == 3 && time.used > 0 && !time.is_shared, "{time:?}");
}

fn reply_of(bytes: &[u8], call: &GetCommandQueueInfo) -> Vec<u8> {
    use accel_proto::Reply as _;
    let reply = GetCommandQueueInfoReply::read(&mut accel_proto::Reader::new(bytes, LIMITS), call).unwrap();
    assert_eq!(reply.status, 0);
    reply.param_value.unwrap().bytes().to_vec()
}

#[test]
fn a_neighbour_that_always_has_work_leaves_a_tenant_its_share() {
    let directory = tempfile::tempdir().unwrap();
    let arbiter = Arbiter::start().unwrap();
    let tenants = [("one", 1, 2000_u64), ("two", 3, 500)].map(|(tenant, weight, microseconds)| {
        let path = directory.path().join(tenant);
        let share = Share {
            weight,
            priority: Priority::High,
        };
        arbiter.admit(tenant, share, &path).unwrap();
        let limits = TenantLimits {
            arbiter: Some(path),
            ..TenantLimits::default()
        };
        let (directory, path, server) = start_with(Backend::simulated(), &limits);
        until("the arbiter", || server.stats().time.unwrap().is_shared);
        (directory, path, server, microseconds)
    });
    let over = AtomicBool::new(false);
    let used = std::thread::scope(|scope| {
        for (_, path, _, microseconds) in &tenants {
            let over = &over;
            scope.spawn(move || {
                let (_connection, mut thread) = first_thread(path);
                let (queue, kernel) = simulated(&mut thread);
                while !over.load(Ordering::SeqCst) {
                    thread.send(&launch(queue, kernel, &[*microseconds], Handle::NULL));
                }
            });
        }
        let used = || {
            let time = |server: &Server| server.stats().time.unwrap();
            tenants
                .each_ref()
                .map(|(_, _, server, _)| (time(server).launches, time(server).used))
        };
        // Both have work, for as long as it is looked at.
        until("both have work", || used().iter().all(|(launches, _)| *launches > 50));
        let before = used();
        std::thread::sleep(Duration::from_secs(3));
        let after = used();
        over.store(true, Ordering::SeqCst);
        [after[0].1 - before[0].1, after[1].1 - before[1].1]
    });
    let part = used[1] as f64 / (used[0] + used[1]) as f64;
    assert!((0.71..=0.79).contains(&part), "{part}: {used:?}");
    // What the arbiter counts is what servers say.
    let report = arbiter.report();
    assert!(
        report["two"].used.as_nanos() as f64 >= 0.9 * used[1] as f64,
        "{report:?}"
    );
}

#[test]
fn a_server_that_is_alone_is_not_held_up() {
    let directory = tempfile::tempdir().unwrap();
    let arbiter = Arbiter::start().unwrap();
    let path = directory.path().join("one");
    arbiter.admit("one", Share::default(), &path).unwrap();
    arbiter
        .admit("idle", Share::default(), &directory.path().join("idle"))
        .unwrap();
    let limits = TenantLimits {
        arbiter: Some(path),
        ..TenantLimits::default()
    };
    let (_directory, path, server) = start_with(Backend::simulated(), &limits);
    let (_connection, mut thread) = first_thread(&path);
    let (queue, kernel) = simulated(&mut thread);
    for _ in 0..200 {
        thread.send(&launch(queue, kernel, &[1000], Handle::NULL));
    }
    thread.done(&Finish { command_queue: queue });
    let time = server.stats().time.unwrap();
    assert_eq!((time.launches, time.held_up), (200, 0));
}

#[test]
fn whoever_asks_is_told_in_one_line() {
    let (directory, path, server) = start_with(Backend::null(), &memory(1 << 30));
    let control = directory.path().join("control");
    server
        .tell_stats(Server::listen_for_stats(&control).unwrap(), 3)
        .unwrap();
    assert_eq!(std::fs::metadata(&control).unwrap().permissions().mode() & 0o777, 0o600);
    let (_connection, mut thread) = first_thread(&path);
    let (context, _) = thread.set_up();
    thread.buffer(context, 1 << 20, name(1));
    assert_eq!(thread.status(&create(context, 1 << 30, name(2))), ALLOCATION_FAILURE);
    thread.status(&SetCommandQueueProperty {
        command_queue: name(1),
        properties: 0,
        enable: 0,
        old_properties: false,
    });
    let ask = || {
        let mut line = String::new();
        UnixStream::connect(&control)
            .unwrap()
            .read_to_string(&mut line)
            .unwrap();
        line
    };
    let line = ask();
    assert!(line.ends_with('\n') && line.lines().count() == 1, "{line}");
    for part in [
        r#""version":1"#,
        r#""restarts":3"#,
        r#""backend":"null""#,
        r#""transport":"bell","threads":2,"arena":16777216"#,
        r#""cl_context":1,"cl_mem":1"#,
        r#""memory":{"used":1048576,"most":1048576,"quota":1073741824,"refused":1}"#,
        r#""errors":{"-59":1,"-4":1}"#,
        r#""not_served":{"clSetCommandQueueProperty":1}"#,
        r#""time":null"#,
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    // A second one cannot have the place, and whoever asks and goes disturbs nobody.
    let error = Server::listen_for_stats(&control).unwrap_err().to_string();
    assert!(error.contains("where nobody else listens"), "{error}");
    for _ in 0..20 {
        drop(UnixStream::connect(&control).unwrap());
    }
    assert!(ask().contains(r#""version":1"#));
}
