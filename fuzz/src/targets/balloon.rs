//! What a guest says that it has no use for, in each of the three ways, and the saved state of the device that takes it. A page that is
//! discarded and was not named is a fault as one is that panics, and so are counts that contradict each other.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{Balloon, BalloonModule, DeviceContext, Discard, FreePages, SpaceAlarm};
use memory::GuestRam;
use memory::layout::Range;
use observe::Registry;
use state::Saved;
use virtio::conformance::driver::{Descriptor, Driver, MEMORY, WRITE};
use vmm_api::DeviceSpec;
use vmm_api::devices::BalloonConfig;

use crate::run::{Target, outcome};

/// A device that has not answered by now does not.
const PATIENCE: Duration = Duration::from_secs(5);

/// Requests of one input; more would hardly find more.
const MOST: usize = 16;

/// The queue, then numbers of pages or ranges.
const REQUEST: usize = 65;

const PAGE: u64 = 4096;
const REPORTING: u16 = 2;

/// Pages that the host was given.
#[derive(Clone, Default)]
struct Given(Arc<Mutex<Vec<Range>>>);

impl FreePages for Given {
    fn discard(&mut self, _: &GuestRam, pages: Range) -> io::Result<Discard> {
        self.0.lock().expect("no thread panics with it").push(pages);
        // Each of the ways in turn.
        match pages.start / PAGE % 4 {
            0 => Ok(Discard::Pinned),
            1 => Err(io::ErrorKind::OutOfMemory.into()),
            _ => Ok(Discard::Done),
        }
    }

    fn inflated(&mut self, _: &[Range]) {}

    fn deflate(&mut self, _: &[Range]) -> io::Result<()> {
        Ok(())
    }

    fn forget(&mut self) -> bool {
        false
    }

    fn settle(&mut self) -> io::Result<bool> {
        Ok(true)
    }
}

fn made(given: &Given) -> Balloon {
    let context = DeviceContext {
        id: "it",
        metrics: &Registry::new(),
        no_space: &SpaceAlarm::new().expect("an event fd"),
    };
    let spec = DeviceSpec::new("it", &BalloonConfig::default()).expect("a configuration");
    let made = balloon::MODULE.create(&spec, &context, Box::new(given.clone()));
    made.expect("a device")
}

/// Requests.
pub(crate) fn requests() -> Target {
    let request = |queue: u8, words: [u64; 8]| {
        let mut bytes = vec![queue];
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    };
    // Pages in a row, others, those at the end of memory and beyond it; deflated; ranges that are whole, that overlap and that are not.
    let pair = |first: u64, second: u64| first | second << 32;
    let requests = [
        request(
            0,
            [8, 9, 10, 11, 12, 13, 14, 15].map(|page| pair(9000 + page, 9100 + page)),
        ),
        request(0, [0; 8]),
        request(0, [pair(MEMORY / PAGE - 1, MEMORY / PAGE); 8]),
        request(1, [u64::MAX; 8]),
        request(2, [40 << 20, 2 << 20, 42 << 20, 2 << 20, 41 << 20, 4096, 50 << 20, 5]),
        request(
            2,
            [MEMORY - PAGE, PAGE, MEMORY - PAGE, 2 * PAGE, u64::MAX, 1, 0, MEMORY],
        ),
    ];
    Target {
        name: "balloon-requests",
        seeds: requests.iter().cloned().chain([requests.concat()]).collect(),
        parse: ask,
    }
}

/// Pages that a request names.
fn push(driver: &mut Driver, queue: u16, bytes: &[u8]) -> BTreeSet<u64> {
    if queue != REPORTING {
        driver.push(queue, &[bytes], &[]);
        let numbers = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|number| u32::from_le_bytes(*number));
        return match queue {
            0 => numbers.map(u64::from).collect(),
            _ => BTreeSet::new(),
        };
    }
    let words: Vec<u64> = (bytes.as_chunks::<8>().0.iter())
        .map(|word| u64::from_le_bytes(*word))
        .collect();
    let (mut chain, mut pages) = (Vec::new(), BTreeSet::new());
    for [address, length] in words.as_chunks::<2>().0 {
        let length = u32::try_from(length % (2 * MEMORY)).expect("less than 128 MiB");
        chain.push(Descriptor {
            address: *address,
            length,
            flags: WRITE,
            next: 0,
        });
        let end = address.saturating_add(u64::from(length)).min(MEMORY);
        pages.extend((address / PAGE).min(MEMORY / PAGE)..end.div_ceil(PAGE));
    }
    if chain.is_empty() {
        chain.push(Descriptor::default());
    }
    driver.push_chain(queue, &chain);
    pages
}

fn ask(input: &[u8]) -> u64 {
    let given = Given::default();
    let Balloon { device, resize } = made(&given);
    let mut driver = Driver::new(device).with_patience(PATIENCE);
    driver.start();
    let mut answers = String::new();
    for request in input.chunks(REQUEST).take(MOST) {
        let Some((queue, rest)) = request.split_first() else {
            continue;
        };
        let queue = u16::from(queue % 3);
        let named = push(&mut driver, queue, rest);
        driver.kick(queue);
        let used = driver.wait_used(queue).expect("a request that comes back");
        assert_eq!(used.written, 0, "nothing is written");
        let given = std::mem::take(&mut *given.0.lock().expect("no thread panics with it"));
        let mut end = 0;
        for range in &given {
            assert!(
                range.start.is_multiple_of(PAGE) && range.length.is_multiple_of(PAGE),
                "whole pages"
            );
            assert!(range.start >= end && range.length > 0, "each page once");
            end = range.start + range.length;
            assert!(end <= MEMORY, "guest memory");
            let mut pages = range.start / PAGE..end / PAGE;
            assert!(pages.all(|page| named.contains(&page)), "what was named");
        }
        answers.push(char::from(b'a' + u8::try_from(given.len().min(20)).unwrap_or(0)));
    }
    let info = resize.info();
    assert!(
        info.target == 0 && info.inflated == 0,
        "nobody has changed it: {info:?}"
    );
    driver.reset();
    outcome(answers)
}

/// The saved state.
pub(crate) fn state() -> Target {
    let state = |features: u64| format!(r#"{{"num_pages":65536,"actual":65000,"features":{features}}}"#);
    Target {
        name: "balloon-state",
        seeds: [0x24, 0, u64::MAX]
            .map(|features| state(features).into_bytes())
            .to_vec(),
        parse: restore,
    }
}

fn restore(input: &[u8]) -> u64 {
    let mut made = made(&Given::default());
    let saved = Saved {
        kind: "balloon".into(),
        version: 1,
        payload: input.to_vec(),
    };
    let restored = made.device.restore(&saved).map_err(|error| error.to_string());
    outcome(match restored {
        Ok(()) => format!("{}", made.resize.info().target.count_ones()),
        Err(error) => error.split_whitespace().take(6).collect(),
    })
}
