//! Threads of the daemon. Knows nothing of what runs on them.

use crate::Error;

/// There may be many threads, so their stacks are small.
const STACK: usize = 512 << 10;

/// Starts a thread that nobody waits for.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(STACK)
        .spawn(work)
        .map(drop)
        .map_err(Error::host("starting a thread"))
}
