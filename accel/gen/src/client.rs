//! The client's C functions: one for each command that its annotations say enough of.
//!
//! Knows names of `accel/client`'s modules; which of its functions are by hand, `client_hand` knows.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use accel_spec::{Api, Command, Direction, Element, Factor, Flow, Kind, Length, Life, Param, Service};

use crate::GenError;
use crate::client_hand::{LOADERS, function, module_by_hand};
use crate::client_table::table;
use crate::code::HEAD;
use crate::layout::{Layout, There};
use crate::names;

/// Where the functions go.
pub(crate) const STUBS: &str = "accel/client/src/stubs";

/// The modules of functions, by name: one for each group, the one of all, and the tables.
pub(crate) fn modules(api: &Api, order: &str) -> Result<Vec<(String, String)>, GenError> {
    let mut files = Vec::new();
    let mut generated = BTreeSet::new();
    for (group, commands) in api.groups() {
        let mut body = String::new();
        for command in commands {
            if stub(&mut body, api, command)? {
                generated.insert(command.name.clone());
            }
        }
        if !body.is_empty() {
            files.push((group.to_owned(), head(api, group, &body) + &body));
        }
    }
    let mut root = format!(
        "{HEAD}//! The C functions of {} that follow from their annotations.\n//!\n//! One module for each file of annotations.\n\n",
        api.name
    );
    for (group, _) in &files {
        _ = writeln!(root, "mod {group};");
    }
    root.push_str("pub(crate) mod table;\n\n");
    for (group, _) in &files {
        _ = writeln!(root, "pub(crate) use {group}::*;");
    }
    files.push(("table".to_owned(), table(api, order, &generated)?));
    files.push(("mod".to_owned(), root));
    Ok(files)
}

fn head(api: &Api, group: &str, body: &str) -> String {
    let mut text = format!("{HEAD}//! Functions of `accel/spec/{}/{group}.toml`.\n\n", api.name);
    if body.contains("c_char") {
        text.push_str("use std::ffi::c_char;\n\n");
    }
    let is_part = |char: char| char.is_alphanumeric() || char == '_';
    let words: BTreeSet<&str> = body.split(|char| !is_part(char)).collect();
    if words.contains("List") {
        text.push_str("use accel_proto::List;\n");
    }
    text.push_str("use accel_proto::opencl as calls;\n\n");
    for (path, all) in [
        ("crate::arguments", &["In", "Opaque", "Out", "Ref", "list"][..]),
        ("crate::codes", &["Code"]),
        ("crate::connection", &["Touched"]),
        ("crate::info", &["Query", "Wanted"]),
        ("crate::mapping", &["MemState"]),
        (
            "crate::object",
            &["Data", "Object", "Typed", "handle_of", "handle_of_made"],
        ),
        ("crate", &["checks", "event", "kernel", "returned", "status"]),
    ] {
        let used: Vec<&str> = all.iter().copied().filter(|name| is_used(name, body)).collect();
        if !used.is_empty() {
            _ = writeln!(text, "use {path}::{{{}}};", used.join(", "));
        }
    }
    text.push('\n');
    text
}

/// Whether a body names an import; some are names of parameters, too.
fn is_used(name: &str, body: &str) -> bool {
    match name {
        "checks" | "event" | "kernel" => body.contains(&format!("{name}::")),
        "returned" => body.contains("returned(errcode_ret"),
        "status" => body.contains("status(||"),
        "list" => body.contains("list("),
        "handle_of" => body.contains("handle_of("),
        _ => {
            let is_part = |char: char| char.is_alphanumeric() || char == '_';
            body.split(|char| !is_part(char)).any(|word| word == name)
        }
    }
}

/// One function, if it is generated.
fn stub(text: &mut String, api: &Api, command: &Command) -> Result<bool, GenError> {
    // What nobody serves has one function for all (`dispatch`).
    let is_other = matches!(command.service, Service::Alias(_) | Service::Unsupported { .. })
        || LOADERS.contains(&command.name.as_str());
    if is_other || module_by_hand(&command.name).is_some() {
        return Ok(false);
    }
    let stub = Stub { api, command };
    let body = if stub.is_query() {
        stub.query()?
    } else {
        match stub.counted() {
            Some(body) => body,
            None => stub.body()?,
        }
    };
    stub.function(text, &body)?;
    Ok(true)
}

