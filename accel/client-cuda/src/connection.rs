//! The one connection of the process to its server: records in the order in which functions are called, the arena, and what was told of
//! the device.
//!
//! All threads share one ring, so that the order of calls is that of the program whatever thread makes them; a thread that waits for an
//! answer holds the others up. What lies in the arena is given free when an answer says that all before it is done. Knows no call by name
//! but those that it makes itself. A child of fork(2) has no connection, as natively (cudaErrorInitializationError).

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use accel_proto::cuda::{BasaltDeviceInfo, CudaMemGetInfo, CudaStreamSynchronize};
use accel_proto::{Arguments, Call, Limits, MESSAGE, Reader, Record, Reply, Span, Writer};
use accel_transport::{ClientEnd, Place};
use accel_window::Window;

use crate::lock;
use crate::stub::Failure;

/// How long a server has for the greeting.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a call may take: a kernel may run for days. A server that dies is seen all the same.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// Where answers go that do not fit into a record: the arena's beginning.
const REPLY: Span = Span {
    offset: 0,
    length: MESSAGE as u64,
};
/// If it is set, why there is no server is said on stderr, and what is not served, once each.
pub(crate) const DEBUG: &str = "BASALT_ACCEL_DEBUG";
/// If it is `in-process`, no server is asked: what is sent ends here, and answers are those of the server's back end `null`. If it is
/// `synchronous`, each function that crosses by no record of its own asks the server something, and waits. Both are what forwarding is
/// compared with.
const MODE: &str = "BASALT_ACCEL_CUDA";

/// What was told of the device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: [u8; 64],
    pub(crate) memory: u64,
    pub(crate) attributes: [i32; 160],
    /// Kernels are carried out there: modules and arguments cross.
    pub(crate) takes_code: bool,
    /// A library there says where memory of the device is.
    pub(crate) says_addresses: bool,
}

/// The connection, or what stands for one.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Nothing in the process that has no server.
    way: Option<Mutex<Way>>,
    window: Option<Window>,
    limits: Limits,
    over: AtomicBool,
    settled: Settled,
    pub(crate) device: Device,
    /// Records that were sent without an answer, and with one.
    pub(crate) sent: AtomicU64,
    pub(crate) asked: AtomicU64,
}

#[derive(Debug)]
struct Way {
    end: ClientEnd,
    /// Of the arena, behind where answers go: taken so far.
    used: u64,
    scratch: Box<[u8]>,
}

/// The stream of which all that was put is done: bytes were copied from it, and nothing has been put since. Where there is a server, it is
/// looked at and written by who has the way alone.
#[derive(Debug, Default)]
struct Settled(AtomicU64);

impl Settled {
    /// `cudaStreamPerThread`: another one for each thread.
    const PER_THREAD: u32 = 2;

    fn none(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn set(&self, stream: u32) {
        if stream != Self::PER_THREAD {
            self.0.store(u64::from(stream) + 1, Ordering::Relaxed);
        }
    }

    /// Whether a call waits for that stream alone.
    fn answers<'a, C: Call<'a>>(&self, call: &C) -> bool {
        let stream = self.0.load(Ordering::Relaxed);
        if stream == 0 || C::OP != CudaStreamSynchronize::OP {
            return false;
        }
        let mut bytes = [0; 4];
        call.write(&mut Writer::new(&mut bytes));
        u64::from(u32::from_le_bytes(bytes)) + 1 == stream
    }
}

/// Whether each function crosses.
static IS_SYNCHRONOUS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread's current function has crossed, in that mode.
    static HAS_CROSSED: Cell<bool> = const { Cell::new(true) };
}

/// A function is called. Where each is to cross, the one before crosses now if it has not.
pub(crate) fn enter() {
    if IS_SYNCHRONOUS.load(Ordering::Relaxed)
        && !HAS_CROSSED.replace(false)
        && let Ok(connection) = connection()
    {
        connection.cross();
    }
}

static CONNECTION: OnceLock<Option<Connection>> = OnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// The connection; it is made by the first call that needs one.
pub(crate) fn connection() -> Result<&'static Connection, Failure> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(Failure::Forked);
    }
    let made = CONNECTION.get_or_init(|| match Connection::open() {
        Ok(connection) => Some(connection),
        Err(reason) => {
            if std::env::var_os(DEBUG).is_some() {
                eprintln!("basalt-cuda: {reason}");
            }
            None
        }
    });
    made.as_ref().ok_or(Failure::NoServer)
}

