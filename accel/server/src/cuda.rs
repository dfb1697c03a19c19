//! CUDA's calls, by the back end that has them: a client's state there, its quota, and replies.
//!
//! What calls mean is `accel/cuda-null`'s and `accel/cuda-library`'s; this knows the client that they are from, and not how they travel.
//! Other back ends refuse them, as a client learns when it connects.

use std::sync::PoisonError;

use accel_cuda_library::{Arena, Libraries};
use accel_cuda_null::{Quota, State, TOTAL_MEMORY};
use accel_proto::cuda::{AnyCall, AnyReply};
use accel_proto::{Limits, Memory, Refused, Span};
use wire::ring::Region;

use crate::api::Code;
use crate::quota::Charge;
use crate::session::{Client, Session};

/// Numbers of CUDA's calls.
pub(crate) const NUMBERS: std::ops::Range<u16> = 0x1000..0x4000;
/// `cudaErrorNotSupported`.
const NOT_SUPPORTED: i32 = 801;
/// Why a client that has called CUDA cannot be saved.
const UNSAVED: &str = "it has called CUDA, whose objects are not saved";

/// Who carries CUDA's calls out.
#[derive(Debug)]
pub(crate) enum Way {
    /// Nobody: calls are validated, and answers are made up.
    Null,
    /// The real libraries.
    Library(Box<Libraries>),
}

/// What a client has of CUDA.
#[derive(Debug)]
pub(crate) struct Cuda {
    state: Of,
    charge: Charge,
}

/// The same by who carries calls out.
#[derive(Debug)]
enum Of {
    Null(State),
    Library(Box<accel_cuda_library::State>),
}

impl Cuda {
    /// Of a new client; nothing if the server has no memory at all for it.
    fn new(client: &Client, way: &Way) -> Option<Self> {
        let quota = &client.tenant.quota;
        let charge = quota.charge(0).ok()?;
        _ = client.unsaved.set(UNSAVED);
        let state = match way {
            Way::Null => Of::Null(State::new(quota.lower(TOTAL_MEMORY))),
            Way::Library(_) => Of::Library(Box::new(accel_cuda_library::State::new(quota.lower(u64::MAX)))),
        };
        Some(Self { state, charge })
    }
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

/// Carries a call out, and has its reply ready if somebody waits.
pub(crate) fn serve(
    session: &mut Session<'_>,
    op: u16,
    bytes: &[u8],
    limits: Limits,
    waits: bool,
) -> Result<(), Refused> {
    let client = session.client;
    let call = AnyCall::decode(op, bytes, limits)?;
    let mut cuda = client.cuda.lock().unwrap_or_else(PoisonError::into_inner);
    if let (None, Some(way)) = (&*cuda, &client.backend.cuda) {
        *cuda = Cuda::new(client, way);
    }
    let failure = match (&client.backend.cuda, &mut *cuda) {
        (
            Some(Way::Library(libraries)),
            Some(Cuda {
                state: Of::Library(state),
                charge,
            }),
        ) => {
            let mut answer = |reply: &AnyReply<'_>| session.encode(|writer| reply.write(writer));
            state.carry_out((libraries, charge, &Shared(client)), &call, waits, &mut answer)
        }
        (
            Some(Way::Null),
            Some(Cuda {
                state: Of::Null(state),
                charge,
            }),
        ) => {
            let (reply, failure) = state.carry_out(&call, waits, charge);
            if waits {
                no_bytes(client, &call);
                session.encode(|writer| reply.write(writer));
            }
            failure.map(accel_cuda_null::Failure::code)
        }
        _ => {
            client.tenant.counters.not_served(op);
            let refused = call.failed(NOT_SUPPORTED);
            session.encode(|writer| refused.write(writer));
            None
        }
    };
    drop(cuda);
    if let Some(failure) = failure {
        client.tenant.counters.failed(Code(failure));
    }
    // Of all calls with an answer that is longer than a record, the place for it is the one span.
    let mut place = None;
    call.spans(&mut |span| place = Some(span));
    session.answer_goes_to(place);
    Ok(())
}

/// A client is gone, and all that it had; no thread works for it, and its window is still there.
pub(crate) fn end(client: &Client) {
    let cuda = client.cuda.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let (
        Some(Way::Library(libraries)),
        Some(Cuda {
            state: Of::Library(mut state),
            mut charge,
        }),
    ) = (&client.backend.cuda, cuda)
    {
        state.end(libraries, &mut charge);
    }
}

/// The arena of a client.
struct Shared<'c>(&'c Client);

impl Arena for Shared<'_> {
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

/// What is read of a device on which nothing is computed.
fn no_bytes(client: &Client, call: &AnyCall<'_>) {
    let to = match call {
        AnyCall::CudaMemcpyAsync(call) => Some(call.dst),
        AnyCall::CudaMemcpy2DAsync(call) => Some(call.dst),
        _ => None,
    };
    if let Some(Memory::Arena(span)) = to
        && let Some(region) = client
            .window
            .as_ref()
            .and_then(|window| window.slice(span.offset, span.length).ok())
    {
        zero(&region, span.length);
    }
}

/// No bytes are computed here; what a client reads is the same each time, and nobody else's.
fn zero(region: &Region, length: u64) {
    const ZEROES: [u8; 4096] = [0; 4096];
    let mut at = 0;
    while let left @ 1.. = length - at {
        let piece = left.min(ZEROES.len() as u64);
        let zeroes = ZEROES
            .get(..usize::try_from(piece).unwrap_or_default())
            .unwrap_or_default();
        if let Err(error) = region.write(at, zeroes) {
            log::warn!("a client's copy is not in its window: {error}");
            return;
        }
        at += piece;
    }
}
