//! Functions of the client's that the back end is to call, and events that the client completes.

use accel_proto::Callback;
use accel_proto::opencl::{
    CreateUserEvent, SetContextDestructorCallback, SetEventCallback, SetMemObjectDestructorCallback,
    SetProgramReleaseCallback,
};

use crate::api::{Code, P, check};
use crate::completions::{Of, destructor_function, event_function};
use crate::objects::{Held, State};
use crate::session::Session;

/// `clCreateUserEvent`.
pub(crate) fn create_user_event(cx: &mut Session<'_>, call: &CreateUserEvent) -> Result<(), Code> {
    let context = cx.object(call.context)?;
    let function = cx.api().clCreateUserEvent()?;
    let mut status = 0_i32;
    let place = (&raw mut status).cast();
    // SAFETY: 1. to 3. as above.
    let made = unsafe { function(context.raw(), place) };
    check(status)?;
    cx.insert_with(call.returned, made, &[&context], State::UserEvent)
}

/// `clSetEventCallback`.
pub(crate) fn set_event_callback(cx: &mut Session<'_>, call: &SetEventCallback) -> Result<(), Code> {
    let event = cx.object(call.event)?;
    if call.pfn_notify.0 == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let registration = cx.client.completions.register(call.pfn_notify, Of::Event)?;
    let function = cx.api().clSetEventCallback()?;
    let (kind, data) = (call.command_exec_callback_type, registration.data());
    // SAFETY: 1. and 2. as above; 3. the function takes what a callback of an event takes, and the data is a number.
    check(unsafe { function(event.raw(), kind, event_function(), data) })?;
    registration.keep();
    Ok(())
}

/// A function that is called when an object goes.
fn on_destruction(
    cx: &Session<'_>,
    function: Result<unsafe extern "C" fn(P, P, P) -> i32, Code>,
    object: &Held,
    callback: Callback,
) -> Result<(), Code> {
    if callback.0 == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let function = function?;
    let registration = cx.client.completions.register(callback, Of::Other)?;
    let data = registration.data();
    // SAFETY: 1. and 2. as above: callers say which function; 3. ours takes what a destructor's callback takes, and the data is a number.
    check(unsafe { function(object.raw(), destructor_function(), data) })?;
    registration.keep();
    Ok(())
}

/// `clSetMemObjectDestructorCallback`.
pub(crate) fn set_mem_object_destructor_callback(
    cx: &mut Session<'_>,
    call: &SetMemObjectDestructorCallback,
) -> Result<(), Code> {
    let object = cx.object(call.memobj)?;
    on_destruction(
        cx,
        cx.api().clSetMemObjectDestructorCallback(),
        &object,
        call.pfn_notify,
    )
}

/// `clSetContextDestructorCallback`.
pub(crate) fn set_context_destructor_callback(
    cx: &mut Session<'_>,
    call: &SetContextDestructorCallback,
) -> Result<(), Code> {
    let object = cx.object(call.context)?;
    on_destruction(cx, cx.api().clSetContextDestructorCallback(), &object, call.pfn_notify)
}

/// `clSetProgramReleaseCallback`.
pub(crate) fn set_program_release_callback(cx: &mut Session<'_>, call: &SetProgramReleaseCallback) -> Result<(), Code> {
    let object = cx.object(call.program)?;
    on_destruction(cx, cx.api().clSetProgramReleaseCallback(), &object, call.pfn_notify)
}
