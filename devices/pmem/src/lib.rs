//! virtio-pmem (virtio 1.2, 5.19): a file of the host's is memory of the guest's, which finds it as a disk of persistent memory
//! (`/dev/pmem0`) and may map it without a copy (DAX). Knows no transport and no machine; where the memory lies is the machine's to say.
//!
//! The guest reaches the memory without this device. The one request that there is asks that what was written is on the host's disk.

mod server;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::sync::Arc;

use base::Worker;
use device::{CreateError, DeviceContext, FdTable, PersistentMemory, PmemModule, parse_config};
use memory::{PmemPart, PmemWrites, map_pmem};
use observe::{Counter, LogLimit};
use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio::{Activation, ActiveQueue, DeviceError, QueueLoop, VirtioDevice};
use virtio_bindings::virtio_ids::VIRTIO_ID_PMEM;
use vm_memory::{Address, GuestMemoryRegion};
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, MAX_PMEM_PARTS, PmemConfig, PmemPartConfig};

use crate::server::Server;

/// The queue of requests (5.19.2).
const QUEUE_SIZES: [u16; 1] = [64];

/// This kind of device.
pub static MODULE: Module = Module;

/// Makes virtio-pmem devices.
#[derive(Debug)]
pub struct Module;

impl PmemModule for Module {
    fn kind(&self) -> &'static str {
        PmemConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
        start: u64,
    ) -> Result<PersistentMemory, CreateError> {
        let PmemConfig { file, private, parts } = parse_config(spec)?;
        if parts.len() > MAX_PMEM_PARTS || (private && !parts.is_empty()) {
            return Err(CreateError::Value(format!(
                "{} of its parts are to be other files': give at most {MAX_PMEM_PARTS}, and none of a private one",
                parts.len()
            )));
        }
        let file = File::from(fds.take(file)?);
        let take = |part: &PmemPartConfig| {
            Ok(PmemPart {
                file: File::from(fds.take(part.file)?),
                offset: part.offset,
                at: part.at,
                length: part.length,
            })
        };
        let parts = parts.iter().map(take).collect::<Result<Vec<_>, CreateError>>()?;
        let writes = if private {
            PmemWrites::Private
        } else {
            PmemWrites::Shared
        };
        let region = map_pmem(file, start, writes, &parts).map_err(|error| CreateError::Value(error.to_string()))?;
        let file = region.file_offset().map(|place| Arc::clone(place.arc()));
        let counter = |name| context.metrics.counter(name, &[("device", context.id)]);
        let device = Box::new(Pmem {
            config: config_space(region.start_addr().raw_value(), region.len()),
            file: file.filter(|_| !private),
            is_saved: !private && parts.is_empty(),
            metrics: Metrics {
                flushes: counter("pmem_flushes_total"),
                refused: counter("pmem_refused_chains_total"),
            },
            log_limit: Arc::new(LogLimit::new(2)),
            worker: None,
        });
        Ok(PersistentMemory { device, region })
    }
}

/// `struct virtio_pmem_config` (5.19.4): first address and length of the memory.
fn config_space(start: u64, size: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&start.to_le_bytes());
    bytes[8..].copy_from_slice(&size.to_le_bytes());
    bytes
}

/// Where the memory is, in which the guest has found a file system.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PmemState {
    start: u64,
    size: u64,
}

impl PmemState {
    /// By what the guest reads.
    fn of(config: [u8; 16]) -> Self {
        let [start, size] = [0, 8].map(|at| {
            let number = config.get(at..).and_then(|bytes| bytes.first_chunk());
            number.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        });
        Self { start, size }
    }
}

impl Schema for PmemState {
    const KIND: &'static str = "pmem";
    const VERSION: u32 = 1;
}

#[derive(Clone)]
struct Metrics {
    flushes: Counter,
    refused: Counter,
}

struct Pmem {
    config: [u8; 16],
    /// None of what the guest writes goes there if it is not here.
    file: Option<Arc<File>>,
    is_saved: bool,
    metrics: Metrics,
    // Outlives activations, or a guest could have a line with each reset.
    log_limit: Arc<LogLimit>,
    worker: Option<Worker<Server>>,
}

impl VirtioDevice for Pmem {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_PMEM).unwrap_or(u16::MAX)
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let rest = self.config.get(offset..).unwrap_or_default();
        for (to, from) in data.iter_mut().zip(rest) {
            *to = *from;
        }
    }

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
            file: self.file.clone(),
            metrics: self.metrics.clone(),
            log_limit: Arc::clone(&self.log_limit),
        };
        let worker = Worker::spawn("pmem", server, move |server, stop| server.run(&queue_loop, stop))?;
        self.worker = Some(worker);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let server = self.worker.take().and_then(Worker::stop);
        server.map(|server| server.queue).into_iter().collect()
    }

    /// Where the file is. Its bytes are whoever's it is to save, with what else they mean; those of one that is private nobody else has, and
    /// those of parts are memory of others, which goes on.
    fn save(&self) -> Result<Saved, DeviceError> {
        match self.is_saved {
            true => Ok(Saved::of(&PmemState::of(self.config))?),
            false => Err(DeviceError::NotSaved),
        }
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let (saved, here) = (saved.read::<PmemState>("pmem")?, PmemState::of(self.config));
        match saved == here {
            true => Ok(()),
            false => Err(DeviceError::Unlike(format!(
                "its file was {} bytes long, at {:#x} of the guest's memory, and is {} long, at {:#x}",
                saved.size, saved.start, here.size, here.start
            ))),
        }
    }
}
