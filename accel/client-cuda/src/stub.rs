//! What generated functions are made of: counting, records, answers, and the codes of each library.
//!
//! Knows no function by name.
#![allow(unsafe_code, reason = "reads and writes where a program says")]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::env;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use accel_proto::{Call, List, Plain, Writer};

use crate::abi::P;
use crate::connection::{self, DEBUG, connection, made};
use crate::generated::NAMES;
use crate::lock;

/// Why a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// There is no server, or none with CUDA.
    NoServer,
    /// This is a child of the process that has the connection.
    Forked,
    /// The server is gone, or has broken the protocol.
    Gone,
    /// It does not fit into a message.
    TooLong,
    /// The server's code.
    Code(i32),
}

static CALLS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];
static NOT_SERVED: AtomicU64 = AtomicU64::new(0);

/// What a call says behind its object, by call and object.
type Said = HashMap<(u16, u32), [u8; 24]>;

static LAST: Mutex<Option<Said>> = Mutex::new(None);

thread_local! {
    static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
}

/// A function is called.
pub(crate) fn enter(index: usize) {
    connection::enter();
    if let Some(count) = CALLS.get(index) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// A function is called that nobody serves: it is counted, told once to who wants to know, and answers its library's code.
pub(crate) fn not_served(index: usize, value: i64) -> i64 {
    static TOLD: [AtomicBool; NAMES.len()] = [const { AtomicBool::new(false) }; NAMES.len()];
    enter(index);
    NOT_SERVED.fetch_add(1, Ordering::Relaxed);
    let name = NAMES.get(index).copied().unwrap_or_default();
    let is_new = TOLD.get(index).is_some_and(|told| !told.swap(true, Ordering::Relaxed));
    if is_new && env::var_os(DEBUG).is_some() {
        eprintln!("basalt-cuda: {name} is not served (docs/accel-cuda-calls.md); it answers {value}");
    }
    if name.starts_with("cuda") {
        told(i32::try_from(value).unwrap_or_default());
    }
    value
}

/// Why something is refused, said once each to who wants to know.
pub(crate) fn say(text: &str) {
    /// A program that finds ever new reasons fills no memory.
    const MOST: usize = 256;
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    if env::var_os(DEBUG).is_none() {
        return;
    }
    let mut said = lock(&SAID);
    if said.len() < MOST && !said.iter().any(|known| known == text) {
        eprintln!("basalt-cuda: {text}");
        said.push(text.to_owned());
    }
}

/// For tests and measurements: functions called, records without an answer, records with one, and calls that are not served, into four
/// numbers; with a place for them, the calls of each function, in the order of docs/accel-cuda-calls.md's table. How many functions there are
/// is returned.
#[unsafe(no_mangle)]
unsafe extern "C" fn basalt_cuda_counters(counts: *mut u64, each: *mut u64, room: usize) -> usize {
    let calls = || CALLS.iter().map(|count| count.load(Ordering::Relaxed));
    let (sent, asked) = made().map_or((0, 0), |connection| {
        (
            connection.sent.load(Ordering::Relaxed),
            connection.asked.load(Ordering::Relaxed),
        )
    });
    let all = [calls().sum(), sent, asked, NOT_SERVED.load(Ordering::Relaxed)];
    if !counts.is_null() {
        for (place, count) in all.into_iter().enumerate() {
            // SAFETY: 1. the caller has room for four.
            unsafe { put(counts.wrapping_add(place), count) };
        }
    }
    if !each.is_null() {
        for (place, count) in calls().take(room).enumerate() {
            // SAFETY: 1. the caller has room for so many.
            unsafe { put(each.wrapping_add(place), count) };
        }
    }
    NAMES.len()
}

/// A code of the runtime's, kept as the thread's last error if it is one.
pub(crate) fn told(code: i32) -> i32 {
    if code != 0 {
        LAST_ERROR.set(code);
    }
    code
}

/// The thread's last error.
pub(crate) fn last_error() -> i32 {
    LAST_ERROR.get()
}

/// The same, and forgets it.
pub(crate) fn take_last_error() -> i32 {
    LAST_ERROR.replace(0)
}

/// A name that no object of the process has had.
pub(crate) fn name() -> u32 {
    /// The small ones are those of streams that are not made, and kernels' begin above.
    static NEXT: AtomicU32 = AtomicU32::new(1 << 10);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Puts a record and goes on.
pub(crate) fn send<'a, C: Call<'a>>(call: &C) -> Result<(), Failure> {
    connection()?.send(call)
}

/// The same, unless the last one of its kind for its object was the same.
pub(crate) fn send_once<'a, C: Call<'a>>(call: &C) -> Result<(), Failure> {
    let mut bytes = [0; 28];
    let mut writer = Writer::new(&mut bytes);
    call.write(&mut writer);
    if writer.finish().is_err() {
        return send(call);
    }
    let object = u32::get(&bytes);
    let mut arguments = [0; 24];
    arguments.copy_from_slice(&bytes[4..]);
    // The lock is held until the record is put, so that what is kept is what was put last.
    let mut last = lock(&LAST);
    let last = last.get_or_insert_default();
    if last.get(&(C::OP, object)) == Some(&arguments) {
        return Ok(());
    }
    connection()?.send(call)?;
    last.insert((C::OP, object), arguments);
    Ok(())
}

/// What was said last by [`send_once`] of a call's kind for an object: its arguments behind the object, as they travel.
pub(crate) fn said(op: u16, object: u32) -> Option<[u8; 24]> {
    lock(&LAST).as_ref()?.get(&(op, object)).copied()
}

/// Waits for an answer and has it taken; one that is `kept` is asked for once.
pub(crate) fn ask<'a, C: Call<'a>>(call: &C, kept: bool, take: impl FnOnce(&C::Reply<'_>)) -> Result<(), Failure> {
    /// Answers that succeeded, by the bytes of their calls.
    static KEPT: Mutex<Option<HashMap<Vec<u8>, Vec<u8>>>> = Mutex::new(None);
    /// A program that asks for ever new ones fills no memory.
    const MOST: usize = 1 << 16;
    let connection = connection()?;
    if !kept {
        return connection.ask(call, take);
    }
    let mut key = encoded(|writer| call.write(writer))?;
    key.extend(C::OP.to_le_bytes());
    if let Some(bytes) = lock(&KEPT).as_ref().and_then(|kept| kept.get(&key)) {
        let limits = accel_proto::Limits { arena: 0 };
        let mut reader = accel_proto::Reader::new(bytes, limits);
        let reply = <C::Reply<'_> as accel_proto::Reply<'_, C>>::read(&mut reader, call).map_err(|_| Failure::Gone)?;
        take(&reply);
        return Ok(());
    }
    let answer = connection.ask(call, |reply| {
        take(reply);
        encoded(|writer| accel_proto::Reply::<C>::write(reply, writer))
    })??;
    let mut kept = lock(&KEPT);
    let kept = kept.get_or_insert_default();
    if kept.len() < MOST {
        kept.insert(key, answer);
    }
    Ok(())
}

/// The bytes of a call or an answer.
fn encoded(write: impl FnOnce(&mut Writer<'_>)) -> Result<Vec<u8>, Failure> {
    thread_local! {
        static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; accel_proto::MESSAGE].into());
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let mut writer = Writer::new(scratch);
        write(&mut writer);
        let length = writer.finish().map_err(|_| Failure::TooLong)?;
        Ok(scratch.get(..length).unwrap_or_default().to_vec())
    })
}

pub(crate) use connection::reply_place;

/// Writes a value where a program has a place for it.
///
/// # Safety
///
/// The place is NULL or has room.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: 1. the caller's place has room.
        unsafe { place.write_unaligned(value) };
    }
}

