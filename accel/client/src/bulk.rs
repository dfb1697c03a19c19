//! Data on its way between the application's memory and the arena: where it lies, and the copies.
//!
//! Obligations of the blocks below, and who discharges each:
//!
//! 1. *The application's side is there.* The application, for all bytes that the call's numbers name, until the command is complete.
//! 2. *The arena's side is there.* It is in a block that this client took, whose length is the box's extent; the window is mapped for as long as
//!    the process (`process`).
//! 3. *The two do not overlap.* What the application has in the arena is used where it is ([`crate::connection::Connection::offset_of`]);
//!    memory that is mapped of a server with a copy of the arena is either side, and then nothing is copied.
//! 4. *Whoever else writes.* The server may write the arena at any time, as it is another process: bytes have any value then, and
//!    are the application's data and nothing else.
#![allow(
    unsafe_code,
    reason = "data is copied between two places of memory; each block says which obligations it rests on"
)]

use accel_window::Block;

use crate::codes::Code;
use crate::connection::Connection;

/// A box of bytes in the application's memory: rows of slices. Between rows there are bytes that are not of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Bytes before the first one.
    pub(crate) begin: u64,
    /// Bytes of a row that are of it.
    pub(crate) width: u64,
    pub(crate) rows: u64,
    pub(crate) slices: u64,
    /// Bytes from one row to the next.
    pub(crate) row_pitch: u64,
    /// Bytes from one slice to the next.
    pub(crate) slice_pitch: u64,
}

impl Shape {
    /// Bytes without gaps.
    pub(crate) fn line(width: u64) -> Self {
        Self {
            begin: 0,
            width,
            rows: 1,
            slices: 1,
            row_pitch: width,
            slice_pitch: width,
        }
    }

    /// Rows and slices of which some have pitches; zero is a pitch without gaps.
    pub(crate) fn rows(region: [u64; 3], row_pitch: u64, slice_pitch: u64) -> Result<Self, Code> {
        let [width, rows, slices] = region;
        let row_pitch = if row_pitch == 0 { width } else { row_pitch };
        let slice_pitch = match slice_pitch {
            0 => row_pitch.checked_mul(rows).ok_or(Code::INVALID_VALUE)?,
            pitch => pitch,
        };
        let is_sound = row_pitch >= width && (slices <= 1 || slice_pitch >= width);
        let shape = Self {
            begin: 0,
            width,
            rows,
            slices,
            row_pitch,
            slice_pitch,
        };
        shape
            .extent()
            .filter(|_| is_sound)
            .map(|_| shape)
            .ok_or(Code::INVALID_VALUE)
    }

    /// The same, further into memory.
    pub(crate) fn at(self, origin: [u64; 3]) -> Result<Self, Code> {
        let [byte, row, slice] = origin;
        let begin = row
            .checked_mul(self.row_pitch)
            .and_then(|rows| slice.checked_mul(self.slice_pitch)?.checked_add(rows))
            .and_then(|begin| begin.checked_add(byte));
        let moved = Self {
            begin: begin.ok_or(Code::INVALID_VALUE)?,
            ..self
        };
        moved.extent().map(|_| moved).ok_or(Code::INVALID_VALUE)
    }

    /// Bytes from the beginning of memory to the end of the last row.
    pub(crate) fn extent(&self) -> Option<u64> {
        if self.width == 0 || self.rows == 0 || self.slices == 0 {
            return Some(0);
        }
        let last_row = (self.rows - 1).checked_mul(self.row_pitch)?;
        let last_slice = (self.slices - 1).checked_mul(self.slice_pitch)?;
        let end = last_row.checked_add(last_slice)?.checked_add(self.width)?;
        // No memory has more.
        end.checked_add(self.begin).filter(|end| *end <= isize::MAX as u64)
    }

