//! Requests carried out by io_uring: one ring a queue, one system call a batch.
//!
//! A read that comes alone and that the page cache can answer is one preadv2(2) instead. A ring is set up once, with the
//! disk as its only registered file, restricted to the operations below, and enabled; it then moves from worker to worker.
//! With `guest_io` the only unsafe code of this device.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use base::EventFd;
use io_uring::{IoUring, opcode, register::Restriction, squeue, types};

use crate::backend::{Backend, Done};
use crate::config::QUEUE_SIZE;
use crate::request::{Io, Operation};
use crate::waiting::Waiting;

/// The registered file: the disk.
const DISK: types::Fixed = types::Fixed(0);

/// The operations that a ring can be asked for, whoever asks.
const OPERATIONS: [u8; 6] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// So many passes in a row end without a look at the stop signal, as there was something to answer at once.
const MOST_UNSEEN: u32 = 64;

/// A ring with nothing under way.
pub(crate) struct Ring(IoUring);

impl Ring {
    /// Sets up a ring for `file`.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        let entries = u32::from(QUEUE_SIZE);
        let mut builder = IoUring::builder();
        builder.setup_r_disabled().setup_coop_taskrun();
        let ring = builder.build(entries).or_else(|error| {
            // Linux before 5.19 does not know the flag that saves interrupts.
            let unknown = error.raw_os_error() == Some(libc::EINVAL);
            if unknown {
                IoUring::builder().setup_r_disabled().build(entries)
            } else {
                Err(error)
            }
        })?;
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        let mut restrictions: Vec<_> = OPERATIONS.into_iter().map(Restriction::sqe_op).collect();
        restrictions.push(Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()));
        submitter.register_restrictions(&mut restrictions)?;
        submitter.register_enable_rings()?;
        Ok(Self(ring))
    }
}

/// What a worker with `ring` waits on.
pub(crate) fn waiting(ring: &Ring, kick: &EventFd) -> io::Result<Waiting> {
    // SAFETY: the ring's descriptor is open for as long as the ring, which outlives this call.
    Waiting::new(kick, unsafe { BorrowedFd::borrow_raw(ring.0.as_raw_fd()) })
}

/// A ring in the hands of a worker. Waits for everything under way before it lets go of guest memory.
pub(crate) struct RingBackend<'m, 'f> {
    ring: Option<IoUring>,
    file: &'f File,
    waiting: Waiting,
    requests: Vec<Option<Io<'m>>>,
    free: Vec<usize>,
    /// A read that nothing was submitted with so far.
    alone: Option<Io<'m>>,
    /// Whether the ring has requests that the kernel was not told of.
    queued: bool,
    unseen: u32,
    knows_cached: bool,
}

impl<'m, 'f> RingBackend<'m, 'f> {
    pub(crate) fn new(ring: Ring, file: &'f File, waiting: Waiting) -> Self {
        Self {
            ring: Some(ring.0),
            file,
            waiting,
            requests: Vec::new(),
            free: Vec::new(),
            alone: None,
            queued: false,
            unseen: 0,
            knows_cached: true,
        }
    }

    /// Gives the ring back, with nothing under way.
    pub(crate) fn into_ring(mut self) -> Option<Ring> {
        self.drain();
        self.ring.take().map(Ring)
    }

    fn under_way(&self) -> bool {
        self.requests.len() > self.free.len()
    }

    fn drain(&mut self) {
        let mut done = Vec::new();
        while self.ring.is_some() && self.under_way() {
            self.enter(true);
            self.reap(&mut done);
        }
        // Nothing is left to be done for these but to be answered, which dropping them does.
    }

    fn push(&mut self, entry: &squeue::Entry) {
        let Some(ring) = &mut self.ring else { return };
        loop {
            // SAFETY: 1. buffers and their vectors are those of a request in `requests`, which is kept until its
            // completion was reaped; 2. the guest memory behind them is borrowed for 'm, and `drain` waits for all
            // completions before 'm ends; 3. the disk is a registered file, which the ring itself keeps open.
            let pushed = unsafe { ring.submission().push(entry) };
            if pushed.is_ok() {
                self.queued = true;
                return;
            }
            // The submission queue is full: the kernel takes what is in it.
            if let Err(error) = ring.submit() {
                warn(&error);
            }
        }
    }

    /// Hands a request to the ring; the kernel hears of it with the next [`Self::enter`].
    fn queue(&mut self, io: Io<'m>) {
        let entry = entry(&io);
        let index = self.free.pop().unwrap_or(self.requests.len());
        if index == self.requests.len() {
            self.requests.push(None);
        }
        // The vectors are on the heap and stay where they are when the request moves.
        self.requests[index] = Some(io);
        self.push(&entry.user_data(index as u64));
    }

