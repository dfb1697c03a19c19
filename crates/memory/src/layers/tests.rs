//! Memory in several files is what it was, whatever was written in between and by whom.

use super::*;
use vm_memory::{Bytes, GuestAddress};

const SIZE: ByteSize = ByteSize::mib(16);
const PAGES: u64 = (16 << 20) / PAGE as u64;

fn pagemap() -> File {
    File::open("/proc/self/pagemap").unwrap()
}

fn empty() -> Arc<File> {
    Arc::new(tempfile::tempfile().unwrap())
}

fn put(ram: &Ram, page: u64, value: u64) {
    ram.guest().write_obj(value, GuestAddress(page * PAGE as u64)).unwrap();
}

fn get(ram: &Ram, page: u64) -> u64 {
    ram.guest().read_obj(GuestAddress(page * PAGE as u64)).unwrap()
}

/// Memory with something in some pages, mapped from the file that it was written to.
fn base() -> Ram {
    let ram = Ram::allocate(SIZE).unwrap();
    for page in (0..PAGES).step_by(7) {
        put(&ram, page, page + 1);
    }
    let file = empty();
    let image = ram.write_image(&file, Some(&pagemap())).unwrap();
    Ram::from_layers(Layers::single(file, image), SIZE).unwrap()
}

/// Writes what has changed to another file; the files then.
fn keep(ram: &Ram) -> Layers {
    let file = empty();
    match ram.write_changes(&file, Some(&pagemap())).unwrap() {
        Written::Whole(image) => Layers::single(file, image),
        Written::Changes(image, runs) => ram.layers().unwrap().with(Layer { file, image }, &runs),
    }
}

fn words(ram: &Ram) -> Vec<u64> {
    (0..PAGES).map(|page| get(ram, page)).collect()
}

/// Numbers that look random, the same each time.
fn numbers(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state >> 33
    })
}

#[test]
fn what_has_changed_is_written_and_nothing_else() {
    let ram = base();
    // Looked at, which is no change.
    assert_eq!(get(&ram, 7), 8);
    put(&ram, 7, 1000);
    put(&ram, 8, 1001);
    // Made empty.
    put(&ram, 21, 0);
    let file = empty();
    let Written::Changes(image, runs) = ram.write_changes(&file, Some(&pagemap())).unwrap() else {
        panic!("all was written")
    };
    assert_eq!((image.pages, runs.as_slice()), (2, &[(7, 2), (21, 1)][..]));
    let layers = ram.layers().unwrap().with(Layer { file, image }, &runs);
    let again = Ram::from_layers(layers, SIZE).unwrap();
    again.layers().unwrap().check_content(SIZE).unwrap();
    assert_eq!(words(&again), words(&ram));
    // What was read of the kernel by another way than ours counts, too: read(2) into it.
    let bytes = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&bytes, &[9; PAGE], 0).unwrap();
    let (region, at) = again.at(40 * PAGE as u64).unwrap();
    let slice = vm_memory::GuestMemoryRegion::as_volatile_slice(region).unwrap();
    let mut slice = slice.subslice(at, PAGE).unwrap();
    vm_memory::ReadVolatile::read_volatile(&mut { bytes }, &mut slice).unwrap();
    let Written::Changes(_, runs) = again.write_changes(&empty(), Some(&pagemap())).unwrap() else {
        panic!("all was written")
    };
    assert_eq!(runs, [(40, 1)]);
}

#[test]
fn what_lies_between_two_changes_is_written_if_it_is_little() {
    let ram = base();
    let before = words(&ram);
    for page in [21, 22 + NEAR, 22 + NEAR + 2 + NEAR] {
        put(&ram, page, 1000);
    }
    let layers = keep(&ram);
    let segment = |first, pages| Segment { first, pages, file: 1 };
    assert_eq!(layers.segments(), [segment(21, NEAR + 2), segment(24 + 2 * NEAR, 1)]);
    let again = Ram::from_layers(layers, SIZE).unwrap();
    assert_eq!(words(&again), words(&ram));
    assert_ne!(words(&again), before);
}

#[test]
fn files_pile_up_and_begin_anew() {
    let mut ram = base();
    let mut numbers = numbers(1);
    for round in 0..MAX_LAYERS + 2 {
        for _ in 0..50 {
            let page = numbers.next().unwrap() % PAGES;
            put(&ram, page, numbers.next().unwrap());
        }
        let layers = keep(&ram);
        assert_eq!(layers.files().len(), (round + 1) % MAX_LAYERS + 1, "round {round}");
        let clone = Ram::from_layers(layers.clone(), SIZE).unwrap();
        clone.layers().unwrap().check_content(SIZE).unwrap();
        assert_eq!(words(&clone), words(&ram), "round {round}");
        // What goes on from the files has no changes then, and the same in it.
        let before = words(&ram);
        ram.rebase(layers).unwrap();
        assert_eq!(words(&ram), before);
        if ram.layers().unwrap().files().len() < MAX_LAYERS {
            let Written::Changes(image, runs) = ram.write_changes(&empty(), Some(&pagemap())).unwrap() else {
                panic!("all was written")
            };
            assert_eq!((image.pages, runs.len()), (0, 0), "round {round}");
        }
    }
}

