//! How volumes of tenants come, are mounted, and go. What guests do in them is for the lab.

use std::io::Write;

use super::*;
use crate::testing::stored;

const SIZE: ByteSize = ByteSize::mib(16);

/// Unmounts whatever a test has mounted, also if it fails.
struct Bed {
    directory: tempfile::TempDir,
    sandboxes: Sandboxes,
}

impl Bed {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            sandboxes: Sandboxes::default(),
        }
    }

    fn open(&self) -> TenantVolumes {
        TenantVolumes::open(self.directory.path().join("volumes")).unwrap()
    }

    fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join("volumes").join(path)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.open().take_away(&Sandboxes::default());
    }
}

/// Only root mounts, where the kernel has loop devices.
fn can_mount() -> bool {
    rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists()
}

fn at_most(most: u32) -> Bound {
    Bound { most, space: None }
}

fn kind_of<T: std::fmt::Debug>(result: Result<T, Error>) -> ErrorKind {
    result.unwrap_err().for_api().kind
}

fn write(volumes: &TenantVolumes, sandboxes: &Sandboxes, path: &str, text: &[u8]) -> io::Result<()> {
    let (path, attributes) = (path.to_owned(), node_api::tenant_volume::FileAttributes::default());
    let request = FileRequest::Write {
        path,
        attributes,
        force: true,
    };
    match volumes.carry_out(("acme", "data"), None, &request, sandboxes).unwrap() {
        Done::File(_, Some(fd)) => {
            let mut file = File::from(fd);
            file.write_all(text).and_then(|()| file.sync_all())
        }
        other => panic!("{other:?}"),
    }
}

