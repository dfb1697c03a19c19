//! Requests, from what the driver says to what is answered (5.15.6): the checks of the specification, then the host's part, then the marks.
//! Knows no queue.
//!
//! ```text
//!  request ─▶ in the usable region? ─▶ blocks in the state to leave? ─▶ not more than requested? ─▶ MemoryBlocks ─▶ marks ─▶ ACK
//!                │ no                    │ no                             │ no                       │ failed
//!                ▼                       ▼                                ▼                          ▼
//!              ERROR                   ERROR                            NACK                        BUSY
//! ```
//! A failure of the host's is BUSY: Linux's driver tries again later, where ERROR would have it give the device up.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::MemoryBlocks;
use memory::GuestRam;
use memory::layout;
use observe::LogLimit;

use crate::bitmap::Bitmap;
use crate::protocol::{BlockState, Blocks, Request, Response};
use crate::sizes::SharedSizes;

/// What the device knows of its memory; its thread has it while there is one.
pub(crate) struct Plugging {
    pub(crate) sizes: Arc<SharedSizes>,
    pub(crate) plugged: Bitmap,
    pub(crate) blocks: Box<dyn MemoryBlocks>,
}

impl Plugging {
    pub(crate) fn new(sizes: Arc<SharedSizes>, blocks: Box<dyn MemoryBlocks>) -> Self {
        let plugged = Bitmap::new(sizes.region().blocks());
        Self { sizes, plugged, blocks }
    }

    /// Carries a request out. `log_limit` is for what the host refuses.
    pub(crate) fn answer(&mut self, memory: &GuestRam, request: &Request, log_limit: &LogLimit) -> Response {
        let done = match *request {
            Request::Plug(blocks) => self.plug(memory, blocks),
            Request::Unplug(blocks) => self.unplug(memory, blocks),
            Request::UnplugAll => self.unplug_all(memory),
            Request::State(blocks) => Ok(self.state(blocks)),
            Request::Unknown => Ok(Response::Error),
        };
        done.unwrap_or_else(|error| {
            if log_limit.allow() {
                log::warn!("mem: the host cannot do what the guest asks for now, {request:x?}: {error}");
            }
            Response::Busy
        })
    }

    fn plug(&mut self, memory: &GuestRam, blocks: Blocks) -> io::Result<Response> {
        let Some(run) = self.usable(blocks).filter(|run| self.plugged.all(run.clone(), false)) else {
            return Ok(Response::Error);
        };
        let sizes = self.sizes.get();
        let range = self.range(&run);
        if sizes.plugged.saturating_add(range.length) > sizes.requested {
            return Ok(Response::Nack);
        }
        self.blocks.plug(memory, range)?;
        self.mark(run, true);
        Ok(Response::Ack(BlockState::default()))
    }

    fn unplug(&mut self, memory: &GuestRam, blocks: Blocks) -> io::Result<Response> {
        let Some(run) = self.usable(blocks).filter(|run| self.plugged.all(run.clone(), true)) else {
            return Ok(Response::Error);
        };
        self.take_back(memory, run)?;
        Ok(Response::Ack(BlockState::default()))
    }

    /// What was unplugged before the host refused stays so: the driver has no use for any of it, and asks again.
    fn unplug_all(&mut self, memory: &GuestRam) -> io::Result<Response> {
        for run in self.plugged.runs() {
            self.take_back(memory, run)?;
        }
        self.sizes.unplugged_all();
        Ok(Response::Ack(BlockState::default()))
    }

    fn state(&self, blocks: Blocks) -> Response {
        let Some(run) = self.usable(blocks) else {
            return Response::Error;
        };
        Response::Ack(match () {
            () if self.plugged.all(run.clone(), true) => BlockState::Plugged,
            () if self.plugged.all(run, false) => BlockState::Unplugged,
            () => BlockState::Mixed,
        })
    }

    fn take_back(&mut self, memory: &GuestRam, run: Range<usize>) -> io::Result<()> {
        let range = self.range(&run);
        self.blocks.unplug(memory, range)?;
        self.mark(run, false);
        Ok(())
    }

    /// Blocks that a request may name (5.15.6.1.2): some, aligned, within the usable region.
    fn usable(&self, blocks: Blocks) -> Option<Range<usize>> {
        let region = self.sizes.region();
        let offset = blocks.addr.checked_sub(region.addr)?;
        let length = u64::from(blocks.nb_blocks) * region.block_size;
        let end = offset.checked_add(length)?;
        // The region begins at a multiple of the block size.
        let holds = offset.is_multiple_of(region.block_size) && length > 0 && end <= self.sizes.get().usable;
        let first = usize::try_from(offset / region.block_size).ok()?;
        holds.then(|| first..first + usize::from(blocks.nb_blocks))
    }

    /// Where blocks are.
    pub(crate) fn range(&self, run: &Range<usize>) -> layout::Range {
        let region = self.sizes.region();
        layout::Range {
            start: region.addr + run.start as u64 * region.block_size,
            length: run.len() as u64 * region.block_size,
        }
    }

    fn mark(&mut self, run: Range<usize>, plugged: bool) {
        self.plugged.set(run, plugged);
        let bytes = self.plugged.count() as u64 * self.sizes.region().block_size;
        self.sizes.set_plugged(bytes);
    }
}
