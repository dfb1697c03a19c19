//! Pseudo-random changes to bytes, the same for the same seed.
//!
//! Knows no format: what a good input looks like, the targets' seeds tell.

/// Values at which integers go wrong.
const EDGES: &[u64] = &[
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    u64::MAX,
];

/// Inputs do not grow beyond this; parsers that read more have limits of their own to be tried with.
const LONGEST: usize = 64 << 10;

/// xorshift64* (Marsaglia 2003, Vigna 2016).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// From a seed; zero, at which the generator would stand still, counts as one.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.max(1))
    }

    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, or zero if there is none.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 1)
            .unwrap_or_default()
            .checked_rem(bound)
            .unwrap_or_default()
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[3]
    }
}

/// A few changes to `input`; `other` is something to take pieces from.
pub(crate) fn mutate(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        change(random, &mut bytes, other);
    }
    bytes.truncate(LONGEST);
    bytes
}

fn change(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let at = random.below(bytes.len());
    match random.below(9) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        1 if !bytes.is_empty() => bytes[at] = random.byte(),
        2 => {
            let byte = random.byte();
            bytes.insert(at, byte);
        }
        3 if !bytes.is_empty() => {
            let end = (at + 1 + random.below(16)).min(bytes.len());
            bytes.drain(at..end);
        }
        4 => overwrite_with_an_edge(random, bytes, at),
        5 => bytes.truncate(at),
        6 if !bytes.is_empty() => {
            let end = (at + 1 + random.below(64)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        7 if !other.is_empty() => {
            let from = random.below(other.len());
            let end = (from + 1 + random.below(64)).min(other.len());
            bytes.splice(at..at, other[from..end].iter().copied());
        }
        _ => overwrite_with_digits(random, bytes, at),
    }
}

fn overwrite_with_an_edge(random: &mut Random, bytes: &mut [u8], at: usize) {
    let value = EDGES[random.below(EDGES.len())];
    let width = 1 << random.below(4);
    let mut encoded = value.to_le_bytes()[..width].to_vec();
    if random.below(2) == 0 {
        encoded.reverse();
    }
    for (place, byte) in bytes.iter_mut().skip(at).zip(encoded) {
        *place = byte;
    }
}

/// Numbers in text (JSON, tar headers) go wrong at other places than binary ones.
fn overwrite_with_digits(random: &mut Random, bytes: &mut [u8], at: usize) {
    for place in bytes.iter_mut().skip(at).take(1 + random.below(12)) {
        *place = b"0179-.e7"[random.below(8)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_changes_the_same_way() {
        let run = |seed| {
            let mut random = Random::new(seed);
            (0..50)
                .map(|_| mutate(&mut random, b"hello world", b"other"))
                .collect::<Vec<_>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn every_kind_of_change_works_on_empty_input() {
        let mut random = Random::new(3);
        let longest = (0..10_000).map(|_| mutate(&mut random, b"", b"").len()).max();
        assert!(longest > Some(0));
    }
}
