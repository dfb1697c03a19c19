//! Short writes that a program waits for and the library does not: whoever comes later finds them complete all the same.
#![allow(unsafe_code, reason = "what is tested is a library of C functions")]

#[allow(dead_code, reason = "of which this needs some")]
mod support;

use std::ptr;
use std::time::Duration;

use accel_proto::Call;
use accel_proto::opencl as calls;
use accel_transport::Transport;
use support::library::{Library, Ptr, Ready};
use support::server::Server;

const ARENA: u64 = 8 << 20;

/// Ways with one memory, and one on which each side has its own.
const WAYS: [&[Transport]; 2] = [
    &[Transport::SameCpu, Transport::Bell, Transport::Spin],
    &[Transport::Stream],
];

const READ_WRITE: u64 = 1;
const HOST_READ_ONLY: u64 = 1 << 8;
const INVALID_OPERATION: i32 = -59;

fn each(test: impl Fn(&Server, &mut Library)) {
    for ways in WAYS {
        let server = Server::start_by(ways, ARENA);
        test(&server, &mut Library::open(&server.socket));
    }
}

/// Writes that the server has heard of when the call returns, of one: those that are not waited for go later, with others.
fn heard(server: &Server, write: impl FnOnce() -> i32) -> u64 {
    let asked = || server.asked(calls::EnqueueWriteBuffer::OP);
    let before = asked();
    assert_eq!(write(), 0);
    asked() - before
}

#[test]
fn a_short_write_is_not_waited_for_and_what_has_a_reason_to_be_is() {
    each(|server, library| {
        let Ready { context, queue, .. } = library.ready();
        let buffer = |flags, size| library.buffer(context, flags, size, ptr::null_mut());
        let (short, long) = (buffer(READ_WRITE, 480), buffer(READ_WRITE, 1 << 20));
        let write = |buffer, size| heard(server, || library.write(queue, buffer, true, &vec![7; size]));
        assert_eq!(write(short, 480), 0);
        let mut back = [0; 480];
        assert_eq!(library.read(queue, short, true, &mut back), 0);
        assert_eq!(back, [7; 480]);
        assert_eq!(write(long, 1 << 20), 1, "a long one");
        let not_to_be_written = buffer(READ_WRITE | HOST_READ_ONLY, 8);
        assert_eq!(library.write(queue, not_to_be_written, true, &[7]), INVALID_OPERATION);
        // By a call that waits, the program knows that a read of before is complete.
        let mut before = [0; 480];
        assert_eq!(library.read(queue, short, false, &mut before), 0);
        assert_eq!(write(short, 1), 1, "behind a read");
        assert_eq!(before, [7; 480]);
        // Some of many are waited for, so that what they hold of the arena comes back. Each of the others takes the server a while.
        assert_eq!(library.finish(queue), 0);
        server.pause(Duration::from_millis(1));
        let before = server.asked(calls::EnqueueWriteBuffer::OP);
        let is_waited_for = |count: &u64| {
            assert_eq!(library.write(queue, short, true, &[7; 480]), 0);
            server.asked(calls::EnqueueWriteBuffer::OP) == before + count
        };
        let waited = (1..=200).filter(is_waited_for).count();
        assert!((2..100).contains(&waited), "{waited}");
        assert_eq!(library.finish(queue), 0);
    });
}

/// A map and a read into mapped memory, which are where the program sees them.
#[test]
fn behind_what_is_in_place_it_is_waited_for() {
    let server = Server::start_by(WAYS[0], ARENA);
    let mut library = Library::open(&server.socket);
    let Ready { context, queue, .. } = library.ready();
    let [mapped, read, other] = [1, 2, 3].map(|value| {
        let buffer = library.buffer(context, READ_WRITE, 480, ptr::null_mut());
        assert_eq!(library.write(queue, buffer, true, &[value; 480]), 0);
        buffer
    });
    assert_eq!(library.finish(queue), 0);
    let map = cl!(
        library,
        clEnqueueMapBuffer(Ptr, Ptr, u32, u64, usize, usize, u32, *const Ptr, *mut Ptr, *mut i32) -> *mut u8
    );
    let mut code = 1;
    let (none, no_event) = (ptr::null(), ptr::null_mut());
    let address = map(queue, mapped, 0, 1, 0, 480, 0, none, no_event, &raw mut code);
    assert_eq!(code, 0);
    let write = || library.write(queue, other, true, &[7; 8]);
    assert_eq!(heard(&server, write), 1, "behind a map");
    // SAFETY: so many bytes are mapped there.
    let bytes = unsafe { std::slice::from_raw_parts_mut(address, 480) };
    assert_eq!(bytes, [1; 480]);
    let begun = server.asked(calls::EnqueueWriteBuffer::OP);
    assert_eq!(heard(&server, write), 0, "which it has waited for, too");
    assert_eq!(library.read(queue, read, false, bytes), 0);
    assert_eq!(write(), 0);
    let both = server.asked(calls::EnqueueWriteBuffer::OP) - begun;
    assert_eq!(both, 2, "behind a read, with the one before");
    assert_eq!(bytes, [2; 480]);
}

#[test]
fn a_thread_that_comes_later_finds_it_complete() {
    each(|server, library| {
        let Ready {
            context, device, queue, ..
        } = library.ready();
        let (other, buffer) = (
            library.queue(context, device),
            library.buffer(context, READ_WRITE, 8, ptr::null_mut()),
        );
        // Each record that is not waited for takes a while.
        server.pause(Duration::from_millis(20));
        let written = || heard(server, || library.write(queue, buffer, true, &[9; 8]));
        assert_eq!(written(), 0);
        let (of_other, in_buffer) = (other as usize, buffer as usize);
        let library: &Library = library;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut back = [0; 8];
                assert_eq!(library.read(of_other as Ptr, in_buffer as Ptr, true, &mut back), 0);
                assert_eq!(back, [9; 8]);
            });
        });
        assert_eq!(written(), 1, "with two threads it is waited for");
    });
}

#[test]
fn with_events_of_the_programs_own_it_is_waited_for() {
    each(|server, library| {
        let Ready { context, queue, .. } = library.ready();
        let buffer = library.buffer(context, READ_WRITE, 8, ptr::null_mut());
        assert!(!library.user_event(context).is_null());
        assert_eq!(heard(server, || library.write(queue, buffer, true, &[9; 8])), 1);
    });
}
