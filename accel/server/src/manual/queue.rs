//! Commands of queues that drivers no longer have.

use accel_proto::opencl::EnqueueWaitForEvents;

use crate::api::{Code, check};
use crate::session::Session;

/// `clEnqueueWaitForEvents`: since OpenCL 1.2 a barrier with a wait list (OpenCL API, appendix about deprecated functions). PoCL 3.1 ends the
/// process at the function itself.
pub(crate) fn enqueue_wait_for_events(cx: &mut Session<'_>, call: &EnqueueWaitForEvents<'_>) -> Result<(), Code> {
    let queue = cx.object(call.command_queue)?;
    if call.num_events == 0 || call.event_list.is_none() {
        return Err(Code::INVALID_VALUE);
    }
    let events = cx.objects(call.event_list.as_ref())?;
    let function = cx.api().clEnqueueBarrierWithWaitList()?;
    // SAFETY: 1. to 3. as above; no event is asked for.
    check(unsafe { function(queue.raw(), call.num_events, events.pointer(), std::ptr::null_mut()) })
}
