//! Nothing that is in memory that came zeroed is lost, whatever the page map says of it, and nothing of it outlives what takes its place.

use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use base::ByteSize;
use rustix::fs::Mode;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::layout::{self, MemorySize};
use crate::{Layer, Pins, Written, discard};

const MIB: u64 = 1 << 20;
const BOOT: u64 = 64 * MIB;
const START: u64 = 4 << 30;
const PIECE_PAGES: u64 = ZEROED_PIECE / PAGE as u64;

fn size() -> MemorySize {
    MemorySize::from(ByteSize(BOOT)).with_hotplug(ByteSize(2 * ZEROED_PIECE))
}

fn zeroed() -> File {
    let file = File::from(rustix::fs::memfd_create("zeroed", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(ZEROED_PIECE).unwrap();
    file
}

fn pagemap() -> File {
    File::open("/proc/self/pagemap").unwrap()
}

fn put(ram: &Ram, place: u64, value: u64) {
    ram.guest().write_obj(value, GuestAddress(place)).unwrap();
}

fn word(ram: &Ram, place: u64) -> u64 {
    ram.guest().read_obj(GuestAddress(place)).unwrap()
}

/// This process's page tables have nothing of the piece any more, as of pages that were swapped out or are another mapping's.
#[allow(unsafe_code, reason = "a part of a region is forgotten by address")]
fn forget(ram: &Ram, piece: u64) {
    let place = ram.piece(piece).unwrap();
    let (region, at) = ram.at(place).unwrap();
    let address = region.as_ptr().wrapping_add(at);
    let bytes = usize::try_from(ZEROED_PIECE).unwrap();
    // SAFETY: it is a part of the region's mapping, to which nobody has a reference.
    unsafe { madvise(address.cast(), bytes, Advice::LinuxDontNeed) }.unwrap();
    let mut entries = vec![0; 8 * usize::try_from(PIECE_PAGES).unwrap()];
    let first = address.addr() as u64 / PAGE as u64;
    pagemap().read_exact_at(&mut entries, first * 8).unwrap();
    let touched = entries.chunks(8).filter(|entry| entry[7] & 0xc0 != 0).count();
    assert_eq!(touched, 0, "the page map still tells of it");
}

/// Memory that was saved with these words, mapped from the file.
fn saved(words: &[(u64, u64)]) -> Ram {
    let ram = Ram::allocate(size()).unwrap();
    words.iter().for_each(|(place, value)| put(&ram, *place, *value));
    let file = Arc::new(tempfile::tempfile().unwrap());
    let image = ram.write_image(&file, Some(&pagemap())).unwrap();
    Ram::from_layers(Layers::single(file, image), size()).unwrap()
}

/// Memory that was saved when nothing was plugged, by one that had something in pages that it boots with alone.
fn saved_without() -> Ram {
    let ram = Ram::allocate(size()).unwrap();
    put(&ram, 0x7000, 7);
    let file = Arc::new(tempfile::tempfile().unwrap());
    let image = ram
        .without_hotplug()
        .unwrap()
        .unwrap()
        .write_image(&file, Some(&pagemap()));
    let sizes = MemorySize {
        hotplug: ByteSize(0),
        ..size()
    };
    let ram = Ram::from_layers(Layers::single(file, image.unwrap()), sizes).unwrap();
    ram.with_hotplug(ByteSize(2 * ZEROED_PIECE)).unwrap()
}

/// Writes what has changed to another file; the files then, and which runs.
fn changes(ram: &Ram) -> (Layers, Vec<(u64, u64)>) {
    let file = Arc::new(tempfile::tempfile().unwrap());
    match ram.write_changes(&file, Some(&pagemap())).unwrap() {
        Written::Whole(_) => panic!("all of it was written"),
        Written::Changes(image, runs) => (ram.layers().unwrap().with(Layer { file, image }, &runs), runs),
    }
}

#[test]
fn all_of_it_is_the_file_and_nothing_else_is() {
    let (ram, file) = (Ram::allocate(size()).unwrap(), zeroed());
    let places = [BOOT - 8, START + ZEROED_PIECE - 8, START + 2 * ZEROED_PIECE - 8];
    places.iter().for_each(|place| put(&ram, *place, 5));
    ram.place_zeroed(START + ZEROED_PIECE, &file).unwrap();
    assert_eq!(places.map(|place| word(&ram, place)), [5, 5, 0]);
    put(&ram, START + ZEROED_PIECE + 8, 6);
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, 8).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 6);
    drop(file);
    assert_eq!(word(&ram, START + ZEROED_PIECE + 8), 6, "it need not stay open");
}

