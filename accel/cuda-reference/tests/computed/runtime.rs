//! Memory, copies, rows, streams, events and errors.

use accel_proto::cuda::*;
use accel_proto::{Handle, List, Memory, Span, SvmAddress};

use crate::device::{Device, arena, copy};

fn malloc(dev_ptr: u64, size: u64) -> AnyCall<'static> {
    AnyCall::CudaMalloc(CudaMalloc { dev_ptr, size })
}

fn free(dev_ptr: u64) -> AnyCall<'static> {
    AnyCall::CudaFree(CudaFree { dev_ptr })
}

#[test]
fn memory_is_zero_within_both_limits_and_given_back() {
    let mut device = Device::with(1000, 600);
    assert_eq!(device.status(&malloc(0x1000, 400)), 0);
    assert_eq!(device.read(SvmAddress(0x1000), 400), [0; 400]);
    assert_eq!((device.state.used(), device.host.left), (400, 200));
    assert_eq!(device.status(&malloc(0x2000, 201)), 2, "the tenant has no more");
    assert_eq!(device.status(&malloc(0x1100, 1)), 1, "something is there");
    device.host.left = 10_000;
    assert_eq!(device.status(&malloc(0x2000, 601)), 2, "the device has no more");
    assert_eq!(device.status(&malloc(0x2000, 1 << 40)), 2, "an address is not memory");
    assert_eq!(device.status(&malloc(0x2000, 600)), 0);
    assert_eq!([device.status(&free(0x1000)), device.status(&free(0x1000))], [0, 1]);
    assert_eq!(device.status(&free(0x2001)), 1);
    assert_eq!((device.state.used(), device.host.left), (600, 9800));
    // What comes after it in the same place is zero, too.
    let fill = CudaMemset {
        dev_ptr: SvmAddress(0x2000),
        value: 0x1ff,
        count: 600,
    };
    assert_eq!(device.status(&AnyCall::CudaMemset(fill)), 0);
    assert_eq!(device.read(SvmAddress(0x2000), 600), [0xff; 600]);
    assert_eq!(
        [device.status(&free(0x2000)), device.status(&malloc(0x2000, 600))],
        [0, 0]
    );
    assert_eq!(device.read(SvmAddress(0x2000), 600), [0; 600]);
    let info = device.ask(&AnyCall::CudaMemGetInfo(CudaMemGetInfo {}), |reply| match reply {
        AnyReply::CudaMemGetInfo(reply) => (reply.free, reply.total),
        other => panic!("{other:?}"),
    });
    assert_eq!(info, (400, 1000));
}

#[test]
fn copies_go_every_way_and_nowhere_else() {
    let mut device = Device::new();
    let bytes: Vec<u8> = (0..200).collect();
    let (a, b) = (device.bytes(&bytes), device.bytes(&[9; 200]));
    assert_eq!(device.read(a, 200), bytes);
    let at = |base: SvmAddress, by: u64| Memory::Svm(SvmAddress(base.0 + by));
    assert_eq!(device.status(&copy(at(b, 10), at(a, 50), 100)), 0);
    assert_eq!(device.read(b, 200), [&[9; 10][..], &bytes[50..150], &[9; 90]].concat());
    // One that overlaps itself is as if there were a place between.
    assert_eq!(device.status(&copy(at(a, 1), at(a, 0), 199)), 0);
    assert_eq!(device.read(a, 200), [&[0][..], &bytes[..199]].concat());
    for (to, from, count, code) in [
        (at(a, 0), at(b, 1), 200, 700),
        (at(a, 1), at(b, 0), 200, 700),
        (at(a, 0), Memory::Svm(SvmAddress(0)), 1, 700),
        (at(a, 0), Memory::Svm(SvmAddress(u64::MAX)), 2, 700),
        (at(a, 0), arena(0, 100), 101, 1),
        (arena(0, 100), at(a, 0), 101, 1),
        (at(a, 0), arena(usize::MAX >> 1, 100), 100, 1),
        (arena(4 << 20, 100), at(a, 0), 100, 1),
        (arena(0, 10), arena(20, 10), 10, 1),
    ] {
        let mut device = Device::new();
        let (_, _) = (device.bytes(&bytes), device.bytes(&[9; 200]));
        assert_eq!(device.status(&copy(to, from, count)), code, "{to:?} {from:?} {count}");
    }
    assert_eq!(
        device.status(&copy(Memory::Svm(SvmAddress(0)), Memory::Svm(SvmAddress(0)), 0)),
        0
    );
}

