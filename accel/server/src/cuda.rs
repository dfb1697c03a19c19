//! CUDA's calls: a client's objects and memory, its quota, its time, and replies, on the back ends that have CUDA.
//!
//! What calls mean is `accel/cuda-null`'s, `accel/cuda-reference`'s and `accel/cuda-library`'s; this knows the client that they are from, and
//! not how they travel. Other back ends refuse them, as a client learns when it connects.

use std::sync::PoisonError;
use std::time::Duration;

use accel_cuda_library as library;
use accel_cuda_null as null;
use accel_cuda_null::Quota;
use accel_cuda_reference as reference;
use accel_proto::cuda::AnyCall;
use accel_proto::{Limits, Memory, Object, Refused, Span};
use accel_window::Window;
use rustix::time::{ClockId, clock_gettime};
use wire::ring::Region;

use crate::api::Code;
use crate::meter::Work;
use crate::quota::Charge;
use crate::saved::Refusal;
use crate::session::{Client, Session};
use crate::stats::name_of;

/// Numbers of CUDA's calls.
pub(crate) const NUMBERS: std::ops::Range<u16> = 0x1000..0x4000;
/// `cudaErrorNotSupported`.
const NOT_SUPPORTED: i32 = 801;
/// So many failures of a client are told where warnings are; a client could fill a disk with more.
const MOST_LOGGED: u32 = 8;
/// Why a client that has called CUDA cannot be saved.
const UNSAVED: &str = "objects of CUDA that this back end does not tell";

/// What a back end does with CUDA's calls.
#[derive(Debug)]
pub(crate) enum Support {
    /// Refuses them.
    Nothing,
    /// Answers them, and computes nothing.
    Null,
    /// Computes them on the CPU.
    Reference,
    /// Has the real libraries carry them out.
    Library(Box<library::Libraries>),
}

/// What a client has of CUDA.
#[derive(Debug)]
pub(crate) struct Cuda {
    device: Device,
    charge: Charge,
    /// How many failures a log has had.
    logged: u32,
}

#[derive(Debug)]
enum Device {
    Null(null::State),
    Reference(Box<reference::State>),
    Library(Box<library::State>),
}

impl Quota for Charge {
    fn charge(&mut self, bytes: u64) -> bool {
        self.bytes()
            .checked_add(bytes)
            .is_some_and(|all| self.raise(all).is_ok())
    }

    fn give_back(&mut self, bytes: u64) {
        self.lower(bytes);
    }
}

/// A client for the time of one of its calls: what it may have, and its arena.
struct Caller<'c> {
    charge: &'c mut Charge,
    window: Option<&'c Window>,
}

impl Quota for Caller<'_> {
    fn charge(&mut self, bytes: u64) -> bool {
        self.charge.charge(bytes)
    }

    fn give_back(&mut self, bytes: u64) {
        self.charge.give_back(bytes);
    }
}

impl Caller<'_> {
    fn arena(&self, offset: u64, length: usize) -> Option<Region> {
        self.window?.slice(offset, length as u64).ok()
    }
}

impl reference::Client for Caller<'_> {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> bool {
        let region = self.arena(offset, into.len());
        region.is_some_and(|region| region.read(0, into).is_ok())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> bool {
        let region = self.arena(offset, from.len());
        region.is_some_and(|region| region.write(0, from).is_ok())
    }
}

/// The arena of a client.
struct Shared<'c>(&'c Client);

impl library::Arena for Shared<'_> {
    fn address(&self, span: Span) -> Option<*mut u8> {
        let window = self.0.window.as_ref()?;
        let region = window.slice(span.offset, span.length).ok()?;
        Some(region.as_ptr())
    }

    fn read(&self, span: Span, into: &mut [u8]) -> bool {
        let region = self
            .0
            .window
            .as_ref()
            .map(|window| window.slice(span.offset, span.length));
        region.is_some_and(|region| region.is_ok_and(|region| region.read(0, into).is_ok()))
    }

    fn length(&self) -> u64 {
        self.0.arena()
    }
}

