//! What a parameter is, from its C type and what is said of it; and what parameters of one command owe each other.
//!
//! Knows no command by name.

use std::collections::BTreeMap;

use crate::error::SpecError;
use crate::length::Length;
use crate::model::{Command, Direction, Element, Flow, Key, Kind, Life, Param};
use crate::notes::ParamNote;
use crate::resolve::Place;
use crate::shape::{CType, CommandShape, Shape};

/// What is wrong with a parameter, before it is known whose.
type Said<T> = Result<T, String>;

/// A parameter's kind.
pub(crate) fn kind(
    place: &Place<'_>,
    shape: &Shape,
    name: &str,
    c_type: &CType,
    note: Option<&ParamNote>,
) -> Result<Kind, SpecError> {
    let keys = |note: &ParamNote| keys(place, shape, name, &note.keys);
    let read = Reading { shape, c_type };
    let kind = match note {
        None => read.unsaid(),
        Some(note) if note.input.as_deref() == Some("zero") => read.properties(note, keys(note)?),
        Some(note) => read.said(note),
    };
    kind.map_err(|what| place.wrong(name, what))
}

/// What a command returns besides an error code.
pub(crate) fn returned(
    place: &Place<'_>,
    shape: &Shape,
    c_type: &CType,
    note: Option<&ParamNote>,
) -> Result<Kind, SpecError> {
    let read = Reading { shape, c_type };
    let kind = match (note, shape.handles.contains(&c_type.name)) {
        (None, true) => Err("is an object without a life; say create or shadow".into()),
        (None, false) => Err("is an address that nothing is said of; say out with its length, or local".into()),
        (Some(note), true) => life(note).and_then(|life| match life {
            Life::Create | Life::Shadow => Ok(Kind::Handle {
                c_type: c_type.name.clone(),
                life,
            }),
            _ => Err("is an object that is made; say create or shadow".into()),
        }),
        (Some(note), false) => read.said(note),
    };
    kind.map_err(|what| place.wrong("returned", what))
}

/// Whether a command returns more than an error code.
pub(crate) fn returns_something(declared: &CommandShape, shape: &Shape) -> bool {
    declared.returns.pointers > 0 || shape.handles.contains(&declared.returns.name)
}

/// Constants and the kinds of objects behind them.
pub(crate) fn keys(
    place: &Place<'_>,
    shape: &Shape,
    parameter: &str,
    keys: &BTreeMap<String, String>,
) -> Result<Vec<Key>, SpecError> {
    let read = keys.iter().map(|(name, c_type)| {
        let Some(value) = shape.constants.get(name) else {
            return Err(place.wrong(
                parameter,
                format!("{name} is no constant of the registry; mend its name"),
            ));
        };
        if !shape.handles.contains(c_type) {
            return Err(place.wrong(parameter, format!("{c_type} is no kind of objects; mend its name")));
        }
        Ok(Key {
            name: name.clone(),
            value: *value,
            c_type: c_type.clone(),
        })
    });
    read.collect()
}

/// Whether a parameter is, or points to, the structure.
pub(crate) fn has_struct(commands: &[Command], wanted: &str) -> bool {
    let mut params = commands.iter().flat_map(|command| &command.params);
    params.any(|param| matches!(&param.kind, Kind::Array { element: Element::Struct(c_type), .. } if c_type == wanted))
}

struct Reading<'a> {
    shape: &'a Shape,
    c_type: &'a CType,
}

