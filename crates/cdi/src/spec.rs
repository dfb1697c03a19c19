//! One specification file: JSON or YAML into plain data, checked, and back into JSON.

use std::collections::{BTreeMap, BTreeSet};

use base::CdiKind;
use serde::{Deserialize, Serialize};

use crate::edits::ContainerEdits;

/// Versions of the specification (CDI 1.1.0, Released versions, and what was before).
const VERSIONS: [[u32; 3]; 10] = [
    [0, 1, 0],
    [0, 2, 0],
    [0, 3, 0],
    [0, 4, 0],
    [0, 5, 0],
    [0, 6, 0],
    [0, 7, 0],
    [0, 8, 0],
    [1, 0, 0],
    [1, 1, 0],
];

/// A specification: devices of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// The version of the specification that it is written by.
    pub cdi_version: String,
    /// Whose devices, and which.
    pub kind: CdiKind,
    /// For whoever reads it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices, at least one.
    pub devices: Vec<Device>,
    /// What each of them wants.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// What it is called among those of its kind.
    pub name: String,
    /// For whoever reads it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What it wants.
    #[serde(default)]
    pub container_edits: ContainerEdits,
}

/// How a file is written, which its name's end says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `.json`.
    Json,
    /// `.yaml`.
    Yaml,
}

/// What is wrong with a specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// It does not parse, or has what no specification has.
    #[error("line {line}, column {column}: {why}")]
    Syntax {
        /// Counted from 1.
        line: u64,
        /// Counted from 1.
        column: u64,
        /// Why.
        why: String,
    },
    /// It does not parse, nobody knows where.
    #[error("{0}")]
    Unplaced(String),
    /// Not a version.
    #[error("cdiVersion `{0}` is none that Basalt knows: it knows those from 0.1.0 to 1.1.0 (CDI, Released versions)")]
    Version(String),
    /// It has what its version had not.
    #[error("cdiVersion is {version}, and it has {what}, which is there since {since} (CDI, Released versions)")]
    TooOld {
        /// Its version.
        version: String,
        /// What it has.
        what: &'static str,
        /// Since which version that is there.
        since: String,
    },
    /// No device.
    #[error("it has no devices, of which there must be one at least")]
    Empty,
    /// A name that is none.
    #[error("the device `{0}`: a name has letters, digits, `_`, `-`, `.` and `:`, with a letter or digit at both ends")]
    Name(String),
    /// Two of one name.
    #[error("it has two devices that are called `{0}`")]
    Twice(String),
    /// A device that wants nothing, or something impossible.
    #[error("the device `{device}`: {why}")]
    Edits {
        /// Which.
        device: String,
        /// What is wrong.
        why: &'static str,
    },
}

impl Spec {
    /// Reads one.
    ///
    /// # Errors
    /// It is none; where, if that can be told.
    pub fn parse(text: &str, format: Format) -> Result<Self, SpecError> {
        let spec: Self = match format {
            Format::Json => serde_json::from_str(text).map_err(of_json)?,
            Format::Yaml => serde_saphyr::from_str(text).map_err(|error| of_yaml(&error))?,
        };
        spec.check()?;
        Ok(spec)
    }

    fn check(&self) -> Result<(), SpecError> {
        if self.devices.is_empty() {
            return Err(SpecError::Empty);
        }
        let mut names = BTreeSet::new();
        for device in &self.devices {
            let name = || device.name.clone();
            self.kind.device(&device.name).map_err(|_| SpecError::Name(name()))?;
            if !names.insert(&device.name) {
                return Err(SpecError::Twice(name()));
            }
            if let Some(why) = objection(&self.container_edits.and(&device.container_edits)) {
                return Err(SpecError::Edits { device: name(), why });
            }
        }
        self.check_version()
    }

    fn check_version(&self) -> Result<(), SpecError> {
        let version = self.cdi_version.trim_start_matches('v');
        let known = VERSIONS.iter().find(|known| dotted(known) == version);
        let version = known.ok_or_else(|| SpecError::Version(self.cdi_version.clone()))?;
        let all = || self.devices.iter();
        let begins_with_digit = |device: &Device| device.name.starts_with(|first: char| first.is_ascii_digit());
        let annotated = !self.annotations.is_empty() || all().any(|device| !device.annotations.is_empty());
        let needs = [
            self.container_edits.needs(),
            annotated.then_some(([0, 6, 0], "annotations")),
            self.kind
                .class()
                .contains('.')
                .then_some(([0, 6, 0], "a dot in its class")),
            all()
                .any(begins_with_digit)
                .then_some(([0, 5, 0], "a device whose name begins with a digit")),
        ];
        let of_devices = all().filter_map(|device| device.container_edits.needs());
        match needs.into_iter().flatten().chain(of_devices).max() {
            Some((since, what)) if since > *version => Err(SpecError::TooOld {
                version: self.cdi_version.clone(),
                what,
                since: dotted(&since),
            }),
            _ => Ok(()),
        }
    }
}

fn dotted([major, minor, patch]: &[u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}

fn objection(edits: &ContainerEdits) -> Option<&'static str> {
    if edits.is_empty() {
        return Some("its containerEdits are empty");
    }
    if edits
        .env
        .iter()
        .any(|entry| entry.find('=').is_none_or(|at| at == 0) || entry.contains('\0'))
    {
        return Some("an environment variable is not written NAME=value");
    }
    let is_relative = |path: &str| !path.starts_with('/');
    let nodes = &edits.device_nodes;
    nodes
        .iter()
        .any(|node| is_relative(&node.path) || is_relative(node.on_host()))
        .then_some("the path of a device node is not absolute")
}

fn of_json(error: serde_json::Error) -> SpecError {
    let (line, column) = (error.line(), error.column());
    let said = error.to_string();
    let why = said.split(" at line ").next().unwrap_or(&said).to_owned();
    let number = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    match line {
        0 => SpecError::Unplaced(why),
        _ => SpecError::Syntax {
            line: number(line),
            column: number(column),
            why,
        },
    }
}

fn of_yaml(error: &serde_saphyr::Error) -> SpecError {
    let plain = error.without_snippet();
    let said = plain.to_string();
    let why = said.lines().next().unwrap_or_default();
    match error.location() {
        Some(at) => SpecError::Syntax {
            line: at.line(),
            column: at.column(),
            why: why.to_owned(),
        },
        None => SpecError::Unplaced(why.to_owned()),
    }
}
