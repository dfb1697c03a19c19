//! Cases of snapshots that leave one node as a file and come to another.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use export::Writer;
use rustix::process::{Pid, Signal, kill_process};

use crate::builds::names_in;
use crate::cases::kill;
use crate::snapshots::{files, refused};
use crate::stand_in::{shape_of, state_of};
use crate::world::{World, done, text, wait_for};

/// Where there is something in the memory, which is all holes otherwise.
const PLACES: [u64; 3] = [0, 5 << 20, (64 << 20) - 8];

/// A node with the snapshot `mine` of a sandbox `web`, and nothing else but its image.
pub(crate) fn with_snapshot() -> World {
    let world = World::new("can be kept");
    let words = [
        "run", "-d", "--boot", "--disk", "64m", "--memory", "64m", "--name", "web", "tiny", "--", "sleep", "1000",
    ];
    let id = done(&world, &words);
    let disk = world.path("state/sandboxes").join(id.trim()).join("disk");
    let disk = File::options().write(true).open(disk).unwrap();
    disk.set_len(0).unwrap();
    disk.set_len(64 << 20).unwrap();
    disk.write_all_at(b"what it has written", 1 << 20).unwrap();
    done(&world, &["snapshot", "create", "web", "mine"]);
    // The stand-in has no memory of its own; what it gets here has no checksums, as that of a former version.
    fs::remove_file(world.path("state/snapshots/mine/memory.sums")).unwrap();
    let memory = File::create(world.path("state/snapshots/mine/memory")).unwrap();
    memory.set_len(64 << 20).unwrap();
    for place in PLACES {
        memory.write_all_at(b"a memory", place).unwrap();
    }
    fs::write(world.path("state/snapshots/mine/memory.1"), "a layer").unwrap();
    let state = world.path("state/snapshots/mine/state");
    let shape = shape_of(&fs::read(&state).unwrap()).unwrap();
    fs::write(state, state_of(&text(&shape), 2)).unwrap();
    // Whatever else lies there stays there.
    fs::write(world.path("state/snapshots/mine/notes"), "not of it").unwrap();
    done(&world, &["rm", "-f", "web"]);
    world
}

/// A node without an image and without a snapshot.
pub(crate) fn elsewhere() -> World {
    let world = World::new("can be kept");
    done(&world, &["rmi", "tiny"]);
    done(&world, &["snapshot", "ls"]);
    world
}

/// What becomes of the one that `save` writes where it is loaded as `again`.
pub(crate) fn handed_over((here, save): (&World, &[&str; 3]), there: &World) -> serde_json::Value {
    let saving = here.command(save).stdout(Stdio::piped()).spawn();
    let loading = there
        .command(&["--json", save[0], "load", "--name", "again"])
        .stdin(saving.unwrap().stdout.take().unwrap())
        .output()
        .unwrap();
    assert!(loading.status.success(), "{}", text(&loading.stderr));
    serde_json::from_slice(&loading.stdout).unwrap()
}

/// Writes over a part of the snapshot's memory, and has its checksums be of that. The daemon may make some just then, of what was there.
fn write_over(world: &World, bytes: &[u8]) {
    let place = world.path("state/snapshots/mine/memory");
    let memory = File::options().write(true).open(place).unwrap();
    memory.write_all_at(bytes, 8 << 20).unwrap();
    wait_for("checksums of what is there", || {
        drop(fs::remove_file(world.path("state/snapshots/mine/memory.sums")));
        let verified = world.verb(&["snapshot", "verify", "mine"]);
        verified.status.success().then_some(())
    });
}

fn saved(world: &World, words: &[&str]) -> PathBuf {
    let path = world.path("mine.basalt");
    let mut command = vec!["snapshot", "save", "-o", path.to_str().unwrap(), "mine"];
    command.extend(words);
    done(world, &command);
    path
}

fn load(path: &Path) -> [&str; 4] {
    ["snapshot", "load", "-i", path.to_str().unwrap()]
}

/// The snapshot `name` is what was saved, with its holes, and can be used.
pub(crate) fn is_whole(world: &World, name: &str) {
    let place = world.path("state/snapshots").join(name);
    let memory = File::open(place.join("memory")).unwrap();
    let metadata = memory.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.mode() & 0o777), (64 << 20, 0o600));
    assert!(
        metadata.blocks() < 64,
        "{} blocks: the holes are filled",
        metadata.blocks()
    );
    for at in PLACES {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, at).unwrap();
        assert_eq!(&bytes, b"a memory");
    }
    assert_eq!(fs::read_to_string(place.join("memory.1")).unwrap(), "a layer");
    assert!(!place.join("notes").exists());
    let clone = done(world, &["clone", name]);
    let disk = world.path("state/sandboxes").join(clone.trim()).join("disk");
    let mut bytes = [0; 19];
    let disk = File::open(disk).unwrap();
    disk.read_exact_at(&mut bytes, 1 << 20).unwrap();
    assert_eq!(&bytes, b"what it has written");
    assert_eq!(disk.metadata().unwrap().len(), 64 << 20);
    done(world, &["exec", clone.trim(), "true"]);
}

