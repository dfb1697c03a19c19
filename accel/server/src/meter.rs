//! What commands of a tenant's clients take of the device, and whether another one may go there now.
//!
//! ```text
//!   a command ── enter: credit, room on the device ──▶ the back end has it ── leave: in flight ──▶ complete ── its time is known
//! ```
//!
//! Each command has an event, whether the client asks for one or not, and each queue measures times. Nobody waits for events: they are looked
//! at when the next command comes, after calls that wait, and every other millisecond by a thread while there is an arbiter. Knows no call.
#![allow(unsafe_code, reason = "asks functions of a C API")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use accel_arbiter::{Gate, Refusal};

use crate::api::Code;
use crate::objects::Held;

/// Numbers of the API (cl.h).
const EVENT_COMMAND_EXECUTION_STATUS: u32 = 0x11d3;
const PROFILING_COMMAND_START: u32 = 0x1282;
const PROFILING_COMMAND_END: u32 = 0x1283;
/// A command that waits for others, or that the queue has not handed on.
const QUEUED: i32 = 3;

/// Commands in flight of a tenant, at most: each holds memory of the back end's.
const MOST: usize = 4096;

/// The same where an arbiter bounds the time that they take, too.
const SHARED: usize = 256;

/// How often the thread looks.
const TICK: Duration = Duration::from_millis(2);

/// So often it looks without work before it sleeps.
const PATIENCE: u32 = 25;

/// How long one that waits for credit sleeps at a time, if there are no news before.
const NAP: Duration = Duration::from_millis(20);

/// The same for one that waits for the device.
const DOZE: Duration = Duration::from_micros(50);

/// What a command is taken for that is like none before, in nanoseconds.
const UNKNOWN: u64 = 1_000_000;

/// What a command is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// A kernel.
    Launch,
    /// Bytes that move.
    Transfer,
}

impl Work {
    /// For generated code: a launch.
    pub(crate) const LAUNCH: Option<Self> = Some(Self::Launch);
    /// For generated code: a transfer.
    pub(crate) const TRANSFER: Option<Self> = Some(Self::Transfer);
    /// For generated code: a command that takes no time of the device.
    pub(crate) const NONE: Option<Self> = None;
}

/// Time of a tenant's commands.
#[derive(Debug)]
pub(crate) struct Meter {
    gate: Option<Gate>,
    /// Commands in flight, at most.
    most: usize,
    flights: Mutex<Flights>,
    /// How many are in flight, and about how many nanoseconds they take.
    count: AtomicUsize,
    pending: AtomicU64,
    /// Commands that are about to be.
    entered: AtomicUsize,
    /// What the arbiter was told.
    busy: AtomicBool,
    used: AtomicU64,
    done: [AtomicU64; 2],
    held_up: AtomicU64,
    woken: Condvar,
}

/// Commands in flight, in the order in which they came.
#[derive(Debug, Default)]
struct Flights {
    list: VecDeque<Flight>,
    /// What launches and transfers take of late, in nanoseconds.
    means: [Option<u64>; 2],
    /// When the last one was found complete.
    last: Option<Instant>,
}

#[derive(Debug)]
struct Flight {
    event: Held,
    work: Work,
    /// Whose it is.
    client: usize,
    begun: Instant,
    /// What it was taken for, in nanoseconds.
    estimate: u64,
}

impl Meter {
    /// With an arbiter, or without; no more commands in flight than that.
    pub(crate) fn new(gate: Option<Gate>, most: Option<usize>) -> io::Result<Arc<Self>> {
        let watches = gate.is_some();
        let meter = Arc::new(Self {
            gate,
            most: most.unwrap_or(if watches { SHARED } else { MOST }).clamp(1, MOST),
            flights: Mutex::default(),
            count: AtomicUsize::new(0),
            pending: AtomicU64::new(0),
            entered: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            used: AtomicU64::new(0),
            done: Default::default(),
            held_up: AtomicU64::new(0),
            woken: Condvar::new(),
        });
        if watches {
            let weak = Arc::downgrade(&meter);
            thread::Builder::new()
                .name("accel-meter".into())
                .spawn(move || watch(&weak))?;
        }
        Ok(meter)
    }

    /// Nanoseconds of the device that were used.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Commands of a kind that are complete.
    pub(crate) fn done(&self, work: Work) -> u64 {
        self.done[work as usize].load(Ordering::Relaxed)
    }

    /// Commands in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Nanoseconds that commands had to wait for credit before they could go to the device.
    pub(crate) fn held_up(&self) -> u64 {
        self.held_up.load(Ordering::Relaxed)
    }

