//! Global memory as a kernel sees it, and a simple one that has what was allocated. Knows no kernel.

use std::cell::Cell;

/// An access to what is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("outside of what is allocated")]
pub struct OutOfRange;

/// Global memory. Addresses below 2^60 reach it; above are the windows of the other spaces.
///
/// The interpreter calls it with aligned addresses only, from one thread.
pub trait Memory {
    /// Reads from `address`.
    ///
    /// # Errors
    ///
    /// Not all of it is there.
    fn load(&self, address: u64, into: &mut [u8]) -> Result<(), OutOfRange>;

    /// Writes to `address`.
    ///
    /// # Errors
    ///
    /// Not all of it is there; then nothing was written.
    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), OutOfRange>;

    /// Replaces `bytes` (2, 4 or 8) bytes by what `update` makes of them, in one step for whoever else sees the memory;
    /// what was there before.
    ///
    /// # Errors
    ///
    /// Not all of it is there; then nothing was written.
    fn atomic(&mut self, address: u64, bytes: u32, update: &mut dyn FnMut(u64) -> u64) -> Result<u64, OutOfRange> {
        let mut buffer = [0; 8];
        let bytes = bytes as usize;
        self.load(address, &mut buffer[..bytes])?;
        let old = u64::from_le_bytes(buffer);
        self.store(address, &update(old).to_le_bytes()[..bytes])?;
        Ok(old)
    }
}

/// Memory of separate allocations, with room between them, so that a kernel that runs over one's end is told.
#[derive(Debug, Default)]
pub struct Regions {
    /// By address.
    regions: Vec<Region>,
    next: u64,
    /// The region of the last access, which most often is that of the next one.
    last: Cell<usize>,
}

#[derive(Debug)]
struct Region {
    start: u64,
    bytes: Vec<u8>,
}

/// Where the first allocation is.
const FIRST: u64 = 0x7000_0000_0000;
/// What CUDA aligns allocations to.
const ALIGN: u64 = 256;

impl Regions {
    /// Without any.
    #[must_use]
    pub fn new() -> Self {
        Self {
            regions: Vec::new(),
            next: FIRST,
            last: Cell::new(0),
        }
    }

    /// Adds one of `size` zero bytes; its address.
    pub fn allocate(&mut self, size: usize) -> u64 {
        let start = self.next;
        self.next += (size as u64).next_multiple_of(ALIGN) + ALIGN;
        self.regions.push(Region {
            start,
            bytes: vec![0; size],
        });
        start
    }

    fn find(&self, address: u64, size: usize) -> Result<(usize, usize), OutOfRange> {
        let within = |index: usize| {
            let region = self.regions.get(index)?;
            let offset = usize::try_from(address.checked_sub(region.start)?).ok()?;
            (region.bytes.len().checked_sub(offset)? >= size).then_some((index, offset))
        };
        if let Some(found) = within(self.last.get()) {
            return Ok(found);
        }
        let after = self.regions.partition_point(|region| region.start <= address);
        let found = after.checked_sub(1).and_then(within).ok_or(OutOfRange)?;
        self.last.set(found.0);
        Ok(found)
    }

    /// The bytes from `address` on.
    ///
    /// # Errors
    ///
    /// Not all of them are there.
    pub fn bytes(&self, address: u64, size: usize) -> Result<&[u8], OutOfRange> {
        let (index, offset) = self.find(address, size)?;
        Ok(&self.regions[index].bytes[offset..offset + size])
    }
}

impl Memory for Regions {
    #[inline]
    fn load(&self, address: u64, into: &mut [u8]) -> Result<(), OutOfRange> {
        let (index, offset) = self.find(address, into.len())?;
        into.copy_from_slice(&self.regions[index].bytes[offset..offset + into.len()]);
        Ok(())
    }

    #[inline]
    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), OutOfRange> {
        let (index, offset) = self.find(address, from.len())?;
        self.regions[index].bytes[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_allocated_is_not_there() {
        let mut memory = Regions::new();
        let first = memory.allocate(10);
        let second = memory.allocate(4);
        assert_eq!(memory.store(first + 6, &[1; 4]), Ok(()));
        assert_eq!(memory.store(first + 7, &[1; 4]), Err(OutOfRange));
        assert_eq!(memory.bytes(first + 7, 4), Err(OutOfRange));
        assert_eq!(memory.load(first - 1, &mut [0]), Err(OutOfRange));
        assert_eq!(memory.load(u64::MAX, &mut [0; 2]), Err(OutOfRange));
        assert_eq!(memory.load(second + 4, &mut [0]), Err(OutOfRange));
        assert_eq!(memory.atomic(second, 4, &mut |old| old + 7), Ok(0));
        assert_eq!(memory.bytes(second, 4), Ok(&[7, 0, 0, 0][..]));
    }
}
