//! What a guest gives back, and what it only says that it does.

use ::device::GuestPages;
use memory::Pins;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::giving::{MOST_INFLATED, MOST_REPORTED};

const MIB: u64 = 1 << 20;

/// Pages of the driver's memory of 64 MiB.
const ALL: u64 = 64 * MIB / PAGE;

#[test]
fn pages_that_follow_each_other_are_given_at_once_and_each_page_once() {
    let host = Host::new();
    let mut guest = Guest::new(host.clone());
    guest.name(INFLATE, &[9000, 9002, 9001, 9001, 12000]);
    assert_eq!(host.given(), [(9000, 3), (12000, 1)]);
    guest.name(DEFLATE, &[9000, 9001]);
    assert_eq!(host.given(), []);
    guest.report(&[(36 << 20, 2 << 20), (34 << 20, 2 << 20), (44 << 20, 4096)]);
    assert_eq!(host.given(), [(34 * 256, 1024), (44 * 256, 1)]);
    let requests = ["inflate", "deflate", "report"].map(|kind| guest.counted("balloon_requests_total", kind));
    assert_eq!(requests, [1, 1, 1]);
    let info = guest.resize.info();
    assert_eq!((info.reported, info.discarded), (1025 * PAGE, 1029 * PAGE));
}

#[test]
fn what_is_no_memory_or_no_whole_page_is_not_given() {
    let host = Host::new();
    let mut guest = Guest::new(host.clone());
    let beyond = u32::try_from(ALL).unwrap();
    guest.name(INFLATE, &[beyond, u32::MAX, 0xe_0000, beyond - 1]);
    assert_eq!(host.given(), [(ALL - 1, 1)]);
    assert_eq!(guest.counted("balloon_refused_ranges_total", ""), 3);
    guest.report(&[
        (40 << 20, 4095),
        ((41 << 20) + 512, 4096),
        (42 << 20, 4096),
        (43 << 20, 0),
    ]);
    assert_eq!(host.given(), [(42 * 256, 1)]);
    assert_eq!(guest.counted("balloon_refused_ranges_total", ""), 5);
    // A chain that leaves memory is none.
    guest.report(&[(63 << 20, 2 << 20)]);
    guest.report(&[(40 << 20, 4096), (u64::MAX - 4095, 4096)]);
    assert_eq!(host.given(), []);
    assert_eq!(guest.counted("balloon_refused_chains_total", ""), 2);
    // A number that is cut off is none.
    guest.driver.push(INFLATE, &[&[0, 0x28, 0, 0, 1, 0x28]], &[]);
    guest.done(INFLATE);
    assert_eq!(host.given(), [(0x2800, 1)]);
}

#[test]
fn a_request_has_a_limit_beyond_which_pages_stay() {
    let host = Host::new();
    let mut guest = Guest::new(host.clone());
    let numbers: Vec<u32> = (0..u32::try_from(MOST_INFLATED).unwrap() + 100).collect();
    guest.name(INFLATE, &numbers);
    assert_eq!(host.given(), [(0, MOST_INFLATED as u64)]);
    assert_eq!(guest.counted("balloon_kept_bytes_total", "limit"), 100 * PAGE);
    // The same memory again and again is as much as it is once.
    guest.report(&[(0, 64 << 20); 4]);
    assert_eq!(host.given(), [(0, ALL)]);
    assert_eq!(guest.counted("balloon_kept_bytes_total", "limit"), 100 * PAGE);
    const { assert!(MOST_REPORTED >= 32 * (4 << 20), "as much as Linux reports at once") };
}

#[test]
fn what_stays_is_counted_by_its_reason_and_answered_all_the_same() {
    let host = Host::new();
    let mut guest = Guest::new(host.clone());
    let fates = [
        (Ok(Discard::Pinned), "pinned"),
        (Ok(Discard::Unplugged), "unplugged"),
        (Err(io::ErrorKind::OutOfMemory.into()), "host"),
    ];
    for (fate, why) in fates {
        host.set_fate(fate);
        guest.name(INFLATE, &[9000, 9001]);
        guest.report(&[(40 << 20, 4096)]);
        assert_eq!(guest.counted("balloon_kept_bytes_total", why), 3 * PAGE, "{why}");
    }
    let info = guest.resize.info();
    assert_eq!((info.reported, info.discarded), (3 * PAGE, 0));
}

/// SplitMix64, of a seed that a failure can be repeated with.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % limit
    }
}

/// Where pages have something in them: behind the driver's rings and buffers, up to the end of its memory.
const ARENA: std::ops::Range<u64> = 48 * 256..ALL;

