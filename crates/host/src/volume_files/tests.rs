//! What paths of a volume lead to, and that none leads out of it.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

struct Bed {
    directory: tempfile::TempDir,
    files: VolumeFiles,
}

impl Bed {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["root", "trash", "outside"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        fs::write(directory.path().join("outside/secret"), "x").unwrap();
        let files = VolumeFiles::open(&directory.path().join("root"), &directory.path().join("trash")).unwrap();
        Self { directory, files }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join("root").join(path)
    }

    fn stat(&self, path: &str) -> Result<FileEntry, FilesError> {
        match self.files.carry_out(&FileRequest::Stat { path: path.into() })? {
            Done::File(entry, None) => Ok(*entry),
            other => panic!("{other:?}"),
        }
    }

    fn list(&self, path: &str, depth: u32) -> Result<Vec<String>, FilesError> {
        let path = path.into();
        match self.files.carry_out(&FileRequest::List { path, depth })? {
            Done::List(entries) => Ok(entries.into_iter().map(|entry| entry.path).collect()),
            other => panic!("{other:?}"),
        }
    }

    fn make(&self, path: &str, force: bool) -> Result<FileEntry, FilesError> {
        let (path, attributes) = (path.into(), FileAttributes::default());
        let made = FileRequest::MakeDirectory {
            path,
            attributes,
            force,
        };
        match self.files.carry_out(&made)? {
            Done::File(entry, None) => Ok(*entry),
            other => panic!("{other:?}"),
        }
    }

    fn write(&self, path: &str, text: &str, force: bool) -> Result<FileEntry, FilesError> {
        let (path, attributes) = (path.into(), FileAttributes::default());
        let write = FileRequest::Write {
            path,
            attributes,
            force,
        };
        match self.files.carry_out(&write)? {
            Done::File(entry, Some(fd)) => {
                fs::File::from(fd).write_all(text.as_bytes()).unwrap();
                Ok(*entry)
            }
            other => panic!("{other:?}"),
        }
    }

    fn read(&self, path: &str) -> Result<String, FilesError> {
        match self.files.carry_out(&FileRequest::Read { path: path.into() })? {
            Done::File(_, Some(fd)) => {
                let mut text = String::new();
                fs::File::from(fd).read_to_string(&mut text).unwrap();
                Ok(text)
            }
            other => panic!("{other:?}"),
        }
    }

    fn remove(&self, path: &str) -> Result<(), FilesError> {
        self.files
            .carry_out(&FileRequest::Remove { path: path.into() })
            .map(drop)
    }
}