#[test]
fn what_the_page_map_does_not_tell_is_written() {
    for ram in [Ram::allocate(size()).unwrap(), saved(&[(START + 8, 1)])] {
        ram.place_zeroed(START, &zeroed()).unwrap();
        put(&ram, START + 3 * MIB, 3);
        put(&ram, START + ZEROED_PIECE - 8, 4);
        forget(&ram, START);
        let file = Arc::new(tempfile::tempfile().unwrap());
        let image = ram.write_image(&file, Some(&pagemap())).unwrap();
        assert_eq!(image.pages, 2);
        let copy = Ram::from_layers(Layers::single(file, image), size()).unwrap();
        let words = [START + 3 * MIB, START + ZEROED_PIECE - 8, START + 8].map(|place| word(&copy, place));
        assert_eq!(words, [3, 4, 0]);
    }
}

#[test]
fn all_of_it_has_changed_since_a_snapshot() {
    for ram in [saved(&[(START + 8, 1), (0x7000, 7)]), saved_without()] {
        ram.place_zeroed(START, &zeroed()).unwrap();
        // One that the page tables do not have, and one that is a file's.
        put(&ram, START + 3 * MIB, 3);
        forget(&ram, START);
        put(&ram, START + 5 * MIB, 5);
        put(&ram, START + ZEROED_PIECE + MIB, 9);
        let (layers, _) = changes(&ram);
        let copy = Ram::from_layers(layers, size()).unwrap();
        let places = [0, 3 * MIB, 5 * MIB, 8, ZEROED_PIECE + MIB].map(|place| START + place);
        assert_eq!(places.map(|place| word(&copy, place)), [0, 3, 5, 0, 9]);
        assert_eq!(word(&copy, 0x7000), 7);
    }
}

#[test]
fn what_a_guest_writes_soon_is_told_without_it() {
    let ram = saved(&[(0x7000, 7)]);
    put(&ram, 0x9000, 9);
    put(&ram, BOOT - 8, 9);
    ram.place_zeroed(START, &zeroed()).unwrap();
    put(&ram, START, 5);
    let last = BOOT / PAGE as u64 - 1;
    let runs = ram.write_set(Some(&pagemap()), 1 << 20).unwrap();
    assert_eq!(runs, [(9, 1), (last, 1)]);
}

#[test]
fn a_rollback_has_what_was_there_before_again() {
    let with = saved(&[(START + 8, 1), (START + ZEROED_PIECE + 8, 2)]);
    put(&with, START + 6 * MIB, 6);
    let (layers, _) = changes(&with);
    let layered = Ram::from_layers(layers, size()).unwrap();
    let places = [0x7000, START + 8, START + 6 * MIB, START + ZEROED_PIECE + 8];
    for (ram, before) in [
        (with, [0, 1, 0, 2]),
        (layered, [0, 1, 6, 2]),
        (saved_without(), [7, 0, 0, 0]),
    ] {
        for pagemap in [Some(pagemap()), None] {
            ram.place_zeroed(START, &zeroed()).unwrap();
            places.iter().for_each(|place| put(&ram, *place, 99));
            put(&ram, START + 60 * MIB, 99);
            ram.drop_changes(pagemap.as_ref()).unwrap();
            assert_eq!(places.map(|place| word(&ram, place)), before);
            assert_eq!(word(&ram, START + 60 * MIB), 0);
            assert!(!ram.zeroed.overlaps(0..u64::MAX), "it is still taken for one");
        }
        // What changes from here on is told by the page map again.
        put(&ram, START + 8, 5);
        let (_, runs) = changes(&ram);
        let pages: u64 = runs.iter().map(|(_, pages)| pages).sum();
        assert!(pages <= HUGE_PAGE as u64 / PAGE as u64, "{runs:?}");
    }
}

