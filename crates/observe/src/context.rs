//! Which trace something belongs to, in the form of W3C's recommendation "Trace Context" (header `traceparent`, and by
//! custom the environment variable `TRACEPARENT`). Knows no spans.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The environment variable with the context that a program was started in.
pub const TRACEPARENT: &str = "TRACEPARENT";

/// A text is no context; whoever finds one begins a trace of its own (section 4.3 of the recommendation).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no W3C traceparent: 00-<32 hexadecimal digits>-<16>-<2>, lower case, neither id all zeros")]
pub struct BadContext(String);

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $number:ty, $digits:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name($number);

        impl $name {
            /// The number, unless it is zero, which is no id.
            pub fn new(number: $number) -> Option<Self> {
                (number != 0).then_some(Self(number))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:0width$x}", self.0, width = $digits)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = BadContext;

            fn from_str(text: &str) -> Result<Self, BadContext> {
                let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
                let number = Some(text)
                    .filter(|text| text.len() == $digits && text.bytes().all(is_digit))
                    .and_then(|text| <$number>::from_str_radix(text, 16).ok());
                number.and_then(Self::new).ok_or_else(|| BadContext(text.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadContext;

            fn try_from(text: String) -> Result<Self, BadContext> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.to_string()
            }
        }
    };
}

id!(
    /// What all spans of one trace share.
    TraceId,
    u128,
    32
);
id!(
    /// One span of it.
    SpanId,
    u64,
    16
);

impl TraceId {
    /// Of a random number, made odd: that is never zero.
    pub(crate) fn odd(number: u128) -> Self {
        Self(number | 1)
    }
}

/// A trace, and the span in it that is the parent of what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TraceContext {
    /// The trace.
    pub trace: TraceId,
    /// The span.
    pub span: SpanId,
    /// Whoever began the trace keeps it.
    pub sampled: bool,
}

/// Bit 0 of the flags (section 3.2.2.5).
const SAMPLED: u8 = 1;

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

impl FromStr for TraceContext {
    type Err = BadContext;

    fn from_str(text: &str) -> Result<Self, BadContext> {
        let bad = || BadContext(text.chars().take(80).collect());
        let hex = |text: &str| {
            let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            let digits = text.len() == 2 && text.bytes().all(is_digit);
            digits
                .then(|| u8::from_str_radix(text, 16).ok())
                .flatten()
                .ok_or_else(bad)
        };
        let mut parts = text.splitn(5, '-');
        let mut part = || parts.next().ok_or_else(bad);
        let version = hex(part()?)?;
        let trace = part()?.parse().map_err(|_| bad())?;
        let span = part()?.parse().map_err(|_| bad())?;
        let flags = hex(part()?)?;
        // A later version may say more behind the flags; 255 is forbidden (section 3.2.2.1).
        if version == 0xff || (version == 0 && parts.next().is_some()) {
            return Err(bad());
        }
        let sampled = flags & SAMPLED != 0;
        Ok(Self { trace, span, sampled })
    }
}

impl TryFrom<String> for TraceContext {
    type Error = BadContext;

    fn try_from(text: String) -> Result<Self, BadContext> {
        text.parse()
    }
}

impl From<TraceContext> for String {
    fn from(context: TraceContext) -> Self {
        context.to_string()
    }
}

impl TraceContext {
    /// The one that this program was started in. One that cannot be understood is as good as none.
    pub fn from_environment() -> Option<Self> {
        let text = std::env::var(TRACEPARENT).ok()?;
        match text.parse() {
            Ok(context) => Some(context),
            Err(error) => {
                log::info!("{TRACEPARENT} is ignored: {error}");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recommendation's own example.
    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_survives_text_and_json() {
        let context: TraceContext = EXAMPLE.parse().unwrap();
        assert!(context.sampled);
        assert_eq!(context.to_string(), EXAMPLE);
        let json = serde_json::to_string(&context).unwrap();
        assert_eq!(json, format!("\"{EXAMPLE}\""));
        assert_eq!(serde_json::from_str::<TraceContext>(&json).unwrap(), context);
        let later = format!("cc{}-what-will-be", &EXAMPLE[2..]);
        assert_eq!(later.parse::<TraceContext>().unwrap().span, context.span);
    }

    #[test]
    fn what_is_none_is_refused() {
        for bad in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-+1",
        ] {
            assert!(bad.parse::<TraceContext>().is_err(), "{bad}");
        }
    }
}
