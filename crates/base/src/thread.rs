//! How threads are started: with a name, a stack size, and whatever the process wants done first on each.
//!
//! A process that confines its threads registers one function here. From then on every thread begins with it, and is
//! made by one small thread kept for that: a thread inherits what its maker is confined to, and so needs no more rights
//! than its own because of who happened to ask for it. Where some threads need rights that the rest of the process gives
//! up, a second maker is set aside before, which keeps them for those. Knows neither what a thread does nor what
//! confining is.

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

/// A maker for the threads whose names begin in some way.
struct Aside {
    prefix: &'static str,
    jobs: Mutex<SyncSender<Job>>,
}

static ASIDE: OnceLock<Aside> = OnceLock::new();

/// The name of the thread that was set aside, for what [`begin_with`] does first on it.
pub const ASIDE_NAME: &str = "threads-aside";

/// Sets a thread aside that makes all threads whose names begin with `prefix`. It begins with `prepare`, and keeps what
/// rights that leaves, whatever this thread gives up later.
///
/// # Errors
/// The thread cannot be made, one was set aside before, or `prepare` failed.
pub fn set_aside<E: Into<io::Error> + Send + 'static>(
    prefix: &'static str,
    prepare: impl FnOnce() -> Result<(), E> + Send + 'static,
) -> io::Result<()> {
    let (jobs, queue) = sync_channel::<Job>(0);
    let jobs = Mutex::new(jobs);
    ASIDE
        .set(Aside { prefix, jobs })
        .map_err(|_| io::Error::other("a thread was set aside before"))?;
    let (reply, answer) = sync_channel(1);
    let body = move || {
        let prepared = prepare().map_err(Into::into);
        let failed = prepared.is_err();
        // Whoever asked is waiting for it below.
        drop(reply.send(prepared));
        if !failed {
            serve(&queue);
        }
    };
    Builder::new()
        .name(ASIDE_NAME.to_owned())
        .stack_size(64 << 10)
        .spawn(body)?;
    answer.recv().map_err(|_| gone())?
}

/// Does something on the thread that was set aside; `None` where there is none.
///
/// # Errors
/// The thread is gone.
pub fn on_aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<Option<T>> {
    ASIDE.get().map(|aside| on(&aside.jobs, work)).transpose()
}

/// Does something on the thread that takes these jobs, and waits for it.
fn on<T: Send + 'static>(jobs: &Mutex<SyncSender<Job>>, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (reply, answer) = sync_channel(1);
    let job = move || {
        // Whoever asked is waiting for it below.
        drop(reply.send(work()));
    };
    let jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
    jobs.send(Box::new(job)).map_err(|_| gone())?;
    drop(jobs);
    answer.recv().map_err(|_| gone())
}

fn gone() -> io::Error {
    io::Error::other("the thread that makes threads is gone")
}

/// From now on each thread calls `first` with its name before anything else, and a thread of its own, which has called it
/// too, makes those of [`spawn`]. One that was set aside calls it now.
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
    on_aside(move || first(ASIDE_NAME)).map(drop)
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
    let first = MAKER.get().map(|maker| maker.first);
    let aside = ASIDE.get().filter(|aside| name.starts_with(aside.prefix));
    let Some(jobs) = aside
        .map(|aside| &aside.jobs)
        .or_else(|| MAKER.get().map(|maker| &maker.jobs))
    else {
        return builder.spawn(body);
    };
    let name = name.to_owned();
    let make = move || {
        builder.spawn(move || {
            if let Some(first) = first {
                first(&name);
            }
            body()
        })
    };
    on(jobs, make)?
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