    /// Whether there is an arbiter that answers.
    pub(crate) fn is_shared(&self) -> bool {
        self.gate.as_ref().is_some_and(Gate::is_linked)
    }

    /// A command is to go to the device. Returns when it may, or when nobody wants that any more.
    pub(crate) fn enter(&self, is_over: impl Fn() -> bool) -> Result<(), Code> {
        self.entered.fetch_add(1, Ordering::SeqCst);
        if self.gate.is_some() && !self.busy.load(Ordering::SeqCst) {
            self.tell_busy();
        }
        if self.check().is_ok() {
            return Ok(());
        }
        let outcome = self.wait(is_over);
        if outcome.is_err() {
            self.entered.fetch_sub(1, Ordering::SeqCst);
        }
        outcome
    }

    fn check(&self) -> Result<(), Refusal> {
        let on_device = match self.count.load(Ordering::SeqCst) {
            0 => 0,
            count if count >= self.most => return Err(Refusal::OnDevice),
            _ => self.pending.load(Ordering::SeqCst) / 1000,
        };
        self.gate.as_ref().map_or(Ok(()), |gate| gate.check(on_device))
    }

    fn wait(&self, is_over: impl Fn() -> bool) -> Result<(), Code> {
        let outcome = loop {
            let seen = self.gate.as_ref().map_or(0, Gate::news);
            let runs = self.look();
            match self.check() {
                Ok(()) => break Ok(()),
                Err(_) if is_over() => break Ok(()),
                Err(Refusal::Credit) => {
                    if let Some(gate) = &self.gate {
                        let begun = Instant::now();
                        gate.wait(seen, NAP);
                        let waited = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
                        self.held_up.fetch_add(waited, Ordering::Relaxed);
                    }
                }
                Err(Refusal::OnDevice) if runs => thread::sleep(DOZE),
                // All of them wait for what only this client's next call may bring about, such as an event that it sets.
                Err(Refusal::OnDevice) if self.in_flight() < MOST => break Ok(()),
                Err(Refusal::OnDevice) => break Err(Code::OUT_OF_RESOURCES),
            }
        };
        if let Some(gate) = &self.gate {
            gate.end_wait();
        }
        outcome
    }

    /// A command that has entered is in flight, if it has an event; or there is none.
    pub(crate) fn leave(&self, work: Work, event: Option<Held>, client: usize) {
        let mut flights = self.flights();
        if let Some(event) = event {
            let estimate = flights.means[work as usize].unwrap_or(UNKNOWN);
            flights.list.push_back(Flight {
                event,
                work,
                client,
                begun: Instant::now(),
                estimate,
            });
            self.pending.fetch_add(estimate, Ordering::SeqCst);
            self.count.store(flights.list.len(), Ordering::SeqCst);
        }
        self.entered.fetch_sub(1, Ordering::SeqCst);
        let done = self.take_first(&mut flights);
        drop(flights);
        drop(done);
    }

    /// A command that has entered is complete, and had the device for so long. Whether there is more, the thread sees.
    pub(crate) fn leave_complete(&self, work: Work, cost: Duration) {
        let cost = u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX);
        let flights = self.flights();
        self.used.fetch_add(cost, Ordering::Relaxed);
        self.done[work as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(gate) = &self.gate {
            gate.spend(cost);
        }
        self.entered.fetch_sub(1, Ordering::SeqCst);
        drop(flights);
    }

    /// Looks at those that came first.
    pub(crate) fn look_at_first(&self) {
        if self.in_flight() == 0 {
            return;
        }
        let mut flights = self.flights();
        let done = self.take_first(&mut flights);
        drop(flights);
        drop(done);
    }

    /// Looks at all. True if one of them is on the device, or may be.
    fn look(&self) -> bool {
        let mut flights = self.flights();
        let mut done = self.take_first(&mut flights);
        let mut runs = false;
        let mut index = 0;
        while let Some(flight) = flights.list.get(index) {
            match status(&flight.event) {
                Some(state) if state <= 0 => done.extend(self.take(&mut flights, index)),
                state => {
                    runs |= state.is_none_or(|state| state < QUEUED);
                    index += 1;
                }
            }
        }
        self.tell_idle(&flights, runs);
        drop(flights);
        drop(done);
        runs
    }

    /// A client is gone, and all of its commands are complete.
    pub(crate) fn forget(&self, client: usize) {
        let mut flights = self.flights();
        let mut done = Vec::new();
        while let Some(index) = flights.list.iter().position(|flight| flight.client == client) {
            done.extend(self.take(&mut flights, index));
        }
        self.tell_idle(&flights, !flights.list.is_empty());
        drop(flights);
        drop(done);
    }

