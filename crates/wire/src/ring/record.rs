//! A record: 64 bytes, of which the ring knows the sequence number alone.

/// Bytes of a record.
pub const RECORD_LEN: usize = 64;

/// Sequence numbers are below this: the bit is the ring's wrap counter.
pub const SEQUENCE_LIMIT: u64 = 1 << 63;

/// 64 bytes that were copied out of a ring, or are to go into one: eight words, each with the least significant byte first. The second
/// word is the sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record([u64; RECORD_LEN / 8]);

impl Record {
    /// Of its words.
    pub fn from_words(words: [u64; 8]) -> Self {
        Self(words)
    }

    /// Of its bytes.
    pub fn from_bytes(bytes: &[u8; RECORD_LEN]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let mut record = Self::default();
        for (word, bytes) in record.0.iter_mut().zip(words) {
            *word = u64::from_le_bytes(*bytes);
        }
        record
    }

    /// Its words.
    pub fn words(&self) -> &[u64; 8] {
        &self.0
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> [u8; RECORD_LEN] {
        let mut bytes = [0; RECORD_LEN];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Its sequence number, below [`SEQUENCE_LIMIT`] in a record out of a ring.
    pub fn sequence(&self) -> u64 {
        let [_, sequence, ..] = self.0;
        sequence
    }

    /// The same with another sequence number.
    #[must_use]
    pub fn with_sequence(mut self, number: u64) -> Self {
        let [_, sequence, ..] = &mut self.0;
        *sequence = number;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_words_with_the_least_byte_first() {
        let bytes: [u8; RECORD_LEN] = std::array::from_fn(|index| u8::try_from(index).unwrap());
        let record = Record::from_bytes(&bytes);
        assert_eq!(record.to_bytes(), bytes);
        assert_eq!(record.words()[0], 0x0706_0504_0302_0100);
        assert_eq!(record.sequence(), 0x0f0e_0d0c_0b0a_0908);
        assert_eq!(record.with_sequence(7).to_bytes()[8..16], [7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Record::from_words(*record.words()), record);
    }
}
