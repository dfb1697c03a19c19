//! Damaged, absurd and hostile images: each is refused with its own error, and nothing of it is kept.

use std::fs;
use std::path::Path;

use image::{Error, Limits, Store, convert_bytes};
use tar::EntryType;

use crate::build::{self, Files, Spec, dir, file, hard_link, link, symlink};
use crate::kernel::with_own_mounts;

fn refused(files: &Files) -> Error {
    let error = convert_bytes(&files.to_tar(), &Limits::default())
        .map(|_| ())
        .expect_err("the image is bad");
    // The message has a cause in it or a next step, and no debug formatting of ours.
    assert!(
        error.to_string().len() > 20 && !error.to_string().contains("Error"),
        "{error}"
    );
    error
}

fn refused_layer(specs: &[Spec]) -> Error {
    refused(&Files::oci(&[build::layer(specs)], &[build::Store::Plain]))
}

/// Text that compresses to much more than the documents' size.
fn noise(len: u64) -> String {
    let mut state = 1u64;
    let letters = (0..len).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        char::from(b'a' + u8::try_from(state >> 33 & 15).unwrap())
    });
    letters.collect()
}

fn good() -> Files {
    Files::oci(&[build::layer(&[file("a", &noise(2000))])], &[build::Store::Gzip])
}

#[test]
fn a_changed_layer_is_found_by_its_digest() {
    let mut files = good();
    let name = files.largest();
    files.0.get_mut(&name).unwrap()[30] ^= 1;
    assert!(matches!(refused(&files), Error::DigestMismatch { what, .. } if what.starts_with("layer sha256:")));
}

#[test]
fn a_shortened_layer_is_found_by_its_size() {
    let mut files = good();
    let name = files.largest();
    files.0.get_mut(&name).unwrap().pop();
    assert!(matches!(refused(&files), Error::SizeMismatch { .. }));
}

#[test]
fn a_changed_document_is_found_by_its_digest() {
    let mut files = good();
    files.edit("\"serve\"", "\"swerv\"");
    assert!(matches!(refused(&files), Error::DigestMismatch { what, .. } if what.starts_with("config ")));
    let mut files = good();
    files.edit("\"config\":{\"mediaType\"", "\"cnofig\":{\"mediaType\"");
    assert!(matches!(refused(&files), Error::DigestMismatch { what, .. } if what.starts_with("manifest ")));
}

#[test]
fn a_wrong_diff_id_is_found() {
    let layer = build::layer(&[file("a", "x")]);
    let mut files = Files::docker(&[layer], &[build::Store::Gzip], "a:b");
    let other = build::compressed(&build::layer(&[file("a", "y")]), build::Store::Gzip);
    files.0.insert("layer0/layer.tar".to_owned(), other);
    let error = refused(&files);
    assert!(
        matches!(&error, Error::DigestMismatch { what, .. } if what.contains("decompressed layer")),
        "{error}"
    );
}

#[test]
fn a_missing_layer_is_named() {
    let mut files = good();
    let name = files.largest();
    files.0.remove(&name);
    assert!(matches!(refused(&files), Error::MissingBlob { name: missing } if missing == name));
}

#[test]
fn documents_that_contradict_themselves_are_refused() {
    for (from, to) in [
        ("\"config\":\"sha256:", "\"config\":\"sha512:"),
        ("{\"schemaVersion\"", "{{"),
    ] {
        let mut files = good();
        let index = String::from_utf8(files.0["index.json"].clone()).unwrap();
        let index = index
            .replace(from, to)
            .replace("\"digest\":\"sha256:", "\"digest\":\"sha512:");
        files.0.insert("index.json".to_owned(), index.into_bytes());
        assert!(matches!(
            refused(&files),
            Error::BadJson { .. } | Error::UnsupportedDigest { .. }
        ));
    }
    let layer = build::layer(&[file("a", "")]);
    let mut files = Files::docker(&[layer.clone(), layer], &[build::Store::Plain], "a:b");
    files.edit("\"layer0/layer.tar\",", "");
    assert!(matches!(refused(&files), Error::BadDocument { problem, .. } if problem == "2 diff_ids for 1 layers"));
    let mut files = good();
    files.0.insert("index.json".to_owned(), vec![b' '; 5 << 20]);
    assert!(matches!(refused(&files), Error::TooLarge { .. }));
}

