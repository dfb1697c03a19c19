//! From a chain of buffers to a request, and from what became of it to what the driver reads. Knows neither domains nor functions but by
//! [`Domains`].

use std::io::{Read, Write};

use virtio::Chain;

use crate::domains::Domains;
use crate::protocol::{PROBE_SIZE, Request, Status, TAIL, properties};

/// Serves one request; how many bytes were written.
pub(crate) fn serve(domains: &mut Domains, chain: &Chain<'_>) -> u32 {
    let mut bytes = [0; Request::MOST];
    let length = chain.readable_bytes().min(bytes.len());
    let read = chain.reader().read(&mut bytes[..length]).unwrap_or(0);
    let writable = chain.writable_bytes();
    let request = Request::read(&bytes[..read]);
    let space = match request {
        Some(Request::Probe { .. }) => PROBE_SIZE + TAIL,
        _ => TAIL,
    };
    // Of a type that is not known, and of a request that is cut off, it is not known where its status is (5.13.6.2).
    let Some(request) = request.filter(|_| writable >= space) else {
        domains.metrics.refused_chains.increment();
        return 0;
    };
    domains.metrics.requests[request.place()].increment();
    let mut answer = Vec::with_capacity(PROBE_SIZE + TAIL);
    let served = match request {
        Request::Probe { endpoint } => domains.reserved(endpoint).map(|reserved| {
            answer.extend(properties(&reserved));
        }),
        other => domains.serve(other),
    };
    let status = match served {
        Ok(()) => Status::Ok,
        Err(status) => {
            domains.metrics.refused_requests.increment();
            status
        }
    };
    // The status stands behind all properties that there can be, which may be none (5.13.6.7).
    answer.resize(space - TAIL, 0);
    answer.extend([status as u8, 0, 0, 0]);
    match chain.writer().write_all(&answer) {
        Ok(()) => u32::try_from(answer.len()).unwrap_or(0),
        // It was checked to lie in guest memory.
        Err(error) => {
            domains.metrics.warn(&error);
            0
        }
    }
}
