//! Shape and annotations put together: every rule that an annotation can break is here or in `params`.
//!
//! Knows no API by name, and not what is generated.

use std::collections::{BTreeMap, HashSet};

use crate::error::SpecError;
use crate::length::Length;
use crate::model::{
    Api, Check, Command, Direction, Effect, Element, Flow, HandleKind, Kind, Life, Param, Quota, Service, Struct,
};
use crate::notes::{CommandNote, ParamNote, call};
use crate::params;
use crate::shape::{CommandShape, Shape};

/// Comparisons that a server makes, and how many parameters each has.
const CHECKS: &[(&str, usize)] = &[
    // Object, offset, size: within the object's bytes.
    ("in_bounds", 3),
    // Object, origin, region, row pitch, slice pitch: the box is within the object's bytes.
    ("rect_in_bounds", 5),
    // Image, origin, region: within the image.
    ("image_region", 3),
    // Address, size: within one allocation of shared virtual memory.
    ("svm_in_bounds", 2),
    // Object, address: what a map of the object gave.
    ("mapped", 2),
    // Kernel, index, size, value: what the kernel's argument takes.
    ("kernel_argument", 4),
    // A list that is not NULL.
    ("there", 1),
    // A number, and all bits that it can have.
    ("bits", 2),
    // A pattern, its size, and the offset and the size of what it fills.
    ("pattern", 4),
    // Two buffers, each with an offset, and a size: the parts do not overlap.
    ("apart", 5),
    // Two images whose pixels have one format.
    ("same_format", 2),
    // Image, region, buffer, offset: the region's pixels are within the buffer's bytes.
    ("pixels_in_bounds", 4),
];

/// A file of annotations.
#[derive(Debug)]
pub(crate) struct Notes {
    /// Its path in the tree.
    pub(crate) file: String,
    /// Its name without the ending.
    pub(crate) group: String,
    /// What it says of each command.
    pub(crate) commands: BTreeMap<String, CommandNote>,
}

/// What parameters of a name are where a command says nothing else, and the file that says so.
#[derive(Debug)]
pub(crate) struct Defaults {
    /// Its path in the tree.
    pub(crate) file: String,
    /// By parameter.
    pub(crate) params: BTreeMap<String, toml::Value>,
}

/// Where something is said.
pub(crate) struct Place<'a> {
    pub(crate) file: &'a str,
    pub(crate) command: &'a str,
}

impl Place<'_> {
    pub(crate) fn wrong(&self, parameter: &str, what: impl Into<String>) -> SpecError {
        SpecError::Wrong {
            file: self.file.to_owned(),
            command: self.command.to_owned(),
            parameter: parameter.to_owned(),
            what: what.into(),
        }
    }
}

/// Puts a shape and all annotations together.
///
/// # Errors
///
/// The first annotation that contradicts the shape or says too little.
pub(crate) fn resolve(
    name: &str,
    prefix: &str,
    shape: &Shape,
    defaults: &Defaults,
    notes: &[Notes],
) -> Result<Api, SpecError> {
    let mut said: BTreeMap<&str, (&Notes, &CommandNote)> = BTreeMap::new();
    for file in notes {
        for (command, note) in &file.commands {
            let place = Place {
                file: &file.file,
                command,
            };
            if !shape.commands.contains_key(command) {
                return Err(place.wrong("", "is no command of the registry; mend its name"));
            }
            if let Some((first, _)) = said.insert(command, (file, note)) {
                return Err(place.wrong("", format!("is annotated in {}, too; keep one of the two", first.file)));
            }
        }
    }
    let core: HashSet<&str> = shape.core.iter().map(|(command, _)| command.as_str()).collect();
    let mut extensions: Vec<_> = (said.keys().copied())
        .filter(|command| !core.contains(command))
        .map(|command| {
            let by = shape.extensions.get(command);
            (command, by.map_or("no extension", String::as_str))
        })
        .collect();
    extensions.sort_by_key(|&(command, by)| (by, command));
    let mut used = HashSet::new();
    let mut commands = Vec::new();
    let in_core = shape
        .core
        .iter()
        .map(|(command, since)| (command.as_str(), since.as_str()));
    for (command, since) in in_core.chain(extensions) {
        let Some(&(file, note)) = said.get(command) else {
            let file = &defaults.file;
            let missing = Place { file, command };
            return Err(missing.wrong(
                "",
                "is in the core and not annotated; annotate it, or say unsupported with a reason",
            ));
        };
        let mut resolver = Resolver {
            place: Place {
                file: &file.file,
                command,
            },
            shape,
            note,
            defaults,
            used: &mut used,
        };
        commands.push(resolver.command(since, &file.group)?);
    }
    if let Some(idle) = defaults.params.keys().find(|name| !used.contains(name.as_str())) {
        let place = Place {
            file: &defaults.file,
            command: "params",
        };
        return Err(place.wrong(idle, "is a default that no command uses; remove it"));
    }
    finish(name, prefix, shape, notes, commands)
}