#[test]
fn a_snapshot_that_is_mapped_takes_the_place_of_what_it_has() {
    let mut ram = saved(&[(0x7000, 7)]);
    ram.place_zeroed(START, &zeroed()).unwrap();
    put(&ram, START + 3 * MIB, 3);
    let (layers, _) = changes(&ram);
    // One that comes between is not in the files.
    ram.place_zeroed(START + ZEROED_PIECE, &zeroed()).unwrap();
    ram.rebase(layers).unwrap();
    assert_eq!((word(&ram, START + 3 * MIB), word(&ram, 0x7000)), (3, 7));
    let (first, second) = (BOOT, BOOT + ZEROED_PIECE);
    assert!(!ram.zeroed.overlaps(first..second) && ram.zeroed.overlaps(second..u64::MAX));
    // In what was zeroes in the lowest file, and is.
    put(&ram, START + 64 * MIB, 64);
    put(&ram, START + ZEROED_PIECE + MIB, 65);
    forget(&ram, START + ZEROED_PIECE);
    let (layers, _) = changes(&ram);
    let copy = Ram::from_layers(layers, size()).unwrap();
    let places = [START + 3 * MIB, START + 64 * MIB, START + ZEROED_PIECE + MIB];
    assert_eq!(places.map(|place| word(&copy, place)), [3, 64, 65]);
    ram.drop_changes(Some(&pagemap())).unwrap();
    assert_eq!(places.map(|place| word(&ram, place)), [3, 0, 0]);
}

#[test]
fn files_without_what_can_be_plugged_leave_it_there() {
    let mut ram = Ram::allocate(size()).unwrap();
    ram.place_zeroed(START, &zeroed()).unwrap();
    put(&ram, 0x7000, 7);
    put(&ram, START, 5);
    let file = Arc::new(tempfile::tempfile().unwrap());
    let saved = ram.without_hotplug().unwrap().unwrap();
    let image = saved.write_image(&file, Some(&pagemap())).unwrap();
    assert_eq!((file.metadata().unwrap().len(), image.pages), (BOOT, 1));
    ram.rebase(Layers::single(file, image)).unwrap();
    assert_eq!(word(&ram, START), 5);
    put(&ram, START + MIB, 6);
    forget(&ram, START);
    let (layers, _) = changes(&ram);
    let copy = Ram::from_layers(layers, size()).unwrap();
    assert_eq!([0, MIB].map(|place| word(&copy, START + place)), [5, 6]);
}

#[test]
fn what_is_discarded_is_gone_from_the_file() {
    let (ram, files) = (Ram::allocate(size()).unwrap(), [zeroed(), zeroed()]);
    ram.place_zeroed(START, &files[0]).unwrap();
    ram.place_zeroed(START + ZEROED_PIECE, &files[1]).unwrap();
    let run = |start, length| layout::Range { start, length };
    for place in (120 * MIB..136 * MIB).step_by(PAGE) {
        put(&ram, START + place, 1);
    }
    let bytes = |file: &File| file.metadata().unwrap().blocks() * 512;
    assert_eq!([bytes(&files[0]), bytes(&files[1])], [8 * MIB; 2]);
    discard(ram.guest(), run(START + 126 * MIB, 4 * MIB)).unwrap();
    assert_eq!([bytes(&files[0]), bytes(&files[1])], [6 * MIB; 2]);
    let page = PAGE as u64;
    let words = [126 * MIB - page, 126 * MIB, 130 * MIB - page, 130 * MIB].map(|place| word(&ram, START + place));
    assert_eq!(words, [1, 0, 0, 1]);
    put(&ram, START + 126 * MIB, 8);
    assert_eq!(word(&ram, START + 126 * MIB), 8, "it is there when it is touched");
}

#[test]
fn what_is_discarded_beside_it_is_gone_too() {
    let (ram, file) = (Ram::allocate(size()).unwrap(), zeroed());
    ram.place_zeroed(START + ZEROED_PIECE, &file).unwrap();
    let places = [ZEROED_PIECE - MIB, ZEROED_PIECE, ZEROED_PIECE + MIB].map(|place| START + place);
    places.iter().for_each(|place| put(&ram, *place, 1));
    let range = layout::Range {
        start: places[0],
        length: 2 * MIB,
    };
    discard(ram.guest(), range).unwrap();
    assert_eq!(places.map(|place| word(&ram, place)), [0, 0, 1]);
}

