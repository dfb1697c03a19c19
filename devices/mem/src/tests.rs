//! The device behind the real transport, with a host that keeps a record of what it is asked for, and can refuse.

mod life;
mod requests;

use std::io;
use std::sync::{Arc, Mutex};

use ::device::{
    DeviceContext, HotplugRegion, MemoryBlocks, MemoryModule, PluggableMemory, PluggableSizes, ResizeMemory,
};
use memory::GuestRam;
use memory::layout::Range;
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::{Request, Subject, run};
use vmm_api::DeviceSpec;

use crate::MODULE;
use crate::saved::MemState;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 2 * MIB;
const START: u64 = 4 << 30;
const REGION: u64 = 512 * MIB;

/// Answers, as they lie in memory.
const ACK: u8 = 0;
const NACK: u8 = 1;
const BUSY: u8 = 2;
const ERROR: u8 = 3;

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

/// One thing that the host was asked for, and how much was plugged by the device's word when it was.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Call {
    verb: &'static str,
    run: Range,
    plugged: u64,
}

#[derive(Default)]
struct Ledger {
    calls: Vec<Call>,
    /// How many more it carries out before it refuses; all of them if not given.
    left: Option<usize>,
    sizes: Option<Arc<dyn ResizeMemory>>,
}

/// A host that keeps a record.
#[derive(Clone, Default)]
struct Host(Arc<Mutex<Ledger>>);

impl Host {
    fn call(&self, verb: &'static str, run: Range) -> io::Result<()> {
        let mut ledger = self.0.lock().unwrap();
        if ledger.left == Some(0) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        ledger.left = ledger.left.map(|left| left - 1);
        let plugged = ledger.sizes.as_ref().map_or(0, |sizes| sizes.sizes().plugged);
        ledger.calls.push(Call { verb, run, plugged });
        Ok(())
    }

    /// What was asked for since this was last called.
    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }

    fn refuse_after(&self, count: impl Into<Option<usize>>) {
        self.0.lock().unwrap().left = count.into();
    }
}

impl MemoryBlocks for Host {
    fn plug(&mut self, _: &GuestRam, run: Range) -> io::Result<()> {
        self.call("plug", run)
    }

    fn unplug(&mut self, _: &GuestRam, run: Range) -> io::Result<()> {
        self.call("unplug", run)
    }

    fn restored(&mut self, runs: &[Range]) -> io::Result<()> {
        runs.iter().try_for_each(|run| self.call("restored", *run))
    }
}

fn call(verb: &'static str, first: u64, blocks: u64, plugged: u64) -> Call {
    let run = Range {
        start: START + first * BLOCK,
        length: blocks * BLOCK,
    };
    Call { verb, run, plugged }
}

fn spec(config: serde_json::Value) -> DeviceSpec {
    DeviceSpec {
        id: "memory".into(),
        kind: "mem".into(),
        config,
    }
}

/// Such a region, of which so much can be plugged.
fn region(start: u64, length: u64, max: u64) -> HotplugRegion {
    let range = |length| Range { start, length };
    HotplugRegion {
        addresses: range(length),
        memory: range(max),
    }
}

fn created(config: serde_json::Value, host: Host, registry: &Registry) -> PluggableMemory {
    let context = DeviceContext {
        id: "memory",
        metrics: registry,
        no_space: &::device::SpaceAlarm::new().unwrap(),
    };
    let max = config.get("max_size").map_or(REGION, |max| max.as_u64().unwrap());
    let made = MODULE.create(
        &spec(config),
        &context,
        region(START, REGION, max),
        Box::new(host.clone()),
    );
    let made = made.unwrap();
    host.0.lock().unwrap().sizes = Some(Arc::clone(&made.resize));
    made
}

/// A driver of a device with a region of 512 MiB, of which so much is to be plugged.
struct Guest {
    driver: Driver,
    resize: Arc<dyn ResizeMemory>,
    host: Host,
    registry: Registry,
}

impl Guest {
    fn idle(requested: u64) -> Self {
        let (host, registry) = (Host::default(), Registry::new());
        let config = serde_json::json!({"region_size": REGION, "requested_size": requested});
        let PluggableMemory { device, resize } = created(config, host.clone(), &registry);
        Self {
            driver: Driver::new(device),
            resize,
            host,
            registry,
        }
    }

    fn new(requested: u64) -> Self {
        let mut guest = Self::idle(requested);
        guest.driver.start();
        guest
    }

    /// The answer's type and state.
    fn raw(&mut self, request: &[u8], room: &[usize]) -> (u32, Vec<u8>) {
        let pushed = self.driver.push(0, &[request], room);
        self.driver.kick(0);
        let used = self.driver.wait_used(0).expect("an answer");
        let answer = pushed.writable.iter().flat_map(|&buffer| self.driver.bytes(buffer));
        (used.written, answer.collect())
    }

    fn at(&mut self, kind: u16, addr: u64, nb_blocks: u16) -> (u8, u8) {
        let (written, answer) = self.raw(&request(kind, addr, nb_blocks), &[10]);
        assert_eq!(written, 10);
        assert_eq!(
            [&answer[1..8], &answer[9..]].concat(),
            [0; 8],
            "what is no part of the answer"
        );
        (answer[0], answer[8])
    }

    /// The answer to a request for blocks of the region by their number.
    fn ask(&mut self, kind: u16, first: u64, blocks: u16) -> u8 {
        self.at(kind, START + first * BLOCK, blocks).0
    }

    /// The state of such blocks.
    fn state(&mut self, first: u64, blocks: u16) -> u8 {
        let (answer, state) = self.at(STATE, START + first * BLOCK, blocks);
        assert_eq!(answer, ACK);
        state
    }

    /// `usable_region_size`, `plugged_size` and `requested_size` as the driver reads them, in MiB.
    fn sizes(&self) -> [u64; 3] {
        [32, 40, 48].map(|at| (self.driver.config(at, 4) | self.driver.config(at + 4, 4) << 32) / MIB)
    }

    fn counted(&self, kind: &str, answer: &str) -> u64 {
        let samples = self.registry.samples();
        let has = |sample: &&observe::Sample| {
            let label = |name, value: &str| sample.labels.contains(&(name, value.to_owned()));
            sample.name == "mem_requests_total" && label("kind", kind) && label("answer", answer)
        };
        samples.iter().find(has).map(|sample| sample.value).unwrap()
    }
}

/// `struct virtio_mem_req`, with something in its padding.
fn request(kind: u16, addr: u64, nb_blocks: u16) -> Vec<u8> {
    let mut bytes = vec![0xa5; 24];
    bytes[..2].copy_from_slice(&kind.to_le_bytes());
    bytes[8..16].copy_from_slice(&addr.to_le_bytes());
    bytes[16..18].copy_from_slice(&nb_blocks.to_le_bytes());
    bytes
}

#[test]
fn it_conforms() {
    let make = || {
        let config = serde_json::json!({"region_size": REGION, "requested_size": REGION});
        created(config, Host::default(), &Registry::new()).device
    };
    let request = Request {
        queue: 0,
        readable: request(STATE, START, 3),
        writable: 10,
    };
    run(&Subject::new(make, request)).unwrap();
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    let state = MemState {
        addr: START,
        region_size: REGION,
        block_size: BLOCK,
        node_id: Some(1),
        usable_region_size: 384 * MIB,
        requested_size: 128 * MIB,
        plugged: vec![u64::MAX, 5, 0, 0],
    };
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &state);
}
