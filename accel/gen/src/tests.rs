//! What is checked in is what would be made now, and what is made says what the specification says.

use std::path::{Path, PathBuf};

use super::*;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A copy of what the generator reads.
fn copied() -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let from = root();
    let mut names = vec![lock::PATH.to_owned(), "rustfmt.toml".to_owned()];
    for api in ["opencl", "cuda"] {
        let directory = format!("accel/spec/{api}");
        std::fs::create_dir_all(copy.path().join(&directory)).unwrap();
        let files = std::fs::read_dir(from.join(&directory)).unwrap();
        names.extend(files.map(|file| format!("{directory}/{}", file.unwrap().file_name().to_string_lossy())));
    }
    for name in names {
        std::fs::copy(from.join(&name), copy.path().join(&name)).unwrap();
    }
    copy
}

#[test]
fn what_is_checked_in_is_what_would_be_made() {
    let stale = stale(&root()).unwrap();
    assert!(
        stale.is_empty(),
        "{stale:?} differ from what is made; `cargo xtask accel` writes them anew"
    );
}

#[test]
fn what_differs_is_found_and_mended() {
    let copy = copied();
    let root = copy.path();
    assert!(write(root).unwrap().len() > 10);
    assert!(stale(root).unwrap().is_empty());
    let call = "accel/proto/src/opencl/queue.rs";
    std::fs::write(root.join(call), "//! By hand.\n").unwrap();
    std::fs::write(root.join("accel/proto/src/opencl/old.rs"), "//! Of before.\n").unwrap();
    assert_eq!(stale(root).unwrap(), ["accel/proto/src/opencl/old.rs", call]);
    assert_eq!(write(root).unwrap().len(), 2);
    assert!(stale(root).unwrap().is_empty() && !root.join("accel/proto/src/opencl/old.rs").exists());
}

#[test]
fn another_layout_has_another_number_and_the_old_one_stays() {
    let copy = copied();
    let root = copy.path();
    let lock = |root: &Path| std::fs::read_to_string(root.join(lock::PATH)).unwrap();
    let before = lock(root);
    let queue = root.join("accel/spec/opencl/queue.toml");
    let text = std::fs::read_to_string(&queue).unwrap();
    let changed = text.replace(
        "params.properties = { in = \"zero\", null = true }",
        "params.properties = \"zero\"",
    );
    assert_ne!(text, changed);
    std::fs::write(&queue, changed).unwrap();
    write(root).unwrap();
    let after = lock(root);
    let lines = |text: &str| {
        text.lines()
            .filter(|line| line.ends_with(" clCreateCommandQueueWithProperties"))
            .count()
    };
    assert_eq!((lines(&before), lines(&after)), (1, 2));
    assert!(before.lines().all(|line| after.contains(line)));
    assert_eq!(after.lines().count(), before.lines().count() + 1);
    std::fs::write(&queue, text).unwrap();
    write(root).unwrap();
    assert_eq!(lock(root), after);
    let made = std::fs::read_to_string(root.join("accel/proto/src/opencl/queue.rs")).unwrap();
    let number = before
        .lines()
        .find(|line| line.ends_with(" clCreateCommandQueueWithProperties"))
        .unwrap();
    assert!(made.contains(&number[..6]), "the old layout has its old number again");
}

#[test]
fn the_page_lists_every_entry_point_once() {
    let api = accel_spec::opencl(&root()).unwrap();
    let page = document::page(&api);
    for command in &api.commands {
        assert_eq!(
            page.matches(&format!("| `{}` |", command.name)).count(),
            1,
            "{}",
            command.name
        );
    }
}
