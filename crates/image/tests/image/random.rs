//! Random trees in random layers: the image has in it what a simple model says, to our reader, `fsck.erofs` and the
//! kernel; and random damage never does worse than an error.

use std::collections::BTreeMap;

use image::{Limits, convert_bytes};
use tar::EntryType;

use crate::build::{self, Files, Spec, dir, file};
use crate::{Listing, Seen, check};

/// xorshift64*: enough for tests, and the seed reproduces a failure.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| u8::try_from(self.below(256)).unwrap()).collect()
    }

    fn name(&mut self) -> Vec<u8> {
        let len = if self.below(8) == 0 {
            1 + self.below(255)
        } else {
            1 + self.below(12)
        };
        let mut name = self.bytes(len);
        name.iter_mut()
            .for_each(|byte| *byte = if matches!(*byte, 0 | b'/') { b'_' } else { *byte });
        if name.starts_with(b".") { b"dot".to_vec() } else { name }
    }
}

/// A layer's worth of entries in directories of `model`, which is kept up to date.
fn grow(random: &mut Random, model: &mut Listing, count: u64) -> Vec<Spec> {
    let mut specs = Vec::new();
    for _ in 0..count {
        let directories: Vec<_> = model
            .iter()
            .filter(|(_, seen)| seen.kind == 'd')
            .map(|(path, _)| path)
            .collect();
        let parent = directories[usize::try_from(random.below(directories.len() as u64)).unwrap()].clone();
        let below = if parent.is_empty() {
            Vec::new()
        } else {
            [&parent[..], b"/"].concat()
        };
        let path = [below, random.name()].concat();
        if model.contains_key(&path) || path.len() > 2000 {
            continue;
        }
        let spec = entry(random, path.clone());
        model.insert(path, seen(&spec));
        specs.push(spec);
    }
    specs
}

fn entry(random: &mut Random, path: Vec<u8>) -> Spec {
    let owners = if random.below(4) == 0 { 1 << 32 } else { 1000 };
    let base = Spec {
        path,
        mode: u32::try_from(random.below(0o10000)).unwrap(),
        uid: random.below(owners),
        gid: random.below(100),
        mtime: if random.below(2) == 0 {
            1_700_000_000
        } else {
            random.below(1 << 32)
        },
        ..file("", "")
    };
    let kinds = [
        EntryType::Regular,
        EntryType::Regular,
        EntryType::Directory,
        EntryType::Symlink,
        EntryType::Char,
    ];
    let kind = kinds[usize::try_from(random.below(5)).unwrap()];
    let len = [0, 10, 4000, 4096, 9000][usize::try_from(random.below(5)).unwrap()];
    let mut spec = match kind {
        EntryType::Regular => Spec {
            kind,
            data: random.bytes(len),
            ..base
        },
        EntryType::Directory => Spec {
            kind,
            ..dir("").with(base)
        },
        EntryType::Symlink => Spec {
            kind,
            mode: 0o777,
            link: vec![b't'; 1 + usize::try_from(len / 3).unwrap()],
            ..base
        },
        _ => {
            let major = u32::try_from(random.below(4096)).unwrap();
            Spec {
                kind,
                device: (major, u32::try_from(random.below(1 << 20)).unwrap()),
                ..base
            }
        }
    };
    for index in 0..random.below(3) * random.below(2) {
        let longest = if random.below(10) == 0 { 5000 } else { 40 };
        let len = random.below(longest);
        spec.pax
            .push((format!("SCHILY.xattr.trusted.{index}"), random.bytes(len)));
    }
    spec
}

impl Spec {
    /// The owner and times of `base`.
    fn with(self, base: Spec) -> Spec {
        Spec {
            kind: self.kind,
            ..base
        }
    }
}

fn seen(spec: &Spec) -> Seen {
    let (kind, data) = match spec.kind {
        EntryType::Regular => ('f', spec.data.clone()),
        EntryType::Directory => ('d', Vec::new()),
        EntryType::Symlink => ('l', spec.link.clone()),
        _ => ('c', format!("{}:{}", spec.device.0, spec.device.1).into_bytes()),
    };
    let name = |key: &str| key.trim_start_matches("SCHILY.xattr.").as_bytes().to_vec();
    Seen {
        kind,
        mode: u16::try_from(spec.mode).unwrap(),
        uid: u32::try_from(spec.uid).unwrap(),
        gid: u32::try_from(spec.gid).unwrap(),
        mtime: (i64::try_from(spec.mtime).unwrap(), 0),
        nlink: 1,
        xattrs: spec.pax.iter().map(|(key, value)| (name(key), value.clone())).collect(),
        data,
    }
}

