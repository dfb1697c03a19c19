//! The library as a program has it: opened by dlopen(3), called through the dispatch table, with a server at a socket.
#![allow(unsafe_code, reason = "what is tested is a library of C functions")]

#[allow(dead_code, reason = "of which this needs some")]
mod support;

use std::ptr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use accel_proto::Call;
use accel_proto::opencl as calls;
use accel_transport::Transport;
use support::library::{Library, Ptr, Ready};
use support::server::{REFUSED, Server};

const ARENA: u64 = 8 << 20;

/// Ways with one memory, and one on which each side has its own.
const RINGS: [Transport; 3] = [Transport::SameCpu, Transport::Bell, Transport::Spin];
const STREAMS: [Transport; 1] = [Transport::Stream];

/// Tests that are the same whichever way records travel.
macro_rules! by_rings_and_by_streams {
    ($($name:ident)*) => {
        $(mod $name {
            #[test]
            fn by_rings() {
                super::$name(&super::RINGS);
            }

            #[test]
            fn by_streams() {
                super::$name(&super::STREAMS);
            }
        })*
    };
}

by_rings_and_by_streams! {
    platforms_and_devices_are_found_and_answers_are_asked_for_once
    data_goes_through_a_kernel_and_comes_back
    mapped_memory_is_the_arena_or_the_programs_own
    memory_that_is_unmapped_before_anybody_knows_that_it_is_mapped_stays_as_it_was
    what_a_command_brings_to_the_programs_memory_the_next_one_takes_from_there
    what_is_read_behind_a_read_that_is_refused_comes
    data_that_the_arena_cannot_hold_goes_in_pieces_and_what_is_held_is_reclaimed
    who_waits_for_a_transfer_has_it_in_pieces_and_who_does_not_gets_it_whole
    objects_are_released_when_nothing_needs_them_and_names_come_back
    what_threads_do_with_one_object_keeps_its_order
    who_waits_for_an_event_does_not_keep_others_from_setting_it
    a_callback_comes_when_its_event_is_complete
    without_a_server_there_is_no_platform_and_after_its_death_an_error_and_a_fresh_context
    a_child_begins_anew
}

type Info = extern "C" fn(Ptr, u32, usize, *mut u8, *mut usize) -> i32;

/// An answer of a query, asked for as programs do: its length first.
fn info(query: Info, object: Ptr, name: u32) -> Result<Vec<u8>, i32> {
    let mut length = 0;
    match query(object, name, 0, ptr::null_mut(), &raw mut length) {
        0 => {}
        code => return Err(code),
    }
    let mut value = vec![0; length];
    assert_eq!(query(object, name, length, value.as_mut_ptr(), ptr::null_mut()), 0);
    Ok(value)
}

macro_rules! info {
    ($library:expr, $name:ident, $object:expr, $param:expr) => {
        info(
            cl!($library, $name(Ptr, u32, usize, *mut u8, *mut usize) -> i32),
            $object,
            $param,
        )
    };
}

#[test]
fn the_library_exports_what_loaders_ask_for() {
    let server = Server::start_by(&RINGS, ARENA);
    let library = Library::open(&server.socket);
    for exported in [
        "clIcdGetPlatformIDsKHR",
        "clGetExtensionFunctionAddress",
        "clGetPlatformInfo",
    ] {
        assert!(library.exports(exported), "{exported}");
    }
    for own in ["clFinish", "clGetPlatformIDs", "finish"] {
        assert!(!library.exports(own), "{own} would be taken for the loader's");
    }
}