/// The connection, if one was made.
pub(crate) fn made() -> Option<&'static Connection> {
    CONNECTION.get().and_then(Option::as_ref)
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

impl Connection {
    fn open() -> Result<Self, String> {
        #[allow(
            unsafe_code,
            reason = "that a process has been forked is told by pthread_atfork(3) alone"
        )]
        // SAFETY: 1. the handler is a function that stays; 2. it stores an atomic, which a child of a process with threads may do.
        unsafe {
            libc::pthread_atfork(None, None, Some(forked))
        };
        let device = Device {
            name: [0; 64],
            memory: 0,
            attributes: [0; 160],
            takes_code: false,
            says_addresses: false,
        };
        let mut connection = Self {
            way: None,
            window: None,
            limits: Limits { arena: 0 },
            over: AtomicBool::new(false),
            settled: Settled::default(),
            device,
            sent: AtomicU64::new(0),
            asked: AtomicU64::new(0),
        };
        let mode = std::env::var_os(MODE);
        if mode.as_ref().is_some_and(|mode| mode == "in-process") {
            connection.device = Device {
                name: accel_cuda_null::DEVICE_NAME,
                memory: accel_cuda_null::TOTAL_MEMORY,
                attributes: accel_cuda_null::ATTRIBUTES,
                takes_code: false,
                says_addresses: false,
            };
            return Ok(connection);
        }
        let place = Place::of_environment()?;
        let no_server = |reason: String| {
            format!(
                "no accelerator at {place}: {reason}; {} names the server",
                place.named_by()
            )
        };
        let met = place.meet(1, PATIENCE).map_err(no_server)?;
        let (window, _) = met.window.ok_or("its transport has no memory for large data")?;
        let end = met
            .ends
            .into_iter()
            .next()
            .ok_or("the server gives no place for a thread")?;
        connection.limits = Limits {
            arena: window.geometry().arena(),
        };
        if connection.limits.arena < 4 * REPLY.length {
            return Err(format!(
                "the server's window has {} bytes, and at least {} are needed",
                connection.limits.arena,
                4 * REPLY.length
            ));
        }
        connection.window = Some(window);
        connection.way = Some(Mutex::new(Way {
            end,
            used: REPLY.length,
            scratch: vec![0; MESSAGE].into(),
        }));
        let question = BasaltDeviceInfo {
            device: 0,
            reply: REPLY,
        };
        let told = connection.ask(&question, |reply| {
            (
                reply.name.iter().collect::<Vec<u8>>(),
                reply.total_global_mem,
                reply.attributes.iter().collect::<Vec<_>>(),
                reply.takes_code,
            )
        });
        let (name, memory, attributes, takes_code) = told.map_err(|_| {
            format!("the server at {place} has no CUDA; one with the back end `cuda`, `reference` or `null` has")
        })?;
        connection.device.memory = memory;
        connection.device.takes_code = takes_code != 0;
        connection.device.says_addresses = takes_code == 2;
        for (place, byte) in connection.device.name.iter_mut().zip(name) {
            *place = byte;
        }
        for (place, attribute) in connection.device.attributes.iter_mut().zip(attributes) {
            *place = attribute;
        }
        IS_SYNCHRONOUS.store(mode.is_some_and(|mode| mode == "synchronous"), Ordering::Relaxed);
        Ok(connection)
    }

    /// Whether there is no server, and nobody looks at what is sent.
    pub(crate) fn is_in_process(&self) -> bool {
        self.way.is_none()
    }

    fn lost<T>(&self, result: Result<T, accel_transport::Error>) -> Result<T, Failure> {
        result.map_err(|_| {
            self.over.store(true, Ordering::Release);
            Failure::Gone
        })
    }

    /// A question whose answer nobody needs; what comes of it the next call finds.
    fn cross(&self) {
        if let (Some(way), Ok(())) = (&self.way, self.is_there()) {
            _ = self.ask_nothing(&mut lock(way));
        }
    }

    fn is_there(&self) -> Result<(), Failure> {
        if self.over.load(Ordering::Acquire) {
            Err(Failure::Gone)
        } else {
            Ok(())
        }
    }

    /// A record that nobody waits for. What fails is told by a later one that is waited for.
    pub(crate) fn send<'a, C: Call<'a>>(&self, call: &C) -> Result<(), Failure> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        let Some(way) = &self.way else {
            self.settled.none();
            return Ok(());
        };
        self.is_there()?;
        let mut way = lock(way);
        self.settled.none();
        let record = self.record(&mut way, call, false)?;
        self.lost(way.end.send(&record, FOREVER)).map(drop)
    }

    /// Bytes of the program's in the arena, and the record that takes them from there.
    pub(crate) fn send_data<'a, C: Call<'a>>(&self, bytes: &[u8], call: impl FnOnce(Span) -> C) -> Result<(), Failure> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        let Some(way) = &self.way else {
            self.settled.none();
            return Ok(());
        };
        self.is_there()?;
        let mut way = lock(way);
        self.settled.none();
        let span = self.put(&mut way, bytes)?;
        let record = self.record(&mut way, &call(span), false)?;
        self.lost(way.end.send(&record, FOREVER)).map(drop)
    }

    /// A record whose answer is waited for.
    pub(crate) fn ask<'a, C: Call<'a>, T>(
        &self,
        call: &C,
        take: impl FnOnce(&C::Reply<'_>) -> T,
    ) -> Result<T, Failure> {
        let Some(way) = &self.way else {
            return match self.settled.answers(call) {
                true => Ok(take(&call.failed(0))),
                false => self.answer_here(call, take),
            };
        };
        self.is_there()?;
        let mut way = lock(way);
        if self.settled.answers(call) {
            return Ok(take(&call.failed(0)));
        }
        self.settled.none();
        self.asked.fetch_add(1, Ordering::Relaxed);
        let record = self.record(&mut way, call, true)?;
        let bytes = self.exchange::<C>(&mut way, &record)?;
        drop(way);
        decode(&bytes, self.limits, call, take)
    }

    /// A record that has the server write bytes into the arena when all of a stream is done, which are copied to the program's.
    pub(crate) fn fetch<'a, C: Call<'a>>(
        &self,
        bytes: &mut [u8],
        stream: u32,
        call: impl FnOnce(Span) -> C,
    ) -> Result<(), Failure> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let Some(way) = &self.way else {
            bytes.fill(0);
            self.settled.set(stream);
            return Ok(());
        };
        self.is_there()?;
        let mut way = lock(way);
        self.settled.none();
        let span = self.room(&mut way, bytes.len() as u64)?;
        let call = call(span);
        let record = self.record(&mut way, &call, true)?;
        self.lost(way.end.send_and_want(&record, (span.offset, span.length), FOREVER))?;
        let answer = self.lost(way.end.receive(FOREVER))?;
        self.lost(way.end.take_data(span.offset, span.length, FOREVER))?;
        let encoded = self.encoded::<C>(&Record::from_bytes(answer.to_bytes()))?;
        way.used = REPLY.length;
        decode(&encoded, self.limits, &call, |_| ())?;
        self.settled.set(stream);
        let window = self.window.as_ref().ok_or(Failure::Gone)?;
        let region = window.slice(span.offset, span.length).map_err(|_| Failure::Gone)?;
        region.read(0, bytes).map_err(|_| Failure::Gone)
    }

    /// The largest piece of data that goes at once.
    pub(crate) fn piece(&self) -> usize {
        let piece = self.limits.arena / 4;
        if self.is_in_process() {
            usize::MAX
        } else {
            usize::try_from(piece).unwrap_or(usize::MAX)
        }
    }

    fn exchange<'a, C: Call<'a>>(&self, way: &mut Way, record: &wire::ring::Record) -> Result<Vec<u8>, Failure> {
        self.lost(way.end.send(record, FOREVER))?;
        let answer = self.lost(way.end.receive(FOREVER))?;
        // Rings are in order: all that was put before is done, and nobody needs what lies in the arena.
        way.used = REPLY.length;
        self.encoded::<C>(&Record::from_bytes(answer.to_bytes()))
    }

    /// An answer's bytes.
    fn encoded<'a, C: Call<'a>>(&self, answer: &Record) -> Result<Vec<u8>, Failure> {
        let wrong = || {
            self.over.store(true, Ordering::Release);
            Failure::Gone
        };
        if answer.op() != C::OP {
            return Err(wrong());
        }
        match answer.arguments(self.limits).map_err(|_| wrong())? {
            Arguments::Inline(bytes) => Ok(bytes.to_vec()),
            Arguments::Message(span) => {
                let mut bytes = vec![0; usize::try_from(span.length).map_err(|_| wrong())?];
                let window = self.window.as_ref().ok_or_else(wrong)?;
                let region = window.slice(span.offset, span.length).map_err(|_| wrong())?;
                region.read(0, &mut bytes).map_err(|_| wrong())?;
                Ok(bytes)
            }
        }
    }

    /// The record by which a call crosses.
    fn record<'a, C: Call<'a>>(&self, way: &mut Way, call: &C, waits: bool) -> Result<wire::ring::Record, Failure> {
        if IS_SYNCHRONOUS.load(Ordering::Relaxed) {
            HAS_CROSSED.set(true);
        }
        let mut scratch = std::mem::take(&mut way.scratch);
        let mut writer = Writer::new(&mut scratch);
        call.write(&mut writer);
        let written = writer.finish().map_err(|_| Failure::TooLong);
        let bytes = written.and_then(|length| scratch.get(..length).ok_or(Failure::TooLong));
        let record = bytes.and_then(|bytes| match Record::encoded_call::<C>(bytes, 0, waits) {
            Ok(record) => Ok(record),
            Err(_) => Ok(Record::call_in::<C>(self.put(way, bytes)?, 0, waits)),
        });
        way.scratch = scratch;
        Ok(wire::ring::Record::from_bytes(record?.as_bytes()))
    }

    /// Bytes in the arena, for a record that follows.
    fn put(&self, way: &mut Way, bytes: &[u8]) -> Result<Span, Failure> {
        let span = self.room(way, bytes.len() as u64)?;
        let window = self.window.as_ref().ok_or(Failure::Gone)?;
        let region = window.slice(span.offset, span.length).map_err(|_| Failure::Gone)?;
        region.write(0, bytes).map_err(|_| Failure::Gone)?;
        self.lost(way.end.send_data(span.offset, span.length, FOREVER))?;
        Ok(span)
    }

    /// A question that changes nothing.
    fn ask_nothing(&self, way: &mut Way) -> Result<(), Failure> {
        let record = Record::call(&CudaMemGetInfo {}, 0, true).map_err(|_| Failure::TooLong)?;
        self.exchange::<CudaMemGetInfo>(way, &wire::ring::Record::from_bytes(record.as_bytes()))
            .map(drop)
    }

    /// Room in the arena; where there is none, a question is asked whose answer says that all before it is done.
    fn room(&self, way: &mut Way, length: u64) -> Result<Span, Failure> {
        if length > self.limits.arena / 2 {
            return Err(Failure::TooLong);
        }
        if way.used + length > self.limits.arena {
            self.ask_nothing(way)?;
        }
        let span = Span {
            offset: way.used,
            length,
        };
        way.used = (way.used + length).next_multiple_of(64);
        Ok(span)
    }

    /// The answer of the back end `null`.
    fn answer_here<'a, C: Call<'a>, T>(&self, call: &C, take: impl FnOnce(&C::Reply<'_>) -> T) -> Result<T, Failure> {
        self.settled.none();
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut bytes = vec![0; MESSAGE];
        let mut writer = Writer::new(&mut bytes);
        call.write(&mut writer);
        let length = writer.finish().map_err(|_| Failure::TooLong)?;
        let limits = Limits { arena: REPLY.length };
        let encoded = bytes.get(..length).unwrap_or_default();
        let decoded = accel_proto::cuda::AnyCall::decode(C::OP, encoded, limits).map_err(|_| Failure::TooLong)?;
        let mut answered = vec![0; MESSAGE];
        let mut writer = Writer::new(&mut answered);
        accel_cuda_null::answer(&decoded, 0, self.device.memory).write(&mut writer);
        let length = writer.finish().map_err(|_| Failure::TooLong)?;
        decode(answered.get(..length).unwrap_or_default(), limits, call, take)
    }
}

/// Where in the arena a long answer goes.
pub(crate) fn reply_place() -> Span {
    REPLY
}

/// What an answer says, if it is one of success.
fn decode<'a, C: Call<'a>, T>(
    bytes: &[u8],
    limits: Limits,
    call: &C,
    take: impl FnOnce(&C::Reply<'_>) -> T,
) -> Result<T, Failure> {
    let status = bytes.first_chunk().map_or(i32::MAX, |bytes| i32::from_le_bytes(*bytes));
    if status != 0 {
        return Err(Failure::Code(status));
    }
    let mut reader = Reader::new(bytes, limits);
    let reply = <C::Reply<'_> as Reply<'_, C>>::read(&mut reader, call);
    let reply = reply
        .and_then(|reply| reader.finish().map(|()| reply))
        .map_err(|_| Failure::Gone)?;
    Ok(take(&reply))
}
