//! `WWW-Authenticate` as registries send it (RFC 9110, 11.6.1): which schemes, with which parameters.
//!
//! A stranger's words: nothing here trusts them, and nothing here acts on them.

use std::collections::BTreeMap;

/// More text, or more challenges, is no honest answer.
const LONGEST: usize = 8192;
const MOST: usize = 16;

/// One challenge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// What it asks for.
    pub scheme: Scheme,
    /// Its parameters; names in lower case.
    pub parameters: BTreeMap<String, String>,
}

/// How to authenticate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scheme {
    /// Name and password with each request (RFC 7617).
    Basic,
    /// A token from `realm` (RFC 6750; distribution's token specification).
    Bearer,
    /// Something that we do not know.
    Other(String),
}

impl Challenge {
    /// All challenges in one header; what cannot be understood ends them.
    pub fn parse(header: &str) -> Vec<Self> {
        let mut challenges = Vec::new();
        let mut rest = header.get(..LONGEST).unwrap_or(header);
        while challenges.len() < MOST {
            rest = rest.trim_start_matches([' ', '\t', ',']);
            let (name, after) = token(rest);
            // What has a value is no scheme but a parameter that could not be understood.
            if name.is_empty() || after.starts_with('=') {
                break;
            }
            rest = after;
            let mut challenge = Self {
                scheme: match name.to_ascii_lowercase().as_str() {
                    "basic" => Scheme::Basic,
                    "bearer" => Scheme::Bearer,
                    other => Scheme::Other(other.to_owned()),
                },
                parameters: BTreeMap::new(),
            };
            while let Some((key, value, after)) = parameter(rest) {
                challenge.parameters.entry(key.to_ascii_lowercase()).or_insert(value);
                rest = after;
            }
            challenges.push(challenge);
        }
        challenges
    }
}

/// RFC 9110, 5.6.2.
fn token(text: &str) -> (&str, &str) {
    let special = |byte: u8| b"!#$%&'*+-.^_`|~".contains(&byte);
    let end = text
        .bytes()
        .position(|byte| !(byte.is_ascii_alphanumeric() || special(byte)));
    text.split_at(end.unwrap_or(text.len()))
}

/// `name=value` or `name="value"`, after a comma or not; `None` where the next challenge begins or nothing follows.
fn parameter(text: &str) -> Option<(&str, String, &str)> {
    let text = text.trim_start_matches([' ', '\t', ',']);
    let (key, rest) = token(text);
    let rest = rest.trim_start_matches([' ', '\t']).strip_prefix('=')?;
    let rest = rest.trim_start_matches([' ', '\t']);
    if key.is_empty() {
        return None;
    }
    let Some(quoted) = rest.strip_prefix('"') else {
        let (value, rest) = token(rest);
        return Some((key, value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((key, value, &quoted[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            _ => value.push(char),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(parameters: &[(&str, &str)]) -> Challenge {
        Challenge {
            scheme: Scheme::Bearer,
            parameters: parameters
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn what_registries_send_is_understood() {
        let header = r#"Bearer realm="https://r.test/token",service="r.test",scope="repository:a/b:pull,push""#;
        let scope = ("scope", "repository:a/b:pull,push");
        let expected = bearer(&[("realm", "https://r.test/token"), ("service", "r.test"), scope]);
        assert_eq!(Challenge::parse(header), [expected]);
        let several =
            Challenge::parse(r#"Negotiate, basic REALM = "a \"quoted\" , realm", bearer realm=x , service=y"#);
        assert_eq!(several.len(), 3);
        assert_eq!(several[0].scheme, Scheme::Other("negotiate".to_owned()));
        assert_eq!(several[1].scheme, Scheme::Basic);
        assert_eq!(several[1].parameters["realm"], r#"a "quoted" , realm"#);
        assert_eq!(several[2], bearer(&[("realm", "x"), ("service", "y")]));
    }

    #[test]
    fn what_is_no_challenge_is_none() {
        assert_eq!(Challenge::parse(""), []);
        assert_eq!(Challenge::parse("\"quoted\""), []);
        assert_eq!(Challenge::parse("Bearer realm=\"open").len(), 1);
        assert!(Challenge::parse(&"a, ".repeat(5000)).len() <= MOST);
        assert!(Challenge::parse(&"é".repeat(5000)).is_empty());
    }
}
