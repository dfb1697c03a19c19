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

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::CStr;
use std::sync::{Arc, LazyLock};

use accel_proto::control::AwaitCompletions;
use accel_proto::opencl::table::COMMANDS;
use accel_proto::opencl::{AnyCall, Mem, OPS, SVMAlloc};
use accel_proto::samples::{Pool, Samples};
use accel_proto::{
    AnyHandle, Arguments, Call as _, Handle, INLINE, Limits, List, MESSAGE, Memory, Pieces, Plain, RECORD, Reader,
    Record, Refused, Sort, Source, Span, SvmAddress, Value, Writer,
};
use accel_server::{Backend, Direct, DirectThread, Left, TenantLimits};

use crate::run::{Target, count, outcome};

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
/// `CL_CONTEXT_PLATFORM` and `CL_QUEUE_PROPERTIES`, the keys of properties that do something.
const KEYS: [u64; 2] = [0x1084, 0x1093];
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

/// Numbers of calls that make something.
static MAKERS: LazyLock<BTreeSet<u16>> = LazyLock::new(|| {
    let makes = |name: &str| name.starts_with("clCreate") || name == "clSVMAlloc";
    let makers = COMMANDS.iter().filter(|command| makes(command.name));
    makers.filter_map(|command| command.op).collect()
});

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

/// Names of objects, by their sort.
#[derive(Debug, Default)]
struct Names {
    given: [u32; Sort::ALL.len()],
    /// Of what was made last, the newest at the end; some of it is released by now.
    there: [Vec<u32>; Sort::ALL.len()],
    /// Of what the current call makes, if it succeeds.
    made: Vec<(Sort, u32)>,
    /// Where shared virtual memory was allocated last.
    shared: Vec<u64>,
}

impl Names {
    /// So many are remembered of each sort.
    const MOST: usize = 6;

    /// The current call has succeeded, or nobody knows.
    fn keep(&mut self) {
        for (sort, name) in self.made.drain(..) {
            let there = &mut self.there[sort as usize];
            if there.len() == Self::MOST {
                there.remove(0);
            }
            there.push(name);
        }
    }

    /// The server has told of shared virtual memory.
    fn keep_address(&mut self, address: u64) {
        if self.shared.len() == Self::MOST {
            self.shared.remove(0);
        }
        self.shared.push(address);
    }
}

/// Samples whose names are those of objects that calls have made, or are about to, and whose numbers are mostly small.
struct Named<'a, 'n> {
    samples: Samples<'a>,
    names: &'n mut Names,
    random: u64,
    is_wild: bool,
    /// Whether the call makes something, which others then use parts of.
    makes: bool,
    /// For lists that are made here.
    scratch: &'a mut [u8],
}

/// The platform's name, and the device's.
fn told() -> u32 {
    Handle::<Mem>::new(Handle::<Mem>::FIRST_TOLD, 1).map_or(0, Handle::raw)
}

/// The sort that a handle's type is of.
fn sort_of<T>() -> Option<Sort> {
    let name = std::any::type_name::<T>();
    let kind = name.strip_suffix('>').filter(|_| name.contains("Handle<"))?;
    let kind = kind.rsplit("::").next()?;
    Some(match kind {
        "Platform" => Sort::Platform,
        "Device" => Sort::Device,
        "Context" => Sort::Context,
        "CommandQueue" => Sort::CommandQueue,
        "Mem" => Sort::Mem,
        "Program" => Sort::Program,
        "Kernel" => Sort::Kernel,
        "Event" => Sort::Event,
        "Sampler" => Sort::Sampler,
        _ => return None,
    })
}

