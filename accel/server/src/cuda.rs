//! CUDA's calls on the back end `null`, which is the only one that has them: a client's objects and memory, its quota, and replies.
//!
//! What calls mean is `accel/cuda-null`'s; this knows the client that they are from, and not how they travel. Other back ends refuse them, as
//! a client learns when it connects.

use std::sync::PoisonError;

use accel_cuda_null::{Quota, State, TOTAL_MEMORY};
use accel_proto::cuda::{AnyCall, AnyReply};
use accel_proto::{Limits, Memory, Refused};
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

/// What a client has of CUDA.
#[derive(Debug)]
pub(crate) struct Cuda {
    state: State,
    charge: Charge,
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
    if client.backend.name() != "null" {
        client.tenant.counters.not_served(op);
        let refused = AnyCall::decode(op, bytes, limits)?.failed(NOT_SUPPORTED);
        session.encode(|writer| refused.write(writer));
        return Ok(());
    }
    let call = AnyCall::decode(op, bytes, limits)?;
    let (reply, failure) = carry_out(client, &call, waits);
    if let Some(failure) = failure {
        client.tenant.counters.failed(Code(failure));
    }
    if !waits {
        return Ok(());
    }
    if let AnyCall::CudaMemcpyAsync(call) = &call
        && let Memory::Arena(span) = call.dst
        && let Some(region) = client
            .window
            .as_ref()
            .and_then(|window| window.slice(span.offset, span.length).ok())
    {
        zero(&region, span.length);
    }
    session.encode(|writer| reply.write(writer));
    // Of all calls with an answer that is longer than a record, the place for it is the one span.
    let mut place = None;
    call.spans(&mut |span| place = Some(span));
    session.answer_goes_to(place);
    Ok(())
}

/// No bytes are computed here; what a client reads is the same each time, and nobody else's.
fn zero(region: &Region, length: u64) {
    if let Err(error) = region.zero(0, length) {
        log::warn!("a client's copy is not in its window: {error}");
    }
}

fn carry_out(client: &Client, call: &AnyCall<'_>, waits: bool) -> (AnyReply<'static>, Option<i32>) {
    let mut cuda = client.cuda.lock().unwrap_or_else(PoisonError::into_inner);
    let cuda = match &mut *cuda {
        Some(cuda) => cuda,
        fresh => {
            // Nothing is charged yet, so that nothing can be refused.
            let Ok(charge) = client.tenant.quota.charge(0) else {
                return (call.failed(NOT_SUPPORTED), None);
            };
            _ = client.unsaved.set(UNSAVED);
            let state = State::new(client.tenant.quota.lower(TOTAL_MEMORY));
            fresh.insert(Cuda { state, charge })
        }
    };
    let (reply, failure) = cuda.state.carry_out(call, waits, &mut cuda.charge);
    (reply, failure.map(accel_cuda_null::Failure::code))
}
