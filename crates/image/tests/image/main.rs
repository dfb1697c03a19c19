//! Tests of imports: images are made here, imported through the public API, and looked at in three ways: by
//! `fsck.erofs`, by a small reader of our own, and (where it can mount them) by the kernel.

mod bad;
mod build;
mod keep;
mod kernel;
mod random;
mod reader;
mod store;
mod tree;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// What is visible of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    /// `f`, `d`, `l`, `c`, `b` or `p`.
    pub(crate) kind: char,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) nlink: u32,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Contents, a link's target, or `major:minor`.
    pub(crate) data: Vec<u8>,
}

/// All paths of an image, the root's being empty.
pub(crate) type Listing = BTreeMap<Vec<u8>, Seen>;

/// Fails with the first differences rather than with two whole listings.
pub(crate) fn assert_same(what: &str, found: &Listing, expected: &Listing) {
    let mut differences = Vec::new();
    for path in found
        .keys()
        .chain(expected.keys())
        .collect::<std::collections::BTreeSet<_>>()
    {
        if found.get(path) != expected.get(path) {
            let name = String::from_utf8_lossy(path);
            differences.push(format!(
                "{name:?}: {:?} instead of {:?}",
                found.get(path),
                expected.get(path)
            ));
        }
    }
    let shown = differences
        .iter()
        .take(5)
        .map(|line| line.chars().take(600).collect())
        .collect::<Vec<String>>();
    assert!(
        differences.is_empty(),
        "{what}: {} differences:\n{}",
        differences.len(),
        shown.join("\n")
    );
}

/// `fsck.erofs` finds nothing, and extracts every regular file.
pub(crate) fn fsck(image: &Path) {
    let output = Command::new("fsck.erofs").arg("--extract").arg(image).output();
    let output = output.expect("fsck.erofs cannot be run: install Debian's package erofs-utils");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && !text.contains("<E>"),
        "fsck.erofs {}: {text}",
        image.display()
    );
}

/// An image in a file passes `fsck.erofs`, and our reader and the kernel see `expected` in it.
pub(crate) fn check(image: &Path, expected: &Listing) {
    fsck(image);
    assert_same("our reader", &reader::list(&std::fs::read(image).unwrap()), expected);
    match kernel::list(image) {
        Ok(seen) => assert_same("the kernel", &seen, expected),
        Err(reason) => eprintln!("not compared with the kernel's view: {reason}"),
    }
}
