//! A device that takes time and does nothing else: for measuring how time is divided, on machines without an accelerator.
//!
//! A kernel takes as many microseconds as its first global size says, other commands take none. All back ends of this kind in a process have
//! one device, which does one command at a time, in the order in which they came, as a device does that cannot do two tenants' kernels at
//! once. What is not time is the null back end's.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::api::{Api, P};

/// The device of all back ends.
static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    // Without its thread nothing is ever complete; whoever measures by it sees that at once.
    drop(thread::Builder::new().name("accel-simulated".into()).spawn(run));
    Device::default()
});

/// Numbers of the API (cl.h).
const EVENT_COMMAND_EXECUTION_STATUS: u32 = 0x11d3;
const PROFILING_COMMAND_START: u32 = 0x1282;
const PROFILING_COMMAND_END: u32 = 0x1283;
const INVALID_VALUE: i32 = -30;

#[derive(Debug, Default)]
struct Device {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: usize,
    commands: HashMap<usize, Command>,
    /// Those that are not complete, in their order.
    waiting: VecDeque<usize>,
}

#[derive(Debug)]
struct Command {
    queue: usize,
    takes: Duration,
    /// When it came, on the device's clock.
    came: u64,
    /// When it began and ended, in nanoseconds of the device's clock.
    times: [u64; 2],
    /// As the API has it: submitted, running, complete.
    status: i32,
    /// References to its event.
    is_named: bool,
}

