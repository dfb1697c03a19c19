//! Requests carried out by io_uring: one ring a queue, one system call a batch.
//!
//! Kicks and the stop signal are polled by the ring too, so that a worker waits in one place. A ring is set up once, with
//! the disk as its only registered file, restricted to the operations below, and enabled; it then moves from worker to
//! worker. With `guest_io` the only unsafe code of this device.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use base::EventFd;
use io_uring::{IoUring, cqueue, opcode, register::Restriction, squeue, types};

use crate::backend::{Backend, Done};
use crate::config::QUEUE_SIZE;
use crate::request::{Io, Operation};

/// The registered file: the disk.
const DISK: types::Fixed = types::Fixed(0);

/// The operations that a ring can be asked for, whoever asks.
const OPERATIONS: [u8; 8] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
];

/// `user_data` of what is no request; those are numbered from 0.
const KICK: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const REMOVE: u64 = u64::MAX - 2;

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
        // Comes with Linux 5.13, as does the multishot poll.
        if !ring.params().is_feature_resource_tagging() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        let mut restrictions: Vec<_> = OPERATIONS.into_iter().map(Restriction::sqe_op).collect();
        restrictions.push(Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()));
        submitter.register_restrictions(&mut restrictions)?;
        submitter.register_enable_rings()?;
        Ok(Self(ring))
    }
}

/// A ring in the hands of a worker. Waits for everything under way before it lets go of guest memory.
pub(crate) struct RingBackend<'m, 'f> {
    ring: Option<IoUring>,
    kick: &'f EventFd,
    stop: &'f EventFd,
    kick_polled: bool,
    stop_polled: bool,
    requests: Vec<Option<Io<'m>>>,
    free: Vec<usize>,
}

impl<'m, 'f> RingBackend<'m, 'f> {
    pub(crate) fn new(ring: Ring, kick: &'f EventFd, stop: &'f EventFd) -> Self {
        Self {
            ring: Some(ring.0),
            kick,
            stop,
            kick_polled: false,
            stop_polled: false,
            requests: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Ends the polls and gives the ring back, with nothing under way.
    pub(crate) fn into_ring(mut self) -> Option<Ring> {
        self.drain();
        self.ring.take().map(Ring)
    }

    fn under_way(&self) -> bool {
        self.kick_polled || self.stop_polled || self.requests.len() > self.free.len()
    }

    fn drain(&mut self) {
        for (polled, target) in [(self.kick_polled, KICK), (self.stop_polled, STOP)] {
            if polled {
                self.push(&opcode::PollRemove::new(target).build().user_data(REMOVE));
            }
        }
        let mut done = Vec::new();
        while self.ring.is_some() && self.under_way() {
            self.enter(true);
            self.reap(&mut done);
        }
        // Nothing is left to be done for these but to be answered, which dropping them does.
    }

    /// Asks to be told of kicks and of the stop signal, if it is not asked already.
    fn poll(&mut self) {
        let readable = libc::POLLIN.unsigned_abs().into();
        if !self.kick_polled {
            // Multishot: each signal gives a completion, whether or not the counter was read in between.
            let entry = opcode::PollAdd::new(types::Fd(self.kick.as_raw_fd()), readable).multi(true);
            self.kick_polled = true;
            self.push(&entry.build().user_data(KICK));
        }
        if !self.stop_polled {
            let entry = opcode::PollAdd::new(types::Fd(self.stop.as_raw_fd()), readable);
            self.stop_polled = true;
            self.push(&entry.build().user_data(STOP));
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        let Some(ring) = &mut self.ring else { return };
        loop {
            // SAFETY: 1. buffers and their vectors are those of a request in `requests`, which is kept until its
            // completion was reaped; 2. the guest memory behind them is borrowed for 'm, and `drain` waits for all
            // completions before 'm ends; 3. the polled event fds are borrowed for 'f, and `drain` ends the polls;
            // 4. the disk is a registered file, which the ring itself keeps open.
            let pushed = unsafe { ring.submission().push(entry) };
            if pushed.is_ok() {
                return;
            }
            // The submission queue is full: the kernel takes what is in it.
            if let Err(error) = ring.submit() {
                complain(&error);
            }
        }
    }

    fn enter(&self, block: bool) {
        let Some(ring) = &self.ring else { return };
        if let Err(error) = ring.submit_and_wait(usize::from(block)) {
            complain(&error);
        }
    }

    fn reap(&mut self, done: &mut Vec<Done<'m>>) -> bool {
        let Some(ring) = &mut self.ring else { return true };
        let mut stopping = false;
        for completion in ring.completion() {
            match completion.user_data() {
                KICK => self.kick_polled = cqueue::more(completion.flags()),
                STOP => {
                    self.stop_polled = false;
                    stopping = true;
                }
                REMOVE => (),
                token => {
                    let index = usize::try_from(token).unwrap_or(usize::MAX);
                    if let Some(io) = self.requests.get_mut(index).and_then(Option::take) {
                        self.free.push(index);
                        done.push((io, result(completion.result())));
                    }
                }
            }
        }
        stopping
    }
}

impl Drop for RingBackend<'_, '_> {
    fn drop(&mut self) {
        self.drain();
    }
}

impl<'m> Backend<'m> for RingBackend<'m, '_> {
    fn submit(&mut self, io: Io<'m>) {
        let entry = entry(&io);
        let index = self.free.pop().unwrap_or(self.requests.len());
        if index == self.requests.len() {
            self.requests.push(None);
        }
        // The vectors are on the heap and stay where they are when the request moves.
        self.requests[index] = Some(io);
        self.push(&entry.user_data(index as u64));
    }

    fn wait(&mut self, block: bool, done: &mut Vec<Done<'m>>) -> bool {
        self.poll();
        self.enter(block);
        self.reap(done)
    }
}

fn result(value: i32) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::from_raw_os_error(value.saturating_neg()))
}

/// Errors of io_uring_enter(2) that pass: interrupted, or the completion queue has to be reaped first. The rest cannot
/// happen to a ring that was set up; guest memory must not be let go of, so the worker goes on trying.
fn complain(error: &io::Error) {
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
