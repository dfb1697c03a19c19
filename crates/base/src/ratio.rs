//! How many times over something is given away, as people write it: `1.5`. Knows nothing of what is given.

use std::fmt;
use std::str::FromStr;

/// A number from 0.01 to 100000 with two decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ratio {
    hundredths: u32,
}

/// One, in hundredths.
const ONE: u32 = 100;

/// The most, in hundredths.
const MOST: u32 = 100_000 * ONE;

impl Ratio {
    /// A whole number; the most for a larger one, and 1 for none.
    pub const fn whole(number: u32) -> Self {
        let hundredths = number.saturating_mul(ONE);
        match hundredths {
            0 => Self { hundredths: ONE },
            MOST.. => Self { hundredths: MOST },
            hundredths => Self { hundredths },
        }
    }

    /// So many times `amount`.
    pub fn times(self, amount: u64) -> u64 {
        let product = u128::from(amount) * u128::from(self.hundredths) / u128::from(ONE);
        u64::try_from(product).unwrap_or(u64::MAX)
    }

    /// `amount` divided by it.
    pub fn divides(self, amount: u64) -> u64 {
        let quotient = u128::from(amount) * u128::from(ONE) / u128::from(self.hundredths);
        u64::try_from(quotient).unwrap_or(u64::MAX)
    }
}

/// Why a text is no ratio.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no ratio: write a number from 0.01 to 100000 with at most two decimals, such as 1.5")]
pub struct RatioError(String);

impl FromStr for Ratio {
    type Err = RatioError;

    fn from_str(text: &str) -> Result<Self, RatioError> {
        let wrong = || RatioError(text.to_owned());
        let (whole, decimals) = text.trim().split_once('.').unwrap_or((text.trim(), "0"));
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(decimals) || decimals.len() > 2 {
            return Err(wrong());
        }
        let whole: u32 = whole.parse().map_err(|_| wrong())?;
        let decimals: u32 = format!("{decimals:0<2}").parse().map_err(|_| wrong())?;
        let hundredths = whole.checked_mul(ONE).and_then(|whole| whole.checked_add(decimals));
        match hundredths {
            Some(hundredths @ 1..=MOST) => Ok(Self { hundredths }),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, decimals) = (self.hundredths / ONE, self.hundredths % ONE);
        match decimals {
            0 => write!(f, "{whole}"),
            tenths if tenths % 10 == 0 => write!(f, "{whole}.{}", tenths / 10),
            decimals => write!(f, "{whole}.{decimals:02}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_read_and_written() {
        for (text, written) in [
            ("1", "1"),
            ("1.0", "1"),
            ("1.5", "1.5"),
            ("0.25", "0.25"),
            ("2.05", "2.05"),
            (" 16 ", "16"),
        ] {
            assert_eq!(text.parse::<Ratio>().unwrap().to_string(), written, "{text}");
        }
        assert_eq!(Ratio::whole(16), "16".parse().unwrap());
        assert_eq!(Ratio::whole(0), Ratio::whole(1));
        assert_eq!(Ratio::whole(u32::MAX).to_string(), "100000");
    }

    #[test]
    fn what_is_no_ratio_is_refused() {
        for text in [
            "",
            "0",
            "0.00",
            ".5",
            "1.",
            "-1",
            "1.234",
            "1,5",
            "x",
            "100000.01",
            "99999999999",
        ] {
            let error = text.parse::<Ratio>().unwrap_err();
            assert!(error.to_string().contains("such as 1.5"), "{text}");
        }
    }

    #[test]
    fn amounts_are_multiplied_and_divided_without_overflow() {
        let ratio: Ratio = "1.5".parse().unwrap();
        assert_eq!((ratio.times(10), ratio.divides(15)), (15, 10));
        assert_eq!(Ratio::whole(100_000).times(u64::MAX), u64::MAX);
        assert_eq!("0.01".parse::<Ratio>().unwrap().divides(u64::MAX), u64::MAX);
    }
}
