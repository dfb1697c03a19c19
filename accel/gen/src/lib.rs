//! Makes what both sides of forwarded accelerator calls have in common from `accel/spec`: the types of `accel/proto`, their numbers, the
//! table of commands, and the page of calls. `cargo xtask accel` writes it; [`stale`] is what tests and tidy ask.
//!
//! What is made is checked in, so that a build needs neither this nor rustfmt. Knows no client, no server and no ring.

mod carry_out;
mod client;
mod client_hand;
mod client_table;
mod code;
mod cuda;
mod document;
mod layout;
mod lock;
mod names;
mod null;
mod server;
mod table;

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command as Process, Stdio};

use accel_spec::{Api, Command, SpecError};

use code::Crossing;
use layout::Layout;
use lock::Lock;

/// Numbers of OpenCL's calls. Zero is no call; other APIs get ranges of their own.
const OPENCL: std::ops::Range<u16> = 0x0100..0x1000;
/// Numbers of CUDA's calls, and of functions whose arguments are parts of descriptors.
const CUDA: std::ops::Range<u16> = 0x1000..0x4000;

/// Where the types go.
const PROTO: &str = "accel/proto/src";

/// Why nothing can be made.
#[derive(Debug, thiserror::Error)]
pub enum GenError {
    /// The specification is wrong.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A line of the lock is wrong.
    #[error("accel/spec/ops.lock: {line:?} {what}; lines are added by `cargo xtask accel` and never changed")]
    Lock {
        /// The line.
        line: String,
        /// What is wrong.
        what: &'static str,
    },
    /// An API has used all its numbers.
    #[error("there is no number left for {0}; widen the range in accel/gen/src/lib.rs")]
    Numbers(String),
    /// A file cannot be read or written.
    #[error("cannot access {path}")]
    File {
        /// Its path from the root.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The client's function of a command does not follow from its annotations.
    #[error(
        "{command}: no word says how the client's function has the parameter {parameter}; list the command under BY_HAND in accel/gen/src/client_hand.rs"
    )]
    NoStub {
        /// The command.
        command: String,
        /// Its parameter.
        parameter: String,
    },
    /// rustfmt does not run.
    #[error("cannot run rustfmt, which formats what is generated; `rustup component add rustfmt` installs it")]
    NoRustfmt(#[source] std::io::Error),
    /// rustfmt does not take the text.
    #[error("rustfmt refuses the generated {path}: {said}")]
    Rustfmt {
        /// The file.
        path: String,
        /// Its words.
        said: String,
    },
}

/// A file that is generated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its path from the root.
    pub path: String,
    /// What it says.
    pub text: String,
}

/// Everything that is generated, from the specification beneath the root.
///
/// # Errors
///
/// A specification or a lock that is wrong, rustfmt that does not run.
pub fn outputs(root: &Path) -> Result<Vec<Output>, GenError> {
    let api = accel_spec::opencl(root)?;
    let mut lock = Lock::parse(&read(root, lock::PATH)?.unwrap_or_default())?;
    let mut outputs = modules(root, &api, &mut lock)?;
    outputs.extend(cuda::outputs(root, &mut lock)?);
    let order = read(root, "accel/spec/opencl/icd-order.txt")?.unwrap_or_default();
    for (name, text) in client::modules(&api, &order)? {
        let path = format!("{}/{name}.rs", client::STUBS);
        let text = formatted(root, &path, &text)?;
        outputs.push(Output { path, text });
    }
    outputs.push(Output {
        path: lock::PATH.into(),
        text: lock.text(),
    });
    outputs.push(Output {
        path: "docs/accel-calls.md".into(),
        text: document::page(&api),
    });
    Ok(outputs)
}

/// Writes everything that is generated, and removes what is not any more. What was written or removed, by path.
///
/// # Errors
///
/// Like [`outputs`], and files that cannot be written.
pub fn write(root: &Path) -> Result<Vec<String>, GenError> {
    let mut changed = Vec::new();
    for (path, text) in differing(root)? {
        let full = root.join(&path);
        let done = match &text {
            Some(text) => fs::create_dir_all(full.parent().unwrap_or(root)).and_then(|()| fs::write(&full, text)),
            None => fs::remove_file(&full),
        };
        done.map_err(|source| GenError::File {
            path: path.clone(),
            source,
        })?;
        changed.push(path);
    }
    Ok(changed)
}

/// The generated files that are not what they would be if they were made now.
///
/// # Errors
///
/// Like [`outputs`].
pub fn stale(root: &Path) -> Result<Vec<String>, GenError> {
    Ok(differing(root)?.into_iter().map(|(path, _)| path).collect())
}

