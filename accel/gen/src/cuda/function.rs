//! The client's function of C for one function of a library.
//!
//! Knows the shapes of bodies; what encodes, sends and keeps is the client's `stub`.

use std::fmt::Write as _;

use accel_spec::cuda::{Body, CType, Cuda, Function, Library, TypeKind, snake};
use accel_spec::{Direction, Kind, Life, Param};

use crate::layout::{Layout, There};
use crate::names;

/// Writes one function.
pub(crate) struct Writer<'a> {
    pub(crate) cuda: &'a Cuda,
    pub(crate) library: &'a Library,
    pub(crate) function: &'a Function,
    pub(crate) index: usize,
    pub(crate) part: Option<u16>,
}

impl Writer<'_> {
    pub(crate) fn write(&self, text: &mut String) {
        let Function { name, body, .. } = self.function;
        if let Body::NotServed(value) = body {
            _ = writeln!(
                text,
                "/// `{name}`: not served.\n#[unsafe(no_mangle)]\nextern \"C\" fn basalt_{name}() -> i64 {{\n    stub::not_served({}, {value})\n}}\n",
                self.index
            );
            return;
        }
        let Some(declaration) = &self.function.declaration else {
            return;
        };
        let params = declaration
            .params
            .iter()
            .map(|(name, of, _)| format!("{}{}: {}", self.underscore(name), snake(name), self.abi(of)));
        let returns = match self.abi(&declaration.returns).as_str() {
            "()" => String::new(),
            other => format!(" -> {other}"),
        };
        _ = write!(
            text,
            "/// `{}`.\n#[unsafe(no_mangle)]\nunsafe extern \"C\" fn basalt_{name}({}){returns} {{\n    stub::enter({});\n",
            self.c_text(),
            params.collect::<Vec<_>>().join(", "),
            self.index
        );
        match body {
            Body::NotServed(_) => {}
            Body::Hand(_) => self.by_hand(text),
            Body::Send { repeats } => self.send(text, *repeats),
            Body::Ask { kept } => self.ask(text, *kept),
            Body::CreateDescriptor => self.create(text),
            Body::DestroyDescriptor => {
                _ = writeln!(
                    text,
                    "    // SAFETY: 1. the program gives back what was made for it, once.\n    unsafe {{ crate::descriptor::destroy({}) }};\n    0",
                    self.first()
                )
            }
            Body::SetDescriptor { key } => self.set(text, key.as_deref()),
        }
        text.push_str("}\n\n");
    }

    fn c_text(&self) -> String {
        let Some(declaration) = &self.function.declaration else {
            return self.function.name.clone();
        };
        let params: Vec<_> = declaration.params.iter().map(|(_, _, text)| text.as_str()).collect();
        let returns = &declaration.returns;
        format!(
            "{}{} {}({})",
            returns.name,
            " *".repeat(returns.pointers),
            self.function.name,
            params.join(", ")
        )
    }

    /// What stands before the name of a parameter that a generated body does not look at.
    fn underscore(&self, c_name: &str) -> &'static str {
        let by_hand = matches!(self.function.body, Body::Hand(_));
        if by_hand {
            return if self.taken().any(|name| name == c_name) {
                ""
            } else {
                "_"
            };
        }
        let params = self.command().into_iter().flat_map(|command| &command.params);
        let is_local = params
            .into_iter()
            .any(|param| param.name == snake(c_name) && param.kind == Kind::Local);
        if is_local { "_" } else { "" }
    }

    /// Parameters that a function by hand takes.
    fn taken(&self) -> impl Iterator<Item = &String> {
        let params = self
            .function
            .declaration
            .iter()
            .flat_map(|declaration| &declaration.params);
        let taken = params.zip(&self.function.taken).filter(|(_, taken)| **taken);
        taken.map(|((name, _, _), _)| name)
    }

    /// The type that Rust has for a parameter in C.
    fn abi(&self, of: &CType) -> String {
        let by_value = match self.cuda.types.get(&of.name) {
            Some(TypeKind::Number(rust)) => (*rust).to_owned(),
            Some(TypeKind::Handle | TypeKind::Descriptor | TypeKind::Pointer) => "P".into(),
            Some(TypeKind::Struct(12)) => "crate::abi::Dim3".into(),
            Some(TypeKind::Struct(_)) => "c_void".into(),
            None if of.pointers == 0 => return "()".into(),
            None => "c_void".into(),
        };
        let inner = (1..of.pointers).fold(by_value, |inner, _| format!("*mut {inner}"));
        match (of.pointers, of.constant) {
            (0, _) => inner,
            (1, true) => format!("*const {inner}"),
            _ => format!("*mut {inner}"),
        }
    }

    fn first(&self) -> String {
        let first = self
            .function
            .declaration
            .as_ref()
            .and_then(|declaration| declaration.params.first());
        first.map_or(String::new(), |(name, _, _)| snake(name))
    }

    /// Functions of the runtime keep what they return as the thread's last error.
    fn told(&self, expression: &str) -> String {
        let is_code = self
            .function
            .declaration
            .as_ref()
            .is_some_and(|declaration| declaration.returns.name == "cudaError_t");
        let has_params = self
            .function
            .declaration
            .as_ref()
            .is_some_and(|declaration| !declaration.params.is_empty());
        // Those without parameters that are by hand are the ones that ask for the last error.
        let by_hand = matches!(self.function.body, Body::Hand(_));
        if is_code && (has_params || !by_hand) {
            format!("stub::told({expression})")
        } else {
            expression.to_owned()
        }
    }

    fn by_hand(&self, text: &mut String) {
        let list_of = |name: &String| self.function.together.iter().find(|list| list.contains(name));
        let names: Vec<_> = self
            .taken()
            .filter_map(|name| match list_of(name) {
                None => Some(snake(name)),
                Some(list) if list.first() == Some(name) => {
                    let names: Vec<_> = list.iter().map(|name| snake(name)).collect();
                    Some(format!("[{}]", names.join(", ")))
                }
                Some(_) => None,
            })
            .collect();
        let call = format!(
            "unsafe {{ crate::{}::{}({}) }}",
            self.library.name,
            self.function.name,
            names.join(", ")
        );
        _ = writeln!(
            text,
            "    // SAFETY: 1. the arguments are the program's, as the declaration has them.\n    {}",
            self.told(&call)
        );
    }

    fn command(&self) -> Option<&accel_spec::Command> {
        self.cuda
            .api
            .commands
            .iter()
            .find(|command| command.name == self.function.name)
    }

    fn send(&self, text: &mut String, repeats: bool) {
        let made = self.fields(text);
        let sent = if repeats {
            "stub::send_once(&call)"
        } else {
            "stub::send(&call)"
        };
        let status = self.told(&format!("stub::status::{}({sent})", self.library.name));
        let Some((place, value)) = made.created else {
            _ = writeln!(text, "    {status}");
            return;
        };
        _ = writeln!(
            text,
            "    let status = {status};\n    if status == 0 {{\n        // SAFETY: 1. the program has a place for it.\n        \
             unsafe {{ stub::put({place}, crate::abi::address({value})) }};\n    }}\n    status"
        );
    }

    fn ask(&self, text: &mut String, kept: bool) {
        self.fields(text);
        let mut puts = String::new();
        for param in self.command().iter().flat_map(|command| &command.params) {
            let Kind::Array {
                direction: Direction::Out,
                length,
                ..
            } = &param.kind
            else {
                continue;
            };
            let c_name = self.c_name(&param.name);
            let cast = self.element_of(&c_name);
            let line = match (length.is_one(), cast.as_str()) {
                (true, "f32") => format!("stub::put({0}, f32::from_bits(reply.{0}))", param.name),
                (true, "f64") => format!("stub::put({0}, f64::from_bits(reply.{0}))", param.name),
                (true, "usize") => format!(
                    "stub::put({0}, usize::try_from(reply.{0}).unwrap_or(usize::MAX))",
                    param.name
                ),
                (true, _) => format!("stub::put({0}, reply.{0})", param.name),
                (false, _) => format!("stub::put_all({0}.cast(), reply.{0})", param.name),
            };
            _ = writeln!(
                puts,
                "        // SAFETY: 1. the program has a place for it, or NULL.\n        unsafe {{ {line} }};"
            );
        }
        let reply = if puts.is_empty() { "_" } else { "reply" };
        let asked = format!("stub::ask(&call, {kept}, |{reply}| {{\n{puts}    }})");
        let status = format!("stub::status::{}({asked})", self.library.name);
        _ = writeln!(text, "    {}", self.told(&status));
    }

    /// The type that a pointer of C points to, in Rust.
    fn element_of(&self, c_name: &str) -> String {
        let params = self
            .function
            .declaration
            .iter()
            .flat_map(|declaration| &declaration.params);
        let of = params
            .into_iter()
            .find(|(name, _, _)| name == c_name)
            .map(|(_, of, _)| of);
        of.map_or(String::new(), |of| match self.cuda.types.get(&of.name) {
            Some(TypeKind::Number(rust)) => (*rust).to_owned(),
            _ => "c_void".into(),
        })
    }

    fn c_name(&self, snaked: &str) -> String {
        let params = self
            .function
            .declaration
            .iter()
            .flat_map(|declaration| &declaration.params);
        params
            .map(|(name, _, _)| name)
            .find(|name| snake(name) == snaked)
            .cloned()
            .unwrap_or_default()
    }

    /// The call of the function's arguments, as `call`.
    fn fields(&self, text: &mut String) -> Made {
        let mut made = Made { created: None };
        let Some(command) = self.command() else { return made };
        let layout = Layout::of(&self.cuda.api, command);
        let mut fields = String::new();
        for field in &layout.call {
            let value = match command.params.iter().find(|param| param.name == field.name) {
                None => "stub::reply_place()".to_owned(),
                Some(param) => self.field(text, param, &mut made),
            };
            let value = match field.there {
                There::Optional => format!("(!{}.is_null()).then(|| {value})", field.name),
                There::Asked => format!("!{}.is_null()", field.name),
                There::Always => value,
            };
            if value == field.name {
                _ = writeln!(fields, "        {value},");
            } else {
                _ = writeln!(fields, "        {}: {value},", field.name);
            }
        }
        let name = names::command(&self.cuda.api, &command.name);
        if ["stub::memory", "descriptor::content"]
            .iter()
            .any(|unsafe_| fields.contains(unsafe_))
        {
            _ = writeln!(
                text,
                "    // SAFETY: 1. the program's lists are as long as the declaration has them; 2. its descriptors are those that it was given.\n    \
                 let call = unsafe {{ calls::{name} {{\n{fields}    }} }};"
            );
        } else {
            _ = writeln!(text, "    let call = calls::{name} {{\n{fields}    }};");
        }
        made
    }

    fn field(&self, text: &mut String, param: &Param, made: &mut Made) -> String {
        let name = &param.name;
        let c_name = self.c_name(name);
        match &param.kind {
            Kind::Scalar { .. } => match self.element_of(&c_name).as_str() {
                "f32" | "f64" => format!("{name}.to_bits()"),
                "usize" => format!("{name} as u64"),
                "i32" if self.is_count(param) => format!("u32::try_from({name}).unwrap_or_default()"),
                _ => name.clone(),
            },
            Kind::Handle { life: Life::Shadow, .. } => {
                _ = writeln!(text, "    let made = stub::name();");
                made.created = Some((name.clone(), "made".into()));
                "Handle::from_raw(made)".into()
            }
            Kind::Handle { .. } => {
                format!("Handle::from_raw(crate::abi::raw({name}))")
            }
            Kind::Svm { .. } => format!("SvmAddress({name}.addr() as u64)"),
            Kind::Properties { .. } => {
                let scalar = self.function.scalars.iter().find(|(scalar, _)| *scalar == c_name);
                match scalar {
                    None => format!("List::new(crate::descriptor::content(&{name}))"),
                    Some((_, length)) => {
                        let length = length.parse::<u32>().map_or_else(
                            |_| format!("stub::Scalar::bytes(&{})", snake(length)),
                            |bytes| bytes.to_string(),
                        );
                        format!("List::new(stub::memory(&{name}, {length}))")
                    }
                }
            }
            Kind::Array { length, .. } => {
                let length = match length {
                    accel_spec::Length::Product(factors) => factors.iter().map(|factor| match factor {
                        accel_spec::Factor::Number(number) => number.to_string(),
                        accel_spec::Factor::Parameter(name) => format!("{name} as usize"),
                    }),
                    _ => return String::new(),
                };
                let length: Vec<_> = length.collect();
                format!("List::new(stub::memory(&{name}, {}))", length.join(" * "))
            }
            _ => name.clone(),
        }
    }

    fn is_count(&self, param: &Param) -> bool {
        matches!(
            &param.kind,
            Kind::Scalar {
                element: accel_spec::Element::U32,
                ..
            }
        )
    }

    /// Words of a function's arguments behind the first one.
    fn words(&self, text: &mut String) {
        let has_words = self
            .function
            .declaration
            .as_ref()
            .is_some_and(|declaration| declaration.params.len() > 1);
        let mutable = if has_words { "mut " } else { "" };
        _ = writeln!(text, "    let {mutable}words = crate::descriptor::Words::default();");
        for (c_name, of, _) in self
            .function
            .declaration
            .iter()
            .flat_map(|declaration| declaration.params.iter().skip(1))
        {
            let name = snake(c_name);
            let input = self.function.inputs.iter().find(|(input, _)| input == c_name);
            _ = match (input, self.abi(of).as_str()) {
                (Some((_, length)), _) => writeln!(
                    text,
                    "    // SAFETY: 1. the program's list is as long as the declaration has it.\n    \
                     words.list(unsafe {{ stub::memory::<{}, _>(&{name}, {} as usize) }});",
                    match self.element_of(c_name).as_str() {
                        "c_void" => "u8".to_owned(),
                        other => other.to_owned(),
                    },
                    snake(length)
                ),
                (None, "usize") => writeln!(text, "    words.number({name} as u64);"),
                (None, "f32" | "f64") => writeln!(text, "    words.number({name}.to_bits());"),
                (None, _) => writeln!(text, "    words.number({name});"),
            };
        }
    }

    fn create(&self, text: &mut String) {
        self.words(text);
        _ = writeln!(
            text,
            "    // SAFETY: 1. the program has a place for it.\n    unsafe {{ stub::put({}, crate::descriptor::create({:#06x}, words)) }};\n    0",
            self.first(),
            self.part.unwrap_or_default()
        );
    }

    fn set(&self, text: &mut String, key: Option<&str>) {
        self.words(text);
        let key = key.map_or("0".to_owned(), snake);
        _ = writeln!(
            text,
            "    // SAFETY: 1. the program has it from a function that makes them.\n    let set = unsafe {{ crate::descriptor::set({}, {:#06x}, {key}, words) }};\n    \
             stub::status::{}(set)",
            self.first(),
            self.part.unwrap_or_default(),
            self.library.name
        );
    }
}

/// What a call makes.
struct Made {
    /// The place for it, and its name.
    created: Option<(String, String)>,
}
