//! virtio-rng (5.4) fed by the host's getrandom(2). Knows no transport and no machine.
//!
//! The smallest whole device; others have the same shape: a module that makes it, the device, and what its worker owns.

use std::io::Write;
use std::sync::Arc;

use base::{StopSignal, Worker};
use device::{CreateError, DeviceContext, DeviceModule, FdTable, parse_config};
use memory::GuestRam;
use observe::{Counter, LogLimit};
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio::{Activation, ActiveQueue, Chain, DeviceError, QueueInterrupt, QueueLoop, RingError, VirtioDevice};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, RngConfig};

/// The queue of requests (5.4.2); Linux has one in flight at a time.
const QUEUE_SIZES: [u16; 1] = [64];

/// The most that one request gets, so that a guest cannot make one take for ever. Drivers ask again for the rest.
const MOST: usize = 64 << 10;

/// This kind of device.
pub static MODULE: RngModule = RngModule;

/// Makes virtio-rng devices.
#[derive(Debug)]
pub struct RngModule;

impl DeviceModule for RngModule {
    fn kind(&self) -> &'static str {
        RngConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        _fds: &mut FdTable,
        context: &DeviceContext<'_>,
    ) -> Result<Box<dyn VirtioDevice>, CreateError> {
        let RngConfig {} = parse_config(spec)?;
        let counter = |name| context.metrics.counter(name, &[("device", context.id)]);
        Ok(Box::new(Rng {
            metrics: Metrics {
                bytes: counter("rng_bytes_total"),
                refused: counter("rng_refused_chains_total"),
            },
            log_limit: Arc::new(LogLimit::new(2)),
            worker: None,
        }))
    }
}

/// Nothing is under way between two requests, and entropy is never saved.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct RngState {}

impl Schema for RngState {
    const KIND: &'static str = "rng";
    const VERSION: u32 = 1;
}

#[derive(Clone)]
struct Metrics {
    bytes: Counter,
    refused: Counter,
}

struct Rng {
    metrics: Metrics,
    // Outlives activations, or a guest could have a line with each reset.
    log_limit: Arc<LogLimit>,
    worker: Option<Worker<Server>>,
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_RNG).unwrap_or(u16::MAX)
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, _offset: usize, _data: &mut [u8]) {}

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let Some(queue) = activation.queues.into_iter().next() else {
            return Err(DeviceError::MissingQueue(0));
        };
        let queue_loop = QueueLoop::of(&queue)?;
        let server = Server {
            queue,
            memory: activation.memory,
            interrupt: activation.interrupt,
            metrics: self.metrics.clone(),
            log_limit: Arc::clone(&self.log_limit),
        };
        let worker = Worker::spawn("rng", server, move |server, stop| server.run(&queue_loop, stop))?;
        self.worker = Some(worker);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let server = self.worker.take().and_then(Worker::stop);
        server.map(|server| server.queue).into_iter().collect()
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        Ok(Saved::of(&RngState {})?)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let RngState {} = saved.read("rng")?;
        Ok(())
    }
}

/// What the worker owns.
struct Server {
    queue: ActiveQueue,
    memory: Arc<GuestRam>,
    interrupt: Arc<dyn QueueInterrupt>,
    metrics: Metrics,
    log_limit: Arc<LogLimit>,
}

impl Server {
    /// Serves requests until it is stopped. Nothing is under way between two requests, so there is nothing to drain.
    fn run(mut self, queue_loop: &QueueLoop, stop: &StopSignal) -> Self {
        let log_limit = Arc::clone(&self.log_limit);
        queue_loop.serve("rng", stop, &log_limit, || self.serve());
        self
    }

