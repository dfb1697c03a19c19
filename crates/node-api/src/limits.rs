//! What a sandbox may use, besides its size: numbers, how people write them, and which of them make sense. Does not know how
//! any of it is enforced.

use std::fmt;
use std::str::FromStr;

use base::ByteSize;
use serde::{Deserialize, Serialize};

use crate::config::ConfigError;

/// The least processor time, in thousandths: what the kernel takes (`cpu.max`, 1 ms of 100).
pub const MIN_CPU_MILLIS: u64 = 10;

/// The most: a thousand processors.
pub const MAX_CPU_MILLIS: u64 = 1_000_000;

/// The greatest weight (`cpu.weight` of cgroup v2).
pub const MAX_CPU_WEIGHT: u64 = 10_000;

/// The most processes of a Linux system (`PID_MAX_LIMIT`).
pub const MAX_PIDS: u64 = 4 << 20;

/// The slowest disk with which a guest still boots in its time.
pub const MIN_DISK_RATE: Rate = Rate {
    bytes: Some(ByteSize::kib(64)),
    operations: Some(10),
};

/// The slowest link: below it no connection lives.
pub const MIN_NET_RATE: Rate = Rate {
    bytes: Some(ByteSize::kib(1)),
    operations: Some(1),
};

/// So much of both in a second; what is `None` is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Bytes.
    #[serde(default)]
    pub bytes: Option<ByteSize>,
    /// Disk requests, or packets.
    #[serde(default)]
    pub operations: Option<u64>,
}

/// Limits of a sandbox; what is `None` is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Thousandths of a processor, for guest and VMM together.
    #[serde(default)]
    pub cpu_millis: Option<u64>,
    /// The share of the processors where they are short, 1 to 10000; others have 100.
    #[serde(default)]
    pub cpu_weight: Option<u64>,
    /// Processes and threads in the guest.
    #[serde(default)]
    pub pids: Option<u64>,
    /// Reads from each of its disks.
    #[serde(default)]
    pub disk_read: Rate,
    /// Writes to each of its disks.
    #[serde(default)]
    pub disk_write: Rate,
    /// What it gets by its network.
    #[serde(default)]
    pub net_receive: Rate,
    /// What it sends by its network.
    #[serde(default)]
    pub net_transmit: Rate,
}

impl Rate {
    /// There is one.
    pub fn is_limited(&self) -> bool {
        self.bytes.is_some() || self.operations.is_some()
    }

    fn check(&self, what: &'static str, least: Self) -> Result<(), ConfigError> {
        if self.bytes.is_some_and(|bytes| Some(bytes) < least.bytes)
            || self.operations.is_some_and(|count| Some(count) < least.operations)
        {
            return Err(ConfigError::Rate {
                what,
                given: *self,
                least,
            });
        }
        Ok(())
    }
}

impl Limits {
    /// Checks what can be told from the numbers alone.
    ///
    /// # Errors
    /// The first that makes no sense.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(millis) = self.cpu_millis
            && !(MIN_CPU_MILLIS..=MAX_CPU_MILLIS).contains(&millis)
        {
            return Err(ConfigError::CpuLimit(millis));
        }
        if let Some(weight) = self.cpu_weight
            && !(1..=MAX_CPU_WEIGHT).contains(&weight)
        {
            return Err(ConfigError::CpuWeight(weight));
        }
        if let Some(pids) = self.pids
            && !(1..=MAX_PIDS).contains(&pids)
        {
            return Err(ConfigError::Pids(pids));
        }
        self.disk_read.check("reads from a disk", MIN_DISK_RATE)?;
        self.disk_write.check("writes to a disk", MIN_DISK_RATE)?;
        self.net_receive.check("what comes by the network", MIN_NET_RATE)?;
        self.net_transmit.check("what is sent by the network", MIN_NET_RATE)
    }

    /// Some of them are about its network.
    pub fn limits_network(&self) -> bool {
        self.net_receive.is_limited() || self.net_transmit.is_limited()
    }
}

/// Why a text is no limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// No rate.
    #[error(
        "`{0}` is no rate: write bytes a second, such as 10M, operations a second after a slash, such as /100, or both: 10M/100"
    )]
    Rate(String),
    /// No number of processors.
    #[error("`{0}` is no number of processors: write one such as 0.5 or 2, with three digits after the point at most")]
    Cpus(String),
}

impl FromStr for Rate {
    type Err = LimitError;