    /// Where in memory it begins, and how many bytes there are up to the end of its last row.
    pub(crate) fn at_address(&self, address: usize) -> (usize, u64) {
        let begin = usize::try_from(self.begin).unwrap_or(usize::MAX);
        let length = self.extent().unwrap_or_default().saturating_sub(self.begin);
        (address.saturating_add(begin), length)
    }

    /// Where each row begins, and how long it is. Without gaps it is one.
    fn each_row(&self, mut each: impl FnMut(usize, usize)) {
        let number = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        if self.extent().is_none_or(|extent| extent == 0) {
            return;
        }
        let is_whole = (self.rows == 1 || self.row_pitch == self.width)
            && (self.slices == 1 || self.slice_pitch == self.rows * self.row_pitch);
        if is_whole {
            return each(number(self.begin), number(self.width * self.rows * self.slices));
        }
        for slice in 0..self.slices {
            for row in 0..self.rows {
                let at = self.begin + slice * self.slice_pitch + row * self.row_pitch;
                each(number(at), number(self.width));
            }
        }
    }

    /// From the application into the arena.
    pub(crate) fn copy_in(&self, connection: &Connection, offset: u64, address: usize) {
        let (to, from) = (
            connection.address(offset),
            std::ptr::with_exposed_provenance::<u8>(address),
        );
        if from.addr() == to.addr() {
            return;
        }
        self.each_row(|at, length| {
            // SAFETY: 1. to 4. above: both sides have the box's extent, in which each row is.
            unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(at), to.wrapping_add(at), length) };
        });
    }

    /// From the arena to the application.
    pub(crate) fn copy_out(&self, connection: &Connection, offset: u64, address: usize) {
        let (from, to) = (
            connection.address(offset),
            std::ptr::with_exposed_provenance_mut::<u8>(address),
        );
        if from.addr() == to.addr() {
            return;
        }
        self.each_row(|at, length| {
            // SAFETY: 1. to 4. above: both sides have the box's extent, in which each row is.
            unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(at), to.wrapping_add(at), length) };
        });
    }
}

/// Where data lies in the arena.
#[derive(Debug)]
pub(crate) enum Lies {
    /// In a part that was taken for it.
    Taken(Block),
    /// Where the application has it: it is in the arena already.
    InPlace(u64),
}

impl Lies {
    pub(crate) fn offset(&self) -> u64 {
        match self {
            Self::Taken(block) => block.offset(),
            Self::InPlace(offset) => *offset,
        }
    }

    /// The part that was taken, if there is one.
    pub(crate) fn block(self) -> Option<Block> {
        match self {
            Self::Taken(block) => Some(block),
            Self::InPlace(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_copied_and_gaps_are_not() {
        let shape = Shape::rows([2, 2, 2], 4, 10).unwrap();
        let mut rows = Vec::new();
        shape.each_row(|at, length| rows.push((at, length)));
        assert_eq!(rows, [(0, 2), (4, 2), (10, 2), (14, 2)]);
        assert_eq!(shape.extent(), Some(16));
        assert_eq!(shape.at([1, 1, 1]).unwrap().extent(), Some(31));
        let mut whole = Vec::new();
        Shape::rows([2, 3, 4], 0, 0)
            .unwrap()
            .each_row(|at, length| whole.push((at, length)));
        assert_eq!(whole, [(0, 24)]);
        Shape::line(0).each_row(|_, _| panic!("there is no row"));
    }

    #[test]
    fn what_no_memory_has_is_refused() {
        assert_eq!(Shape::rows([4, 2, 1], 3, 0), Err(Code::INVALID_VALUE));
        assert_eq!(Shape::rows([1, u64::MAX, 2], 0, 0), Err(Code::INVALID_VALUE));
        assert_eq!(Shape::rows([u64::MAX, 1, 1], 0, 0), Err(Code::INVALID_VALUE));
        assert_eq!(Shape::line(1).at([0, u64::MAX, 2]), Err(Code::INVALID_VALUE));
    }
}
