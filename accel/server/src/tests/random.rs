//! Random records.

use std::ffi::CStr;

use accel_proto::opencl::table::COMMANDS;
use accel_proto::samples::{Pool, Samples};
use accel_proto::{AnyHandle, Arguments, Memory, Pieces, Plain, RECORD, Refused, Source, Value};

use super::*;
use crate::saved::Kept;

/// Random numbers (xorshift64, Marsaglia 2003).
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Mostly a name of an object that there is, or almost.
    fn name(&mut self) -> u32 {
        let random = self.next();
        let told = if random & 16 == 0 { 0 } else { Handle::<Mem>::FIRST_TOLD };
        let index = u32::try_from(if told == 0 { random & 3 } else { 0 }).unwrap();
        let generation = u32::try_from(1 + (random >> 8 & 15) / 15).unwrap();
        Handle::<Mem>::new(index + told, generation).unwrap().raw()
    }
}

/// Samples whose names of objects are those of [`Random::name`].
struct Named<'a> {
    samples: Samples<'a>,
    random: Random,
}

fn is_name<T>() -> bool {
    std::any::type_name::<T>().contains("Handle<")
}

impl<'a> Source<'a> for Named<'a> {
    fn present(&mut self, known: u32) -> Result<u32, Refused> {
        self.samples.present(known)
    }

    fn value<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        let sample = self.samples.value(what)?;
        let named = is_name::<T>() && T::SIZE == 4;
        Ok(if named {
            T::get(&self.random.name().to_le_bytes())
        } else {
            sample
        })
    }

    fn count<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        self.samples.count(what)
    }

    fn list<T: Plain>(&mut self, length: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        let list: List<'a, T> = self.samples.list(length, what)?;
        if !is_name::<T>() || T::SIZE != 4 {
            return Ok(list);
        }
        let named: Vec<T> = list.iter().map(|_| T::get(&self.random.name().to_le_bytes())).collect();
        // A test's few bytes.
        Ok(List::new(Vec::leak(named)))
    }

    fn counted<T: Plain>(&mut self, most: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        self.samples.counted(most, what)
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
            Value::Object(AnyHandle { c_type, .. }) => Ok(Value::Object(AnyHandle {
                c_type,
                raw: self.random.name(),
            })),
            bytes => Ok(bytes),
        }
    }

    fn memory(&mut self, length: Option<u64>, what: &'static str) -> Result<Memory, Refused> {
        self.samples.memory(length, what)
    }
}

/// Calls with random arguments and with names that often exist, of which half have a byte changed. Whatever comes, each is answered by one
/// reply of the documented form, and at the end everything is released.
#[test]
fn whatever_records_come_each_is_answered() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let (mut done, mut failed, mut refused) = (0_u64, 0_u64, 0_u64);
    for round in 0..8 {
        let client = match round % 2 {
            0 => client(),
            // Its calls are kept.
            _ => client().saved(1, None),
        };
        let mut caller = Caller::new(&client);
        caller.buffer(4096);
        let pool = Pool::new(round);
        for step in 0..150_u64 {
            for &op in OPS {
                let Some(mut bytes) = written(op, &mut random, &pool) else {
                    continue;
                };
                if step % 2 == 1
                    && let Some(at) = usize::try_from(random.next() >> 1)
                        .ok()
                        .and_then(|at| at.checked_rem(bytes.len()))
                {
                    bytes[at] = random.next().to_le_bytes()[0];
                }
                let before = caller.worker.refused;
                let status = serve_bytes(&mut caller, op, &bytes);
                if caller.worker.refused > before {
                    refused += 1;
                } else if status == 0 {
                    done += 1;
                } else {
                    failed += 1;
                }
            }
        }
        client.end();
    }
    assert!(
        done > 5000 && failed > 5000 && refused > 5000,
        "{done} done, {failed} failed, {refused} refused"
    );
}

/// Calls with random arguments, one of each that leaves something that can be saved.
fn call_each(caller: &mut Caller<'_>, random: &mut Random, pool: &Pool) {
    for &op in OPS.iter().filter(|op| !is_never_saved(**op)) {
        if let Some(bytes) = written(op, random, pool) {
            serve_bytes(caller, op, &bytes);
        }
    }
}

/// A call with random arguments, as it travels; nothing if there are none for it.
fn written(op: u16, random: &mut Random, pool: &Pool) -> Option<Vec<u8>> {
    let mut source = Named {
        samples: Samples::new(random.next(), pool, LIMITS),
        random: random.clone(),
    };
    let call = AnyCall::read(op, &mut source).ok()?;
    let mut bytes = vec![0; MESSAGE];
    let mut writer = Writer::new(&mut bytes);
    call.write(&mut writer);
    let length = writer.finish().unwrap();
    bytes.truncate(length);
    Some(bytes)
}

