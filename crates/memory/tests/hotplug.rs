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
}

fn it_costs_nothing_before_it_is_touched_and_goes_back() {
    let before = resident();
    let large = MemorySize {
        boot: ByteSize::mib(64),
        hotplug: ByteSize::gib(64),
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
