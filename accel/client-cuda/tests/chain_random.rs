//! Whatever a client sends to the back end `cuda`: each call that is accepted is answered by a reply to it, once, what is counted stays within
//! its bounds, and at the end all of it is given back. The libraries are ours, without a server: they validate little, and what reached one
//! of them as an address that is none would end this process.

mod support;

use accel_cuda_library::{Arena, Libraries, State};
use accel_cuda_null::Quota;
use accel_proto::cuda::{
    AnyCall, AnyReply, BasaltMalloc, BasaltModuleData, BasaltModuleGetFunction, BasaltModuleLoad, BasaltModuleUnload,
    CudaLaunchKernel, OPS,
};
use accel_proto::samples::{Pool, Samples};
use accel_proto::{Handle, Limits, List, MESSAGE, Span, Writer};
use support::Linked;

const LIMITS: Limits = Limits { arena: 1 << 16 };
const BYTES: u64 = 1 << 20;
const ROUNDS: u64 = 300;

struct Left(u64);

impl Quota for Left {
    fn charge(&mut self, bytes: u64) -> bool {
        self.0.checked_sub(bytes).map(|left| self.0 = left).is_some()
    }

    fn give_back(&mut self, bytes: u64) {
        self.0 += bytes;
    }
}

/// An arena of this process.
struct Own(Vec<std::cell::Cell<u8>>);

impl Own {
    fn part(&self, span: Span) -> Option<&[std::cell::Cell<u8>]> {
        let begin = usize::try_from(span.offset).ok()?;
        self.0
            .get(begin..begin.checked_add(usize::try_from(span.length).ok()?)?)
    }
}

impl Arena for Own {
    fn address(&self, span: Span) -> Option<*mut u8> {
        self.part(span).map(|part| part.as_ptr().cast_mut().cast())
    }

    fn read(&self, span: Span, into: &mut [u8]) -> bool {
        let part = self.part(span).filter(|part| part.len() == into.len());
        part.is_some_and(|part| {
            into.iter_mut().zip(part).for_each(|(place, byte)| *place = byte.get());
            true
        })
    }

    fn length(&self) -> u64 {
        self.0.len() as u64
    }
}

fn written(write: impl Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; MESSAGE];
    let mut writer = Writer::new(&mut bytes);
    write(&mut writer);
    let length = writer.finish().expect("what was accepted is no longer than a message");
    bytes.truncate(length);
    bytes
}

struct Client<'l> {
    libraries: &'l Libraries,
    arena: Own,
    state: State,
    left: Left,
}

impl Client<'_> {
    /// Whether the call has succeeded.
    fn carried_out(&mut self, call: &AnyCall<'_>, waits: bool) -> bool {
        let mut replies = Vec::new();
        let mut answer = |reply: &AnyReply<'_>| replies.push(written(|writer| reply.write(writer)));
        let with = (
            self.libraries,
            &mut self.left as &mut dyn Quota,
            &self.arena as &dyn Arena,
        );
        let failure = self.state.carry_out(with, call, waits, &mut answer);
        if waits {
            let [reply] = replies.as_slice() else {
                panic!("{} replies to {call:?}", replies.len())
            };
            call.decode_reply(reply, LIMITS).expect("a reply to it");
        }
        assert_eq!(self.state.used() + self.left.0, BYTES, "each byte is somebody's");
        failure.is_none()
    }
}

