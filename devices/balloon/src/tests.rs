//! The device behind the real transport, with a host that keeps a record of what it is given and can refuse, or with the host itself.

mod life;
mod requests;
mod taking_back;

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};

use ::device::{Balloon, BalloonModule, DeviceContext, Discard, FreePages, ResizeBalloon};
use memory::GuestRam;
use memory::layout::Range;
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::{Request, Subject, run};
use vmm_api::DeviceSpec;

use crate::MODULE;
use crate::protocol::{DEFLATE, INFLATE, PAGE, REPORTING};
use crate::saved::BalloonState;

/// What the host has been given, and what becomes of the next.
struct Ledger {
    given: Vec<Range>,
    fate: io::Result<Discard>,
    /// What is said to be in the balloon, and what becomes of the next that is taken back.
    inflated: BTreeSet<u64>,
    refuses: bool,
    deflations: u64,
    /// Pages that were forgotten and are not ready yet, and who has made the last ready.
    left: usize,
    settled_by: Option<String>,
}

#[derive(Clone)]
struct Host(Arc<Mutex<Ledger>>);

impl Host {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Ledger {
            given: Vec::new(),
            fate: Ok(Discard::Done),
            inflated: BTreeSet::new(),
            refuses: false,
            deflations: 0,
            left: 0,
            settled_by: None,
        })))
    }

    /// What it was given since this was last called, in pages: the first, and how many.
    fn given(&self) -> Vec<(u64, u64)> {
        let given = std::mem::take(&mut self.0.lock().unwrap().given);
        let pages = given.iter().map(|range| (range.start / PAGE, range.length / PAGE));
        pages.collect()
    }

    fn set_fate(&self, fate: io::Result<Discard>) {
        self.0.lock().unwrap().fate = fate;
    }
}

impl FreePages for Host {
    fn discard(&mut self, _: &GuestRam, pages: Range) -> io::Result<Discard> {
        let mut ledger = self.0.lock().unwrap();
        ledger.given.push(pages);
        match &ledger.fate {
            Ok(fate) => Ok(*fate),
            Err(error) => Err(error.kind().into()),
        }
    }

    fn inflated(&mut self, pages: &[Range]) {
        self.0.lock().unwrap().inflated.extend(numbers(pages));
    }

    fn deflate(&mut self, pages: &[Range]) -> io::Result<()> {
        let mut ledger = self.0.lock().unwrap();
        ledger.deflations += 1;
        if ledger.refuses {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        for page in numbers(pages) {
            ledger.inflated.remove(&page);
        }
        Ok(())
    }

    fn forget(&mut self) -> bool {
        let mut ledger = self.0.lock().unwrap();
        ledger.left += ledger.inflated.len();
        ledger.inflated.clear();
        ledger.left > 0
    }

    /// One page after the other.
    fn settle(&mut self) -> io::Result<bool> {
        let mut ledger = self.0.lock().unwrap();
        if ledger.refuses {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        ledger.left = ledger.left.saturating_sub(1);
        ledger.settled_by = std::thread::current().name().map(str::to_owned);
        Ok(ledger.left == 0)
    }
}

fn numbers(pages: &[Range]) -> Vec<u64> {
    let each = |range: &Range| range.start / PAGE..(range.start + range.length) / PAGE;
    pages.iter().flat_map(each).collect()
}

fn spec(config: serde_json::Value) -> DeviceSpec {
    DeviceSpec {
        id: "balloon".into(),
        kind: "balloon".into(),
        config,
    }
}

fn created(config: serde_json::Value, pages: impl FreePages + 'static, registry: &Registry) -> Balloon {
    let context = DeviceContext {
        id: "balloon",
        metrics: registry,
        no_space: &::device::SpaceAlarm::new().unwrap(),
    };
    MODULE.create(&spec(config), &context, Box::new(pages)).unwrap()
}

/// A driver of a device that reports free pages.
struct Guest {
    driver: Driver,
    resize: Arc<dyn ResizeBalloon>,
    registry: Registry,
}

impl Guest {
    fn idle(pages: impl FreePages + 'static) -> Self {
        let registry = Registry::new();
        let Balloon { device, resize } = created(serde_json::json!({}), pages, &registry);
        Self {
            driver: Driver::new(device).with_queue_size(128),
            resize,
            registry,
        }
    }

    fn new(pages: impl FreePages + 'static) -> Self {
        let mut guest = Self::idle(pages);
        guest.driver.start();
        guest
    }

    fn done(&mut self, queue: u16) {
        self.driver.kick(queue);
        let used = self.driver.wait_used(queue).expect("an answer");
        assert_eq!(used.written, 0, "nothing is written");
    }

    /// Names pages by their numbers.
    fn name(&mut self, queue: u16, numbers: &[u32]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.driver.push(queue, &[&bytes], &[]);
        self.done(queue);
    }

    /// Reports buffers as free.
    fn report(&mut self, buffers: &[(u64, u32)]) {
        use virtio::conformance::driver::{Descriptor, WRITE};
        let free = |&(address, length)| Descriptor {
            address,
            length,
            flags: WRITE,
            next: 0,
        };
        let chain: Vec<_> = buffers.iter().map(free).collect();
        self.driver.push_indirect(REPORTING, &chain);
        self.done(REPORTING);
    }

    /// A counter, by its name and the value of its second label.
    fn counted(&self, name: &str, label: &str) -> u64 {
        let samples = self.registry.samples();
        let has = |sample: &&observe::Sample| {
            let label = label.is_empty() || sample.labels.iter().any(|(_, value)| value == label);
            sample.name == name && label
        };
        samples.iter().find(has).map(|sample| sample.value).unwrap()
    }
}

#[test]
fn it_conforms() {
    for queue in [INFLATE, DEFLATE, REPORTING] {
        let make = || created(serde_json::json!({}), Host::new(), &Registry::new()).device;
        let request = Request {
            queue,
            readable: [0_u32, 1, u32::MAX]
                .iter()
                .flat_map(|number| number.to_le_bytes())
                .collect(),
            writable: 4096,
        };
        run(&Subject::new(make, request)).unwrap();
    }
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    let state = BalloonState {
        num_pages: 65536,
        actual: 65000,
        features: 0x24,
    };
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &state);
}
