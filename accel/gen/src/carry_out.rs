//! The function that carries out one call: arguments as C has them, the back end's function, and what comes back.
//!
//! Knows what `accel/server` offers to this code by name: `Session`, and what moves arguments to C and answers from it (`marshal`).

use std::fmt::Write as _;

use accel_spec::{Api, Direction, Element, Flow, Kind, Length, Life, Param};

use crate::code::Crossing;
use crate::names;
use crate::server::snake;

/// What a shared comment of all calls says; numbers are obligations.
const SAFETY: &str = "// SAFETY: 1. the function is the back end's of that name and has these types (`Api`); 2. objects are held until it\n    \
                      // returns; 3. pointers are to as much as the numbers beside them say, or into the arena, which outlives all\n    \
                      // work of the back end (`Client`).\n";

/// The parts of a function that carries out a call.
pub(crate) struct Body<'a> {
    api: &'a Api,
    crossing: &'a Crossing<'a>,
    /// What is done before the call.
    before: String,
    /// Arguments of the call.
    arguments: Vec<String>,
    /// What is done after it.
    after: String,
    /// Names of objects that what is made belongs to.
    owners: Vec<String>,
    /// Fields of the reply.
    reply: String,
}

impl<'a> Body<'a> {
    pub(crate) fn new(api: &'a Api, crossing: &'a Crossing<'a>) -> Self {
        Self {
            api,
            crossing,
            before: String::new(),
            arguments: Vec::new(),
            after: String::new(),
            owners: Vec::new(),
            reply: String::new(),
        }
    }

    pub(crate) fn write(mut self, text: &mut String) {
        let command = self.crossing.command;
        let name = names::command(self.api, &command.name);
        let release = command.params.iter().find_map(|param| match &param.kind {
            Kind::Handle {
                life: Life::Release, ..
            } => Some(&param.name),
            _ => None,
        });
        _ = write!(
            text,
            "/// `{}`.\npub(super) fn {}(cx: &mut Session<'_>, call: &{}) -> Result<(), Code> {{\n",
            command.name,
            snake(&name),
            self.crossing.call_type(self.api, "'_")
        );
        if let Some(param) = release {
            _ = write!(text, "    cx.release(call.{param})\n}}\n\n");
            return;
        }
        self.own_answers();
        let returned = command.params.iter().any(|param| param.name == "returned");
        for param in &command.params {
            self.param(param);
        }
        self.checks();
        text.push_str(&self.before);
        let arguments = self.arguments.join(", ");
        let function = &command.name;
        _ = writeln!(text, "    let function = cx.api().{function}()?;");
        if returned {
            _ = write!(
                text,
                "    let mut status = 0_i32;\n    {SAFETY}    let returned = unsafe {{ function({arguments}) }};\n    check(status)?;\n"
            );
        } else {
            _ = write!(
                text,
                "    {SAFETY}    let status = unsafe {{ function({arguments}) }};\n    check(status)?;\n"
            );
        }
        text.push_str(&self.after);
        self.finish(text);
        text.push_str("}\n\n");
    }

    /// Queries whose answers only the client knows would tell it addresses of the server's.
    fn own_answers(&mut self) {
        let own: Vec<_> = (self.crossing.command.own_answers.iter())
            .map(|(_, value)| format!("{value:#x}"))
            .collect();
        if !own.is_empty() {
            _ = writeln!(
                self.before,
                "    if matches!(call.param_name, {}) {{ return Err(Code::INVALID_VALUE); }}",
                own.join(" | ")
            );
        }
    }

    fn checks(&mut self) {
        for check in &self.crossing.command.checks {
            let (object, rest) = (&check.arguments[0], &check.arguments[1..]);
            let rest = |by: &str| -> String { rest.iter().map(|name| format!(", {by}call.{name}")).collect() };
            match check.name.as_str() {
                "in_bounds" => {
                    _ = writeln!(
                        self.before,
                        "    {object}.in_bounds(({}))?;",
                        rest("").trim_start_matches(", ")
                    )
                }
                "rect_in_bounds" => {
                    let [origin, region, row, slice] = &check.arguments[1..] else {
                        continue;
                    };
                    _ = writeln!(
                        self.before,
                        "    {object}.rect_in_bounds((&call.{origin}, &call.{region}), (call.{row}, call.{slice}))?;"
                    );
                }
                "pixels_in_bounds" => {
                    let [region, buffer, offset] = &check.arguments[1..] else {
                        continue;
                    };
                    _ = writeln!(
                        self.before,
                        "    crate::manual::pixels_in_bounds(cx, &{object}, &call.{region}, (&{buffer}, call.{offset}))?;"
                    );
                }
                // Of images the back end compares regions itself; what of them is in the arena is by hand.
                _ => {}
            }
        }
    }