pub(crate) fn a_saved_snapshot_is_all_that_another_machine_needs() {
    let here = with_snapshot();
    let path = saved(&here, &[]);
    assert!(fs::metadata(&path).unwrap().len() < 64 << 10, "the holes are in it");
    // Where it is from, with everything removed, and where nothing of it was.
    done(&here, &["snapshot", "rm", "mine"]);
    done(&here, &["rmi", "tiny"]);
    let there = elsewhere();
    for world in [&here, &there] {
        assert_eq!(done(world, &load(&path)), "mine\n");
        is_whole(world, "mine");
        let listed: serde_json::Value = serde_json::from_str(&done(world, &["--json", "snapshot", "ls"])).unwrap();
        assert_eq!(
            (&listed[0]["name"], &listed[0]["sandbox_name"]),
            (&"mine".into(), &"web".into())
        );
        // A file from elsewhere gives no names to images.
        assert!(done(world, &["images"]).contains("<none>"));
        let told = refused(world, &load(&path));
        assert!(
            told.contains("there is a snapshot `mine`: choose another name"),
            "{told}"
        );
    }
    // From hand to hand, under another name.
    let snapshot = handed_over((&here, &["snapshot", "save", "mine"]), &there);
    assert_eq!(snapshot["name"], "again");
    is_whole(&there, "again");
    assert_eq!(files(&there), ["again", "mine"]);
    // The same snapshot is the same file, but for what it is called.
    let again = there.path("again.basalt");
    done(
        &there,
        &["snapshot", "save", "--output", again.to_str().unwrap(), "again"],
    );
    let told = refused(&there, &["snapshot", "save", "-o", "/nonexistent/x", "again"]);
    assert!(told.contains("/nonexistent/x cannot be written"), "{told}");
    let told = refused(&there, &["snapshot", "save", "no"]);
    assert!(told.contains("there is no snapshot `no`"), "{told}");
}

pub(crate) fn what_is_no_whole_snapshot_leaves_nothing() {
    let here = with_snapshot();
    let bytes = fs::read(saved(&here, &[])).unwrap();
    let there = elsewhere();
    let path = there.path("broken");
    let attempt = |bytes: &[u8], says: &str| {
        fs::write(&path, bytes).unwrap();
        let told = refused(&there, &load(&path));
        assert!(told.contains(says), "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        wait_for("what was begun to go", || files(&there).is_empty().then_some(()));
        assert_eq!(done(&there, &["images"]).lines().count(), 1, "an image is left");
    };
    for part in 1..8 {
        attempt(&bytes[..bytes.len() * part / 8], "it ends too early: copy it once more");
        let mut changed = bytes.clone();
        changed[bytes.len() * part / 8] ^= 0x40;
        attempt(&changed, "copy it once more, or save it again");
    }
    // Where zstd does not notice it.
    let mut archive = zstd::decode_all(&bytes[..]).unwrap();
    let at = archive
        .windows(19)
        .position(|bytes| bytes == b"what it has written")
        .unwrap();
    archive[at] ^= 1;
    attempt(
        &zstd::encode_all(&archive[..], 1).unwrap(),
        "disk is not what was saved",
    );
    archive[at] ^= 1;
    let at = archive.windows(10).position(|bytes| bytes == b"\"format\":1").unwrap();
    archive[at + 9] = b'7';
    attempt(
        &zstd::encode_all(&archive[..], 1).unwrap(),
        "layout 7, and this Basalt reads layout 1",
    );
    attempt(b"", "it ends too early");
    attempt(
        &[b'x'; 4096],
        "no snapshot file: give one that `basalt snapshot save` wrote",
    );
    let told = refused(&there, &["snapshot", "load", "-i", "/nonexistent"]);
    assert!(told.contains("/nonexistent cannot be read"), "{told}");
}

pub(crate) fn an_image_can_be_left_out_and_come_later() {
    let here = with_snapshot();
    let path = saved(&here, &["--without-image"]);
    let there = elsewhere();
    let output = there.verb(&load(&path));
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "mine\n".into()));
    let told = text(&output.stderr);
    assert!(
        told.contains("its image tiny (sha256:") && told.contains("is not here: `basalt pull`"),
        "{told}"
    );
    refused(&there, &["clone", "mine"]);
    let layout = here.path("layout");
    done(&there, &["import", layout.to_str().unwrap()]);
    is_whole(&there, "mine");
    // What cannot be put in is said before anything is written.
    done(&here, &["rmi", "--force", &image(&here)]);
    let path = here.path("other.basalt");
    let told = refused(&here, &["snapshot", "save", "-o", path.to_str().unwrap(), "mine"]);
    assert!(told.contains("`--without-image` leaves it out"), "{told}");
    assert!(!path.exists());
}

