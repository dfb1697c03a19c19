//! The connection to a server: ends of rings for the application's threads, the order of their records, and the arena.
//!
//! ```text
//!   send: order ─▶ a free end ─▶ hand-over ─▶ put                                    (the lock of the order is held for these)
//!   call: the same, with a question before it if records are not done ─▶ order is given up ─▶ the answers are waited for
//! ```
//!
//! Each end is a ring of its own, and the server serves them side by side. So a record that mentions an object of which another end's
//! record may not be done has to wait for that (the hand-over; docs/accel-client.md, "Order across threads"): `Object::last` says which it
//! is, [`End::done`] how far the server is. An end whose thread is about to wait for the device asks before that whether its records are
//! done, so that nobody has to wait for such a wait; but for one that began while no other end was in use, as then there is nobody to be
//! told: it ends by itself, and who comes meanwhile with the same queue or event waits for that. Knows no call but the question.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use accel_proto::{Arguments, Call, Handle, Limits, MESSAGE, Record, Sort, Span, Writer, opencl as calls};
use accel_transport::ClientEnd;
use accel_window::{Arena, Block, Window};

use crate::answer::Answer;
use crate::arguments::Ref;
use crate::codes::Code;
use crate::lock;
use crate::names::{Names, Place};
use crate::object::{Object, Typed, is_ordered};
use crate::pending::Pending;
use crate::regions::Regions;
pub(crate) use crate::touched::Touched;

/// So many threads can wait for the device at a time.
const ENDS: u32 = 16;
/// How long a server has for the greeting.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a call may take: a kernel may run for days. A server that dies is seen all the same.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// How often a thread looks that waits for another's end.
const LOOK: Duration = Duration::from_micros(20);
/// If it is set every call is waited for, so that errors are told where they arise.
const SYNCHRONOUS: &str = "BASALT_ACCEL_SYNC";

