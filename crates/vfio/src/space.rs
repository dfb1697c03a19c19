//! The addresses at which functions reach memory (IOVAs): one space for all functions of a VM.
//!
//! What is mapped is a value, [`Mapped`], which only [`AddressSpace::unmap`] consumes: a piece of memory whose value is still there must
//! not be given back, discarded or mapped anew, as functions would go on reaching the old pages. Knows no guest and no back end.

use std::io;
use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};

use crate::VfioError;

/// A piece of this process's memory, and where functions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// The address that functions use: a multiple of the smallest page size.
    pub iova: u64,
    /// Where it is in this process: a multiple of a page.
    pub address: u64,
    /// Bytes: a multiple of the smallest page size, not zero.
    pub length: u64,
}

impl Piece {
    /// The last address that functions use of it; `None` if it is empty or wraps around.
    pub fn last(&self) -> Option<u64> {
        self.iova.checked_add(self.length.checked_sub(1)?)
    }
}

/// What functions may do with a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaAccess {
    /// Read it.
    Read,
    /// Read it and write to it.
    ReadWrite,
}

/// What functions reach.
pub trait AddressSpace: Send + Sync {
    /// Lets functions read and write a piece of memory, as [`AddressSpace::map_for`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    unsafe fn map(&self, piece: Piece) -> Result<Mapped, VfioError> {
        // SAFETY: what is asked is the same.
        unsafe { self.map_for(piece, DmaAccess::ReadWrite) }
    }

    /// Lets functions have access to a piece of memory. Its pages are pinned, and count as locked. Pages that are only to be read are pinned as
    /// they are: of a private mapping of a file they must be the process's own by then, or it goes on with others when it writes to them.
    ///
    /// # Errors
    /// It is no multiple of a page, overlaps what is mapped, is in no range of [`AddressSpace::iova_ranges`], or the host has no memory
    /// or the process no right to lock so much. Nothing is mapped then.
    ///
    /// # Safety
    /// 1. The memory is mapped in this process, and nothing else is mapped in its place, until the piece is unmapped or the space and all
    ///    of its functions are closed; 2. whoever uses it expects that it changes at any time.
    unsafe fn map_for(&self, piece: Piece, access: DmaAccess) -> Result<Mapped, VfioError>;

    /// Takes a piece from the functions: when this returns, none of them reaches it.
    ///
    /// # Errors
    /// The kernel did not do so, or the piece is another space's. It is still mapped, and the error has its value.
    fn unmap(&self, mapped: Mapped) -> Result<(), UnmapError>;

    /// Which addresses can be mapped, ascending. Fewer may be left when another function joins.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn iova_ranges(&self) -> Result<Vec<RangeInclusive<u64>>, VfioError>;

    /// The sizes of pages that the IOMMU has, a bit each: pieces are multiples of the lowest.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn page_sizes(&self) -> Result<u64, VfioError>;

    /// How many more pieces can be mapped; `None` if there is no limit but memory.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn available(&self) -> Result<Option<u32>, VfioError>;
}

/// A piece of memory that functions reach. Dropping it while its space is there is a bug, which says so in the log and, with debug
/// assertions, panics: the piece would stay mapped for ever. When the whole space has ended, so have its pieces.
#[derive(Debug)]
#[must_use = "functions reach this memory until it is given to `unmap`"]
pub struct Mapped {
    piece: Piece,
    space: Weak<()>,
}

impl Mapped {
    /// Where functions see it.
    pub fn iova(&self) -> u64 {
        self.piece.iova
    }

    /// How many bytes it has.
    pub fn length(&self) -> u64 {
        self.piece.length
    }

    /// What was mapped.
    pub fn piece(&self) -> Piece {
        self.piece
    }

    /// Gives up on unmapping it: it stays mapped until its space ends, and its memory must stay until then as well.
    pub fn abandon(self) {
        self.settle();
    }

