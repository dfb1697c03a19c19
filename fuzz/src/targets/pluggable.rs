//! Requests to plug and unplug memory, and the saved state of the device that answers them. A device that contradicts itself afterwards
//! is a fault as one that panics is: what is plugged by its own word must be what its host was asked for.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{DeviceContext, HotplugRegion, MemoryBlocks, MemoryModule, PluggableMemory, SpaceAlarm};
use memory::GuestRam;
use memory::layout::Range;
use observe::Registry;
use state::Saved;
use virtio::conformance::driver::Driver;
use vmm_api::DeviceSpec;
use vmm_api::devices::{MEM_MIN_BLOCK, MEM_SECTION, MemConfig};

use crate::run::{Target, outcome};

/// A device that has not answered by now does not.
const PATIENCE: Duration = Duration::from_secs(5);

/// Requests of one input; more would hardly find more.
const MOST: usize = 24;

/// `struct virtio_mem_req` (5.15.6).
const REQUEST: usize = 24;

const START: u64 = 4 << 30;

/// Bytes that the host was asked to make ready, less those that it has back.
#[derive(Clone, Default)]
struct Ready(Arc<Mutex<u64>>);

impl Ready {
    fn change(&self, with: impl FnOnce(u64) -> Option<u64>) {
        let mut ready = self.0.lock().expect("no thread panics with it");
        *ready = with(*ready).expect("no more comes back than there is");
    }
}

impl MemoryBlocks for Ready {
    fn plug(&mut self, _: &GuestRam, run: Range) -> io::Result<()> {
        self.change(|ready| ready.checked_add(run.length));
        Ok(())
    }

    fn unplug(&mut self, _: &GuestRam, run: Range) -> io::Result<()> {
        self.change(|ready| ready.checked_sub(run.length));
        Ok(())
    }

    fn restored(&mut self, runs: &[Range]) -> io::Result<()> {
        runs.iter().try_for_each(|run| {
            self.change(|ready| ready.checked_add(run.length));
            Ok(())
        })
    }
}

fn made(ready: &Ready) -> PluggableMemory {
    let config = MemConfig {
        region_size: MEM_SECTION,
        max_size: None,
        requested_size: MEM_SECTION,
        block_size: MEM_MIN_BLOCK,
        node_id: None,
    };
    let context = DeviceContext {
        id: "it",
        metrics: &Registry::new(),
        no_space: &SpaceAlarm::new().expect("an event fd"),
    };
    let spec = DeviceSpec::new("it", &config).expect("a configuration");
    let memory = Range {
        start: START,
        length: MEM_SECTION.bytes(),
    };
    let region = HotplugRegion {
        addresses: memory,
        memory,
    };
    let made = virtio_mem::MODULE.create(&spec, &context, region, Box::new(ready.clone()));
    made.expect("a device")
}

fn consistent(device: &PluggableMemory, ready: &Ready) {
    let ready = *ready.0.lock().expect("no thread panics with it");
    assert_eq!(device.resize.sizes().plugged, ready, "the host has made ready");
}

/// Requests.
pub(crate) fn requests() -> Target {
    let request = |kind: u16, first: u64, blocks: u16| {
        let mut bytes = vec![0; REQUEST];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&(START + first * MEM_MIN_BLOCK.bytes()).to_le_bytes());
        bytes[16..18].copy_from_slice(&blocks.to_le_bytes());
        bytes
    };
    // Plug, state, unplug a part, plug across it, beyond the region, unplug all, and one that there is not.
    let requests = [
        request(0, 0, 8),
        request(3, 4, 8),
        request(1, 2, 2),
        request(0, 3, 1),
        request(0, 63, 2),
        request(2, 0, 0),
        request(9, 0, 1),
    ];
    Target {
        name: "mem-requests",
        seeds: requests.iter().cloned().chain([requests.concat()]).collect(),
        parse: ask,
    }
}

fn ask(input: &[u8]) -> u64 {
    let ready = Ready::default();
    let PluggableMemory { device, resize } = made(&ready);
    let mut driver = Driver::new(device).with_patience(PATIENCE);
    driver.start();
    let mut answers = String::new();
    for request in input.chunks(REQUEST).take(MOST) {
        let pushed = driver.push(0, &[request], &[10]);
        driver.kick(0);
        let used = driver.wait_used(0).expect("a request that comes back");
        let answer = driver.bytes(pushed.writable[0]);
        let kind = if used.written == 0 {
            9
        } else {
            answer[0] * 3 + answer[8]
        };
        answers.push(char::from(b'a' + kind));
        let ready = *ready.0.lock().expect("no thread panics with it");
        assert_eq!(resize.sizes().plugged, ready, "the host has made ready");
    }
    driver.reset();
    outcome(answers)
}

/// The saved state.
pub(crate) fn state() -> Target {
    let good = r#"{"addr":4294967296,"region_size":134217728,"block_size":2097152,"node_id":null,"#;
    let sizes = r#""usable_region_size":134217728,"requested_size":33554432,"plugged":"#;
    let state = |words: &str| format!("{good}{sizes}{words}}}").into_bytes();
    Target {
        name: "mem-state",
        seeds: ["[0]", "[5]", "[18446744073709551615]", "[1,1]", "[]"]
            .map(state)
            .to_vec(),
        parse: restore,
    }
}

fn restore(input: &[u8]) -> u64 {
    let ready = Ready::default();
    let mut made = made(&ready);
    let saved = Saved {
        kind: "mem".into(),
        version: 1,
        payload: input.to_vec(),
    };
    let restored = made.device.restore(&saved).map_err(|error| error.to_string());
    consistent(&made, &ready);
    outcome(match restored {
        Ok(()) => format!("{}", made.resize.sizes().plugged.count_ones()),
        Err(error) => error.split_whitespace().take(6).collect(),
    })
}
