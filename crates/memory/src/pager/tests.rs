//! Pages that come on demand are those of the files, whoever asks, and what has not come is not lost. Needs /dev/userfaultfd.

use std::fs::File;

use base::ByteSize;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::{Image, Layer, Written};

/// One region; which page lies in which is the affair of `layers`.
const SIZE: ByteSize = ByteSize::mib(16);
const PAGES: u64 = SIZE.bytes() / PAGE as u64;

fn device() -> OwnedFd {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .expect("/dev/userfaultfd, which needs root and Linux 6.1")
        .into()
}

fn pagemap() -> Option<File> {
    Some(File::open("/proc/self/pagemap").unwrap())
}

fn put(ram: &Ram, page: u64, value: u64) {
    ram.guest().write_obj(value, GuestAddress(page * PAGE as u64)).unwrap();
}

fn get(ram: &Ram, page: u64) -> u64 {
    ram.guest().read_obj(GuestAddress(page * PAGE as u64)).unwrap()
}

fn words(ram: &Ram) -> Vec<u64> {
    (0..PAGES).map(|page| get(ram, page)).collect()
}

/// Every third page has content, and some have been changed in a second file.
fn files() -> (Layers, Vec<u64>) {
    let ram = Ram::allocate(SIZE).unwrap();
    (0..PAGES).step_by(3).for_each(|page| put(&ram, page, page + 1));
    let file = tempfile::tempfile().unwrap();
    let image = ram.write_image(&file, pagemap().as_ref()).unwrap();
    let mut ram = ram;
    ram.rebase(Layers::single(Arc::new(file), image)).unwrap();
    for page in [5, 6, 7, PAGES - 1] {
        put(&ram, page, 1000 + page);
    }
    put(&ram, 9, 0);
    let file = Arc::new(tempfile::tempfile().unwrap());
    let Written::Changes(image, runs) = ram.write_changes(&file, pagemap().as_ref()).unwrap() else {
        panic!("all was written")
    };
    let words = words(&ram);
    (ram.layers().unwrap().with(Layer { file, image }, &runs), words)
}

fn paged(order: Runs) -> (Ram, Vec<u64>) {
    let (layers, words) = files();
    (Ram::paged(layers, SIZE, &device(), order).unwrap(), words)
}

/// Pages that are in memory.
fn touched(ram: &Ram) -> u64 {
    let mut pages = 0;
    crate::image::each_page(ram, pagemap().as_ref(), false, |_, _, _, _| {
        pages += 1;
        Ok(())
    })
    .unwrap();
    pages
}

#[test]
fn pages_come_when_they_are_touched_and_in_which_order_is_known() {
    let (ram, words) = paged(Runs::new());
    assert_eq!(touched(&ram), 0);
    for page in [6, 700, 701, 702, 5, 4000] {
        assert_eq!(get(&ram, page), words[usize::try_from(page).unwrap()], "{page}");
    }
    // A page is asked for once, whoever touches it, and is written like any other.
    put(&ram, 700, 9);
    assert_eq!(get(&ram, 700), 9);
    assert_eq!(ram.page_order(), [(6, 1), (700, 3), (5, 1), (4000, 1)]);
    assert_eq!(touched(&ram), 6);
}

#[test]
fn what_is_discarded_comes_from_the_files_again_and_is_theirs_in_a_snapshot() {
    let (ram, words) = paged(Runs::new());
    let at = |page: u64| words[usize::try_from(page).unwrap()];
    assert_eq!(get(&ram, 6), at(6));
    for page in 600..1200 {
        put(&ram, page, 7);
    }
    let order = ram.page_order();
    let gone = crate::layout::Range {
        start: 602 * PAGE as u64,
        length: 512 * PAGE as u64,
    };
    crate::discard(ram.guest(), gone).unwrap();
    assert_eq!(touched(&ram), 601 - 512);
    let saved = |ram: &Ram| {
        let file = tempfile::tempfile().unwrap();
        let image = ram.write_image(&file, pagemap().as_ref()).unwrap();
        Ram::from_layers(Layers::single(Arc::new(file), image), SIZE).unwrap()
    };
    let copy = saved(&ram);
    assert_eq!(touched(&ram), 601 - 512, "what is saved need not come");
    let told = [601, 602, 700, 1113, 1114].map(|page| get(&copy, page));
    assert_eq!(told, [7, at(602), at(700), at(1113), 7]);
    // And for the guest that goes on, whose order does not name a page twice.
    let told = [601, 602, 700, 1113, 1114].map(|page| get(&ram, page));
    assert_eq!(told, [7, at(602), at(700), at(1113), 7]);
    put(&ram, 700, 9);
    assert_eq!((get(&ram, 700), get(&saved(&ram), 700)), (9, 9));
    assert_eq!(ram.page_order(), order);
}

