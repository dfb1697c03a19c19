//! What the API refuses and the library can see by itself is refused at once, also where a command is not waited for.
#![allow(unsafe_code, reason = "what is tested is a library of C functions")]

#[allow(dead_code, reason = "of which this needs some")]
mod support;

use std::ptr;

use accel_transport::Transport;
use support::library::{Library, Ptr, Ready};
use support::server::Server;

const INVALID_CONTEXT: i32 = -34;
const INVALID_OPERATION: i32 = -59;
const INVALID_PROPERTY: i32 = -64;

const READ_WRITE: u64 = 1;
const HOST_WRITE_ONLY: u64 = 1 << 7;
const HOST_READ_ONLY: u64 = 1 << 8;
const HOST_NO_ACCESS: u64 = 1 << 9;

const MAP_READ: u64 = 1;
const MAP_WRITE: u64 = 2;
const MAP_WRITE_INVALIDATE_REGION: u64 = 4;

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
