//! Sets of the host's CPUs, in the two ways in which Linux writes them: lists of ranges and masks.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// More than any host has (Linux, `NR_CPUS`): what a list may name.
const MOST: u32 = 8192;

/// Bits of a word of a mask.
const WORD: u32 = 32;

/// CPUs by their numbers, as Linux counts them. Written as a list of ranges, such as `0,2-5`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

/// A text is no list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no list of CPUs: write numbers and ranges, such as 2 or 0,4-7")]
pub struct CpuSetError(String);

impl CpuSet {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether this one is among them.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// They, in rising order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// One more.
    pub fn insert(&mut self, cpu: u32) {
        self.0.insert(cpu);
    }

    /// The one with the lowest number.
    pub fn first(&self) -> Option<u32> {
        self.0.first().copied()
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    /// Those that are in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// Those that are in either.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }

    /// The same as a mask: hexadecimal words of 32 bits, the highest first (Linux, `bitmap_parse`).
    pub fn mask(&self) -> String {
        let words = self.0.last().map_or(1, |last| last / WORD + 1);
        let word = |index: u32| {
            let own = self.iter().filter(|cpu| cpu / WORD == index);
            own.fold(0_u32, |bits, cpu| bits | 1 << (cpu % WORD))
        };
        let words: Vec<String> = (0..words).rev().map(|index| format!("{:08x}", word(index))).collect();
        words.join(",")
    }

    /// Of a mask.
    ///
    /// # Errors
    /// The text is none.
    pub fn of_mask(text: &str) -> Result<Self, CpuSetError> {
        let bad = || CpuSetError(text.trim().to_owned());
        let mut cpus = BTreeSet::new();
        for (index, word) in (0..MOST / WORD).zip(text.trim().rsplit(',')) {
            let bits = u32::from_str_radix(word, 16).map_err(|_| bad())?;
            cpus.extend(
                (0..WORD)
                    .filter(|bit| bits >> bit & 1 == 1)
                    .map(|bit| index * WORD + bit),
            );
        }
        Ok(Self(cpus))
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let bad = || CpuSetError(text.trim().to_owned());
        let number = |text: &str| -> Result<u32, CpuSetError> {
            let number = text.trim().parse::<u32>().ok();
            number.filter(|cpu| *cpu < MOST).ok_or_else(bad)
        };
        let mut cpus = BTreeSet::new();
        // Linux writes "(null)" where a list that it never made is asked for (6.1, `nohz_full`).
        for range in text.trim().split(',').filter(|range| !matches!(*range, "" | "(null)")) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let write = |(first, last): &(u32, u32)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        let ranges: Vec<String> = ranges.iter().map(write).collect();
        f.write_str(&ranges.join(","))
    }
}

impl TryFrom<String> for CpuSet {
    type Error = CpuSetError;

    fn try_from(text: String) -> Result<Self, CpuSetError> {
        text.parse()
    }
}

impl From<CpuSet> for String {
    fn from(cpus: CpuSet) -> Self {
        cpus.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn lists_are_read_as_they_are_written() {
        for text in ["", "0", "0-3", "0,2-5,7", "31-32,64"] {
            assert_eq!(set(text).to_string(), text);
            assert_eq!(CpuSet::of_mask(&set(text).mask()), Ok(set(text)), "{text}");
        }
        assert_eq!(set(" 3,1-2,2\n").to_string(), "1-3");
        assert_eq!(set("(null)\n"), CpuSet::default());
        for bad in ["a", "1-", "3-1", "-1", "1;2", "99999"] {
            let error = bad.parse::<CpuSet>().unwrap_err().to_string();
            assert!(error.contains(bad) && error.contains("such as"), "{error}");
        }
    }

    #[test]
    fn masks_are_the_kernels() {
        assert_eq!(set("0-3").mask(), "0000000f");
        assert_eq!(set("32").mask(), "00000001,00000000");
        assert_eq!(CpuSet::of_mask("f\n"), Ok(set("0-3")));
        assert_eq!(CpuSet::of_mask("1,00000000\n"), Ok(set("32")));
        assert!(CpuSet::of_mask("fish").is_err());
    }

    #[test]
    fn sets_are_added_and_taken_away() {
        assert_eq!(set("0-3").minus(&set("2-5")), set("0-1"));
        assert_eq!(set("0-3").and(&set("2-5")), set("2-3"));
        assert_eq!(set("0-1").or(&set("3")), set("0-1,3"));
        assert_eq!(set("2-3").first(), Some(2));
    }
}
