//! Requests to a guest's IOMMU, and the saved state of the device that answers them. That a function reaches anything but whole pages of the
//! guest's memory, at addresses that can be mapped, is a fault as a device is that panics.

use std::sync::Arc;
use std::time::Duration;

use base::ByteSize;
use device::{DeviceContext, DmaMemory, DmaSpace, EndpointDma, Endpoints, IommuModule, SpaceAlarm};
use memory::Ram;
use observe::Registry;
use state::Saved;
use vfio::fake::FakeSpace;
use vfio::{AddressSpace, MSI_WINDOW};
use virtio::VirtioDevice;
use virtio::conformance::driver::Driver;
use vmm_api::DeviceSpec;
use vmm_api::devices::IommuConfig;

use crate::run::{Target, outcome};

/// A device that has not answered by now does not.
const PATIENCE: Duration = Duration::from_secs(5);

/// Requests of one input; more would hardly find more.
const MOST: usize = 24;

/// The longest request but a probe, whose rest is reserved (virtio 1.3, 5.13.6).
const REQUEST: usize = 36;

/// Of the guest: so little that filling it takes no time.
const MEMORY: ByteSize = ByteSize::mib(4);

const PAGE: u64 = 4096;

/// The endpoints that there are.
const IDS: [u32; 2] = [40, 48];

fn made(endpoints: &Endpoints) -> Box<dyn VirtioDevice> {
    let context = DeviceContext {
        id: "it",
        metrics: &Registry::new(),
        no_space: &SpaceAlarm::new().expect("an event fd"),
    };
    let spec = DeviceSpec::new("it", &IommuConfig {}).expect("a configuration");
    let made = iommu::MODULE.create(&spec, &context, endpoints.clone());
    made.expect("a device")
}

/// Requests.
pub(crate) fn requests() -> Target {
    let request = |kind: u8, words: &[u32]| {
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes.resize(REQUEST, 0);
        bytes
    };
    let attach = |domain, endpoint| request(1, &[domain, endpoint]);
    let detach = |domain, endpoint| request(2, &[domain, endpoint]);
    // Below 4 GiB, so that the upper words are 0.
    let map = |domain, start: u32, end: u32, phys, flags| request(3, &[domain, start, 0, end, 0, phys, 0, flags]);
    let unmap = |domain, start: u32, end: u32| request(4, &[domain, start, 0, end, 0]);
    let probe = |endpoint| request(5, &[endpoint]);
    let seeds = [
        vec![
            attach(1, 40),
            map(1, 0x1000, 0x2fff, 0, 3),
            unmap(1, 0, 0xffff),
            detach(1, 40),
        ],
        vec![
            attach(1, 40),
            attach(1, 48),
            map(1, 0x8000_0000, 0x8000_0fff, 0x3f_f000, 1),
            map(1, 0x8000_1000, 0x8000_1fff, 0x40_0000, 3),
            attach(2, 40),
            unmap(1, 0x8000_0000, 0x8000_0ffe),
        ],
        vec![
            probe(40),
            probe(7),
            attach(7, 7),
            attach(0, 48),
            map(0, 0xfee0_0000, 0xfee0_0fff, 0, 2),
        ],
        vec![
            attach(1, 40),
            map(1, 0, u32::MAX, 0, 3),
            map(1, 0, 0x3f_ffff, 0, 3),
            attach(1, 48),
            detach(1, 40),
        ],
    ];
    Target {
        name: "iommu-requests",
        seeds: seeds.iter().map(|requests| requests.concat()).collect(),
        parse: ask,
    }
}

/// A function's address space, and what keeps it open.
fn function(endpoints: &Endpoints, id: u32, ram: &Ram) -> (Arc<FakeSpace>, Arc<EndpointDma>) {
    let fake = Arc::new(FakeSpace::new());
    let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
    let dma = EndpointDma::new(space, &DmaMemory::of(ram)).expect("ranges");
    endpoints.insert(id, &dma);
    (fake, dma)
}

fn ask(input: &[u8]) -> u64 {
    let ram = Ram::allocate(MEMORY).expect("memory");
    let endpoints = Endpoints::default();
    let functions = IDS.map(|id| function(&endpoints, id, &ram));
    let mut driver = Driver::new(made(&endpoints)).with_patience(PATIENCE);
    driver.start();
    let mut answers = String::new();
    for request in input.chunks(REQUEST).take(MOST) {
        let is_probe = request.first() == Some(&5);
        let mut bytes = request.to_vec();
        bytes.resize(if is_probe { 72 } else { request.len() }, 0);
        let room = if is_probe { 508 } else { 4 };
        let pushed = driver.push(0, &[&bytes], &[room]);
        driver.kick(0);
        let used = driver.wait_used(0).expect("a request that comes back");
        let answer = driver.bytes(pushed.writable[0]);
        match used.written {
            0 => answers.push('-'),
            _ => answers.push(char::from(b'a' + answer[room - 4] % 26)),
        }
        functions.iter().for_each(|(fake, _)| check(fake, &ram));
    }
    driver.reset();
    for (fake, _) in &functions {
        assert_eq!(fake.mapped_bytes(), 0, "a reset ends all mappings");
    }
    outcome(answers)
}

/// What a function reaches is whole pages of the guest's memory, and no more bytes than that has.
fn check(fake: &FakeSpace, ram: &Ram) {
    let region = &ram.regions()[0];
    let (start, size) = (region.as_ptr() as u64, MEMORY.bytes());
    for piece in fake.mapped() {
        let offset = piece.address.checked_sub(start).expect("guest memory");
        assert!(offset + piece.length <= size, "guest memory");
        assert!(
            [piece.iova, offset, piece.length].iter().all(|at| at % PAGE == 0),
            "whole pages"
        );
        let last = piece.last().expect("an end");
        assert!(last < 1 << 39, "an address that can be mapped");
        assert!(
            piece.iova > *MSI_WINDOW.end() || last < *MSI_WINDOW.start(),
            "no interrupt"
        );
    }
    assert!(fake.mapped_bytes() <= size, "no more than there is");
}

/// The saved state.
pub(crate) fn state() -> Target {
    let state = |end: u64| {
        format!(r#"{{"page_size_mask":4096,"input_start":0,"input_end":{end},"probe_size":504}}"#).into_bytes()
    };
    Target {
        name: "iommu-state",
        seeds: [(1 << 39) - 1, 0, u64::MAX].map(state).to_vec(),
        parse: restore,
    }
}

fn restore(input: &[u8]) -> u64 {
    let mut made = made(&Endpoints::default());
    let saved = Saved {
        kind: "iommu".into(),
        version: 1,
        payload: input.to_vec(),
    };
    outcome(match made.restore(&saved) {
        Ok(()) => "restored".to_owned(),
        Err(error) => error.to_string().split_whitespace().take(5).collect(),
    })
}