    fn param(&mut self, param: &Param) {
        let name = &param.name;
        match &param.kind {
            Kind::Scalar { .. } => self.scalar(param),
            Kind::Handle { c_type, life } => self.handle(param, c_type, *life),
            Kind::Handles { life: Life::Use, .. } => {
                self.there(param);
                let list = optional(param, "");
                _ = writeln!(self.before, "    let {name} = cx.objects({list})?;");
                self.arguments.push(format!("{name}.pointer()"));
            }
            Kind::Handles {
                life: Life::Get,
                c_type,
                length,
            } => self.told(param, c_type, length),
            Kind::Handles { .. } => {
                let list = optional(param, "");
                _ = writeln!(self.before, "    let mut {name} = Places::new({list})?;");
                self.arguments.push(format!("{name}.pointer()"));
                let owners = self.owners.join(", &");
                _ = writeln!(self.after, "    cx.insert_all({list}, &{name}, &[&{owners}])?;");
            }
            Kind::Array {
                direction: Direction::In,
                ..
            } => {
                self.there(param);
                let list = optional(param, "");
                _ = writeln!(self.before, "    let {name} = Bytes::new({list});");
                self.arguments.push(format!("{name}.pointer()"));
            }
            Kind::Array { element, length, .. } => self.answer(param, element, length),
            Kind::Bulk { .. } => {
                self.there(param);
                let span = if param.null {
                    format!("call.{name}")
                } else {
                    format!("Some(call.{name})")
                };
                _ = writeln!(self.before, "    let {name} = cx.arena({span})?;");
                self.arguments.push(name.clone());
            }
            Kind::Text => self.arguments.push(if param.null {
                format!("text(call.{name})")
            } else {
                format!("text(Some(call.{name}))")
            }),
            Kind::Pieces { .. } => {
                let list = optional(param, "");
                _ = writeln!(self.before, "    let {name} = cx.pieces({list})?;");
                self.arguments.push(format!("{name}.pointer()"));
            }
            Kind::Properties { keys, .. } => {
                let keys: Vec<_> = (keys.iter())
                    .map(|key| format!("({:#x}, Sort::{})", key.value, names::c_type(self.api, &key.c_type)))
                    .collect();
                _ = writeln!(
                    self.before,
                    "    let {name} = cx.properties({}, &[{}])?;",
                    optional(param, ""),
                    keys.join(", ")
                );
                self.arguments.push(format!("{name}.pointer()"));
            }
            Kind::Status => self.arguments.push("(&raw mut status).cast()".into()),
            Kind::Local if name == "lengths" => self.lengths(),
            // A function of the client's is called by nobody here: of contexts, it would be told of what went wrong in the driver.
            Kind::Callback { .. } | Kind::Local => self.arguments.push("std::ptr::null_mut()".into()),
            Kind::Value { .. } | Kind::Svm { .. } | Kind::SvmList { .. } | Kind::SvmOrBulk { .. } => {
                unreachable!("{}: {name} is by hand or not carried out", self.crossing.command.name)
            }
        }
    }

    /// Not all back ends look whether a list is there before they read as much of it as the number beside it says.
    fn there(&mut self, param: &Param) {
        let length = match &param.kind {
            Kind::Handles { length, .. }
            | Kind::Array {
                element: Element::Byte,
                length,
                ..
            } => length,
            // What a query is not asked for has a size all the same.
            Kind::Bulk { length, .. } if param.name != "param_value" => length,
            _ => return,
        };
        let parameters = length.parameters();
        let (true, [by]) = (param.null, parameters.as_slice()) else {
            return;
        };
        let count = self.crossing.command.params.iter().find(|param| param.name == *by);
        let (Some(count), Length::Product(_)) = (count.map(number), length) else {
            return;
        };
        let code = match param.name.as_str() {
            "event_wait_list" => "INVALID_EVENT_WAIT_LIST",
            _ => "INVALID_VALUE",
        };
        _ = writeln!(
            self.before,
            "    there(call.{}.is_some(), {count}, Code::{code})?;",
            param.name
        );
    }

