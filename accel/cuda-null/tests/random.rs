//! Whatever a client sends: each call that is accepted says what its bytes say, has a reply that is one, and leaves what is counted within
//! its bounds; bytes that were changed are refused or are another call.

use accel_proto::cuda::{AnyCall, CudaFree, CudaMalloc, OPS};
use accel_proto::samples::{Pool, Samples};
use accel_proto::{Limits, MESSAGE, Span, Writer};
use basalt_accel_cuda_null::{Quota, State};

const LIMITS: Limits = Limits { arena: 1 << 16 };
/// What all calls together may have; sizes of samples are small numbers, or anything.
const BYTES: u64 = 64;
const ROUNDS: u64 = 600;

struct Left(u64);

impl Quota for Left {
    fn charge(&mut self, bytes: u64) -> bool {
        self.0.checked_sub(bytes).map(|left| self.0 = left).is_some()
    }

    fn give_back(&mut self, bytes: u64) {
        self.0 += bytes;
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

fn carried_out(call: &AnyCall<'_>, bytes: &[u8], state: &mut State, left: &mut Left, waits: bool) -> bool {
    assert_eq!(written(|writer| call.write(writer)), bytes, "it says what it said");
    call.spans(&mut |Span { offset, length }| {
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= LIMITS.arena), "inside the arena");
    });
    let (reply, failure) = state.carry_out(call, waits, left);
    let encoded = written(|writer| reply.write(writer));
    assert_eq!(call.decode_reply(&encoded, LIMITS), Ok(reply), "a reply to it");
    assert_eq!(state.used() + left.0, BYTES, "each byte is somebody's");
    failure.is_none()
}

#[test]
fn whatever_calls_come_each_is_answered_and_bounded() {
    let (mut accepted, mut succeeded, mut refused, mut given) = (0_u32, 0_u32, 0_u32, 0);
    for seed in 0..ROUNDS {
        let pool = Pool::new(seed);
        let (mut state, mut left) = (State::new(BYTES), Left(BYTES));
        // What is at random is hardly ever an allocation: some are more than there is, and the rest has an end as well.
        let mut allocated = Vec::new();
        for place in 1..4 {
            let (dev_ptr, size) = (place << 12, 1 + seed * place % 40);
            let malloc = AnyCall::CudaMalloc(CudaMalloc { dev_ptr, size });
            if state.carry_out(&malloc, true, &mut left).1.is_none() {
                allocated.push(dev_ptr);
            }
            assert_eq!(state.used() + left.0, BYTES, "each byte is somebody's");
        }
        given += allocated.len();
        for (index, op) in OPS.iter().enumerate() {
            let mut samples = Samples::new(seed * 1000 + index as u64, &pool, LIMITS);
            let Ok(call) = AnyCall::read(*op, &mut samples) else {
                continue;
            };
            let mut bytes = written(|writer| call.write(writer));
            accepted += 1;
            let has_succeeded = carried_out(&call, &bytes, &mut state, &mut left, seed % 3 == 0);
            succeeded += u32::from(has_succeeded);
            // The same with one byte changed, and cut.
            let place = usize::try_from(seed * 31).unwrap() % bytes.len().max(1);
            if let Some(byte) = bytes.get_mut(place) {
                *byte ^= 1 << (seed % 8);
            }
            match AnyCall::decode(*op, &bytes, LIMITS) {
                Ok(call) => _ = carried_out(&call, &bytes, &mut state, &mut left, true),
                Err(_) => refused += 1,
            }
        }
        for dev_ptr in allocated {
            // One that a call at random has given back is given back twice, which changes nothing.
            _ = state.carry_out(&AnyCall::CudaFree(CudaFree { dev_ptr }), true, &mut left);
        }
        assert_eq!((state.used(), left.0), (0, BYTES), "what is given back is nobody's");
    }
    assert!(
        accepted > 20_000 && succeeded > 1_000 && refused > 1_000 && (1_000..1_800).contains(&given),
        "{accepted} {succeeded} {refused} {given}"
    );
}
