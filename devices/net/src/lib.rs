//! virtio-net (5.1) over TAP descriptors, one a queue pair. Knows no transport, no machine, and nothing of the network
//! that the TAPs belong to.
//!
//! ```text
//!  transmitq ─take─▶ chain ──writev──▶ TAP          one worker a pair, both directions;
//!  receiveq  ◀─use── chains ◀──readv── TAP          one look at the interrupt a pass
//!  controlq: how many pairs are in use; served by the first pair's worker
//! ```
//! Packets go between a TAP and guest memory without a copy, with the header of 5.1.6 as the kernel's own
//! `virtio_net_hdr`. Sections cited are those of virtio 1.2.

#![allow(
    unsafe_code,
    reason = "guest memory is handed to the kernel by address, and a TAP is set up by ioctl; only `tap` does"
)]

mod config;
mod control;
mod device;
mod metrics;
mod rate_limiters;
mod receive;
mod tap;
mod transmit;
pub mod untrusted;
mod worker;

#[cfg(test)]
#[path = "../tests/tap/mod.rs"]
mod testing;
#[cfg(test)]
mod tests;

use ::device::{CreateError, DeviceContext, DeviceModule, FdTable, parse_config};
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, NetConfig};

use crate::config::{MAX_MTU, MIN_MTU};
use crate::device::Net;
use crate::metrics::Metrics;
use crate::rate_limiters::RateLimiters;
use crate::tap::Tap;

/// The most queue pairs; a guest has no use for more than it has vCPUs, and a TAP has no more queues than 256.
const MAX_PAIRS: usize = 64;

/// This kind of device.
pub static MODULE: NetModule = NetModule;

/// Makes virtio-net devices.
#[derive(Debug)]
pub struct NetModule;

impl DeviceModule for NetModule {
    fn kind(&self) -> &'static str {
        NetConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
    ) -> Result<Box<dyn VirtioDevice>, CreateError> {
        let config: NetConfig = parse_config(spec)?;
        check(&config)?;
        let taps = config
            .taps
            .iter()
            .map(|&fd| Tap::new(fds.take(fd)?))
            .collect::<Result<Vec<_>, _>>()?;
        let limits = RateLimiters::new(&config.limits)?;
        let metrics = Metrics::new(context.metrics, context.id);
        let net = Net::new(taps, &config, limits, metrics).map_err(|source| CreateError::Host {
            what: "making event descriptors for the queue pairs",
            source,
        })?;
        Ok(Box::new(net))
    }
}

/// What can be told from the configuration alone.
fn check(config: &NetConfig) -> Result<(), CreateError> {
    if config.taps.is_empty() || config.taps.len() > MAX_PAIRS {
        return Err(CreateError::Value(format!(
            "{} TAP descriptors were given: give one for each queue pair, 1 to {MAX_PAIRS}",
            config.taps.len()
        )));
    }
    // The lowest bit of the first byte marks a group (IEEE 802); all zeros is nobody's address.
    if config.mac.0[0] & 1 != 0 || config.mac.0 == [0; 6] {
        return Err(CreateError::Value(format!(
            "{} is not the address of one station: clear the lowest bit of its first byte",
            config.mac
        )));
    }
    if !(MIN_MTU..=MAX_MTU).contains(&config.mtu) {
        return Err(CreateError::Value(format!(
            "an MTU of {} was asked for: give {MIN_MTU} to {MAX_MTU}",
            config.mtu
        )));
    }
    Ok(())
}