    /// Serves at most as many requests as the ring has entries, so that a guest that never stops asking cannot keep
    /// the worker from being stopped. Tells whether there are more.
    fn serve(&mut self) -> Result<bool, RingError> {
        let memory = Arc::clone(&self.memory);
        self.queue.disable_kicks(&memory)?;
        for _ in 0..QUEUE_SIZES[0] {
            let Some(available) = self.queue.take(&memory)? else {
                break;
            };
            match available.check() {
                Ok(chain) => {
                    let written = self.fill(&chain);
                    self.queue.complete(&memory, chain.head(), written)?;
                }
                Err(bad) => {
                    self.metrics.refused.increment();
                    self.queue.complete(&memory, bad.head, 0)?;
                }
            }
        }
        self.queue.notify(&memory, self.interrupt.as_ref())?;
        self.queue.enable_kicks_unless_polling(&memory)
    }

    /// Fills a request's writable buffers; returns how many bytes it got.
    fn fill(&self, chain: &Chain<'_>) -> u32 {
        let wanted = chain.writable_bytes().min(MOST);
        let mut writer = chain.writer();
        let mut bytes = [0; 256];
        while writer.position() < wanted {
            let count = bytes.len().min(wanted - writer.position());
            // Up to 256 bytes come whole and without being interrupted (getrandom(2)).
            let random = rustix::rand::getrandom(&mut bytes[..count], GetRandomFlags::empty());
            let written = random.map_err(Into::into).and_then(|got| writer.write(&bytes[..got]));
            if let Err(error) = written {
                if self.log_limit.allow() {
                    log::warn!("rng: the host gives no entropy: {error}");
                }
                break;
            }
        }
        let written = writer.position();
        self.metrics.bytes.add(written as u64);
        u32::try_from(written).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use observe::Registry;
    use virtio::conformance::driver::Driver;
    use virtio::conformance::{Request, Subject, run};

    fn make() -> Box<dyn VirtioDevice> {
        let spec = DeviceSpec::new("rng", &RngConfig {}).unwrap();
        let context = DeviceContext {
            id: "rng",
            metrics: &Registry::new(),
            no_space: &device::SpaceAlarm::new().unwrap(),
        };
        MODULE.create(&spec, &mut FdTable::default(), &context).unwrap()
    }

    #[test]
    fn it_conforms() {
        let request = Request {
            queue: 0,
            readable: Vec::new(),
            writable: 32,
        };
        run(&Subject::new(make, request)).unwrap();
    }

    #[test]
    fn the_state_is_what_the_golden_file_says() {
        state::golden::check(env!("CARGO_MANIFEST_DIR"), &RngState {});
    }

    #[test]
    fn every_buffer_is_filled_with_something_else() {
        let mut driver = Driver::new(make());
        driver.start();
        let mut seen = Vec::new();
        for _ in 0..3 {
            let pushed = driver.push(0, &[], &[16, 300, 7]);
            driver.kick(0);
            assert_eq!(driver.wait_used(0).unwrap().written, 323);
            for buffer in pushed.writable {
                // Seven zero bytes by chance: once in 2^56.
                let bytes = driver.bytes(buffer);
                assert!(bytes.iter().any(|&byte| byte != 0));
                assert!(!seen.contains(&bytes));
                seen.push(bytes);
            }
        }
    }

    #[test]
    fn one_request_gets_no_more_than_the_most() {
        let mut driver = Driver::new(make());
        driver.start();
        let pushed = driver.push(0, &[], &[MOST, 64]);
        driver.kick(0);
        assert_eq!(driver.wait_used(0).unwrap().written as usize, MOST);
        assert_eq!(driver.bytes(pushed.writable[1]), [0; 64]);
    }

    #[test]
    fn its_configuration_has_no_fields() {
        let mut spec = DeviceSpec::new("rng", &RngConfig {}).unwrap();
        spec.config = serde_json::json!({"source": "/dev/random"});
        let context = DeviceContext {
            id: "rng",
            metrics: &Registry::new(),
            no_space: &device::SpaceAlarm::new().unwrap(),
        };
        let error = MODULE.create(&spec, &mut FdTable::default(), &context).err().unwrap();
        assert!(error.to_string().contains("source"), "{error}");
    }
}
