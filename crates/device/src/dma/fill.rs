//! How a guest's memory is filled before it is mapped: how fast, and near to which node. Knows neither what is filled nor by which threads.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_api::devices::{MIN_FILL_RATE, MemoryFill};

use crate::{CreateError, RateLimiter};

/// What holds for all threads that fill memory for one address space.
#[derive(Clone, Debug, Default)]
pub(crate) struct FillPolicy {
    /// Bytes a second, of all of them together; no limit if missing.
    rate: Option<Arc<RateLimiter>>,
    /// The NUMA node that it is to come from; any if missing.
    node: Option<u32>,
}

/// Bits of a set of nodes: more than Linux can have (`MAX_NUMNODES`, at most 1024 by its `CONFIG_NODES_SHIFT`).
const NODES: usize = 1024;

impl FillPolicy {
    /// As a function's configuration says it.
    ///
    /// # Errors
    /// A rate at which nobody waits until all is filled.
    pub(super) fn of(config: MemoryFill) -> Result<Self, CreateError> {
        if let Some(rate) = config.rate.filter(|rate| *rate < MIN_FILL_RATE) {
            return Err(CreateError::Value(format!(
                "memory was to be filled with {rate} a second: give {MIN_FILL_RATE} at least, or no limit"
            )));
        }
        Self::with(config.rate.map(|rate| rate.bytes()), config.numa_node)
    }

    pub(super) fn with(rate: Option<u64>, node: Option<u32>) -> Result<Self, CreateError> {
        Ok(Self {
            rate: RateLimiter::new(rate, None, "memory fill")?,
            node,
        })
    }

    /// Has what this thread fills come from the node, as long as that has memory (set_mempolicy(2), `MPOL_PREFERRED`). Nothing without a node.
    ///
    /// # Errors
    /// There is no such node, this process may not have memory of it, or the kernel knows none.
    pub(super) fn prefer_node(&self) -> io::Result<()> {
        let Some(node) = self.node else { return Ok(()) };
        let mut nodes = [0_u64; NODES / 64];
        let index = usize::try_from(node / u64::BITS).unwrap_or(usize::MAX);
        let word = nodes.get_mut(index).ok_or(io::ErrorKind::InvalidInput)?;
        *word = 1 << (node % u64::BITS);
        // SAFETY: 1. the kernel reads as many bits as the set has, which is there until the call returns: of the number it takes one off
        // (get_nodes, mm/mempolicy.c); 2. it changes where pages of this thread come from later, and no memory that there is.
        let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, nodes.as_ptr(), NODES + 1) };
        match set {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// How long the next step has to wait; `None` when it need not.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.rate.as_ref()?.wait(Instant::now())
    }

    /// So much is being filled.
    pub(super) fn spend(&self, bytes: u64) {
        if let Some(rate) = &self.rate {
            rate.spend(usize::try_from(bytes).unwrap_or(usize::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;

    #[test]
    fn a_rate_that_keeps_everybody_waiting_is_refused() {
        for rate in [ByteSize(0), ByteSize(MIN_FILL_RATE.bytes() - 1)] {
            let refused = FillPolicy::of(MemoryFill {
                rate: Some(rate),
                numa_node: None,
            });
            let told = refused.err().unwrap().to_string();
            assert!(told.contains("a second: give 64 MiB at least"), "{told}");
        }
        let rate = Some(MIN_FILL_RATE);
        let numa_node = None;
        let policy = FillPolicy::of(MemoryFill { rate, numa_node }).unwrap();
        assert_eq!(policy.wait(), None);
        policy.spend(MIN_FILL_RATE.bytes());
        assert!(policy.wait().is_some());
        let unlimited = FillPolicy::of(MemoryFill::default()).unwrap();
        unlimited.spend(u64::MAX);
        assert_eq!(unlimited.wait(), None);
    }

    #[test]
    fn a_node_that_there_is_not_is_an_error() {
        let node = |numa_node| {
            let policy = FillPolicy::of(MemoryFill { rate: None, numa_node }).unwrap();
            std::thread::spawn(move || policy.prefer_node()).join().unwrap()
        };
        assert!(node(None).is_ok());
        for none in [1023, 1024, u32::MAX] {
            assert!(node(Some(none)).is_err(), "{none}");
        }
    }
}