/// The same of a list.
///
/// # Safety
///
/// The place is NULL or has room for all of them.
pub(crate) unsafe fn put_all<T: Plain>(place: *mut T, values: List<'_, T>) {
    if !place.is_null() {
        for (index, value) in values.iter().enumerate() {
            // SAFETY: 1. the caller's place has room for all.
            unsafe { put(place.wrapping_add(index), value) };
        }
    }
}

/// Something of a program's memory, for as long as the call that has its address; nothing at NULL.
///
/// # Safety
///
/// There are so many elements at the address, or it is NULL.
pub(crate) unsafe fn memory<T: Copy, Q: Pointer>(place: &Q, count: usize) -> &[T] {
    let address = place.address().cast::<T>();
    if address.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: 1. the caller says that they are there; C's lists of numbers are aligned.
    unsafe { std::slice::from_raw_parts(address, count) }
}

/// A pointer of C's.
pub(crate) trait Pointer {
    fn address(&self) -> *const c_void;
}

impl<T> Pointer for *const T {
    fn address(&self) -> *const c_void {
        self.cast()
    }
}

impl<T> Pointer for *mut T {
    fn address(&self) -> *const c_void {
        self.cast_const().cast()
    }
}

/// What the size of a call's scalars follows from.
pub(crate) trait Scalar {
    /// How many bytes each has.
    fn bytes(&self) -> usize;
}