/// Carries a call out, and has its reply ready if somebody waits.
pub(crate) fn serve(
    session: &mut Session<'_>,
    op: u16,
    bytes: &[u8],
    limits: Limits,
    waits: bool,
) -> Result<(), Refused> {
    let client = session.client;
    if matches!(client.backend.cuda, Support::Nothing) {
        client.tenant.counters.not_served(op);
        let refused = AnyCall::decode(op, bytes, limits)?.failed(NOT_SUPPORTED);
        session.encode(|writer| refused.write(writer));
        return Ok(());
    }
    let call = AnyCall::decode(op, bytes, limits)?;
    if let Some(failure) = carry_out(session, &call, waits) {
        client.tenant.counters.failed(Code(failure));
    }
    if waits {
        // Of all calls with an answer that is longer than a record, the place for it is the one span.
        let mut place = None;
        call.spans(&mut |span| place = Some(span));
        session.answer_goes_to(place);
    }
    Ok(())
}

/// The code of what failed now, for whoever counts.
fn carry_out(session: &mut Session<'_>, call: &AnyCall<'_>, waits: bool) -> Option<i32> {
    let client = session.client;
    let mut cuda = client.cuda.lock().unwrap_or_else(PoisonError::into_inner);
    let Cuda { device, charge, logged } = match &mut *cuda {
        Some(cuda) => cuda,
        // Nothing is charged yet, so that nothing can be refused.
        fresh => match client.tenant.quota.charge(0) {
            Ok(charge) => fresh.insert(Cuda::new(client, charge)),
            Err(Code(code)) => {
                session.encode(|writer| call.failed(NOT_SUPPORTED).write(writer));
                return Some(code);
            }
        },
    };
    match device {
        Device::Null(state) => {
            let (reply, failure) = state.carry_out(call, waits, charge);
            if waits {
                clear_copy(client, call);
                session.encode(|writer| reply.write(writer));
            }
            failure.map(null::Failure::code)
        }
        Device::Reference(state) => {
            let mut caller = Caller {
                charge,
                window: client.window.as_ref(),
            };
            let mut answer = |reply: &accel_proto::cuda::AnyReply<'_>| session.encode(|writer| reply.write(writer));
            let answer: Option<&mut dyn FnMut(&accel_proto::cuda::AnyReply<'_>)> =
                if waits { Some(&mut answer) } else { None };
            let done = metered(client, call, || {
                state.carry_out(call, (&mut caller, &client.abandoned), answer)
            });
            let error = done.err()?;
            let level = if *logged < MOST_LOGGED {
                log::Level::Warn
            } else {
                log::Level::Debug
            };
            *logged = logged.saturating_add(1);
            log::log!(level, "a client's {} failed: {error}", name_of(call.op()));
            Some(error.code())
        }
        Device::Library(state) => {
            let Support::Library(libraries) = &client.backend.cuda else {
                return None;
            };
            let mut answer = |reply: &accel_proto::cuda::AnyReply<'_>| session.encode(|writer| reply.write(writer));
            state.carry_out((libraries, charge, &Shared(client)), call, waits, &mut answer)
        }
    }
}

/// What a client has of CUDA, to be saved; `put` takes bytes, and says where they are.
pub(crate) fn save<P, E>(
    client: &Client,
    put: &mut dyn FnMut(&[u8]) -> Result<P, E>,
) -> Result<Option<reference::Saved<P>>, E> {
    match &*client.cuda.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(Cuda {
            device: Device::Reference(state),
            ..
        }) => state.save(put).map(Some),
        // Others are not saved.
        _ => Ok(None),
    }
}