    /// Lengths of pieces stand beside them, on either side.
    fn lengths(&mut self) {
        let pieces = |param: &&Param| matches!(param.kind, Kind::Pieces { .. });
        if let Some(param) = self.crossing.command.params.iter().find(pieces) {
            self.arguments.push(format!("{}.lengths()", param.name));
        }
    }

    fn scalar(&mut self, param: &Param) {
        let name = &param.name;
        let limits = |other: &&Param| match &other.kind {
            Kind::Array {
                direction: Direction::Out,
                length,
                ..
            }
            | Kind::Handles {
                life: Life::Get,
                length,
                ..
            } => !length.is_one() && length.parameters() == [name.as_str()] && self.counter(other).is_some(),
            _ => false,
        };
        let limited = self.crossing.command.params.iter().find(limits);
        self.arguments.push(match limited {
            // No longer than a reply can be.
            Some(other) => format!("{}.limit(call.{name})", other.name),
            None => format!("call.{name}"),
        });
        if let Some(other) = limited {
            let (size, count) = (self.size(other), number(param));
            _ = writeln!(
                self.before,
                "    let mut {0} = Answer::new(call.{0}, {count}, {size});",
                other.name
            );
        }
    }

    /// Bytes of an element of an answer.
    fn size(&self, param: &Param) -> String {
        match &param.kind {
            Kind::Array { element, .. } => {
                let rust_type = names::element(self.api, element);
                let path = match element {
                    Element::Struct(_) => format!("accel_proto::opencl::{rust_type}"),
                    _ => rust_type,
                };
                format!("<{path} as accel_proto::Plain>::SIZE")
            }
            _ => "size_of::<crate::api::P>()".into(),
        }
    }

