//! What parameters of calls that cross are, by their C types and the annotations' words.
//!
//! Knows no function by name.

use super::c::{CType, Declaration};
use super::notes::{FunctionNote, ParamNote, WordsNote};
use super::resolve::{Place, snake};
use super::types::{TypeKind, Types, element};
use crate::error::SpecError;
use crate::length::Length;
use crate::model::{Direction, Element, Kind, Life, Param};

/// Parameters, each with a number or the parameter that its length follows from.
pub(crate) type Lengths = Vec<(String, String)>;

/// The parameters as the model has them, and where the lengths of scalars come from.
pub(crate) fn crossing(
    place: &Place<'_>,
    said: &FunctionNote,
    declaration: &Declaration,
    types: &Types,
) -> Result<(Vec<Param>, Lengths), SpecError> {
    let mut params = Vec::new();
    let mut scalars = Vec::new();
    for (name, c_type, text) in &declaration.params {
        let wrong = |what: String| place.wrong(name, what);
        let words = words(said.params.get(name));
        let kind = kind(c_type, &words, types).map_err(wrong)?;
        if let Some(length) = &words.scalar {
            let known = length.parse::<u32>().is_ok() || declaration.params.iter().any(|(other, _, _)| other == length);
            if !known {
                return Err(place.wrong(
                    name,
                    format!("scalar: {length:?} is neither a number of bytes nor a parameter"),
                ));
            }
            scalars.push((name.clone(), length.clone()));
        }
        params.push(Param {
            name: snake(name),
            c_text: text.clone(),
            null: words.null,
            kind,
        });
    }
    let lengths: Vec<_> = params
        .iter()
        .filter_map(|param| length(&param.kind))
        .flat_map(|length| length.parameters())
        .collect();
    let lengths: Vec<String> = lengths.into_iter().map(str::to_owned).collect();
    for of in &lengths {
        let found = params.iter_mut().find(|param| param.name == *of);
        match found.map(|param| &mut param.kind) {
            Some(Kind::Scalar { counts, .. }) => *counts = true,
            _ => {
                return Err(place.wrong(
                    of,
                    "a length is computed from it, and it is no number that crosses; take another one",
                ));
            }
        }
    }
    if said.flow == "async"
        && params.iter().any(|param| {
            matches!(
                param.kind,
                Kind::Array {
                    direction: Direction::Out,
                    ..
                }
            )
        })
    {
        return Err(place.wrong(
            "",
            "is not waited for and gives something back; write flow = \"sync\" or \"cached\"",
        ));
    }
    Ok((params, scalars))
}

/// Lists that go into a descriptor, with what their lengths are.
pub(crate) fn inputs(
    place: &Place<'_>,
    said: &FunctionNote,
    declaration: &Declaration,
    types: &Types,
) -> Result<Lengths, SpecError> {
    let mut inputs = Vec::new();
    for (name, c_type, _) in declaration.params.iter().skip(1) {
        let length = words(said.params.get(name)).input;
        let is_number = matches!(types.get(&c_type.name), Some(TypeKind::Number(_))) || c_type.name == "void";
        match (c_type.pointers, length) {
            (0, None) if is_number => {}
            (1, Some(length)) if is_number && declaration.params.iter().any(|(other, _, _)| *other == length) => {
                inputs.push((name.clone(), length));
            }
            _ => {
                return Err(place.wrong(
                    name,
                    "goes into a descriptor; that takes numbers, and lists of them with { in = \"PARAMETER\" }",
                ));
            }
        }
    }
    Ok(inputs)
}

fn length(kind: &Kind) -> Option<&Length> {
    match kind {
        Kind::Array { length, .. } | Kind::Bulk { length, .. } | Kind::SvmOrBulk { length, .. } => Some(length),
        _ => None,
    }
}

fn words(note: Option<&ParamNote>) -> WordsNote {
    match note {
        None => WordsNote::default(),
        Some(ParamNote::Word(word)) => WordsNote {
            word: Some(word.clone()),
            ..WordsNote::default()
        },
        Some(ParamNote::Words(words)) => words.clone(),
    }
}

