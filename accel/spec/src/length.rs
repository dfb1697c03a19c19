//! How long something is that a parameter points to: the few expressions that annotations may use.
//!
//! Knows names of parameters as text; whether there are such is checked in `resolve`.

/// A number of elements, or of bytes where the element is `void`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Length {
    /// A product of numbers and parameters, such as `1`, `size` or `work_dim * 3`.
    Product(Vec<Factor>),
    /// Up to the first zero: `nul` of a string, `zero` of a list of properties.
    Terminated,
    /// Bytes of a box of a buffer in the client's memory: `rect(origin, region, row_pitch, slice_pitch)`
    /// (the OpenCL API specification, clEnqueueReadBufferRect).
    Rect {
        /// Three numbers: bytes, rows, slices.
        origin: String,
        /// Three numbers: bytes, rows, slices.
        region: String,
        /// Bytes of a row; zero for as many as the region has.
        row_pitch: String,
        /// Bytes of a slice; zero for as many as the region has.
        slice_pitch: String,
    },
    /// It follows from the state of an object, which both sides know: `object(image)`. It travels with the call, and the server
    /// compares it.
    Object(String),
}

/// A part of a product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Factor {
    /// A number.
    Number(u64),
    /// A parameter's value.
    Parameter(String),
}

impl Length {
    /// Reads an expression; what is wrong with it otherwise.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some((name, rest)) = text.split_once('(') {
            let inner = rest
                .strip_suffix(')')
                .ok_or_else(|| format!("{text:?} has no closing bracket"))?;
            let arguments: Vec<String> = inner.split(',').map(|argument| argument.trim().to_owned()).collect();
            if let Some(wrong) = arguments.iter().find(|argument| !is_name(argument)) {
                return Err(format!("{wrong:?} in {text:?} is no name of a parameter"));
            }
            return match (name.trim(), arguments.as_slice()) {
                ("rect", [origin, region, row_pitch, slice_pitch]) => Ok(Self::Rect {
                    origin: origin.clone(),
                    region: region.clone(),
                    row_pitch: row_pitch.clone(),
                    slice_pitch: slice_pitch.clone(),
                }),
                ("object", [object]) => Ok(Self::Object(object.clone())),
                _ => Err(format!(
                    "{text:?} is no known length; known are products, nul, zero, rect(origin, region, row_pitch, slice_pitch) and \
                     object(PARAMETER)"
                )),
            };
        }
        if text == "nul" || text == "zero" {
            return Ok(Self::Terminated);
        }
        let factors: Result<Vec<_>, String> = text.split('*').map(|factor| factor_of(factor.trim(), text)).collect();
        Ok(Self::Product(factors?))
    }

    /// The parameters that it is computed from.
    #[must_use]
    pub fn parameters(&self) -> Vec<&str> {
        match self {
            Self::Product(factors) => (factors.iter())
                .filter_map(|factor| match factor {
                    Factor::Parameter(name) => Some(name.as_str()),
                    Factor::Number(_) => None,
                })
                .collect(),
            Self::Terminated => Vec::new(),
            Self::Rect {
                origin,
                region,
                row_pitch,
                slice_pitch,
            } => vec![origin, region, row_pitch, slice_pitch],
            Self::Object(object) => vec![object],
        }
    }

    /// Whether it is one element, whatever the parameters are.
    #[must_use]
    pub fn is_one(&self) -> bool {
        *self == Self::Product(vec![Factor::Number(1)])
    }
}

fn factor_of(text: &str, whole: &str) -> Result<Factor, String> {
    if let Ok(number) = text.parse() {
        return Ok(Factor::Number(number));
    }
    if is_name(text) {
        return Ok(Factor::Parameter(text.to_owned()));
    }
    Err(format!(
        "{text:?} in the length {whole:?} is neither a number nor the name of a parameter"
    ))
}

fn is_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && text.chars().all(|char| char.is_ascii_alphanumeric() || char == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_understood() {
        let product = Length::parse("work_dim * 3").unwrap();
        assert_eq!(product.parameters(), ["work_dim"]);
        assert!(Length::parse("1").unwrap().is_one() && !product.is_one());
        assert_eq!(Length::parse("nul"), Ok(Length::Terminated));
        let rect = Length::parse("rect(host_origin, region, host_row_pitch, host_slice_pitch)").unwrap();
        assert_eq!(rect.parameters().len(), 4);
        assert_eq!(Length::parse("object(image)"), Ok(Length::Object("image".into())));
    }

    #[test]
    fn what_is_no_length_is_refused_with_its_text() {
        for (text, part) in [
            ("", "neither a number"),
            ("a + b", "a + b"),
            ("rect(a, b)", "no known length"),
            ("sum(a)", "no known length"),
            ("rect(a, b, c, d", "closing bracket"),
            ("object(3)", "no name of a parameter"),
            ("-1", "neither a number"),
        ] {
            let error = Length::parse(text).unwrap_err();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }
}
