//! Who has which part of an arena. All of its state is in the client's own memory: the server is told offsets and lengths, and trusts none.
//!
//! The smallest free piece that is large enough is taken (best fit), of those the first; what is given back grows together with what is
//! free around it.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Error, Geometry};

/// What parts begin at a multiple of, and are a multiple of: a cache line.
const LINE: u64 = 64;

/// Parts of at least this many bytes begin on a page, so that drivers can pin them and back ends can work in place.
const PAGE: u64 = 4096;

/// A part of an arena that somebody has. It is given back by [`Arena::give_back`]; one that is dropped stays taken.
#[must_use = "it stays taken until it is given back"]
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    offset: u64,
    length: u64,
    taken: u64,
}

impl Block {
    /// From the arena's beginning.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// What was asked for.
    pub fn length(&self) -> u64 {
        self.length
    }
}

/// The free parts of an arena.
#[derive(Debug)]
pub struct Arena {
    size: u64,
    free: u64,
    /// Lengths by offsets, and both in the order in which they are taken.
    by_offset: BTreeMap<u64, u64>,
    by_length: BTreeSet<(u64, u64)>,
}

impl Arena {
    /// All of a window's arena, free.
    pub fn new(geometry: Geometry) -> Self {
        let mut arena = Self {
            size: geometry.arena(),
            free: 0,
            by_offset: BTreeMap::new(),
            by_length: BTreeSet::new(),
        };
        arena.add(0, geometry.arena());
        arena
    }

    /// Bytes that are free, not always in one piece.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Takes so many bytes; at least a line is taken, so that each block has an offset of its own.
    ///
    /// # Errors
    /// [`Error::Full`].
    pub fn take(&mut self, length: u64) -> Result<Block, Error> {
        let full = Error::Full {
            length,
            size: self.size,
            free: self.free,
            largest: self.by_length.last().map_or(0, |(length, _)| *length),
        };
        let Some(taken) = length.max(1).checked_next_multiple_of(LINE) else {
            return Err(full);
        };
        let alignment = if length >= PAGE { PAGE } else { LINE };
        let fits = |&&(free, offset): &&(u64, u64)| {
            let lost = offset.next_multiple_of(alignment) - offset;
            free - lost.min(free) >= taken
        };
        let Some(&(free, start)) = self.by_length.range((taken, 0)..).find(fits) else {
            return Err(full);
        };
        self.remove(start, free);
        let offset = start.next_multiple_of(alignment);
        self.add(start, offset - start);
        self.add(offset + taken, start + free - offset - taken);
        Ok(Block { offset, length, taken })
    }

    /// Gives a block back. The server must have no use for it any more.
    pub fn give_back(&mut self, block: Block) {
        let (mut offset, mut length) = (block.offset, block.taken);
        if let Some((&before, &size)) = self.by_offset.range(..offset).next_back()
            && before + size == offset
        {
            self.remove(before, size);
            (offset, length) = (before, length + size);
        }
        if let Some(&size) = self.by_offset.get(&(offset + length)) {
            self.remove(offset + length, size);
            length += size;
        }
        self.add(offset, length);
    }

    fn add(&mut self, offset: u64, length: u64) {
        if length > 0 {
            self.by_offset.insert(offset, length);
            self.by_length.insert((length, offset));
            self.free += length;
        }
    }

    fn remove(&mut self, offset: u64, length: u64) {
        self.by_offset.remove(&offset);
        self.by_length.remove(&(length, offset));
        self.free -= length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(size: u64) -> Arena {
        Arena::new(Geometry::new(1, 2, size).unwrap())
    }

    #[test]
    fn blocks_never_overlap_and_grow_together_again() {
        let mut random = 7_u64;
        let mut next = |bound: u64| {
            random ^= random >> 12;
            random ^= random << 25;
            random ^= random >> 27;
            (random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 1) % bound
        };
        let mut arena = arena(1 << 20);
        let mut blocks: Vec<Block> = Vec::new();
        let (mut refused, mut taken) = (0, 0);
        for _ in 0..20_000 {
            if next(5) < 3 || blocks.is_empty() {
                let order = next(14);
                let length = next(16 << order);
                match arena.take(length) {
                    Ok(block) => {
                        let end = block.offset + block.taken;
                        assert!(block.length() == length && block.taken >= length && end <= 1 << 20);
                        assert!(block.offset.is_multiple_of(if length >= PAGE { PAGE } else { LINE }));
                        let apart = |other: &Block| end <= other.offset || other.offset + other.taken <= block.offset;
                        assert!(blocks.iter().all(apart));
                        blocks.push(block);
                        taken += 1;
                    }
                    Err(Error::Full { largest, free, .. }) => {
                        assert!(largest < length.next_multiple_of(LINE) + PAGE && free >= largest);
                        refused += 1;
                    }
                    Err(other) => panic!("{other}"),
                }
            } else {
                let index = usize::try_from(next(blocks.len() as u64)).unwrap();
                arena.give_back(blocks.swap_remove(index));
            }
            let held: u64 = blocks.iter().map(|block| block.taken).sum();
            assert_eq!(arena.free(), (1 << 20) - held);
        }
        assert!(refused > 100 && taken > 5000, "{refused} refused, {taken} taken");
        blocks.into_iter().for_each(|block| arena.give_back(block));
        assert_eq!(arena.take(1 << 20).unwrap().offset(), 0);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        let mut arena = arena(8192);
        let first = arena.take(100).unwrap();
        let error = arena.take(8192).unwrap_err().to_string();
        assert_eq!(
            error,
            "8192 bytes are not free in one piece in the arena: of its 8192 bytes 8064 are free, 8064 in one piece"
        );
        assert!(arena.take(u64::MAX).is_err());
        let second = arena.take(4096).unwrap();
        assert_eq!((first.offset(), second.offset()), (0, 4096));
        let none = arena.take(0).unwrap();
        assert_eq!((none.offset(), none.length()), (128, 0));
        for block in [second, first, none] {
            arena.give_back(block);
        }
        assert_eq!(arena.free(), 8192);
    }
}