/// `cublasComputeType_t`.
impl Scalar for i32 {
    fn bytes(&self) -> usize {
        match self {
            64 | 65 => 2,
            70 | 71 => 8,
            _ => 4,
        }
    }
}

/// A descriptor, whose first words say the data type (`cudaDataType`, `cudnnDataType_t`).
impl Scalar for P {
    fn bytes(&self) -> usize {
        crate::descriptor::scalar(*self)
    }
}

/// Each library's code for what happened.
pub(crate) mod status {
    use super::{Failure, made};

    pub(crate) fn cudart(result: Result<(), Failure>) -> i32 {
        match result {
            Ok(()) => 0,
            Err(Failure::Code(code)) => code,
            // cudaErrorNoDevice, cudaErrorInitializationError, cudaErrorDevicesUnavailable, cudaErrorInvalidValue
            Err(Failure::NoServer) => 100,
            Err(Failure::Forked) => 3,
            Err(Failure::Gone) => 46,
            Err(Failure::TooLong) => 1,
        }
    }

    /// What the server says of whatever it does not serve, of whichever library: `cudaErrorNotSupported`.
    const NOT_SUPPORTED: i32 = 801;

    /// CUBLAS_STATUS_NOT_INITIALIZED, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_EXECUTION_FAILED, CUBLAS_STATUS_NOT_SUPPORTED
    pub(crate) fn cublas(result: Result<(), Failure>) -> i32 {
        of(result, [1, 7, 13, 15])
    }

    /// CURAND_STATUS_INITIALIZATION_FAILED, CURAND_STATUS_OUT_OF_RANGE, CURAND_STATUS_LAUNCH_FAILURE, CURAND_STATUS_TYPE_ERROR
    pub(crate) fn curand(result: Result<(), Failure>) -> i32 {
        of(result, [203, 104, 201, 103])
    }

    pub(crate) use cublas as cublas_lt;

    /// CUDNN_STATUS_NOT_INITIALIZED, CUDNN_STATUS_BAD_PARAM, CUDNN_STATUS_EXECUTION_FAILED, CUDNN_STATUS_NOT_SUPPORTED
    pub(crate) fn cudnn(result: Result<(), Failure>) -> i32 {
        of(result, [1001, 2000, 5000, 3000])
    }

    fn of(result: Result<(), Failure>, [no_server, too_long, failed, not_served]: [i32; 4]) -> i32 {
        match result {
            Ok(()) => 0,
            Err(Failure::NoServer | Failure::Forked) => no_server,
            Err(Failure::TooLong) => too_long,
            Err(Failure::Code(NOT_SUPPORTED)) => not_served,
            // There the library itself has answered.
            Err(Failure::Code(code)) if made().is_some_and(|connection| connection.device.says_addresses) => code,
            Err(Failure::Gone | Failure::Code(_)) => failed,
        }
    }
}
