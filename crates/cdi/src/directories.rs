//! The directories with specifications, and all devices that they have by name. The directory that comes last counts: what it says of a
//! name replaces what those before it say. Two files of one directory that say something of one name make it nobody's (the same as in the
//! specification's own library). A file that is wrong takes nothing from the others, and is told where a name is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base::CdiName;

use crate::edits::ContainerEdits;
use crate::spec::{Format, Spec};

/// Where specifications are (CDI 1.1.0, Overview; the library's `DefaultSpecDirs`): what an administrator installs, and what is made while
/// the host runs.
const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// More bytes than any specification has: those of hosts with many devices have some hundred KiB.
const MOST: u64 = 4 << 20;

/// Where specifications are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directories(Vec<PathBuf>);

/// All devices that have a name.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    searched: Vec<PathBuf>,
    devices: BTreeMap<CdiName, Entry>,
    broken: Vec<Broken>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// The number of its directory.
    priority: usize,
    found: Found,
    /// Another file of the same directory that says something of it.
    other: Option<PathBuf>,
}

/// What there is of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The file that says it.
    pub path: PathBuf,
    /// What it wants: what all of its file want, and then its own.
    pub edits: ContainerEdits,
}

/// A file that is none, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Which.
    pub path: PathBuf,
    /// Why.
    pub why: String,
}

/// A name that stands for nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Nobody has heard of it.
    #[error("no specification has the device {name}: {known}{broken}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is in its place.
        known: String,
        /// Files that could not be used.
        broken: String,
    },
    /// Two files say something of it, and neither comes first.
    #[error(
        "the device {name} is in {one} and in {other}, of which neither comes before the other: remove it from one of them"
    )]
    Twice {
        /// What was asked for.
        name: String,
        /// A file.
        one: String,
        /// Another.
        other: String,
    },
}

impl Directories {
    /// Those of this host.
    pub fn of_host() -> Self {
        Self(DIRECTORIES.map(PathBuf::from).to_vec())
    }

    /// Others, the one that counts most last.
    pub fn of(directories: Vec<PathBuf>) -> Self {
        Self(directories)
    }

    /// Reads what they have now.
    pub fn read(&self) -> Registry {
        let mut registry = Registry {
            searched: self.0.clone(),
            ..Registry::default()
        };
        for (priority, directory) in self.0.iter().enumerate() {
            match files(directory) {
                Ok(paths) => paths.into_iter().for_each(|path| registry.add(path, priority)),
                Err(error) => registry.broken.push(Broken {
                    path: directory.clone(),
                    why: error.to_string(),
                }),
            }
        }
        registry
    }
}

/// Names that end in `.json` or `.yaml`, in their order.
fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if format_of(&path).is_some() && !path.is_dir() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn format_of(path: &Path) -> Option<Format> {
    match path.extension()?.to_str()? {
        "json" => Some(Format::Json),
        "yaml" => Some(Format::Yaml),
        _ => None,
    }
}

fn read(path: &Path) -> Result<Spec, String> {
    let format = format_of(path).ok_or("its name ends in neither .json nor .yaml")?;
    let told = |error: io::Error| error.to_string();
    // Whoever opened a pipe would wait for its writer.
    if !fs::metadata(path).map_err(told)?.is_file() {
        return Err("it is no file".to_owned());
    }
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MOST + 1).read_to_string(&mut text))
        .map_err(told)?;
    if u64::try_from(text.len()).is_ok_and(|length| length > MOST) {
        return Err(format!("it is larger than {} MiB", MOST >> 20));
    }
    Spec::parse(&text, format).map_err(|error| error.to_string())
}

impl Registry {
    fn add(&mut self, path: PathBuf, priority: usize) {
        let spec = match read(&path) {
            Ok(spec) => spec,
            Err(why) => return self.broken.push(Broken { path, why }),
        };
        for device in &spec.devices {
            // Looked at when it was read.
            let Ok(name) = spec.kind.device(&device.name) else {
                continue;
            };
            let found = Found {
                path: path.clone(),
                edits: spec.container_edits.and(&device.container_edits),
            };
            match self.devices.get_mut(&name) {
                Some(there) if there.priority == priority => there.other = Some(path.clone()),
                _ => {
                    let other = None;
                    self.devices.insert(name, Entry { priority, found, other });
                }
            }
        }
    }

    /// What there is of a name.
    ///
    /// # Errors
    /// Nothing, or two things.
    pub fn find(&self, name: &CdiName) -> Result<&Found, Error> {
        match self.devices.get(name) {
            Some(Entry { found, other: None, .. }) => Ok(found),
            Some(Entry {
                found,
                other: Some(other),
                ..
            }) => Err(Error::Twice {
                name: name.to_string(),
                one: found.path.display().to_string(),
                other: other.display().to_string(),
            }),
            None => Err(Error::Unknown {
                name: name.to_string(),
                known: self.known(name),
                broken: self.told_broken(),
            }),
        }
    }

    /// All names that stand for one thing, with that.
    pub fn all(&self) -> impl Iterator<Item = (&CdiName, &Found)> {
        let whole = self.devices.iter().filter(|(_, entry)| entry.other.is_none());
        whole.map(|(name, entry)| (name, &entry.found))
    }

    /// Files that could not be used.
    pub fn broken(&self) -> &[Broken] {
        &self.broken
    }

    /// The nearest that there is.
    fn known(&self, wanted: &CdiName) -> String {
        let names = self.devices.keys();
        let of_vendor = |name: &&CdiName| name.kind().vendor() == wanted.kind().vendor();
        let of_kind = |name: &&CdiName| name.kind() == wanted.kind();
        if self.devices.is_empty() {
            let searched: Vec<_> = self.searched.iter().map(|path| path.display().to_string()).collect();
            return format!("there is none in {}", searched.join(" and "));
        }
        let devices = list(names.clone().filter(of_kind).map(CdiName::name));
        if !devices.is_empty() {
            return format!("those of {} are {devices}", wanted.kind());
        }
        let classes = list(names.clone().filter(of_vendor).map(|name| name.kind().class()));
        match classes.is_empty() {
            false => format!("{} has devices of the classes {classes}", wanted.kind().vendor()),
            true => format!("there are devices of {}", list(names.map(|name| name.kind().vendor()))),
        }
    }

    fn told_broken(&self) -> String {
        let mut told = String::new();
        for Broken { path, why } in &self.broken {
            // Writing to a string does not fail.
            let _ = write!(told, "; {} cannot be used: {why}", path.display());
        }
        told
    }
}

fn list<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let names: BTreeSet<_> = names.collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}
