//! What a type of C is, for the wire and for the client's functions.
//!
//! Knows the few types that the language itself has, and what annotations say of all others.

use std::collections::BTreeMap;

use super::notes::FileNote;
use crate::model::Element;

/// What a type is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TypeKind {
    /// A number; its type in Rust.
    Number(&'static str),
    /// A name of an object of the server's; an address for the program.
    Handle,
    /// A value of the client's; an address for the program.
    Descriptor,
    /// An address that means nothing to the server.
    Pointer,
    /// So many bytes.
    Struct(u64),
}

/// Types of the language.
const NUMBERS: &[(&str, &str)] = &[
    ("char", "u8"),
    ("unsigned char", "u8"),
    ("int", "i32"),
    ("int32_t", "i32"),
    ("unsigned int", "u32"),
    ("uint32_t", "u32"),
    ("float", "f32"),
    ("double", "f64"),
    ("long long", "i64"),
    ("int64_t", "i64"),
    ("unsigned long long", "u64"),
    ("uint64_t", "u64"),
    ("size_t", "usize"),
];

/// All types by name.
#[derive(Debug, Clone, Default)]
pub struct Types(BTreeMap<String, TypeKind>);

impl Types {
    /// Those of the language.
    pub(crate) fn new() -> Self {
        let numbers = NUMBERS
            .iter()
            .map(|(name, rust)| ((*name).to_owned(), TypeKind::Number(rust)));
        Self(numbers.collect())
    }

    /// Adds what a file says; what is wrong with it otherwise, with the type.
    pub(crate) fn add(&mut self, file: &FileNote) -> Result<(), (String, String)> {
        let enums = file.enums.keys().map(|name| (name.clone(), "int".to_owned()));
        let types = file.types.iter().map(|(name, is)| (name.clone(), is.clone()));
        for (name, is) in types.chain(enums) {
            let kind = match is.as_str() {
                "handle" => TypeKind::Handle,
                "descriptor" => TypeKind::Descriptor,
                "pointer" => TypeKind::Pointer,
                other => self.other(other).ok_or_else(|| {
                    let what = format!(
                        "{other:?} is nothing that a type can be; write handle, descriptor, pointer, struct(BYTES) or a type that is known"
                    );
                    (name.clone(), what)
                })?,
            };
            if self.0.insert(name.clone(), kind).is_some() {
                return Err((name, "is there twice; remove it from one of the files".into()));
            }
        }
        Ok(())
    }

    fn other(&self, text: &str) -> Option<TypeKind> {
        if let Some(bytes) = text.strip_prefix("struct(").and_then(|rest| rest.strip_suffix(')')) {
            return bytes.parse().ok().map(TypeKind::Struct);
        }
        self.0
            .get(text)
            .filter(|kind| matches!(kind, TypeKind::Number(_)))
            .cloned()
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TypeKind> {
        self.0.get(name)
    }

    /// Names of all objects of the server's.
    pub(crate) fn handles(&self) -> impl Iterator<Item = &String> {
        self.0
            .iter()
            .filter(|(_, kind)| **kind == TypeKind::Handle)
            .map(|(name, _)| name)
    }
}

/// What a number is on the wire: floating-point numbers are their bits.
pub(crate) fn element(rust: &str) -> Element {
    match rust {
        "u8" => Element::Byte,
        "i32" => Element::I32,
        "u32" | "f32" => Element::U32,
        "i64" => Element::I64,
        _ => Element::U64,
    }
}