fn platforms_and_devices_are_found_and_answers_are_asked_for_once(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready {
        platform,
        device,
        context,
        queue,
    } = library.ready();
    let name = info!(library, clGetPlatformInfo, platform, 0x0902).unwrap();
    assert!(name.starts_with(b"A platform of the tests") && name.len() > 64);
    let extensions = info!(library, clGetPlatformInfo, platform, 0x0904).unwrap();
    assert_eq!(extensions, b"cl_khr_icd\0");
    assert_eq!(info!(library, clGetPlatformInfo, platform, 0x0920).unwrap(), b"BSLT\0");
    let asked = server.asked(calls::GetDeviceInfo::OP);
    for _ in 0..3 {
        assert_eq!(info!(library, clGetDeviceInfo, device, 0x102b).unwrap(), b"A device\0");
    }
    assert_eq!(server.asked(calls::GetDeviceInfo::OP), asked + 1);
    // The platform that a device names is the one that the program has.
    let named = info!(library, clGetDeviceInfo, device, 0x1031).unwrap();
    assert_eq!(named, (platform as usize).to_ne_bytes());
    assert_eq!(info!(library, clGetDeviceInfo, device, 0x9999), Err(-30));
    assert_eq!(info!(library, clGetDeviceInfo, ptr::null(), 0x102b), Err(-33));
    assert_eq!(info!(library, clGetDeviceInfo, platform, 0x102b), Err(-33));
    assert_eq!(
        info!(library, clGetCommandQueueInfo, queue, 0x1090).unwrap(),
        (context as usize).to_ne_bytes()
    );
    let properties = info!(library, clGetContextInfo, context, 0x1082).unwrap();
    assert_eq!(properties.len(), 24);
    let mut small = [0; 2];
    let query = cl!(library, clGetDeviceInfo(Ptr, u32, usize, *mut u8, *mut usize) -> i32);
    assert_eq!(query(device, 0x102b, 2, small.as_mut_ptr(), ptr::null_mut()), -30);
}

type Map = extern "C" fn(Ptr, Ptr, u32, u64, usize, usize, u32, *const Ptr, *mut Ptr, *mut i32) -> *mut u8;

fn data_goes_through_a_kernel_and_comes_back(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let buffer = library.buffer(context, 1, 16, ptr::null_mut());
    let kernel = library.kernel(context);
    // The kernel keeps it.
    assert_eq!(info!(library, clGetKernelInfo, kernel, 0x1194).unwrap().len(), 8);
    let launch = |dimensions| library.launch((queue, kernel), dimensions, None, ptr::null_mut());
    assert_eq!(launch(1), -52, "arguments are not set");
    let set = |index, bytes: &[u8]| library.set(kernel, index, bytes);
    let object = (buffer as usize).to_ne_bytes();
    assert_eq!(set(0, &object), 0);
    assert_eq!(set(1, &[3]), 0);
    assert_eq!(set(2, &[3]), -49);
    // NULL where a buffer can be is a buffer of NULL, and no number.
    assert_eq!(set(0, &[0; 8]), 0);
    assert_eq!(set(0, &object), 0);
    assert_eq!(set(1, &[3]), 0);
    assert_eq!(launch(4), -53);
    assert_eq!(library.write(queue, buffer, false, &[10; 16]), 0);
    for dimensions in 1..=3 {
        assert_eq!(launch(dimensions), 0);
    }
    let mut bytes = [0; 16];
    assert_eq!(library.read(queue, buffer, false, &mut bytes), 0);
    assert_eq!(library.finish(queue), 0);
    assert_eq!(bytes, [19; 16]);
    assert_eq!(
        server.asked(calls::SetKernelArg::OP),
        4,
        "what is the same does not cross"
    );
    let mut again = [0; 16];
    assert_eq!(library.read(queue, buffer, true, &mut again), 0);
    assert_eq!(again, [19; 16]);
    assert_eq!(library.read(queue, buffer, true, &mut [0; 17]), -30);
    assert_eq!(library.write(queue, ptr::null(), true, &[0; 1]), -38);
    assert_eq!(library.write(buffer, buffer, true, &[0; 1]), -36);
}

fn mapped_memory_is_the_arena_or_the_programs_own(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let mut own = [7_u8; 32];
    // SAFETY: the table's entry has this type.
    let map = unsafe { std::mem::transmute::<Ptr, Map>(library.address("clEnqueueMapBuffer")) };
    let unmap = cl!(
        library,
        clEnqueueUnmapMemObject(Ptr, Ptr, *mut u8, u32, *const Ptr, *mut Ptr) -> i32
    );
    for (flags, host) in [(1_u64, ptr::null_mut()), (1 | 8, own.as_mut_ptr())] {
        let buffer = library.buffer(context, flags, 32, host);
        assert_eq!(library.write(queue, buffer, true, &[1; 32]), 0);
        let mut code = 1;
        let address = map(
            queue,
            buffer,
            1,
            3,
            0,
            32,
            0,
            ptr::null(),
            ptr::null_mut(),
            &raw mut code,
        );
        assert_eq!(code, 0);
        assert!(host.is_null() || host == address);
        let count = info!(library, clGetMemObjectInfo, buffer, 0x1104).unwrap();
        assert_eq!(count, 1_u32.to_ne_bytes());
        // SAFETY: 32 bytes are mapped.
        let mapped = unsafe { std::slice::from_raw_parts_mut(address, 32) };
        assert_eq!(mapped, [1; 32]);
        mapped.fill(9);
        assert_eq!(unmap(queue, buffer, address, 0, ptr::null(), ptr::null_mut()), 0);
        assert_eq!(unmap(queue, buffer, address, 0, ptr::null(), ptr::null_mut()), -30);
        let mut bytes = [0; 32];
        assert_eq!(library.read(queue, buffer, true, &mut bytes), 0);
        assert_eq!(bytes, [9; 32]);
        let told = info!(library, clGetMemObjectInfo, buffer, 0x1101).unwrap();
        assert_eq!(told, flags.to_ne_bytes());
    }
}

