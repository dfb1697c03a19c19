//! Files of annotations put together: every rule that one of them can break is here or in `params`.
//!
//! Knows no library by name.

use std::collections::BTreeSet;

use super::c::{CType, Declaration};
use super::notes::{FileNote, FunctionNote};
use super::params;
use super::types::Types;
use super::{Body, Cuda, Function, Library};
use crate::error::SpecError;
use crate::model::{Api, Command, Effect, Flow, HandleKind, Kind, Life, Param, Service};

/// Where something is said.
pub(crate) struct Place<'a> {
    pub(crate) file: &'a str,
    pub(crate) function: &'a str,
}

impl Place<'_> {
    pub(crate) fn wrong(&self, parameter: &str, what: impl Into<String>) -> SpecError {
        SpecError::Wrong {
            file: self.file.to_owned(),
            command: self.function.to_owned(),
            parameter: parameter.to_owned(),
            what: what.into(),
        }
    }
}

/// Puts files together, by path and text.
pub(crate) fn resolve(files: &[(&str, &str)]) -> Result<Cuda, SpecError> {
    let mut notes = Vec::new();
    for (file, text) in files {
        let note: FileNote = toml::from_str(text).map_err(|error| SpecError::Syntax {
            file: (*file).to_owned(),
            what: error.to_string().trim().to_owned(),
        })?;
        notes.push((*file, note));
    }
    let mut types = Types::new();
    for (file, note) in &notes {
        types.add(note).map_err(|(name, what)| SpecError::Wrong {
            file: (*file).to_owned(),
            command: name,
            parameter: String::new(),
            what,
        })?;
    }
    let handles = types
        .handles()
        .map(|name| HandleKind { c_type: name.clone() })
        .collect();
    let mut api = Api {
        name: "cuda".into(),
        prefix: String::new(),
        handles,
        structs: Vec::new(),
        commands: Vec::new(),
    };
    let mut libraries = Vec::new();
    let mut names = BTreeSet::new();
    for (file, note) in &notes {
        let library = library(file, note, &types, &mut api)?;
        for function in &library.functions {
            if !names.insert(function.name.clone()) {
                let place = Place {
                    file,
                    function: &function.name,
                };
                return Err(place.wrong("", "is there twice; remove one of them"));
            }
        }
        libraries.push(library);
    }
    Ok(Cuda { api, libraries, types })
}

fn library(file: &str, note: &FileNote, types: &Types, api: &mut Api) -> Result<Library, SpecError> {
    let about = |what: String| SpecError::Syntax {
        file: file.to_owned(),
        what,
    };
    let name = file
        .rsplit('/')
        .next()
        .unwrap_or(file)
        .trim_end_matches(".toml")
        .to_owned();
    if note.library.files.is_empty() {
        return Err(about(
            "[library] names no files; name those that programs look for".into(),
        ));
    }
    let code = &note.library.not_served;
    let value = note.enums.values().find_map(|values| values.get(code));
    let value = *value.ok_or_else(|| {
        about(format!(
            "[library] not_served: {code} is no value of [enums]; add it there"
        ))
    })?;
    let mut functions = Vec::new();
    for name in note.not_served.names.iter().chain(note.not_served.values.keys()) {
        functions.push(Function {
            name: name.clone(),
            declaration: None,
            body: Body::NotServed(*note.not_served.values.get(name).unwrap_or(&value)),
            only: Vec::new(),
            flow: String::new(),
            scalars: Vec::new(),
            taken: Vec::new(),
            together: Vec::new(),
            inputs: Vec::new(),
        });
    }
    for (function, said) in &note.functions {
        let place = Place { file, function };
        functions.push(self::function(&place, &name, said, note, types, api)?);
    }
    for (record, said) in &note.records {
        let place = Place { file, function: record };
        self::function(&place, &name, said, note, types, api)?;
    }
    functions.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Library {
        name,
        files: note.library.files.clone(),
        versions: note.library.versions.clone(),
        refused: note.library.refused.clone(),
        not_served: (code.clone(), value),
        enums: (note.enums.iter())
            .map(|(name, values)| {
                let mut values: Vec<_> = values.iter().map(|(name, value)| (name.clone(), *value)).collect();
                values.sort_by_key(|(_, value)| *value);
                (name.clone(), values)
            })
            .collect(),
        functions,
    })
}