impl Reading<'_> {
    fn unsaid(&self) -> Said<Kind> {
        if self.c_type.function {
            return Err("is a function; say { callback = \"once\" } or \"many\", or local".into());
        }
        if self.c_type.pointers > 0 {
            return Err("is a pointer without a direction; say in, out or inout with its length, or local".into());
        }
        match self.shape.element(&self.c_type.name) {
            Some(Element::Handle(_)) => Err("is an object without a life; say use, retain or release".into()),
            Some(element @ (Element::I32 | Element::U32 | Element::I64 | Element::U64)) => {
                Ok(Kind::Scalar { element, counts: false })
            }
            _ => Err(format!("is a {}, which cannot travel by value", self.c_type.name)),
        }
    }

    fn said(&self, note: &ParamNote) -> Said<Kind> {
        if note.local {
            return Ok(Kind::Local);
        }
        if self.c_type.function {
            return match note.callback.as_deref() {
                Some("once") => Ok(Kind::Callback { many: false }),
                Some("many") => Ok(Kind::Callback { many: true }),
                _ => Err("is a function; say { callback = \"once\" } or \"many\", or local".into()),
            };
        }
        if note.callback.is_some() {
            return Err("is no function; remove callback".into());
        }
        if note.null && self.c_type.pointers == 0 && !matches!(note.handle.as_deref(), Some("use")) {
            return Err("is no pointer and cannot be NULL; remove null".into());
        }
        if note.status {
            return self.status();
        }
        if let Some(svm) = &note.svm {
            return self.svm(note, svm);
        }
        let element = self.pointee(note)?;
        if self.c_type.pointers == 0 {
            return match element {
                Element::Handle(c_type) => match life(note)? {
                    life @ (Life::Use | Life::Retain | Life::Release) => Ok(Kind::Handle { c_type, life }),
                    _ => Err("is an object that is there already; say use, retain or release".into()),
                },
                _ => Err("is a number, of which there is nothing to say; remove it, or say local".into()),
            };
        }
        let (direction, length) = self.direction(note)?;
        match element {
            Element::Handle(c_type) => objects(note, direction, length, c_type),
            element => self.memory(note, direction, length, element),
        }
    }

    fn status(&self) -> Said<Kind> {
        let is_code = self.c_type.pointers == 1 && self.shape.element(&self.c_type.name) == Some(Element::I32);
        if is_code && !self.c_type.constant {
            return Ok(Kind::Status);
        }
        Err("is no place for an error code; remove status".into())
    }

    /// What is beneath the stars.
    fn pointee(&self, note: &ParamNote) -> Said<Element> {
        let name = match &note.pointee {
            Some(_) if self.c_type.name != "void" => {
                return Err(format!("is a {} already; remove `as`", self.c_type.name));
            }
            Some(name) => name,
            None => &self.c_type.name,
        };
        (self.shape.element(name)).ok_or_else(|| format!("{name} has no size; only local or unsupported can have it"))
    }

    fn direction(&self, note: &ParamNote) -> Said<(Direction, Length)> {
        let said = [
            (Direction::In, &note.input),
            (Direction::Out, &note.out),
            (Direction::InOut, &note.inout),
        ];
        let mut said = said
            .into_iter()
            .filter_map(|(direction, length)| Some((direction, length.as_ref()?)));
        let (direction, length) = match (said.next(), said.next()) {
            (Some(one), None) => one,
            (None, _) => return Err("is a pointer without a direction; say in, out or inout with its length".into()),
            (Some(_), Some(_)) => return Err("has two directions; say inout".into()),
        };
        if length.trim().is_empty() {
            return Err("has a direction without a length; say how many elements".into());
        }
        if self.c_type.constant && direction != Direction::In {
            return Err("is const, so nothing can come back in it; say in".into());
        }
        Ok((direction, Length::parse(length)?))
    }

    fn memory(&self, note: &ParamNote, direction: Direction, length: Length, element: Element) -> Said<Kind> {
        if note.handle.is_some() {
            return Err(format!("is no object but a {}; remove handle", self.c_type.name));
        }
        if note.pieces {
            let fits = self.c_type.pointers == 2 && element == Element::Byte && direction == Direction::In;
            return match (fits, length) {
                (true, count @ Length::Product(_)) => Ok(Kind::Pieces { count }),
                _ => Err(
                    "has pieces, for which it has to point to pointers to bytes, and to have a direction of in".into(),
                ),
            };
        }
        if self.c_type.pointers != 1 {
            return Err("points to pointers; say pieces, or svm, or that the command is unsupported".into());
        }
        if !note.value_of.is_empty() {
            if let Some(unknown) = note.value_of.iter().find(|name| !self.shape.handles.contains(name)) {
                return Err(format!("{unknown} is no kind of objects; mend its name"));
            }
            let c_types = note.value_of.clone();
            return Ok(Kind::Value { length, c_types });
        }
        match length {
            Length::Terminated if element == Element::Byte && direction == Direction::In => Ok(Kind::Text),
            Length::Terminated => {
                Err("can only end with a zero if it is a string, or a list of properties, that goes in".into())
            }
            length if note.bulk && element == Element::Byte => Ok(Kind::Bulk { direction, length }),
            _ if note.bulk => Err("is bulk, but of no bytes; remove bulk".into()),
            Length::Object(_) | Length::Rect { .. } => Err("has a length that only bulk can have; say bulk".into()),
            length if direction == Direction::InOut => {
                Err(format!("cannot be inout with {length:?} unless it is bulk"))
            }
            length => Ok(Kind::Array {
                direction,
                element,
                length,
            }),
        }
    }

    fn properties(&self, note: &ParamNote, keys: Vec<Key>) -> Said<Kind> {
        match self.shape.element(&self.c_type.name) {
            Some(element @ (Element::I64 | Element::U64)) if self.c_type.pointers == 1 && !note.bulk => {
                Ok(Kind::Properties { element, keys })
            }
            _ => Err("ends with a zero, which only a list of properties can".into()),
        }
    }

    fn svm(&self, note: &ParamNote, word: &str) -> Said<Kind> {
        let kind = match (word, self.c_type.pointers) {
            ("use", 1) => Kind::Svm { life: Life::Use },
            ("create", 1) => Kind::Svm { life: Life::Create },
            ("release", 1) => Kind::Svm { life: Life::Release },
            ("any", 1) => {
                let (direction, length) = self.direction(note)?;
                Kind::SvmOrBulk { direction, length }
            }
            ("list" | "free", 2) => Kind::SvmList {
                life: if word == "free" { Life::Release } else { Life::Use },
                length: self.direction(note)?.1,
            },
            _ => {
                return Err(format!(
                    "svm cannot be {word:?} here; say use, create, release, any, or list or free for several"
                ));
            }
        };
        Ok(kind)
    }
}

