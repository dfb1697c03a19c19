//! Requests carried out by a few threads with the plain system calls, for hosts without io_uring.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{EventFd, StopSignal};
use rustix::fs::FallocateFlags;

use crate::backend::{Backend, Done};
use crate::disk::Disk;
use crate::request::{Io, Operation};
use crate::waiting::Waiting;

/// Threads of one disk, shared out among its queues.
const THREADS: usize = 8;

/// How many threads each of so many queues has.
pub(crate) fn threads_per_queue(queues: usize) -> usize {
    (THREADS / queues.max(1)).max(1)
}

/// What a worker with threads waits on.
#[derive(Debug)]
pub(crate) struct PoolWaiting {
    waiting: Waiting,
    done: EventFd,
}

impl PoolWaiting {
    pub(crate) fn new(kick: &EventFd) -> io::Result<Self> {
        let done = EventFd::new()?;
        Ok(Self {
            waiting: Waiting::new(kick, &done)?,
            done,
        })
    }
}

#[derive(Default)]
struct Jobs<'m> {
    waiting: VecDeque<Io<'m>>,
    closed: bool,
}

/// What the threads share with the worker.
struct Pool<'m> {
    jobs: Mutex<Jobs<'m>>,
    wake: Condvar,
    done: Mutex<Vec<Done<'m>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'m> Pool<'m> {
    fn work(&self, file: &File, finished: &EventFd) {
        loop {
            let mut jobs = lock(&self.jobs);
            let io = loop {
                if let Some(io) = jobs.waiting.pop_front() {
                    break io;
                }
                if jobs.closed {
                    return;
                }
                jobs = self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            };
            drop(jobs);
            let result = perform(file, &io);
            self.put(io, result, finished);
        }
    }

    fn put(&self, io: Io<'m>, result: io::Result<usize>, finished: &EventFd) {
        let mut done = lock(&self.done);
        done.push((io, result));
        // The worker takes all at once: it was told when the first came.
        if done.len() == 1 {
            finished.signal();
        }
    }
}

/// Lets `serve` work with a backend of `threads` threads, which have ended on return.
pub(crate) fn with_pool<'m>(
    disk: &Disk,
    waiting: PoolWaiting,
    threads: usize,
    stop: &StopSignal,
    serve: impl FnOnce(&mut PoolBackend<'_, 'm>),
) {
    let pool = Pool {
        jobs: Mutex::new(Jobs::default()),
        wake: Condvar::new(),
        done: Mutex::default(),
    };
    let PoolWaiting { waiting, done } = waiting;
    if let Err(error) = waiting.watch_stop(stop.fd()) {
        log::error!("block: it cannot wait for its stop: {error}");
        return;
    }
    std::thread::scope(|scope| {
        let mut running = 0;
        for _ in 0..threads {
            let work = || pool.work(disk.file(), &done);
            match base::thread::spawn_scoped(scope, "block-io", 64 << 10, work) {
                Ok(_) => running += 1,
                Err(error) => log::warn!("block: a thread fewer than wanted: {error}"),
            }
        }
        serve(&mut PoolBackend {
            pool: &pool,
            file: disk.file(),
            waiting,
            done: &done,
            running,
            batch: Vec::new(),
        });
        lock(&pool.jobs).closed = true;
        pool.wake.notify_all();
    });
}

/// The worker's side of a pool.
pub(crate) struct PoolBackend<'p, 'm> {
    pool: &'p Pool<'m>,
    file: &'p File,
    waiting: Waiting,
    done: &'p EventFd,
    running: usize,
    batch: Vec<Io<'m>>,
}

impl PoolBackend<'_, '_> {
    fn start_batch(&mut self) {
        if self.running == 0 {
            // No thread could be had: slow, not stuck.
            for io in self.batch.drain(..) {
                let result = perform(self.file, &io);
                self.pool.put(io, result, self.done);
            }
        }
        let started = self.batch.len();
        if started > 0 {
            lock(&self.pool.jobs).waiting.extend(self.batch.drain(..));
        }
        for _ in 0..started.min(self.running) {
            self.pool.wake.notify_one();
        }
    }
}

impl<'m> Backend<'m> for PoolBackend<'_, 'm> {
    fn submit(&mut self, io: Io<'m>) {
        self.batch.push(io);
    }

    fn wait(&mut self, patience: Option<Duration>, done: &mut Vec<Done<'m>>) -> bool {
        self.start_batch();
        let stopping = self.waiting.wait(patience);
        self.done.consume();
        done.append(&mut lock(&self.pool.done));
        stopping
    }
}

/// Carries out a request, or as much of it as one call does.
fn perform(file: &File, io: &Io<'_>) -> io::Result<usize> {
    let nothing = |()| 0;
    match io.operation {
        Operation::Read => io.buffers.read_from(file, io.offset),
        Operation::Write { durable } => {
            let count = io.buffers.write_to(file, io.offset)?;
            if durable {
                file.sync_data()?;
            }
            Ok(count)
        }
        Operation::Flush => file.sync_data().map(nothing),
        Operation::Discard { length } => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(rustix::fs::fallocate(file, flags, io.offset, length).map(nothing)?)
        }
        Operation::Zero { length } => {
            let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            Ok(rustix::fs::fallocate(file, flags, io.offset, length).map(nothing)?)
        }
    }
}