impl Device {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// The device's clock, in nanoseconds.
fn now() -> u64 {
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(BEGUN.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The device's life. How long a command takes is what was said, however late this host's scheduler lets the thread run.
fn run() {
    let mut free = 0;
    loop {
        let mut state = DEVICE.state();
        let Some(number) = state.waiting.front().copied() else {
            drop(DEVICE.wait(state));
            continue;
        };
        let Some(command) = state.commands.get_mut(&number) else {
            state.waiting.pop_front();
            continue;
        };
        let begins = command.came.max(free);
        let ends = begins.saturating_add(u64::try_from(command.takes.as_nanos()).unwrap_or(u64::MAX));
        (command.status, command.times) = (1, [begins, ends]);
        free = ends;
        drop(state);
        let left = ends.saturating_sub(now());
        if left > 0 {
            thread::sleep(Duration::from_nanos(left));
        }
        let mut state = DEVICE.state();
        state.waiting.pop_front();
        if let Some(command) = state.commands.get_mut(&number) {
            command.status = 0;
            if !command.is_named {
                state.commands.remove(&number);
            }
        }
        DEVICE.changed.notify_all();
    }
}

/// The table: null's, but for these.
pub(crate) fn api() -> Api {
    let own: [(&CStr, *const ()); 7] = [
        (c"clEnqueueNDRangeKernel", enqueue_kernel as *const ()),
        (c"clEnqueueMarkerWithWaitList", enqueue_marker as *const ()),
        (c"clFinish", finish as *const ()),
        (c"clWaitForEvents", wait_for_events as *const ()),
        (c"clGetEventInfo", event_info as *const ()),
        (c"clGetEventProfilingInfo", event_times as *const ()),
        (c"clReleaseEvent", release_event as *const ()),
    ];
    let find = |name: &CStr| {
        let found = own.iter().find(|(known, _)| *known == name);
        let address = found
            .map(|(_, address)| *address)
            .or_else(|| crate::null::function(name));
        address.and_then(|address| NonNull::new(address.cast_mut().cast::<c_void>()))
    };
    // SAFETY: 1. null's are generated from the table's list; those here have the same types, which are the specification's.
    unsafe { Api::find(&find) }.0
}

fn enqueue(queue: P, takes: Duration, event: P) -> i32 {
    let mut state = DEVICE.state();
    state.next += 1;
    let number = state.next * 16;
    let command = Command {
        queue: queue.addr(),
        takes,
        came: now(),
        times: [0; 2],
        status: 2,
        is_named: !event.is_null(),
    };
    state.commands.insert(number, command);
    state.waiting.push_back(number);
    drop(state);
    DEVICE.changed.notify_all();
    if !event.is_null() {
        // SAFETY: 1. not NULL, so that it is the place of an event.
        unsafe {
            event
                .cast::<P>()
                .write_unaligned(std::ptr::without_provenance_mut(number))
        };
    }
    0
}

#[allow(clippy::too_many_arguments, reason = "the function is C's")]
unsafe extern "C" fn enqueue_kernel(
    queue: P,
    _kernel: P,
    dimensions: u32,
    _offset: P,
    size: P,
    _local: P,
    _count: u32,
    _waits: P,
    event: P,
) -> i32 {
    if dimensions == 0 || size.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: 1. there are as many sizes as dimensions, which is one at least.
    let takes = unsafe { size.cast::<u64>().read_unaligned() };
    enqueue(queue, Duration::from_micros(takes), event)
}

unsafe extern "C" fn enqueue_marker(queue: P, _count: u32, _waits: P, event: P) -> i32 {
    enqueue(queue, Duration::ZERO, event)
}

unsafe extern "C" fn finish(queue: P) -> i32 {
    let mut state = DEVICE.state();
    while state
        .commands
        .values()
        .any(|command| command.queue == queue.addr() && command.status > 0)
    {
        state = DEVICE.wait(state);
    }
    0
}

unsafe extern "C" fn wait_for_events(count: u32, events: P) -> i32 {
    let mut state = DEVICE.state();
    for index in 0..count as usize {
        // SAFETY: 1. there are as many events as it is said.
        let event = unsafe { events.cast::<P>().wrapping_add(index).read_unaligned() };
        while state
            .commands
            .get(&event.addr())
            .is_some_and(|command| command.status > 0)
        {
            state = DEVICE.wait(state);
        }
    }
    0
}

/// Writes a number of the device's, if it is asked for.
///
/// # Safety
///
/// Places are NULL, or `at` has `size` bytes and `size_at` eight.
unsafe fn answer(bytes: &[u8], size: u64, at: P, size_at: P) -> i32 {
    if !at.is_null() {
        if size < bytes.len() as u64 {
            return INVALID_VALUE;
        }
        // SAFETY: 1. the place has as many bytes, as was compared.
        unsafe { at.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
    if !size_at.is_null() {
        // SAFETY: 1. the place has room for a number of 64 bits.
        unsafe { size_at.cast::<u64>().write_unaligned(bytes.len() as u64) };
    }
    0
}

unsafe extern "C" fn event_info(event: P, name: u32, size: u64, at: P, size_at: P) -> i32 {
    let state = DEVICE.state();
    let status = state.commands.get(&event.addr()).map_or(0, |command| command.status);
    drop(state);
    let value = if name == EVENT_COMMAND_EXECUTION_STATUS {
        status
    } else {
        0
    };
    // SAFETY: 1. the caller's places.
    unsafe { answer(&value.to_ne_bytes(), size, at, size_at) }
}

unsafe extern "C" fn event_times(event: P, name: u32, size: u64, at: P, size_at: P) -> i32 {
    let state = DEVICE.state();
    let times = state
        .commands
        .get(&event.addr())
        .map_or([0; 2], |command| command.times);
    drop(state);
    let time = match name {
        PROFILING_COMMAND_START => times[0],
        PROFILING_COMMAND_END => times[1],
        _ => 0,
    };
    // SAFETY: 1. the caller's places.
    unsafe { answer(&time.to_ne_bytes(), size, at, size_at) }
}

unsafe extern "C" fn release_event(event: P) -> i32 {
    let mut state = DEVICE.state();
    if let Some(command) = state.commands.get_mut(&event.addr()) {
        command.is_named = false;
        if command.status == 0 {
            state.commands.remove(&event.addr());
        }
    }
    0
}
