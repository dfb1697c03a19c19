//! Memory that can be plugged while the guest runs: addresses alone before it is touched, a hole in a snapshot's files where nothing is in
//! it, and gone from the host when it is discarded. A test binary of its own, as it looks at how much memory its process has.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use base::ByteSize;
use memory::layout::{MemorySize, Range};
use memory::{Image, Layer, Layers, MemoryError, Ram, Written, discard};
use vm_memory::{Bytes, GuestAddress};

const SIZE: MemorySize = MemorySize {
    boot: ByteSize::mib(64),
    hotplug: ByteSize::mib(256),
    hotplug_region: ByteSize(0),
};
const START: u64 = 4 << 30;
const MIB: u64 = 1 << 20;

fn pagemap() -> Option<File> {
    Some(File::open("/proc/self/pagemap").unwrap())
}

/// Bytes of the process's own memory, of which pages of files are none.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn put(ram: &Ram, place: u64, value: u64) {
    ram.guest().write_obj(value, GuestAddress(place)).unwrap();
}

fn word(ram: &Ram, place: u64) -> u64 {
    ram.guest().read_obj(GuestAddress(place)).unwrap()
}

fn layer(file: &File, image: Image) -> Layer {
    Layer {
        file: Arc::new(file.try_clone().unwrap()),
        image,
    }
}

/// One after the other: each looks at the whole process.
#[test]
fn hot_pluggable_memory_is_there_when_it_is_touched() {
    it_costs_nothing_before_it_is_touched_and_goes_back();
    it_is_a_hole_in_the_files_of_a_snapshot_and_comes_along();
    files_without_it_are_refused();
    files_of_before_it_could_be_plugged_lie_below();
}

fn it_costs_nothing_before_it_is_touched_and_goes_back() {
    let before = resident();
    let large = MemorySize {
        boot: ByteSize::mib(64),
        hotplug: ByteSize::gib(64),
        hotplug_region: ByteSize(0),
    };
    let ram = Ram::allocate(large).unwrap();
    assert_eq!((ram.size(), ram.sizes()), (large.boot, large));
    let region = ram.hotplug().unwrap();
    assert_eq!((region.start, region.length), (START, 64 << 30));
    assert!(
        ram.guest()
            .write_obj(1_u8, GuestAddress(START + region.length))
            .is_err()
    );
    assert!(ram.guest().read_obj::<u8>(GuestAddress(START - 1)).is_err());
    assert!(resident() < before + 8 * MIB, "{} more", resident() - before);
    for place in 0..64 {
        put(&ram, START + place * MIB, 1);
    }
    let touched = resident();
    assert!(touched > before, "nothing was touched");
    let run = Range {
        start: START,
        length: 64 * MIB,
    };
    discard(ram.guest(), run).unwrap();
    assert!(
        resident() < before + 8 * MIB,
        "{} of {} more stay",
        resident() - before,
        touched - before
    );
    assert_eq!(word(&ram, START + 5 * MIB), 0);
}

fn it_is_a_hole_in_the_files_of_a_snapshot_and_comes_along() {
    let ram = Ram::allocate(SIZE).unwrap();
    put(&ram, 0x7000, 7);
    let (first, second) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    // Nothing is plugged.
    let image = ram.write_image(&first, pagemap().as_ref()).unwrap();
    let metadata = first.metadata().unwrap();
    assert_eq!((metadata.len(), image.pages), (320 << 20, 1));
    assert!(metadata.blocks() * 512 <= 64 << 10, "{}", metadata.blocks());
    let layers = Layers::single(Arc::new(first.try_clone().unwrap()), image);
    let clone = Ram::from_layers(layers.clone(), SIZE).unwrap();
    assert_eq!((word(&clone, 0x7000), word(&clone, START)), (7, 0));
    // What the clone plugs is part of what has changed.
    put(&clone, START + 6 * MIB, 6);
    put(&clone, START + 200 * MIB, 200);
    let Written::Changes(image, runs) = clone.write_changes(&second, pagemap().as_ref()).unwrap() else {
        panic!("all of it was written");
    };
    let page = |place: u64| (64 * MIB + place) / 4096;
    assert_eq!(runs, [(page(6 * MIB), 1), (page(200 * MIB), 1)]);
    let layers = layers.with(layer(&second, image), &runs);
    let mut third = Ram::from_layers(layers.clone(), SIZE).unwrap();
    let words = |ram: &Ram| [0x7000, START + 6 * MIB, START + 200 * MIB, START].map(|place| word(ram, place));
    assert_eq!(words(&third), [7, 6, 200, 0]);
    // Put back, it is what it was, whatever was plugged, unplugged and discarded since.
    for pagemap in [pagemap(), None] {
        put(&third, START + 6 * MIB, 66);
        put(&third, START + 100 * MIB, 1);
        let run = Range {
            start: START + 200 * MIB,
            length: 2 * MIB,
        };
        discard(third.guest(), run).unwrap();
        third.drop_changes(pagemap.as_ref()).unwrap();
        assert_eq!(words(&third), [7, 6, 200, 0]);
        assert_eq!(word(&third, START + 100 * MIB), 0);
    }
    third.rebase(layers).unwrap();
    assert_eq!(words(&third), [7, 6, 200, 0]);
}

