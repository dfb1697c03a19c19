//! What the API refuses and the library can see by itself is refused at once, also where a command is not waited for.
#![allow(unsafe_code, reason = "what is tested is a library of C functions")]

#[allow(dead_code, reason = "of which this needs some")]
mod support;

use std::ptr;

use accel_transport::Transport;
use support::library::{Library, Ptr, Ready};
use support::server::{LOCAL, Server};

const MEM_COPY_OVERLAP: i32 = -8;
const IMAGE_FORMAT_MISMATCH: i32 = -9;
const INVALID_VALUE: i32 = -30;
const INVALID_CONTEXT: i32 = -34;
const INVALID_ARG_VALUE: i32 = -50;
const INVALID_WORK_GROUP_SIZE: i32 = -54;
const INVALID_OPERATION: i32 = -59;
const INVALID_PROPERTY: i32 = -64;

const READ_WRITE: u64 = 1;
const HOST_WRITE_ONLY: u64 = 1 << 7;
const HOST_READ_ONLY: u64 = 1 << 8;
const HOST_NO_ACCESS: u64 = 1 << 9;

const MAP_READ: u64 = 1;
const MAP_WRITE: u64 = 2;
const MAP_WRITE_INVALIDATE_REGION: u64 = 4;

/// Three numbers.
type Three = *const usize;

fn with_library(test: impl FnOnce(&Library, Ready)) {
    let server = Server::start_by(&[Transport::Bell], 8 << 20);
    let mut library = Library::open(&server.socket);
    let ready = library.ready();
    test(&library, ready);
}

#[test]
fn a_property_is_given_once() {
    with_library(|library, Ready { platform, device, .. }| {
        let (key, platform) = (0x1084, platform as i64);
        let (context, code) = library.context_of(&[key, platform, key, platform, 0], device);
        assert!(context.is_null());
        assert_eq!(code, INVALID_PROPERTY);
    });
}

#[test]
fn commands_are_about_objects_of_their_queues_context() {
    with_library(|library, ready| {
        let (other, code) = library.context(ready.platform, ready.device);
        assert_eq!(code, 0);
        let strange = library.buffer(other, READ_WRITE, 8, ptr::null_mut());
        let own = library.buffer(ready.context, READ_WRITE, 8, ptr::null_mut());
        for waits in [false, true] {
            assert_eq!(library.write(ready.queue, strange, waits, &[1; 8]), INVALID_CONTEXT);
            assert_eq!(library.write(ready.queue, own, waits, &[1; 8]), 0);
        }
        // What could not be unmapped is mapped.
        let map = cl!(
            library,
            clEnqueueMapBuffer(Ptr, Ptr, u32, u64, usize, usize, u32, *const Ptr, *mut Ptr, *mut i32) -> Ptr
        );
        let unmap = cl!(
            library,
            clEnqueueUnmapMemObject(Ptr, Ptr, Ptr, u32, *const Ptr, *mut Ptr) -> i32
        );
        let (none, no_event, mut told) = (ptr::null(), ptr::null_mut(), 1);
        let begin = map(ready.queue, own, 1, MAP_WRITE, 0, 8, 0, none, no_event, &raw mut told);
        assert_eq!(told, 0);
        let strange_queue = library.queue(other, ready.device);
        assert_eq!(unmap(strange_queue, own, begin, 0, none, no_event), INVALID_CONTEXT);
        assert_eq!(unmap(ready.queue, own, begin, 0, none, no_event), 0);
        assert_eq!(unmap(ready.queue, own, begin, 0, none, no_event), INVALID_VALUE);
        assert_eq!(library.finish(ready.queue), 0, "nothing was refused by the server");
    });
}