impl<'a> Named<'a, '_> {
    /// xorshift64 (Marsaglia 2003).
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 8
    }

    fn below(&mut self, bound: u32) -> u32 {
        let high = self.next() & u64::from(u32::MAX);
        u32::try_from(high)
            .unwrap_or_default()
            .checked_rem(bound)
            .unwrap_or_default()
    }

    /// A name of that sort: of what there is, or a new one where one is made.
    fn name(&mut self, sort: Sort, what: &str) -> u32 {
        let is_made = matches!(what, "returned" | "kernels" | "out_devices") || what == "event" && self.below(2) == 0;
        if is_made {
            let given = &mut self.names.given[sort as usize];
            *given = (*given + 1).min(4000);
            let name = Handle::<Mem>::new(*given, 1).map_or(0, Handle::raw);
            self.names.made.push((sort, name));
            return name;
        }
        if self.is_wild {
            let (index, generation) = (self.below(64), 1 + self.below(3));
            return Handle::<Mem>::new(index, generation).map_or(0, Handle::raw);
        }
        if self.below(32) == 0 {
            return 0;
        }
        if matches!(sort, Sort::Platform | Sort::Device) && self.below(8) != 0 {
            return told();
        }
        let chosen = self.next();
        let there = &self.names.there[sort as usize];
        let chosen = usize::try_from(chosen).unwrap_or_default().checked_rem(there.len());
        chosen.and_then(|chosen| there.get(chosen)).copied().unwrap_or_default()
    }

    /// A list of elements that are these bytes.
    fn keep<T: Plain>(&mut self, bytes: &[u8], what: &'static str) -> Result<List<'a, T>, Refused> {
        let scratch = std::mem::take(&mut self.scratch);
        let (place, rest) = scratch
            .split_at_mut_checked(bytes.len())
            .ok_or(Refused::Overflow { what })?;
        self.scratch = rest;
        place.copy_from_slice(bytes);
        Reader::new(place, LIMITS).list(Some((bytes.len() / T::SIZE) as u64), what)
    }

    /// An address in shared virtual memory, mostly of some.
    fn address(&mut self) -> u64 {
        let known = usize::try_from(self.next()).unwrap_or_default();
        let known = known.checked_rem(self.names.shared.len()).unwrap_or_default();
        let begin = self.names.shared.get(known).copied().unwrap_or_default();
        match self.below(8) {
            0 => 0,
            1 => EDGES[self.below(8) as usize],
            2 | 3 => begin.wrapping_add(u64::from(self.below(5000))).wrapping_sub(8),
            _ => begin,
        }
    }

    fn number(&mut self, what: &str) -> Option<u64> {
        Some(match (what, self.below(8)) {
            ("param_name", _) => u64::from(0x900 + self.below(0xc00)),
            ("size", 2..) if self.makes => u64::from(1024 + self.below(4096)),
            ("offset" | "src_offset" | "dst_offset", 2..) => 0,
            ("flags", 2..) => u64::from(self.below(8)),
            ("alignment", 2..) => 1 << self.below(8),
            (_, 0) => return None,
            (_, 1) => EDGES.get(self.below(8) as usize).copied()?,
            _ => u64::from(self.below(64)),
        })
    }
}

impl<'a> Source<'a> for Named<'a, '_> {
    fn present(&mut self, known: u32) -> Result<u32, Refused> {
        // Mostly all that there can be.
        match self.below(3) {
            0 => self.samples.present(known),
            _ => Ok(known),
        }
    }

    fn value<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        if let Some(sort) = sort_of::<T>() {
            return Ok(T::get(&self.name(sort, what).to_le_bytes()));
        }
        if is_address::<T>() {
            return Ok(T::get(&self.address().to_le_bytes()));
        }
        match self.number(what) {
            Some(number) if T::SIZE <= size_of::<u64>() => Ok(T::get(&number.to_le_bytes())),
            _ => self.samples.value(what),
        }
    }

    fn count<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        match what {
            // Few events are there to be waited for.
            "num_events_in_wait_list" if self.below(4) != 0 => Ok(T::get(&[0; 8])),
            _ => self.samples.count(what),
        }
    }

    fn list<T: Plain>(&mut self, length: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        let sort = sort_of::<T>();
        if sort.is_none() && !is_address::<T>() {
            return self.samples.list(length, what);
        }
        let count = length.filter(|count| *count <= 16).ok_or(Refused::Overflow { what })?;
        let Some(sort) = sort else {
            let addresses: Vec<u8> = (0..count).flat_map(|_| self.address().to_le_bytes()).collect();
            return self.keep(&addresses, what);
        };
        let names: Vec<u8> = (0..count).flat_map(|_| self.name(sort, what).to_le_bytes()).collect();
        self.keep(&names, what)
    }

    fn counted<T: Plain>(&mut self, most: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        if what != "properties" || T::SIZE != size_of::<u64>() || self.below(8) == 0 {
            return self.samples.counted(most, what);
        }
        let key = KEYS.get(self.below(2) as usize).copied().unwrap_or_default();
        let value = match key {
            0x1084 => told().into(),
            _ => self.next() & 3,
        };
        let pairs: Vec<u8> = [key, value, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
        self.keep(&pairs, what)
    }

    fn text(&mut self, what: &'static str) -> Result<&'a CStr, Refused> {
        self.samples.text(what)
    }

    fn span(&mut self, length: Option<u64>, what: &'static str) -> Result<Span, Refused> {
        self.samples.span(length, what)
    }

    fn area(&mut self, what: &'static str) -> Result<Span, Refused> {
        self.samples.area(what)
    }

    fn pieces(&mut self, count: Option<u64>, what: &'static str) -> Result<Pieces<'a>, Refused> {
        self.samples.pieces(count, what)
    }

    fn choice(
        &mut self,
        length: Option<u64>,
        c_types: &[&'static str],
        what: &'static str,
    ) -> Result<Value<'a>, Refused> {
        match self.samples.choice(length, c_types, what)? {
            Value::Object(AnyHandle { c_type, .. }) => {
                let raw = Sort::of(c_type).map_or(0, |sort| self.name(sort, what));
                Ok(Value::Object(AnyHandle { c_type, raw }))
            }
            bytes => Ok(bytes),
        }
    }

    fn memory(&mut self, length: Option<u64>, what: &'static str) -> Result<Memory, Refused> {
        match self.below(2) {
            0 => Ok(Memory::Svm(SvmAddress(self.address()))),
            _ => self.samples.memory(length, what),
        }
    }
}

fn is_address<T>() -> bool {
    std::any::type_name::<T>().ends_with("::SvmAddress")
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
        true => outcome(format_args!("{input:?}")),
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