    /// It is mapped no more, or whoever has it answers for that.
    pub(crate) fn settle(mut self) {
        self.space = Weak::new();
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.space.strong_count() == 0 {
            return;
        }
        let Piece { iova, length, .. } = self.piece;
        log::error!("{length:#x} bytes at {iova:#x} stay mapped for DMA: what stands for them was dropped, a bug");
        // A second panic would hide the first.
        debug_assert!(
            std::thread::panicking(),
            "the mapping of {length:#x} bytes at {iova:#x} was dropped without being unmapped"
        );
    }
}

/// Why a piece is still mapped.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct UnmapError {
    /// It.
    pub mapped: Mapped,
    /// Why.
    pub source: VfioError,
}

/// Whose mappings are whose.
#[derive(Debug, Default)]
pub(crate) struct Owner(Arc<()>);

impl Owner {
    /// The value of a piece that has been mapped.
    pub(crate) fn mapped(&self, piece: Piece) -> Mapped {
        Mapped {
            piece,
            space: Arc::downgrade(&self.0),
        }
    }

    /// What has become of a piece that was to be mapped; what to do about a failure is `next`'s to say.
    pub(crate) fn map(
        &self,
        piece: Piece,
        answer: io::Result<i32>,
        next: impl FnOnce(&io::Error) -> &'static str,
    ) -> Result<Mapped, VfioError> {
        match answer {
            Ok(_) => Ok(self.mapped(piece)),
            Err(source) => Err(VfioError::Map {
                iova: piece.iova,
                length: piece.length,
                next: next(&source),
                source,
            }),
        }
    }

    /// Settles a mapping of which the kernel says that so many bytes were unmapped.
    pub(crate) fn unmap(mapped: Mapped, answer: Result<u64, VfioError>) -> Result<(), UnmapError> {
        let Piece { iova, length, .. } = mapped.piece();
        let source = match answer {
            Ok(done) if done == length => {
                mapped.settle();
                return Ok(());
            }
            Ok(done) => VfioError::Unmapped {
                iova,
                asked: length,
                done,
            },
            Err(source) => source,
        };
        Err(UnmapError { mapped, source })
    }

    /// Checks that a mapping is of this space.
    pub(crate) fn check(&self, mapped: Mapped) -> Result<Mapped, UnmapError> {
        match std::ptr::eq(mapped.space.as_ptr(), Arc::as_ptr(&self.0)) {
            true => Ok(mapped),
            false => Err(UnmapError {
                source: VfioError::OtherSpace(mapped.iova()),
                mapped,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: Piece = Piece {
        iova: 0x1000,
        address: 0x7000,
        length: 0x2000,
    };

    #[test]
    #[should_panic(expected = "the mapping of 0x2000 bytes at 0x1000 was dropped")]
    fn a_mapping_that_is_dropped_is_loud() {
        let owner = Owner::default();
        drop(owner.mapped(PIECE));
    }

    #[test]
    fn a_mapping_ends_by_being_settled_or_with_its_space() {
        let owner = Owner::default();
        owner.mapped(PIECE).settle();
        owner.mapped(PIECE).abandon();
        let late = owner.mapped(PIECE);
        drop(owner);
        assert_eq!((late.iova(), late.length(), late.piece()), (0x1000, 0x2000, PIECE));
        drop(late);
    }

    #[test]
    fn a_mapping_of_another_space_is_given_back() {
        let (owner, other) = (Owner::default(), Owner::default());
        let error = other.check(owner.mapped(PIECE)).unwrap_err();
        assert!(matches!(error.source, VfioError::OtherSpace(0x1000)));
        owner.check(error.mapped).unwrap().settle();
    }

    #[test]
    fn pieces_that_wrap_around_have_no_end() {
        let at = |iova, length| Piece {
            iova,
            address: 0,
            length,
        };
        assert_eq!(at(0x1000, 0x1000).last(), Some(0x1fff));
        assert_eq!(at(u64::MAX - 0xfff, 0x1000).last(), Some(u64::MAX));
        assert_eq!((at(u64::MAX, 2).last(), at(0, 0).last()), (None, None));
    }
}