#[test]
fn what_has_changed_can_be_forgotten() {
    let mut ram = base();
    put(&ram, 21, 99);
    ram.rebase(keep(&ram)).unwrap();
    let before = words(&ram);
    for pagemap in [Some(pagemap()), None] {
        for page in [0, 21, 22, PAGES - 1] {
            put(&ram, page, 1000);
        }
        ram.drop_changes(pagemap.as_ref()).unwrap();
        assert_eq!(words(&ram), before);
    }
    assert!(Ram::allocate(SIZE).unwrap().drop_changes(None).is_err());
}

#[test]
fn memory_of_its_own_goes_on_from_its_file() {
    let mut ram = Ram::allocate(SIZE).unwrap();
    put(&ram, 5, 6);
    let layers = keep(&ram);
    assert_eq!(layers.files().len(), 1);
    ram.rebase(layers).unwrap();
    put(&ram, 9, 10);
    let layers = keep(&ram);
    assert_eq!((layers.files().len(), layers.segments().len()), (2, 1));
    assert_eq!((get(&ram, 5), get(&ram, 9)), (6, 10));
}

#[test]
fn runs_beyond_the_most_are_joined_over_the_smallest_gaps() {
    let runs = vec![(0, 1), (10, 1), (12, 2), (20, 1), (23, 1), (100, 1)];
    assert_eq!(fewer(runs.clone(), 6), runs);
    assert_eq!(fewer(runs.clone(), 4), [(0, 1), (10, 4), (20, 4), (100, 1)]);
    assert_eq!(fewer(runs, 1), [(0, 101)]);
    let ram = base();
    for page in (0..PAGES).step_by(2) {
        put(&ram, page, 77);
    }
    let layers = keep(&ram);
    assert!(layers.segments().len() <= MAX_RUNS);
    assert_eq!(words(&Ram::from_layers(layers, SIZE).unwrap()), words(&ram));
}

#[test]
fn what_lies_over_others_is_what_counts() {
    // Against a plain array that says for each page which file it is in.
    let mut numbers = numbers(2);
    let mut layers = Layers::single(empty(), Image::default());
    let mut owners = vec![0; 256];
    for file in 1..MAX_LAYERS {
        let mut runs = Vec::new();
        let mut at = 0;
        loop {
            let first = at + numbers.next().unwrap() % 40;
            let pages = 1 + numbers.next().unwrap() % 30;
            if first + pages > 256 {
                break;
            }
            runs.push((first, pages));
            owners[usize::try_from(first).unwrap()..usize::try_from(first + pages).unwrap()].fill(file);
            at = first + pages;
        }
        let layer = Layer {
            file: empty(),
            image: Image::default(),
        };
        layers = layers.with(layer, &runs);
        let mut found = vec![0; 256];
        let mut end = 0;
        for segment in layers.segments() {
            assert!(segment.first >= end && segment.pages > 0);
            end = segment.end();
            found[usize::try_from(segment.first).unwrap()..usize::try_from(end).unwrap()].fill(segment.file);
        }
        assert_eq!(found, owners, "file {file}");
        for (page, owner) in (0..).zip(&owners) {
            assert_eq!(layers.covers(page), *owner != 0);
        }
    }
}

#[test]
fn layers_that_make_no_sense_are_refused() {
    let sized = || {
        let file = empty();
        file.set_len(SIZE.bytes()).unwrap();
        Layer {
            file,
            image: Image::default(),
        }
    };
    let segment = |first, pages, file| Segment { first, pages, file };
    let refused = |files: usize, segments: &[Segment]| {
        let layers = Layers::new((0..files).map(|_| sized()).collect(), segments.to_vec());
        Ram::from_layers(layers, SIZE).map(drop).unwrap_err().to_string()
    };
    for (files, segments) in [
        (0, vec![]),
        (MAX_LAYERS + 1, vec![]),
        (1, vec![segment(0, 1, 1)]),
        (2, vec![segment(0, 1, 0)]),
        (2, vec![segment(0, 0, 1)]),
        (2, vec![segment(4, 2, 1), segment(5, 1, 1)]),
        (2, vec![segment(PAGES - 1, 2, 1)]),
        (2, vec![segment(u64::MAX, u64::MAX, 1)]),
    ] {
        let told = refused(files, &segments);
        assert!(told.contains("in which of"), "{told}");
    }
    let short = sized();
    short.file.set_len(4096).unwrap();
    let error = Ram::from_layers(Layers::new(vec![sized(), short], Vec::new()), SIZE).unwrap_err();
    assert!(matches!(error, MemoryError::ImageSize { .. }), "{error}");
}

