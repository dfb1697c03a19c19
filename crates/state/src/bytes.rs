//! How bytes stand in JSON: as one text, `LENGTH:HEX`, whose zeroes at the end are left out. An array of numbers, as older versions
//! have them, is read as well. For `#[serde(with = "state::bytes")]`.

use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserializer, Serializer};

/// No state has more bytes in one piece; a length says nothing that could be believed.
const MOST: usize = 1 << 20;

/// Writes them.
///
/// # Errors
/// The serializer's.
pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let used = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    let mut text = format!("{}:", bytes.len());
    for byte in bytes.iter().take(used) {
        for digit in [byte >> 4, byte & 0xf] {
            text.push(char::from(DIGITS[usize::from(digit)]));
        }
    }
    serializer.serialize_str(&text)
}

/// Reads them.
///
/// # Errors
/// It is neither such a text nor an array of bytes, or longer than 1 MiB.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    deserializer.deserialize_any(Bytes)
}

struct Bytes;

impl<'de> Visitor<'de> for Bytes {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes as `LENGTH:HEX`, or an array of them")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Vec<u8>, E> {
        parse(text).ok_or_else(|| E::custom("bytes that are not `LENGTH:HEX`"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Vec<u8>, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = numbers.next_element()? {
            bytes.push(byte);
        }
        Ok(bytes)
    }
}

fn parse(text: &str) -> Option<Vec<u8>> {
    let (length, digits) = text.split_once(':')?;
    let length = length.parse().ok().filter(|&length| length <= MOST)?;
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if !rest.is_empty() || pairs.len() > length {
        return None;
    }
    let mut bytes = Vec::with_capacity(length);
    for &[high, low] in pairs {
        bytes.push(digit(high)? << 4 | digit(low)?);
    }
    bytes.resize(length, 0);
    Some(bytes)
}

fn digit(character: u8) -> Option<u8> {
    match character {
        b'0'..=b'9' => Some(character - b'0'),
        b'a'..=b'f' => Some(character - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Lamp(#[serde(with = "super")] Vec<u8>);

    fn read(text: &str) -> Result<Vec<u8>, String> {
        let lamp = serde_json::from_str::<Lamp>(text);
        lamp.map(|lamp| lamp.0).map_err(|error| error.to_string())
    }

    #[test]
    fn bytes_are_one_text_without_the_zeroes_at_its_end() {
        for (bytes, text) in [
            (vec![], "\"0:\""),
            (vec![0; 4096], "\"4096:\""),
            (vec![0, 0x1f, 255, 0, 0], "\"5:001fff\""),
        ] {
            let lamp = Lamp(bytes);
            assert_eq!(serde_json::to_string(&lamp).unwrap(), text);
            assert_eq!(read(text).unwrap(), lamp.0);
        }
        assert_eq!(read("[0,31,255]").unwrap(), [0, 31, 255], "as older versions have it");
    }

    #[test]
    fn what_are_no_bytes_is_refused() {
        for text in [
            "\"\"",
            "\"1\"",
            "\"1:0\"",
            "\"1:0001\"",
            "\"1:0G\"",
            "\"1:0A\"",
            "\"-1:\"",
            "\"1:é\"",
        ] {
            assert!(read(text).unwrap_err().contains("LENGTH:HEX"), "{text}");
        }
        assert!(read("\"1048577:\"").is_err(), "more than there can be");
        assert!(read("[256]").is_err());
        assert!(read("7").unwrap_err().contains("LENGTH:HEX"));
    }
}