/// The one image that there is.
pub(crate) fn image(world: &World) -> String {
    let images = done(world, &["images"]);
    let line = images.lines().nth(1).unwrap();
    line.split_whitespace().nth(1).unwrap().to_owned()
}

/// A load of a `snapshot` or a `template` of which half has come, and which waits for the rest.
pub(crate) fn half_loaded(world: &World, kind: &str, bytes: &[u8]) -> Child {
    let mut command = world.command(&[kind, "load"]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    child.stdin.as_mut().unwrap().flush().unwrap();
    let places = format!("{kind}s");
    let begun = || {
        let name = names_in(world, &places).pop()?;
        let record = world.path("state").join(&places).join(name).join("record.json");
        record.exists().then_some(())
    };
    wait_for("what is begun", begun);
    child
}

pub(crate) fn whoever_dies_while_loading_leaves_nothing() {
    let here = with_snapshot();
    // Noise, so that the first half has the record and a part of the memory.
    let mut noise = vec![0; 4 << 20];
    rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty()).unwrap();
    write_over(&here, &noise);
    let bytes = fs::read(saved(&here, &[])).unwrap();
    let half = &bytes[..bytes.len() / 2];
    let there = elsewhere();
    let nothing = || {
        wait_for("what was begun to go", || files(&there).is_empty().then_some(()));
        assert_eq!(done(&there, &["snapshot", "ls"]).lines().count(), 1);
        assert_eq!(done(&there, &["images"]).lines().count(), 1);
    };
    // The client.
    let mut child = half_loaded(&there, "snapshot", half);
    child.kill().unwrap();
    child.wait().unwrap();
    nothing();
    // A signal ends it in order.
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut child = half_loaded(&there, "snapshot", half);
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        nothing();
    }
    // The daemon: the next one clears what is left, and the client says that it is gone.
    let mut child = half_loaded(&there, "snapshot", half);
    kill(there.daemon().unwrap());
    there.wait_for_no_daemon();
    // It may have heard of it before it has read all of this.
    let rest = &bytes[bytes.len() / 2..];
    child.stdin.take().unwrap().write_all(rest).unwrap_or_default();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let told = text(&output.stderr);
    assert!(told.contains("the daemon cannot be reached any more"), "{told}");
    done(&there, &["snapshot", "ls"]);
    nothing();
    // Nobody stands in the way of the next.
    fs::write(there.path("whole"), &bytes).unwrap();
    done(&there, &load(&there.path("whole")));
    // Of a file that nobody finished, or has read to its end, nobody hears that it is good.
    let reader = here
        .command(&["snapshot", "save", "mine"])
        .stdout(Stdio::piped())
        .spawn();
    let mut reader = reader.unwrap();
    drop(reader.stdout.take());
    assert_eq!(reader.wait().unwrap().code(), Some(1));
    let target = here.path("target.basalt");
    let saving = ["snapshot", "save", "-o", target.to_str().unwrap(), "mine"];
    let daemon = Pid::from_raw(i32::try_from(here.daemon().unwrap()).unwrap()).unwrap();
    kill_process(daemon, Signal::STOP).unwrap();
    let mut child = here.command(&saving).spawn().unwrap();
    // The daemon that stands still holds it there. The file has no name, here or elsewhere.
    let nameless = format!("{}/#", target.parent().unwrap().display());
    wait_for("a file on its way", || {
        let mut open = fs::read_dir(format!("/proc/{}/fd", child.id())).ok()?.flatten();
        let file = open.find_map(|fd| {
            fs::read_link(fd.path())
                .ok()
                .filter(|file| file.to_string_lossy().starts_with(&nameless))
        });
        file.map(drop)
    });
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    kill_process(daemon, Signal::CONT).unwrap();
    let mut names = fs::read_dir(target.parent().unwrap()).unwrap().flatten();
    let left = names.find(|entry| entry.file_name().to_string_lossy().starts_with("target"));
    assert!(left.is_none(), "{left:?}");
}

