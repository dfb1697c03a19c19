//! Every call and every reply: what is written is read as it was, whatever the arguments are; and whatever bytes come, what is accepted
//! is exactly what they say, and inside its bounds.

use basalt_accel_proto::opencl::{AnyCall, AnyReply, OPS};
use basalt_accel_proto::samples::{Pool, Samples};
use basalt_accel_proto::{Arguments, INLINE, Limits, MESSAGE, Reader, Record, Refused, Span, Writer};

const LIMITS: Limits = Limits { arena: 1 << 16 };
/// Samples of each call.
const ROUNDS: u64 = 400;

fn written(write: impl Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; MESSAGE];
    let mut writer = Writer::new(&mut bytes);
    write(&mut writer);
    let length = writer.finish().expect("samples are short");
    bytes.truncate(length);
    bytes
}

/// Calls at random; a few cannot be, such as boxes that are larger than the arena.
fn samples<'a>(op: u16, pool: &'a Pool, limits: Limits) -> impl Iterator<Item = (Samples<'a>, AnyCall<'a>)> {
    (1..=ROUNDS).filter_map(move |round| {
        let mut source = Samples::new(round << 16 | u64::from(op), pool, limits);
        let call = AnyCall::read(op, &mut source).ok()?;
        Some((source, call))
    })
}

#[test]
fn what_is_written_is_read_as_it_was() {
    let pool = Pool::new(11);
    for &op in OPS {
        let mut count = 0;
        for (mut source, call) in samples(op, &pool, LIMITS) {
            let bytes = written(|writer| call.write(writer));
            assert_eq!(AnyCall::decode(op, &bytes, LIMITS).as_ref(), Ok(&call));
            assert_eq!(call.op(), op);
            let Ok(reply) = call.read_reply(&mut source) else {
                continue;
            };
            let bytes = written(|writer| reply.write(writer));
            assert_eq!(call.decode_reply(&bytes, LIMITS), Ok(reply));
            count += 1;
        }
        assert!(count > ROUNDS / 4, "{op:#x}: {count} samples");
    }
}

#[test]
fn bytes_that_are_cut_or_longer_are_refused() {
    let pool = Pool::new(12);
    for &op in OPS {
        for (_, call) in samples(op, &pool, LIMITS).take(40) {
            let mut bytes = written(|writer| call.write(writer));
            for length in 0..bytes.len() {
                let cut = AnyCall::decode(op, &bytes[..length], LIMITS);
                // What is missing of a list of one byte's elements may be none.
                assert!(cut.is_err(), "{op:#x} cut to {length}: {cut:?}");
            }
            bytes.push(0);
            assert_eq!(AnyCall::decode(op, &bytes, LIMITS), Err(Refused::Trailing(1)));
        }
    }
}

/// What is accepted says exactly what the bytes say, and is inside the arena.
fn accepted(op: u16, bytes: &[u8], limits: Limits) -> bool {
    let Ok(call) = AnyCall::decode(op, bytes, limits) else {
        return false;
    };
    assert_eq!(written(|writer| call.write(writer)), bytes, "{call:?}");
    call.spans(&mut |Span { offset, length }| {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= limits.arena),
            "{call:?}"
        );
    });
    call.effects(&mut |_, _| {});
    true
}

#[test]
fn whatever_bytes_come_nothing_is_accepted_that_is_out_of_bounds() {
    let pool = Pool::new(13);
    let mut state = 99_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let (mut taken, mut refused) = (0, 0);
    for &op in OPS {
        for (_, call) in samples(op, &pool, LIMITS) {
            let mut bytes = written(|writer| call.write(writer));
            for _ in 0..random() % 4 {
                if let Some(byte) = usize::try_from(random())
                    .ok()
                    .and_then(|at| at.checked_rem(bytes.len()))
                {
                    // Also numbers that are almost right, and those at which sums overflow.
                    bytes[byte] = [1, 0xff, 0x80, random().to_le_bytes()[3]][byte % 4];
                }
            }
            let small = Limits {
                arena: random() % 0x2_0000,
            };
            for limits in [LIMITS, small] {
                if accepted(op, &bytes, limits) {
                    taken += 1;
                } else {
                    refused += 1;
                }
            }
        }
        for length in 0..200 {
            let bytes: Vec<u8> = (0..length).map(|_| random().to_le_bytes()[5]).collect();
            accepted(op, &bytes, LIMITS);
        }
    }
    assert!(taken > 1000 && refused > 1000, "{taken} taken, {refused} refused");
}

#[test]
fn a_reply_with_more_than_was_asked_for_is_refused() {
    let pool = Pool::new(14);
    let op = basalt_accel_proto::opencl::table::COMMANDS
        .iter()
        .find(|command| command.name == "clGetDeviceInfo");
    let op = op.and_then(|command| command.op).expect("a call that crosses");
    let mut too_much = 0;
    for (_, call) in samples(op, &pool, LIMITS) {
        let AnyCall::GetDeviceInfo(mut asked) = call else {
            panic!("{call:?}");
        };
        asked.param_value = true;
        asked.param_value_size_ret = false;
        asked.param_value_size = 3;
        let reply = |length: u8| [&[0, 0, 0, 0, length, 0, 0, 0], &[7; 9][..length.into()]].concat();
        let call = AnyCall::GetDeviceInfo(asked);
        assert!(matches!(
            call.decode_reply(&reply(3), LIMITS),
            Ok(AnyReply::GetDeviceInfo(_))
        ));
        let longer = reply(4);
        let refused = call.decode_reply(&longer, LIMITS);
        assert!(
            matches!(refused, Err(Refused::Capacity { count: 4, most: 3, .. })),
            "{refused:?}"
        );
        too_much += 1;
    }
    assert!(too_much > 0);
}

