//! Sizes in bytes, as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes. Parsed from `512M`, `2GiB`, `64k` or plain bytes; units are binary, as podman's are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// `n` KiB.
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// Why a text is no size.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not a number with one of the known units.
    #[error("`{0}` is not a size: write a number with an optional unit k, m, g or t, such as 512M")]
    Syntax(String),
    /// More than 2^64 - 1 bytes.
    #[error("`{0}` is too large: the most is 16 EiB - 1")]
    Overflow(String),
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (digits, unit) = trimmed.split_at(split);
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(SizeError::Syntax(text.to_owned())),
        };
        if digits.is_empty() {
            return Err(SizeError::Syntax(text.to_owned()));
        }
        let number: u64 = digits.parse().map_err(|_| SizeError::Overflow(text.to_owned()))?;
        number
            .checked_mul(1 << shift)
            .map(Self)
            .ok_or_else(|| SizeError::Overflow(text.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in units {
            let one = 1_u64 << shift;
            if self.0 >= one {
                let tenths = (self.0 % one) * 10 / one;
                let whole = self.0 >> shift;
                return if tenths == 0 {
                    write!(f, "{whole} {unit}")
                } else {
                    write!(f, "{whole}.{tenths} {unit}")
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            ("64k", 65_536),
            ("512M", 512 << 20),
            ("2GiB", 2 << 30),
            ("1 t", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in ["", "M", "-1", "1.5G", "12 parsecs", "0x10"] {
            assert!(matches!(text.parse::<ByteSize>(), Err(SizeError::Syntax(_))), "{text}");
        }
        for text in ["99999999999999999999", "16777216T"] {
            assert!(
                matches!(text.parse::<ByteSize>(), Err(SizeError::Overflow(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn prints_one_decimal_at_most() {
        assert_eq!(ByteSize::mib(128).to_string(), "128 MiB");
        assert_eq!(ByteSize(1536).to_string(), "1.5 KiB");
        assert_eq!(ByteSize(12).to_string(), "12 B");
    }
}
