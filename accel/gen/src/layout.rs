//! Which of a command's parameters are in its call and which in its reply, in which order, and how each is read and written: one plan,
//! from which code, layouts and documents are made.
//!
//! The order is: a word that says which of the parameters that can be NULL are there; what has a fixed size; lists and strings; what is
//! in the arena. Lengths are computed from what stands before, and do not travel.

use std::fmt::Write as _;

use accel_spec::{Api, Command, Direction, Element, Factor, Kind, Length, Life, Param};
use sha2::{Digest, Sha256};

use crate::names;

/// Bytes of arguments that a record has itself.
const INLINE: usize = 48;

/// A command's call and reply.
pub(crate) struct Layout {
    /// Fields of the call, in C's order.
    pub(crate) call: Vec<Field>,
    /// Fields of the reply besides the error code, in C's order.
    pub(crate) reply: Vec<ReplyField>,
}

/// A field of a call.
pub(crate) struct Field {
    /// Its name.
    pub(crate) name: String,
    /// Its declaration in C, for whoever reads the code.
    pub(crate) c_text: String,
    /// Its type, without `Option`.
    pub(crate) rust_type: String,
    /// How it can be missing.
    pub(crate) there: There,
    /// In which part of the bytes it is.
    pub(crate) part: Part,
    /// An expression that reads it from `source`.
    pub(crate) read: String,
    /// The method of the writer that writes it, up to the value, and what stands behind.
    pub(crate) write: (String, String),
}

/// How a field can be missing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum There {
    /// Not at all.
    Always,
    /// The pointer can be NULL.
    Optional,
    /// It is the question whether something is asked for, and has no bytes of its own.
    Asked,
}

/// A part of the bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// Numbers, objects, callbacks.
    Fixed,
    /// Lists and strings.
    Lists,
    /// Offsets in the arena, with lengths that can depend on lists.
    Arena,
}

/// A field of a reply.
pub(crate) struct ReplyField {
    /// Its name.
    pub(crate) name: String,
    /// Its declaration in C.
    pub(crate) c_text: String,
    /// Its type, without `Option`.
    pub(crate) rust_type: String,
    /// Whether the call says if it is there.
    pub(crate) asked: bool,
    /// Of a list: the most elements, as an expression of the call's fields.
    pub(crate) most: Option<String>,
}

impl Layout {
    /// The plan of a command that crosses.
    pub(crate) fn of(api: &Api, command: &Command) -> Self {
        let mut call: Vec<Field> = (command.params.iter())
            .filter_map(|param| call_field(api, command, param))
            .collect();
        let reply: Vec<ReplyField> = (command.params.iter())
            .filter_map(|param| reply_field(api, command, param))
            .collect();
        if reply.iter().any(|field| field.most.is_some()) || 4 + 8 * reply.len() > INLINE {
            call.push(Field {
                name: "reply".into(),
                c_text: "where in the arena the reply goes if it does not fit into a record".into(),
                rust_type: "Span".into(),
                there: There::Always,
                part: Part::Fixed,
                read: "source.area(\"reply\")?".into(),
                write: ("area(".into(), String::new()),
            });
        }
        Self { call, reply }
    }

    /// The call's fields in the order of their bytes.
    pub(crate) fn on_the_wire(&self) -> Vec<&Field> {
        let mut fields: Vec<_> = self.call.iter().filter(|field| field.there != There::Asked).collect();
        fields.sort_by_key(|field| field.part);
        fields
    }

    /// The fields that have a bit in the first word.
    pub(crate) fn with_bits(&self) -> Vec<&Field> {
        self.call.iter().filter(|field| field.there != There::Always).collect()
    }

