//! Threads of the daemon. Knows nothing of what runs on them.

use std::panic::resume_unwind;

use crate::Error;

/// There may be many threads, so their stacks are small.
const STACK: usize = 512 << 10;

/// Does two things at the same time, the first on a thread of its own; what `main` gave, and what `work` did.
pub(crate) fn beside<T, W: Send>(
    name: &str,
    work: impl FnOnce() -> Result<W, Error> + Send,
    main: impl FnOnce() -> T,
) -> (T, Result<W, Error>) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK);
        let started = thread.spawn_scoped(scope, work);
        let main = main();
        let done = match started {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(error) => Err(Error::host("starting a thread")(error)),
        };
        (main, done)
    })
}

/// Starts a thread that nobody waits for.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(STACK)
        .spawn(work)
        .map(drop)
        .map_err(Error::host("starting a thread"))
}
