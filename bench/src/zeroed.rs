//! Memory that is zeroed before a guest is started, as a node's pool has it. Does not know what is measured with it.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Result, bail};
use base::ByteSize;
use host::zeroed_memory::{self, Pages};
use vmm_api::VmmClient;
use vmm_api::devices::ZEROED_PIECE;
use wire::packet::MAX_FDS;

use crate::machine::now_ns;
use crate::trace::milliseconds;

/// Memory as a node's pool has it: zeroed before a start, in huge pages.
pub(crate) struct Zeroed {
    pieces: Vec<OwnedFd>,
    /// What it took.
    pub(crate) milliseconds: f64,
}

impl Zeroed {
    pub(crate) fn fill(size: ByteSize) -> Result<Self> {
        let before = now_ns();
        let pieces = (0..size.bytes() / ZEROED_PIECE.bytes()).map(|_| {
            let piece = zeroed_memory::file(ZEROED_PIECE)?;
            match zeroed_memory::fill(&piece)? {
                Pages::Huge => Ok(piece),
                Pages::Small => bail!(
                    "memory that is zeroed ahead is in small pages: {}",
                    zeroed_memory::why_small()
                ),
            }
        });
        Ok(Self {
            pieces: pieces.collect::<Result<_>>()?,
            milliseconds: milliseconds(now_ns().saturating_sub(before)),
        })
    }

    /// As a node does, before the function comes.
    pub(crate) fn give(&self, client: &mut VmmClient) -> Result<()> {
        for some in self.pieces.chunks(MAX_FDS) {
            let files: Vec<_> = some.iter().map(AsFd::as_fd).collect();
            client.add_zeroed_memory(&files)?;
        }
        Ok(())
    }
}
