//! What is kept of an image: every kind of entry, every attribute, and what layers do to one another.

use std::collections::BTreeMap;
use std::path::Path;

use image::{Limits, Store, convert_bytes};
use tar::EntryType;

use crate::build::{self, Files, Spec, dir, file, hard_link, symlink};
use crate::{Listing, Seen, check, reader};

/// Imports the layers as an OCI layout directory, checks the image, and returns what is in it.
fn import(layers: &[Vec<Spec>], expected: Option<&Listing>) -> Listing {
    let layers: Vec<_> = layers.iter().map(|specs| build::layer(specs)).collect();
    let temp = tempfile::tempdir().unwrap();
    let stores = [build::Store::Gzip, build::Store::Zstd, build::Store::Plain];
    let oci = Files::oci(&layers, &stores).to_dir(&temp.path().join("oci"));
    let store = Store::open(&temp.path().join("store")).unwrap();
    let image = store.import(&oci, Some("test"), &mut |_| {}).unwrap();
    let listing = reader::list(&std::fs::read(&image.path).unwrap());
    check(&image.path, expected.unwrap_or(&listing));
    listing
}

fn names(listing: &Listing) -> Vec<&str> {
    listing
        .keys()
        .filter(|path| !path.is_empty())
        .map(|path| std::str::from_utf8(path).unwrap())
        .collect()
}

fn data<'a>(listing: &'a Listing, path: &str) -> &'a str {
    std::str::from_utf8(&listing[path.as_bytes()].data).unwrap()
}

#[test]
fn every_kind_of_entry_is_kept() {
    let non_utf8 = [b"etc/\xff\xfe".to_vec(), vec![b'n'; 200]].concat();
    let deep = format!("{}/end", ["a-rather-long-directory-name"; 12].join("/"));
    let big = "0123456789abcdef".repeat(4096 / 16 * 3) + "tail";
    let exact = "x".repeat(8192);
    let specs = vec![
        Spec {
            mode: 0o1755,
            uid: 3,
            ..dir("./")
        },
        Spec {
            mode: 0o1777,
            mtime: 1_600_000_000,
            ..dir("tmp/")
        },
        Spec {
            mode: 0o4755,
            ..file("bin/su", "setuid")
        },
        Spec {
            mode: 0o2711,
            uid: 70_000,
            gid: 4_000_000_000,
            ..file("bin/sg", "setgid")
        },
        hard_link("bin/su2", "bin/su"),
        hard_link("su3", "./bin/su2"),
        symlink("sbin", "bin"),
        symlink("long", &"t/".repeat(2040)),
        Spec {
            kind: EntryType::Char,
            device: (1, 3),
            mode: 0o666,
            ..file("dev/null", "")
        },
        Spec {
            kind: EntryType::Block,
            device: (259, 70_000),
            mode: 0o660,
            gid: 6,
            ..file("dev/nvme", "")
        },
        Spec {
            kind: EntryType::Fifo,
            mode: 0o600,
            ..file("run/pipe", "")
        },
        Spec {
            path: non_utf8.clone(),
            ..file("", "bytes")
        },
        file(&deep, "deep"),
        file("empty", ""),
        file("big", &big),
        file("exact", &exact),
    ];
    let listing = import(&[specs], None);
    let seen = |path: &str| &listing[path.as_bytes()];
    assert_eq!((seen("").mode, seen("").uid, seen("tmp").mode), (0o1755, 3, 0o1777));
    assert_eq!(seen("tmp").mtime, (1_600_000_000, 0));
    let su = Seen {
        mode: 0o4755,
        nlink: 3,
        ..plain("setuid")
    };
    assert_eq!((seen("bin/su"), seen("bin/su2"), seen("su3")), (&su, &su, &su));
    let expected = Seen {
        mode: 0o2711,
        uid: 70_000,
        gid: 4_000_000_000,
        ..plain("setgid")
    };
    assert_eq!(seen("bin/sg"), &expected);
    assert_eq!((seen("sbin").kind, data(&listing, "sbin")), ('l', "bin"));
    assert_eq!(data(&listing, "long").len(), 4080);
    assert_eq!((seen("dev/null").kind, data(&listing, "dev/null")), ('c', "1:3"));
    assert_eq!((seen("dev/nvme").kind, data(&listing, "dev/nvme")), ('b', "259:70000"));
    assert_eq!((seen("run/pipe").kind, seen("run/pipe").mode), ('p', 0o600));
    assert_eq!(listing[&non_utf8].data, b"bytes");
    assert_eq!(data(&listing, &deep), "deep");
    assert_eq!(
        (data(&listing, "empty"), data(&listing, "big"), data(&listing, "exact")),
        ("", &big[..], &exact[..])
    );
    // A directory that no entry describes.
    assert_eq!((seen("bin").mode, seen("bin").uid, seen("bin").nlink), (0o755, 0, 2));
}

