//! Block requests (5.2.6): what a checked chain asks for, and its completion.

use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

use ::device::is_no_space;
use virtio::Chain;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use crate::config::MAX_RANGE_SECTORS;
use crate::disk::{Disk, SECTOR};
use crate::guest_io::{GuestByte, IoVecs};
use crate::metrics::Metrics;

/// `struct virtio_blk_req` up to the data: type, reserved, sector.
const HEADER_BYTES: usize = 16;

/// `struct virtio_blk_discard_write_zeroes`: sector, number of sectors, flags.
const RANGE_BYTES: usize = 16;

/// The status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    IoError,
    Unsupported,
}

impl Status {
    fn byte(self) -> u8 {
        let value = match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::IoError => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        value.to_le_bytes()[0]
    }
}

/// Chains that were answered and wait to be put into the used ring: head and bytes written.
#[derive(Debug, Default)]
pub(crate) struct CompletionQueue(Mutex<Vec<(u16, u32)>>);

impl CompletionQueue {
    pub(crate) fn put(&self, head: u16, written: u32) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((head, written));
    }

    /// Swaps what has gathered into `out`, which is empty.
    pub(crate) fn take(&self, out: &mut Vec<(u16, u32)>) {
        std::mem::swap(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), out);
    }
}

/// The completion that a request is owed. Dropped ungiven, it answers with an I/O error: no request is ever lost.
#[derive(Debug)]
#[must_use = "a request has to be answered"]
pub(crate) struct Completion<'m> {
    head: u16,
    status: Option<GuestByte<'m>>,
    completions: &'m CompletionQueue,
}

impl Completion<'_> {
    /// Answers; `written` counts bytes of data.
    pub(crate) fn give(mut self, status: Status, written: usize) {
        self.answer(status, written);
    }

    fn answer(&mut self, status: Status, written: usize) {
        if let Some(byte) = self.status.take() {
            byte.set(status.byte());
            let written = u32::try_from(written.saturating_add(1)).unwrap_or(u32::MAX);
            self.completions.put(self.head, written);
        }
    }
}

impl Drop for Completion<'_> {
    fn drop(&mut self) {
        self.answer(Status::IoError, 0);
    }
}

/// What the file has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write {
        /// On stable storage before it is answered: the driver has no flush (5.2.6.2).
        durable: bool,
    },
    Flush,
    /// Give the range back; it reads as zeroes afterwards.
    Discard {
        length: u64,
    },
    /// Make the range read as zeroes and keep it allocated.
    Zero {
        length: u64,
    },
}

/// A request that goes to the file.
#[derive(Debug)]
#[must_use = "a request has to be answered"]
pub(crate) struct Io<'m> {
    pub(crate) operation: Operation,
    pub(crate) offset: u64,
    pub(crate) buffers: IoVecs<'m>,
    total: usize,
    completion: Completion<'m>,
}

impl<'m> Io<'m> {
    /// Whether it failed for want of space on the host, and can be tried again when there is some.
    pub(crate) fn lacks_space(&self, result: &io::Result<usize>) -> bool {
        self.operation != Operation::Read && result.as_ref().is_err_and(is_no_space)
    }

    /// Gives its chain back to whoever will begin it anew: it is not answered.
    pub(crate) fn keep(self) -> u16 {
        let mut completion = self.completion;
        // Without it nothing is answered when it is dropped.
        completion.status = None;
        completion.head
    }

    /// Takes the result of one call. What is left to do comes back.
    pub(crate) fn finish(mut self, result: io::Result<usize>, metrics: &Metrics) -> Option<Self> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Some(self),
            Err(error) => self.fail(&error, metrics),
            Ok(count) => match self.operation {
                Operation::Read | Operation::Write { .. } if count == 0 => {
                    let error = io::Error::new(io::ErrorKind::UnexpectedEof, "the disk's file has become shorter");
                    self.fail(&error, metrics);
                }
                Operation::Read | Operation::Write { .. } => {
                    self.offset += count as u64;
                    self.buffers.advance(count);
                    if self.buffers.length() > 0 {
                        return Some(self);
                    }
                    let written = if self.operation == Operation::Read {
                        metrics.bytes_read.add(self.total as u64);
                        self.total
                    } else {
                        metrics.bytes_written.add(self.total as u64);
                        0
                    };
                    self.completion.give(Status::Ok, written);
                }
                Operation::Flush | Operation::Discard { .. } | Operation::Zero { .. } => {
                    self.completion.give(Status::Ok, 0);
                }
            },
        }
        None
    }

    fn fail(self, error: &io::Error, metrics: &Metrics) {
        // Drivers fall back to writing zeroes when told so.
        if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
            self.completion.give(Status::Unsupported, 0);
            return;
        }
        metrics.errors.increment();
        if metrics.log_limit.allow() {
            log::warn!("block: {:?} at {:#x} failed: {error}", self.operation, self.offset);
        }
        self.completion.give(Status::IoError, 0);
    }
}