/// A client has that again; `get` gives the bytes of a place.
pub(crate) fn restore<'b, P>(
    client: &Client,
    saved: &reference::Saved<P>,
    get: &dyn Fn(&P) -> Option<&'b [u8]>,
) -> Result<(), Refusal> {
    let quota = &client.tenant.quota;
    let mut charge = quota.charge(0).map_err(Refusal::code)?;
    let mut caller = Caller {
        charge: &mut charge,
        window: client.window.as_ref(),
    };
    let state = reference::State::restore(saved, quota.lower(reference::TOTAL_MEMORY), get, &mut caller);
    let state = state.map_err(|error| Refusal::Format(error.to_string()))?;
    let device = Device::Reference(Box::new(state));
    *client.cuda.lock().unwrap_or_else(PoisonError::into_inner) = Some(Cuda {
        device,
        charge,
        logged: 0,
    });
    Ok(())
}

/// A client is gone: what libraries have for it is given back, while its window is there. No thread works for it.
pub(crate) fn end(client: &Client) {
    let cuda = client.cuda.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let (
        Support::Library(libraries),
        Some(Cuda {
            device: Device::Library(mut state),
            mut charge,
            ..
        }),
    ) = (&client.backend.cuda, cuda)
    {
        state.end(libraries, &mut charge);
    }
}

impl Cuda {
    fn new(client: &Client, charge: Charge) -> Self {
        let total = |most| client.tenant.quota.lower(most);
        if !matches!(client.backend.cuda, Support::Reference) {
            client.cannot_be_saved(UNSAVED);
        }
        let device = match client.backend.cuda {
            Support::Reference => Device::Reference(Box::new(reference::State::new(total(reference::TOTAL_MEMORY)))),
            Support::Library(_) => Device::Library(Box::new(library::State::new(total(u64::MAX)))),
            Support::Null | Support::Nothing => Device::Null(null::State::new(total(null::TOTAL_MEMORY))),
        };
        Self {
            device,
            charge,
            logged: 0,
        }
    }
}

/// Has a call computed when its tenant may, and its time, which is this thread's, counted as the device's.
fn metered<R>(client: &Client, call: &AnyCall<'_>, compute: impl FnOnce() -> R) -> R {
    let (Some(meter), Some(work)) = (&client.tenant.meter, work_of(call)) else {
        return compute();
    };
    // Refused are commands of which too many are in flight, and here none is: a call is complete when it returns.
    let entered = meter.enter(|| client.is_abandoned()).is_ok();
    let begun = thread_time();
    let done = compute();
    if entered {
        meter.leave_complete(work, thread_time().saturating_sub(begun));
    }
    done
}

/// The time that this thread has had a processor.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// What a call is for the device; nothing if it takes no time there.
fn work_of(call: &AnyCall<'_>) -> Option<Work> {
    match call {
        AnyCall::CudaMemcpyAsync(_)
        | AnyCall::CudaMemcpy2DAsync(_)
        | AnyCall::CudaMemset(_)
        | AnyCall::CudaMemsetAsync(_)
        | AnyCall::CudaMemset2DAsync(_) => Some(Work::Transfer),
        // Modules are read when they are asked for a kernel first.
        AnyCall::CudaLaunchKernel(_) | AnyCall::BasaltModuleGetFunction(_) => Some(Work::Launch),
        // What a library computes is in memory that the call names.
        other => {
            let mut names_memory = false;
            other.effects(&mut |_, object| names_memory |= matches!(object, Object::Svm(_)));
            names_memory.then_some(Work::Launch)
        }
    }
}

/// Nobody has computed what is copied to the client: it reads zeroes.
fn clear_copy(client: &Client, call: &AnyCall<'_>) {
    let to = match call {
        AnyCall::CudaMemcpyAsync(call) => call.dst,
        AnyCall::CudaMemcpy2DAsync(call) => call.dst,
        _ => return,
    };
    if let Memory::Arena(span) = to
        && let Some(window) = &client.window
        && let Ok(region) = window.slice(span.offset, span.length)
    {
        zero(&region, span.length);
    }
}

/// No bytes are computed here; what a client reads is the same each time, and nobody else's.
fn zero(region: &Region, length: u64) {
    if let Err(error) = region.zero(0, length) {
        log::warn!("a client's copy is not in its window: {error}");
    }
}
