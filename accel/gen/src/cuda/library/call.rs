//! One call as a function of its library takes it.
//!
//! Knows no call by name.

use std::fmt::Write as _;

use accel_spec::cuda::{Cuda, Function, Library, TypeKind, snake};
use accel_spec::{Command, Direction, Element, Factor, Kind, Length, Life, Param};

use super::c_type;
use crate::names;

/// Writes one function.
pub(super) struct Writer<'a> {
    pub(super) cuda: &'a Cuda,
    pub(super) library: &'a Library,
    pub(super) function: &'a Function,
    pub(super) command: &'a Command,
}

/// What stands around the library's call.
#[derive(Default)]
struct Parts {
    before: String,
    arguments: Vec<String>,
    after: String,
    reply: String,
}

impl Writer<'_> {
    pub(super) fn write(&self, text: &mut String) {
        let Function { name, .. } = self.function;
        let call = names::command(&self.cuda.api, name);
        let mut parts = Parts::default();
        for param in &self.command.params {
            self.param(param, &mut parts);
        }
        let Parts {
            before,
            arguments,
            after,
            mut reply,
        } = parts;
        let has_lists = self.command.params.iter().any(|param| {
            matches!(
                &param.kind,
                Kind::Properties { .. }
                    | Kind::Text
                    | Kind::Array {
                        direction: Direction::In,
                        ..
                    }
            )
        });
        let lifetime = if has_lists { "<'_>" } else { "" };
        let used = if self.command.params.is_empty() { "_" } else { "" };
        if !reply.is_empty() {
            reply = format!(
                "    cx.answer(&AnyReply::{call}(calls::{call}Reply {{\n        status: 0,\n{reply}    }}));\n"
            );
        }
        _ = write!(
            text,
            "/// `{name}`.\npub(crate) fn {name}(cx: &mut Context<'_>, {used}call: &calls::{call}{lifetime}) -> Result<(), Failure> {{\n    \
             let function = cx.libraries.{library}()?.{name}()?;\n{before}    \
             // SAFETY: 1. the function has these types; 2. objects and addresses were looked up among the client's; 3. places and lists\n    \
             // have room for what it reads and writes, and live until it returns.\n    \
             let status = unsafe {{ function({arguments}) }};\n    check(status)?;\n{after}{reply}    Ok(())\n}}\n\n",
            library = self.library.name,
            arguments = arguments.join(", "),
        );
    }

    /// The type in Rust of a parameter, and of what it points to.
    fn types(&self, param: &Param) -> (&'static str, Option<&TypeKind>, usize) {
        let params = self
            .function
            .declaration
            .iter()
            .flat_map(|declaration| &declaration.params);
        let found = params.into_iter().find(|(name, _, _)| snake(name) == param.name);
        found.map_or(("P", None, 0), |(_, of, _)| {
            (c_type(self.cuda, of), self.cuda.types.get(&of.name), of.pointers)
        })
    }

    fn param(&self, param: &Param, parts: &mut Parts) {
        let name = &param.name;
        let (rust, of, _) = self.types(param);
        let argument = match &param.kind {
            Kind::Scalar { .. } => number(&format!("call.{name}"), param, rust),
            Kind::Handle { life: Life::Shadow, .. } => {
                _ = write!(
                    parts.before,
                    "    cx.can_make(call.{name})?;\n    let mut {name}: P = std::ptr::null_mut();\n"
                );
                _ = writeln!(parts.after, "    cx.made(call.{name}, {name});");
                format!("(&raw mut {name}).cast()")
            }
            Kind::Handle {
                life: Life::Release, ..
            } => {
                _ = writeln!(parts.before, "    let {name} = cx.take(call.{name})?;");
                name.clone()
            }
            Kind::Handle { .. } => {
                _ = writeln!(parts.before, "    let {name} = cx.object(call.{name})?;");
                name.clone()
            }
            Kind::Svm { .. } => {
                let checked = match self.size_of(param) {
                    Some(size) => format!("cx.device_of(call.{name}, call.{size})?"),
                    None => format!("cx.device(call.{name})?"),
                };
                _ = writeln!(parts.before, "    let {name} = {checked};");
                name.clone()
            }
            Kind::Properties {
                element: Element::Byte, ..
            } => {
                _ = writeln!(parts.before, "    let {name} = Scalar::new(&call.{name})?;");
                format!("{name}.address()")
            }
            Kind::Properties { .. } => {
                _ = writeln!(
                    parts.before,
                    "    let {name} = cx.descriptor({:?}, &call.{name})?;",
                    self.c_type_of(param)
                );
                name.clone()
            }
            Kind::Text => format!("call.{name}.as_ptr().cast_mut().cast()"),
            Kind::Array {
                direction: Direction::In,
                ..
            } => {
                let list = if param.null {
                    format!("call.{name}.as_ref()")
                } else {
                    format!("Some(&call.{name})")
                };
                let made = match of {
                    // What a library has told is opaque, and only that is given back to it.
                    Some(TypeKind::Struct(_)) => format!("cx.opaque({list})?"),
                    _ => format!("Bytes::of({list})"),
                };
                _ = writeln!(parts.before, "    let {name} = {made};");
                format!("{name}.address()")
            }
            Kind::Array {
                direction: Direction::Out,
                length,
                ..
            } => self.out(param, length, parts),
            Kind::Local if self.c_type_of(param) == "cublasLtHandle_t" => "cx.light_handle()?".into(),
            _ => "std::ptr::null_mut()".into(),
        };
        if argument == "cx.light_handle()?" {
            _ = writeln!(parts.before, "    let {name} = cx.light_handle()?;");
            parts.arguments.push(name.clone());
        } else {
            parts.arguments.push(argument);
        }
    }

    /// The parameter that says how many bytes there are at an address: the next one, if it is a size by its name.
    fn size_of(&self, param: &Param) -> Option<&str> {
        let next = self.behind(param)?;
        let is_size = matches!(
            &next.kind,
            Kind::Scalar {
                element: Element::U64,
                ..
            }
        ) && next.name.ends_with("size_in_bytes");
        is_size.then_some(next.name.as_str())
    }

    /// The next parameter.
    fn behind(&self, param: &Param) -> Option<&Param> {
        let mut params = self.command.params.iter();
        params.find(|other| other.name == param.name)?;
        params.next()
    }

    fn c_type_of(&self, param: &Param) -> String {
        let params = self
            .function
            .declaration
            .iter()
            .flat_map(|declaration| &declaration.params);
        let found = params.into_iter().find(|(name, _, _)| snake(name) == param.name);
        found.map_or(String::new(), |(_, of, _)| of.name.clone())
    }

    fn out(&self, param: &Param, length: &Length, parts: &mut Parts) -> String {
        let name = &param.name;
        let (_, of, _) = self.types(param);
        let element = match of {
            Some(TypeKind::Number(rust)) => *rust,
            _ => "u8",
        };
        let Length::Product(factors) = length else {
            return String::new();
        };
        if length.is_one() {
            let zero = if element.starts_with('f') { "0.0" } else { "0" };
            _ = writeln!(parts.before, "    let mut {name}: {element} = {zero};");
            let value = match element {
                "f32" | "f64" => format!("{name}.to_bits()"),
                "usize" => format!("{name} as u64"),
                _ => name.clone(),
            };
            _ = if value == *name {
                writeln!(parts.reply, "        {name},")
            } else {
                writeln!(parts.reply, "        {name}: {value},")
            };
            return format!("(&raw mut {name}).cast()");
        }
        let factors = factors.iter().map(|factor| match factor {
            Factor::Number(number) => number.to_string(),
            Factor::Parameter(name) => format!("u64::from(call.{name})"),
        });
        let factors: Vec<_> = factors.collect();
        _ = writeln!(
            parts.before,
            "    let mut {name} = Bytes::zeroed({})?;",
            factors.join(" * ")
        );
        if self.c_type_of(param) == "cublasLtMatmulHeuristicResult_t" {
            // How many it has told stands behind.
            let count = self.behind(param).map_or("", |count| &count.name);
            _ = writeln!(parts.after, "    cx.told({name}.bytes(), {count});");
        }
        _ = writeln!(parts.reply, "        {name}: List::new({name}.bytes()),");
        format!("{name}.place()")
    }
}

/// A number by value.
fn number(value: &str, param: &Param, rust: &str) -> String {
    let counts = matches!(
        &param.kind,
        Kind::Scalar {
            element: Element::U32,
            ..
        }
    );
    match rust {
        "f32" => format!("f32::from_bits({value})"),
        "f64" => format!("f64::from_bits({value})"),
        "usize" => format!("number({value})?"),
        "i32" if counts => format!("number({value})?"),
        _ => value.to_owned(),
    }
}