fn life(note: &ParamNote) -> Said<Life> {
    match note.handle.as_deref() {
        Some("use") => Ok(Life::Use),
        Some("create") => Ok(Life::Create),
        Some("shadow") => Ok(Life::Shadow),
        Some("get") => Ok(Life::Get),
        Some("retain") => Ok(Life::Retain),
        Some("release") => Ok(Life::Release),
        Some(other) => Err(format!(
            "{other:?} is no life; say use, create, shadow, get, retain or release"
        )),
        None => Err("is an object without a life; say use, create, shadow, get, retain or release".into()),
    }
}

fn objects(note: &ParamNote, direction: Direction, length: Length, c_type: String) -> Said<Kind> {
    let life = life(note)?;
    let comes = matches!(life, Life::Create | Life::Shadow | Life::Get);
    if comes != (direction == Direction::Out) {
        return Err("has a life and a direction that contradict each other: create, shadow and get go with out, all else with in".into());
    }
    if note.bulk || note.pieces || !note.value_of.is_empty() {
        return Err("is an object; remove bulk, pieces and value_of".into());
    }
    match length {
        Length::Product(_) if length.is_one() && life != Life::Get => Ok(Kind::Handle { c_type, life }),
        Length::Product(_) => Ok(Kind::Handles { c_type, life, length }),
        _ => Err("has objects, whose number is a product of numbers and parameters".into()),
    }
}

/// Marks the numbers that lengths are computed from, and refuses lengths that are computed from anything else.
pub(crate) fn mark_counts(place: &Place<'_>, params: &mut [Param]) -> Result<(), SpecError> {
    let mut counted: Vec<String> = Vec::new();
    for param in params.iter() {
        let Some(length) = length_of(&param.kind) else {
            continue;
        };
        for (index, name) in length.parameters().into_iter().enumerate() {
            let found = params.iter().find(|other| other.name == name);
            let Some(found) = found else {
                return Err(place.wrong(
                    &param.name,
                    format!("its length names {name}, which is no parameter; mend its name"),
                ));
            };
            let fits = match (length, &found.kind) {
                (Length::Product(_), Kind::Scalar { .. }) | (Length::Object(_), Kind::Handle { .. }) => true,
                (Length::Rect { .. }, Kind::Scalar { .. }) => index >= 2,
                (
                    Length::Rect { .. },
                    Kind::Array {
                        direction: Direction::In,
                        element: Element::U64,
                        ..
                    },
                ) => index < 2 && !found.null,
                _ => false,
            };
            if !fits {
                return Err(place.wrong(&param.name, format!("its length cannot be computed from {name}")));
            }
            counted.push(name.to_owned());
        }
    }
    for param in params {
        if let Kind::Scalar { counts, .. } = &mut param.kind {
            *counts = counted.contains(&param.name);
        }
    }
    Ok(())
}

/// A parameter's length.
fn length_of(kind: &Kind) -> Option<&Length> {
    match kind {
        Kind::Handles { length, .. }
        | Kind::Array { length, .. }
        | Kind::Bulk { length, .. }
        | Kind::Pieces { count: length }
        | Kind::Value { length, .. }
        | Kind::SvmList { length, .. }
        | Kind::SvmOrBulk { length, .. } => Some(length),
        _ => None,
    }
}

/// Refuses what a command that travels this way cannot have.
pub(crate) fn check_flow(place: &Place<'_>, command: &Command) -> Result<(), SpecError> {
    for param in &command.params {
        let waits = match &param.kind {
            Kind::Array { direction, .. } => *direction != Direction::In,
            Kind::Handles { life: Life::Get, .. } => true,
            Kind::Handle { life: Life::Create, .. } => true,
            _ => false,
        };
        let retains = matches!(&param.kind, Kind::Handle { life: Life::Retain, .. });
        let counts = retains && command.flow != Flow::Local;
        let what = match &command.flow {
            Flow::Async { .. } if waits => {
                "comes back at once, so the command cannot be async; bulk and shadow objects can"
            }
            Flow::Cached { .. }
                if command.answers.is_empty()
                    && matches!(
                        param.kind,
                        Kind::Bulk {
                            direction: Direction::In,
                            ..
                        }
                    ) =>
            {
                "goes in as bulk, so the answer cannot be cached"
            }
            _ if counts => "is retained, which the client counts; the flow is local",
            _ => continue,
        };
        return Err(place.wrong(&param.name, what));
    }
    Ok(())
}