#[test]
fn unsupported_media_types_are_named() {
    let mut files = good();
    files.edit("image.manifest.v1+json", "artifact.manifest.v1+json");
    assert!(matches!(refused(&files), Error::UnsupportedMediaType { .. }));
    let xz = Files::docker(&[build::layer(&[])], &[build::Store::Plain], "a:b");
    let mut xz = Files(xz.0.into_iter().collect());
    xz.0.insert("layer0/layer.tar".to_owned(), b"\xfd7zXZ\0\0\0".to_vec());
    assert!(matches!(refused(&xz), Error::UnsupportedMediaType { media_type, .. } if media_type == "xz"));
}

#[test]
fn the_image_for_this_platform_is_selected_or_there_is_none() {
    let layer = |name| [build::layer(&[file(name, "")])];
    let mut files = Files::default();
    let arm = files.add_manifest(&layer("arm"), &[build::Store::Plain], "arm64");
    let amd = files.add_manifest(&layer("amd"), &[build::Store::Plain], "amd64");
    let second = files.add_manifest(&layer("amd2"), &[build::Store::Plain], "amd64");
    files.set_index(&[arm.clone(), amd.clone()]);
    let image = convert_bytes(&files.to_tar(), &Limits::default()).unwrap();
    assert!(crate::reader::list(&image).contains_key(&b"amd"[..]));
    files.set_index(std::slice::from_ref(&arm));
    assert!(matches!(refused(&files), Error::WrongPlatform { found } if found == "linux/arm64"));
    // A config says it too, where the index does not.
    files.set_index(&[arm.replace("arm64", "amd64")]);
    assert!(matches!(refused(&files), Error::WrongPlatform { found } if found == "linux/arm64"));
    files.set_index(&[amd, second]);
    assert!(matches!(refused(&files), Error::SeveralImages { count: 2, .. }));
}

#[test]
fn names_that_lead_out_are_refused() {
    for path in ["../out", "a/../../out", "a/..", ".."] {
        assert!(
            matches!(refused_layer(&[file(path, "")]), Error::BadName { .. }),
            "{path}"
        );
    }
    assert!(matches!(refused_layer(&[file("a/.wh..", "")]), Error::BadName { .. }));
    assert!(matches!(refused_layer(&[file("a/.wh.", "")]), Error::BadName { .. }));
    assert!(matches!(refused_layer(&[file(".", "")]), Error::BadName { .. }));
    assert!(matches!(
        refused_layer(&[file(&"n".repeat(256), "")]),
        Error::BadName { .. }
    ));
    let nul = Spec {
        pax: vec![("path".to_owned(), b"a\0b".to_vec())],
        ..file("x", "")
    };
    assert!(matches!(refused_layer(&[nul]), Error::BadName { .. }));
    let out = hard_link("a", "../../etc/passwd");
    assert!(matches!(refused_layer(&[out]), Error::BadName { .. }));
}

#[test]
fn links_that_cannot_be_are_refused() {
    assert!(matches!(
        refused_layer(&[hard_link("a", "b")]),
        Error::BadHardLink { .. }
    ));
    assert!(matches!(
        refused_layer(&[dir("b"), hard_link("a", "b")]),
        Error::BadHardLink { .. }
    ));
    assert!(matches!(
        refused_layer(&[symlink("a", "b"), symlink("b", "a"), file("a/x", "")]),
        Error::SymlinkLoop { .. }
    ));
    assert!(matches!(
        refused_layer(&[symlink("a", "a/a"), file("a/x", "")]),
        Error::SymlinkLoop { .. }
    ));
    assert!(matches!(
        refused_layer(&[file("a", ""), file("a/x", "")]),
        Error::NotADirectory { .. }
    ));
    assert!(matches!(
        refused_layer(&[symlink("a", "")]),
        Error::UnsupportedEntry { .. }
    ));
    let twice = [symlink("a", "b"), symlink("b", "a"), file("a/x", "")];
    assert!(refused_layer(&twice).to_string().ends_with("build it again"));
}