#[test]
fn a_call_that_fails_has_a_reply_that_is_one() {
    let pool = Pool::new(15);
    for &op in OPS {
        for (_, call) in samples(op, &pool, LIMITS).take(30) {
            let failed = call.failed(-5);
            assert_eq!(failed.status(), -5);
            let bytes = written(|writer| failed.write(writer));
            assert_eq!(call.decode_reply(&bytes, LIMITS), Ok(failed));
        }
    }
}

/// The calls that programs make most often, as they are made most often, need no message.
#[test]
fn frequent_calls_fit_into_a_record() {
    let pool = Pool::new(16);
    let fits = |name: &str, change: fn(&mut AnyCall<'_>)| {
        let command = basalt_accel_proto::opencl::table::COMMANDS
            .iter()
            .find(|command| command.name == name);
        let op = command.and_then(|command| command.op).expect("a call that crosses");
        let (_, mut call) = samples(op, &pool, LIMITS).next().expect("a sample");
        change(&mut call);
        let bytes = written(|writer| call.write(writer));
        assert!(bytes.len() <= INLINE, "{name} has {} bytes", bytes.len());
    };
    fits("clEnqueueWriteBuffer", |call| {
        let AnyCall::EnqueueWriteBuffer(call) = call else {
            return;
        };
        call.event_wait_list = None;
    });
    fits("clEnqueueNDRangeKernel", |call| {
        let AnyCall::EnqueueNDRangeKernel(call) = call else {
            return;
        };
        call.event_wait_list = None;
        call.work_dim = 1;
        call.global_work_offset = None;
        let one = basalt_accel_proto::List::new(&[256]);
        (call.global_work_size, call.local_work_size) = (Some(one), Some(one));
    });
    fits("clSetKernelArg", |call| {
        let AnyCall::SetKernelArg(call) = call else { return };
        call.arg_value = Some(basalt_accel_proto::Value::Bytes(&[0; 8]));
    });
    fits("clReleaseEvent", |_| {});
    fits("clFinish", |_| {});
}

#[test]
fn a_record_carries_a_call_or_says_where_it_is() {
    let pool = Pool::new(17);
    let (mut inline, mut messages) = (0, 0);
    let op = OPS.iter().copied().find(|op| {
        let name = basalt_accel_proto::opencl::table::COMMANDS
            .iter()
            .find(|command| command.op == Some(*op));
        name.is_some_and(|command| command.name == "clEnqueueFillBuffer")
    });
    for (_, call) in samples(op.expect("a call that crosses"), &pool, LIMITS) {
        let AnyCall::EnqueueFillBuffer(fill) = call else {
            panic!("{call:?}");
        };
        let bytes = written(|writer| call.write(writer));
        let record = match Record::call(&fill, 7, false) {
            Ok(record) => record,
            Err(room) => {
                assert_eq!(room.needs, bytes.len());
                let length = room.needs as u64;
                Record::call_in::<basalt_accel_proto::opencl::EnqueueFillBuffer<'_>>(
                    Span { offset: 64, length },
                    7,
                    false,
                )
            }
        };
        assert_eq!((record.op(), record.seq()), (call.op(), 7));
        match record.arguments(LIMITS) {
            Ok(Arguments::Inline(arguments)) => {
                assert_eq!(arguments, bytes);
                inline += 1;
            }
            Ok(Arguments::Message(span)) => {
                assert_eq!((span.offset, span.length), (64, bytes.len() as u64));
                messages += 1;
            }
            Err(refused) => panic!("{refused}"),
        }
    }
    assert!(inline > 10 && messages > 10, "{inline} {messages}");
}

#[test]
fn the_table_knows_every_call_and_no_other() {
    let commands = basalt_accel_proto::opencl::table::COMMANDS;
    let mut crossing: Vec<u16> = commands.iter().filter_map(|command| command.op).collect();
    crossing.sort_unstable();
    let mut ops = OPS.to_vec();
    ops.sort_unstable();
    assert_eq!(crossing, ops);
    assert_eq!(commands.len(), 123);
    let unknown = (0..=u16::MAX).find(|op| !OPS.contains(op)).expect("a number");
    assert_eq!(
        AnyCall::read(unknown, &mut Reader::new(&[], LIMITS)),
        Err(Refused::Op(unknown))
    );
}

#[test]
fn effects_are_those_of_the_table() {
    let pool = Pool::new(18);
    let commands = basalt_accel_proto::opencl::table::COMMANDS;
    for command in commands.iter().filter(|command| command.op.is_some()) {
        let op = command.op.expect("a call that crosses");
        let mut seen = Vec::new();
        for (_, call) in samples(op, &pool, LIMITS) {
            call.effects(&mut |effect, _| seen.push(effect));
        }
        for effect in [
            basalt_accel_proto::Effect::Creates,
            basalt_accel_proto::Effect::Changes,
            basalt_accel_proto::Effect::Content,
            basalt_accel_proto::Effect::Drops,
            basalt_accel_proto::Effect::Uses,
        ] {
            let listed = command.effects.iter().any(|(listed, _)| *listed == effect);
            // What the server names is in the reply.
            let is_told = command.name == "clSVMAlloc" && effect == basalt_accel_proto::Effect::Creates;
            assert_eq!(
                seen.contains(&effect),
                listed && !is_told,
                "{}: {effect:?}",
                command.name
            );
        }
    }
}