#[test]
fn the_host_has_the_access_that_it_asked_for() {
    with_library(|library, Ready { context, queue, .. }| {
        let map = cl!(
            library,
            clEnqueueMapBuffer(Ptr, Ptr, u32, u64, usize, usize, u32, *const Ptr, *mut Ptr, *mut i32) -> Ptr
        );
        for (flags, reads, writes) in [
            (0, true, true),
            (HOST_WRITE_ONLY, false, true),
            (HOST_READ_ONLY, true, false),
            (HOST_NO_ACCESS, false, false),
        ] {
            let buffer = library.buffer(context, READ_WRITE | flags, 8, ptr::null_mut());
            let code = |may: bool| if may { 0 } else { INVALID_OPERATION };
            for (map_flags, may) in [
                (MAP_READ, reads),
                (MAP_WRITE, writes),
                (MAP_READ | MAP_WRITE, reads && writes),
                (MAP_WRITE_INVALIDATE_REGION, writes),
            ] {
                let mut told = 1;
                let (none, no_event) = (ptr::null(), ptr::null_mut());
                map(queue, buffer, 1, map_flags, 0, 8, 0, none, no_event, &raw mut told);
                assert_eq!(told, code(may), "{flags:#x} {map_flags}");
            }
            for waits in [false, true] {
                assert_eq!(library.write(queue, buffer, waits, &[1; 8]), code(writes), "{flags:#x}");
                assert_eq!(
                    library.read(queue, buffer, waits, &mut [0; 8]),
                    code(reads),
                    "{flags:#x}"
                );
            }
        }
        assert_eq!(library.finish(queue), 0);
    });
}

#[test]
fn fills_and_copies_stay_within_their_buffers() {
    with_library(|library, Ready { context, queue, .. }| {
        let (none, no_event) = (ptr::null(), ptr::null_mut());
        let [one, other] = [(); 2].map(|()| library.buffer(context, READ_WRITE, 64, ptr::null_mut()));
        let fill = |pattern: &[u8], offset, size| {
            let fill = cl!(
                library,
                clEnqueueFillBuffer(Ptr, Ptr, *const u8, usize, usize, usize, u32, *const Ptr, *mut Ptr) -> i32
            );
            fill(
                queue,
                one,
                pattern.as_ptr(),
                pattern.len(),
                offset,
                size,
                0,
                none,
                no_event,
            )
        };
        assert_eq!(fill(&[7; 4], 60, 4), 0);
        for (length, offset, size) in [(4, 64, 4), (4, 0, 68), (3, 0, 9), (4, 2, 4), (4, 0, 6), (0, 0, 4)] {
            let code = fill(&[7; 4][..length], offset, size);
            assert_eq!(code, INVALID_VALUE, "{length} {offset} {size}");
        }
        let copy = |from, to, (begin, end): (usize, usize), size| {
            let copy = cl!(
                library,
                clEnqueueCopyBuffer(Ptr, Ptr, Ptr, usize, usize, usize, u32, *const Ptr, *mut Ptr) -> i32
            );
            copy(queue, from, to, begin, end, size, 0, none, no_event)
        };
        assert_eq!((copy(one, other, (0, 0), 64), copy(one, one, (0, 32), 32)), (0, 0));
        assert_eq!(copy(one, other, (1, 0), 64), INVALID_VALUE);
        assert_eq!(copy(one, other, (0, 1), 64), INVALID_VALUE);
        assert_eq!(copy(one, one, (0, 31), 32), MEM_COPY_OVERLAP);
        let rect = |origin: [usize; 3], region: [usize; 3], pitch| {
            type Rect = extern "C" fn(
                Ptr,
                Ptr,
                Ptr,
                Three,
                Three,
                Three,
                usize,
                usize,
                usize,
                usize,
                u32,
                *const Ptr,
                *mut Ptr,
            ) -> i32;
            // SAFETY: as of `cl`.
            let rect = unsafe { std::mem::transmute::<Ptr, Rect>(library.address("clEnqueueCopyBufferRect")) };
            let (from, to, region) = (origin.as_ptr(), [0; 3], region.as_ptr());
            let to = to.as_ptr();
            rect(
                queue, one, other, from, to, region, pitch, 0, pitch, 0, 0, none, no_event,
            )
        };
        assert_eq!(rect([0; 3], [4, 4, 4], 4), 0);
        for (origin, region, pitch) in [
            ([1, 0, 0], [4, 4, 4], 4),
            ([0; 3], [4, 4, 5], 4),
            ([0; 3], [4, 0, 4], 4),
            ([0; 3], [4, 1, 1], 3),
            ([usize::MAX; 3], [1; 3], 4),
        ] {
            assert_eq!(
                rect(origin, region, pitch),
                INVALID_VALUE,
                "{origin:?} {region:?} {pitch}"
            );
        }
        assert_eq!(library.finish(queue), 0, "nothing was refused by the server");
    });
}