pub(crate) fn a_full_disk_leaves_nothing() {
    let here = with_snapshot();
    write_over(&here, &vec![b'x'; 8 << 20]);
    let path = saved(&here, &[]);
    let there = elsewhere();
    let place = there.path("state/snapshots");
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("none", &place, "tmpfs", flags, c"size=4m").expect("this test needs root");
    let _mounted = Mounted(place);
    let told = refused(&there, &load(&path));
    assert!(
        told.contains("No space left on device") && told.contains("nothing of it stays"),
        "{told}"
    );
    wait_for("what was begun to go", || files(&there).is_empty().then_some(()));
    assert_eq!(done(&there, &["images"]).lines().count(), 1);
    // Of a file that is written there is nothing either.
    let target = there.path("state/snapshots/x.basalt");
    let mut noise = vec![0; 8 << 20];
    rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty()).unwrap();
    write_over(&here, &noise);
    let told = refused(&here, &["snapshot", "save", "-o", target.to_str().unwrap(), "mine"]);
    assert!(
        told.contains("No space left on device") && told.contains("nothing of it stays"),
        "{told}"
    );
    assert!(files(&there).is_empty());
}

/// A mount that goes with its test.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let flags = rustix::mount::UnmountFlags::DETACH;
        rustix::mount::unmount(&self.0, flags).expect("a mount of this test");
    }
}

pub(crate) fn a_stranger_names_neither_files_nor_sizes() {
    let here = with_snapshot();
    let record = fs::read_to_string(here.path("state/snapshots/mine/record.json")).unwrap();
    let there = elsewhere();
    let path = there.path("strange");
    let attempt = |record: &str, members: &[(&str, &[u8])], says: &str| {
        let mut writer = Writer::new(File::create(&path).unwrap(), "snapshot").unwrap();
        writer.bytes("record.json", record.as_bytes()).unwrap();
        for (name, bytes) in members {
            writer.bytes(name, bytes).unwrap();
        }
        writer.finish().unwrap();
        let told = refused(&there, &load(&path));
        assert!(told.contains(says), "{told}");
        wait_for("what was begun to go", || files(&there).is_empty().then_some(()));
        assert_eq!(done(&there, &["images"]).lines().count(), 1, "an image is left");
    };
    let large = vec![1; (64 << 20) + 1];
    let all: [(&str, &[u8]); 3] = [("state", b"x"), ("memory", b"x"), ("disk", b"x")];
    attempt(
        &record,
        &[("passwd", b"x")],
        "passwd is no file that this snapshot can have",
    );
    attempt(&record, &[("memory", &large)], "where 67108864 are the most");
    attempt(&record, &all[..2], "a file of it is missing");
    attempt("{}", &all, "its record cannot be used");
    let changed = |from: &str, to: &str| {
        assert!(record.contains(from), "{record}");
        record.replace(from, to)
    };
    attempt(
        &changed("\"name\": \"mine\"", "\"name\": \"../mine\""),
        &all,
        "cannot be a snapshot's name",
    );
    let volume: node_api::VolumeMount = "/etc:/x".parse().unwrap();
    let volumes = format!("\"volumes\": [{}]", serde_json::to_string(&volume).unwrap());
    attempt(&changed("\"volumes\": []", &volumes), &all, "its sandbox has volumes");
    // What could not be told of it in one packet would be told of no other snapshot either.
    let long = format!("\"labels\": {{\"a\": \"{}\"}}", "x".repeat(200_000));
    attempt(&changed("\"labels\": {}", &long), &all, "its description has");
    // An image that is not the one that the record names.
    let archive = there.path("image.tar");
    done(&here, &["save", "-o", archive.to_str().unwrap(), "tiny"]);
    let image = fs::read(&archive).unwrap();
    let digest: serde_json::Value = serde_json::from_str(&record).unwrap();
    let digest = digest["snapshot"]["digest"].as_str().unwrap().to_owned();
    let mut with_image = all.to_vec();
    with_image.push(("image.tar", &image));
    attempt(
        &changed(&digest, &"0".repeat(64)),
        &with_image,
        "the image that came along",
    );
    attempt(
        &changed(&digest, "../../../../etc/passwd"),
        &with_image,
        "names no image by a digest",
    );
    // Of a snapshot that the daemon refuses the image does not stay either.
    attempt(
        &changed("\"sandbox_name\": \"web\"", "\"sandbox_name\": \"../web\""),
        &with_image,
        "cannot be a sandbox's name",
    );
}
