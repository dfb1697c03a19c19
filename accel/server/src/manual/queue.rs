//! Queues, which measure times where the server needs them, and commands of queues that drivers no longer have.

use accel_proto::opencl::{
    CreateCommandQueue, CreateCommandQueueWithProperties, EnqueueWaitForEvents, GetCommandQueueInfo,
    GetCommandQueueInfoReply,
};
use accel_proto::{List, Plain as _};

use crate::api::{Code, P, check};
use crate::marshal::{Answer, Properties, ask};
use crate::meter::QUEUE_PROFILING_ENABLE;
use crate::objects::{Sort, State};
use crate::session::Session;

/// Numbers of the API (cl.h).
const QUEUE_CONTEXT: u32 = 0x1090;
const QUEUE_DEVICE: u32 = 0x1091;
const QUEUE_REFERENCE_COUNT: u32 = 0x1092;
const QUEUE_PROPERTIES: u32 = 0x1093;
const QUEUE_DEVICE_DEFAULT: u32 = 0x1095;
const QUEUE_PROPERTIES_ARRAY: u32 = 0x1098;
const ON_DEVICE: u64 = 1 << 2;
const DEVICE_QUEUE_ON_DEVICE_PROPERTIES: u32 = 0x104e;
const INVALID_QUEUE_PROPERTIES: Code = Code(-35);

/// Whether a queue can have these properties. Of a queue on a device that has none PoCL makes the process's end (`abort`).
fn can_be(cx: &Session<'_>, device: P, properties: u64) -> Result<(), Code> {
    if properties & ON_DEVICE == 0 {
        return Ok(());
    }
    let mut known = 0_u64;
    let function = cx.api().clGetDeviceInfo()?;
    let (name, place) = (DEVICE_QUEUE_ON_DEVICE_PROPERTIES, (&raw mut known).cast());
    // SAFETY: 1. and 2. as above; 3. the place has eight bytes.
    let status = unsafe { function(device, name, 8, place, std::ptr::null_mut()) };
    match status == 0 && known != 0 {
        true => Ok(()),
        false => Err(INVALID_QUEUE_PROPERTIES),
    }
}

/// `clCreateCommandQueue`.
pub(crate) fn create_command_queue(cx: &mut Session<'_>, call: &CreateCommandQueue) -> Result<(), Code> {
    let (context, device) = (cx.object(call.context)?, cx.object(call.device)?);
    can_be(cx, device.raw(), call.properties)?;
    let measures = cx.client.tenant.meter.is_some();
    let properties = call.properties | if measures { QUEUE_PROFILING_ENABLE } else { 0 };
    let function = cx.api().clCreateCommandQueue()?;
    let mut status = 0_i32;
    let place = (&raw mut status).cast();
    // SAFETY: 1. to 3. as above.
    let made = unsafe { function(context.raw(), device.raw(), properties, place) };
    check(status)?;
    let state = State::queue(!measures || call.properties & QUEUE_PROFILING_ENABLE != 0, None);
    cx.insert_with(call.returned, made, &[&context, &device], state)
}

/// `clCreateCommandQueueWithProperties`.
pub(crate) fn create_command_queue_with_properties(
    cx: &mut Session<'_>,
    call: &CreateCommandQueueWithProperties<'_>,
) -> Result<(), Code> {
    let (context, device) = (cx.object(call.context)?, cx.object(call.device)?);
    let mut properties = cx.properties(call.properties.as_ref(), &[])?;
    let asked = properties.words.clone().unwrap_or_default();
    let pairs = asked
        .chunks_exact(2)
        .filter(|pair| pair[0] == u64::from(QUEUE_PROPERTIES));
    pairs
        .into_iter()
        .try_for_each(|pair| can_be(cx, device.raw(), pair[1]))?;
    let measures = cx.client.tenant.meter.is_some();
    let wanted = if measures {
        measure(&mut properties)
    } else {
        QUEUE_PROFILING_ENABLE
    };
    let function = cx.api().clCreateCommandQueueWithProperties()?;
    let mut status = 0_i32;
    let place = (&raw mut status).cast();
    // SAFETY: 1. to 3. as above.
    let made = unsafe { function(context.raw(), device.raw(), properties.pointer(), place) };
    check(status)?;
    let state = State::queue(wanted & QUEUE_PROFILING_ENABLE != 0, measures.then_some(asked));
    cx.insert_with(call.returned, made, &[&context, &device], state)
}