fn names(volumes: &TenantVolumes, sandboxes: &Sandboxes) -> Vec<String> {
    let request = FileRequest::List {
        path: "/".into(),
        depth: 1,
    };
    match volumes.carry_out(("acme", "data"), None, &request, sandboxes).unwrap() {
        Done::List(entries) => entries.into_iter().map(|entry| entry.name).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tenant_has_so_many_volumes_and_nobody_elses() {
    let bed = Bed::new();
    let volumes = bed.open();
    let made = volumes.make("acme", "data", SIZE, at_most(2)).unwrap();
    assert_eq!((made.name.as_str(), made.size), ("data", SIZE));
    assert_eq!(
        kind_of(volumes.make("acme", "data", SIZE, at_most(2))),
        ErrorKind::Conflict
    );
    // What a tenant may be called leads nowhere.
    volumes.make("..", "data", SIZE, at_most(1)).unwrap();
    assert!(bed.at("t-../data/disk").is_file());
    volumes.make("acme", "more", SIZE, at_most(2)).unwrap();
    let full = volumes.make("acme", "third", SIZE, at_most(2)).unwrap_err();
    assert!(full.to_string().contains("2 volumes"), "{full}");
    let bound = |space| Bound {
        most: 9,
        space: Some(space),
    };
    let large = volumes
        .make("acme", "third", SIZE, bound(ByteSize::mib(47)))
        .unwrap_err();
    assert!(large.to_string().contains("48 MiB together, and 47 MiB"), "{large}");
    volumes.make("acme", "third", SIZE, bound(ByteSize::mib(48))).unwrap();
    volumes.remove("acme", "third", &bed.sandboxes).unwrap();
    for name in ["", "..", "a/b", ".hidden", "-x"] {
        assert_eq!(
            kind_of(volumes.make("acme", name, SIZE, at_most(9))),
            ErrorKind::Invalid,
            "{name}"
        );
    }
    for size in [ByteSize::mib(15), ByteSize(u64::MAX)] {
        assert_eq!(
            kind_of(volumes.make("acme", "third", size, at_most(9))),
            ErrorKind::Invalid
        );
    }
    let list = volumes.list("acme", &bed.sandboxes).unwrap();
    assert_eq!(
        list.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(),
        ["data", "more"]
    );
    assert!(volumes.list("else", &bed.sandboxes).unwrap().is_empty());
    let all = volumes.list_all(&bed.sandboxes).unwrap();
    let whose: Vec<_> = all.iter().map(|one| (&*one.tenant, &*one.name)).collect();
    assert_eq!(whose, [("..", "data"), ("acme", "data"), ("acme", "more")]);
    assert!(all.iter().all(|one| one.bytes > 0 && one.bytes < one.size.bytes()));
    assert_eq!(
        kind_of(volumes.find("else", "data", &bed.sandboxes)),
        ErrorKind::NotFound
    );
    assert_eq!(
        kind_of(volumes.remove("else", "data", &bed.sandboxes)),
        ErrorKind::NotFound
    );
    assert_eq!(volumes.find("acme", "data", &bed.sandboxes).unwrap(), made);
}

#[test]
fn one_that_a_sandbox_has_stays() {
    let bed = Bed::new();
    let volumes = bed.open();
    volumes.make("acme", "data", SIZE, at_most(9)).unwrap();
    let mut its = stored("aaaaaaaaaaaa", "");
    its.sandbox.config.owner = Some("acme".into());
    its.sandbox.config.volumes = vec![node_api::VolumeMount {
        source: VolumeSource::Tenant("data".into()),
        target: "/data".into(),
        read_only: false,
    }];
    let entry = bed.sandboxes.register(its, Some("web"), |_| Ok(())).unwrap();
    let found = volumes.find("acme", "data", &bed.sandboxes).unwrap();
    assert_eq!(found.used_by, ["aaaaaaaaaaaa"]);
    let refused = volumes.remove("acme", "data", &bed.sandboxes).unwrap_err();
    assert!(refused.to_string().contains("aaaaaaaaaaaa"), "{refused}");
    // Another tenant's of the same name is another one.
    volumes.make("else", "data", SIZE, at_most(9)).unwrap();
    volumes.remove("else", "data", &bed.sandboxes).unwrap();
    bed.sandboxes.remove(&entry);
    volumes.remove("acme", "data", &bed.sandboxes).unwrap();
    assert_eq!(
        kind_of(volumes.find("acme", "data", &bed.sandboxes)),
        ErrorKind::NotFound
    );
    let left: Vec<_> = fs::read_dir(bed.at(""))
        .unwrap()
        .map(|one| one.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn what_a_crash_has_left_goes_and_what_is_not_ours_stays() {
    let bed = Bed::new();
    bed.open().make("acme", "data", SIZE, at_most(9)).unwrap();
    fs::rename(bed.at("t-acme/data"), bed.at(".0123")).unwrap();
    fs::create_dir_all(bed.at(".begun")).unwrap();
    fs::create_dir_all(bed.at(".strange/mount/thing")).unwrap();
    bed.open();
    assert!(!bed.at(".0123").exists() && !bed.at(".begun").exists());
    assert!(bed.at(".strange/mount/thing").exists());
}

#[test]
fn a_volume_has_its_own_size_and_is_mounted_when_it_is_needed() {
    if !can_mount() {
        return;
    }
    let bed = Bed::new();
    let volumes = bed.open();
    let made = volumes.make("acme", "data", SIZE, at_most(9)).unwrap();
    assert!(!is_mounted(&bed.at("t-acme/data")).unwrap());
    write(&volumes, &bed.sandboxes, "/a", b"one").unwrap();
    assert!(is_mounted(&bed.at("t-acme/data")).unwrap());
    assert_eq!(names(&volumes, &bed.sandboxes), ["a"]);
    let full = write(&volumes, &bed.sandboxes, "/big", &vec![1; 17 << 20]).unwrap_err();
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    // A later daemon finds it as it is, mounted or not, and so does whoever asks for the one that was made then.
    let again = bed.open();
    assert_eq!(names(&again, &bed.sandboxes), ["a", "big"]);
    volumes.take_away(&bed.sandboxes);
    assert!(!is_mounted(&bed.at("t-acme/data")).unwrap());
    assert_eq!(names(&again, &bed.sandboxes), ["a", "big"]);
    let stat = FileRequest::Stat { path: "/a".into() };
    let asked = |created| again.carry_out(("acme", "data"), Some(created), &stat, &bed.sandboxes);
    asked(made.created_ns).unwrap();
    assert_eq!(kind_of(asked(made.created_ns + 1)), ErrorKind::NotFound);
    // While it is mounted, with a file of it open.
    let open = File::open(bed.at("t-acme/data/mount/root/a")).unwrap();
    again.remove("acme", "data", &bed.sandboxes).unwrap();
    assert_eq!(io::read_to_string(open).unwrap(), "one");
    assert_eq!(fs::read_dir(bed.at("")).unwrap().count(), 1);
    assert_eq!(kind_of(asked(made.created_ns)), ErrorKind::NotFound);
}

/// A host that has no more than so much, until it is made larger; unmounted also if a test fails.
struct SmallHost<'b> {
    bed: &'b Bed,
    disk: PathBuf,
}

impl<'b> SmallHost<'b> {
    fn new(bed: &'b Bed) -> Self {
        let disk = bed.at("");
        fs::create_dir_all(&disk).unwrap();
        let (flags, size) = (rustix::mount::MountFlags::empty(), Some(c"size=24m"));
        rustix::mount::mount("none", &disk, c"tmpfs", flags, size).unwrap();
        Self { bed, disk }
    }

    fn grow(&self) {
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount_remount(&self.disk, flags, c"size=200m").unwrap();
    }
}

impl Drop for SmallHost<'_> {
    fn drop(&mut self) {
        self.bed.open().take_away(&Sandboxes::default());
        // While a test fails that is not what is wrong.
        let unmounted = unmount(&self.disk, UnmountFlags::DETACH);
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

/// Sizes may be promised that the disk has not.
#[test]
fn where_the_disk_is_full_writes_fail_and_what_was_there_stays() {
    if !can_mount() {
        return;
    }
    let bed = Bed::new();
    let _host = SmallHost::new(&bed);
    let volumes = bed.open();
    volumes.make("acme", "data", ByteSize::mib(64), at_most(9)).unwrap();
    write(&volumes, &bed.sandboxes, "/a", b"one").unwrap();
    let full = write(&volumes, &bed.sandboxes, "/big", &vec![1; 40 << 20]);
    let names = names(&volumes, &bed.sandboxes);
    assert!(full.is_err(), "more was written than there is room for");
    assert!(names.contains(&"a".to_owned()), "{names:?}");
}

/// What the host cannot take ends the file system's journal: then it takes nothing more, whatever becomes of the host's space.
#[test]
fn one_whose_host_was_full_is_made_whole_when_nobody_has_it_open() {
    if !can_mount() {
        return;
    }
    let bed = Bed::new();
    let host = SmallHost::new(&bed);
    let volumes = bed.open();
    volumes.make("acme", "data", ByteSize::mib(64), at_most(9)).unwrap();
    let fill = |path: &str| {
        let written = write(&volumes, &bed.sandboxes, path, &vec![1; 40 << 20]);
        let mount = File::open(bed.at("t-acme/data/mount")).unwrap();
        (written.is_err(), rustix::fs::syncfs(mount))
    };
    let attributes = node_api::tenant_volume::FileAttributes::default();
    let make = |path: &str| {
        let request = FileRequest::MakeDirectory {
            path: path.into(),
            attributes,
            force: false,
        };
        volumes.carry_out(("acme", "data"), None, &request, &bed.sandboxes)
    };
    write(&volumes, &bed.sandboxes, "/a", b"one").unwrap();
    assert!(fill("/big").0, "more was written than there is room for");
    // New directories have to go somewhere, and there is nowhere.
    let place = bed.at("t-acme/data");
    for number in 0..50 {
        let _ = make(&format!("/d{number}"));
        let _ = rustix::fs::syncfs(File::open(place.join(MOUNT)).unwrap());
        if is_stuck(&place) {
            break;
        }
    }
    assert!(is_stuck(&place), "it takes changes although its host does not");
    // As long as the host is full there is nothing to gain.
    let refused = make("/x").unwrap_err();
    assert!(refused.to_string().contains("its host had no space"), "{refused}");
    assert_eq!(refused.for_api().kind, ErrorKind::Conflict);
    host.grow();
    let sandbox = File::open(place.join("mount/root/a")).unwrap();
    assert!(make("/x").is_err(), "somebody has it open");
    assert!(names(&volumes, &bed.sandboxes).contains(&"a".to_owned()));
    drop(sandbox);
    make("/x").unwrap();
    write(&volumes, &bed.sandboxes, "/after", &vec![2; 4 << 20]).unwrap();
    assert_eq!(fs::read(place.join("mount/root/a")).unwrap(), b"one");
    volumes.take_away(&bed.sandboxes);
    let checked = Command::new("e2fsck")
        .arg("-fn")
        .arg(place.join(DISK))
        .output()
        .unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

#[test]
fn idle_ones_do_not_stay_mounted_for_ever() {
    if !can_mount() {
        return;
    }
    let bed = Bed::new();
    let volumes = bed.open();
    for number in 0..IDLE + 3 {
        let name = format!("v{number}");
        volumes.make("acme", &name, SIZE, at_most(99)).unwrap();
        volumes.files(("acme", &name), None, &bed.sandboxes).unwrap();
    }
    assert_eq!(volumes.mounted().unwrap().len(), IDLE + 1);
    volumes.take_away(&bed.sandboxes);
    assert!(volumes.mounted().unwrap().is_empty());
}

#[test]
fn a_damaged_one_is_told_and_stays() {
    if !can_mount() {
        return;
    }
    let bed = Bed::new();
    let volumes = bed.open();
    volumes.make("acme", "data", SIZE, at_most(9)).unwrap();
    fs::write(bed.at("t-acme/data/disk"), vec![0; 1 << 20]).unwrap();
    let error = volumes.files(("acme", "data"), None, &bed.sandboxes).unwrap_err();
    assert!(error.to_string().contains("cannot be mounted"), "{error}");
    assert!(error.to_string().contains("e2fsck"), "{error}");
    assert!(bed.at("t-acme/data/disk").exists());
}

/// Whoever only reads may not have the file system written to that the host has no space for.
#[test]
fn nothing_is_written_to_see_whether_one_takes_changes_while_its_host_is_full() {
    if !can_mount() {
        return;
    }
    let bed = Bed::new();
    let host = SmallHost::new(&bed);
    let volumes = bed.open();
    volumes.make("acme", "data", ByteSize::mib(64), at_most(9)).unwrap();
    write(&volumes, &bed.sandboxes, "/a", b"one").unwrap();
    let changed = || fs::metadata(bed.at("t-acme/data/mount")).unwrap().modified().unwrap();
    let before = changed();
    fs::write(bed.at("filler"), vec![1; 12 << 20]).unwrap();
    assert!(!has_room(&bed.at("")));
    assert_eq!(names(&volumes, &bed.sandboxes), ["a"]);
    assert_eq!(changed(), before);
    host.grow();
    assert_eq!(names(&volumes, &bed.sandboxes), ["a"]);
    assert!(changed() > before, "it was not looked at where there is room");
}
