//! Annotations as they stand in TOML: words, not yet compared with any shape.
//!
//! Knows which words there are and how they are written, and no command.

use std::collections::BTreeMap;

use serde::Deserialize;

/// What a file says of one command.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CommandNote {
    /// `local`, `cached`, `async`, `async(QUEUE)` or `sync`.
    pub(crate) flow: Option<String>,
    /// Of a cached answer: commands after which it has to be asked for again.
    pub(crate) until: Option<Vec<String>>,
    /// Of an asynchronous command: the parameter that makes the client wait.
    pub(crate) sync_if: Option<String>,
    /// Words of parameters.
    #[serde(default)]
    pub(crate) params: BTreeMap<String, toml::Value>,
    /// `changes(PARAMETER)` and `content(PARAMETER)`.
    #[serde(default)]
    pub(crate) effects: Vec<String>,
    /// A length in bytes, or `backend`.
    pub(crate) quota: Option<String>,
    /// Comparisons with the state of objects, such as `in_bounds(buffer, offset, size)`.
    #[serde(default)]
    pub(crate) checks: Vec<String>,
    /// Of a query: constants whose answers are objects, and their C types.
    #[serde(default)]
    pub(crate) answers: BTreeMap<String, String>,
    /// Of a query: constants whose answers the client knows itself.
    #[serde(default)]
    pub(crate) own_answers: Vec<String>,
    /// Why a body is by hand.
    pub(crate) manual: Option<String>,
    /// What nobody serves.
    pub(crate) unsupported: Option<UnsupportedNote>,
    /// The command that it is another name of.
    pub(crate) alias: Option<String>,
}

/// Why something is not served, and what callers get.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UnsupportedNote {
    /// A constant of the API.
    pub(crate) code: String,
    /// For whoever reads the table of calls.
    pub(crate) reason: String,
}

/// What is said of a parameter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ParamNote {
    /// It goes to the server; how long.
    #[serde(rename = "in")]
    pub(crate) input: Option<String>,
    /// It comes from the server; how long.
    pub(crate) out: Option<String>,
    /// Both; how long.
    pub(crate) inout: Option<String>,
    /// Of an object: `use`, `create`, `shadow`, `get`, `retain`, `release`.
    pub(crate) handle: Option<String>,
    /// Whether NULL means something.
    #[serde(default)]
    pub(crate) null: bool,
    /// Whether it travels through the arena.
    #[serde(default)]
    pub(crate) bulk: bool,
    /// Whether it points to pointers, each to a piece of bytes.
    #[serde(default)]
    pub(crate) pieces: bool,
    /// The C type of what a `void *` points to.
    #[serde(rename = "as")]
    pub(crate) pointee: Option<String>,
    /// Of properties: keys whose values are objects, and their C types.
    #[serde(default)]
    pub(crate) keys: BTreeMap<String, String>,
    /// Of bytes that can be an object: its C types.
    #[serde(default)]
    pub(crate) value_of: Vec<String>,
    /// Of an address in shared virtual memory: `use`, `create`, `release`; `list` or `free` of several; `any` if it can be the
    /// client's memory, too.
    pub(crate) svm: Option<String>,
    /// Of a function: `once` or `many`.
    pub(crate) callback: Option<String>,
    /// It never leaves the client.
    #[serde(default)]
    pub(crate) local: bool,
    /// It is where the error code goes.
    #[serde(default)]
    pub(crate) status: bool,
}

impl ParamNote {
    /// Reads a word or a table; what is wrong otherwise.
    pub(crate) fn read(value: &toml::Value) -> Result<Self, String> {
        let toml::Value::String(word) = value else {
            let read = value.clone().try_into();
            return read.map_err(|error: toml::de::Error| error.message().trim().to_owned());
        };
        let mut note = Self::default();
        match word.as_str() {
            "use" | "create" | "shadow" | "get" | "retain" | "release" => note.handle = Some(word.clone()),
            "local" => note.local = true,
            "status" => note.status = true,
            "nul" | "zero" => note.input = Some(word.clone()),
            _ => {
                return Err(format!(
                    "{word:?} is no word for a parameter; words are use, create, shadow, get, retain, release, local, status, nul \
                     and zero, and all else is a table such as {{ in = \"size\" }}"
                ));
            }
        }
        Ok(note)
    }
}

/// `name(argument, argument)`.
pub(crate) fn call(text: &str) -> Option<(String, Vec<String>)> {
    let (name, rest) = text.trim().split_once('(')?;
    let inner = rest.strip_suffix(')')?;
    let arguments = inner.split(',').map(|argument| argument.trim().to_owned());
    Some((name.trim().to_owned(), arguments.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ParamNote, String> {
        let table: toml::Table = toml::from_str(&format!("x = {text}")).unwrap();
        ParamNote::read(&table["x"])
    }

    #[test]
    fn words_are_short_for_tables() {
        assert_eq!(read("'use'").unwrap(), read("{ handle = 'use' }").unwrap());
        assert_eq!(read("'nul'").unwrap(), read("{ in = 'nul' }").unwrap());
        assert!(read("'local'").unwrap().local);
    }

    #[test]
    fn what_is_no_word_is_named() {
        assert!(read("'using'").unwrap_err().contains("\"using\""));
        let error = read("{ length = 'size' }").unwrap_err();
        assert!(error.contains("unknown field `length`"), "{error}");
        assert_eq!(call("f(a, b)"), Some(("f".into(), vec!["a".into(), "b".into()])));
        assert_eq!(call("f(a"), None);
    }
}