/// Removes some of `model`, as whiteouts of the next layer.
fn prune(random: &mut Random, model: &mut Listing) -> Vec<Spec> {
    let mut specs = Vec::new();
    for path in model.keys().cloned().collect::<Vec<_>>() {
        if path.is_empty() || !model.contains_key(&path) || random.below(12) > 0 {
            continue;
        }
        let cut = path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        if path.len() - cut > 251 {
            continue;
        }
        specs.push(Spec {
            path: [&path[..cut], b".wh.", &path[cut..]].concat(),
            ..file("", "")
        });
        let inside = [&path[..], b"/"].concat();
        model.retain(|other, _| *other != path && !other.starts_with(&inside));
    }
    specs
}

/// A second name for some files, in the last layer.
fn join(random: &mut Random, model: &mut Listing) -> Vec<Spec> {
    let files: Vec<_> = model
        .iter()
        .filter(|(_, seen)| seen.kind == 'f')
        .map(|(path, _)| path.clone())
        .collect();
    let mut specs = Vec::new();
    for (index, target) in files.into_iter().enumerate() {
        if random.below(8) == 0 {
            let path = format!("hard-link-{index}").into_bytes();
            let both = model.get_mut(&target).unwrap();
            both.nlink = 2;
            let both = both.clone();
            model.insert(path.clone(), both);
            specs.push(Spec {
                kind: EntryType::Link,
                path,
                link: target,
                ..file("", "")
            });
        }
    }
    specs
}

fn count_directories(model: &mut Listing) {
    let directories: Vec<_> = model
        .iter()
        .filter(|(_, seen)| seen.kind == 'd')
        .map(|(path, _)| path.clone())
        .collect();
    for path in &directories {
        let inside = |other: &&Vec<u8>| {
            let cut = other.iter().rposition(|&byte| byte == b'/');
            !other.is_empty() && &other[..cut.unwrap_or(0)] == path.as_slice()
        };
        let nlink = 2 + u32::try_from(directories.iter().filter(inside).count()).unwrap();
        model.get_mut(path).unwrap().nlink = nlink;
    }
}

#[test]
fn random_trees_come_out_as_they_went_in() {
    for seed in 1..=8 {
        let mut random = Random(seed * 0x9e37_79b9);
        let root = Spec { mtime: 0, ..dir("") };
        let mut model: Listing = BTreeMap::from([(Vec::new(), seen(&root))]);
        let mut layers = Vec::new();
        for _ in 0..3 {
            let mut specs = prune(&mut random, &mut model);
            specs.extend(grow(&mut random, &mut model, 40 * seed));
            layers.push(build::layer(&specs));
        }
        layers.push(build::layer(&join(&mut random, &mut model)));
        count_directories(&mut model);
        let stores = [build::Store::Gzip, build::Store::Plain, build::Store::Zstd];
        let archive = Files::oci(&layers, &stores).to_tar();
        let image = convert_bytes(&archive, &Limits::default()).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), image).unwrap();
        eprintln!("seed {seed}: {} paths", model.len());
        check(file.path(), &model);
    }
}

#[test]
fn random_damage_is_an_error_or_harmless() {
    let mut random = Random(77);
    let mut model: Listing = BTreeMap::from([(Vec::new(), seen(&dir("")))]);
    let layer = build::layer(&grow(&mut random, &mut model, 60));
    // Without digests in the way: damage reaches the tar reader and the tree. Wrong diff_ids are found at the end.
    let whole = Files::docker(&[layer], &[build::Store::Plain], "a:b").to_tar();
    let mut errors = 0;
    for _ in 0..400 {
        let mut damaged = whole.clone();
        for _ in 0..=random.below(3) {
            let at = usize::try_from(random.below(damaged.len() as u64)).unwrap();
            // Headers are where it matters: half of the damage goes into the first bytes of a block.
            let at = if random.below(2) == 0 {
                at / 512 * 512 + at % 160
            } else {
                at
            };
            let len = damaged.len();
            damaged[at.min(len - 1)] = u8::try_from(random.below(256)).unwrap();
        }
        errors += u32::from(convert_bytes(&damaged, &Limits::default()).is_err());
    }
    assert!(errors > 300, "only {errors} of 400 damaged images were refused");
}
