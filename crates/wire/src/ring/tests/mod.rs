//! What rings are to be: in all orders of memory (`model`), in long random lives, and beside a peer that writes what it likes.

mod model;
mod properties;

use base::Mapping;

use super::{Consumer, Producer, Region, RingMemory, Sequence};

/// xorshift64* (Marsaglia 2003, Vigna 2016).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 1) % bound
    }
}

/// Fresh shared memory.
fn region(length: u64) -> Region {
    let file = base::memfd::sized("ring", length).unwrap();
    Region::new(Mapping::new(&file, usize::try_from(length).unwrap()).unwrap())
}

/// Both ends of a fresh ring, and its memory.
fn ring(capacity: u32, sequence: Sequence) -> (Producer, Consumer, Region) {
    let region = region(RingMemory::size(capacity).unwrap());
    let memory = || RingMemory::new(&region, capacity).unwrap();
    (
        Producer::new(memory(), sequence),
        Consumer::new(memory(), sequence),
        region,
    )
}