/// What can be checked once all commands are known.
fn finish(name: &str, prefix: &str, shape: &Shape, notes: &[Notes], commands: Vec<Command>) -> Result<Api, SpecError> {
    let known: HashSet<&str> = commands.iter().map(|command| command.name.as_str()).collect();
    for command in &commands {
        let file = notes.iter().find(|file| file.group == command.group);
        let place = Place {
            file: file.map_or("", |file| &file.file),
            command: &command.name,
        };
        let until: &[String] = match &command.flow {
            Flow::Cached { until } => until,
            _ => &[],
        };
        let alias = match &command.service {
            Service::Alias(other) => Some(other),
            _ => None,
        };
        if let Some(unknown) = until.iter().chain(alias).find(|other| !known.contains(other.as_str())) {
            return Err(place.wrong("", format!("{unknown} is no annotated command; mend its name")));
        }
    }
    let handles = shape.handles.iter().filter(|c_type| has_handle(&commands, c_type));
    let handles = handles.map(|c_type| HandleKind { c_type: c_type.clone() });
    let structs: Result<Vec<_>, SpecError> = (shape.structs.iter())
        .filter(|(c_type, _)| params::has_struct(&commands, c_type))
        .map(|(c_type, members)| structure(shape, &commands, notes, c_type, members))
        .collect();
    Ok(Api {
        name: name.to_owned(),
        prefix: prefix.to_owned(),
        handles: handles.collect(),
        structs: structs?,
        commands,
    })
}

fn has_handle(commands: &[Command], wanted: &str) -> bool {
    let mut params = commands.iter().flat_map(|command| &command.params);
    params.any(
        |param| matches!(&param.kind, Kind::Handle { c_type, .. } | Kind::Handles { c_type, .. } if c_type == wanted),
    )
}

fn structure(
    shape: &Shape,
    commands: &[Command],
    notes: &[Notes],
    c_type: &str,
    members: &[(String, crate::shape::CType)],
) -> Result<Struct, SpecError> {
    let read: Result<Vec<_>, SpecError> = members
        .iter()
        .map(|(name, member)| {
            let element = shape.element(&member.name).filter(|_| member.pointers == 0);
            let by = commands
                .iter()
                .find(|command| params::has_struct(std::slice::from_ref(command), c_type));
            let file = by.and_then(|command| notes.iter().find(|file| file.group == command.group));
            let place = Place {
                file: file.map_or("", |file| &file.file),
                command: by.map_or("", |command| &command.name),
            };
            let wrong = || {
                place.wrong(
                    c_type,
                    format!("member {name} is no value; the call has to be by hand or unsupported"),
                )
            };
            Ok((name.clone(), element.ok_or_else(wrong)?))
        })
        .collect();
    Ok(Struct {
        c_type: c_type.to_owned(),
        members: read?,
    })
}

/// One command.
struct Resolver<'a> {
    place: Place<'a>,
    shape: &'a Shape,
    note: &'a CommandNote,
    defaults: &'a Defaults,
    used: &'a mut HashSet<String>,
}

