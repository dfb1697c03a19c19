//! Sequences of records as a hostile client's thread puts them, through the server's decoder, its checks and its dispatch, with a back end
//! that does nothing. An input is a program of steps; each becomes a call with random arguments, and names of objects that mostly exist, of
//! which some bytes may be changed.
//!
//! ```text
//! 0  op     u16  index of the call among all; from 0xff00 on what is none
//! 2  seed   u16  where its arguments' random numbers begin
//! 4  how    u8   bits 0-1: not waited for if zero; 2: as a message; 3-5: what is changed; 6: on the other thread; 7: any name
//! 5  at     u8   where
//! 6  value  u8   to what
//! 7  spare  u8
//! ```
//!
//! Besides a panic it is a fault if a record has not one reply as its flags say, if a reply is none of its call's, if more than the quota is
//! charged, or if anything is left when the client has ended.

mod named;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use accel_proto::control::AwaitCompletions;
use accel_proto::opencl::table::COMMANDS;
use accel_proto::opencl::{AnyCall, OPS, SVMAlloc};
use accel_proto::samples::{Pool, Samples};
use accel_proto::{Arguments, Call as _, INLINE, Limits, MESSAGE, RECORD, Record, Span, Writer};
use accel_server::{Backend, Direct, DirectThread, Left, TenantLimits};

use crate::run::{Target, count};
use named::{MAKERS, Named, Names};

const LIMITS: Limits = Limits { arena: 256 << 10 };
/// Bytes that a client may have charged.
const MEMORY: u64 = 64 << 10;
/// Where messages are put; what is before it calls name as they like.
const MESSAGES: u64 = 128 << 10;
/// Bytes of a step, and how many of them are carried out of an input.
const STEP: usize = 8;
const MOST: usize = 256;
/// Numbers of no call.
const NO_CALL: u16 = 0xff00;
/// Numbers at which comparisons go wrong.
const EDGES: [u64; 8] = [
    0,
    1,
    0xffff_ffff,
    u64::MAX,
    1 << 63,
    LIMITS.arena,
    LIMITS.arena - 1,
    1 << 32,
];

/// The back end, whose objects are counted: there is one client at a time.
static BACKEND: LazyLock<Arc<Backend>> = LazyLock::new(|| Arc::new(Backend::null()));
static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(11));

thread_local! {
    /// How calls have ended so far: the call, and its status or why it was none.
    static ENDED: RefCell<BTreeSet<u64>> = const { RefCell::new(BTreeSet::new()) };
    /// A message that is put together.
    static MESSAGE_BYTES: RefCell<Box<[u8]>> = RefCell::new(vec![0; MESSAGE].into());
}

/// One step of an input.
#[derive(Debug, Clone, Copy)]
struct Step {
    op: u16,
    seed: u16,
    how: u8,
    at: u8,
    value: u8,
}

impl Step {
    fn of(bytes: &[u8; STEP]) -> Self {
        let &[op_low, op_high, seed_low, seed_high, how, at, value, _] = bytes;
        Self {
            op: u16::from_le_bytes([op_low, op_high]),
            seed: u16::from_le_bytes([seed_low, seed_high]),
            how,
            at,
            value,
        }
    }

    fn bytes(self) -> [u8; STEP] {
        let ([a, b], [c, d]) = (self.op.to_le_bytes(), self.seed.to_le_bytes());
        [a, b, c, d, self.how, self.at, self.value, 0]
    }

    fn waits(self) -> bool {
        self.how & 3 != 0
    }

    /// Its call's number.
    fn number(self) -> u16 {
        if self.op >= NO_CALL {
            return self.op - NO_CALL;
        }
        let index = usize::from(self.op).checked_rem(OPS.len()).unwrap_or_default();
        OPS.get(index).copied().unwrap_or_default()
    }
}

/// A client that is tried out.
struct Tried<'d> {
    direct: &'d Direct,
    threads: [DirectThread<'d>; 2],
    names: Names,
    seq: u64,
    /// A call of it has ended as none before.
    is_new: bool,
}

impl<'d> Tried<'d> {
    fn new(direct: &'d Direct) -> Self {
        Self {
            direct,
            threads: [direct.thread(), direct.thread()],
            names: Names::default(),
            seq: 0,
            is_new: false,
        }
    }