    /// A sum over all that a reader has to know.
    pub(crate) fn sum(&self, api: &Api) -> String {
        let mut text = String::new();
        let types = self.call.iter().map(|field| &field.rust_type);
        let types: Vec<_> = types.chain(self.reply.iter().map(|field| &field.rust_type)).collect();
        for found in &api.structs {
            let name = names::c_type(api, &found.c_type);
            if types.iter().any(|rust_type| rust_type.contains(&name)) {
                for (member, element) in &found.members {
                    _ = write!(text, "{name}.{member}:{};", names::element(api, element));
                }
            }
        }
        for field in self.with_bits() {
            _ = write!(text, "{}?", field.name);
        }
        for field in self.on_the_wire() {
            _ = write!(text, "{}:{}:{};", field.name, field.rust_type, field.read);
        }
        for field in &self.reply {
            let most = field.most.as_deref().unwrap_or("one");
            _ = write!(text, ">{}:{}:{}:{most};", field.name, field.rust_type, field.asked);
        }
        hex::encode(&Sha256::digest(text)[..8])
    }
}

/// The expression of a length, as `Option<u64>`; `of` stands before each parameter.
fn length(command: &Command, length: &Length, of: &str) -> String {
    let number = |name: &str| {
        let param = command.params.iter().find(|param| param.name == name);
        let wide = param.is_some_and(|param| {
            let is = |wanted: &Element| matches!(&param.kind, Kind::Scalar { element, .. } if element == wanted);
            is(&Element::U64)
        });
        if wide {
            format!("{of}{name}")
        } else {
            format!("u64::from({of}{name})")
        }
    };
    match length {
        Length::Product(factors) => {
            let factors = factors.iter().map(|factor| match factor {
                Factor::Number(number) => number.to_string(),
                Factor::Parameter(name) => number(name),
            });
            let factors: Vec<_> = factors.collect();
            match factors.as_slice() {
                [] => "Some(1)".into(),
                [one] => format!("Some({one})"),
                [first, second, more @ ..] => {
                    let product = format!("u64::checked_mul({first}, {second})");
                    let more = more
                        .iter()
                        .map(|factor| format!(".and_then(|product| product.checked_mul({factor}))"));
                    more.fold(product, |product, factor| product + &factor)
                }
            }
        }
        Length::Rect {
            origin,
            region,
            row_pitch,
            slice_pitch,
        } => format!(
            "rect(&{of}{origin}, &{of}{region}, {}, {})",
            number(row_pitch),
            number(slice_pitch)
        ),
        // Neither has a number of its own; what has one of them is read another way.
        Length::Terminated | Length::Object(_) => "None".into(),
    }
}

/// What a parameter is in the call.
fn call_field(api: &Api, command: &Command, param: &Param) -> Option<Field> {
    let name = &param.name;
    let of = |by: &Length| length(command, by, "");
    let by_value = |rust_type: String, method: &str| {
        (
            rust_type,
            Part::Fixed,
            format!("source.{method}(\"{name}\")?"),
            "value(",
            "",
        )
    };
    let list = |element: String, by: &Length| {
        let read = format!("source.list({}, \"{name}\")?", of(by));
        (format!("List<'a, {element}>"), Part::Lists, read, "list(&", "")
    };
    let mut tail = String::new();
    let (rust_type, part, read, write, _) = match &param.kind {
        Kind::Scalar { element, counts } => {
            by_value(names::element(api, element), if *counts { "count" } else { "value" })
        }
        Kind::Handle { c_type, .. } => by_value(names::handle(api, c_type), "value"),
        Kind::Callback { .. } => by_value("Callback".into(), "value"),
        // The server says where it is.
        Kind::Svm { life: Life::Create } => return None,
        Kind::Svm { .. } => by_value("SvmAddress".into(), "value"),
        Kind::Handles { life: Life::Get, .. } => return asked(param),
        Kind::Handles { c_type, length, .. } => list(names::handle(api, c_type), length),
        Kind::SvmList { length, .. } => list("SvmAddress".into(), length),
        Kind::Array {
            direction: Direction::In,
            element,
            length,
        } if length.is_one() => {
            let rust_type = names::element(api, element);
            let read = format!("source.value(\"{name}\")?");
            (rust_type, Part::Lists, read, "value(", "")
        }
        Kind::Array {
            direction: Direction::In,
            element,
            length,
        } => list(names::element(api, element), length),
        Kind::Array { .. } => return asked(param),
        Kind::Properties { element, .. } => {
            let rust_type = format!("List<'a, {}>", names::element(api, element));
            let read = format!("source.counted(None, \"{name}\")?");
            (rust_type, Part::Lists, read, "counted(&", "")
        }
        Kind::Text => {
            let read = format!("source.text(\"{name}\")?");
            ("&'a CStr".into(), Part::Lists, read, "text(", "")
        }
        Kind::Value { length, c_types } => {
            let list: Vec<_> = c_types.iter().map(|c_type| format!("\"{c_type}\"")).collect();
            let list = format!("&[{}]", list.join(", "));
            tail = format!(", {list}");
            let read = format!("source.choice({}, {list}, \"{name}\")?", of(length));
            ("Value<'a>".into(), Part::Lists, read, "choice(&", "")
        }
        Kind::Pieces { count } => {
            let read = format!("source.pieces({}, \"{name}\")?", of(count));
            ("Pieces<'a>".into(), Part::Arena, read, "pieces(&", "")
        }
        Kind::Bulk {
            length: Length::Object(_),
            ..
        } => {
            let read = format!("source.area(\"{name}\")?");
            ("Span".into(), Part::Arena, read, "area(", "")
        }
        Kind::Bulk { length, .. } => {
            let read = format!("source.span({}, \"{name}\")?", of(length));
            ("Span".into(), Part::Arena, read, "span(", "")
        }
        Kind::SvmOrBulk { length, .. } => {
            let read = format!("source.memory({}, \"{name}\")?", of(length));
            ("Memory".into(), Part::Arena, read, "memory(", "")
        }
        Kind::Status | Kind::Local => return None,
    };
    let has_null = part == Part::Fixed;
    Some(Field {
        name: name.clone(),
        c_text: param.c_text.clone(),
        rust_type,
        there: if param.null && !has_null {
            There::Optional
        } else {
            There::Always
        },
        part,
        read,
        write: (write.into(), tail),
    })
}