/// Whatever a client has done, what is saved of it can be made again, and saved again.
#[test]
fn what_is_saved_can_be_made_again() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let mut made = 0_u64;
    for round in 0..60 {
        let first = client().saved(1, None);
        let mut caller = Caller::new(&first);
        caller.buffer(4096);
        let pool = Pool::new(round);
        for step in 0..24 {
            call_each(&mut caller, &mut random, &pool);
            if step % 3 == 0
                && let Ok(kept) = Kept::of(&first)
            {
                let lost = |why| panic!("round {round}, step {step}: {why}");
                let second = kept.make(client()).unwrap_or_else(lost);
                let third = Kept::of(&second)
                    .and_then(|kept| kept.make(client()))
                    .unwrap_or_else(lost);
                third.end();
                second.end();
                made += 1;
            }
        }
        first.end();
    }
    assert!(made > 100, "{made} made again");
}

/// A file that another server has written, whose guest may have told it what to write: it is refused, or it is a client's state like others.
#[test]
fn whatever_a_saved_state_says_nothing_is_left_of_it() {
    let mut random = Random(0xfeed_5678_9abc_def1);
    let (mut made, mut refused) = (0_u64, 0_u64);
    for round in 0..6 {
        let first = client().saved(1, None);
        let mut caller = Caller::new(&first);
        caller.buffer(4096);
        let pool = Pool::new(round);
        for _ in 0..4 {
            call_each(&mut caller, &mut random, &pool);
            for _ in 0..8 {
                let Ok(kept) = Kept::of(&first) else { break };
                let changed = kept.changed(&mut |bytes| change(&mut random, bytes));
                let Some(changed) = changed else { continue };
                let second = client();
                let (backend, tenant) = (Arc::clone(&second.backend), Arc::clone(&second.tenant));
                match changed.make(second) {
                    Ok(second) => {
                        second.end();
                        made += 1;
                    }
                    Err(_) => refused += 1,
                }
                assert_eq!((backend.census.total(), tenant.quota.used()), (0, 0), "what is left");
            }
        }
        first.end();
    }
    assert!(made > 20 && refused > 20, "{made} made, {refused} refused");
}

/// Changes digits of a text, and bytes of what is none.
fn change(random: &mut Random, bytes: &mut [u8]) {
    let is_text = bytes.first() == Some(&b'{');
    let places: Vec<usize> = (0..bytes.len())
        .filter(|at| !is_text || bytes[*at].is_ascii_digit())
        .collect();
    for _ in 0..random.next() % 4 {
        let at = usize::try_from(random.next() % places.len().max(1) as u64).unwrap();
        let by = random.next().to_le_bytes()[0];
        if let Some(byte) = places.get(at).and_then(|at| bytes.get_mut(*at)) {
            *byte = if is_text { b'0' + by % 10 } else { by };
        }
    }
}

/// What the first of these calls has made could not be saved, so that nothing would be tried behind it.
fn is_never_saved(op: u16) -> bool {
    let command = COMMANDS.iter().find(|command| command.op == Some(op));
    let name = command.map_or("", |command| command.name);
    name.contains("SVM") || ["clCreatePipe", "clSetEventCallback"].contains(&name)
}

/// The status of the reply to a call whose arguments are these bytes, as a message.
fn serve_bytes(caller: &mut Caller<'_>, op: u16, bytes: &[u8]) -> i32 {
    let length = u32::try_from(bytes.len()).unwrap();
    let window = caller.client.window.as_ref().unwrap();
    window.slice(MESSAGES, length.into()).unwrap().write(0, bytes).unwrap();
    let mut record = [0; RECORD];
    record[0..2].copy_from_slice(&op.to_le_bytes());
    record[2] = 5;
    record[4..8].copy_from_slice(&length.to_le_bytes());
    record[16..24].copy_from_slice(&MESSAGES.to_le_bytes());
    let reply = caller.worker.serve(&Record::from_bytes(record)).unwrap();
    assert!(reply.flags().unwrap().is_reply() && reply.op() == op);
    match reply.arguments(LIMITS).unwrap() {
        Arguments::Inline(reply) => i32::from_le_bytes(reply[..4].try_into().unwrap()),
        Arguments::Message(span) => {
            let mut status = [0; 4];
            window
                .slice(span.offset, span.length)
                .unwrap()
                .read(0, &mut status)
                .unwrap();
            i32::from_le_bytes(status)
        }
    }
}
