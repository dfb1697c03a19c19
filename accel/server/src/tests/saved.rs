//! Clients that are to be saved, before a byte is written.

use std::time::Instant;

use super::*;
use crate::saved::{Kept, Refusal, drain};

#[test]
fn a_queue_that_takes_no_marker_is_not_waited_for() {
    let function = |name: &CStr| match name.to_bytes() {
        b"clEnqueueMarkerWithWaitList" => None,
        _ => crate::null::function(name),
    };
    // SAFETY: 1. all are the null back end's.
    let backend = Arc::new(unsafe { backend_of(&function) });
    let (_, window) = Window::create(Geometry::new(1, 2, ARENA).unwrap()).unwrap();
    let client = Client::new(backend, Tenant::unlimited(), Some(window)).saved(1, None);
    assert!(drain(&client, Instant::now()).is_ok());
    Caller::new(&client).buffer(64);
    let refused = drain(&client, Instant::now());
    assert!(matches!(refused, Err(Refusal::Driver(_))), "{refused:?}");
    client.end();
}

#[test]
fn the_context_of_a_command_may_have_lost_its_name_before_it() {
    let first = client().saved(1, None);
    let mut caller = Caller::new(&first);
    let (context, command_queue, _) = caller.buffer(64);
    assert_eq!(caller.status(&ReleaseContext { context }), 0);
    let other = CreateContext {
        properties: None,
        num_devices: 0,
        devices: None,
        pfn_notify: Callback(0),
        returned: name(context.index(), 2),
    };
    assert_eq!(caller.status(&other), 0);
    let marker = EnqueueMarkerWithWaitList {
        command_queue,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: name(1, 1),
    };
    assert_eq!(caller.status(&marker), 0);
    let second = Kept::of(&first).unwrap().make(client()).unwrap();
    first.end();
    second.end();
}

#[test]
fn what_was_made_with_something_that_is_gone_is_refused() {
    let first = client().saved(1, None);
    let mut caller = Caller::new(&first);
    let (context, ..) = caller.buffer(64);
    caller.kernel(context);
    let strings = accel_proto::Pieces {
        lengths: List::new(&[]),
        data: Span { offset: 0, length: 0 },
    };
    let header = CreateProgramWithSource {
        context,
        count: 0,
        strings,
        returned: name(2, 1),
    };
    assert_eq!(caller.status(&header), 0);
    let headers = [name(2, 1)];
    let compile = CompileProgram {
        program: name(1, 1),
        num_devices: 0,
        device_list: None,
        options: None,
        num_input_headers: 1,
        input_headers: Some(List::new(&headers)),
        header_include_names: Some(accel_proto::Pieces {
            lengths: List::new(&[0]),
            data: Span { offset: 0, length: 0 },
        }),
        pfn_notify: Callback(0),
    };
    assert_eq!(caller.status(&compile), 0);
    Kept::of(&first).unwrap().make(client()).unwrap().end();
    assert_eq!(caller.status(&ReleaseProgram { program: name(2, 1) }), 0);
    let refused = Kept::of(&first).err().unwrap().to_string();
    assert!(refused.contains("another one, which was released"), "{refused}");
    first.end();
}

#[test]
fn what_a_client_has_of_cuda_is_there_again() {
    use accel_proto::cuda::{CudaDeviceSynchronize, CudaFree, CudaMalloc, CudaMemcpyAsync};
    use accel_proto::{Memory, SvmAddress};

    const DATA: Span = Span {
        offset: 1 << 19,
        length: 5000,
    };
    let device = Memory::Svm(SvmAddress(0x7000_0000_0040));
    let copy = |dst, src| CudaMemcpyAsync {
        dst,
        src,
        count: DATA.length,
        kind: 4,
        stream: Handle::NULL,
    };
    let arena = |client: &Client| {
        let window = client.window.as_ref().unwrap();
        window.slice(DATA.offset, DATA.length).unwrap()
    };
    let tenant = Tenant::unlimited();
    let new = || {
        let (_, window) = Window::create(Geometry::new(1, 2, ARENA).unwrap()).unwrap();
        Client::new(Arc::new(Backend::reference()), Arc::clone(&tenant), Some(window))
    };
    let first = new().saved(1, None);
    let mut caller = Caller::new(&first);
    let bytes: Vec<u8> = (0..5000_u32).map(|at| (at % 251) as u8).collect();
    caller.send(&CudaMalloc {
        dev_ptr: 0x7000_0000_0000,
        size: 10_000,
    });
    arena(&first).write(0, &bytes).unwrap();
    caller.send(&copy(device, Memory::Arena(DATA)));
    assert_eq!(caller.status(&CudaDeviceSynchronize {}), 0);
    let second = Kept::of(&first).unwrap().make(new()).unwrap();
    drop(caller);
    first.end();
    drop(first);
    assert_eq!(tenant.quota.used(), 10_000, "the second one's");
    let mut caller = Caller::new(&second);
    assert_eq!(caller.status(&copy(Memory::Arena(DATA), device)), 0);
    let mut read = vec![0; bytes.len()];
    arena(&second).read(0, &mut read).unwrap();
    assert_eq!(read, bytes);
    caller.send(&CudaFree {
        dev_ptr: 0x7000_0000_0000,
    });
    assert_eq!(caller.status(&CudaDeviceSynchronize {}), 0);
    assert_eq!(tenant.quota.used(), 0);
    second.end();
    // A back end that does not tell what there is refuses.
    let third = client().saved(1, None);
    Caller::new(&third).send(&CudaMalloc {
        dev_ptr: 0x1000,
        size: 1,
    });
    let refused = Kept::of(&third).map(drop);
    assert!(
        matches!(refused, Err(Refusal::CannotBeMadeAgain(what)) if what.contains("CUDA")),
        "{refused:?}"
    );
    third.end();
}