/// A guest of real memory, and what the specification says of each page: what was written last, or nothing any more.
struct Model {
    guest: Guest,
    pins: Pins,
    random: Random,
    words: Vec<u64>,
    reported: u64,
    discarded: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        let pins = Pins::default();
        let pages = GuestPages {
            pins: pins.clone(),
            pluggable: None,
            ballooned: None,
        };
        let model = Self {
            guest: Guest::new(pages),
            pins,
            random: Random(seed),
            words: ARENA.map(|page| page + 1).collect(),
            reported: 0,
            discarded: 0,
        };
        ARENA.for_each(|page| model.write(page, page + 1));
        model
    }

    fn write(&self, page: u64, word: u64) {
        let memory = self.guest.driver.memory();
        memory.write_obj(word, GuestAddress(page * PAGE + 8)).unwrap();
    }

    fn read(&self, page: u64) -> u64 {
        let memory = self.guest.driver.memory();
        memory.read_obj(GuestAddress(page * PAGE + 8)).unwrap()
    }

    /// The guest says of these pages that it has no use for them.
    fn gives(&mut self, pages: impl IntoIterator<Item = u64>) -> u64 {
        let pages: std::collections::BTreeSet<u64> = pages.into_iter().filter(|page| ARENA.contains(page)).collect();
        let bytes = pages.len() as u64 * PAGE;
        if !self.pins.is_pinned() {
            self.discarded += bytes;
            for page in pages {
                self.words[usize::try_from(page - ARENA.start).unwrap()] = 0;
            }
        }
        bytes
    }

    fn inflate(&mut self) {
        let count = self.random.below(300);
        let mut page = ARENA.start + self.random.below(ALL - ARENA.start);
        let mut numbers = Vec::new();
        for _ in 0..count {
            numbers.push(u32::try_from(page).unwrap());
            page = match self.random.below(8) {
                0 => ARENA.start + self.random.below(ALL - ARENA.start),
                1 => ALL + self.random.below(u64::from(u32::MAX) - ALL),
                2 => page,
                _ => (page + 1).min(u64::from(u32::MAX)),
            };
        }
        self.guest.name(INFLATE, &numbers);
        self.gives(numbers.into_iter().map(u64::from));
    }

    fn report(&mut self) {
        let mut buffers = Vec::new();
        for _ in 0..=self.random.below(31) {
            let pages = 1 + self.random.below(64);
            let first = ARENA.start + self.random.below(ALL - ARENA.start - pages);
            let skew = (self.random.below(6) == 0).then(|| 1 + self.random.below(PAGE - 1));
            buffers.push((first, pages, skew));
        }
        let descriptors: Vec<(u64, u32)> = buffers
            .iter()
            .map(|&(first, pages, skew)| (first * PAGE + skew.unwrap_or(0), u32::try_from(pages * PAGE).unwrap()))
            .collect();
        self.guest.report(&descriptors);
        let whole = buffers.iter().filter(|(.., skew)| skew.is_none());
        let pages: Vec<u64> = whole.flat_map(|(first, pages, _)| *first..first + pages).collect();
        self.reported += self.gives(pages);
    }

    /// All pages are as they should be, and so are the counts.
    fn check(&self, when: &str) {
        let wrong = ARENA.zip(&self.words).find(|(page, word)| self.read(*page) != **word);
        assert_eq!(wrong.map(|(page, _)| page), None, "{when}");
        let info = self.guest.resize.info();
        assert_eq!(
            (info.reported, info.discarded),
            (self.reported, self.discarded),
            "{when}"
        );
    }
}

/// In any order: pages are given back, in vain while they are pinned, used again told and untold, and the device sleeps in between.
#[test]
fn a_page_is_what_was_written_last_or_nothing_whatever_the_guest_asks_for() {
    for seed in 0..6 {
        let mut model = Model::new(seed);
        let mut pin = None;
        for step in 0..60 {
            match model.random.below(10) {
                0..3 => model.inflate(),
                3..6 => model.report(),
                6 => model
                    .guest
                    .name(DEFLATE, &[u32::try_from(ARENA.start).unwrap(), 5, u32::MAX]),
                7 => pin = pin.take().map_or_else(|| Some(model.pins.pin()), |_| None),
                8 => {
                    for _ in 0..200 {
                        let page = ARENA.start + model.random.below(ALL - ARENA.start);
                        model.words[usize::try_from(page - ARENA.start).unwrap()] = step + 7;
                        model.write(page, step + 7);
                    }
                }
                _ => {
                    model.guest.driver.device().pause();
                    model.guest.driver.device().resume().unwrap();
                }
            }
            model.check(&format!("seed {seed}, step {step}"));
        }
    }
}