fn function(
    place: &Place<'_>,
    group: &str,
    said: &FunctionNote,
    file: &FileNote,
    types: &Types,
    api: &mut Api,
) -> Result<Function, SpecError> {
    let declaration = Declaration::parse(&said.c).map_err(|what| place.wrong("", what))?;
    let unknown =
        |c_type: &super::CType| c_type.pointers == 0 && c_type.name != "void" && types.get(&c_type.name).is_none();
    if unknown(&declaration.returns) {
        return Err(place.wrong("", no_type(&declaration.returns.name)));
    }
    if let Some((name, c_type, _)) = declaration.params.iter().find(|(_, c_type, _)| unknown(c_type)) {
        return Err(place.wrong(name, no_type(&c_type.name)));
    }
    if let Some(other) = said
        .only
        .iter()
        .find(|version| !file.library.versions.contains(version))
    {
        return Err(place.wrong(
            "",
            format!("only: {other} is no version of [library]; name one of those"),
        ));
    }
    if let Some(other) = said
        .params
        .keys()
        .find(|name| !declaration.params.iter().any(|(known, _, _)| known == *name))
    {
        return Err(place.wrong(
            other,
            "is no parameter of its declaration; take one of those, or add it there",
        ));
    }
    let taken = taken(place, said, &declaration)?;
    let together = together(place, said, &declaration)?;
    let body = body(place, said, &declaration, types)?;
    let (mut scalars, mut inputs) = (Vec::new(), Vec::new());
    if said.flow != "local" {
        let (params, found) = params::crossing(place, said, &declaration, types)?;
        scalars = found;
        api.commands.push(command(place, group, said, params));
    } else if matches!(body, Body::SetDescriptor { .. }) {
        inputs = params::inputs(place, said, &declaration, types)?;
    } else if !said.params.is_empty() {
        return Err(place.wrong("", "is local, so that nothing is said of its parameters; remove that"));
    }
    Ok(Function {
        name: place.function.to_owned(),
        declaration: Some(declaration),
        body,
        only: said.only.clone(),
        flow: said.flow.clone(),
        scalars,
        taken,
        together,
        inputs,
    })
}

/// Which parameters a function by hand takes.
fn taken(place: &Place<'_>, said: &FunctionNote, declaration: &Declaration) -> Result<Vec<bool>, SpecError> {
    let names = || declaration.params.iter().map(|(name, _, _)| name);
    let Some(takes) = &said.takes else {
        return Ok(vec![true; declaration.params.len()]);
    };
    if said.by_hand.is_none() {
        return Err(place.wrong("", "takes is for functions by hand; remove it"));
    }
    if let Some(other) = takes.iter().find(|take| !names().any(|name| name == *take)) {
        return Err(place.wrong(other, "takes: is no parameter of its declaration; name one of those"));
    }
    Ok(names().map(|name| takes.contains(name)).collect())
}

/// Which parameters a function by hand takes as lists.
fn together(place: &Place<'_>, said: &FunctionNote, declaration: &Declaration) -> Result<Vec<Vec<String>>, SpecError> {
    for list in &said.together {
        let begins = |window: &[(String, CType, String)]| window.iter().map(|(name, _, _)| name).eq(list);
        let found = declaration
            .params
            .windows(list.len().max(1))
            .find(|window| begins(window));
        let is_of_one = found.is_some_and(|window| window.iter().all(|(_, of, _)| *of == window[0].1));
        if said.by_hand.is_none() || said.takes.is_some() || !is_of_one {
            return Err(place.wrong(
                "",
                format!(
                    "together: {list:?} are not parameters of one type behind each other, of a function by hand that takes all of them"
                ),
            ));
        }
    }
    Ok(said.together.clone())
}

fn no_type(name: &str) -> String {
    format!("{name} is no type that is known; say under [types] or [enums] what it is")
}