#[test]
fn extended_attributes_and_exact_times_are_kept() {
    let acl = [
        2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255,
    ];
    let xattr = |name: &str, value: &[u8]| (format!("SCHILY.xattr.{name}"), value.to_vec());
    let specs = vec![
        Spec {
            pax: vec![
                xattr("user.note", b"a=b\nc"),
                xattr("user.empty", b""),
                xattr(
                    "security.capability",
                    &[1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                ),
                xattr("trusted.x", &[0, 255]),
                xattr("system.posix_acl_access", &acl),
                xattr("com.apple.provenance", b"left out"),
                ("mtime".to_owned(), b"1500000000.123456789".to_vec()),
            ],
            ..file("attributes", "x")
        },
        Spec {
            pax: vec![xattr("user.large", &[7; 60_000])],
            ..dir("large")
        },
        Spec {
            pax: vec![("mtime".to_owned(), b"-5.5".to_vec())],
            ..file("large/old", "")
        },
    ];
    let listing = import(&[specs], None);
    let seen = |path: &str| &listing[path.as_bytes()];
    let attributes = seen("attributes");
    assert_eq!(attributes.mtime, (1_500_000_000, 123_456_789));
    assert_eq!(attributes.xattrs.len(), 5, "{:?}", attributes.xattrs.keys());
    assert_eq!(attributes.xattrs[&b"user.note"[..]], b"a=b\nc");
    assert_eq!(attributes.xattrs[&b"system.posix_acl_access"[..]], acl);
    assert_eq!(seen("large").xattrs[&b"user.large"[..]], [7; 60_000]);
    assert_eq!(seen("large/old").mtime, (-6, 500_000_000));
}

fn plain(data: &str) -> Seen {
    Seen {
        kind: 'f',
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime: (1_700_000_000, 0),
        nlink: 1,
        xattrs: BTreeMap::new(),
        data: data.into(),
    }
}

#[test]
fn a_large_directory_spans_blocks() {
    let name = |index: u32| format!("many/{index:05}-{}", "n".repeat(index as usize % 240));
    let specs: Vec<_> = (0..3000).map(|index| file(&name(index), &index.to_string())).collect();
    let listing = import(&[specs], None);
    assert_eq!(listing.len(), 3002);
    assert_eq!(data(&listing, &name(2999)), "2999");
}

#[test]
fn names_that_sort_before_the_dots_are_in_order() {
    let specs = ["!", "+", "-", " ", "...", ".a", "a", "~", "\u{1}"].map(|name| file(name, name));
    let listing = import(&[specs.to_vec()], None);
    assert_eq!(listing.len(), 10);
}

#[test]
fn whiteouts_remove_what_is_below_and_only_that() {
    let base = vec![
        file("keep", "1"),
        file("gone", "1"),
        dir("tree"),
        file("tree/sub/leaf", "1"),
        dir("opaque"),
        file("opaque/old", "1"),
        file("opaque/sub/old", "1"),
        file("again", "1"),
        file("mixed/old", "1"),
    ];
    let above = vec![
        file(".wh.gone", ""),
        file(".wh.tree", ""),
        // Before and after the marker: both are of this layer.
        file("opaque/sub/before", "2"),
        file("opaque/.wh..wh..opq", ""),
        file("opaque/after", "2"),
        file("again", "2"),
        file(".wh.again", ""),
        file("mixed/new", "2"),
        file(".wh.mixed", ""),
        file(".wh.never", ""),
        file("nowhere/.wh.never", ""),
        file(".wh..wh.plnk", ""),
    ];
    let listing = import(&[base, above], None);
    let expected = [
        "again",
        "keep",
        "mixed",
        "mixed/new",
        "opaque",
        "opaque/after",
        "opaque/sub",
        "opaque/sub/before",
    ];
    assert_eq!(names(&listing), expected);
    assert_eq!(data(&listing, "again"), "2");
}

#[test]
fn entries_replace_what_they_fall_on() {
    let base = vec![
        dir("a"),
        file("a/inside", ""),
        file("b", "file"),
        symlink("c", "a"),
        Spec {
            mode: 0o700,
            ..dir("d")
        },
        file("d/inside", "stays"),
        file("e", "old"),
        hard_link("f", "e"),
    ];
    let above = vec![file("a", "now a file"), dir("b"), dir("c"), dir("d"), file("e", "new")];
    let listing = import(&[base, above], None);
    let kinds: String = ["a", "b", "c", "d", "e", "f"]
        .map(|name| listing[name.as_bytes()].kind)
        .iter()
        .collect();
    assert_eq!(kinds, "fdddff");
    assert_eq!(listing[&b"d"[..]].mode, 0o755);
    assert_eq!(data(&listing, "d/inside"), "stays");
    assert_eq!((data(&listing, "e"), data(&listing, "f")), ("new", "old"));
    assert_eq!((listing[&b"e"[..]].nlink, listing[&b"f"[..]].nlink), (1, 1));
    assert!(!listing.contains_key(&b"a/inside"[..]));
}

#[test]
fn parents_that_are_links_are_followed_inside_the_image_only() {
    let base = vec![
        dir("usr/lib"),
        symlink("lib", "usr/lib"),
        symlink("up", "../../../../etc"),
        symlink("absolute", "/usr/../usr/lib/"),
        symlink("host", "/proc/self/root/tmp"),
    ];
    let above = vec![
        file("lib/one", ""),
        file("up/two", ""),
        file("absolute/three", ""),
        file("/four", ""),
        file("host/basalt-test-escape", ""),
        hard_link("five", "lib/one"),
    ];
    let listing = import(&[base, above], None);
    let found: Vec<_> = names(&listing)
        .into_iter()
        .filter(|name| listing[name.as_bytes()].kind == 'f')
        .collect();
    assert_eq!(
        found,
        [
            "etc/two",
            "five",
            "four",
            "proc/self/root/tmp/basalt-test-escape",
            "usr/lib/one",
            "usr/lib/three"
        ]
    );
    assert!(!Path::new("/tmp/basalt-test-escape").exists());
}

#[test]
fn the_same_image_gives_the_same_bytes_whatever_the_container() {
    let layers = [
        build::layer(&[dir("d"), file("d/f", "1"), hard_link("g", "d/f")]),
        build::layer(&[file("h", "2")]),
    ];
    let oci = Files::oci(&layers, &[build::Store::Gzip]).to_tar();
    let first = convert_bytes(&oci, &Limits::default()).unwrap();
    assert_eq!(first, convert_bytes(&oci, &Limits::default()).unwrap());
    let plain = Files::oci(&layers, &[build::Store::Plain]).to_tar();
    let docker = Files::docker(&layers, &[build::Store::Plain], "a:b").to_tar();
    let second = convert_bytes(&plain, &Limits::default()).unwrap();
    let third = convert_bytes(&docker, &Limits::default()).unwrap();
    // Only the UUID, which is the digest's, and with it the checksum differ.
    for other in [second, third] {
        assert_eq!(first[1024 + 64..], other[1024 + 64..]);
        assert_ne!(first[1024 + 48..1024 + 64], other[1024 + 48..1024 + 64]);
    }
}
