//! What is by hand of command queues (OpenCL API, sections 5.1 and 5.15): waiting for one, and its end. Knows no ring.

use accel_proto::opencl as calls;

use crate::arguments::Ref;
use crate::codes::Code;
use crate::connection::Touched;
use crate::info::Query;
use crate::object::Object;
use crate::{pending, status};

/// `CL_QUEUE_PROPERTIES`.
const PROPERTIES: u32 = 0x1093;
/// `CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE`.
const OUT_OF_ORDER: u64 = 1;

/// Until all commands of a queue have ended, and what they have left is done.
pub(crate) fn finish_queue(queue: &Object) -> Result<(), Code> {
    let connection = queue.connection()?;
    let mark = connection.pending.mark();
    let call = calls::Finish {
        command_queue: queue.handle(),
    };
    let (call, answer) = connection.call(|_| call, &Touched::new(&[queue], &[]), true)?;
    let finished = answer.success(&call).map(drop);
    // Commands have ended even where one of them has failed.
    let settled = pending::settle(connection, Some((queue, mark)));
    finished.and(settled)
}

/// Whether commands of a queue end in the order in which they were put. Asked for once.
pub(crate) fn is_in_order(queue: &Object) -> bool {
    let query = Query {
        command: "clGetCommandQueueInfo",
        object: queue,
        param_name: PROPERTIES,
        depends: Vec::new(),
        keeps: true,
    };
    let properties = query.value(|connection, size| {
        let make = |reply| calls::GetCommandQueueInfo {
            command_queue: queue.handle(),
            param_name: PROPERTIES,
            param_value_size: size,
            param_value: true,
            param_value_size_ret: true,
            reply,
        };
        let (call, answer) = connection.call(make, &Touched::new(&[queue], &[]), false)?;
        let value = answer.success(&call)?.param_value;
        Ok(value.map(|value| value.bytes().to_vec()).unwrap_or_default())
    });
    let bits = properties
        .ok()
        .and_then(|bytes| Some(u64::from_ne_bytes(*bytes.first_chunk()?)));
    bits.is_some_and(|bits| bits & OUT_OF_ORDER == 0)
}

/// `clFinish`.
pub(crate) extern "C" fn finish(command_queue: Ref) -> i32 {
    status(|| finish_queue(command_queue.object::<calls::CommandQueue>()?))
}

/// `clReleaseCommandQueue`. The last reference flushes the queue; what its commands leave to be done here is waited for.
pub(crate) extern "C" fn release_command_queue(command_queue: Ref) -> i32 {
    status(|| {
        let queue = command_queue.object::<calls::CommandQueue>()?;
        if queue.references() == 1
            && let Ok(connection) = queue.connection()
        {
            match pending::has_left(connection, queue) {
                // An error of a command is nothing that a release tells.
                true => drop(finish_queue(queue)),
                false => {
                    let command_queue = queue.handle();
                    connection.send(&calls::Flush { command_queue }, &Touched::new(&[queue], &[]))?;
                }
            }
        }
        queue.release()
    })
}