fn rows(dst: (Memory, u64), src: (Memory, u64), width: u64, height: u64) -> AnyCall<'static> {
    AnyCall::CudaMemcpy2DAsync(CudaMemcpy2DAsync {
        dst: dst.0,
        dpitch: dst.1,
        src: src.0,
        spitch: src.1,
        width,
        height,
        kind: 4,
        stream: Handle::NULL,
    })
}

#[test]
fn rows_are_copied_and_filled_by_their_pitches() {
    let mut device = Device::new();
    let bytes: Vec<u8> = (0..100).collect();
    let (a, b) = (device.bytes(&bytes), device.bytes(&[200; 100]));
    let (from, to) = (Memory::Svm(SvmAddress(a.0 + 3)), Memory::Svm(b));
    assert_eq!(device.status(&rows((to, 7), (from, 10), 5, 4)), 0);
    let mut wanted = vec![200; 100];
    (0..20).for_each(|at| wanted[at / 5 * 7 + at % 5] = bytes[3 + at / 5 * 10 + at % 5]);
    assert_eq!(device.read(b, 100), wanted);
    // In the arena they lie one behind the other.
    device.host.arena[100..112].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(device.status(&rows((to, 20), (arena(100, 12), 999), 3, 4)), 0);
    (0..12_u8).for_each(|at| wanted[usize::from(at / 3 * 20 + at % 3)] = at + 1);
    assert_eq!(device.read(b, 100), wanted);
    assert_eq!(device.status(&rows((arena(500, 12), 0), (to, 20), 3, 4)), 0);
    assert_eq!(device.host.arena[500..512], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    let fill = |pitch, width, height| {
        let (dev_ptr, value, stream) = (b, 0x107, Handle::NULL);
        AnyCall::CudaMemset2DAsync(CudaMemset2DAsync {
            dev_ptr,
            pitch,
            value,
            width,
            height,
            stream,
        })
    };
    assert_eq!(device.status(&fill(30, 2, 4)), 0);
    (0..8).for_each(|at| wanted[at / 2 * 30 + at % 2] = 7);
    assert_eq!(device.read(b, 100), wanted);
    for (call, code) in [
        (rows((to, 4), (from, 10), 5, 4), 1),
        (rows((to, 7), (from, 40), 5, 4), 700),
        (rows((to, u64::MAX), (from, 10), 5, 4), 700),
        (rows((to, 7), (arena(0, 19), 0), 5, 4), 1),
        (rows((to, 7), (from, 10), 5, u64::MAX), 700),
        (rows((to, u64::MAX), (from, u64::MAX), u64::MAX, u64::MAX), 700),
        (fill(33, 2, 4), 700),
        (fill(1, 2, 4), 1),
        (fill(u64::MAX, 2, 4), 700),
        (rows((to, 0), (from, 0), 0, 1 << 40), 0),
        (fill(1, 0, u64::MAX), 0),
    ] {
        let mut device = Device::new();
        let (_, _) = (device.bytes(&bytes), device.bytes(&[9; 100]));
        assert_eq!(device.status(&call), code, "{call:?}");
    }
}

#[test]
fn streams_are_done_and_events_have_the_time_between_them() {
    let mut device = Device::new();
    let stream = Handle::from_raw(5);
    let query = AnyCall::CudaStreamQuery(CudaStreamQuery { stream });
    assert_eq!(device.status(&query), 400);
    assert_eq!(
        device.status(&AnyCall::CudaStreamCreate(CudaStreamCreate { p_stream: stream })),
        0
    );
    assert_eq!(device.status(&query), 0);
    let [first, second, untimed, fresh] = [10, 11, 12, 13].map(Handle::from_raw);
    for (event, flags) in [(first, 0), (second, 1), (untimed, 2), (fresh, 0)] {
        let call = CudaEventCreateWithFlags { event, flags };
        assert_eq!(device.status(&AnyCall::CudaEventCreateWithFlags(call)), 0);
    }
    let record = |event| AnyCall::CudaEventRecord(CudaEventRecord { event, stream });
    assert_eq!(device.status(&record(first)), 0);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(
        [device.status(&record(second)), device.status(&record(untimed))],
        [0, 0]
    );
    assert_eq!(
        device.status(&AnyCall::CudaEventQuery(CudaEventQuery { event: second })),
        0
    );
    let mut elapsed = |start, end| {
        let call = AnyCall::CudaEventElapsedTime(CudaEventElapsedTime { start, end });
        device.ask(&call, |reply| match reply {
            AnyReply::CudaEventElapsedTime(reply) => (reply.status, f32::from_bits(reply.ms)),
            other => panic!("{other:?}"),
        })
    };
    let (status, there) = elapsed(first, second);
    assert!(status == 0 && (20.0..20_000.0).contains(&there), "{there}");
    assert_eq!(elapsed(second, first), (0, -there));
    for (start, end) in [(first, untimed), (first, fresh), (first, Handle::from_raw(99))] {
        assert_eq!(elapsed(start, end).0, 400);
    }
    assert_eq!(
        device.status(&AnyCall::CudaEventDestroy(CudaEventDestroy { event: first })),
        0
    );
    assert_eq!(device.status(&record(first)), 400);
}

#[test]
fn a_failure_that_nobody_waited_for_is_told_once_by_what_depends_on_it() {
    let mut device = Device::new();
    let x = device.upload(&[1_i32, 2]);
    assert_eq!(device.put(&malloc(1 << 52, 1 << 50)).unwrap_err().code(), 2);
    assert_eq!(device.put(&free(0x5000)).unwrap_err().code(), 1);
    let info = AnyCall::BasaltDeviceInfo(BasaltDeviceInfo {
        device: 0,
        reply: Span { offset: 0, length: 0 },
    });
    assert_eq!(
        device.status(&info),
        0,
        "a question about the device does not depend on it"
    );
    device.host.arena[..8].fill(0xee);
    let download = copy(arena(0, 8), Memory::Svm(x), 8);
    assert_eq!(device.status(&download), 2, "the first one");
    assert_eq!(device.host.arena[..8], [0xee; 8], "and nothing is copied");
    assert_eq!(device.status(&download), 0);
    assert_eq!(device.host.arena[..8], [1, 0, 0, 0, 2, 0, 0, 0]);
    // Whoever waits is told of its own failure, and nobody else is.
    assert_eq!([device.status(&free(0x5000)), device.synchronize()], [1, 0]);
}

#[test]
fn the_device_says_what_it_is() {
    let mut device = Device::with(1 << 30, u64::MAX);
    let ask = |device: &mut Device, number| {
        let reply = Span { offset: 0, length: 0 };
        let call = AnyCall::BasaltDeviceInfo(BasaltDeviceInfo { device: number, reply });
        device.ask(&call, |reply| match reply {
            AnyReply::BasaltDeviceInfo(reply) => {
                let name = String::from_utf8(reply.name.bytes().to_vec()).unwrap();
                (
                    reply.status,
                    name,
                    reply.total_global_mem,
                    reply.takes_code,
                    reply.attributes.get(10),
                )
            }
            other => panic!("{other:?}"),
        })
    };
    let (status, name, memory, takes_code, warp) = ask(&mut device, 0);
    assert_eq!((status, memory, takes_code, warp), (0, 1 << 30, 1, Some(32)));
    assert!(name.starts_with("Basalt reference\0"));
    assert_eq!(ask(&mut device, 1).0, 101);
}

#[test]
fn whatever_is_of_a_library_needs_its_handle() {
    let mut device = Device::new();
    let at = device.upload(&[0_f32]);
    let call = AnyCall::CublasSscalV2(CublasSscalV2 {
        handle: Handle::from_raw(5000),
        n: 1,
        alpha: List::new(&[0; 4]),
        x: at,
        incx: 1,
    });
    assert_eq!(device.status(&call), 400);
}