    /// The bytes of a step's arguments: those of a call, mostly, at the beginning of `message`.
    fn arguments(&mut self, step: Step, message: &mut [u8]) -> usize {
        let mut scratch = [0; 512];
        self.names.made.clear();
        let mut source = Named {
            samples: Samples::new(step.seed.into(), &POOL, LIMITS),
            names: &mut self.names,
            // The factor is that of splitmix64: numbers that differ in a few bits would begin alike.
            random: (u64::from(step.seed) << 16 | u64::from(step.op)).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1,
            is_wild: step.how & 0x80 != 0,
            makes: MAKERS.contains(&step.number()),
            scratch: &mut scratch,
        };
        let mut length = match AnyCall::read(step.number(), &mut source) {
            Ok(call) => {
                let mut writer = Writer::new(message);
                call.write(&mut writer);
                writer.finish().unwrap_or_default()
            }
            Err(_) => 16,
        };
        let (at, value) = (usize::from(step.at), step.value);
        match step.how >> 3 & 7 {
            4 => message[..length]
                .iter_mut()
                .skip(at)
                .take(1)
                .for_each(|byte| *byte = value),
            5 => {
                let edge = EDGES[usize::from(value & 7)].to_le_bytes();
                let place = message[..length].iter_mut().skip(at);
                place.zip(edge).for_each(|(place, byte)| *place = byte);
            }
            6 => length = (length + usize::from(value)).saturating_sub(128).min(MESSAGE),
            _ => {}
        }
        length
    }

    /// A step's record.
    fn record(&mut self, step: Step, message: &mut [u8]) -> Record {
        let length = self.arguments(step, message);
        self.seq += 1;
        // Nobody has callbacks that are due, and no time to wait for them.
        if step.number() == AwaitCompletions::OP {
            message[4..8].fill(0);
        }
        let is_message = length > INLINE || step.how & 4 != 0;
        let flags = u16::from(is_message) | u16::from(step.waits()) << 2;
        let mut bytes = [0; RECORD];
        bytes[..2].copy_from_slice(&step.number().to_le_bytes());
        bytes[2..4].copy_from_slice(&flags.to_le_bytes());
        bytes[4..8].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.seq.to_le_bytes());
        if is_message {
            bytes[16..24].copy_from_slice(&MESSAGES.to_le_bytes());
            self.direct
                .write(MESSAGES, &message[..length])
                .expect("the arena has room");
        } else {
            bytes[16..16 + length].copy_from_slice(&message[..length]);
        }
        if step.how >> 3 & 7 == 7 {
            // The header, but not which call it is: that is the input's to say.
            let at = 2 + usize::from(step.at) % 22;
            bytes[at] ^= step.value;
        }
        Record::from_bytes(bytes)
    }

    fn serve(&mut self, step: Step, message: &mut [u8]) {
        let record = self.record(step, message);
        let thread = &mut self.threads[usize::from(step.how >> 6 & 1)];
        let refused = thread.refused();
        let reply = thread.serve(&record);
        let is_refused = thread.refused() > refused;
        let waits = record.flags().map_or(true, |flags| flags.waits());
        assert_eq!(reply.is_some(), waits, "a reply for each record that is waited for");
        assert!(self.direct.memory() <= MEMORY, "more than the quota is charged");
        if reply.is_none() {
            self.names.keep();
        }
        if let Some(reply) = reply {
            let status = self.check(&record, &reply, is_refused);
            if status == 0 {
                self.names.keep();
                self.learn(&reply);
            }
            let ended = u64::from(record.op()) << 40 | u64::from(is_refused) << 32 | u64::from(status.cast_unsigned());
            self.is_new |= ENDED.with_borrow_mut(|all| all.insert(ended));
        }
    }

    /// An address that a reply tells of.
    fn learn(&mut self, reply: &Record) {
        let bytes = self.bytes(reply).unwrap_or_default();
        if reply.op() == SVMAlloc::OP
            && let Some(address) = bytes.get(4..).and_then(<[u8]>::first_chunk)
        {
            self.names.keep_address(u64::from_le_bytes(*address));
        }
    }

    /// The status of a reply, which has to be one of the record's call, or an error code alone.
    fn check(&self, record: &Record, reply: &Record, is_refused: bool) -> i32 {
        assert!(
            reply.flags().is_ok_and(|flags| flags.is_reply()),
            "it says that it is a reply"
        );
        assert_eq!(
            (reply.op(), reply.seq()),
            (record.op(), record.seq()),
            "it is of this record"
        );
        let bytes = self.bytes(reply).expect("a reply is inside the arena");
        let status = bytes.first_chunk().map(|status| i32::from_le_bytes(*status));
        let status = status.expect("a reply begins with a status");
        let is_bare = status < 0 && bytes.len() == size_of::<i32>();
        if is_refused {
            assert!(is_bare, "what is no call is answered by an error code alone: {bytes:?}");
            return status;
        }
        let arguments = self.bytes(record).expect("what was decoded is inside the arena");
        // A client may have changed a message meanwhile, by a reply that it wanted there.
        if let Ok(call) = AnyCall::decode(record.op(), &arguments, LIMITS) {
            let decoded = call.decode_reply(&bytes, LIMITS);
            assert!(
                is_bare || decoded.is_ok(),
                "{call:?} is answered by {bytes:?}: {decoded:?}"
            );
        }
        status
    }

    /// Arguments of a record or of a reply, copied.
    fn bytes(&self, record: &Record) -> Option<Vec<u8>> {
        match record.arguments(LIMITS).ok()? {
            Arguments::Inline(bytes) => Some(bytes.to_vec()),
            Arguments::Message(Span { offset, length }) => {
                let mut bytes = vec![0; usize::try_from(length).ok()?];
                self.direct.read(offset, &mut bytes).ok()?;
                Some(bytes)
            }
        }
    }
}