fn memory_that_is_unmapped_before_anybody_knows_that_it_is_mapped_stays_as_it_was(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let mut own = [7_u8; 32];
    let unmap = cl!(
        library,
        clEnqueueUnmapMemObject(Ptr, Ptr, *mut u8, u32, *const Ptr, *mut Ptr) -> i32
    );
    for (flags, host) in [(1_u64, ptr::null_mut()), (1 | 8, own.as_mut_ptr())] {
        let buffer = library.buffer(context, flags, 32, host);
        assert_eq!(library.write(queue, buffer, true, &[1; 32]), 0);
        let before = server.asked(calls::EnqueueMapBuffer::OP);
        let address = large_map(&library, queue, buffer, 32);
        assert_eq!(cl!(library, clFlush(Ptr) -> i32)(queue), 0);
        let begun = Instant::now();
        while server.asked(calls::EnqueueMapBuffer::OP) == before {
            assert!(begun.elapsed() < Duration::from_secs(10), "the map does not come");
            std::thread::yield_now();
        }
        // Time for the server to copy, once it has counted.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(unmap(queue, buffer, address, 0, ptr::null(), ptr::null_mut()), 0);
        let mut bytes = [0; 32];
        assert_eq!(library.read(queue, buffer, true, &mut bytes), 0);
        assert_eq!(bytes, [1; 32]);
    }
}

fn data_that_the_arena_cannot_hold_goes_in_pieces_and_what_is_held_is_reclaimed(ways: &[Transport]) {
    let server = Server::start_by(ways, 4 << 20);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let data: Vec<u8> = (0..9_000_001_u32).map(|index| (index % 251) as u8).collect();
    let buffer = library.buffer(context, 1, data.len(), ptr::null_mut());
    assert_eq!(library.write(queue, buffer, true, &data), 0);
    let mut back = vec![0; data.len()];
    assert_eq!(library.read(queue, buffer, false, &mut back), 0);
    assert_eq!(library.finish(queue), 0);
    assert!(back == data);
    let map = large_map(&library, queue, buffer, data.len());
    // SAFETY: so many bytes are mapped.
    let mapped = unsafe { std::slice::from_raw_parts_mut(map, data.len()) };
    assert!(mapped == data);
    mapped.fill(8);
    let unmap = cl!(
        library,
        clEnqueueUnmapMemObject(Ptr, Ptr, *mut u8, u32, *const Ptr, *mut Ptr) -> i32
    );
    assert_eq!(unmap(queue, buffer, map, 0, ptr::null(), ptr::null_mut()), 0);
    assert_eq!(library.read(queue, buffer, true, &mut back), 0);
    assert!(back.iter().all(|byte| *byte == 8));
    // Nobody waits for these, and together they are more than there is.
    let small = library.buffer(context, 1, 600_000, ptr::null_mut());
    for value in 0..20 {
        assert_eq!(library.write(queue, small, false, &vec![value; 600_000]), 0, "{value}");
    }
    let mut last = vec![0; 600_000];
    assert_eq!(library.read(queue, small, true, &mut last), 0);
    assert!(last.iter().all(|byte| *byte == 19));
}