    /// Does a read that came alone, if that takes no waiting; otherwise the ring gets it.
    fn do_alone(&mut self, done: &mut Vec<Done<'m>>) {
        let Some(io) = self.alone.take() else { return };
        if self.knows_cached {
            match io.buffers.read_cached(self.file, io.offset) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
                // This file system does not know the flag, and never will.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => self.knows_cached = false,
                result => {
                    done.push((io, result));
                    return;
                }
            }
        }
        self.queue(io);
    }

    fn enter(&mut self, block: bool) {
        let Some(ring) = &mut self.ring else { return };
        if let Err(error) = ring.submit_and_wait(usize::from(block)) {
            warn(&error);
        }
        // The kernel takes fewer than there are where it is short of memory.
        self.queued = !ring.submission().is_empty();
    }

    fn reap(&mut self, done: &mut Vec<Done<'m>>) {
        let Some(ring) = &mut self.ring else { return };
        for completion in ring.completion() {
            let index = usize::try_from(completion.user_data()).unwrap_or(usize::MAX);
            if let Some(io) = self.requests.get_mut(index).and_then(Option::take) {
                self.free.push(index);
                done.push((io, result(completion.result())));
            }
        }
    }
}

impl Drop for RingBackend<'_, '_> {
    fn drop(&mut self) {
        self.drain();
    }
}

impl<'m> Backend<'m> for RingBackend<'m, '_> {
    fn submit(&mut self, io: Io<'m>) {
        let first = self.requests.len() == self.free.len() && self.alone.is_none();
        if first && io.operation == Operation::Read {
            self.alone = Some(io);
            return;
        }
        if let Some(alone) = self.alone.take() {
            self.queue(alone);
        }
        self.queue(io);
    }

    fn wait(&mut self, patience: Option<Duration>, done: &mut Vec<Done<'m>>) -> bool {
        self.do_alone(done);
        if self.queued {
            self.enter(false);
            self.reap(done);
        }
        if !done.is_empty() && self.unseen < MOST_UNSEEN {
            self.unseen += 1;
            return false;
        }
        self.unseen = 0;
        let idle = done.is_empty() && !self.queued;
        let stopping = self.waiting.wait(if idle { patience } else { Some(Duration::ZERO) });
        self.reap(done);
        stopping
    }
}

fn result(value: i32) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::from_raw_os_error(value.saturating_neg()))
}

/// Errors of io_uring_enter(2) that pass: interrupted, or the completion queue has to be reaped first. The rest cannot
/// happen to a ring that was set up; guest memory must not be let go of, so the worker goes on trying.
fn warn(error: &io::Error) {
    if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) {
        log::error!("block: io_uring_enter failed: {error}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The submission for what is left of a request.
fn entry(io: &Io<'_>) -> squeue::Entry {
    let vectors = io.buffers.vectors();
    let count = u32::try_from(vectors.len()).unwrap_or(0);
    // The kernel transfers at most about 2 GiB at once and says how much it was; the rest follows.
    let length = |vector: &libc::iovec| u32::try_from(vector.iov_len).unwrap_or(1 << 30);
    match (io.operation, vectors) {
        (Operation::Read, [one]) => opcode::Read::new(DISK, one.iov_base.cast(), length(one))
            .offset(io.offset)
            .build(),
        (Operation::Read, many) => opcode::Readv::new(DISK, many.as_ptr(), count).offset(io.offset).build(),
        (Operation::Write { durable }, [one]) => {
            opcode::Write::new(DISK, one.iov_base.cast_const().cast(), length(one))
                .offset(io.offset)
                .rw_flags(write_flags(durable))
                .build()
        }
        (Operation::Write { durable }, many) => opcode::Writev::new(DISK, many.as_ptr(), count)
            .offset(io.offset)
            .rw_flags(write_flags(durable))
            .build(),
        (Operation::Flush, _) => opcode::Fsync::new(DISK).flags(types::FsyncFlags::DATASYNC).build(),
        (Operation::Discard { length }, _) => opcode::Fallocate::new(DISK, length)
            .offset(io.offset)
            .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
            .build(),
        (Operation::Zero { length }, _) => opcode::Fallocate::new(DISK, length)
            .offset(io.offset)
            .mode(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            .build(),
    }
}

fn write_flags(durable: bool) -> i32 {
    if durable { libc::RWF_DSYNC } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel says to one operation.
    fn ask(ring: &mut Ring, entry: &squeue::Entry) -> i32 {
        // SAFETY: 1. the entry refers to no memory; 2. its file is registered or none.
        unsafe { ring.0.submission().push(entry) }.unwrap();
        ring.0.submit_and_wait(1).unwrap();
        ring.0.completion().next().unwrap().result()
    }

    #[test]
    fn a_ring_can_do_nothing_but_what_a_disk_needs() {
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let mut ring = Ring::new(&file).unwrap();
        assert_eq!(ask(&mut ring, &opcode::Fsync::new(DISK).build()), 0);
        assert_eq!(ask(&mut ring, &opcode::Nop::new().build()), -libc::EACCES);
        assert_eq!(ask(&mut ring, &opcode::Close::new(types::Fd(0)).build()), -libc::EACCES);
        let linked = opcode::Fsync::new(DISK).build().flags(squeue::Flags::ASYNC);
        assert_eq!(ask(&mut ring, &linked), -libc::EACCES);
        assert!(
            ring.0.submitter().unregister_files().is_err(),
            "the disk cannot be exchanged"
        );
    }
}
