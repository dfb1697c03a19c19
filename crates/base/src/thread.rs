//! How threads are started: with a name, a stack size, and whatever the process wants done first on each.
//!
//! A process that confines its threads registers one function here. From then on every thread begins with it, and is
//! made by one small thread kept for that: a thread inherits what its maker is confined to, and so needs no more rights
//! than its own because of who happened to ask for it. Knows neither what a thread does nor what confining is.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// What each thread calls first, with its name.
type First = fn(&str);

/// A request to make one thread.
type Job = Box<dyn FnOnce() + Send>;

struct Maker {
    first: First,
    jobs: Mutex<SyncSender<Job>>,
}

static MAKER: OnceLock<Maker> = OnceLock::new();

/// The thread that makes threads.
const MAKER_NAME: &str = "threads";

/// From now on each thread calls `first` with its name before anything else, and a thread of its own, which has called it
/// too, makes those of [`spawn`].
///
/// # Errors
/// The thread cannot be made, or this was called before.
pub fn begin_with(first: First) -> io::Result<()> {
    let (jobs, queue) = sync_channel::<Job>(0);
    let maker = Maker {
        first,
        jobs: Mutex::new(jobs),
    };
    MAKER
        .set(maker)
        .map_err(|_| io::Error::other("what threads begin with was set before"))?;
    let body = move || {
        first(MAKER_NAME);
        serve(&queue);
    };
    Builder::new()
        .name(MAKER_NAME.to_owned())
        .stack_size(64 << 10)
        .spawn(body)?;
    Ok(())
}

fn serve(queue: &Receiver<Job>) {
    // The sender is a static: this ends with the process.
    while let Ok(job) = queue.recv() {
        job();
    }
}

/// Starts a thread. At most 15 bytes of its name are visible in the kernel.
///
/// # Errors
/// No thread could be had.
pub fn spawn<T: Send + 'static>(
    name: &str,
    stack: usize,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let builder = Builder::new().name(name.to_owned()).stack_size(stack);
    let Some(maker) = MAKER.get() else {
        return builder.spawn(body);
    };
    let (first, name) = (maker.first, name.to_owned());
    let (reply, answer) = sync_channel(1);
    let job = move || {
        let made = builder.spawn(move || {
            first(&name);
            body()
        });
        // Whoever asked is waiting for it below.
        drop(reply.send(made));
    };
    let gone = || io::Error::other("the thread that makes threads is gone");
    let jobs = maker.jobs.lock().unwrap_or_else(PoisonError::into_inner);
    jobs.send(Box::new(job)).map_err(|_| gone())?;
    drop(jobs);
    answer.recv().map_err(|_| gone())?
}

/// Starts a thread that may borrow, made by this one: it can have no right that this one lacks.
///
/// # Errors
/// No thread could be had.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    stack: usize,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let builder = Builder::new().name(name.to_owned()).stack_size(stack);
    let name = name.to_owned();
    builder.spawn_scoped(scope, move || {
        if let Some(maker) = MAKER.get() {
            (maker.first)(&name);
        }
        body()
    })
}