fn who_waits_for_a_transfer_has_it_in_pieces_and_who_does_not_gets_it_whole(ways: &[Transport]) {
    let server = Server::start_by(ways, 64 << 20);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let data: Vec<u8> = (0..(9 << 20) + 1_u32).map(|index| (index % 251) as u8).collect();
    let buffer = library.buffer(context, 1, data.len(), ptr::null_mut());
    for (waits, calls) in [(true, 3), (false, 1)] {
        let asked = || {
            (
                server.asked(calls::EnqueueWriteBuffer::OP),
                server.asked(calls::EnqueueReadBuffer::OP),
            )
        };
        let before = asked();
        assert_eq!(library.write(queue, buffer, waits, &data), 0);
        let mut back = vec![0; data.len()];
        assert_eq!(library.read(queue, buffer, waits, &mut back), 0);
        assert_eq!(library.finish(queue), 0);
        assert!(back == data);
        assert_eq!(asked(), (before.0 + calls, before.1 + calls), "{waits}");
    }
}

fn what_a_command_brings_to_the_programs_memory_the_next_one_takes_from_there(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    server.pause(Duration::from_millis(5));
    let [one, other] = [(); 2].map(|()| library.buffer(context, 1, 16, ptr::null_mut()));
    assert_eq!(library.write(queue, one, true, &[7; 16]), 0);
    // Nobody waits between the two.
    let mut between = [0; 16];
    assert_eq!(library.read(queue, one, false, &mut between), 0);
    assert_eq!(library.write(queue, other, false, &between), 0);
    let mut back = [0; 16];
    assert_eq!(library.read(queue, other, true, &mut back), 0);
    assert_eq!(back, [7; 16]);
    // The same with memory that is the program's own while it is mapped.
    let mut own = [0; 16];
    let shown = library.buffer(context, 1 << 3, 16, own.as_mut_ptr());
    let map = large_map(&library, queue, shown, 16);
    assert_eq!(map, own.as_mut_ptr());
    assert_eq!(library.read(queue, one, false, &mut own), 0);
    let unmap = cl!(
        library,
        clEnqueueUnmapMemObject(Ptr, Ptr, *mut u8, u32, *const Ptr, *mut Ptr) -> i32
    );
    assert_eq!(unmap(queue, shown, map, 0, ptr::null(), ptr::null_mut()), 0);
    let mut back = [0; 16];
    assert_eq!(library.read(queue, shown, true, &mut back), 0);
    assert_eq!(back, [7; 16]);
}

fn what_is_read_behind_a_read_that_is_refused_comes(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let buffer = library.buffer(context, 1, 16, ptr::null_mut());
    assert_eq!(library.write(queue, buffer, true, &[7; 16]), 0);
    let (mut refused, mut back, mut event) = ([1; REFUSED], [0; 16], ptr::null());
    assert_eq!(library.read(queue, buffer, false, &mut refused), 0);
    assert_eq!(library.read(queue, buffer, false, &mut back), 0);
    let marker = cl!(library, clEnqueueMarker(Ptr, *mut Ptr) -> i32);
    assert_eq!(marker(queue, &raw mut event), 0);
    assert_eq!(
        cl!(library, clWaitForEvents(u32, *const Ptr) -> i32)(1, &raw const event),
        0
    );
    assert_eq!((back, refused), ([7; 16], [1; REFUSED]));
    assert_eq!(library.finish(queue), -5);
}

/// A map of a whole buffer, for reading and writing.
fn large_map(library: &Library, queue: Ptr, buffer: Ptr, size: usize) -> *mut u8 {
    // SAFETY: the table's entry has this type.
    let map = unsafe { std::mem::transmute::<Ptr, Map>(library.address("clEnqueueMapBuffer")) };
    let mut code = 1;
    let address = map(
        queue,
        buffer,
        0,
        3,
        0,
        size,
        0,
        ptr::null(),
        ptr::null_mut(),
        &raw mut code,
    );
    assert_eq!(code, 0);
    address
}