fn kind(c_type: &CType, words: &WordsNote, types: &Types) -> Result<Kind, String> {
    let is = types.get(&c_type.name);
    if let Some(word) = &words.word {
        return word_kind(c_type, word, is);
    }
    if let Some(c_type) = &words.handle {
        return match types.get(c_type) {
            Some(TypeKind::Handle) => Ok(Kind::Handle {
                c_type: c_type.clone(),
                life: Life::Use,
            }),
            _ => Err(format!("handle: {c_type} is no handle; name one of [types]")),
        };
    }
    let said = [&words.input, &words.out, &words.scalar].into_iter().flatten().count();
    if said > 1 {
        return Err("has two of in, out and scalar; one is right".into());
    }
    if words.scalar.is_some() {
        return Ok(Kind::Properties {
            element: Element::Byte,
            keys: Vec::new(),
        });
    }
    if let Some((text, direction)) = words
        .input
        .as_ref()
        .map(|text| (text, Direction::In))
        .or(words.out.as_ref().map(|text| (text, Direction::Out)))
    {
        let length = Length::parse(&in_snake(text))?;
        if !matches!(length, Length::Product(_)) {
            return Err(format!("{text:?} is no product of numbers and parameters"));
        }
        return match (words.device, words.bulk) {
            (true, true) => Err("has both device and bulk; one is right".into()),
            (true, false) => Ok(Kind::SvmOrBulk { direction, length }),
            (false, true) => Ok(Kind::Bulk { direction, length }),
            (false, false) => Ok(Kind::Array {
                direction,
                element: element_of(is),
                length,
            }),
        };
    }
    match (c_type.pointers, is) {
        (0, Some(TypeKind::Number(rust))) => Ok(Kind::Scalar {
            element: element(rust),
            counts: false,
        }),
        (0, Some(TypeKind::Handle)) => Ok(Kind::Handle {
            c_type: c_type.name.clone(),
            life: Life::Use,
        }),
        (0, Some(TypeKind::Descriptor)) => Ok(Kind::Properties {
            element: Element::I32,
            keys: Vec::new(),
        }),
        _ => Err(
            "is a pointer; say device, create, out, text, local, { in = ... }, { out = ... } or { scalar = ... }"
                .into(),
        ),
    }
}

fn word_kind(c_type: &CType, word: &str, is: Option<&TypeKind>) -> Result<Kind, String> {
    let handle = |life| Kind::Handle {
        c_type: c_type.name.clone(),
        life,
    };
    match (word, c_type.pointers, is) {
        ("local", _, _) => Ok(Kind::Local),
        ("device", 1.., _) | ("device", 0, Some(TypeKind::Pointer)) => Ok(Kind::Svm { life: Life::Use }),
        ("create", 1, Some(TypeKind::Handle)) => Ok(handle(Life::Shadow)),
        ("release", 0, Some(TypeKind::Handle)) => Ok(handle(Life::Release)),
        ("number", _, _) => Ok(Kind::Scalar {
            element: Element::U64,
            counts: false,
        }),
        ("count", 0, Some(TypeKind::Number("i32"))) => Ok(Kind::Scalar {
            element: Element::U32,
            counts: true,
        }),
        ("text", 1, _) => Ok(Kind::Text),
        ("bytes", 1.., _) => Ok(Kind::Properties {
            element: Element::Byte,
            keys: Vec::new(),
        }),
        ("out", 1, Some(TypeKind::Number(rust))) => Ok(Kind::Array {
            direction: Direction::Out,
            element: element(rust),
            length: Length::Product(vec![crate::length::Factor::Number(1)]),
        }),
        ("device" | "count" | "create" | "release" | "text" | "bytes" | "out", _, _) => Err(format!(
            "{word} does not fit its type; accel/spec/README.md says what each word is for"
        )),
        _ => Err(format!("{word:?} is no word; accel/spec/README.md lists them")),
    }
}

/// What elements are: numbers, or bytes of what is pointed to.
fn element_of(is: Option<&TypeKind>) -> Element {
    match is {
        Some(TypeKind::Number(rust)) => element(rust),
        _ => Element::Byte,
    }
}

/// Names of parameters in a length as the model has them.
fn in_snake(text: &str) -> String {
    text.split('*')
        .map(|factor| snake(factor.trim()))
        .collect::<Vec<_>>()
        .join(" * ")
}