fn kind_of<T: std::fmt::Debug>(result: Result<T, FilesError>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn files_are_written_read_listed_and_removed() {
    let bed = Bed::new();
    let made = bed.write("/a.txt", "one", false).unwrap();
    assert_eq!(
        (made.name.as_str(), made.path.as_str(), made.mode),
        ("a.txt", "/a.txt", 0o644)
    );
    assert_eq!(bed.read("a.txt").unwrap(), "one");
    assert_eq!(kind_of(bed.write("/a.txt", "two", false)), ErrorKind::Conflict);
    bed.write("a.txt", "2", true).unwrap();
    assert_eq!(
        bed.read("//./a.txt").unwrap(),
        "2",
        "nothing of what was there before stays"
    );
    assert_eq!(kind_of(bed.write("/d/e/f", "x", false)), ErrorKind::NotFound);
    bed.write("/d/e/f", "deep", true).unwrap();
    assert_eq!(bed.stat("/d/e").unwrap().mode, 0o755);
    assert_eq!(bed.list("/", 1).unwrap(), ["/a.txt", "/d"]);
    assert_eq!(bed.list("/", 3).unwrap(), ["/a.txt", "/d", "/d/e", "/d/e/f"]);
    assert_eq!(bed.list("d", 2).unwrap(), ["/d/e", "/d/e/f"]);
    assert_eq!(kind_of(bed.list("/a.txt", 1)), ErrorKind::Invalid);
    assert_eq!(kind_of(bed.list("/none", 1)), ErrorKind::NotFound);
    assert_eq!(kind_of(bed.list("/", 0)), ErrorKind::Invalid);
    bed.remove("/d").unwrap();
    bed.remove("/a.txt").unwrap();
    assert_eq!(kind_of(bed.remove("/a.txt")), ErrorKind::NotFound);
    assert_eq!(kind_of(bed.remove("/")), ErrorKind::Invalid);
    assert!(bed.list("/", 1).unwrap().is_empty());
    assert_eq!(fs::read_dir(bed.directory.path().join("trash")).unwrap().count(), 0);
}

#[test]
fn directories_are_made_with_those_above_if_that_is_said() {
    let bed = Bed::new();
    assert_eq!(kind_of(bed.make("/a/b", false)), ErrorKind::NotFound);
    assert_eq!(bed.make("/a/b", true).unwrap().kind, FileKind::Directory);
    assert_eq!(kind_of(bed.make("/a/b", false)), ErrorKind::Conflict);
    bed.make("/a/b", true).unwrap();
    assert_eq!(kind_of(bed.make("/", false)), ErrorKind::Conflict);
    assert_eq!(bed.make("/", true).unwrap().name, "/");
    bed.write("/file", "x", false).unwrap();
    assert_eq!(kind_of(bed.make("/file/b", true)), ErrorKind::Invalid);
    // What was there stays what it is.
    assert_eq!(kind_of(bed.make("/file", true)), ErrorKind::Invalid);
}

#[test]
fn owners_and_modes_are_those_that_are_asked_for() {
    let bed = Bed::new();
    bed.write("/f", "x", false).unwrap();
    let update = |path: &str, uid, mode| {
        let (path, gid) = (path.into(), None);
        let attributes = FileAttributes { uid, gid, mode };
        bed.files.carry_out(&FileRequest::Update { path, attributes })
    };
    update("/f", None, Some(0o1_000_640)).unwrap();
    assert_eq!(bed.stat("/f").unwrap().mode, 0o640);
    // -1 would leave it as it is, and a client would be told that it has been changed.
    assert!(update("/f", Some(u32::MAX), None).is_err());
    symlink("f", bed.at("link")).unwrap();
    assert!(update("/link", None, Some(0o777)).is_err());
    assert_eq!(bed.stat("/f").unwrap().mode, 0o640);
    if rustix::process::geteuid().is_root() {
        update("/f", Some(1234), None).unwrap();
        assert_eq!(bed.stat("/f").unwrap().uid, 1234);
        // A link itself.
        update("/link", Some(77), None).unwrap();
        assert_eq!(
            (bed.stat("/link").unwrap().uid, bed.stat("/f").unwrap().uid),
            (77, 1234)
        );
    }
}

#[test]
fn nothing_leads_out_of_the_volume() {
    let bed = Bed::new();
    let outside = bed.directory.path().join("outside");
    symlink(&outside, bed.at("absolute")).unwrap();
    symlink("../outside", bed.at("relative")).unwrap();
    symlink("loop", bed.at("loop")).unwrap();
    symlink("/proc/self/root", bed.at("magic")).unwrap();
    for link in ["absolute", "relative", "magic", "loop"] {
        for path in [format!("{link}/secret"), link.to_owned()] {
            assert!(bed.read(&path).is_err(), "{path}");
            assert!(bed.list(&path, 1).is_err(), "{path}");
        }
        assert_eq!(bed.stat(link).unwrap().kind, FileKind::Symlink);
        // A link is not written through, even if it is said to replace what is there.
        assert_eq!(kind_of(bed.write(link, "x", true)), ErrorKind::Invalid, "{link}");
        bed.remove(link).unwrap();
    }
    for path in ["..", "/../outside/secret", "a/../../outside", "", "a\0b"] {
        assert_eq!(kind_of(bed.stat(path)), ErrorKind::Invalid, "{path:?}");
        assert_eq!(kind_of(bed.remove(path)), ErrorKind::Invalid, "{path:?}");
    }
    assert!(outside.join("secret").exists());
    // One that stays inside is as the guest sees it.
    bed.write("/real/f", "in", true).unwrap();
    symlink("/real", bed.at("inside")).unwrap();
    assert_eq!(bed.read("/inside/f").unwrap(), "in");
    assert_eq!(bed.stat("/inside").unwrap().target.as_deref(), Some("/real"));
    assert_eq!(bed.list("/", 3).unwrap(), ["/inside", "/real", "/real/f"]);
}

#[test]
fn what_is_no_regular_file_is_not_opened() {
    let bed = Bed::new();
    let fifo = std::process::Command::new("mkfifo")
        .arg(bed.at("fifo"))
        .status()
        .unwrap();
    assert!(fifo.success());
    let _socket = std::os::unix::net::UnixListener::bind(bed.at("socket")).unwrap();
    bed.make("/directory", false).unwrap();
    for path in ["/fifo", "/socket", "/directory"] {
        assert_eq!(kind_of(bed.read(path)), ErrorKind::Invalid, "{path}");
        assert_eq!(kind_of(bed.write(path, "x", true)), ErrorKind::Invalid, "{path}");
    }
    // Not even where somebody reads the other end.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let _reader = rustix::fs::open(bed.at("fifo"), flags, Mode::empty()).unwrap();
    assert_eq!(kind_of(bed.write("/fifo", "x", true)), ErrorKind::Invalid);
    assert_eq!(bed.stat("/fifo").unwrap().kind, FileKind::Other);
}

#[test]
fn lists_and_names_have_bounds() {
    let bed = Bed::new();
    let long = "x".repeat(256);
    assert_eq!(kind_of(bed.write(&long, "x", false)), ErrorKind::Invalid);
    assert_eq!(kind_of(bed.stat(&"x/".repeat(2100))), ErrorKind::Invalid);
    for number in 0..=MAX_ENTRIES {
        fs::write(bed.at(&format!("{number}")), "").unwrap();
    }
    let refused = bed.list("/", 1).unwrap_err();
    assert!(refused.to_string().contains("more than 10000 files"), "{refused}");
    fs::remove_file(bed.at("0")).unwrap();
    assert_eq!(bed.list("/", 1).unwrap().len(), MAX_ENTRIES);
    // Those count that wait while one before them is gone through.
    for number in 1..=10 {
        fs::remove_file(bed.at(&format!("{number}"))).unwrap();
    }
    fs::create_dir(bed.at("0")).unwrap();
    for number in 0..10 {
        fs::write(bed.at(&format!("0/{number}")), "").unwrap();
    }
    assert_eq!(kind_of(bed.list("/", 2)), ErrorKind::Invalid);
}

#[test]
fn what_an_earlier_removal_has_left_goes() {
    let bed = Bed::new();
    let trash = bed.directory.path().join("trash");
    fs::create_dir_all(trash.join("0123/deep")).unwrap();
    fs::set_permissions(trash.join("0123"), fs::Permissions::from_mode(0o755)).unwrap();
    let late = bed.files.empty_trash(Duration::ZERO).unwrap_err();
    assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    bed.files.empty_trash(Duration::from_secs(60)).unwrap();
    assert_eq!(fs::read_dir(&trash).unwrap().count(), 0);
}