    fn take_first(&self, flights: &mut Flights) -> Vec<Held> {
        let mut done = Vec::new();
        while let Some(flight) = flights.list.front() {
            if status(&flight.event).is_none_or(|state| state > 0) {
                break;
            }
            done.extend(self.take(flights, 0));
        }
        if flights.list.is_empty() {
            self.tell_idle(flights, false);
        }
        done
    }

    /// One is complete: its event, to be released when nothing is locked.
    fn take(&self, flights: &mut Flights, index: usize) -> Option<Held> {
        let flight = flights.list.remove(index)?;
        self.count.store(flights.list.len(), Ordering::SeqCst);
        self.pending.fetch_sub(flight.estimate, Ordering::SeqCst);
        let now = Instant::now();
        // Not measured, it is taken to have had the device since the one before it, or since it came.
        let since = flights.last.map_or(flight.begun, |last| last.max(flight.begun));
        let unmeasured = || u64::try_from(now.duration_since(since).as_nanos()).unwrap_or(u64::MAX);
        let cost = measured(&flight.event).unwrap_or_else(unmeasured);
        flights.last = Some(now);
        let mean = &mut flights.means[flight.work as usize];
        *mean = Some(mean.map_or(cost, |mean| (mean * 7).saturating_add(cost) / 8));
        self.used.fetch_add(cost, Ordering::Relaxed);
        self.done[flight.work as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(gate) = &self.gate {
            gate.spend(cost);
        }
        Some(flight.event)
    }

    /// There is work. One look of the thread's will see when there is none any more.
    fn tell_busy(&self) {
        let flights = self.flights();
        if !self.busy.swap(true, Ordering::SeqCst)
            && let Some(gate) = &self.gate
        {
            gate.set_busy(true);
            self.woken.notify_all();
        }
        drop(flights);
    }

    /// There is no work, unless somebody has entered meanwhile.
    fn tell_idle(&self, _: &Flights, runs: bool) {
        let Some(gate) = &self.gate else { return };
        let idle = !runs && self.entered.load(Ordering::SeqCst) == 0;
        if idle && self.busy.swap(false, Ordering::SeqCst) {
            if self.entered.load(Ordering::SeqCst) == 0 {
                gate.set_busy(false);
            } else {
                self.busy.store(true, Ordering::SeqCst);
            }
        } else if runs && !self.busy.swap(true, Ordering::SeqCst) {
            // What waited for an event goes on.
            gate.set_busy(true);
        }
    }

    fn flights(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks at what is in flight while there is something, until nobody has the meter any more.
fn watch(meter: &Weak<Meter>) {
    let mut quiet = 0;
    while let Some(meter) = meter.upgrade() {
        meter.look();
        let is_busy = meter.in_flight() > 0 || meter.busy.load(Ordering::SeqCst);
        quiet = if is_busy { 0 } else { quiet + 1 };
        if quiet >= PATIENCE {
            // Whoever has work again wakes this; the end of the meter is seen a little later.
            drop(meter.woken.wait_timeout(meter.flights(), TICK * 50));
        }
        drop(meter);
        thread::sleep(TICK);
    }
}

/// Where a command is: 0 is complete, below it has failed.
fn status(event: &Held) -> Option<i32> {
    let mut state = 0_i32;
    let at = (&raw mut state).cast::<c_void>();
    let function = event.backend().api.clGetEventInfo().ok()?;
    // SAFETY: 1. the event is held; 2. the place has the four bytes that are said.
    let asked = unsafe { function(event.raw(), EVENT_COMMAND_EXECUTION_STATUS, 4, at, std::ptr::null_mut()) };
    // One that cannot be asked is not waited for.
    Some(if asked == 0 { state } else { asked })
}

/// How long a complete command had the device, in nanoseconds, if that was measured.
fn measured(event: &Held) -> Option<u64> {
    let function = event.backend().api.clGetEventProfilingInfo().ok()?;
    let ask = |name| {
        let mut time = 0_u64;
        let at = (&raw mut time).cast::<c_void>();
        // SAFETY: 1. the event is held; 2. the place has the eight bytes that are said.
        let asked = unsafe { function(event.raw(), name, 8, at, std::ptr::null_mut()) };
        (asked == 0).then_some(time)
    };
    ask(PROFILING_COMMAND_END)?.checked_sub(ask(PROFILING_COMMAND_START)?)
}

/// Whether a back end is asked to measure: what a queue is made with then.
pub(crate) const QUEUE_PROFILING_ENABLE: u64 = 1 << 1;