/// Properties of a queue that measures times: what the client had asked for.
fn measure(properties: &mut Properties) -> u64 {
    let words = properties.words.get_or_insert_with(|| vec![0]);
    let own = words
        .chunks_exact_mut(2)
        .find(|pair| pair[0] == u64::from(QUEUE_PROPERTIES));
    if let Some([_, wanted]) = own {
        let before = *wanted;
        // Of a queue on the device the server sees no commands.
        *wanted |= if before & ON_DEVICE == 0 {
            QUEUE_PROFILING_ENABLE
        } else {
            0
        };
        return before;
    }
    let end = words.len().saturating_sub(1);
    words.splice(end..end, [u64::from(QUEUE_PROPERTIES), QUEUE_PROFILING_ENABLE]);
    0
}

/// `clGetCommandQueueInfo`. Properties are those that the client has asked for.
pub(crate) fn get_command_queue_info(cx: &mut Session<'_>, call: &GetCommandQueueInfo) -> Result<(), Code> {
    if call.param_name == QUEUE_REFERENCE_COUNT {
        return Err(Code::INVALID_VALUE);
    }
    let queue = cx.object(call.command_queue)?;
    let mut answer = Answer::new(call.param_value, call.param_value_size, u8::SIZE);
    let mut length = 0_u64;
    let function = cx.api().clGetCommandQueueInfo()?;
    let (size, at) = (answer.limit(call.param_value_size), answer.pointer());
    let counted = ask(&mut length, call.param_value_size_ret || call.param_value);
    // SAFETY: 1. to 3. as above.
    let status = unsafe { function(queue.raw(), call.param_name, size, at, counted) };
    let State::Queue(own) = &queue.state else {
        return Err(Code(Sort::CommandQueue.invalid()));
    };
    let mut bytes = match (call.param_name, &own.asked) {
        (QUEUE_PROPERTIES_ARRAY, Some(asked)) => {
            let asked: Vec<u8> = asked.iter().flat_map(|word| word.to_le_bytes()).collect();
            length = asked.len() as u64;
            if call.param_value && call.param_value_size < length {
                return Err(Code::INVALID_VALUE);
            }
            asked
        }
        _ => {
            check(status)?;
            let sorts = [
                (i64::from(QUEUE_CONTEXT), Sort::Context),
                (i64::from(QUEUE_DEVICE), Sort::Device),
                (i64::from(QUEUE_DEVICE_DEFAULT), Sort::CommandQueue),
            ];
            cx.translate(&mut answer, length, call.param_name, &sorts);
            answer.bytes(length)
        }
    };
    if call.param_name == QUEUE_PROPERTIES
        && !own.tells_times
        && let Some(first) = bytes.first_mut()
    {
        *first &= !(QUEUE_PROFILING_ENABLE.to_le_bytes()[0]);
    }
    let reply = GetCommandQueueInfoReply {
        status: 0,
        param_value: call.param_value.then(|| List::new(&bytes)),
        param_value_size_ret: call.param_value_size_ret.then_some(length),
    };
    cx.answer(call, &reply, Some(call.reply))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_measures_whatever_was_asked_for() {
        let made_of = |words: Option<Vec<u64>>| {
            let mut properties = Properties {
                words,
                _held: Vec::new(),
            };
            let wanted = measure(&mut properties);
            (wanted, properties.words.unwrap_or_default())
        };
        assert_eq!(made_of(None), (0, vec![0x1093, 2, 0]));
        assert_eq!(made_of(Some(vec![0])), (0, vec![0x1093, 2, 0]));
        assert_eq!(made_of(Some(vec![0x1093, 1, 0])), (1, vec![0x1093, 3, 0]));
        assert_eq!(made_of(Some(vec![0x1093, 2, 0])), (2, vec![0x1093, 2, 0]));
        assert_eq!(made_of(Some(vec![0x1094, 16, 0])), (0, vec![0x1094, 16, 0x1093, 2, 0]));
        assert_eq!(made_of(Some(vec![0x1093, 5, 0])), (5, vec![0x1093, 5, 0]));
    }
}
