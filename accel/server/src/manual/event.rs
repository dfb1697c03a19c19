//! What events are asked for: of those of before a machine was saved the server knows the answers itself.

use accel_proto::opencl::{Event, GetEventInfo, GetEventInfoReply, GetEventProfilingInfo, GetEventProfilingInfoReply};
use accel_proto::{Handle, List, Plain as _};

use crate::api::{Code, P, check};
use crate::marshal::{Answer, Many, ask, there};
use crate::objects::{Past, State};
use crate::session::Session;

/// Numbers of the API (cl.h).
const EVENT_COMMAND_QUEUE: u32 = 0x11d0;
const EVENT_COMMAND_TYPE: u32 = 0x11d1;
const EVENT_REFERENCE_COUNT: u32 = 0x11d2;
const EVENT_COMMAND_EXECUTION_STATUS: u32 = 0x11d3;
const EVENT_CONTEXT: u32 = 0x11d4;
const PROFILING_COMMAND_QUEUED: u32 = 0x1280;
const PROFILING_INFO_NOT_AVAILABLE: Code = Code(-7);

/// Events that a command waits for.
pub(super) fn waits(cx: &Session<'_>, count: u32, list: Option<&List<'_, Handle<Event>>>) -> Result<Many, Code> {
    there(list.is_some(), count.into(), Code::INVALID_EVENT_WAIT_LIST)?;
    cx.objects(list)
}

/// `clGetEventInfo`. What the client knows itself it does not ask for.
pub(crate) fn get_event_info(cx: &mut Session<'_>, call: &GetEventInfo) -> Result<(), Code> {
    let event = cx.object(call.event)?;
    let mut answer = Answer::new(call.param_value, call.param_value_size, u8::SIZE);
    let (bytes, length) = match (call.param_name, &event.state) {
        (EVENT_COMMAND_QUEUE | EVENT_CONTEXT | EVENT_REFERENCE_COUNT, _) => return Err(Code::INVALID_VALUE),
        (EVENT_COMMAND_TYPE, State::Past(past)) => {
            known(past.command.to_ne_bytes(), call.param_value, call.param_value_size)?
        }
        (EVENT_COMMAND_EXECUTION_STATUS, State::Past(past)) => {
            known(past.status.to_ne_bytes(), call.param_value, call.param_value_size)?
        }
        _ => {
            let mut length = 0_u64;
            let function = cx.api().clGetEventInfo()?;
            let (size, at): (u64, P) = (answer.limit(call.param_value_size), answer.pointer());
            let counted = ask(&mut length, call.param_value_size_ret || call.param_value);
            // SAFETY: 1. to 3. as above.
            check(unsafe { function(event.raw(), call.param_name, size, at, counted) })?;
            (answer.bytes(length), length)
        }
    };
    let reply = GetEventInfoReply {
        status: 0,
        param_value: call.param_value.then(|| List::new(&bytes)),
        param_value_size_ret: call.param_value_size_ret.then_some(length),
    };
    cx.answer(call, &reply, Some(call.reply))
}

/// An answer that needs no back end: its bytes, and how many there are.
fn known<const N: usize>(bytes: [u8; N], is_wanted: bool, size: u64) -> Result<(Vec<u8>, u64), Code> {
    match is_wanted && size < N as u64 {
        true => Err(Code::INVALID_VALUE),
        false => Ok((bytes.to_vec(), N as u64)),
    }
}

/// `clGetEventProfilingInfo`, of commands in queues that the client has made to measure times.
pub(crate) fn get_event_profiling_info(cx: &mut Session<'_>, call: &GetEventProfilingInfo) -> Result<(), Code> {
    let event = cx.object(call.event)?;
    if event.queue().is_some_and(|queue| !queue.tells_times) {
        return Err(PROFILING_INFO_NOT_AVAILABLE);
    }
    let mut answer = Answer::new(call.param_value, call.param_value_size, u8::SIZE);
    let (bytes, length) = match &event.state {
        State::Past(past) => {
            let time = time(past, call.param_name)?;
            known(time.to_ne_bytes(), call.param_value, call.param_value_size)?
        }
        _ => {
            let mut length = 0_u64;
            let function = cx.api().clGetEventProfilingInfo()?;
            let (size, at): (u64, P) = (answer.limit(call.param_value_size), answer.pointer());
            let counted = ask(&mut length, call.param_value_size_ret || call.param_value);
            // SAFETY: 1. to 3. as above.
            check(unsafe { function(event.raw(), call.param_name, size, at, counted) })?;
            (answer.bytes(length), length)
        }
    };
    let reply = GetEventProfilingInfoReply {
        status: 0,
        param_value: call.param_value.then(|| List::new(&bytes)),
        param_value_size_ret: call.param_value_size_ret.then_some(length),
    };
    cx.answer(call, &reply, Some(call.reply))
}

/// One of the five times of a command of before.
fn time(past: &Past, query: u32) -> Result<u64, Code> {
    let times = past.times.ok_or(PROFILING_INFO_NOT_AVAILABLE)?;
    let place = query.checked_sub(PROFILING_COMMAND_QUEUED).map(|place| place as usize);
    place
        .and_then(|place| times.get(place).copied())
        .ok_or(Code::INVALID_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_before_are_told_and_others_are_no_times() {
        let past = Past {
            command: 0x11f0,
            status: 0,
            times: Some([1, 2, 3, 4, 5]),
        };
        assert_eq!((time(&past, 0x1280), time(&past, 0x1284)), (Ok(1), Ok(5)));
        assert_eq!(
            (time(&past, 0x127f), time(&past, 0x1285)),
            (Err(Code::INVALID_VALUE), Err(Code::INVALID_VALUE))
        );
        let unmeasured = Past { times: None, ..past };
        assert_eq!(time(&unmeasured, 0x1280), Err(PROFILING_INFO_NOT_AVAILABLE));
        assert_eq!(known([7], true, 0), Err(Code::INVALID_VALUE));
        assert_eq!(known([7], false, 0), Ok((vec![7], 1)));
    }
}