    /// The parameter that tells how many elements an answer has.
    fn counter(&self, _: &Param) -> Option<&'a Param> {
        let single = |param: &&Param| matches!(&param.kind, Kind::Array { direction: Direction::Out, length, .. } if length.is_one());
        let many = |param: &&Param| match &param.kind {
            Kind::Array {
                direction: Direction::Out,
                length,
                ..
            } => !length.is_one(),
            Kind::Handles {
                life: Life::Get | Life::Create,
                ..
            }
            | Kind::Bulk {
                direction: Direction::Out,
                ..
            } => true,
            _ => false,
        };
        let params = &self.crossing.command.params;
        let counters: Vec<_> = params.iter().filter(single).collect();
        match (counters.as_slice(), params.iter().any(|param| many(&param))) {
            ([one], true) => Some(one),
            _ => None,
        }
    }

    fn handle(&mut self, param: &Param, c_type: &str, life: Life) {
        let name = &param.name;
        match (life, name.as_str()) {
            (Life::Use, _) => {
                let find = if param.null { "optional" } else { "object" };
                _ = writeln!(self.before, "    let {name} = cx.{find}(call.{name})?;");
                if c_type == "cl_kernel" {
                    self.kernel(name);
                }
                self.arguments.push(format!("{name}.raw()"));
                if !param.null {
                    self.owners.push(name.clone());
                }
            }
            (_, "returned") => {
                let owners = self.owners();
                _ = writeln!(self.after, "    cx.insert(call.returned, returned, &[{owners}])?;");
            }
            _ => {
                _ = writeln!(self.before, "    let mut {name} = cx.place(call.{name});");
                self.arguments.push(format!("{name}.pointer()"));
                // An event belongs to its queue; what the command works on may go before it.
                let owners = self.owners.first().map(|owner| format!("&{owner}")).unwrap_or_default();
                _ = writeln!(self.after, "    cx.insert(call.{name}, {name}.raw(), &[{owners}])?;");
            }
        }
    }

    /// Kernels are no objects for several threads at once (OpenCL API, clSetKernelArg).
    fn kernel(&mut self, name: &str) {
        _ = writeln!(self.before, "    let _alone = {name}.alone();");
        if matches!(self.crossing.command.flow, Flow::Async { queue: Some(_), .. }) {
            _ = writeln!(self.before, "    {name}.take_failure()?;");
        }
    }

    fn owners(&self) -> String {
        let owners: Vec<_> = self.owners.iter().map(|owner| format!("&{owner}")).collect();
        owners.join(", ")
    }

    /// Something that comes back in the reply.
    fn answer(&mut self, param: &Param, element: &Element, length: &Length) {
        let name = &param.name;
        if length.is_one() {
            self.single(param, element);
            return;
        }
        let counted = self.counter(param);
        if counted.is_none() {
            let asked = if param.null {
                format!("call.{name}")
            } else {
                "true".into()
            };
            let by = length.parameters().first().copied().unwrap_or_default();
            let count = self
                .crossing
                .command
                .params
                .iter()
                .find(|param| param.name == by)
                .map(number);
            let size = self.size(param);
            _ = writeln!(
                self.before,
                "    let mut {name} = Answer::whole({asked}, {}, {size})?;",
                count.unwrap_or_else(|| "0".into())
            );
        }
        self.arguments.push(format!("{name}.pointer()"));
        let count = counted.map_or_else(|| format!("{name}.count()"), wide);
        let answers: Vec<_> = (self.crossing.command.answers.iter())
            .map(|key| format!("({:#x}, Sort::{})", key.value, names::c_type(self.api, &key.c_type)))
            .collect();
        if *element == Element::Byte {
            if !answers.is_empty() {
                _ = writeln!(
                    self.after,
                    "    cx.translate(&mut {name}, {count}, call.param_name, &[{}]);",
                    answers.join(", ")
                );
            }
            if self.crossing.command.name == "clGetDeviceInfo" {
                _ = writeln!(self.after, "    cx.hide(&mut {name}, call.param_name);");
            }
            _ = writeln!(self.after, "    let {name} = {name}.bytes({count});");
            self.field(param, &format!("List::new(&{name})"));
        } else {
            _ = writeln!(self.after, "    let {name} = {name}.values({count});");
            self.field(param, &format!("List::new(&{name})"));
        }
    }

    fn field(&mut self, param: &Param, value: &str) {
        let name = &param.name;
        _ = if param.null && value == name {
            write!(self.reply, "{name}: call.{name}.then_some({name}), ")
        } else if param.null {
            write!(self.reply, "{name}: call.{name}.then(|| {value}), ")
        } else {
            write!(self.reply, "{name}: {value}, ")
        };
    }

    /// One number that comes back.
    fn single(&mut self, param: &Param, element: &Element) {
        let name = &param.name;
        let rust_type = names::element(self.api, element);
        _ = writeln!(self.before, "    let mut {name}: {rust_type} = 0;");
        let counts = self.counter(param).is_some();
        let list = self.crossing.command.params.iter().find(|other| {
            other.null
                && other.name != param.name
                && matches!(
                    &other.kind,
                    Kind::Array {
                        direction: Direction::Out,
                        ..
                    } | Kind::Handles { life: Life::Get, .. }
                )
        });
        let asked = match (param.null, list) {
            (true, Some(list)) if counts => format!("call.{name} || call.{}", list.name),
            (true, _) => format!("call.{name}"),
            (false, _) => "true".into(),
        };
        self.arguments.push(format!("ask(&mut {name}, {asked})"));
        self.field(param, name);
    }

    /// Objects that the client is told of.
    fn told(&mut self, param: &Param, c_type: &str, _: &Length) {
        let name = &param.name;
        self.arguments.push(format!("{name}.pointer()"));
        let count = self.counter(param).map_or("0".into(), wide);
        _ = writeln!(
            self.after,
            "    let {name} = cx.tell::<accel_proto::opencl::{}>(&{name}.objects({count}));",
            names::c_type(self.api, c_type)
        );
        self.field(param, &format!("List::new(&{name})"));
    }

    /// The reply, and the end.
    fn finish(&self, text: &mut String) {
        let crossing = self.crossing;
        if crossing.layout.reply.is_empty() {
            text.push_str("    Ok(())\n");
            return;
        }
        let place = if crossing.layout.call.iter().any(|field| field.name == "reply") {
            "Some(call.reply)"
        } else {
            "None"
        };
        let reply_type = crossing.reply_type(self.api, "").replace("<>", "");
        _ = writeln!(
            text,
            "    cx.answer(call, &{reply_type} {{ status, {} }}, {place})",
            self.reply
        );
    }
}

/// An argument that can be missing, as an option of a reference.
fn optional(param: &Param, _: &str) -> String {
    if param.null {
        format!("call.{}.as_ref()", param.name)
    } else {
        format!("Some(&call.{})", param.name)
    }
}

/// A number as 64 bits.
fn number(param: &Param) -> String {
    match &param.kind {
        Kind::Scalar {
            element: Element::U64, ..
        } => format!("call.{}", param.name),
        _ => format!("u64::from(call.{})", param.name),
    }
}

/// A number that came back, as 64 bits.
fn wide(param: &Param) -> String {
    match &param.kind {
        Kind::Array {
            element: Element::U64, ..
        } => param.name.clone(),
        _ => format!("u64::from({})", param.name),
    }
}