fn body(place: &Place<'_>, said: &FunctionNote, declaration: &Declaration, types: &Types) -> Result<Body, SpecError> {
    if said.repeats && (said.flow != "async" || said.by_hand.is_some()) {
        return Err(place.wrong("", "repeats is for generated functions with the flow async; remove it"));
    }
    if let Some(word) = &said.descriptor {
        if said.flow != "local" || said.by_hand.is_some() {
            return Err(place.wrong(
                "",
                "a descriptor is made and changed locally, by what is generated; write flow = \"local\"",
            ));
        }
        let first = declaration.params.first();
        let is_one = |pointers: usize| {
            first.is_some_and(|(_, of, _)| {
                of.pointers == pointers && types.get(&of.name) == Some(&super::TypeKind::Descriptor)
            })
        };
        return match word.split_once(' ').unwrap_or((word, "")) {
            ("create", "") if is_one(1) => Ok(Body::CreateDescriptor),
            ("destroy", "") if is_one(0) => Ok(Body::DestroyDescriptor),
            ("set", "") if is_one(0) => Ok(Body::SetDescriptor { key: None }),
            ("set", key) if is_one(0) && declaration.params.iter().any(|(name, _, _)| name == key) => {
                Ok(Body::SetDescriptor { key: Some(key.to_owned()) })
            }
            _ => Err(place.wrong(
                "",
                format!(
                    "descriptor: {word:?} is create, destroy, set or `set PARAMETER`, of a function whose first parameter is a descriptor \
                     (a pointer to one, for create)"
                ),
            )),
        };
    }
    match (&said.by_hand, said.flow.as_str()) {
        (_, flow) if !matches!(flow, "local" | "cached" | "async" | "sync") => {
            Err(place.wrong("", format!("flow: {flow:?} is none of local, cached, async and sync")))
        }
        (Some(reason), _) if reason.is_empty() => Err(place.wrong("", "by_hand is empty; it says why")),
        (Some(reason), _) => Ok(Body::Hand(reason.clone())),
        (None, "local") => Err(place.wrong("", "nothing is generated for it; say by_hand and why, or descriptor")),
        (None, "async") => Ok(Body::Send { repeats: said.repeats }),
        (None, flow) => Ok(Body::Ask { kept: flow == "cached" }),
    }
}

fn command(place: &Place<'_>, group: &str, said: &FunctionNote, params: Vec<Param>) -> Command {
    let effect = |param: &Param| {
        let name = param.name.clone();
        match &param.kind {
            Kind::Handle { life: Life::Shadow, .. } => Some(Effect::Creates(name)),
            Kind::Handle {
                life: Life::Release, ..
            } => Some(Effect::Drops(name)),
            Kind::Handle { .. } | Kind::Svm { .. } | Kind::SvmOrBulk { .. } => Some(Effect::Uses(name)),
            _ => None,
        }
    };
    Command {
        name: place.function.to_owned(),
        since: group.to_owned(),
        group: group.to_owned(),
        effects: params.iter().filter_map(effect).collect(),
        params,
        flow: match said.flow.as_str() {
            "cached" => Flow::Cached { until: Vec::new() },
            "async" => Flow::Async {
                queue: None,
                sync_if: None,
            },
            _ => Flow::Sync,
        },
        service: match &said.by_hand {
            Some(reason) => Service::Manual(reason.clone()),
            None => Service::Generated,
        },
        quota: None,
        checks: Vec::new(),
        answers: Vec::new(),
        own_answers: Vec::new(),
    }
}

/// A name of C's as Rust writes it: `devPtr` as `dev_ptr`.
#[must_use]
pub fn snake(name: &str) -> String {
    let mut text = String::new();
    let mut before = '_';
    for char in name.chars() {
        if char.is_ascii_uppercase() && (before.is_ascii_lowercase() || before.is_ascii_digit()) {
            text.push('_');
        }
        text.push(char.to_ascii_lowercase());
        before = char;
    }
    if matches!(text.as_str(), "type" | "in" | "ref" | "mod") {
        text.push('_');
    }
    text
}