fn files_of_before_it_could_be_plugged_lie_below() {
    let kept = MemorySize {
        boot: ByteSize::mib(64),
        hotplug: ByteSize(0),
        hotplug_region: ByteSize::gib(128),
    };
    let (first, second) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    // A guest that has plugged nothing of what it could is saved as one that could not.
    let ram = Ram::allocate(kept.with_hotplug(ByteSize::mib(128))).unwrap();
    put(&ram, 0x7000, 7);
    let saved = ram.without_hotplug().unwrap().unwrap();
    assert_eq!((saved.sizes(), saved.regions().len()), (kept, 1));
    let image = saved.write_image(&first, pagemap().as_ref()).unwrap();
    assert_eq!((first.metadata().unwrap().len(), image.pages), (64 << 20, 1));
    let layers = Layers::single(Arc::new(first.try_clone().unwrap()), image);
    // Whoever goes on from that has as much as it likes.
    let before = resident();
    for gib in [1, 64] {
        let clone = Ram::from_layers(layers.clone(), kept).unwrap();
        let clone = clone.with_hotplug(ByteSize::gib(gib)).unwrap();
        let range = clone.hotplug().unwrap();
        assert_eq!((range.start, range.length), (START, gib << 30));
        assert_eq!((word(&clone, 0x7000), word(&clone, START + (gib << 29))), (7, 0));
        assert!(clone.clone().with_hotplug(ByteSize::gib(2)).is_err(), "it has some");
        assert!(clone.without_hotplug().unwrap().is_some(), "its file has none of it");
        assert!(resident() < before + 8 * MIB, "{} more", resident() - before);
    }
    let clone = Ram::from_layers(layers.clone(), kept).unwrap();
    assert!(
        clone.clone().with_hotplug(ByteSize::gib(256)).is_err(),
        "there are no addresses"
    );
    let mut clone = clone.with_hotplug(ByteSize::mib(256)).unwrap();
    put(&clone, 0x9000, 9);
    put(&clone, START + 6 * MIB, 6);
    for place in (START + 8 * MIB..START + 10 * MIB).step_by(4096) {
        put(&clone, place, place);
    }
    let Written::Changes(image, runs) = clone.write_changes(&second, pagemap().as_ref()).unwrap() else {
        panic!("all of it was written");
    };
    let page = |place: u64| (64 * MIB + place) / 4096;
    // With huge pages of the host's, all of one.
    let (first_run, plugged) = runs.split_first().unwrap();
    let has = |place: u64| {
        plugged
            .iter()
            .any(|(first, pages)| (*first..first + pages).contains(&page(place)))
    };
    assert_eq!((*first_run, plugged[0].0), ((9, 1), page(6 * MIB)));
    assert!(has(8 * MIB) && has(10 * MIB - 1) && !has(10 * MIB), "{runs:?}");
    let layers = layers.with(layer(&second, image), &runs);
    let size = clone.sizes();
    layers.check_content(size).unwrap();
    let words = |ram: &Ram| [0x7000, 0x9000, START + 6 * MIB, START + 9 * MIB, START].map(|place| word(ram, place));
    let all = [7, 9, 6, START + 9 * MIB, 0];
    assert_eq!(words(&Ram::from_layers(layers.clone(), size).unwrap()), all);
    clone.rebase(layers.clone()).unwrap();
    assert_eq!(words(&clone), all);
    assert!(clone.without_hotplug().unwrap().is_none(), "a file has some of it");
    for pagemap in [pagemap(), None] {
        put(&clone, START + 6 * MIB, 66);
        put(&clone, START + 100 * MIB, 1);
        clone.drop_changes(pagemap.as_ref()).unwrap();
        assert_eq!((words(&clone), word(&clone, START + 100 * MIB)), (all, 0));
    }
    // Cut off where it begins that can be plugged, the newest file is none.
    second.set_len(64 << 20).unwrap();
    assert!(matches!(layers.check_content(size), Err(MemoryError::ImageSize { .. })));
}

/// A machine goes on from the file of a guest with nothing plugged that it was itself.
#[test]
fn one_with_nothing_plugged_is_mapped_from_a_file_without_it() {
    let size = MemorySize::from(ByteSize::mib(64)).with_hotplug(ByteSize::mib(128));
    let mut ram = Ram::allocate(size).unwrap();
    put(&ram, 0x7000, 7);
    let file = tempfile::tempfile().unwrap();
    let saved = ram.without_hotplug().unwrap().unwrap();
    let image = saved.write_image(&file, None).unwrap();
    ram.rebase(Layers::single(Arc::new(file), image)).unwrap();
    put(&ram, START + 4 * MIB, 4);
    put(&ram, 0x8000, 8);
    ram.drop_changes(pagemap().as_ref()).unwrap();
    let words = [0x7000, 0x8000, START + 4 * MIB, START + 127 * MIB].map(|place| word(&ram, place));
    assert_eq!(words, [7, 0, 0, 0]);
}

fn files_without_it_are_refused() {
    let file = tempfile::tempfile().unwrap();
    let image = Ram::allocate(SIZE.boot).unwrap().write_image(&file, None).unwrap();
    let layers = Layers::single(Arc::new(file), image);
    let error = Ram::from_layers(layers.clone(), SIZE).unwrap_err();
    assert!(
        matches!(error, MemoryError::ImageSize { expected, .. } if expected == 320 << 20),
        "{error}"
    );
    assert!(Ram::from_layers(layers, SIZE.boot).unwrap().hotplug().is_none());
}
