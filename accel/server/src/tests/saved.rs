//! Clients that are to be saved, before a byte is written.

use std::time::Instant;

use super::*;
use crate::saved::{Refusal, drain};

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
