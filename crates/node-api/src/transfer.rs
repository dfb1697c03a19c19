//! What can leave a node as files and come to another: snapshots, and templates that somebody has built. What both have in common,
//! for whoever carries them. Knows neither how the files are packed nor where they go.

use std::fmt;

use base::ByteSize;
use serde::{Deserialize, Serialize};

use crate::config::Resources;
use crate::snapshot::Snapshot;
use crate::template::Template;

/// The most that a record can be long.
pub const MOST_RECORD: u64 = 1 << 20;

/// The most that the state of a machine without its memory can be long.
const MOST_STATE: u64 = 64 << 20;

/// Which of them it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A snapshot.
    Snapshot,
    /// A template that somebody has built.
    Template,
}

impl Kind {
    /// The verb of the command line that is about these, and what files of them call themselves.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Template => "template",
        }
    }

    /// The one that it is not.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Snapshot => Self::Template,
            Self::Template => Self::Snapshot,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Whether a file of this name belongs to one: `record.json`, `state`, `memory`, `memory.N`, `disk`.
pub fn is_file_name(name: &str) -> bool {
    let is_number = |text: &str| {
        let digits = !text.is_empty() && text.len() <= 4 && text.bytes().all(|byte| byte.is_ascii_digit());
        digits && !text.starts_with('0')
    };
    matches!(name, "record.json" | "state" | "memory" | "disk" | "accelerator")
        || name.strip_prefix("memory.").is_some_and(is_number)
}

/// One of them, with what everybody may know of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Transferred {
    /// A snapshot.
    Snapshot(Box<Snapshot>),
    /// A template.
    Template(Box<Template>),
}

impl Transferred {
    /// Reads what is known to everybody out of a record.
    ///
    /// # Errors
    /// It is none, or of another version of Basalt.
    pub fn of_record(kind: Kind, record: &[u8]) -> Result<Self, serde_json::Error> {
        #[derive(Deserialize)]
        struct OfSnapshot {
            snapshot: Box<Snapshot>,
        }
        #[derive(Deserialize)]
        struct OfTemplate {
            template: Box<Template>,
        }
        Ok(match kind {
            Kind::Snapshot => Self::Snapshot(serde_json::from_slice::<OfSnapshot>(record)?.snapshot),
            Kind::Template => Self::Template(serde_json::from_slice::<OfTemplate>(record)?.template),
        })
    }

    /// The digest of its image.
    pub fn digest(&self) -> &str {
        match self {
            Self::Snapshot(snapshot) => &snapshot.digest,
            Self::Template(template) => &template.digest,
        }
    }

    /// Its image, as people know it.
    pub fn image(&self) -> String {
        let digest = format!("sha256:{}", self.digest());
        match self {
            Self::Snapshot(snapshot) => snapshot.config.image.clone(),
            // The name that it was built from may mean another image by now, and is not kept.
            Self::Template(_) => digest,
        }
    }

    /// How large its machine is.
    pub fn resources(&self) -> &Resources {
        match self {
            Self::Snapshot(snapshot) => &snapshot.config.resources,
            Self::Template(template) => &template.resources,
        }
    }

    /// How long a file of it can be; `None` for what it has not.
    pub fn most_bytes(&self, file: &str) -> Option<u64> {
        let resources = self.resources();
        match file {
            "record.json" => Some(MOST_RECORD),
            "state" => Some(MOST_STATE),
            "disk" => resources.disk.map(ByteSize::bytes),
            "accelerator" => match self {
                Self::Snapshot(snapshot) => snapshot.config.accelerator.map(|accelerator| accelerator.most_saved()),
                Self::Template(_) => None,
            },
            // What it booted with, and behind it the region in which memory is plugged.
            memory if is_file_name(memory) => {
                let region = resources.region().unwrap_or_default();
                Some(resources.boots_with().bytes().saturating_add(region.bytes()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_these_names_and_no_others() {
        for name in [
            "record.json",
            "state",
            "memory",
            "disk",
            "accelerator",
            "memory.1",
            "memory.20",
        ] {
            assert!(is_file_name(name), "{name}");
        }
        for name in [
            "",
            "memory.",
            "memory.0",
            "memory.01",
            "memory.99999",
            "memory.1x",
            "memory.-1",
            "../disk",
            "disk.1",
            ".record.json",
            "State",
            "record.json/",
        ] {
            assert!(!is_file_name(name), "{name}");
        }
    }

    #[test]
    fn a_record_is_of_one_kind() {
        let record = serde_json::json!({ "template": {
            "id": "00", "created_ns": 1, "digest": "11", "networked": false,
            "resources": { "cpus": 1, "memory": 4096, "disk": null },
            "programs": { "vmm": null, "kernel": null, "initramfs": null },
        }});
        let record = serde_json::to_vec(&record).unwrap();
        let template = Transferred::of_record(Kind::Template, &record).unwrap();
        assert_eq!((template.digest(), template.image().as_str()), ("11", "sha256:11"));
        assert_eq!(template.most_bytes("memory.1"), Some(4096));
        assert_eq!((template.most_bytes("disk"), template.most_bytes("log")), (None, None));
        Transferred::of_record(Kind::Template.other(), &record).unwrap_err();
    }
}
