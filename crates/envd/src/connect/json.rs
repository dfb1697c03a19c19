//! The JSON of protobuf (protobuf.dev, "ProtoJSON Format") where it differs from what serde does by itself: bytes, numbers that may be
//! strings, enumerations by name or number, `null` for what is not there, times. Knows no message.

use std::fmt;
use std::marker::PhantomData;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use serde::de::{DeserializeOwned, Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Error;

const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Reads a request's message; unknown fields are nothing to it.
pub(crate) fn read<T: DeserializeOwned + Default>(bytes: &[u8]) -> Result<T, Error> {
    // A message that is empty has only default values, and some clients then send nothing at all.
    if bytes.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(bytes).map_err(|error| Error::Invalid(format!("the message cannot be read: {error}")))
}

/// Writes an answer's message.
pub(crate) fn write(message: &impl Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(message).map_err(|error| Error::Agent(format!("what it says cannot be passed on: {error}")))
}

/// A field that may be missing or `null`, for its default value then.
pub(crate) fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(source: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(source)?.unwrap_or_default())
}

/// Bytes, which are base64.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Base64(pub(crate) Bytes);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, target: S) -> Result<S::Ok, S::Error> {
        target.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Base64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes in base64")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Base64, E> {
                let engine = if text.contains(['-', '_']) { URL_SAFE } else { STANDARD };
                let bytes = engine.decode(text).map_err(E::custom)?;
                Ok(Base64(bytes.into()))
            }
        }
        source.deserialize_str(Text)
    }
}

/// A number without a sign that may come as a string or with a fraction of zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Number<T>(pub(crate) T);

impl<'de, T: TryFrom<u64>> Deserialize<'de> for Number<T> {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct Digits<T>(PhantomData<T>);
        impl<T: TryFrom<u64>> Visitor<'_> for Digits<T> {
            type Value = Number<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number that is not negative and not too large")
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Number<T>, E> {
                let unfit = |_| E::invalid_value(serde::de::Unexpected::Unsigned(value), &"a smaller number");
                T::try_from(value).map(Number).map_err(unfit)
            }

            fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Number<T>, E> {
                if value.fract() != 0.0 {
                    return Err(E::invalid_value(serde::de::Unexpected::Float(value), &self));
                }
                // Without an exponent, and refused where it is negative or no number.
                self.visit_str(&format!("{value:.0}"))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Number<T>, E> {
                match text.parse() {
                    Ok(value) => self.visit_u64(value),
                    Err(_) => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
        }
        source.deserialize_any(Digits(PhantomData))
    }
}

/// An enumeration's value, by its number; names are looked up in `names`.
pub(crate) fn enumeration<'de, D: Deserializer<'de>>(source: D, names: &[(&str, i64)]) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(i64),
        Name(String),
    }
    match Option::<Either>::deserialize(source)? {
        None => Ok(0),
        Some(Either::Number(number)) => Ok(number),
        Some(Either::Name(name)) => match names.iter().find(|(known, _)| *known == name) {
            Some((_, number)) => Ok(*number),
            None => Err(D::Error::custom(format!("{name:?} is no value of this enumeration"))),
        },
    }
}

/// A number of 64 bits, which is a string.
pub(crate) fn long<S: Serializer>(value: &u64, target: S) -> Result<S::Ok, S::Error> {
    target.collect_str(value)
}

/// Whether a field has its default value, and so is not written.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A time, nanoseconds since 1970, as `google.protobuf.Timestamp` is written: with none, three, six or nine digits of a second.
pub(crate) fn timestamp(ns: i64) -> Option<String> {
    let time = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(ns)).ok()?;
    let nanos = time.nanosecond();
    let fraction = match nanos {
        0 => String::new(),
        _ if nanos.is_multiple_of(1_000_000) => format!(".{:03}", nanos / 1_000_000),
        _ if nanos.is_multiple_of(1_000) => format!(".{:06}", nanos / 1_000),
        _ => format!(".{nanos:09}"),
    };
    let (year, month, day) = (time.year(), u8::from(time.month()), time.day());
    let (hour, minute, second) = time.to_hms();
    Some(format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(json: &str) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::from_str::<Base64>(json).map(|bytes| bytes.0.to_vec())
    }

    #[test]
    fn bytes_come_in_both_alphabets_with_and_without_padding() {
        for json in [r#""+/8=""#, r#""-_8=""#, r#""+/8""#, r#""-_8""#] {
            assert_eq!(bytes(json).unwrap(), [0xfb, 0xff], "{json}");
        }
        assert!(bytes(r#""""#).unwrap().is_empty());
        for json in [r#""*""#, r#""a""#, "7", "null"] {
            assert!(bytes(json).is_err(), "{json}");
        }
        let written = serde_json::to_string(&Base64(Bytes::from_static(&[0xfb, 0xff]))).unwrap();
        assert_eq!(written, r#""+/8=""#);
    }

    #[test]
    fn numbers_may_be_strings() {
        for json in ["7", r#""7""#, "7.0", "0.7e1"] {
            assert_eq!(serde_json::from_str::<Number<u16>>(json).unwrap(), Number(7), "{json}");
        }
        for json in ["-7", r#""-7""#, "7.5", "65536", r#""x""#, "1e300", "true"] {
            assert!(serde_json::from_str::<Number<u16>>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn enumerations_come_by_name_and_number() {
        const NAMES: [(&str, i64); 2] = [("A_NONE", 0), ("A_ONE", 1)];
        let read = |json: &str| enumeration(&mut serde_json::Deserializer::from_str(json), &NAMES);
        assert_eq!(read(r#""A_ONE""#).unwrap(), 1);
        assert_eq!(read("1").unwrap(), 1);
        // A number that is not known is kept: it is of a newer client's.
        assert_eq!(read("5").unwrap(), 5);
        assert_eq!(read("null").unwrap(), 0);
        assert!(read(r#""A_TWO""#).is_err());
    }

    #[test]
    fn times_have_as_many_digits_as_they_need() {
        for (ns, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (1_500_000_000, "1970-01-01T00:00:01.500Z"),
            (1_795_225_000_000_001_000, "2026-11-21T01:36:40.000001Z"),
            (-1, "1969-12-31T23:59:59.999999999Z"),
            (i64::MAX, "2262-04-11T23:47:16.854775807Z"),
            (i64::MIN, "1677-09-21T00:12:43.145224192Z"),
        ] {
            assert_eq!(timestamp(ns).as_deref(), Some(text));
        }
    }

    #[test]
    fn an_empty_message_is_one_of_default_values() {
        #[derive(Default, Deserialize, PartialEq, Debug)]
        #[serde(default)]
        struct Message {
            #[serde(deserialize_with = "nullable")]
            depth: u32,
        }
        for json in ["", "{}", r#"{"depth":null}"#, r#"{"new":[1]}"#] {
            assert_eq!(read::<Message>(json.as_bytes()).unwrap(), Message::default(), "{json}");
        }
        assert_eq!(read::<Message>(br#"{"depth":2}"#).unwrap().depth, 2);
        assert!(read::<Message>(b"[").is_err());
    }
}
