//! `basalt cp`: the stand-in's guest has this very file system, so a path of the sandbox can be looked at here.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Output, Stdio};

use crate::world::{World, text, wait_for};

/// A sandbox that idles, and two directories: one for its side, one for ours.
fn scene(world: &World) -> (String, String) {
    let started = world.verb(&[
        "run", "-d", "--disk", "0", "--name", "box", "tiny", "--", "sleep", "1000",
    ]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    for side in ["there", "here"] {
        fs::create_dir(world.path(side)).unwrap();
    }
    (side(world, "there"), side(world, "here"))
}

fn side(world: &World, name: &str) -> String {
    world.path(name).display().to_string()
}

fn end(world: &World) {
    let removed = world.verb(&["rm", "--force", "box"]);
    assert!(removed.status.success(), "{}", text(&removed.stderr));
}

#[track_caller]
fn ok(world: &World, from: &str, to: &str) {
    let output = world.verb(&["cp", from, to]);
    assert!(output.status.success(), "cp {from} {to}: {}", text(&output.stderr));
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
}

#[track_caller]
fn refused(output: &Output, words: &[&str]) {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = text(&output.stderr);
    for word in words {
        assert!(stderr.contains(word), "no `{word}` in: {stderr}");
    }
}

fn read(directory: &str, name: &str) -> String {
    fs::read_to_string(Path::new(directory).join(name)).unwrap_or_else(|error| format!("{name}: {error}"))
}

pub(crate) fn files_and_trees_go_both_ways() {
    let world = World::new("");
    let (there, here) = scene(&world);
    fs::write(format!("{here}/file"), "text").unwrap();
    // To a name, into a directory, over a file.
    ok(&world, &format!("{here}/file"), &format!("box:{there}/named"));
    ok(&world, &format!("{here}/file"), &format!("box:{there}"));
    assert_eq!(
        (read(&there, "named"), read(&there, "file")),
        ("text".into(), "text".into())
    );
    fs::write(format!("{there}/named"), "from there").unwrap();
    ok(&world, &format!("box:{there}/named"), &format!("{here}/file"));
    assert_eq!(read(&here, "file"), "from there");

    // A tree becomes a new directory, or gets its own name in one, or its contents go there.
    let tree = format!("{there}/tree");
    fs::create_dir_all(format!("{tree}/deep/empty")).unwrap();
    fs::write(format!("{tree}/deep/file"), "deep").unwrap();
    symlink("deep/file", format!("{tree}/link")).unwrap();
    ok(&world, &format!("box:{tree}"), &format!("{here}/new"));
    ok(&world, &format!("box:{tree}"), &here);
    fs::create_dir(format!("{here}/contents")).unwrap();
    ok(&world, &format!("box:{tree}/."), &format!("{here}/contents"));
    for copy in ["new", "tree", "contents"] {
        let copy = format!("{here}/{copy}");
        assert_eq!(read(&copy, "deep/file"), "deep");
        assert_eq!(fs::read_link(format!("{copy}/link")).unwrap(), Path::new("deep/file"));
        assert!(Path::new(&copy).join("deep/empty").is_dir());
        assert!(!Path::new(&copy).join("tree").exists());
    }
    ok(&world, &format!("{here}/new"), &format!("box:{there}/back"));
    assert_eq!(read(&there, "back/deep/file"), "deep");
    // Between two sandboxes, which here are one.
    ok(&world, &format!("box:{there}/back"), &format!("box:{there}/third"));
    assert_eq!(read(&there, "third/deep/file"), "deep");
    end(&world);
}

pub(crate) fn large_files_keep_their_holes_and_every_byte() {
    let world = World::new("");
    let (there, here) = scene(&world);
    let bytes: Vec<u8> = (0..3_000_001_u32)
        .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
        .collect();
    fs::write(format!("{here}/large"), &bytes).unwrap();
    let sparse = fs::File::create(format!("{here}/sparse")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (1 << 30) - 3).unwrap();
    for name in ["large", "sparse"] {
        ok(&world, &format!("{here}/{name}"), &format!("box:{there}/{name}"));
        ok(&world, &format!("box:{there}/{name}"), &format!("{here}/{name}-back"));
    }
    assert_eq!(fs::read(format!("{here}/large-back")).unwrap(), bytes);
    let back = fs::metadata(format!("{here}/sparse-back")).unwrap();
    assert_eq!(back.len(), 1 << 30);
    assert!(back.blocks() * 512 < 64 << 20, "{} blocks", back.blocks());
    end(&world);
}

pub(crate) fn archives_go_through_standard_streams() {
    let world = World::new("");
    let (there, here) = scene(&world);
    fs::create_dir(format!("{there}/tree")).unwrap();
    fs::write(format!("{there}/tree/file"), "text").unwrap();
    let archive = world.verb(&["cp", &format!("box:{there}/tree"), "-"]);
    assert!(archive.status.success(), "{}", text(&archive.stderr));
    let feed = |bytes: &[u8], to: &str| {
        let mut command = world.command(&["cp", "-", to]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // One that is refused does not read it.
        child.stdin.take().unwrap().write_all(bytes).unwrap_or_default();
        child.wait_with_output().unwrap()
    };
    fs::create_dir(format!("{there}/unpacked")).unwrap();
    let output = feed(&archive.stdout, &format!("box:{there}/unpacked"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(read(&there, "unpacked/tree/file"), "text");
    // An ordinary tar reads it, too.
    fs::write(format!("{here}/archive"), &archive.stdout).unwrap();
    let tar = std::process::Command::new("tar")
        .args(["-tf", &format!("{here}/archive")])
        .output()
        .unwrap();
    assert_eq!(text(&tar.stdout), "tree\ntree/file\n");
    refused(
        &feed(&archive.stdout, &format!("box:{there}/missing")),
        &["is no directory of the sandbox"],
    );
    refused(
        &feed(b"this is no archive at all", &format!("box:{there}/unpacked")),
        &["cannot be read"],
    );
    end(&world);
}

pub(crate) fn what_cannot_be_copied_is_explained() {
    let world = World::new("");
    let (there, here) = scene(&world);
    fs::write(format!("{here}/file"), "text").unwrap();
    fs::create_dir(format!("{here}/tree")).unwrap();
    let try_to = |from: &str, to: &str| world.verb(&["cp", from, to]);
    refused(
        &try_to(&format!("box:{there}/missing"), &here),
        &["missing", "No such file"],
    );
    refused(
        &try_to(&format!("{here}/missing"), &format!("box:{there}")),
        &["missing", "No such file"],
    );
    refused(
        &try_to(&format!("{here}/file"), &format!("box:{there}/no/such/place")),
        &["No such file"],
    );
    refused(
        &try_to(&format!("{here}/file"), &format!("box:{there}/new/")),
        &["make the directory first"],
    );
    fs::write(format!("{there}/file"), "theirs").unwrap();
    refused(
        &try_to(&format!("{here}/tree"), &format!("box:{there}/file")),
        &["a directory cannot become one"],
    );
    refused(&try_to(&format!("{here}/file"), "nobody:/x"), &["no sandbox `nobody`"]);
    refused(&try_to(&format!("{here}/file"), &here), &["SANDBOX:PATH"]);
    let proc = try_to("box:/proc", &here);
    assert!(!Path::new(&here).join("proc").exists(), "{proc:?}");
    end(&world);
    let stopped = world.verb(&["run", "-d", "--disk", "0", "--name", "box", "tiny", "--", "true"]);
    assert!(stopped.status.success());
    assert!(world.verb(&["wait", "box"]).status.success());
    refused(
        &try_to(&format!("{here}/file"), "box:/tmp/x"),
        &["box is exited", "basalt start"],
    );
    end(&world);
}

pub(crate) fn an_interrupted_copy_leaves_whole_files_only() {
    let world = World::new("");
    let (there, here) = scene(&world);
    // What is read from a pipe nobody writes to is as slow as a copy can be.
    let mut command = world.command(&["cp", "-", &format!("box:{there}")]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let archive = {
        fs::create_dir(format!("{here}/tree")).unwrap();
        fs::write(format!("{here}/tree/a"), "whole").unwrap();
        fs::write(format!("{here}/tree/b"), vec![1; 300_000]).unwrap();
        let tar = std::process::Command::new("tar")
            .args(["-c", "-C", &here, "tree/a", "tree/b"])
            .output()
            .unwrap();
        tar.stdout
    };
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&archive[..200_000]).unwrap();
    wait_for("the first file", || fs::read_to_string(format!("{there}/tree/a")).ok());
    let part = || {
        let names = fs::read_dir(format!("{there}/tree")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
        names.filter(|name| name != "a").collect::<Vec<_>>()
    };
    wait_for("the second file's beginning", || part().first().cloned());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    // The agent hears of it although nothing more comes.
    wait_for("the beginning to go", || part().is_empty().then_some(()));
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(text(&output.stderr).contains("the copy was not finished"), "{output:?}");
    assert_eq!(read(&there, "tree/a"), "whole");
    end(&world);
}