#[test]
fn an_order_comes_before_anybody_asks() {
    let order = vec![(300, 40), (5, 3)];
    let (ram, words) = paged(order);
    let began = std::time::Instant::now();
    while touched(&ram) < 43 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{} pages have come",
            touched(&ram)
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(touched(&ram), 43);
    assert_eq!((get(&ram, 300), get(&ram, 7)), (words[300], words[7]));
    assert_eq!(touched(&ram), 43, "one was not there");
    // Only whoever had no order can tell one.
    assert_eq!((get(&ram, 1000), ram.page_order()), (words[1000], vec![]));
}

#[test]
fn many_may_wait_at_once_and_nobody_is_forgotten() {
    // All of it is on its way while it is asked for, too.
    let (ram, words) = paged(vec![(0, PAGES)]);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (ram, words) = (&ram, &words);
            scope.spawn(move || {
                for page in (0..PAGES).rev().map(|page| (page * 7 + thread) % PAGES) {
                    assert_eq!(get(ram, page), words[usize::try_from(page).unwrap()], "{page}");
                }
            });
        }
    });
}

#[test]
fn what_has_not_come_is_saved_as_well_and_does_not_come_for_it() {
    let (ram, mut expected) = paged(Runs::new());
    put(&ram, 6, 77);
    put(&ram, 3, 0);
    (expected[6], expected[3]) = (77, 0);
    let file = Arc::new(tempfile::tempfile().unwrap());
    let image = ram.write_image(&file, pagemap().as_ref()).unwrap();
    assert_eq!(touched(&ram), 2);
    let layers = Layers::single(file, image);
    assert_eq!(words(&Ram::from_layers(layers.clone(), SIZE).unwrap()), expected);
    // What has changed cannot be told, so nothing is told of it.
    assert!(ram.layers().is_none());
    assert_eq!(ram.write_set(pagemap().as_ref(), 100).unwrap(), []);
    // It goes on from that file as if it had been mapped from it.
    let mut ram = ram;
    ram.rebase(layers).unwrap();
    assert_eq!(words(&ram), expected);
    put(&ram, 8, 5);
    let Written::Changes(_, runs) = ram
        .write_changes(&tempfile::tempfile().unwrap(), pagemap().as_ref())
        .unwrap()
    else {
        panic!("all was written")
    };
    assert_eq!(runs, [(8, 1)]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (layers, _) = files();
    let other = Ram::paged(layers.clone(), ByteSize::mib(8), &device(), Runs::new()).unwrap_err();
    assert!(matches!(other, MemoryError::ImageSize { .. }), "{other}");
    let none = Layers::single(Arc::new(tempfile::tempfile().unwrap()), Image::default());
    let error = Ram::paged(none, SIZE, &device(), Runs::new()).unwrap_err();
    assert!(matches!(error, MemoryError::ImageSize { .. }), "{error}");
    let null = File::open("/dev/null").unwrap().into();
    let error = Ram::paged(layers, SIZE, &null, Runs::new()).unwrap_err();
    assert!(
        error.to_string().contains("without it choose another --paging"),
        "{error}"
    );
}

#[test]
fn an_order_of_another_memory_does_no_harm() {
    let order = vec![(PAGES, 1), (0, PAGES + 1), (u64::MAX, 2), (12, 1)];
    let (ram, words) = paged(order);
    let began = std::time::Instant::now();
    while touched(&ram) < 1 {
        assert!(began.elapsed() < Duration::from_secs(60), "nothing has come");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(self::words(&ram), words);
}

#[test]
fn what_was_mapped_in_part_is_saved_as_it_is() {
    let (layers, _) = files();
    let mapped = Ram::from_layers(layers, SIZE).unwrap();
    for (mut ram, mut expected) in [paged(Runs::new()), (mapped, files().1)] {
        put(&ram, 6, 77);
        expected[6] = 77;
        let path = tempfile::NamedTempFile::new().unwrap();
        path.as_file().set_len(SIZE.bytes()).unwrap();
        // It cannot be read, and so not be mapped.
        let blind = File::options().write(true).open(path.path()).unwrap();
        ram.rebase(Layers::single(Arc::new(blind), Image::default()))
            .unwrap_err();
        let file = Arc::new(tempfile::tempfile().unwrap());
        let image = ram.write_image(&file, pagemap().as_ref()).unwrap();
        assert_eq!(
            words(&Ram::from_layers(Layers::single(file, image), SIZE).unwrap()),
            expected
        );
        assert_eq!(words(&ram), expected);
    }
}

#[test]
fn memory_that_comes_on_demand_takes_none_that_came_zeroed() {
    let (layers, _) = files();
    let size = MemorySize {
        hotplug_region: ByteSize::gib(1),
        ..SIZE.into()
    };
    let mapped = Ram::from_layers(layers.clone(), size).unwrap();
    let paged = Ram::paged(layers, size, &device(), Runs::new()).unwrap();
    let takes = |ram: Ram| ram.with_hotplug(ByteSize::mib(128)).unwrap().takes_zeroed();
    assert_eq!(takes(mapped), Ok(()));
    assert_eq!(takes(paged), Err("its memory comes on demand"));
}