/// Programs.
pub(crate) fn dispatch() -> Target {
    Target {
        name: "accel-dispatch",
        seeds: seeds(),
        parse: carry_out,
    }
}

fn carry_out(input: &[u8]) -> u64 {
    let limits = TenantLimits {
        memory: Some(MEMORY),
        ..TenantLimits::default()
    };
    let direct = Direct::new(&BACKEND, &limits, LIMITS.arena).expect("memory for a client");
    let mut tried = Tried::new(&direct);
    let steps = input.as_chunks::<STEP>().0.iter().take(MOST);
    count(steps.len() as u64);
    MESSAGE_BYTES.with_borrow_mut(|message| {
        for step in steps {
            tried.serve(Step::of(step), message);
        }
    });
    let is_new = tried.is_new;
    drop(tried);
    assert_eq!(direct.end(), Left::default(), "what a client that has ended has left");
    match is_new {
        // One of its own, so that the input is kept.
        true => ENDED.with_borrow(|all| all.len() as u64),
        false => 0,
    }
}

/// Objects of all sorts, and then each call a few times.
fn seeds() -> Vec<Vec<u8>> {
    let op = |name: &str| {
        let command = COMMANDS.iter().find(|command| command.name == name);
        let number = command.and_then(|command| command.op);
        let index = OPS.iter().position(|op| Some(*op) == number);
        u16::try_from(index.unwrap_or_else(|| panic!("{name} is a call"))).expect("few calls")
    };
    let made = [
        "clGetPlatformIDs",
        "clGetDeviceIDs",
        "clCreateContext",
        "clCreateCommandQueue",
        "clCreateBuffer",
        "clCreateProgramWithSource",
        "clBuildProgram",
        "clCreateKernel",
        "clCreateUserEvent",
        "clCreateSampler",
        "clCreateImage",
        "clSVMAlloc",
    ]
    .map(op);
    let step = |op, seed, how| {
        let step = Step {
            op,
            seed,
            how,
            at: 0,
            value: 0,
        };
        step.bytes()
    };
    let begin: Vec<u8> = made
        .iter()
        // Of few contexts, so that objects are of one.
        .flat_map(|op| (0..if *op == made[2] { 2 } else { 4 }).flat_map(|seed| step(*op, seed, 1)))
        .collect();
    let count = u16::try_from(OPS.len()).expect("few calls");
    let all: Vec<u16> = (0..count).collect();
    let each = all.chunks(8).map(|group| {
        let mut program = begin.clone();
        // What is released is not there for those that come behind it.
        let (last, first): (Vec<u16>, Vec<u16>) = group.iter().partition(|op| is_release(**op));
        for (op, times) in first.iter().map(|op| (*op, 24)).chain(last.iter().map(|op| (*op, 2))) {
            program.extend((0..times).flat_map(|seed: u16| step(op, seed, seed.to_le_bytes()[0] & 3)));
        }
        program
    });
    each.collect()
}

/// Whether the call with that index releases something.
fn is_release(index: u16) -> bool {
    let number = OPS.get(usize::from(index)).copied();
    let command = COMMANDS.iter().find(|command| command.op == number);
    command.is_some_and(|command| command.name.starts_with("clRelease"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fuzzer whose calls all fail tries nothing: of what the seeds do, most calls succeed once, and all sorts of objects are made.
    #[test]
    fn seeds_reach_what_calls_do() {
        for seed in seeds() {
            carry_out(&seed);
        }
        let succeeded: BTreeSet<u64> = ENDED.with_borrow(|all| {
            let good = all.iter().filter(|ended| **ended & 0x1_ffff_ffff == 0);
            good.map(|ended| ended >> 40).collect()
        });
        let (of, count) = (OPS.len(), succeeded.len());
        assert!(count * 10 >= of * 7, "{count} of {of} calls succeed");
        // Those that need more than a name.
        for name in [
            "clSetKernelArg",
            "clEnqueueWriteBuffer",
            "clEnqueueMapBuffer",
            "clEnqueueSVMMemcpy",
            "clSetKernelArgSVMPointer",
        ] {
            let number = COMMANDS
                .iter()
                .find(|command| command.name == name)
                .and_then(|command| command.op);
            assert!(
                number.is_some_and(|number| succeeded.contains(&number.into())),
                "{name} never succeeds"
            );
        }
    }
}
