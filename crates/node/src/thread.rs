//! Threads of the daemon. Knows nothing of what runs on them.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// So many things are done side by side at most.
const SIDE_BY_SIDE: usize = 16;

/// Does a thing with each of many, side by side where there are threads to be had; what came of each, in their order.
pub(crate) fn with_each<T: Sync, R: Send>(name: &str, all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        while let Some((index, one)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, all.get(at)?)))
        {
            done.push((index, work(one)));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        let start = |_| {
            let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK);
            // This thread does what there is no other for.
            let started = thread.spawn_scoped(scope, take);
            started
                .inspect_err(|error| log::warn!("`{name}` has fewer threads than it wants: {error}"))
                .ok()
        };
        let started: Vec<_> = (1..all.len().min(SIDE_BY_SIDE)).map_while(start).collect();
        let mut done = take();
        for thread in started {
            done.append(&mut thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_is_done_once_and_many_at_a_time() {
        let all: Vec<_> = (0..100).collect();
        assert_eq!(
            with_each("test", &all, |one| one * 2),
            (0..200).step_by(2).collect::<Vec<_>>()
        );
        assert!(with_each("test", &[] as &[u8], |_| ()).is_empty());
        let threads = with_each("test", &[(); 64], |()| {
            std::thread::sleep(Duration::from_millis(5));
            std::thread::current().id()
        });
        assert!(threads.iter().any(|thread| *thread != threads[0]));
    }
}
