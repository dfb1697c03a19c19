//! What the agent says of a file, in the words of envd. A link has the type of what it leads to and says that it is one, as newer versions
//! of envd have it; its permissions are written as Go writes them (`io/fs.FileMode.String`). Knows no request.

use agent_api::{Entry, EntryKind};

use super::messages::{EntryInfo, FileType};
use super::service::base_name;
use crate::connect::json::timestamp;

impl From<Entry> for EntryInfo {
    fn from(entry: Entry) -> Self {
        let path = entry.path.to_string();
        let link = entry.kind == EntryKind::Link;
        Self {
            name: base_name(&path).to_owned(),
            kind: kind(entry.kind, entry.target_kind),
            path,
            size: entry.size,
            mode: entry.mode & 0o777,
            permissions: permissions(entry.mode),
            owner: entry.owner,
            group: entry.group,
            modified_time: timestamp(entry.modified_ns),
            symlink_target: entry.target.filter(|_| link).map(|target| target.to_string()),
            metadata: entry.metadata,
            is_symlink: link,
        }
    }
}

fn kind(kind: EntryKind, target: Option<EntryKind>) -> FileType {
    match (kind, target) {
        (EntryKind::File, _) | (EntryKind::Link, Some(EntryKind::File)) => FileType::File,
        (EntryKind::Directory, _) | (EntryKind::Link, Some(EntryKind::Directory)) => FileType::Directory,
        // It leads nowhere: the SDKs leave out of lists what has no type, and this is there.
        (EntryKind::Link, None | Some(EntryKind::Link)) => FileType::Symlink,
        (EntryKind::Other, _) | (EntryKind::Link, Some(EntryKind::Other)) => FileType::Unspecified,
    }
}

/// The type and permissions: a letter for each thing that the mode says of the file, or a dash; then nine letters.
fn permissions(mode: u32) -> String {
    let mut text = String::new();
    text.push_str(match mode & 0o170_000 {
        0o040_000 => "d",
        0o120_000 => "L",
        0o060_000 => "D",
        0o020_000 => "Dc",
        0o010_000 => "p",
        0o140_000 => "S",
        _ => "",
    });
    // Go's order: a device and what comes before it, set-user-id, set-group-id, a character device, the sticky bit.
    let character = text.ends_with('c');
    if character {
        text.pop();
    }
    for (bit, letter) in [(0o4000, 'u'), (0o2000, 'g')] {
        if mode & bit != 0 {
            text.push(letter);
        }
    }
    if character {
        text.push('c');
    }
    if mode & 0o1000 != 0 {
        text.push('t');
    }
    if text.is_empty() {
        text.push('-');
    }
    for (shift, letter) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        text.push(if mode >> shift & 1 == 1 { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `ls -l` has them, but for links (`L`), devices and the bits above the nine.
    #[test]
    fn permissions_are_written_as_go_does() {
        for (mode, text) in [
            (0o100_644, "-rw-r--r--"),
            (0o100_000, "----------"),
            (0o040_755, "drwxr-xr-x"),
            (0o120_777, "Lrwxrwxrwx"),
            (0o041_777, "dtrwxrwxrwx"),
            (0o104_755, "urwxr-xr-x"),
            (0o102_755, "grwxr-xr-x"),
            (0o060_660, "Drw-rw----"),
            (0o020_666, "Dcrw-rw-rw-"),
            (0o010_600, "prw-------"),
            (0o140_700, "Srwx------"),
        ] {
            assert_eq!(permissions(mode), text, "{mode:o}");
        }
    }

    fn entry(kind: EntryKind) -> Entry {
        Entry {
            path: "/home/user/a.txt".into(),
            kind,
            mode: 0o100_644,
            size: 5,
            owner: "user".to_owned(),
            group: "1000".to_owned(),
            modified_ns: 1_500_000_000,
            target: None,
            target_kind: None,
            metadata: [("k".to_owned(), "v".to_owned())].into(),
        }
    }

    #[test]
    fn a_file_is_told() {
        let info = EntryInfo::from(entry(EntryKind::File));
        assert_eq!(
            serde_json::to_string(&info).unwrap(),
            r#"{"name":"a.txt","type":"FILE_TYPE_FILE","path":"/home/user/a.txt","size":"5","mode":420,"permissions":"-rw-r--r--","owner":"user","group":"1000","modifiedTime":"1970-01-01T00:00:01.500Z","metadata":{"k":"v"}}"#
        );
    }

    #[test]
    fn a_link_has_the_type_of_its_target() {
        let link = |target: Option<&str>, target_kind| {
            let info = EntryInfo::from(Entry {
                target: target.map(Into::into),
                target_kind,
                ..entry(EntryKind::Link)
            });
            (info.kind, info.symlink_target, info.is_symlink)
        };
        let target = || Some("/b".to_owned());
        assert_eq!(
            link(Some("/b"), Some(EntryKind::Directory)),
            (FileType::Directory, target(), true)
        );
        assert_eq!(
            link(Some("/b"), Some(EntryKind::File)),
            (FileType::File, target(), true)
        );
        assert_eq!(link(Some("/b"), None), (FileType::Symlink, target(), true));
        // Of what is no link a target is not believed.
        let file = EntryInfo::from(Entry {
            target: Some("/b".into()),
            ..entry(EntryKind::File)
        });
        assert_eq!((file.symlink_target, file.is_symlink), (None, false));
        assert_eq!(EntryInfo::from(entry(EntryKind::Other)).kind, FileType::Unspecified);
    }
}
