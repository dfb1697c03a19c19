//! What is asked about files as their users see them: looked at, listed, read, written, watched. Since version 3 of the protocol.
//! Beside [`Upload`](crate::Upload) and [`Pack`](crate::message::Request::Pack), by which a host brings and takes whole files and trees as
//! root.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::OsText;

/// The most entries that a list has. What has more is refused.
pub const MAX_ENTRIES: usize = 1_000_000;

/// Something about files. A path may be absolute, begin with `~` or `~/`, or begin in the home of the request's user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FsRequest {
    /// What is at the path; a link at its end is not followed. Answered by [`Reply::Entry`](crate::message::Reply::Entry).
    Stat {
        /// Which.
        path: OsText,
    },
    /// What is in a directory, parents before what is in them, the names of each directory in order. A link at the path's end is
    /// followed, none below. Answered by one [`Reply::Entries`](crate::message::Reply::Entries) or more.
    List {
        /// Which directory.
        path: OsText,
        /// How deep: 1 is the directory itself.
        depth: u32,
    },
    /// Make a directory and those above it that are missing. Answered by [`Reply::Entry`](crate::message::Reply::Entry);
    /// `AlreadyExists` if there is a directory.
    MakeDir {
        /// Where.
        path: OsText,
    },
    /// Give a file or directory another name, on the same file system or another, making directories above it. Answered by
    /// [`Reply::Entry`](crate::message::Reply::Entry).
    Rename {
        /// From here.
        from: OsText,
        /// To here; a file that is there is replaced.
        to: OsText,
    },
    /// Remove a file, or a directory with all that is in it; links are not followed. It is fine if nothing is there. Answered by
    /// [`Reply::Done`](crate::message::Reply::Done).
    Remove {
        /// Which.
        path: OsText,
    },
    /// Send a regular file's bytes. Answered by [`Reply::Reading`](crate::message::Reply::Reading); then as many bytes in `FILE` frames;
    /// then [`Reply::Done`](crate::message::Reply::Done), or `RequestFailed` if the file became shorter or could not be read on; then
    /// fewer bytes came, and an empty `FILE` frame before it.
    Read {
        /// Which.
        path: OsText,
        /// From here on; the end of the file at most.
        offset: u64,
        /// So many, or as many as there are.
        length: Option<u64>,
    },
    /// Write a file in its place, making it and directories above it that are missing. Answered by
    /// [`Reply::Done`](crate::message::Reply::Done); then the bytes in `FILE` frames (client to agent), an empty one at the end; then
    /// [`Reply::Entry`](crate::message::Reply::Entry). A failure may come in the midst of the bytes, of which the rest is thrown away; a
    /// file that was made for it is removed again.
    Write {
        /// Which.
        path: OsText,
        /// Permission bits of a file that is made; of one that was there before too, if given.
        mode: Option<u32>,
        /// Extended attributes `user.e2b.NAME` that the file is to have; it loses others of this kind.
        metadata: BTreeMap<String, String>,
    },
    /// Make a file of several, one behind the other; they are removed then. Answered by [`Reply::Entry`](crate::message::Reply::Entry).
    Compose {
        /// Which, in order.
        sources: Vec<OsText>,
        /// Where to; a file that is there is replaced.
        path: OsText,
    },
    /// Tell what happens in a directory from now on. Answered by [`Reply::Done`](crate::message::Reply::Done); then
    /// [`Reply::Watched`](crate::message::Reply::Watched) again and again, until the client sends [`Request::Detach`](crate::message::Request::Detach),
    /// which is answered by `Done`, or leaves.
    Watch {
        /// Which directory.
        path: OsText,
        /// Also in all directories below it.
        recursive: bool,
    },
}

impl FsRequest {
    /// Something is not as it was before.
    pub fn is_change(&self) -> bool {
        match self {
            Self::Stat { .. } | Self::List { .. } | Self::Read { .. } | Self::Watch { .. } => false,
            Self::MakeDir { .. }
            | Self::Rename { .. }
            | Self::Remove { .. }
            | Self::Write { .. }
            | Self::Compose { .. } => true,
        }
    }
}

/// A file or directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its absolute path.
    pub path: OsText,
    /// What it is; of a link, the link itself.
    pub kind: EntryKind,
    /// `st_mode` of what it is.
    pub mode: u32,
    /// Length in bytes.
    pub size: u64,
    /// Its user, by name, or by number where there is no name.
    pub owner: String,
    /// Its group, by name or number.
    pub group: String,
    /// When it was changed last: nanoseconds since 1970.
    pub modified_ns: i64,
    /// Of a link: where it leads in the end, or what it says where that is nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<OsText>,
    /// Of a link: what it leads to in the end; `None` if that is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_kind: Option<EntryKind>,
    /// Its extended attributes `user.e2b.NAME`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// What there can be at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A device, pipe or socket.
    Other,
}

/// Something that happened in a directory that is watched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    /// To what: a path relative to the directory; `.` is the directory itself.
    pub name: OsText,
    /// What.
    pub kind: WatchEventKind,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WatchEventKind {
    /// It was made, or moved here.
    Create,
    /// It was written to.
    Write,
    /// It was removed.
    Remove,
    /// It was moved away, or has another name.
    Rename,
    /// Its permissions or other attributes were changed.
    Attributes,
    /// So much happened that some of it was lost: look at the whole directory.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::tests::round_trip;
    use crate::message::{Reply, Request};

    #[test]
    fn requests_and_answers_look_as_documented() {
        let request = FsRequest::List {
            path: "~/src".into(),
            depth: 2,
        };
        let user = Some("user".to_owned());
        assert_eq!(
            round_trip(&Request::Fs { user, request }),
            r#"{"fs":{"user":"user","request":{"list":{"path":"~/src","depth":2}}}}"#
        );
        let watch = FsRequest::Watch {
            path: "/a".into(),
            recursive: true,
        };
        assert_eq!(round_trip(&watch), r#"{"watch":{"path":"/a","recursive":true}}"#);
        let event = WatchEvent {
            name: "a/b".into(),
            kind: WatchEventKind::Create,
        };
        assert_eq!(
            round_trip(&Reply::Watched(vec![event])),
            r#"{"watched":[{"name":"a/b","kind":"create"}]}"#
        );
        let entry = Entry {
            path: "/a".into(),
            kind: EntryKind::File,
            mode: 0o100_644,
            size: 5,
            owner: "user".to_owned(),
            group: "1000".to_owned(),
            modified_ns: -1,
            target: None,
            target_kind: None,
            metadata: BTreeMap::new(),
        };
        let entries = vec![entry];
        assert_eq!(
            round_trip(&Reply::Entries { entries, more: false }),
            r#"{"entries":{"entries":[{"path":"/a","kind":"file","mode":33188,"size":5,"owner":"user","group":"1000","modified_ns":-1}],"more":false}}"#
        );
    }

    #[test]
    fn what_changes_nothing_is_told_from_the_rest() {
        let path = || OsText::from("/a");
        let sources = Vec::new();
        assert!(!FsRequest::Stat { path: path() }.is_change());
        assert!(FsRequest::Remove { path: path() }.is_change());
        assert!(FsRequest::Compose { sources, path: path() }.is_change());
    }
}