thread_local! {
    /// The end that this thread used last.
    static LAST_END: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Places in the arena that an end has for itself.
#[derive(Debug)]
struct Room {
    /// Calls that do not fit into a record, one behind the other.
    messages: Span,
    used: u64,
    /// Where answers go.
    reply: Span,
}

#[derive(Debug)]
struct Way {
    end: ClientEnd,
    room: Option<Room>,
}

/// An end of a pair of rings.
#[derive(Debug)]
struct End {
    way: Mutex<Way>,
    /// How many records were put.
    put: AtomicU64,
    /// How many of them are known to be done.
    done: AtomicU64,
}

/// What objects there are, for who has a name or an address.
#[derive(Debug, Default)]
struct Registry {
    by_name: BTreeMap<(Sort, u32), usize>,
    by_address: BTreeSet<usize>,
}

/// A connection. It is never dropped: see `process`.
#[derive(Debug)]
pub(crate) struct Connection {
    window: Window,
    /// Whether the server has a copy of the arena, and not the arena.
    is_remote: bool,
    limits: Limits,
    arena: Mutex<Arena>,
    order: Mutex<()>,
    ends: Vec<End>,
    next_end: AtomicUsize,
    over: AtomicBool,
    /// Whether there ever was an event that only the program sets.
    has_user_events: AtomicBool,
    /// The last command that all that comes later is to find complete.
    ahead: Mutex<Option<Place>>,
    synchronous: bool,
    /// Of the process that it belongs to.
    forks: u32,
    names: [Mutex<Names>; Sort::ALL.len()],
    registry: Mutex<Registry>,
    pub(crate) pending: Pending,
    /// Shared virtual memory.
    pub(crate) regions: Regions,
}

impl Connection {
    /// Meets the server at a place; tells a descriptor of the connection's, too, or what went wrong.
    pub(crate) fn open(server: &accel_transport::Place) -> Result<(Self, i32), String> {
        let met = server.meet(ENDS, PATIENCE)?;
        let descriptor = met.descriptor();
        let is_remote = !met.transport.has_rings();
        let (window, _) = met.window.ok_or("its transport has no memory for large data")?;
        let end = |end| End {
            way: Mutex::new(Way { end, room: None }),
            put: AtomicU64::new(0),
            done: AtomicU64::new(0),
        };
        let connection = Self {
            limits: Limits {
                arena: window.geometry().arena(),
            },
            arena: Mutex::new(Arena::new(window.geometry())),
            window,
            is_remote,
            order: Mutex::default(),
            ends: met.ends.into_iter().map(end).collect(),
            next_end: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            has_user_events: AtomicBool::new(false),
            ahead: Mutex::default(),
            synchronous: std::env::var_os(SYNCHRONOUS).is_some(),
            forks: crate::process::forks(),
            names: Default::default(),
            registry: Mutex::default(),
            pending: Pending::default(),
            regions: Regions::default(),
        };
        Ok((connection, descriptor))
    }

    /// Whether nothing can be asked any more: the server is gone, or this is a child of the process that met it.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.forks != crate::process::forks()
    }

    /// After an error of the way.
    fn lost<T>(&self, result: Result<T, accel_transport::Error>) -> Result<T, Code> {
        result.map_err(|_| {
            self.over.store(true, Ordering::Release);
            Code::OUT_OF_RESOURCES
        })
    }

    /// A record that has no answer. Errors are told later, by calls that wait.
    pub(crate) fn send<'a, C: Call<'a> + Copy>(&self, call: &C, touched: &Touched<'_>) -> Result<(), Code> {
        if C::OP == <calls::CreateUserEvent as Call<'_>>::OP {
            self.has_user_events.store(true, Ordering::Relaxed);
        }
        if self.synchronous && touched.released.is_none() {
            let (_, answer) = self.call(|_| *call, touched, false)?;
            return answer.success(call).map(drop);
        }
        let (_order, index, mut way) = self.turn(touched)?;
        self.put_call(index, &mut way, call, touched)?;
        // Others may wait for what was put: it does not wait for more to go with.
        if C::OP == <calls::Flush as Call<'_>>::OP {
            self.lost(way.end.flush(FOREVER))?;
        }
        Ok(())
    }

    /// A command that the server waits for before it looks at what is put behind, so that nobody here has to: whatever comes later finds it
    /// complete. False where another thread could have to know meanwhile that what was put before is done; nothing is put then.
    pub(crate) fn send_ahead<'a, C: Call<'a>>(&self, call: &C, touched: &Touched<'_>) -> Result<bool, Code> {
        let (_order, index, mut way) = self.turn(touched)?;
        if self.synchronous || self.may_be_waited_for(index) {
            return Ok(false);
        }
        *lock(&self.ahead) = Some(self.put_call(index, &mut way, call, touched)?);
        Ok(true)
    }

    fn put_call<'a, C: Call<'a>>(
        &self,
        end: usize,
        way: &mut Way,
        call: &C,
        touched: &Touched<'_>,
    ) -> Result<Place, Code> {
        self.data(way, touched.reads)?;
        let record = self.record(end, way, call, false)?;
        let number = self.put(end, way, &record)?;
        let place = Place { end, number };
        touched.all().for_each(|object| object.put_at(place));
        Ok(place)
    }

    /// A record whose answer is waited for. `make` is told where in the arena a long answer can go. Who `waits` for the device lets
    /// others know first that what was put before is done.
    pub(crate) fn call<'a, C: Call<'a>>(
        &self,
        make: impl FnOnce(Span) -> C,
        touched: &Touched<'_>,
        waits: bool,
    ) -> Result<(C, Answer), Code> {
        let (order, index, mut way) = self.turn(touched)?;
        let reply = self.room(&mut way)?.reply;
        let call = make(reply);
        self.data(&mut way, touched.reads)?;
        let record = self.record(index, &mut way, &call, true)?;
        let end = &self.ends[index];
        let has_put = end.put.load(Ordering::Relaxed) > end.done.load(Ordering::Acquire);
        let asks = waits && has_put && self.may_be_waited_for(index);
        let question = match asks {
            true => Some(self.put(index, &mut way, &question()?)?),
            false => None,
        };
        let number = match touched.writes {
            None => self.put(index, &mut way, &record)?,
            Some(Span { offset, length }) => {
                let put = way.end.send_and_want(&record, (offset, length), FOREVER);
                self.was_put(index, self.lost(put)?)
            }
        };
        // Objects do not hear of it: it is done when it returns, and who does not wait for that has no order with it.
        drop(order);
        if let Some(question) = question {
            self.await_answer(index, &mut way, question)?;
        }
        let answer = self.await_answer(index, &mut way, number)?;
        if let Some(span) = touched.writes {
            self.lost(way.end.take_data(span.offset, span.length, FOREVER))?;
        }
        Ok((call, self.answer::<C>(&answer, reply)?))
    }

    /// Whether a thread may have to know what this end has put before its call ends. A program with one thread asks for nothing: without
    /// user events each call ends by itself, whatever others do, and a second thread that begins meanwhile waits for that end.
    fn may_be_waited_for(&self, mine: usize) -> bool {
        let is_used = |end: &End| end.put.load(Ordering::Relaxed) > 0;
        let others = self.ends.iter().enumerate().filter(|(index, _)| *index != mine);
        self.has_user_events.load(Ordering::Relaxed) || others.into_iter().any(|(_, end)| is_used(end))
    }

    /// Data of the arena goes before its record.
    fn data(&self, way: &mut Way, span: Option<Span>) -> Result<(), Code> {
        match span {
            Some(span) => self.lost(way.end.send_data(span.offset, span.length, FOREVER)),
            None => Ok(()),
        }
    }

    /// Has what the server has written into the arena, by commands that are complete.
    pub(crate) fn fetch(&self, span: Span) -> Result<(), Code> {
        if !self.is_remote || span.length == 0 {
            return Ok(());
        }
        let (order, _, mut way) = self.turn(&Touched::default())?;
        drop(order);
        way.end.want_data(span.offset, span.length);
        self.lost(way.end.take_data(span.offset, span.length, FOREVER))
    }

    /// Whether data that the server has written has to be asked for.
    pub(crate) fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// The order, an end, and its lock, once all that the record depends on is done.
    fn turn<'c>(&'c self, touched: &Touched<'_>) -> Result<(MutexGuard<'c, ()>, usize, MutexGuard<'c, Way>), Code> {
        loop {
            if self.is_over() {
                return Err(Code::OUT_OF_RESOURCES);
            }
            if touched.all().any(|object| !object.is_at(self)) || !touched.is_of_one_context() {
                return Err(Code::INVALID_CONTEXT);
            }
            let order = lock(&self.order);
            if let Some((index, way)) = self.free_end() {
                self.hand_over(index, touched)?;
                return Ok((order, index, way));
            }
            // All of them wait for the device.
            drop(order);
            std::thread::sleep(LOOK);
        }
    }

    /// An end that nobody waits at: the one that this thread had last, if it can be.
    fn free_end(&self) -> Option<(usize, MutexGuard<'_, Way>)> {
        let count = self.ends.len();
        let first = match LAST_END.get() {
            usize::MAX => self.next_end.fetch_add(1, Ordering::Relaxed),
            last => last,
        };
        let tried = (0..count).map(|step| (first % count + step) % count);
        let found = tried.filter_map(|index| Some((index, self.try_end(index)?))).next();
        if let Some((index, _)) = &found {
            LAST_END.set(*index);
        }
        found
    }

    fn try_end(&self, index: usize) -> Option<MutexGuard<'_, Way>> {
        match self.ends.get(index)?.way.try_lock() {
            Ok(way) => Some(way),
            Err(TryLockError::Poisoned(way)) => Some(way.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Until the server has done what the record depends on and other ends have put.
    fn hand_over(&self, mine: usize, touched: &Touched<'_>) -> Result<(), Code> {
        let ahead = *lock(&self.ahead);
        if let Some(ahead) = ahead.filter(|ahead| ahead.end != mine) {
            self.finish(ahead)?;
        }
        for object in touched.all() {
            let Some(last) = object.last().filter(|last| last.end != mine && !self.is_done(*last)) else {
                continue;
            };
            match is_ordered(object.sort()) || touched.released.is_some() {
                true => self.finish(last)?,
                false => object.shared.store(true, Ordering::Release),
            }
        }
        if touched
            .released
            .is_some_and(|object| object.shared.load(Ordering::Acquire))
        {
            for (index, end) in self.ends.iter().enumerate().filter(|(index, _)| *index != mine) {
                if let Some(number) = end.put.load(Ordering::Acquire).checked_sub(1) {
                    self.finish(Place { end: index, number })?;
                }
            }
        }
        Ok(())
    }

    /// Whether the server is known to have done a record.
    pub(crate) fn is_done(&self, place: Place) -> bool {
        let end = self.ends.get(place.end);
        end.is_none_or(|end| end.done.load(Ordering::Acquire) > place.number)
    }

    /// Until a record of another end is done: by a question there, or, where a thread waits, by what that one asks.
    fn finish(&self, place: Place) -> Result<(), Code> {
        while !self.is_done(place) {
            match self.try_end(place.end) {
                Some(mut way) => return self.ask(place.end, &mut way),
                None if self.is_over() => return Err(Code::OUT_OF_RESOURCES),
                None => std::thread::sleep(LOOK),
            }
        }
        Ok(())
    }

    /// Until all is done that an end has put.
    fn ask(&self, index: usize, way: &mut Way) -> Result<(), Code> {
        let question = question()?;
        let number = self.put(index, way, &question)?;
        self.await_answer(index, way, number).map(drop)
    }

    fn put(&self, index: usize, way: &mut Way, record: &wire::ring::Record) -> Result<u64, Code> {
        let number = self.lost(way.end.send(record, FOREVER))?;
        Ok(self.was_put(index, number))
    }

    fn was_put(&self, index: usize, number: u64) -> u64 {
        self.ends[index].put.store(number + 1, Ordering::Release);
        number
    }

    /// The answer to a record, whose number it has. The records before it are done, too.
    fn await_answer(&self, index: usize, way: &mut Way, number: u64) -> Result<wire::ring::Record, Code> {
        let answer = self.lost(way.end.receive(FOREVER))?;
        if answer.sequence() != number {
            self.over.store(true, Ordering::Release);
            return Err(Code::OUT_OF_RESOURCES);
        }
        self.ends[index].done.store(number + 1, Ordering::Release);
        Ok(answer)
    }

    /// An end's places in the arena.
    fn room<'w>(&self, way: &'w mut Way) -> Result<&'w mut Room, Code> {
        if way.room.is_none() {
            let span = |block: Block| Span {
                offset: block.offset(),
                length: block.length(),
            };
            let mut arena = lock(&self.arena);
            let mut take = || arena.take(MESSAGE as u64).map(span).map_err(|_| Code::OUT_OF_RESOURCES);
            way.room = Some(Room {
                messages: take()?,
                used: 0,
                reply: take()?,
            });
        }
        way.room.as_mut().ok_or(Code::OUT_OF_RESOURCES)
    }

    /// A call as a record; one that is too long goes into the arena, where it stays until the server has copied it.
    fn record<'a, C: Call<'a>>(
        &self,
        index: usize,
        way: &mut Way,
        call: &C,
        waits: bool,
    ) -> Result<wire::ring::Record, Code> {
        let needs = match Record::call(call, 0, waits) {
            Ok(record) => return Ok(wire::ring::Record::from_bytes(record.as_bytes())),
            Err(no_room) => no_room.needs,
        };
        if needs > MESSAGE {
            return Err(Code::OUT_OF_RESOURCES);
        }
        let room = self.room(way)?;
        let (length, mut used) = (needs as u64, room.used);
        if used + length > room.messages.length {
            self.ask(index, way)?;
            used = 0;
        }
        let room = self.room(way)?;
        room.used = (used + length).next_multiple_of(8);
        let span = Span {
            offset: room.messages.offset + used,
            length,
        };
        let mut bytes = vec![0; needs];
        let mut writer = Writer::new(&mut bytes);
        call.write(&mut writer);
        self.write(span.offset, &bytes)?;
        self.data(way, Some(span))?;
        let record = Record::call_in::<C>(span, 0, waits);
        Ok(wire::ring::Record::from_bytes(record.as_bytes()))
    }

    /// An answer's bytes, copied once, from where they may be.
    fn answer<'a, C: Call<'a>>(&self, record: &wire::ring::Record, reply: Span) -> Result<Answer, Code> {
        let record = Record::from_bytes(record.to_bytes());
        let is_answer = record.op() == C::OP && record.flags().is_ok_and(|flags| flags.is_reply());
        let bytes = match record.arguments(self.limits) {
            Ok(Arguments::Inline(bytes)) if is_answer => bytes.to_vec(),
            // Where the server has a copy of the arena it has sent this part of it before.
            Ok(Arguments::Message(span)) if is_answer && span.offset == reply.offset && span.length <= reply.length => {
                self.read(span)?
            }
            _ => {
                self.over.store(true, Ordering::Release);
                return Err(Code::OUT_OF_RESOURCES);
            }
        };
        Ok(Answer::new(bytes, self.limits))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Code> {
        let region = self.window.slice(offset, bytes.len() as u64);
        region
            .and_then(|region| Ok(region.write(0, bytes)?))
            .map_err(|_| Code::OUT_OF_RESOURCES)
    }

    /// A copy of a part of the arena.
    pub(crate) fn read(&self, span: Span) -> Result<Vec<u8>, Code> {
        let mut bytes = vec![0; usize::try_from(span.length).map_err(|_| Code::OUT_OF_RESOURCES)?];
        let region = self.window.slice(span.offset, span.length);
        let read = region.and_then(|region| Ok(region.read(0, &mut bytes)?));
        read.map(|()| bytes).map_err(|_| Code::OUT_OF_RESOURCES)
    }

    /// A part of the arena for data.
    pub(crate) fn take(&self, length: u64) -> Result<Block, Code> {
        let taken = lock(&self.arena).take(length);
        taken.map_err(|_| Code::MEM_OBJECT_ALLOCATION_FAILURE)
    }

    /// The server has no use for it any more.
    pub(crate) fn give_back(&self, block: Block) {
        lock(&self.arena).give_back(block);
    }

    /// The largest piece of data that is worth trying at once.
    pub(crate) fn piece(&self) -> u64 {
        (self.limits.arena / 4).max(4096)
    }

    /// Where in this process a part of the arena is.
    pub(crate) fn address(&self, offset: u64) -> *mut u8 {
        let begin = self.window.geometry().arena_at() + offset;
        let begin = usize::try_from(begin).unwrap_or_default();
        self.window.region().as_ptr().wrapping_add(begin)
    }

    /// Where in the arena an address of this process is, if so many bytes from there on are in it, and the server has the same memory.
    pub(crate) fn offset_of(&self, address: usize, length: u64) -> Option<u64> {
        if self.is_remote {
            return None;
        }
        let offset = (address.checked_sub(self.address(0).addr())?) as u64;
        let end = offset.checked_add(length)?;
        (end <= self.limits.arena && length > 0).then_some(offset)
    }

    /// A name that nothing has. If all are in use or on their way back, the server is asked how far it is.
    pub(crate) fn take_name<K: Typed>(&self) -> Result<Handle<K>, Code> {
        let take = || lock(&self.names[K::SORT as usize]).take(|place| self.is_done(place));
        if let Some(name) = take() {
            return Ok(name);
        }
        let order = lock(&self.order);
        for (index, end) in self.ends.iter().enumerate() {
            if let Some(number) = end.put.load(Ordering::Acquire).checked_sub(1) {
                self.finish(Place { end: index, number })?;
            }
        }
        drop(order);
        take().ok_or(Code::OUT_OF_RESOURCES)
    }

    /// The server has never heard of it.
    pub(crate) fn give_back_name(&self, sort: Sort, raw: u32) {
        lock(&self.names[sort as usize]).give_back(Handle::<()>::from_raw(raw));
    }

    /// The server lets go of it with that record.
    pub(crate) fn release_name(&self, sort: Sort, raw: u32, place: Place) {
        lock(&self.names[sort as usize]).release(Handle::<()>::from_raw(raw), place);
    }

    /// There is an object; it can be found if it is of a kind that anything names.
    pub(crate) fn register(&self, object: &Object) {
        let address = std::ptr::from_ref(object).expose_provenance();
        let sort = object.sort();
        if matches!(sort, Sort::Kernel | Sort::Event) {
            return;
        }
        let mut registry = lock(&self.registry);
        registry.by_name.insert((sort, object.raw()), address);
        if matches!(sort, Sort::Mem | Sort::Sampler | Sort::CommandQueue) {
            registry.by_address.insert(address);
        }
    }

    /// There will be no object.
    pub(crate) fn forget(&self, object: &Object) {
        if matches!(object.sort(), Sort::Kernel | Sort::Event) {
            return;
        }
        let mut registry = lock(&self.registry);
        registry.by_name.remove(&(object.sort(), object.raw()));
        registry.by_address.remove(&std::ptr::from_ref(object).addr());
    }

    /// The object that the server calls so; NULL if there is none.
    pub(crate) fn object(&self, sort: Sort, raw: u32) -> Ref {
        let address = lock(&self.registry).by_name.get(&(sort, raw)).copied();
        address.map_or(Ref::NULL, |address| Ref::at(address as u64))
    }

    /// Whether there is an object at an address that an argument of a kernel can be.
    pub(crate) fn is_argument(&self, address: u64) -> bool {
        usize::try_from(address).is_ok_and(|address| lock(&self.registry).by_address.contains(&address))
    }
}

/// A call that changes nothing: once it is answered, all that the end has put before is done.
fn question() -> Result<wire::ring::Record, Code> {
    let call = calls::GetPlatformIDs {
        num_entries: 0,
        platforms: false,
        num_platforms: true,
        reply: Span { offset: 0, length: 0 },
    };
    let record = Record::call(&call, 0, true).map_err(|_| Code::OUT_OF_RESOURCES)?;
    Ok(wire::ring::Record::from_bytes(record.as_bytes()))
}