#[test]
fn regions_are_within_their_images() {
    /// `cl_image_desc`: what it is, its sizes, and what is zero here.
    #[repr(C)]
    struct Desc(u32, [usize; 6], [u32; 2], Ptr);

    const SIZES: [usize; 6] = [8, 4, 2, 3, 0, 0];
    with_library(|library, Ready { context, queue, .. }| {
        let (none, no_event) = (ptr::null(), ptr::null_mut());
        let image = |kind: u32, data_type: u32| {
            let create = cl!(
                library,
                clCreateImage(Ptr, u64, *const [u32; 2], *const Desc, *const u8, *mut i32) -> Ptr
            );
            let (format, desc) = ([0x10b5, data_type], Desc(kind, SIZES, [0; 2], ptr::null()));
            let mut code = 1;
            let image = create(
                context,
                READ_WRITE,
                &raw const format,
                &raw const desc,
                ptr::null(),
                &raw mut code,
            );
            assert_eq!(code, 0);
            image
        };
        let fill = |image, color: *const u32, origin: [usize; 3], region: [usize; 3]| {
            let fill = cl!(
                library,
                clEnqueueFillImage(Ptr, Ptr, *const u32, *const usize, *const usize, u32, *const Ptr, *mut Ptr) -> i32
            );
            fill(queue, image, color, origin.as_ptr(), region.as_ptr(), 0, none, no_event)
        };
        let color = [0_u32; 4].as_ptr();
        // One dimension, two, three; arrays of one, of two.
        for (kind, extent) in [
            (0x10f4, [8, 1, 1]),
            (0x10f1, [8, 4, 1]),
            (0x10f2, [8, 4, 2]),
            (0x10f5, [8, 3, 1]),
            (0x10f3, [8, 4, 3]),
        ] {
            let image = image(kind, 0x10da);
            assert_eq!(fill(image, color, [0; 3], extent), 0, "{kind:#x}");
            assert_eq!(fill(image, ptr::null(), [0; 3], extent), INVALID_VALUE);
            for index in 0..3 {
                let (mut origin, mut longer, mut none) = ([0; 3], extent, extent);
                (origin[index], longer[index], none[index]) = (1, extent[index] + 1, 0);
                for (origin, region) in [(origin, extent), ([0; 3], longer), ([0; 3], none)] {
                    let code = fill(image, color, origin, region);
                    assert_eq!(code, INVALID_VALUE, "{kind:#x} {origin:?} {region:?}");
                }
            }
        }
        let copy = cl!(
            library,
            clEnqueueCopyImage(Ptr, Ptr, Ptr, Three, Three, Three, u32, *const Ptr, *mut Ptr) -> i32
        );
        let [one, other, floats] = [0x10da, 0x10da, 0x10de].map(|data_type| image(0x10f1, data_type));
        let (begin, all) = ([0_usize; 3], [8_usize, 4, 1]);
        let (begin, all) = (begin.as_ptr(), all.as_ptr());
        assert_eq!(copy(queue, one, other, begin, begin, all, 0, none, no_event), 0);
        let code = copy(queue, one, floats, begin, begin, all, 0, none, no_event);
        assert_eq!(code, IMAGE_FORMAT_MISMATCH);
        assert_eq!(library.finish(queue), 0, "nothing was refused by the server");
    });
}

#[test]
fn arguments_and_launches_are_waited_for_as_long_as_they_are_new() {
    let server = Server::start_by(&[Transport::Bell], 8 << 20);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let kernel = library.kernel(context);
    let buffer = library.buffer(context, READ_WRITE, 16, ptr::null_mut());
    let object = (buffer as usize).to_ne_bytes();
    assert_eq!(library.set(kernel, 1, &object), INVALID_ARG_VALUE);
    assert_eq!((library.set(kernel, 0, &object), library.set(kernel, 1, &[1])), (0, 0));
    let launch = |local, event| library.launch((queue, kernel), 1, local, event);
    let (largest, mut event) = (usize::try_from(LOCAL).unwrap(), ptr::null());
    for _ in 0..2 {
        assert_eq!(launch(Some(largest + 1), &raw mut event), INVALID_WORK_GROUP_SIZE);
        assert!(event.is_null());
    }
    assert_eq!(
        (launch(None, ptr::null_mut()), launch(Some(largest), &raw mut event)),
        (0, 0)
    );
    assert!(!event.is_null() && server.objects("cl_event") == 1);
    // What is known by now nobody waits for.
    let before = server.waited();
    for number in 2..10 {
        assert_eq!(library.set(kernel, 1, &[number]), 0);
        assert_eq!(launch(Some(largest), ptr::null_mut()), 0);
    }
    assert_eq!(server.waited(), before);
    assert_eq!(library.finish(queue), 0, "nothing was refused later");
}