#[test]
fn entries_that_cannot_be_kept_are_refused() {
    let device = Spec {
        kind: EntryType::Char,
        device: (4096, 0),
        ..file("a", "")
    };
    assert!(matches!(refused_layer(&[device]), Error::UnsupportedEntry { .. }));
    let odd = link(EntryType::new(b'V'), "label", "");
    let refused = refused_layer(&[odd]);
    assert!(matches!(refused, Error::UnsupportedEntry { .. }));
    assert!(refused.to_string().ends_with("build the image without it"), "{refused}");
    let sparse = link(EntryType::GNUSparse, "sparse", "");
    assert!(matches!(refused_layer(&[sparse]), Error::BadTar { .. }));
}

#[test]
fn a_header_that_claims_more_than_there_is_is_refused() {
    let mut layer = build::layer(&[file("a", "short")]);
    let mut header = tar::Header::new_ustar();
    header.set_path("a").unwrap();
    header.set_size(8 << 30);
    header.set_cksum();
    layer[..512].copy_from_slice(header.as_bytes());
    let error = refused(&Files::oci(&[layer.clone()], &[build::Store::Plain]));
    assert!(
        matches!(error, Error::Truncated { missing, .. } if missing > 8_000_000_000),
        "{error}"
    );
    header.set_entry_type(EntryType::XHeader);
    header.set_cksum();
    layer[..512].copy_from_slice(header.as_bytes());
    assert!(matches!(
        refused(&Files::oci(&[layer], &[build::Store::Plain])),
        Error::TooLarge { .. }
    ));
}

#[test]
fn damaged_tar_headers_are_refused() {
    let mut layer = build::layer(&[file("a", ""), file("b", "")]);
    layer[512 + 100] ^= 1;
    assert!(matches!(
        refused(&Files::oci(&[layer], &[build::Store::Gzip])),
        Error::BadTar { at: 512, .. }
    ));
    for pax in [
        "8 path=a\n",
        "99 path=abc\n",
        "x path=a\n",
        "7 path\n\n",
        "12 size=abc\n",
        "14 size=-1234\n",
    ] {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(EntryType::XHeader);
        header.set_size(pax.len() as u64);
        header.set_cksum();
        builder.append(&header, pax.as_bytes()).unwrap();
        let layer = builder.into_inner().unwrap();
        assert!(
            matches!(
                refused(&Files::oci(&[layer], &[build::Store::Plain])),
                Error::BadTar { .. }
            ),
            "{pax:?}"
        );
    }
}

#[test]
fn damaged_compression_is_refused_also_where_no_digest_tells() {
    let layer = build::layer(&[file("a", &"0123456789".repeat(5000))]);
    for store in [build::Store::Gzip, build::Store::Zstd] {
        let whole = Files::docker(std::slice::from_ref(&layer), &[store], "a:b");
        let len = whole.0["layer0/layer.tar"].len();
        for cut in [10, len / 2, len - 1] {
            let mut files = whole.clone();
            files.0.get_mut("layer0/layer.tar").unwrap().truncate(cut);
            let error = refused(&files);
            assert!(
                matches!(
                    error,
                    Error::Truncated { .. } | Error::BadCompression { .. } | Error::DigestMismatch { .. }
                ),
                "{store:?} cut at {cut}: {error}"
            );
        }
        let mut files = whole.clone();
        files.0.get_mut("layer0/layer.tar").unwrap()[len / 2] ^= 0x55;
        refused(&files);
    }
}

