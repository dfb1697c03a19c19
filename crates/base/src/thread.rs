//! How threads are started: with a name, a stack size, and whatever the process wants done first on each.
//!
//! A process that confines its threads registers one function here. From then on every thread begins with it, and is
//! made by one small thread, the thread factory: a thread inherits what its maker is confined to, and so needs no more
//! rights than its own because of who happened to ask for it. Where some threads need rights that the rest of the process
//! gives up, a privileged factory is started before, which keeps them for those. Knows neither what a thread does nor what
//! confining is.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// What each thread calls first, with its name.
type First = fn(&str);

/// A request to make one thread.
type Job = Box<dyn FnOnce() + Send>;

struct Factory {
    first: First,
    jobs: Mutex<SyncSender<Job>>,
}

static FACTORY: OnceLock<Factory> = OnceLock::new();

/// The thread that makes threads.
const FACTORY_NAME: &str = "threads";

/// A factory for the threads whose names begin in some way.
struct PrivilegedFactory {
    prefix: &'static str,
    jobs: Mutex<SyncSender<Job>>,
}

static PRIVILEGED: OnceLock<PrivilegedFactory> = OnceLock::new();

/// The name of the privileged thread factory, for what [`begin_with`] does first on it.
pub const PRIVILEGED_FACTORY_NAME: &str = "threads-priv";

/// Starts a thread that makes all threads whose names begin with `prefix`. It begins with `prepare`, and keeps what
/// rights that leaves, whatever this thread gives up later.
///
/// # Errors
/// The thread cannot be made, one was started before, or `prepare` failed.
pub fn start_privileged_factory<E: Into<io::Error> + Send + 'static>(
    prefix: &'static str,
    prepare: impl FnOnce() -> Result<(), E> + Send + 'static,
) -> io::Result<()> {
    let (jobs, queue) = sync_channel::<Job>(0);
    let jobs = Mutex::new(jobs);
    PRIVILEGED
        .set(PrivilegedFactory { prefix, jobs })
        .map_err(|_| io::Error::other("a privileged thread factory was started before"))?;
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
        .name(PRIVILEGED_FACTORY_NAME.to_owned())
        .stack_size(64 << 10)
        .spawn(body)?;
    answer.recv().map_err(|_| gone())?
}

/// Does something on the privileged thread factory; `None` where there is none.
///
/// # Errors
/// The thread is gone.
pub fn on_privileged_factory<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<Option<T>> {
    PRIVILEGED.get().map(|factory| on(&factory.jobs, work)).transpose()
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
/// too, makes those of [`spawn`]. The privileged factory calls it now.
///
/// # Errors
/// The thread cannot be made, or this was called before.
pub fn begin_with(first: First) -> io::Result<()> {
    let (jobs, queue) = sync_channel::<Job>(0);
    let factory = Factory {
        first,
        jobs: Mutex::new(jobs),
    };
    FACTORY
        .set(factory)
        .map_err(|_| io::Error::other("what threads begin with was set before"))?;
    let body = move || {
        first(FACTORY_NAME);
        serve(&queue);
    };
    Builder::new()
        .name(FACTORY_NAME.to_owned())
        .stack_size(64 << 10)
        .spawn(body)?;
    on_privileged_factory(move || first(PRIVILEGED_FACTORY_NAME)).map(drop)
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
    let first = FACTORY.get().map(|factory| factory.first);
    let privileged = PRIVILEGED.get().filter(|factory| name.starts_with(factory.prefix));
    let Some(jobs) = privileged
        .map(|factory| &factory.jobs)
        .or_else(|| FACTORY.get().map(|factory| &factory.jobs))
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
        if let Some(factory) = FACTORY.get() {
            (factory.first)(&name);
        }
        body()
    })
}
