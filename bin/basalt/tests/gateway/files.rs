//! `basalt cp` by a gateway.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};

use crate::program::text;
use crate::world::World;

pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "files_go_both_ways_with_their_permissions",
        files_go_both_ways_with_their_permissions,
    ),
    (
        "trees_go_both_ways_with_their_links",
        trees_go_both_ways_with_their_links,
    ),
    ("archives_go_by_standard_streams", archives_go_by_standard_streams),
    ("what_cannot_be_copied_is_refused", what_cannot_be_copied_is_refused),
];

/// A path in a sandbox, which is one of this machine here.
fn there(path: &std::path::Path) -> String {
    format!("web:{}", path.display())
}

fn files_go_both_ways_with_their_permissions() {
    let world = World::new();
    world.make("web");
    let (from, far, back) = (world.path("from"), world.path("far"), world.path("back"));
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| u8::try_from(n % 253).unwrap()).collect();
    fs::write(&from, &bytes).unwrap();
    fs::set_permissions(&from, fs::Permissions::from_mode(0o755)).unwrap();
    let from = from.to_str().unwrap();
    world.done(&["cp", from, &there(&far)]);
    assert!(fs::read(&far).unwrap() == bytes);
    assert_eq!(fs::metadata(&far).unwrap().permissions().mode() & 0o777, 0o755);
    world.done(&["cp", &there(&far), back.to_str().unwrap()]);
    assert!(fs::read(&back).unwrap() == bytes);
    assert_eq!(fs::metadata(&back).unwrap().permissions().mode() & 0o777, 0o755);
    // Into a directory by its own name, both ways; and over what was there.
    let (inbox, outbox) = (world.path("inbox"), world.path("outbox"));
    fs::create_dir(&inbox).unwrap();
    fs::create_dir(&outbox).unwrap();
    for _ in 0..2 {
        world.done(&["cp", from, &there(&inbox)]);
        world.done(&["cp", &there(&inbox.join("from")), outbox.to_str().unwrap()]);
    }
    assert!(fs::read(outbox.join("from")).unwrap() == bytes);
    assert_eq!(fs::read_dir(&outbox).unwrap().count(), 1);
}

fn trees_go_both_ways_with_their_links() {
    let world = World::new();
    world.make("web");
    let tree = world.path("tree");
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::write(tree.join("a/b/file"), "text").unwrap();
    symlink("b/file", tree.join("a/link")).unwrap();
    let (far, back) = (world.path("far"), world.path("back"));
    world.done(&["cp", tree.to_str().unwrap(), &there(&far)]);
    assert_eq!(fs::read_to_string(far.join("a/link")).unwrap(), "text");
    world.done(&["cp", &there(&far), back.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(back.join("a/b/file")).unwrap(), "text");
    assert_eq!(fs::read_link(back.join("a/link")).unwrap().to_str(), Some("b/file"));
    // What is in it.
    let into = world.path("into");
    fs::create_dir(&into).unwrap();
    world.done(&["cp", &format!("{}/.", tree.display()), &there(&into)]);
    assert_eq!(fs::read_to_string(into.join("a/b/file")).unwrap(), "text");
}

fn archives_go_by_standard_streams() {
    let world = World::new();
    world.make("web");
    let (tree, into) = (world.path("tree"), world.path("into"));
    fs::create_dir_all(&tree).unwrap();
    fs::create_dir_all(&into).unwrap();
    fs::write(tree.join("file"), "text").unwrap();
    let archive = world.verb(&["cp", &there(&tree), "-"]).stdout;
    let mut command = world.command(&["cp", "-", &there(&into)]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&archive).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read_to_string(into.join("tree/file")).unwrap(), "text");
    let listed = Command::new("tar")
        .arg("t")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut listed = listed.unwrap();
    listed.stdin.take().unwrap().write_all(&archive).unwrap();
    assert_eq!(text(&listed.wait_with_output().unwrap().stdout), "tree/\ntree/file\n");
}

fn what_cannot_be_copied_is_refused() {
    let world = World::new();
    world.make("web");
    let here = world.path("here");
    world.fails(
        &["cp", "web:/no/such/file", here.to_str().unwrap()],
        1,
        &["/no/such/file is not there"],
    );
    world.fails(&["cp", "web:/a", "web:/b"], 1, &["basalt cp A:PATH - |"]);
    world.fails(
        &["cp", "web:/dev/null", here.to_str().unwrap()],
        1,
        &["neither a file nor a directory"],
    );
    // An archive that is none: what `tar` says of it.
    let into = world.path("into");
    fs::create_dir(&into).unwrap();
    let mut command = world.command(&["cp", "-", &there(&into)]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&[7; 5000]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("`tar` in the sandbox has failed"),
        "{}",
        text(&output.stderr)
    );
}