/// Paths of files that differ, with what they should say; nothing if they should not be there.
fn differing(root: &Path) -> Result<Vec<(String, Option<String>)>, GenError> {
    let outputs = outputs(root)?;
    let mut differing = Vec::new();
    for dir in [
        "accel/proto/src/opencl",
        "accel/proto/src/cuda",
        client::STUBS,
        server::SERVER,
        cuda::CLIENT,
        cuda::LIBRARY,
    ] {
        // Before anything was generated there is none.
        for entry in fs::read_dir(root.join(dir)).into_iter().flatten().flatten() {
            let path = format!("{dir}/{}", entry.file_name().to_string_lossy());
            if !outputs.iter().any(|output| output.path == path) {
                differing.push((path, None));
            }
        }
    }
    for Output { path, text } in outputs {
        if read(root, &path)?.as_ref() != Some(&text) {
            differing.push((path, Some(text)));
        }
    }
    Ok(differing)
}

fn read(root: &Path, path: &str) -> Result<Option<String>, GenError> {
    match fs::read_to_string(root.join(path)) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(GenError::File {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Numbers and layouts of an API's calls, by the files of annotations that have them.
struct Numbered<'a> {
    groups: Vec<(&'a str, Vec<Crossing<'a>>)>,
    ops: HashMap<&'a str, u16>,
}

impl<'a> Numbered<'a> {
    fn new(api: &'a Api, lock: &mut Lock, numbers: std::ops::Range<u16>) -> Result<Self, GenError> {
        let mut ops = HashMap::new();
        let mut layouts = HashMap::new();
        // In the specification's order, so that numbers do not depend on files' names.
        for command in api.commands.iter().filter(|command| command.crosses()) {
            let layout = Layout::of(api, command);
            let op = lock.number(&command.name, &layout.sum(api), numbers.clone())?;
            ops.insert(command.name.as_str(), op);
            layouts.insert(command.name.as_str(), layout);
        }
        let mut crossing = |command: &'a Command| {
            let layout = layouts.remove(command.name.as_str())?;
            let op = *ops.get(command.name.as_str())?;
            Some(Crossing { command, layout, op })
        };
        let groups = api.groups().into_iter();
        let groups = groups.map(|(name, commands)| (name, commands.into_iter().filter_map(&mut crossing).collect()));
        let groups = groups.collect();
        Ok(Self { groups, ops })
    }

    /// Types of calls and replies, and the table of commands.
    fn proto(&self, root: &Path, api: &Api) -> Result<Vec<Output>, GenError> {
        let op = |command: &Command| self.ops.get(command.name.as_str()).copied();
        let mut files = vec![
            ("mod".to_owned(), code::root(api, &self.groups)),
            ("objects".to_owned(), code::objects(api)),
            ("table".to_owned(), table::module(api, op)),
        ];
        for (name, crossings) in self.groups.iter().filter(|(_, crossings)| !crossings.is_empty()) {
            files.push(((*name).to_owned(), code::group(api, name, crossings)));
        }
        let files = files.into_iter().map(|(name, text)| {
            let path = format!("{PROTO}/{}/{name}.rs", api.name);
            let text = formatted(root, &path, &text)?;
            Ok(Output { path, text })
        });
        files.collect()
    }
}

/// The modules of OpenCL.
fn modules(root: &Path, api: &Api, lock: &mut Lock) -> Result<Vec<Output>, GenError> {
    let numbered = Numbered::new(api, lock, OPENCL)?;
    let groups = &numbered.groups;
    let mut outputs = numbered.proto(root, api)?;
    let in_server = [
        ("api", server::functions(api)),
        ("null", null::module(api)),
        ("mod", server::root(api, groups)),
    ];
    let in_server = (in_server.into_iter()).chain(
        groups
            .iter()
            .filter_map(|(name, crossings)| Some((*name, server::group(api, name, crossings)?))),
    );
    for (name, text) in in_server {
        let path = format!("{}/{name}.rs", server::SERVER);
        let text = formatted(root, &path, &text)?;
        outputs.push(Output { path, text });
    }
    Ok(outputs)
}

/// Through rustfmt, with the tree's own settings.
fn formatted(root: &Path, path: &str, text: &str) -> Result<String, GenError> {
    let mut rustfmt = Process::new("rustfmt");
    rustfmt.args(["--edition", "2024", "--config-path"]).arg(root);
    rustfmt
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = rustfmt.spawn().map_err(GenError::NoRustfmt)?;
    // It reads everything before it writes anything.
    let sent = child.stdin.take().map(|mut stdin| stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().map_err(GenError::NoRustfmt)?;
    let refused = |said: String| GenError::Rustfmt {
        path: path.to_owned(),
        said,
    };
    if !output.status.success() {
        return Err(refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    if let Some(Err(error)) = sent {
        return Err(GenError::NoRustfmt(error));
    }
    String::from_utf8(output.stdout).map_err(|error| refused(error.to_string()))
}

#[cfg(test)]
mod tests;