fn objects_are_released_when_nothing_needs_them_and_names_come_back(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready {
        platform,
        context,
        queue,
        ..
    } = library.ready();
    let retain = cl!(library, clRetainMemObject(Ptr) -> i32);
    let release = cl!(library, clReleaseMemObject(Ptr) -> i32);
    for _ in 0..1000 {
        let buffer = library.buffer(context, 1, 64, ptr::null_mut());
        assert_eq!(retain(buffer), 0);
        assert_eq!(
            info!(library, clGetMemObjectInfo, buffer, 0x1105).unwrap(),
            2_u32.to_ne_bytes()
        );
        assert_eq!((release(buffer), release(buffer)), (0, 0));
    }
    let kernel = library.kernel(context);
    assert_eq!(library.finish(queue), 0);
    assert_eq!((server.objects("cl_mem"), server.objects("cl_program")), (0, 1));
    // The context's last reference is given up before what was made in it is.
    assert_eq!(cl!(library, clReleaseContext(Ptr) -> i32)(context), 0);
    assert_eq!(library.finish(queue), 0);
    assert_eq!(server.objects("cl_context"), 1);
    assert_eq!(cl!(library, clReleaseKernel(Ptr) -> i32)(kernel), 0);
    assert_eq!(cl!(library, clReleaseCommandQueue(Ptr) -> i32)(queue), 0);
    let deadline = Instant::now() + Duration::from_secs(10);
    while server.objects("cl_context") + server.objects("cl_program") + server.objects("cl_command_queue") > 0 {
        assert!(Instant::now() < deadline, "the last release does not come");
        // What was put goes with the next call.
        assert_eq!(info!(library, clGetPlatformInfo, platform, 0x9999), Err(-30));
    }
}

fn what_threads_do_with_one_object_keeps_its_order(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let buffer = library.buffer(context, 1, 8, ptr::null_mut());
    // Each record takes a while, so that what is not waited for comes too late.
    server.pause(Duration::from_micros(300));
    let library = &library;
    let (to_first, first) = mpsc::channel::<u64>();
    let (to_second, second) = mpsc::channel::<u64>();
    let (queue, buffer, context) = (queue as usize, buffer as usize, context as usize);
    let turn = move |turns: mpsc::Receiver<u64>, next: mpsc::Sender<u64>| {
        let (queue, buffer, context) = (queue as Ptr, buffer as Ptr, context as Ptr);
        while let Ok(turn) = turns.recv() {
            assert_eq!(library.write(queue, buffer, false, &turn.to_ne_bytes()), 0);
            // One thread makes an event that the other one sets.
            let event = library.user_event(context) as usize;
            assert_eq!(launch_marker(library, queue, event as Ptr), 0);
            if turn == 50 {
                next.send(u64::MAX).ok();
                return;
            }
            if turn == u64::MAX {
                return;
            }
            next.send(turn + 1).ok();
        }
    };
    std::thread::scope(|scope| {
        let to_second_again = to_second.clone();
        scope.spawn(move || turn(first, to_second_again));
        scope.spawn(move || turn(second, to_first.clone()));
        to_second.send(1).unwrap();
        drop(to_second);
    });
    let (queue, buffer) = (queue as Ptr, buffer as Ptr);
    let mut last = [0; 8];
    assert_eq!(library.read(queue, buffer, true, &mut last), 0);
    assert_eq!(library.finish(queue), 0, "a record came before what it depends on");
    assert_eq!(u64::from_ne_bytes(last), u64::MAX);
}

/// Sets a user event, and releases it.
fn launch_marker(library: &Library, queue: Ptr, event: Ptr) -> i32 {
    let set = cl!(library, clSetUserEventStatus(Ptr, i32) -> i32);
    let marker = cl!(
        library,
        clEnqueueMarkerWithWaitList(Ptr, u32, *const Ptr, *mut Ptr) -> i32
    );
    assert_eq!(marker(queue, 1, &raw const event, ptr::null_mut()), 0);
    assert_eq!(set(event, 0), 0);
    cl!(library, clReleaseEvent(Ptr) -> i32)(event)
}

fn who_waits_for_an_event_does_not_keep_others_from_setting_it(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    server.pause(Duration::from_millis(2));
    let buffer = library.buffer(context, 1, 8, ptr::null_mut());
    let library = &library;
    for _ in 0..20 {
        let event = library.user_event(context);
        // Records of this thread that are not done when it begins to wait.
        assert_eq!(library.write(queue, buffer, false, &[1; 8]), 0);
        assert_eq!(cl!(library, clRetainEvent(Ptr) -> i32)(event), 0);
        let address = event as usize;
        let wait = cl!(library, clWaitForEvents(u32, *const Ptr) -> i32);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                let event = address as Ptr;
                assert_eq!(cl!(library, clSetUserEventStatus(Ptr, i32) -> i32)(event, 0), 0);
                assert_eq!(cl!(library, clReleaseEvent(Ptr) -> i32)(event), 0);
            });
            assert_eq!(wait(1, &raw const event), 0);
        });
        assert_eq!(cl!(library, clReleaseEvent(Ptr) -> i32)(event), 0);
        assert_eq!(library.finish(queue), 0);
    }
}