/// Understands a chain. Requests that need no I/O or cannot be served are answered at once; the others come back.
pub(crate) fn parse<'m>(
    chain: &Chain<'m>,
    disk: &Disk,
    durable: bool,
    completions: &'m CompletionQueue,
    metrics: &Metrics,
) -> Option<Io<'m>> {
    let mut header = [0; HEADER_BYTES];
    let whole = matches!(chain.reader().read(&mut header), Ok(HEADER_BYTES));
    let status = chain.writable().iter().rev().find_map(GuestByte::last_of);
    let Some(status) = status.filter(|_| whole) else {
        // Nowhere to say anything, or nothing to answer to.
        metrics.refused.increment();
        completions.put(chain.head(), 0);
        return None;
    };
    let completion = Completion {
        head: chain.head(),
        status: Some(status),
        completions,
    };
    let request = Request {
        chain,
        disk,
        metrics,
        kind: u32::from_le_bytes([header[0], header[1], header[2], header[3]]),
        sector: u64::from_le_bytes(std::array::from_fn(|at| header[8 + at])),
    };
    match request.plan(durable) {
        Ok(Plan {
            operation,
            offset,
            buffers,
        }) => Some(Io {
            operation,
            offset,
            total: buffers.length(),
            buffers,
            completion,
        }),
        Err(Answer { status, written }) => {
            if status == Status::IoError {
                metrics.errors.increment();
            }
            completion.give(status, written);
            None
        }
    }
}

struct Plan<'m> {
    operation: Operation,
    offset: u64,
    buffers: IoVecs<'m>,
}

/// An answer that needs no I/O.
struct Answer {
    status: Status,
    written: usize,
}

impl From<Status> for Answer {
    fn from(status: Status) -> Self {
        Self { status, written: 0 }
    }
}

struct Request<'c, 'm> {
    chain: &'c Chain<'m>,
    disk: &'c Disk,
    metrics: &'c Metrics,
    kind: u32,
    sector: u64,
}

