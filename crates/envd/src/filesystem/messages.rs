//! The messages of `filesystem.Filesystem`: names and kinds of fields are those of the descriptors in the SDKs (e2b 2.63.0 for Python,
//! 2.51.0 for JavaScript). Knows no agent.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::connect::json::{Number, is_default, long, nullable};
use crate::memory::Held;

/// A request that is about one path.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Path {
    #[serde(deserialize_with = "nullable")]
    pub(super) path: String,
}

pub(super) type MakeDir = Path;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Move {
    #[serde(deserialize_with = "nullable")]
    pub(super) source: String,
    #[serde(deserialize_with = "nullable")]
    pub(super) destination: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ListDir {
    #[serde(deserialize_with = "nullable")]
    pub(super) path: String,
    #[serde(deserialize_with = "nullable")]
    pub(super) depth: Number<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchDir {
    #[serde(deserialize_with = "nullable")]
    pub(super) path: String,
    #[serde(deserialize_with = "nullable")]
    pub(super) recursive: bool,
    /// Each event is to say what is there now.
    #[serde(alias = "includeEntry", deserialize_with = "nullable")]
    pub(super) include_entry: bool,
    // `allow_network_mounts` is no field here: the file systems that it is about are always watched.
}

pub(super) type CreateWatcher = WatchDir;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watcher {
    #[serde(alias = "watcherId", deserialize_with = "nullable")]
    pub(super) watcher_id: String,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Created {
    #[serde(rename = "watcherId")]
    pub(super) watcher_id: String,
}

/// An empty answer.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Empty {}

/// What is at a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EntryInfo {
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) name: String,
    #[serde(rename = "type", skip_serializing_if = "is_default")]
    pub(crate) kind: FileType,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) path: String,
    #[serde(serialize_with = "long", skip_serializing_if = "is_default")]
    pub(crate) size: u64,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) mode: u32,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) permissions: String,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) owner: String,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) group: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) modified_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) symlink_target: Option<String>,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) is_symlink: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) enum FileType {
    #[default]
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
}

/// An answer that is one entry.
#[derive(Debug, Serialize)]
pub(super) struct One {
    pub(super) entry: EntryInfo,
}

#[derive(Debug, Serialize)]
pub(super) struct Listed {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) entries: Vec<EntryInfo>,
    /// The memory that they take.
    #[serde(skip)]
    pub(super) _held: Held,
}

/// Something that happened in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct FilesystemEvent {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: EventType,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) entry: Option<EntryInfo>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum EventType {
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// What `WatchDir` streams.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Watched {
    Start {},
    Filesystem(Box<FilesystemEvent>),
    Keepalive {},
}

#[derive(Debug, Serialize)]
pub(super) struct Events {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) events: Vec<FilesystemEvent>,
    /// The memory that they take.
    #[serde(skip)]
    pub(super) _held: Held,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood_in_both_spellings() {
        for json in [
            r#"{"path":"a","recursive":true,"includeEntry":true,"allowNetworkMounts":true}"#,
            r#"{"path":"a","recursive":true,"include_entry":true}"#,
        ] {
            let watch: WatchDir = serde_json::from_str(json).unwrap();
            assert!(watch.path == "a" && watch.recursive && watch.include_entry, "{json}");
        }
        let watcher: Watcher = serde_json::from_str(r#"{"watcherId":"w1"}"#).unwrap();
        assert_eq!(watcher.watcher_id, "w1");
        let list: ListDir = serde_json::from_str(r#"{"path":"/","depth":2}"#).unwrap();
        assert_eq!(list.depth, Number(2));
    }

    #[test]
    fn events_look_as_the_sdks_want_them() {
        let json = |event: &Watched| serde_json::to_string(event).unwrap();
        assert_eq!(json(&Watched::Start {}), r#"{"start":{}}"#);
        assert_eq!(json(&Watched::Keepalive {}), r#"{"keepalive":{}}"#);
        let event = FilesystemEvent {
            name: "a".to_owned(),
            kind: EventType::Chmod,
            entry: None,
        };
        assert_eq!(
            json(&Watched::Filesystem(Box::new(event))),
            r#"{"filesystem":{"name":"a","type":"EVENT_TYPE_CHMOD"}}"#
        );
        let none = Events {
            events: Vec::new(),
            _held: crate::memory::Memory::default().share().nothing(),
        };
        assert_eq!(serde_json::to_string(&none).unwrap(), "{}");
    }
}