extern "C" fn note(_event: Ptr, state: i32, told: *mut mpsc::Sender<i32>) {
    // SAFETY: the test's sender, which lives for as long as the process.
    let told = unsafe { &*told };
    told.send(state).unwrap();
}

/// What the process does at each signal.
fn signals() -> Vec<usize> {
    let action = |signal| {
        // SAFETY: an action is plain data, of which zeroes are a value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to an action of this function's, and nothing is changed.
        unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) };
        action.sa_sigaction
    };
    (1..=64).map(action).collect()
}

fn a_callback_comes_when_its_event_is_complete(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, .. } = library.ready();
    let before = signals();
    let event = library.user_event(context);
    let (sender, told) = mpsc::channel();
    // The function may still be at its end when what it tells has come.
    let sender = std::ptr::from_mut(Box::leak(Box::new(sender)));
    type Notice = extern "C" fn(Ptr, i32, *mut mpsc::Sender<i32>);
    let register = cl!(
        library,
        clSetEventCallback(Ptr, i32, Option<Notice>, *mut mpsc::Sender<i32>) -> i32
    );
    assert_eq!(register(event, 0, None, ptr::null_mut()), -30);
    assert_eq!(register(event, 3, Some(note), sender), -30);
    assert_eq!(register(event, 0, Some(note), sender), 0);
    assert!(told.recv_timeout(Duration::from_millis(30)).is_err());
    assert_eq!(cl!(library, clSetUserEventStatus(Ptr, i32) -> i32)(event, 0), 0);
    assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(0));
    assert_eq!(signals(), before, "signals are the program's");
    assert_eq!(
        info!(library, clGetEventInfo, event, 0x11d3).unwrap(),
        0_i32.to_ne_bytes()
    );
}

fn without_a_server_there_is_no_platform_and_after_its_death_an_error_and_a_fresh_context(ways: &[Transport]) {
    let mut server = Server::start_by(ways, ARENA);
    {
        let nowhere = server.dir().join("none.sock");
        let mut library = Library::open(&nowhere);
        assert_eq!(library.platforms().unwrap_err(), -1001);
    }
    let mut library = Library::open(&server.socket);
    let Ready {
        platform,
        device,
        context,
        queue,
    } = library.ready();
    let buffer = library.buffer(context, 1, 8, ptr::null_mut());
    server.die();
    let begun = Instant::now();
    assert_ne!(library.finish(queue), 0);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(library.write(queue, buffer, true, &[1; 8]), -5);
    assert_eq!(library.context(platform, device).1, -2, "there is no server yet");
    assert_eq!(cl!(library, clReleaseMemObject(Ptr) -> i32)(buffer), 0);
    server.restart(ARENA);
    let (fresh, code) = library.context(platform, device);
    assert_eq!(code, 0);
    let queue_there = library.queue(fresh, device);
    let buffer = library.buffer(fresh, 1, 8, ptr::null_mut());
    assert_eq!(library.write(queue_there, buffer, true, &[5; 8]), 0);
    assert_eq!(library.finish(queue), -5, "what the dead server had stays lost");
    assert_eq!(library.write(queue_there, ptr::null(), true, &[1; 8]), -38);
}

fn a_child_begins_anew(ways: &[Transport]) {
    let server = Server::start_by(ways, ARENA);
    let mut library = Library::open(&server.socket);
    let Ready {
        platform,
        device,
        context,
        queue,
    } = library.ready();
    // SAFETY: the child calls the library, whose locks no other thread of this process has, and ends itself.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let lost = library.finish(queue) == -5;
        let (fresh, code) = library.context(platform, device);
        let works = code == 0 && !fresh.is_null();
        // SAFETY: ends the child, without what the parent's test would do.
        unsafe { libc::_exit(if lost && works { 0 } else { 1 }) };
    }
    let mut status = 1;
    // SAFETY: the child is this process's, and the pointer a number's.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "of the child");
    // The parent's connection is as it was.
    let buffer = library.buffer(context, 1, 8, ptr::null_mut());
    assert_eq!(library.write(queue, buffer, true, &[1; 8]), 0);
}