/// Something that comes back, in the call: whether it is asked for.
fn asked(param: &Param) -> Option<Field> {
    param.null.then(|| Field {
        name: param.name.clone(),
        c_text: format!("whether it is asked for: `{}`", param.c_text),
        rust_type: "bool".into(),
        there: There::Asked,
        part: Part::Fixed,
        read: String::new(),
        write: (String::new(), String::new()),
    })
}

/// What a parameter is in the reply.
fn reply_field(api: &Api, command: &Command, param: &Param) -> Option<ReplyField> {
    if let Kind::Svm { life: Life::Create } = &param.kind {
        return Some(ReplyField {
            name: param.name.clone(),
            c_text: param.c_text.clone(),
            rust_type: "SvmAddress".into(),
            asked: false,
            most: None,
        });
    }
    let (element, by) = match &param.kind {
        Kind::Array {
            direction: Direction::Out,
            element,
            length,
        } => (names::element(api, element), length),
        Kind::Handles {
            life: Life::Get,
            c_type,
            length,
        } => (names::handle(api, c_type), length),
        _ => return None,
    };
    let one = by.is_one();
    Some(ReplyField {
        name: param.name.clone(),
        c_text: param.c_text.clone(),
        rust_type: if one { element } else { format!("List<'r, {element}>") },
        asked: param.null,
        most: (!one).then(|| length(command, by, "call.")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_is_checked_at_each_step() {
        let param = |name: &str, element: Element| Param {
            name: name.into(),
            c_text: String::new(),
            null: false,
            kind: Kind::Scalar { element, counts: true },
        };
        let api = accel_spec::opencl(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
        let mut command = api.unwrap().commands.remove(0);
        command.params = vec![param("rows", Element::U32), param("pitch", Element::U64)];
        let factors = ["rows", "pitch"].map(|name| Factor::Parameter(name.into()));
        let of = |factors: &[Factor]| length(&command, &Length::Product(factors.to_vec()), "call.");
        assert_eq!(of(&factors[..1]), "Some(u64::from(call.rows))");
        assert_eq!(of(&factors), "u64::checked_mul(u64::from(call.rows), call.pitch)");
        let three = [factors[0].clone(), factors[1].clone(), Factor::Number(3)];
        assert!(of(&three).ends_with(".and_then(|product| product.checked_mul(3))"));
    }
}
