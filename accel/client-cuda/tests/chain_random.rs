//! Whatever a client sends to the back end `cuda`: each call that is accepted is answered by a reply to it, once, what is counted stays within
//! its bounds, and at the end all of it is given back. The libraries are ours, without a server: they validate little, and what reached one
//! of them as an address that is none would end this process.

mod support;

use accel_cuda_library::{Arena, Libraries, State};
use accel_cuda_null::Quota;
use accel_proto::cuda::{AnyCall, AnyReply, BasaltMalloc, OPS};
use accel_proto::samples::{Pool, Samples};
use accel_proto::{Limits, MESSAGE, Span, Writer};
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

#[test]
#[allow(
    unsafe_code,
    reason = "the library in this process is told by the environment that it has no server"
)]
fn whatever_calls_come_each_is_answered_and_nothing_is_left() {
    let linked = Linked::new("tests/chain/main.c");
    // SAFETY: 1. it is set by the one test of this process, which has no thread that reads the environment.
    unsafe { std::env::set_var("BASALT_ACCEL_CUDA", "in-process") };
    let libraries = Libraries::open(&[linked.path().to_owned()]).unwrap();
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
