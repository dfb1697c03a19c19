//! Moments as JSON has them: RFC 3339 in UTC with milliseconds. Knows no field.

use std::time::{SystemTime, UNIX_EPOCH};

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

const NANOS: u64 = 1_000_000_000;
const MILLI: u64 = 1_000_000;

/// The last moment that a date of four digits can say (9999-12-31T23:59:59Z), in seconds since 1970.
const LAST: u64 = 253_402_300_799;

/// A moment in nanoseconds since 1970, as text.
pub(crate) fn text(ns: u64) -> String {
    let seconds = (ns / NANOS).min(LAST);
    let whole = i64::try_from(seconds)
        .ok()
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
        .unwrap_or(OffsetDateTime::UNIX_EPOCH);
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
        whole.year(),
        u8::from(whole.month()),
        whole.day(),
        whole.hour(),
        whole.minute(),
        whole.second(),
        ns % NANOS / MILLI
    )
}

/// The moment that no sandbox lives to see: of one whose time has no end.
pub(crate) fn never() -> String {
    text(LAST.saturating_mul(NANOS))
}

/// A moment that somebody has written, in nanoseconds since 1970.
pub(crate) fn parse(text: &str) -> Option<u64> {
    let moment = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    u64::try_from(moment.unix_timestamp_nanos()).ok()
}

/// Now, in nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Now, in seconds since 1970.
pub(crate) fn now() -> u64 {
    now_ns() / NANOS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_and_read() {
        assert_eq!(text(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(text(1_763_710_727_123_456_789), "2025-11-21T07:38:47.123Z");
        assert_eq!(parse("2025-11-21T08:38:47.123+01:00"), Some(1_763_710_727_123_000_000));
        assert_eq!(parse("2025-11-21T07:38:47Z"), Some(1_763_710_727_000_000_000));
        for text in ["", "yesterday", "1969-12-31T23:59:59Z", "2025-11-21"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn what_has_no_end_has_a_date() {
        // In nanoseconds since 1970, u64 ends before the year 2555.
        assert!(never().starts_with("2554-"), "{}", never());
        assert_eq!(text(u64::MAX), never());
    }
}
