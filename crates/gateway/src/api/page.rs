//! Pages of lists: how many, from where, and what the header says by which the next one is asked for. Knows no list.

use http::HeaderValue;
use node_api::list::Place;

use crate::Error;

/// The header.
pub(crate) const NEXT_TOKEN: &str = "x-next-token";

/// The most of a page.
const MOST: usize = 100;

/// How many are asked for.
pub(crate) fn limit(asked: Option<usize>) -> Result<usize, Error> {
    match asked.unwrap_or(MOST) {
        limit @ 1..=MOST => Ok(limit),
        other => Err(Error::invalid(format!(
            "a page of {other} cannot be had: ask for 1 to {MOST}"
        ))),
    }
}

/// The token of the last place of a page.
pub(crate) fn token(place: &Place) -> String {
    format!("{:x}.{}", place.created_ns, place.id)
}

/// The same for a header.
pub(crate) fn header(place: &Place) -> Option<HeaderValue> {
    HeaderValue::from_str(&token(place)).ok()
}

/// The place that a token tells.
pub(crate) fn parse(token: Option<&str>) -> Result<Option<Place>, Error> {
    let Some(token) = token.filter(|token| !token.is_empty()) else {
        return Ok(None);
    };
    let place = token.split_once('.').and_then(|(created, id)| {
        let created_ns = u64::from_str_radix(created, 16).ok()?;
        let is_id = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        (id.len() <= 64 && id.bytes().all(is_id)).then(|| Place {
            created_ns,
            id: id.to_owned(),
        })
    });
    let place = place.ok_or_else(|| Error::invalid("nextToken is not one that the header x-next-token has told"))?;
    Ok(Some(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_tells_its_place() {
        let place = Place {
            created_ns: 1_763_710_727_123_456_789,
            id: "snap-0a".into(),
        };
        assert_eq!(parse(Some(&token(&place))).unwrap(), Some(place));
        assert_eq!(parse(None).unwrap(), None);
        assert_eq!(parse(Some("")).unwrap(), None);
        for text in ["a", "x.a", "1.a b", "-1.a", &format!("1.{}", "a".repeat(65))] {
            assert!(parse(Some(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn pages_are_bounded() {
        assert_eq!(limit(None).unwrap(), 100);
        assert_eq!(limit(Some(1)).unwrap(), 1);
        assert!(limit(Some(0)).is_err() && limit(Some(101)).is_err());
    }
}