#[test]
fn pages_that_are_copied_ahead_are_what_they_were_and_count_as_changed() {
    let ram = base();
    let before = words(&ram);
    // What the memory does not have is left out, and what follows is not.
    ram.populate_write(&[(0, 2), (PAGES, 1), (0, PAGES + 1), (u64::MAX, 2), (100, 28)]);
    assert_eq!(words(&ram), before);
    let runs = ram.write_set(Some(&pagemap()), 1000).unwrap();
    assert_eq!(runs, [(0, 2), (100, 28)]);
    // Runs are told whole, the lowest first.
    assert_eq!(ram.write_set(Some(&pagemap()), 29).unwrap(), [(0, 2)]);
    assert_eq!(ram.write_set(None, 1000).unwrap(), []);
    // Memory of its own has no files that could be copied from.
    let own = Ram::allocate(SIZE).unwrap();
    assert_eq!(own.write_set(Some(&pagemap()), 1000).unwrap(), []);
}

#[test]
fn pages_are_where_the_guest_has_them() {
    let ram = Ram::allocate(ByteSize::gib(4)).unwrap();
    let (low, high) = (&ram.regions()[0], &ram.regions()[1]);
    let pages = low.len() / PAGE as u64;
    let all = pages + high.len() / PAGE as u64;
    let page = PAGE as u64;
    assert_eq!(ram.guest_ranges(&[(0, 2), (5, 1)]), [(0, 2 * page), (5 * page, page)]);
    let across = [(low.len() - page, page), (high.start_addr().0, 3 * page)];
    assert_eq!(ram.guest_ranges(&[(pages - 1, 4)]), across);
    // What the memory does not have is left out, and what follows is not.
    let wrong = [(all - 1, 2), (u64::MAX, 2), (1 << 60, 1), (7, 1)];
    assert_eq!(ram.guest_ranges(&wrong), [(7 * page, page)]);
}

/// What a page map says of pages that are there, and nobody's file's.
const OWN: u64 = 1 << 63;

#[test]
fn pages_of_a_huge_page_of_the_file_have_not_changed_whatever_the_page_map_says() {
    let ram = base();
    put(&ram, 1030, 1);
    // As Linux before 6.11 writes it: of the first 2 MiB, a huge page of the file, all; of the second all but one page, of the third all,
    // and one more page, as if they were small pages of the process's own.
    let pagemap = tempfile::tempfile().unwrap();
    let region = &ram.regions()[0];
    let entry = |page: u64| (region.as_ptr().addr() as u64 / PAGE as u64 + page) * 8;
    pagemap.set_len(entry(PAGES)).unwrap();
    for page in (0..1023).chain(1024..1536).chain([1540]) {
        pagemap.write_all_at(&OWN.to_ne_bytes(), entry(page)).unwrap();
    }
    let changed = [(512, 511), (1024, 512), (1540, 1)];
    assert_eq!(ram.write_set(Some(&pagemap), 10_000).unwrap(), changed);
    // What lies between is so little that it is written with them.
    let changed = [(512, 1029)];
    let file = empty();
    let Written::Changes(_, runs) = ram.write_changes(&file, Some(&pagemap)).unwrap() else {
        panic!("all of it was written");
    };
    assert_eq!(runs, changed);
    // Forgetting them all costs a fault each, and comparing them more.
    ram.drop_changes(Some(&pagemap)).unwrap();
    assert_eq!(get(&ram, 1030), 0);
}

#[test]
fn what_is_discarded_is_the_files_for_this_guest_and_in_its_snapshots() {
    let mut ram = base();
    let before = words(&ram);
    let mut numbers = numbers(3);
    for round in 0..6 {
        for page in 0..PAGES {
            if numbers.next().unwrap().is_multiple_of(2) {
                put(&ram, page, 1000 + round);
            }
        }
        let files = words(&Ram::from_layers(ram.layers().unwrap().clone(), SIZE).unwrap());
        let (first, pages) = (numbers.next().unwrap() % (PAGES - 64), 1 + numbers.next().unwrap() % 64);
        let range = crate::layout::Range {
            start: first * PAGE as u64,
            length: pages * PAGE as u64,
        };
        crate::discard(ram.guest(), range).unwrap();
        let now = words(&ram);
        let gone = usize::try_from(first).unwrap()..usize::try_from(first + pages).unwrap();
        assert_eq!(now[gone.clone()], files[gone], "round {round}");
        let layers = keep(&ram);
        let copy = Ram::from_layers(layers.clone(), SIZE).unwrap();
        assert_eq!(words(&copy), now, "a snapshot in round {round}");
        ram.rebase(layers).unwrap();
        assert_eq!(words(&ram), now, "round {round}");
    }
    assert_ne!(words(&ram), before);
}

#[test]
fn what_is_discarded_costs_no_memory_and_no_place_in_the_next_file() {
    let ram = base();
    for page in 512..1536 {
        put(&ram, page, 5);
    }
    let changed = || {
        ram.changed(&pagemap())
            .unwrap()
            .iter()
            .map(|(_, pages)| pages)
            .sum::<u64>()
    };
    assert_eq!(changed(), 1024);
    let range = crate::layout::Range {
        start: 2 << 20,
        length: 2 << 20,
    };
    crate::discard(ram.guest(), range).unwrap();
    assert_eq!(changed(), 512);
}
