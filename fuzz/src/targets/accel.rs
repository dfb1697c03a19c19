//! Calls of accelerator APIs as a guest's client writes them, and replies as a server does that its tenant has taken over. What is accepted
//! and does not say exactly what its bytes say, or is outside of the arena, is a fault as a panic is.

use accel_proto::{Limits, RECORD, Refused, Writer};

use crate::run::{Target, outcome};

/// Small, so that changed offsets are often outside.
const LIMITS: Limits = Limits { arena: 1 << 16 };

/// The pool that calls are taken from to which replies are tried.
const SEED: u64 = 5;

/// Bytes before a reply: the call's number, and where its arguments' random numbers begin.
const BEFORE: usize = 3;

fn written(write: impl Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; accel_proto::MESSAGE];
    let mut writer = Writer::new(&mut bytes);
    write(&mut writer);
    let length = writer.finish().expect("what was accepted is no longer than a message");
    bytes.truncate(length);
    bytes
}

/// How it ended, without numbers, which are hexadecimal in some texts.
fn kind(refused: &Refused) -> u64 {
    let text = format!("{refused:?}");
    outcome(
        text.split(|char: char| char.is_ascii_digit())
            .next()
            .unwrap_or_default(),
    )
}

/// A record's header by hand, so that seeds depend on nothing but the documented layout.
fn record(op: u16, arguments: &[u8]) -> Vec<u8> {
    let inline = arguments.len() <= accel_proto::INLINE;
    let length = u32::try_from(arguments.len()).expect("a short sample");
    let mut bytes = [op.to_le_bytes(), u16::from(!inline).to_le_bytes()].concat();
    bytes.extend(length.to_le_bytes());
    bytes.extend(9_u64.to_le_bytes());
    if inline {
        bytes.extend(arguments);
        bytes.resize(RECORD, 0);
    } else {
        bytes.resize(RECORD, 0);
        bytes.extend(arguments);
    }
    bytes
}

/// The targets of one API, by their names: what both have is generated, and of types of each API's own.
macro_rules! of_api {
    ($api:ident, $calls:literal, $replies:literal) => {
        pub(crate) mod $api {
            use accel_proto::samples::{Pool, Samples};
            use accel_proto::$api::{AnyCall, OPS};
            use accel_proto::{Arguments, RECORD, Record, Span};

            use super::{BEFORE, LIMITS, SEED, Target, kind, outcome, record, written};

            /// A few calls of each number; some numbers' arguments cannot be at random.
            fn samples<'a>(op: u16, pool: &'a Pool) -> impl Iterator<Item = (u8, AnyCall<'a>)> {
                let tried = (0..=u8::MAX).filter_map(move |seed| Some((seed, sample(op, seed, pool)?)));
                tried.take(4)
            }

            fn sample(op: u16, seed: u8, pool: &Pool) -> Option<AnyCall<'_>> {
                AnyCall::read(op, &mut Samples::new(seed.into(), pool, LIMITS)).ok()
            }

            /// Records, each followed by what the arena has where it says.
            pub(crate) fn calls() -> Target {
                let pool = Pool::new(SEED);
                let seeds = OPS.iter().flat_map(|op| {
                    let calls: Vec<_> = samples(*op, &pool).collect();
                    calls
                        .into_iter()
                        .map(|(_, call)| record(*op, &written(|writer| call.write(writer))))
                });
                Target {
                    name: $calls,
                    seeds: seeds.collect(),
                    parse: take,
                }
            }

            fn take(input: &[u8]) -> u64 {
                let mut bytes = [0; RECORD];
                let (head, message) = input.split_at_checked(RECORD).unwrap_or((input, &[]));
                bytes[..head.len()].copy_from_slice(head);
                let record = Record::from_bytes(bytes);
                let arguments = match record.arguments(LIMITS) {
                    Ok(Arguments::Inline(bytes)) => bytes,
                    Ok(Arguments::Message(span)) => {
                        assert!(
                            span.offset + span.length <= LIMITS.arena && span.length <= accel_proto::MESSAGE as u64
                        );
                        let length = usize::try_from(span.length).expect("a message");
                        message.get(..length).unwrap_or(message)
                    }
                    Err(refused) => return kind(&refused),
                };
                let call = match AnyCall::decode(record.op(), arguments, LIMITS) {
                    Ok(call) => call,
                    Err(refused) => return kind(&refused),
                };
                assert_eq!(
                    written(|writer| call.write(writer)),
                    arguments,
                    "it says what it said"
                );
                call.spans(&mut |Span { offset, length }| {
                    assert!(
                        offset.checked_add(length).is_some_and(|end| end <= LIMITS.arena),
                        "inside the arena"
                    );
                });
                let mut effects = 0_u32;
                call.effects(&mut |_, _| effects += 1);
                let failed = call.failed(-5);
                let reply = written(|writer| failed.write(writer));
                assert_eq!(
                    call.decode_reply(&reply, LIMITS),
                    Ok(failed),
                    "a failure is a reply"
                );
                u64::from(record.op()) << 8 | u64::from(effects.min(9))
            }

            /// The call's number, where its arguments begin, and a reply.
            pub(crate) fn replies() -> Target {
                let pool = Pool::new(SEED);
                let mut seeds = Vec::new();
                for op in OPS {
                    for (seed, call) in samples(*op, &pool) {
                        let Ok(reply) = call.read_reply(&mut Samples::new(u64::from(seed) + 1000, &pool, LIMITS))
                        else {
                            continue;
                        };
                        let mut bytes = op.to_le_bytes().to_vec();
                        bytes.push(seed);
                        bytes.extend(written(|writer| reply.write(writer)));
                        seeds.push(bytes);
                    }
                }
                Target {
                    name: $replies,
                    seeds,
                    parse: answer,
                }
            }

            fn answer(input: &[u8]) -> u64 {
                let Some((&[low, high, seed], reply)) = input.split_first_chunk::<BEFORE>() else {
                    return outcome("short");
                };
                let pool = Pool::new(SEED);
                let op = u16::from_le_bytes([low, high]);
                let Some(call) = sample(op, seed, &pool) else {
                    return outcome("no call");
                };
                match call.decode_reply(reply, LIMITS) {
                    Ok(decoded) => {
                        assert_eq!(
                            written(|writer| decoded.write(writer)),
                            reply,
                            "it says what it said"
                        );
                        u64::from(op)
                    }
                    Err(refused) => kind(&refused),
                }
            }
        }
    };
}

of_api!(opencl, "accel-calls", "accel-replies");
of_api!(cuda, "accel-cuda-calls", "accel-cuda-replies");
