//! Which part of a file is asked for: the header `Range` with one range of bytes (RFC 9110, section 14). Knows no file.

use http::HeaderMap;
use http::header::{IF_RANGE, RANGE};

use crate::error::Error;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// The part that is asked for of a file of this size; `None` is the whole. Several ranges, other units and what cannot be read are taken
/// for no range at all, as section 14.2 allows; so is one of a file that has changed since (`If-Range`).
pub(super) fn of(headers: &HeaderMap, size: u64, modified: Option<&str>) -> Result<Option<Part>, Error> {
    let Some(range) = headers.get(RANGE).and_then(|value| value.to_str().ok()) else {
        return Ok(None);
    };
    if let Some(then) = headers.get(IF_RANGE)
        && modified.is_none_or(|now| then.as_bytes() != now.as_bytes())
    {
        return Ok(None);
    }
    let Some((first, last)) = range.strip_prefix("bytes=").and_then(|range| range.split_once('-')) else {
        return Ok(None);
    };
    let number = |text: &str| match text.trim() {
        "" => Some(None),
        digits if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            // A number that is too large is behind every end.
            Some(Some(digits.parse().unwrap_or(u64::MAX)))
        }
        _ => None,
    };
    let (offset, end) = match (number(first), number(last)) {
        (Some(Some(first)), Some(Some(last))) if first <= last => (first, last.saturating_add(1).min(size)),
        (Some(Some(first)), Some(None)) => (first, size),
        (Some(None), Some(Some(last))) => (size.saturating_sub(last), if last == 0 { 0 } else { size }),
        _ => return Ok(None),
    };
    match end.checked_sub(offset) {
        Some(length) if length > 0 => Ok(Some(Part { offset, length })),
        _ => Err(Error::Range { size }),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn ask(range: &str, size: u64) -> Result<Option<(u64, u64)>, u16> {
        let headers = HeaderMap::from_iter([(RANGE, HeaderValue::from_str(range).unwrap())]);
        match of(&headers, size, None) {
            Ok(part) => Ok(part.map(|part| (part.offset, part.length))),
            Err(error) => Err(error.status().as_u16()),
        }
    }

    #[test]
    fn ranges_are_those_of_the_specification() {
        for (range, part) in [
            ("bytes=0-0", (0, 1)),
            ("bytes=0-9", (0, 10)),
            ("bytes=5-99", (5, 5)),
            ("bytes=5-", (5, 5)),
            ("bytes=-3", (7, 3)),
            ("bytes=-99", (0, 10)),
            ("bytes=0-99999999999999999999999", (0, 10)),
        ] {
            assert_eq!(ask(range, 10), Ok(Some(part)), "{range}");
        }
        for range in ["bytes=10-", "bytes=10-20", "bytes=-0", "bytes=99999999999999999999999-"] {
            assert_eq!(ask(range, 10), Err(416), "{range}");
        }
        assert_eq!(ask("bytes=-1", 0), Err(416));
        for range in [
            "bytes=5-4",
            "bytes=0-1,3-4",
            "lines=0-1",
            "bytes=-",
            "bytes=a-b",
            "bytes=+1-2",
            "0-1",
        ] {
            assert_eq!(ask(range, 10), Ok(None), "{range}");
        }
    }

    #[test]
    fn a_range_of_what_has_changed_is_the_whole() {
        let mut headers = HeaderMap::from_iter([(RANGE, HeaderValue::from_static("bytes=1-2"))]);
        headers.insert(IF_RANGE, HeaderValue::from_static("then"));
        assert!(of(&headers, 10, Some("then")).unwrap().is_some());
        assert!(of(&headers, 10, Some("now")).unwrap().is_none());
        assert!(of(&headers, 10, None).unwrap().is_none());
    }
}
