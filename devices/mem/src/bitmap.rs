//! Which blocks are plugged, a bit each. Knows no addresses.

use std::ops::Range;

/// A bit for each block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
    blocks: usize,
}

const BITS: usize = u64::BITS as usize;

impl Bitmap {
    /// So many blocks, none of them plugged.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            words: vec![0; blocks.div_ceil(BITS)],
            blocks,
        }
    }

    /// What [`Bitmap::words`] gave for so many blocks; `None` if it cannot have.
    pub(crate) fn from_words(words: Vec<u64>, blocks: usize) -> Option<Self> {
        let bitmap = Self { words, blocks };
        let beyond = (blocks..blocks.next_multiple_of(BITS)).any(|block| bitmap.get(block));
        (bitmap.words.len() == blocks.div_ceil(BITS) && !beyond).then_some(bitmap)
    }

    /// The bits, the lowest block's first.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    pub(crate) fn get(&self, block: usize) -> bool {
        let word = self.words.get(block / BITS);
        word.is_some_and(|word| word >> (block % BITS) & 1 == 1)
    }

    /// Marks blocks, which there are.
    pub(crate) fn set(&mut self, blocks: Range<usize>, plugged: bool) {
        for block in blocks {
            if let Some(word) = self.words.get_mut(block / BITS) {
                let bit = 1 << (block % BITS);
                *word = if plugged { *word | bit } else { *word & !bit };
            }
        }
    }

    /// Whether all of these blocks are in that state.
    pub(crate) fn all(&self, mut blocks: Range<usize>, plugged: bool) -> bool {
        blocks.all(|block| self.get(block) == plugged)
    }

    /// How many are plugged.
    pub(crate) fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Where the highest one that is plugged ends.
    pub(crate) fn end(&self) -> usize {
        let last = self.words.iter().rposition(|word| *word != 0);
        last.map_or(0, |at| at * BITS + BITS - self.words[at].leading_zeros() as usize)
    }

    /// The runs of plugged blocks, the lowest first.
    pub(crate) fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for block in (0..self.end()).filter(|block| self.get(*block)) {
            match runs.last_mut() {
                Some(run) if run.end == block => run.end += 1,
                _ => runs.push(block..block + 1),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cross_words_and_end_where_they_end() {
        let mut bitmap = Bitmap::new(200);
        assert_eq!((bitmap.count(), bitmap.end(), bitmap.runs()), (0, 0, vec![]));
        for run in [0..1, 60..130, 199..200] {
            bitmap.set(run, true);
        }
        assert_eq!(bitmap.runs(), [0..1, 60..130, 199..200]);
        assert_eq!((bitmap.count(), bitmap.end()), (72, 200));
        bitmap.set(100..200, false);
        assert_eq!((bitmap.runs(), bitmap.end()), (vec![0..1, 60..100], 100));
        assert!(bitmap.all(60..100, true) && !bitmap.all(59..100, true));
        assert!(bitmap.all(100..200, false) && !bitmap.all(99..200, false));
    }

    #[test]
    fn only_the_bits_that_there_are_are_taken() {
        let words = |bits: &[usize]| {
            let mut words = vec![0; 2];
            bits.iter().for_each(|bit| words[bit / 64] |= 1 << (bit % 64));
            words
        };
        let bitmap = Bitmap::from_words(words(&[3, 69]), 70).unwrap();
        assert_eq!(bitmap.runs(), [3..4, 69..70]);
        assert_eq!(Bitmap::from_words(words(&[70]), 70), None);
        assert_eq!(Bitmap::from_words(words(&[3]), 60), None);
        assert_eq!(Bitmap::from_words(words(&[3]), 129), None);
        assert_eq!(Bitmap::from_words(bitmap.words().to_vec(), 70), Some(bitmap));
    }
}