impl Resolver<'_> {
    fn command(&mut self, since: &str, group: &str) -> Result<Command, SpecError> {
        let Some(declared) = self.shape.commands.get(self.place.command) else {
            return Err(self.place.wrong(
                "",
                "is required by a version and nowhere declared; is the registry whole?",
            ));
        };
        let service = self.service(declared)?;
        let mut command = Command {
            name: self.place.command.to_owned(),
            since: since.to_owned(),
            group: group.to_owned(),
            params: Vec::new(),
            flow: Flow::Local,
            service,
            effects: Vec::new(),
            quota: None,
            checks: Vec::new(),
            answers: Vec::new(),
            own_answers: Vec::new(),
        };
        if let Some(unknown) = self.unknown_parameter(declared) {
            return Err(self.place.wrong(&unknown, "is no parameter of it; mend its name"));
        }
        if matches!(command.service, Service::Unsupported { .. } | Service::Alias(_)) {
            return Ok(command);
        }
        command.params = self.params(declared)?;
        params::mark_counts(&self.place, &mut command.params)?;
        command.flow = self.flow(&command.params)?;
        params::check_flow(&self.place, &command)?;
        command.effects = self.effects(&command.params)?;
        command.quota = self.quota(&command.params)?;
        command.checks = self.checks(&command.params)?;
        command.answers = params::keys(&self.place, self.shape, "", &self.note.answers)?;
        command.own_answers = self.own_answers()?;
        Ok(command)
    }

    fn service(&self, declared: &CommandShape) -> Result<Service, SpecError> {
        let CommandNote {
            manual,
            unsupported,
            alias,
            flow,
            ..
        } = self.note;
        let ways = [manual.is_some(), unsupported.is_some(), alias.is_some()];
        if ways.into_iter().filter(|way| *way).count() > 1 {
            return Err(self
                .place
                .wrong("", "can be manual, unsupported or an alias; keep one of them"));
        }
        if (unsupported.is_some() || alias.is_some()) && (flow.is_some() || !self.note.params.is_empty()) {
            return Err(self
                .place
                .wrong("", "is served by nobody or by another command; remove flow and params"));
        }
        if let Some(other) = alias {
            let same = self.shape.commands.get(other).is_some_and(|other| {
                let types = |shape: &CommandShape| {
                    shape
                        .params
                        .iter()
                        .map(|(_, c_type)| c_type.pointers)
                        .collect::<Vec<_>>()
                };
                types(other) == types(declared)
            });
            let message = format!("cannot be another name of {other}, whose parameters differ");
            return if same {
                Ok(Service::Alias(other.clone()))
            } else {
                Err(self.place.wrong("", message))
            };
        }
        if let Some(unsupported) = unsupported {
            let Some(value) = self.shape.constants.get(&unsupported.code) else {
                let message = format!("{} is no constant of the registry; mend its name", unsupported.code);
                return Err(self.place.wrong("", message));
            };
            return Ok(Service::Unsupported {
                code: unsupported.code.clone(),
                value: *value,
                reason: unsupported.reason.clone(),
            });
        }
        Ok(manual.clone().map_or(Service::Generated, Service::Manual))
    }

    fn unknown_parameter(&self, declared: &CommandShape) -> Option<String> {
        let returns = params::returns_something(declared, self.shape);
        let is_known =
            |name: &str| declared.params.iter().any(|(known, _)| known == name) || (returns && name == "returned");
        self.note.params.keys().find(|name| !is_known(name)).cloned()
    }

    fn params(&mut self, declared: &CommandShape) -> Result<Vec<Param>, SpecError> {
        let mut resolved = Vec::new();
        for (name, c_type) in &declared.params {
            let note = self.param_note(name, c_type.pointers > 0 && !c_type.function)?;
            let kind = params::kind(&self.place, self.shape, name, c_type, note.as_ref())?;
            resolved.push(Param {
                name: name.clone(),
                c_text: c_type.text.clone(),
                null: note.is_some_and(|note| note.null),
                kind,
            });
        }
        if params::returns_something(declared, self.shape) {
            let note = self.param_note("returned", declared.returns.pointers > 0)?;
            let kind = params::returned(&self.place, self.shape, &declared.returns, note.as_ref())?;
            resolved.push(Param {
                name: "returned".to_owned(),
                c_text: declared.returns.text.clone(),
                null: false,
                kind,
            });
        }
        Ok(resolved)
    }

    /// The command's own word, or the default for the name.
    fn param_note(&mut self, name: &str, pointer: bool) -> Result<Option<ParamNote>, SpecError> {
        let default = if pointer { format!("{name}*") } else { name.to_owned() };
        let own = self.note.params.get(name);
        let Some(value) = own.or_else(|| self.defaults.params.get(&default)) else {
            return Ok(None);
        };
        if own.is_none() {
            self.used.insert(default);
        }
        ParamNote::read(value)
            .map(Some)
            .map_err(|what| self.place.wrong(name, what))
    }

    fn flow(&self, resolved: &[Param]) -> Result<Flow, SpecError> {
        let Some(text) = &self.note.flow else {
            return Err(self
                .place
                .wrong("", "has no flow; say local, cached, async, async(QUEUE) or sync"));
        };
        let until = self.note.until.clone();
        let sync_if = self.note.sync_if.clone();
        if until.is_some() && text != "cached" {
            return Err(self.place.wrong("", "has until, but is not cached; remove it"));
        }
        if sync_if.is_some() && !text.starts_with("async") {
            return Err(self.place.wrong("", "has sync_if, but is not async; remove it"));
        }
        if let Some(name) = &sync_if {
            let number = resolved
                .iter()
                .any(|param| param.name == *name && matches!(param.kind, Kind::Scalar { .. }));
            if !number {
                return Err(self.place.wrong(name, "is no number, so sync_if cannot look at it"));
            }
        }
        match (text.as_str(), call(text)) {
            ("local", _) => Ok(Flow::Local),
            ("sync", _) => Ok(Flow::Sync),
            ("cached", _) => match until {
                Some(until) => Ok(Flow::Cached { until }),
                None => Err(self
                    .place
                    .wrong("", "is cached; say until which commands: until = [...]")),
            },
            ("async", _) => Ok(Flow::Async { queue: None, sync_if }),
            (_, Some((word, arguments))) if word == "async" && arguments.len() == 1 => {
                let queue = arguments[0].clone();
                let is_object = |param: &Param| param.name == queue && matches!(param.kind, Kind::Handle { .. });
                if !resolved.iter().any(is_object) {
                    return Err(self
                        .place
                        .wrong(&queue, "is no object, so it keeps no order; name the queue"));
                }
                Ok(Flow::Async {
                    queue: Some(queue),
                    sync_if,
                })
            }
            _ => {
                let message = format!("{text:?} is no flow; say local, cached, async, async(QUEUE) or sync");
                Err(self.place.wrong("", message))
            }
        }
    }

    fn effects(&self, resolved: &[Param]) -> Result<Vec<Effect>, SpecError> {
        let mut effects = Vec::new();
        for param in resolved {
            let effect = match self.life(&param.kind) {
                Some(Life::Create | Life::Shadow) => Effect::Creates,
                Some(Life::Release) => Effect::Drops,
                Some(Life::Use) if !self.is_changed(&param.name) => Effect::Uses,
                _ => continue,
            };
            effects.push(effect(param.name.clone()));
        }
        for text in &self.note.effects {
            let (word, name) = match call(text) {
                Some((word, arguments)) if arguments.len() == 1 => (word, arguments[0].clone()),
                _ => (String::new(), String::new()),
            };
            let effect = match word.as_str() {
                "changes" => Effect::Changes(name.clone()),
                "content" => Effect::Content(name.clone()),
                _ => {
                    let message = format!("{text:?} is no effect; say changes(PARAMETER) or content(PARAMETER)");
                    return Err(self.place.wrong("", message));
                }
            };
            self.named(resolved, &name)?;
            effects.push(effect);
        }
        Ok(effects)
    }

    /// What happens to what a parameter names, unless the command's own words say more.
    fn life(&self, kind: &Kind) -> Option<Life> {
        let has_object = |c_type: &String| {
            let mut members = self.shape.structs.get(c_type).into_iter().flatten();
            members.any(|(_, member)| self.shape.handles.contains(&member.name))
        };
        match kind {
            Kind::Handle { life, .. }
            | Kind::Handles { life, .. }
            | Kind::Svm { life }
            | Kind::SvmList { life, .. } => Some(*life),
            Kind::Value { .. } | Kind::SvmOrBulk { .. } => Some(Life::Use),
            Kind::Array {
                direction: Direction::In,
                element: Element::Struct(c_type),
                length,
            } if length.is_one() && has_object(c_type) => Some(Life::Use),
            _ => None,
        }
    }

    fn is_changed(&self, name: &str) -> bool {
        let mut words = self.note.effects.iter().filter_map(|text| call(text));
        words.any(|(_, arguments)| arguments.iter().any(|argument| argument == name))
    }

    fn quota(&self, resolved: &[Param]) -> Result<Option<Quota>, SpecError> {
        let Some(text) = &self.note.quota else {
            return Ok(None);
        };
        if text == "backend" {
            return Ok(Some(Quota::Backend));
        }
        let length = Length::parse(text).map_err(|what| self.place.wrong("", format!("quota: {what}")))?;
        for name in length.parameters() {
            self.named(resolved, name)?;
        }
        Ok(Some(Quota::Bytes(length)))
    }

    fn checks(&self, resolved: &[Param]) -> Result<Vec<Check>, SpecError> {
        let mut checks = Vec::new();
        for text in &self.note.checks {
            let known = call(text).filter(|(name, arguments)| CHECKS.contains(&(name.as_str(), arguments.len())));
            let Some((name, arguments)) = known else {
                let known: Vec<_> = CHECKS
                    .iter()
                    .map(|(name, count)| format!("{name} of {count}"))
                    .collect();
                let message = format!("{text:?} is no check; checks are {}", known.join(", "));
                return Err(self.place.wrong("", message));
            };
            for argument in &arguments {
                if argument.parse::<u64>().is_err() {
                    self.named(resolved, argument)?;
                }
            }
            checks.push(Check { name, arguments });
        }
        Ok(checks)
    }

    fn named(&self, resolved: &[Param], name: &str) -> Result<(), SpecError> {
        if resolved.iter().any(|param| param.name == name) {
            return Ok(());
        }
        Err(self.place.wrong(name, "is no parameter of it; mend its name"))
    }

    fn own_answers(&self) -> Result<Vec<(String, i64)>, SpecError> {
        let read = self.note.own_answers.iter().map(|name| {
            let value = self.shape.constants.get(name);
            let message = || format!("{name} is no constant of the registry; mend its name");
            Ok((name.clone(), *value.ok_or_else(|| self.place.wrong("", message()))?))
        });
        read.collect()
    }
}
