//! What is by hand of events (OpenCL API, sections 5.11 and 5.14): lists of them, their state, and waiting. Knows no ring.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accel_proto::{List, opencl as calls};

use crate::arguments::{In, Objects, Opaque, Out, Ref};
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::info::{Query, Wanted};
use crate::notify::{self, Notice, Passed};
use crate::object::{Data, Object};
use crate::{pending, status};

/// `CL_EVENT_COMMAND_EXECUTION_STATUS`.
const STATE: u32 = 0x11d3;
/// `CL_EVENT_COMMAND_TYPE`.
const COMMAND_TYPE: u32 = 0x11d1;
/// `CL_COMPLETE`, `CL_RUNNING` and `CL_SUBMITTED`: the states that a callback can be registered for.
const STATES: [i32; 3] = [0, 1, 2];

/// An event of a command that is about to be put in a queue.
pub(crate) fn made(connection: &'static Connection, queue: &Object) -> Result<Arc<Object>, Code> {
    Object::make::<calls::Event>(connection, &[queue], Data::Event(AtomicBool::new(false)))
}

/// The same, if the application wants to have it.
pub(crate) fn wanted(
    connection: &'static Connection,
    queue: &Object,
    event: Out<Ref>,
) -> Result<Option<Arc<Object>>, Code> {
    (!event.is_null()).then(|| made(connection, queue)).transpose()
}

/// The command was put: its event is the application's.
pub(crate) fn give(made: Option<Arc<Object>>, event: Out<Ref>) {
    if let Some(made) = made {
        event.put(made.publish());
    }
}

/// What a command waits for.
pub(crate) fn wait_list(list: &In<Ref>, count: u32) -> Result<Objects<'_, calls::Event>, Code> {
    list.objects(count, Code::INVALID_EVENT_WAIT_LIST, Code::INVALID_EVENT_WAIT_LIST)
}

/// Its command has ended.
pub(crate) fn is_complete_now(event: &Object) {
    if let Some(complete) = event.completion() {
        complete.store(true, Ordering::Release);
    }
}

/// What its command is to the application, where the server has carried out another.
pub(crate) fn is_of_kind(event: &Object, kind: u32) {
    event.keep_answer((COMMAND_TYPE, Vec::new()), &kind.to_ne_bytes());
}

/// Whether its command is known to have ended without an error.
pub(crate) fn is_known_complete(event: &Object) -> bool {
    event
        .completion()
        .is_some_and(|complete| complete.load(Ordering::Acquire))
}

/// Its state, from `CL_QUEUED` down to `CL_COMPLETE`, or the error of its command.
pub(crate) fn state(event: &Object) -> Result<i32, Code> {
    if is_known_complete(event) {
        return Ok(0);
    }
    let bytes = query(event, STATE)?;
    let state = bytes.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
    let state = state.ok_or(Code::OUT_OF_RESOURCES)?;
    if state == 0 {
        is_complete_now(event);
    }
    Ok(state)
}

fn query(event: &Object, param_name: u32) -> Result<Vec<u8>, Code> {
    let query = Query {
        command: "clGetEventInfo",
        object: event,
        param_name,
        depends: Vec::new(),
        // The kind of its command (CL_EVENT_COMMAND_TYPE) stays; its state does not.
        keeps: param_name != STATE,
    };
    query.value(|connection, size| {
        let make = |reply| calls::GetEventInfo {
            event: event.handle(),
            param_name,
            param_value_size: size,
            param_value: true,
            param_value_size_ret: true,
            reply,
        };
        let (call, answer) = connection.call(make, &Touched::new(&[event], &[]), false)?;
        let value = answer.success(&call)?.param_value;
        Ok(value.map(|value| value.bytes().to_vec()).unwrap_or_default())
    })
}

/// `clGetEventInfo`. Who learns from it that a command is complete finds its data.
pub(crate) extern "C" fn get_event_info(
    event: Ref,
    param_name: u32,
    size: u64,
    value: Out<u8>,
    size_ret: Out<u64>,
) -> i32 {
    status(|| {
        let event = event.object::<calls::Event>()?;
        let answer = match param_name {
            STATE => {
                let state = state(event)?;
                if state <= 0 {
                    pending::settle(event.connection()?, None)?;
                }
                state.to_ne_bytes().to_vec()
            }
            _ => query(event, param_name)?,
        };
        Wanted { size, value, size_ret }.give(&answer)
    })
}

/// Until its command has ended; an error if that has failed.
pub(crate) fn wait_for(connection: &'static Connection, event: &Object) -> Result<(), Code> {
    let handles = [event.handle()];
    let call = calls::WaitForEvents {
        num_events: 1,
        event_list: Some(List::new(&handles)),
    };
    let (call, answer) = connection.call(|_| call, &Touched::new(&[event], &[]), true)?;
    answer.success(&call)?;
    is_complete_now(event);
    Ok(())
}

/// `clWaitForEvents`.
pub(crate) extern "C" fn wait_for_events(num_events: u32, event_list: In<Ref>) -> i32 {
    status(|| {
        let events = event_list.objects::<calls::Event>(num_events, Code::INVALID_VALUE, Code::INVALID_EVENT)?;
        let first = events.objects.first().ok_or(Code::INVALID_VALUE)?;
        if events.objects.iter().all(|event| is_known_complete(event)) {
            // Another thread may have learnt it, and be about to bring their data.
            return first
                .connection()
                .map_or(Ok(()), |connection| pending::settle(connection, None));
        }
        let connection = first.connection()?;
        let make = calls::WaitForEvents {
            num_events,
            event_list: events.list(),
        };
        let lists = [events.objects.as_slice()];
        let (call, answer) = connection.call(|_| make, &Touched::new(&[], &lists), true)?;
        let waited = answer.success(&call).map(drop);
        if waited.is_ok() {
            events.objects.iter().for_each(|event| is_complete_now(event));
        }
        let settled = pending::settle(connection, None);
        waited.and(settled)
    })
}

/// `clCreateUserEvent`.
pub(crate) extern "C" fn create_user_event(context: Ref, errcode_ret: Out<i32>) -> Ref {
    crate::returned(errcode_ret, || {
        let context = context.object::<calls::Context>()?;
        let connection = context.connection()?;
        let made = Object::make::<calls::Event>(connection, &[context], Data::Event(AtomicBool::new(false)))?;
        let call = calls::CreateUserEvent {
            context: context.handle(),
            returned: made.handle(),
        };
        connection.send(&call, &Touched::new(&[context, &made], &[]))?;
        Ok(made.publish())
    })
}

/// `clSetEventCallback`: a thread of this library waits for the event.
pub(crate) extern "C" fn set_event_callback(
    event: Ref,
    command_exec_callback_type: i32,
    pfn_notify: Option<extern "C" fn(Ref, i32, Opaque)>,
    user_data: Opaque,
) -> i32 {
    status(|| {
        let event = event.object::<calls::Event>()?;
        let notice = pfn_notify.ok_or(Code::INVALID_VALUE)?;
        if !STATES.contains(&command_exec_callback_type) {
            return Err(Code::INVALID_VALUE);
        }
        // What it is about has to be there, whatever comes later.
        event.connection()?;
        notify::when(
            event,
            command_exec_callback_type,
            Notice::Event(notice, Passed(user_data)),
        )
    })
}