/// A module in pieces, and a kernel of it, which has no parameters here.
fn modules(libraries: &Libraries) {
    let mut client = Client {
        libraries,
        arena: Own(vec![std::cell::Cell::new(0); 1 << 16]),
        state: State::new(BYTES),
        left: Left(BYTES),
    };
    let header: [u8; 16] = [0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0, 16, 0, 0, 0, 0, 0, 0, 0];
    for (place, byte) in client.arena.0.iter().zip(header) {
        place.set(byte);
    }
    let module = Handle::from_raw(2000);
    let load = |module, index| AnyCall::BasaltModuleLoad(BasaltModuleLoad { module, index });
    let data = |module, (offset, count, total)| {
        AnyCall::BasaltModuleData(BasaltModuleData {
            module,
            offset,
            total,
            count,
            bytes: Span { offset, length: count },
        })
    };
    let function = |module, kernel| {
        AnyCall::BasaltModuleGetFunction(BasaltModuleGetFunction {
            kernel: Handle::from_raw(kernel),
            module,
            name: c"kernel",
            most: 4,
            reply: Span {
                offset: 0,
                length: 4096,
            },
        })
    };
    let launch = |kernel, args| {
        AnyCall::CudaLaunchKernel(CudaLaunchKernel {
            kernel: Handle::from_raw(kernel),
            grid_dim: List::new(&[1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
            block_dim: List::new(&[1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
            args: List::new(args),
            shared_mem: 0,
            stream: Handle::from_raw(0),
        })
    };
    // One whose header says more than there is.
    let short = Handle::from_raw(2001);
    for (call, is_right) in [
        // Nobody has told of the module.
        (data(module, (0, 16, 32)), false),
        (load(module, 0), true),
        (load(module, 0), false),
        (data(module, (16, 16, 32)), false),
        (data(module, (0, 16, 32)), true),
        (data(module, (0, 16, 32)), false),
        (data(module, (16, 32, 32)), false),
        // Not all of it is there.
        (function(module, 3000), false),
        (data(module, (16, 16, 32)), true),
        (data(module, (32, 16, 48)), false),
        (function(module, 3000), true),
        (function(module, 3000), false),
        (launch(3000, &[]), true),
        (launch(3000, &[0; 4]), false),
        (launch(3001, &[]), false),
        (AnyCall::BasaltModuleUnload(BasaltModuleUnload { module }), true),
        (launch(3000, &[]), false),
        (function(module, 3000), false),
        (load(short, 1), true),
        (data(short, (0, 31, 31)), true),
        (function(short, 3002), false),
    ] {
        assert_eq!(client.carried_out(&call, true), is_right, "{call:?}");
    }
    client.state.end(libraries, &mut client.left);
}

#[allow(
    unsafe_code,
    reason = "the library in this process is told by the environment that it has no server"
)]
#[test]
fn whatever_calls_come_each_is_answered_and_nothing_is_left() {
    let linked = Linked::new("tests/chain/main.c");
    // SAFETY: 1. it is set by the one test of this process, which has no thread that reads the environment.
    unsafe { std::env::set_var("BASALT_ACCEL_CUDA", "in-process") };
    let libraries = Libraries::open(&[linked.path().to_owned()]).unwrap();
    modules(&libraries);
    let (mut accepted, mut succeeded, mut refused) = (0_u32, 0_u32, 0_u32);
    for seed in 0..ROUNDS {
        let pool = Pool::new(seed);
        let mut client = Client {
            libraries: &libraries,
            arena: Own(vec![std::cell::Cell::new(0); 1 << 16]),
            state: State::new(BYTES),
            left: Left(BYTES),
        };
        let malloc = AnyCall::BasaltMalloc(BasaltMalloc { size: 1 + seed });
        assert!(client.carried_out(&malloc, true));
        for (index, op) in OPS.iter().enumerate() {
            let mut samples = Samples::new(seed * 1000 + index as u64, &pool, LIMITS);
            let Ok(call) = AnyCall::read(*op, &mut samples) else {
                continue;
            };
            let mut bytes = written(|writer| call.write(writer));
            accepted += 1;
            succeeded += u32::from(client.carried_out(&call, seed % 3 == 0));
            let place = usize::try_from(seed * 31).unwrap() % bytes.len().max(1);
            if let Some(byte) = bytes.get_mut(place) {
                *byte ^= 1 << (seed % 8);
            }
            match AnyCall::decode(*op, &bytes, LIMITS) {
                Ok(call) => _ = client.carried_out(&call, true),
                Err(_) => refused += 1,
            }
        }
        client.state.end(&libraries, &mut client.left);
        assert_eq!((client.state.used(), client.left.0), (0, BYTES), "nothing is left");
    }
    assert!(
        accepted > 20_000 && succeeded > 1_000 && refused > 1_000,
        "{accepted} {succeeded} {refused}"
    );
}