impl<'m> Request<'_, 'm> {
    fn plan(&self, durable: bool) -> Result<Plan<'m>, Answer> {
        match self.kind {
            VIRTIO_BLK_T_IN => {
                self.metrics.reads.increment();
                // The last byte is the status.
                let buffers = IoVecs::new(self.chain.writable(), 0, 1);
                self.transfer(Operation::Read, buffers)
            }
            VIRTIO_BLK_T_OUT => {
                self.metrics.writes.increment();
                self.writable()?;
                let buffers = IoVecs::new(self.chain.readable(), HEADER_BYTES, 0);
                self.transfer(Operation::Write { durable }, buffers)
            }
            VIRTIO_BLK_T_FLUSH => {
                self.metrics.flushes.increment();
                Ok(Plan {
                    operation: Operation::Flush,
                    offset: 0,
                    buffers: IoVecs::none(),
                })
            }
            VIRTIO_BLK_T_GET_ID => {
                self.metrics.others.increment();
                Err(self.serial())
            }
            VIRTIO_BLK_T_DISCARD => {
                self.metrics.discards.increment();
                self.range(|flags, length| (flags == 0).then_some(Operation::Discard { length }))
            }
            VIRTIO_BLK_T_WRITE_ZEROES => {
                self.metrics.write_zeroes.increment();
                self.range(|flags, length| match flags {
                    0 => Some(Operation::Zero { length }),
                    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP => Some(Operation::Discard { length }),
                    _ => None,
                })
            }
            _ => {
                self.metrics.others.increment();
                Err(Status::Unsupported.into())
            }
        }
    }

    fn writable(&self) -> Result<(), Answer> {
        if self.disk.read_only() {
            Err(Status::IoError.into())
        } else {
            Ok(())
        }
    }

    fn transfer(&self, operation: Operation, buffers: IoVecs<'m>) -> Result<Plan<'m>, Answer> {
        let length = buffers.length() as u64;
        if !length.is_multiple_of(SECTOR) {
            return Err(Status::IoError.into());
        }
        let offset = self.disk.range(self.sector, length).ok_or(Status::IoError)?;
        if length == 0 {
            return Err(Status::Ok.into());
        }
        Ok(Plan {
            operation,
            offset,
            buffers,
        })
    }

    /// Discard and write zeroes: one range; `operation` is `None` for flags that are not known (5.2.6.2).
    fn range(&self, operation: impl FnOnce(u32, u64) -> Option<Operation>) -> Result<Plan<'m>, Answer> {
        self.writable()?;
        if !self.disk.discards() {
            return Err(Status::Unsupported.into());
        }
        let mut bytes = [0; HEADER_BYTES + RANGE_BYTES];
        let count = self.chain.reader().read(&mut bytes).unwrap_or(0);
        if count != bytes.len() || self.chain.readable_bytes() != bytes.len() {
            return Err(Status::IoError.into());
        }
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[HEADER_BYTES + at + i]));
        let sector = u64::from(word(4)) << 32 | u64::from(word(0));
        let (sectors, flags) = (word(8), word(12));
        let length = u64::from(sectors) * SECTOR;
        let operation = operation(flags, length).ok_or(Status::Unsupported)?;
        if sectors > MAX_RANGE_SECTORS {
            return Err(Status::IoError.into());
        }
        let offset = self.disk.range(sector, length).ok_or(Status::IoError)?;
        if length == 0 {
            return Err(Status::Ok.into());
        }
        Ok(Plan {
            operation,
            offset,
            buffers: IoVecs::none(),
        })
    }

    fn serial(&self) -> Answer {
        let serial = self.disk.serial();
        let room = self.chain.writable_bytes().saturating_sub(1).min(serial.len());
        match self.chain.writer().write(&serial[..room]) {
            Ok(written) => Answer {
                status: Status::Ok,
                written,
            },
            Err(_) => Status::IoError.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::GuestRam;
    use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

    fn answered(act: impl FnOnce(Completion<'_>)) -> (u8, Vec<(u16, u32)>) {
        let memory = GuestRam::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        memory.write_obj(0xee_u8, GuestAddress(9)).unwrap();
        let completions = CompletionQueue::default();
        let slice = memory
            .get_slices(GuestAddress(2), 8, Permissions::Write)
            .unwrap()
            .next()
            .unwrap()
            .unwrap();
        act(Completion {
            head: 5,
            status: GuestByte::last_of(&slice),
            completions: &completions,
        });
        let mut answers = Vec::new();
        completions.take(&mut answers);
        (memory.read_obj(GuestAddress(9)).unwrap(), answers)
    }

    #[test]
    fn a_request_is_answered_once() {
        assert_eq!(answered(|request| request.give(Status::Ok, 512)), (0, vec![(5, 513)]));
        assert_eq!(
            answered(|request| request.give(Status::Unsupported, 0)),
            (2, vec![(5, 1)])
        );
    }

    #[test]
    fn a_dropped_request_is_an_error() {
        assert_eq!(answered(|request| drop(request)), (1, vec![(5, 1)]));
    }

    #[test]
    fn what_a_call_left_undone_is_done_by_the_next() {
        let memory = GuestRam::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        let completions = CompletionQueue::default();
        let metrics = Metrics::new(&observe::Registry::new(), "disk");
        let slice = |at, count| {
            let mut slices = memory.get_slices(GuestAddress(at), count, Permissions::Write).unwrap();
            slices.next().unwrap().unwrap()
        };
        let slices = [slice(100, 600), slice(1000, 400), slice(2000, 25)];
        let io = Io {
            operation: Operation::Read,
            offset: 1 << 20,
            total: 1024,
            buffers: IoVecs::new(&slices, 0, 1),
            completion: Completion {
                head: 1,
                status: GuestByte::last_of(&slices[2]),
                completions: &completions,
            },
        };
        let lengths =
            |io: &Io<'_>| -> Vec<usize> { io.buffers.vectors().iter().map(|vector| vector.iov_len).collect() };
        assert_eq!(lengths(&io), [600, 400, 24]);
        let beside = [slice(100, 600), slice(700, 300), slice(1001, 9)];
        let vectors = IoVecs::new(&beside, 50, 0);
        let one_piece: Vec<_> = vectors.vectors().iter().map(|vector| vector.iov_len).collect();
        assert_eq!(one_piece, [850, 9], "buffers that touch are one");
        let io = io.finish(Err(io::ErrorKind::Interrupted.into()), &metrics).unwrap();
        let io = io.finish(Ok(100), &metrics).unwrap();
        assert_eq!(lengths(&io), [500, 400, 24]);
        let io = io.finish(Ok(500), &metrics).unwrap();
        assert_eq!((lengths(&io), io.offset), (vec![400, 24], (1 << 20) + 600));
        let io = io.finish(Ok(410), &metrics).unwrap();
        assert_eq!(lengths(&io), [14]);
        assert!(io.finish(Ok(14), &metrics).is_none());
        let mut answers = Vec::new();
        completions.take(&mut answers);
        assert_eq!(answers, [(1, 1025)]);
    }
}