/// A command whose function is being made.
struct Stub<'a> {
    api: &'a Api,
    command: &'a Command,
}

impl Stub<'_> {
    fn open(&self, param: &Param) -> GenError {
        GenError::NoStub {
            command: self.command.name.clone(),
            parameter: param.name.clone(),
        }
    }

    fn params(&self) -> impl Iterator<Item = &Param> {
        self.command.params.iter().filter(|param| param.name != "returned")
    }

    fn returned(&self) -> Option<&Param> {
        self.command.params.iter().find(|param| param.name == "returned")
    }

    /// The type of an argument of the C function.
    fn c_type(&self, param: &Param) -> Result<String, GenError> {
        let element = |element: &Element| match element {
            Element::Struct(_) => Err(self.open(param)),
            other => Ok(names::element(self.api, other)),
        };
        Ok(match &param.kind {
            Kind::Scalar { element: one, .. } => element(one)?,
            Kind::Handle {
                life: Life::Shadow | Life::Create,
                ..
            } => "Out<Ref>".into(),
            Kind::Handle { .. } => "Ref".into(),
            Kind::Handles { life: Life::Use, .. } => "In<Ref>".into(),
            Kind::Array {
                direction: Direction::In,
                element: one,
                ..
            } => format!("In<{}>", element(one)?),
            Kind::Array {
                direction: Direction::Out,
                element: one,
                ..
            } => format!("Out<{}>", element(one)?),
            Kind::Properties { element: one, keys } if keys.is_empty() => format!("In<{}>", element(one)?),
            Kind::Text => "In<c_char>".into(),
            Kind::Status => "Out<i32>".into(),
            Kind::Local => "Opaque".into(),
            _ => return Err(self.open(param)),
        })
    }

    fn function(&self, text: &mut String, body: &str) -> Result<(), GenError> {
        let mut params = String::new();
        for param in self.params() {
            _ = write!(params, "{}: {}, ", param.name, self.c_type(param)?);
        }
        let many = match self.params().count() > 7 {
            true => "#[allow(clippy::too_many_arguments, reason = \"the API's own\")]\n",
            false => "",
        };
        let (out, inner) = match self.returned() {
            Some(_) => ("Ref", "returned(errcode_ret, || {"),
            None => ("i32", "status(|| {"),
        };
        _ = writeln!(
            text,
            "/// `{}`.\n{many}pub(crate) extern \"C\" fn {}({params}) -> {out} {{\n    {inner}\n{body}    }})\n}}\n",
            self.command.name,
            function(self.api, &self.command.name)
        );
        Ok(())
    }

    /// The marker type of a kind of objects.
    fn kind(&self, c_type: &str) -> String {
        format!("calls::{}", names::c_type(self.api, c_type))
    }

    /// Counting references is the client's.
    fn counted(&self) -> Option<String> {
        let [only] = self.command.params.as_slice() else {
            return None;
        };
        let Kind::Handle { c_type, life } = &only.kind else {
            return None;
        };
        let object = format!("{}.object::<{}>()?", only.name, self.kind(c_type));
        match life {
            Life::Retain => Some(format!("        {object}.retain();\n        Ok(())\n")),
            Life::Release => Some(format!("        {object}.release()\n")),
            _ => None,
        }
    }

    /// Whether it has the form of all queries.
    fn is_query(&self) -> bool {
        let names: Vec<_> = self.params().map(|param| param.name.as_str()).collect();
        names.ends_with(&["param_value_size", "param_value", "param_value_size_ret"])
            || (names.contains(&"param_value") && names.contains(&"input_value"))
    }

    fn query(&self) -> Result<String, GenError> {
        let mut body = String::new();
        let (mut objects, mut depends) = (Vec::new(), Vec::new());
        let is_about = |param: &&Param| {
            !matches!(
                param.name.as_str(),
                "param_name" | "param_value_size" | "param_value" | "param_value_size_ret"
            )
        };
        for param in self.params().filter(is_about) {
            let name = &param.name;
            match &param.kind {
                Kind::Handle { c_type, .. } => {
                    let is_first = objects.is_empty();
                    let optional = param.null && !is_first;
                    let method = if optional { "optional" } else { "object" };
                    _ = writeln!(body, "let {name} = {name}.{method}::<{}>()?;", self.kind(c_type));
                    let value = if optional {
                        format!("u64::from(handle_of::<{}>({name}).raw())", self.kind(c_type))
                    } else {
                        format!("u64::from({name}.raw())")
                    };
                    if !is_first {
                        depends.push(value);
                    }
                    objects.push((name.clone(), optional));
                }
                Kind::Scalar {
                    element: Element::U64, ..
                } => depends.push(name.clone()),
                Kind::Scalar { .. } => depends.push(format!("u64::from({name})")),
                Kind::Array {
                    direction: Direction::In,
                    length,
                    ..
                } => {
                    _ = writeln!(body, "let {name} = {name}.list({})?;", self.length(param, length)?);
                    depends.push(format!("{name}.unwrap_or_default().iter().copied().map(u64::from)"));
                }
                _ => return Err(self.open(param)),
            }
        }
        let object = objects.first().map(|(name, _)| name.clone()).unwrap_or_default();
        let keeps = matches!(self.command.flow, Flow::Cached { .. });
        let (lists, values): (Vec<_>, Vec<_>) = depends.into_iter().partition(|one| one.contains(".iter()"));
        if lists.is_empty() {
            _ = writeln!(body, "let depends = vec![{}];", values.join(", "));
        } else {
            _ = writeln!(body, "let mut depends = vec![{}];", values.join(", "));
        }
        for list in lists {
            _ = writeln!(body, "depends.extend({list});");
        }
        _ = writeln!(
            body,
            "let query = Query {{ command: {:?}, object: {object}, param_name, depends, keeps: {keeps} }};\n\
             let wanted = Wanted {{ size: param_value_size, value: param_value, size_ret: param_value_size_ret }};\n\
             query.answer(wanted, |connection, size| {{",
            self.command.name
        );
        let touched: Vec<String> = objects
            .iter()
            .filter(|(_, optional)| !optional)
            .map(|(name, _)| name.clone())
            .collect();
        _ = writeln!(
            body,
            "let make = |reply| calls::{} {{",
            names::command(self.api, &self.command.name)
        );
        for field in Layout::of(self.api, self.command).call {
            let name = &field.name;
            let value = match (name.as_str(), field.there) {
                ("param_value_size", _) => "size".to_owned(),
                ("reply", _) => "reply".to_owned(),
                (_, There::Asked) => "true".to_owned(),
                _ => self.value(name)?,
            };
            _ = if value == *name {
                writeln!(body, "{name},")
            } else {
                writeln!(body, "{name}: {value},")
            };
        }
        _ = writeln!(
            body,
            "}};\nlet (call, answer) = connection.call(make, &Touched::new(&[{}], &[]), false)?;\n\
             let value = answer.success(&call)?.param_value;\n\
             Ok(value.map(|value| value.bytes().to_vec()).unwrap_or_default())\n}})",
            touched.join(", ")
        );
        Ok(body)
    }

    /// How many elements, of the function's arguments.
    fn length(&self, param: &Param, length: &Length) -> Result<String, GenError> {
        let Length::Product(factors) = length else {
            return Err(self.open(param));
        };
        let factor = |factor: &Factor| match factor {
            Factor::Number(number) => number.to_string(),
            Factor::Parameter(name) => {
                let wide = self.params().any(|other| {
                    other.name == *name
                        && matches!(
                            other.kind,
                            Kind::Scalar {
                                element: Element::U64,
                                ..
                            }
                        )
                });
                if wide {
                    name.clone()
                } else {
                    format!("u64::from({name})")
                }
            }
        };
        match factors.as_slice() {
            [one] => Ok(factor(one)),
            _ => Err(self.open(param)),
        }
    }

    /// What a field of the call is, once its parameter was looked at.
    fn value(&self, name: &str) -> Result<String, GenError> {
        let Some(param) = self.command.params.iter().find(|param| param.name == name) else {
            return Ok(name.to_owned());
        };
        Ok(match &param.kind {
            Kind::Scalar { .. } => name.to_owned(),
            Kind::Handle { life: Life::Shadow, .. } => "handle_of_made(told.as_ref())".into(),
            Kind::Handle { life: Life::Create, .. } => "made.handle()".into(),
            Kind::Handle { .. } if param.null && !self.is_first_object(param) => format!("handle_of({name})"),
            Kind::Handle { .. } => format!("{name}.handle()"),
            Kind::Handles { .. } if param.null => format!("{name}.list()"),
            Kind::Handles { .. } => format!("{name}.always()"),
            Kind::Array { .. } | Kind::Properties { .. } if param.null => format!("list({name})"),
            Kind::Array { .. } | Kind::Properties { .. } => format!("List::new({name})"),
            Kind::Text if param.null => format!("{name}.text()"),
            _ => return Err(self.open(param)),
        })
    }

    fn is_first_object(&self, param: &Param) -> bool {
        let first = self.params().find(|other| matches!(other.kind, Kind::Handle { .. }));
        first.is_some_and(|first| first.name == param.name)
    }

    fn body(&self) -> Result<String, GenError> {
        let mut body = String::new();
        let (mut objects, mut optional, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        let counts_dimensions = self.params().any(|param| match &param.kind {
            Kind::Array { length, .. } => length.parameters().contains(&"work_dim"),
            _ => false,
        });
        if counts_dimensions {
            body.push_str("if !(1..=3).contains(&work_dim) { return Err(Code::INVALID_WORK_DIMENSION); }\n");
        }
        for param in self.params() {
            let name = &param.name;
            match &param.kind {
                Kind::Handle {
                    c_type,
                    life: Life::Use,
                } if param.null => {
                    _ = writeln!(body, "let {name} = {name}.optional::<{}>()?;", self.kind(c_type));
                    optional.push(name.clone());
                }
                Kind::Handle {
                    c_type,
                    life: Life::Use,
                } => {
                    _ = writeln!(body, "let {name} = {name}.object::<{}>()?;", self.kind(c_type));
                    objects.push(name.clone());
                }
                Kind::Handles {
                    c_type,
                    life: Life::Use,
                    length,
                } => {
                    let count = length.parameters().first().copied().unwrap_or_default();
                    _ = if name == "event_wait_list" {
                        writeln!(body, "let {name} = event::wait_list(&{name}, {count})?;")
                    } else {
                        let kind = self.kind(c_type);
                        writeln!(
                            body,
                            "let {name} = {name}.objects::<{kind}>({count}, Code::INVALID_VALUE, <{kind} as Typed>::INVALID)?;"
                        )
                    };
                    lists.push(format!("{name}.objects.as_slice()"));
                }
                Kind::Array {
                    direction: Direction::In,
                    length,
                    ..
                } => {
                    let method = if param.null { "list" } else { "required" };
                    _ = writeln!(body, "let {name} = {name}.{method}({})?;", self.length(param, length)?);
                }
                Kind::Properties { .. } => {
                    _ = writeln!(body, "let {name} = {name}.terminated(2)?;");
                }
                _ => {}
            }
        }
        if !optional.is_empty() {
            return Err(GenError::NoStub {
                command: self.command.name.clone(),
                parameter: optional.join(", "),
            });
        }
        for check in &self.command.checks {
            let arguments: Vec<_> = check.arguments.iter().map(|name| self.checked(name)).collect();
            _ = writeln!(body, "checks::{}({})?;", check.name, arguments.join(", "));
        }
        self.call(&mut body, &objects, lists)?;
        Ok(body)
    }

    /// What a check looks at, once its parameter was looked at.
    fn checked(&self, argument: &str) -> String {
        let param = self.params().find(|param| param.name == argument);
        match param.map(|param| &param.kind) {
            Some(Kind::Handles { .. }) => format!("{argument}.list().as_ref()"),
            _ => argument.to_owned(),
        }
    }

    fn call(&self, body: &mut String, objects: &[String], mut lists: Vec<String>) -> Result<(), GenError> {
        let first = objects.first().cloned().unwrap_or_default();
        let queue = matches!(&self.command.flow, Flow::Async { queue: Some(_), .. });
        let launches = queue && objects.iter().any(|name| name == "kernel");
        if launches {
            let given = |name, none: &str| {
                let found = self.params().find(|param| param.name == name);
                found.map_or(none.to_owned(), |param| param.name.clone())
            };
            _ = writeln!(
                body,
                "let launch = kernel::Launch::of(kernel, {first}, {}, {}, {})?;",
                given("work_dim", "0"),
                given("global_work_size", "None"),
                given("local_work_size", "None")
            );
        }
        _ = writeln!(body, "let connection = {first}.connection()?;");
        let event = self
            .params()
            .find(|param| matches!(param.kind, Kind::Handle { life: Life::Shadow, .. }));
        if let Some(event) = event {
            _ = writeln!(
                body,
                "let told = event::wanted(connection, {first}, {})?;\nlet made: Vec<&Object> = told.iter().map(AsRef::as_ref).collect();",
                event.name
            );
            lists.push("made.as_slice()".into());
        }
        let parents = objects.join(", ");
        if let Some(Param {
            kind: Kind::Handle { c_type, .. },
            ..
        }) = self.returned()
        {
            let data = match c_type.as_str() {
                "cl_kernel" => "kernel::fresh()",
                "cl_mem" => "MemState::data(None, None, 0)",
                _ => "Data::None",
            };
            _ = writeln!(
                body,
                "let made = Object::make::<{}>(connection, &[{parents}], {data})?;",
                self.kind(c_type)
            );
        }
        let layout = Layout::of(self.api, self.command);
        let mut fields = String::new();
        for field in &layout.call {
            let name = &field.name;
            let value = match (name.as_str(), field.there) {
                ("reply", _) => "reply".to_owned(),
                (_, There::Asked) => format!("!{name}.is_null()"),
                _ => self.value(name)?,
            };
            _ = if value == *name {
                writeln!(fields, "{name},")
            } else {
                writeln!(fields, "{name}: {value},")
            };
        }
        let name = names::command(self.api, &self.command.name);
        let fields = format!("calls::{name} {{ {fields} }}");
        _ = writeln!(
            body,
            "let (objects, lists) = ([{parents}], [{}]);\nlet touched = Touched::new(&objects, &lists);",
            lists.join(", ")
        );
        if launches {
            _ = writeln!(body, "let call = {fields};\nlaunch.put(connection, &call, &touched)?;");
        } else if let Flow::Async { .. } = self.command.flow {
            _ = writeln!(body, "connection.send(&{fields}, &touched)?;");
        } else {
            let argument = if layout.call.iter().any(|field| field.name == "reply") {
                "reply"
            } else {
                "_"
            };
            _ = writeln!(
                body,
                "let (call, answer) = connection.call(|{argument}| {fields}, &touched, false)?;"
            );
            let reply = if layout.reply.is_empty() { "" } else { "let reply = " };
            _ = writeln!(body, "{reply}answer.success(&call)?;");
        }
        self.results(body, &layout, &first, event)
    }

    fn results(&self, body: &mut String, layout: &Layout, first: &str, event: Option<&Param>) -> Result<(), GenError> {
        for field in &layout.reply {
            let name = &field.name;
            let param = self.params().find(|param| param.name == *name);
            let Some(Param {
                kind: Kind::Array { length, .. },
                ..
            }) = param
            else {
                continue;
            };
            let put = match &field.most {
                Some(_) => format!(
                    "{name}.put_list(value.iter(), {})",
                    self.length(&self.command.params[0], length)?
                ),
                None => format!("{name}.put(value)"),
            };
            _ = match field.asked {
                true => writeln!(body, "if let Some(value) = reply.{name} {{ {put}; }}"),
                false => writeln!(body, "let value = reply.{name};\n{put};"),
            };
        }
        let changes = self.api.commands.iter().any(|query| match &query.flow {
            Flow::Cached { until } => until.contains(&self.command.name),
            _ => false,
        });
        if changes {
            _ = writeln!(body, "{first}.forget_answers();");
        }
        if let Some(event) = event {
            _ = writeln!(body, "event::give(told, {});", event.name);
        }
        body.push_str(if self.returned().is_some() {
            "Ok(made.publish())\n"
        } else {
            "Ok(())\n"
        });
        Ok(())
    }
}
