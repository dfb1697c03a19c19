//! virtio-block (5.2) over a file descriptor, by io_uring with a thread-pool fallback. Knows no transport and no machine.
//!
//! ```text
//!  ring ─take─▶ request::parse ─Io─▶ Backend (uring │ threads) ─▶ file
//!   ▲               │ refused                │ result
//!   └─ CompletionQueue ◀─ Completion ◀───────┘      one worker a queue, one pass a batch
//! ```
//! Each request has a [`request::Completion`], which has to be given and gives itself with an error when it is dropped. One that fails because the host has no space left is not answered: it is kept ([`virtio::ActiveQueue::held`]), the VM's
//! alarm is raised, and it begins anew when the device is activated the next time. Data goes between the file and guest memory without a copy. Sections cited are those of virtio 1.2.

#![allow(
    unsafe_code,
    reason = "guest memory is handed to the kernel by address; only `guest_io` and `uring` do"
)]

mod backend;
mod config;
mod device;
mod disk;
mod guest_io;
mod metrics;
mod request;
mod server;
mod threads;
mod throttle;
mod uring;
mod waiting;

#[cfg(test)]
mod tests;

use ::device::{CreateError, DeviceContext, DeviceModule, FdTable, parse_config};
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;
use vmm_api::devices::{BlockConfig, BlockEngine, DeviceConfig};

use crate::device::{Block, Engine, NoSpace};
use crate::disk::Disk;
use crate::metrics::Metrics;
use crate::throttle::RateLimiters;
use crate::uring::Ring;

/// The most queues; more do not help one file.
const MAX_QUEUES: u16 = 16;

/// This kind of device.
pub static MODULE: BlockModule = BlockModule;

/// Makes virtio-block devices.
#[derive(Debug)]
pub struct BlockModule;

impl DeviceModule for BlockModule {
    fn kind(&self) -> &'static str {
        BlockConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
    ) -> Result<Box<dyn VirtioDevice>, CreateError> {
        let config: BlockConfig = parse_config(spec)?;
        if config.queues == 0 || config.queues > MAX_QUEUES {
            return Err(CreateError::Value(format!(
                "{} queues were asked for: give 1 to {MAX_QUEUES}",
                config.queues
            )));
        }
        let file = fds.take(config.file)?;
        let disk = Disk::open(file, config.read_only, &config.serial)?;
        let engine = engine(config.engine, &disk, config.queues, context.id)?;
        let limits = RateLimiters::new(&config.limits)?;
        let metrics = Metrics::new(context.metrics, context.id);
        let no_space = NoSpace::new(context.no_space, context.id);
        Ok(Box::new(Block::new(
            disk,
            engine,
            config.queues,
            (limits, no_space),
            metrics,
        )))
    }
}

/// Sets up the rings, while the process still may: a jailed VMM cannot make any later.
fn engine(wanted: BlockEngine, disk: &Disk, queues: u16, id: &str) -> Result<Engine, CreateError> {
    if wanted == BlockEngine::Threads {
        return Ok(Engine::Threads);
    }
    let rings: std::io::Result<Vec<_>> = (0..queues).map(|_| Ring::new(disk.file()).map(Some)).collect();
    match rings {
        Ok(rings) => Ok(Engine::Uring(rings)),
        Err(error) if wanted == BlockEngine::Auto => {
            log::info!("{id}: no io_uring on this host ({error}), threads are used instead");
            Ok(Engine::Threads)
        }
        Err(source) => Err(CreateError::Host {
            what: "io_uring cannot be set up: allow it (kernel.io_uring_disabled) or choose the engine `threads`",
            source,
        }),
    }
}