#[test]
fn each_limit_holds() {
    let many: Vec<_> = (0..20)
        .map(|index| file(&format!("d/{index}"), &"x".repeat(1000)))
        .collect();
    let tar = Files::oci(&[build::layer(&many), build::layer(&[])], &[build::Store::Gzip]).to_tar();
    let default = Limits::default();
    assert!(convert_bytes(&tar, &default).is_ok());
    for (limits, found) in [
        (Limits { layers: 1, ..default }, 2),
        (Limits { entries: 19, ..default }, 20),
        (Limits { path: 3, ..default }, 4),
        (Limits { depth: 1, ..default }, 2),
    ] {
        let error = convert_bytes(&tar, &limits).unwrap_err();
        assert!(
            matches!(error, Error::TooLarge { found: number, .. } if number == found),
            "{error}"
        );
    }
    let limits = Limits {
        uncompressed: 20_000,
        ..default
    };
    assert!(matches!(
        convert_bytes(&tar, &limits),
        Err(Error::TooLarge {
            found: 20_001..,
            limit: 20_000,
            ..
        })
    ));
    let xattr = |size| ("SCHILY.xattr.user.a".to_owned(), vec![1; size]);
    let large = Spec {
        pax: vec![xattr(65536)],
        ..file("a", "")
    };
    assert!(matches!(
        refused_layer(&[large]),
        Error::TooLarge {
            found: 65536,
            limit: 65535,
            ..
        }
    ));
    let many = Spec {
        pax: vec![xattr(40_000), xattr(40_000)],
        ..file("a", "")
    };
    assert!(matches!(refused_layer(&[many]), Error::TooLarge { .. }));
    assert!(matches!(
        refused_layer(&[symlink("a", &"t".repeat(4096))]),
        Error::TooLarge { .. }
    ));
}

#[test]
fn what_is_no_image_is_said_to_be_none() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(&temp.path().join("store")).unwrap();
    let import = |path: &Path| store.import(path, None, &mut |_| {}).unwrap_err();
    let text = temp.path().join("text");
    fs::write(&text, "hello, this is no image").unwrap();
    let empty = temp.path().join("empty.tar");
    fs::write(&empty, "").unwrap();
    let other = temp.path().join("other.tar.gz");
    fs::write(
        &other,
        build::compressed(&build::layer(&[file("a", "b")]), build::Store::Gzip),
    )
    .unwrap();
    for path in [&text, &empty, &other, temp.path(), Path::new("/dev/null")] {
        assert!(matches!(import(path), Error::NotAnImage { .. }), "{}", path.display());
    }
    assert!(matches!(import(Path::new("/nowhere")), Error::NoSource { .. }));
    let mut whole = good().to_tar();
    whole.truncate(whole.len() / 2 / 512 * 512 + 100);
    let cut = temp.path().join("cut.tar");
    fs::write(&cut, whole).unwrap();
    assert!(matches!(import(&cut), Error::Truncated { .. }));
    assert_eq!(store.list().unwrap().images, []);
    assert_eq!(fs::read_dir(temp.path().join("store/tmp")).unwrap().count(), 0);
}

#[test]
fn a_full_disk_is_an_error_that_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let layer = build::layer(&[file("a", &noise(400_000).repeat(4))]);
    let oci = Files::oci(&[layer], &[build::Store::Gzip]).to_dir(&temp.path().join("oci"));
    let small = temp.path().join("small");
    fs::create_dir(&small).unwrap();
    let tried = with_own_mounts(|| {
        // Too small for the spool; too small for the image beside it; large enough.
        ["1m", "2m", "8m"].map(|size| {
            let options = std::ffi::CString::new(format!("size={size}")).unwrap();
            let flags = rustix::mount::MountFlags::empty();
            rustix::mount::mount("tmpfs", &small, "tmpfs", flags, options.as_c_str()).unwrap();
            let store = Store::open(&small).unwrap();
            let result = store.import(&oci, None, &mut |_| {});
            let left = ["tmp", "blobs"].map(|name| fs::read_dir(small.join(name)).unwrap().count());
            rustix::mount::unmount(&small, rustix::mount::UnmountFlags::DETACH).unwrap();
            (result.map(|image| image.size), left)
        })
    });
    let [spool, image, enough] = tried.expect("this test makes a small tmpfs: run it as root");
    assert!(
        matches!(
            spool.0,
            Err(Error::NoSpace {
                action: "unpack a layer",
                ..
            })
        ),
        "{:?}",
        spool.0
    );
    assert!(
        matches!(image.0, Err(Error::NoSpace { action: "write", .. })),
        "{:?}",
        image.0
    );
    assert_eq!((spool.1, image.1), ([0, 0], [0, 0]));
    assert_eq!((enough.0.unwrap() > 1_600_000, enough.1), (true, [0, 2]));
}
