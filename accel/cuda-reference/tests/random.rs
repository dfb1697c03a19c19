//! Whatever a client sends: each call that is accepted has a reply that is one, and leaves what is counted within its bounds.

use std::sync::atomic::AtomicBool;

use accel_cuda_null::Quota;
use accel_proto::cuda::{AnyCall, AnyReply, CudaFree, CudaMalloc, OPS};
use accel_proto::samples::{Pool, Samples};
use accel_proto::{Limits, MESSAGE, Writer};
use basalt_accel_cuda_reference::{Client, State};

const LIMITS: Limits = Limits { arena: 1 << 16 };
/// What all calls together may have; sizes of samples are small numbers, or anything.
const BYTES: u64 = 1 << 16;
const ROUNDS: u64 = 400;

struct Left {
    left: u64,
    arena: Vec<u8>,
}

impl Quota for Left {
    fn charge(&mut self, bytes: u64) -> bool {
        self.left.checked_sub(bytes).map(|left| self.left = left).is_some()
    }

    fn give_back(&mut self, bytes: u64) {
        self.left += bytes;
    }
}

impl Client for Left {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> bool {
        let begin = usize::try_from(offset).expect("inside the arena");
        into.copy_from_slice(&self.arena[begin..begin + into.len()]);
        true
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> bool {
        let begin = usize::try_from(offset).expect("inside the arena");
        self.arena[begin..begin + from.len()].copy_from_slice(from);
        true
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

#[test]
fn whatever_calls_come_each_is_answered_and_bounded() {
    let stop = AtomicBool::new(false);
    let (mut accepted, mut succeeded) = (0_u32, 0_u32);
    for seed in 0..ROUNDS {
        let pool = Pool::new(seed);
        let mut state = State::new(BYTES / 2);
        let mut left = Left {
            left: BYTES,
            arena: vec![1; 1 << 16],
        };
        let mut carry_out = |call: &AnyCall<'_>, waits: bool| {
            let mut answered = 0;
            let mut answer = |reply: &AnyReply<'_>| {
                let encoded = written(|writer| reply.write(writer));
                assert_eq!(call.decode_reply(&encoded, LIMITS).as_ref(), Ok(reply), "a reply to it");
                answered += 1;
            };
            let taken: Option<&mut dyn FnMut(&AnyReply<'_>)> = if waits { Some(&mut answer) } else { None };
            let done = state.carry_out(call, (&mut left, &stop), taken);
            assert_eq!(answered, u32::from(waits), "whoever waits is answered once: {call:?}");
            assert_eq!(state.used() + left.left, BYTES, "each byte is somebody's");
            assert!(state.used() <= BYTES / 2);
            done.is_ok()
        };
        for place in 1..4 {
            carry_out(
                &AnyCall::CudaMalloc(CudaMalloc {
                    dev_ptr: place << 12,
                    size: 64 << place,
                }),
                true,
            );
        }
        for (index, op) in OPS.iter().enumerate() {
            let mut samples = Samples::new(seed * 1000 + index as u64, &pool, LIMITS);
            let Ok(call) = AnyCall::read(*op, &mut samples) else {
                continue;
            };
            accepted += 1;
            succeeded += u32::from(carry_out(&call, seed % 3 != 1));
        }
        for place in 1..4 {
            carry_out(&AnyCall::CudaFree(CudaFree { dev_ptr: place << 12 }), true);
        }
    }
    assert!(accepted > 20_000 && succeeded > 1_000, "{accepted} {succeeded}");
}
