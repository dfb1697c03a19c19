//! The words of the annotations as TOML has them; accel/spec/README.md says what each means.
//!
//! Knows no rule but which keys there are.

use std::collections::BTreeMap;

use serde::Deserialize;

/// A file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileNote {
    pub(crate) library: LibraryNote,
    /// What types of C are: `handle`, `descriptor`, `pointer`, `struct(BYTES)`, or a number's type.
    #[serde(default)]
    pub(crate) types: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) enums: BTreeMap<String, BTreeMap<String, i64>>,
    #[serde(default)]
    pub(crate) not_served: NotServedNote,
    #[serde(default)]
    pub(crate) functions: BTreeMap<String, FunctionNote>,
    /// Calls that cross and that no program makes.
    #[serde(default)]
    pub(crate) records: BTreeMap<String, FunctionNote>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LibraryNote {
    pub(crate) files: Vec<String>,
    #[serde(default)]
    pub(crate) versions: Vec<String>,
    /// Files of older versions, whose programs are told that they are not served; each is its symbols' version, too.
    #[serde(default)]
    pub(crate) refused: Vec<String>,
    pub(crate) not_served: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NotServedNote {
    pub(crate) names: Vec<String>,
    /// What some answer in place of the library's code, such as 0 where an address is returned.
    #[serde(default)]
    pub(crate) values: BTreeMap<String, i64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionNote {
    pub(crate) c: String,
    pub(crate) flow: String,
    pub(crate) by_hand: Option<String>,
    /// Of a function by hand: the parameters that it takes; all of them if nothing is said.
    pub(crate) takes: Option<Vec<String>>,
    /// Of a function by hand: parameters of one type that it takes as one list, each.
    #[serde(default)]
    pub(crate) together: Vec<Vec<String>>,
    pub(crate) descriptor: Option<String>,
    #[serde(default)]
    pub(crate) repeats: bool,
    #[serde(default)]
    pub(crate) only: Vec<String>,
    #[serde(default)]
    pub(crate) params: BTreeMap<String, ParamNote>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum ParamNote {
    Word(String),
    Words(WordsNote),
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WordsNote {
    /// A word that stands alone.
    #[serde(skip)]
    pub(crate) word: Option<String>,
    #[serde(rename = "in")]
    pub(crate) input: Option<String>,
    pub(crate) out: Option<String>,
    pub(crate) scalar: Option<String>,
    pub(crate) handle: Option<String>,
    #[serde(default)]
    pub(crate) device: bool,
    #[serde(default)]
    pub(crate) bulk: bool,
    #[serde(default)]
    pub(crate) null: bool,
}