#[test]
fn what_cannot_be_used_is_refused_and_changes_nothing() {
    let ram = Ram::allocate(size()).unwrap();
    put(&ram, START, 5);
    let short = zeroed();
    short.set_len(ZEROED_PIECE - PAGE as u64).unwrap();
    let whole = zeroed();
    let path = format!("/proc/self/fd/{}", whole.as_raw_fd());
    for (file, words) in [
        (short, "no regular file of 128 MiB"),
        (File::open("/dev/zero").unwrap(), "no regular file"),
        (File::open(&path).unwrap(), "cannot be read and written"),
    ] {
        let told = ram.place_zeroed(START, &file).unwrap_err().to_string();
        assert!(told.contains(words), "{told}");
    }
    for address in [0, START - ZEROED_PIECE, START + MIB, START + 2 * ZEROED_PIECE, u64::MAX] {
        let error = ram.place_zeroed(address, &whole).unwrap_err();
        assert!(matches!(error, MemoryError::Zeroed { .. }), "{error}");
    }
    assert_eq!(word(&ram, START), 5);
    assert!(!ram.zeroed.overlaps(0..u64::MAX));
}

/// A tmpfs of such a size that nobody sees, which needs root, and a way to files of a piece's size in it.
fn tmpfs(size: u64) -> impl Fn() -> File {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).expect("fsopen(2), which needs root");
    fsconfig_set_string(&context, "size", size.to_string()).unwrap();
    fsconfig_create(&context).unwrap();
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap();
    move || {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&mount, ".", flags, Mode::RUSR | Mode::WUSR).unwrap();
        rustix::fs::ftruncate(&file, ZEROED_PIECE).unwrap();
        File::from(file)
    }
}

#[test]
fn there_must_be_room_for_a_file_whatever_others_do() {
    let full = |file: &File| {
        let told = check_zeroed(file).unwrap_err().to_string();
        assert!(told.contains("can be full"), "{told}");
    };
    full(&tmpfs(ZEROED_PIECE - PAGE as u64)());
    let shared = tmpfs(3 * ZEROED_PIECE);
    let (file, other) = (shared(), shared());
    other.write_all_at(&[1], 0).unwrap();
    full(&file);
    check_zeroed(&tmpfs(0)()).unwrap();
    let own = tmpfs(ZEROED_PIECE)();
    own.write_all_at(&[0; PAGE], 0).unwrap();
    let ram = Ram::allocate(size()).unwrap();
    ram.place_zeroed(START, &own).unwrap();
    put(&ram, START + ZEROED_PIECE - 8, 5);
    assert_eq!(word(&ram, START + ZEROED_PIECE - 8), 5);
    // On disk.
    let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    disk.set_len(ZEROED_PIECE).unwrap();
    let told = check_zeroed(&disk).unwrap_err().to_string();
    assert!(told.contains("in no file system in memory"), "{told}");
}

#[test]
fn memory_that_has_to_stay_takes_none() {
    let pins = Pins::default();
    let ram = Ram::allocate(size()).unwrap().with_pins(pins.clone());
    let pin = pins.pin();
    assert_eq!(ram.takes_zeroed(), Ok(()), "its functions reach other parts of it");
    pin.for_ever();
    assert_eq!(ram.takes_zeroed(), Err("its memory has to stay where it is"));
    assert!(ram.place_zeroed(START, &zeroed()).is_err());
    let without = Ram::allocate(ByteSize(BOOT)).unwrap();
    let addresses = MemorySize {
        hotplug_region: ByteSize::gib(1),
        ..ByteSize(BOOT).into()
    };
    for ram in [without, Ram::allocate(addresses).unwrap()] {
        assert_eq!(ram.takes_zeroed(), Err("it has no memory that can be plugged"));
    }
}

#[test]
fn it_is_no_memory_without_content() {
    let ram = saved(&[(0x7000, 7)]);
    ram.place_zeroed(START, &zeroed()).unwrap();
    put(&ram, START + 3 * MIB, 3);
    forget(&ram, START);
    put(&ram, START + 5 * MIB, 5);
    // Neither what the page tables have of it nor what they do not.
    let mapped = ram.map_unwritten_holes_anonymous(&pagemap()).unwrap();
    assert_eq!(mapped, size().all().bytes() - ZEROED_PIECE - 2 * MIB);
    assert_eq!([3, 5, 6].map(|place| word(&ram, START + place * MIB)), [3, 5, 0]);
    assert_eq!(word(&ram, 0x7000), 7);
}