    /// `BYTES`, `/OPERATIONS` or `BYTES/OPERATIONS`.
    fn from_str(text: &str) -> Result<Self, LimitError> {
        let bad = || LimitError::Rate(text.to_owned());
        let (bytes, operations) = text
            .split_once('/')
            .map_or((text, None), |(bytes, rest)| (bytes, Some(rest)));
        let rate = Self {
            bytes: match bytes {
                "" => None,
                bytes => Some(bytes.parse().map_err(|_| bad())?),
            },
            operations: operations.map(str::parse).transpose().map_err(|_| bad())?,
        };
        if rate.is_limited() { Ok(rate) } else { Err(bad()) }
    }
}

impl fmt::Display for Rate {
    /// As it is parsed, to the byte.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(bytes) = self.bytes {
            write!(f, "{}", bytes.bytes())?;
        }
        if let Some(operations) = self.operations {
            write!(f, "/{operations}")?;
        }
        Ok(())
    }
}

/// Thousandths of a number of processors such as `0.5`.
///
/// # Errors
/// [`LimitError::Cpus`].
pub fn parse_cpus(text: &str) -> Result<u64, LimitError> {
    let bad = || LimitError::Cpus(text.to_owned());
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.len() + part.len() == 0 || !digits(whole) || !digits(part) || part.len() > 3 {
        return Err(bad());
    }
    let number = |text: &str| if text.is_empty() { Ok(0) } else { text.parse::<u64>() };
    let thousandths = number(&format!("{part:0<3}")).map_err(|_| bad())?;
    let whole = number(whole).map_err(|_| bad())?;
    whole
        .checked_mul(1000)
        .and_then(|millis| millis.checked_add(thousandths))
        .ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_written() {
        let rate = |text: &str| text.parse::<Rate>();
        let of = |bytes: Option<u64>, operations| Rate {
            bytes: bytes.map(ByteSize),
            operations,
        };
        assert_eq!(rate("10M"), Ok(of(Some(10 << 20), None)));
        assert_eq!(rate("64k/100"), Ok(of(Some(64 << 10), Some(100))));
        assert_eq!(rate("/7"), Ok(of(None, Some(7))));
        for text in ["10M", "64k/100", "/7", "1"] {
            assert_eq!(rate(&rate(text).unwrap().to_string()), rate(text), "{text}");
        }
        for text in ["", "/", "fast", "10M/", "10M/x", "-1", "1/2/3", "10M/-1"] {
            let error = rate(text).unwrap_err().to_string();
            assert!(error.contains("10M/100"), "{text}: {error}");
        }
    }

    #[test]
    fn processors_have_thousandths() {
        for (text, millis) in [
            ("0.5", 500),
            ("2", 2000),
            (".25", 250),
            ("1.", 1000),
            ("0.001", 1),
            ("0", 0),
        ] {
            assert_eq!(parse_cpus(text), Ok(millis), "{text}");
        }
        for text in ["", ".", "-1", "half", "1.2345", "1e3", "1,5", "99999999999999999999"] {
            assert!(
                parse_cpus(text).unwrap_err().to_string().contains("such as 0.5"),
                "{text}"
            );
        }
    }

    #[test]
    fn nonsense_is_refused_with_what_is_sense() {
        let refusal = |change: fn(&mut Limits)| {
            let mut limits = Limits::default();
            change(&mut limits);
            limits.validate().unwrap_err().to_string()
        };
        assert_eq!(Limits::default().validate(), Ok(()));
        assert!(refusal(|limits| limits.cpu_millis = Some(0)).contains("0.01"));
        assert!(refusal(|limits| limits.cpu_millis = Some(9)).contains("0.009"));
        assert!(refusal(|limits| limits.cpu_millis = Some(2_000_000)).contains("1000"));
        assert!(refusal(|limits| limits.cpu_weight = Some(0)).contains("1 to 10000"));
        assert!(refusal(|limits| limits.cpu_weight = Some(10_001)).contains("1 to 10000"));
        assert!(refusal(|limits| limits.pids = Some(0)).contains("at least 1"));
        assert!(refusal(|limits| limits.pids = Some(1 << 40)).contains("4194304"));
        assert!(refusal(|limits| limits.disk_read.bytes = Some(ByteSize(0))).contains("reads from a disk"));
        let error = refusal(|limits| limits.disk_write.operations = Some(9));
        assert!(error.contains("/9") && error.contains("65536/10"), "{error}");
        assert!(refusal(|limits| limits.net_receive.bytes = Some(ByteSize(1))).contains("network"));
        assert!(refusal(|limits| limits.net_transmit.operations = Some(0)).contains("network"));
    }
}
