//! Whether this host can give what a sandbox asks for. Knows its numbers only.

use base::ByteSize;
use host::MemInfo;
use node_api::Resources;
use vmm_api::{ConfigError, config};

use crate::Error;

/// Checks vCPUs and memory.
///
/// # Errors
/// Numbers that make no VM, or more memory than the host has.
pub(crate) fn check(resources: &Resources) -> Result<(), Error> {
    let cpus = resources.cpus;
    if cpus == 0 || cpus > config::MAX_CPUS {
        return Err(ConfigError::Cpus(cpus).into());
    }
    if resources.memory < config::MIN_MEMORY {
        return Err(ConfigError::MemoryTooSmall(resources.memory).into());
    }
    let MemInfo { total, available } = MemInfo::read().map_err(Error::host("reading /proc/meminfo"))?;
    against(resources.memory, total, available)
}

fn against(asked: ByteSize, total: ByteSize, available: ByteSize) -> Result<(), Error> {
    if asked <= total {
        return Ok(());
    }
    Err(Error::MoreMemoryThanHost {
        asked,
        total,
        available,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(cpus: u32, memory: ByteSize) -> Error {
        check(&Resources {
            cpus,
            memory,
            disk: None,
        })
        .unwrap_err()
    }

    #[test]
    fn numbers_that_make_no_vm_are_refused_with_the_limits() {
        assert!(refusal(0, ByteSize::mib(64)).to_string().contains("1 to 64"));
        assert!(refusal(1000, ByteSize::mib(64)).to_string().contains("1000 CPUs"));
        assert!(refusal(1, ByteSize::mib(1)).to_string().contains("32 MiB"));
        let error = refusal(1, ByteSize::gib(1 << 20));
        assert!(error.to_string().contains("but this host has"), "{error}");
        assert_eq!(error.exit_code(), 125);
    }

    #[test]
    fn the_hosts_total_is_the_limit_and_what_is_available_is_not() {
        let (total, available) = (ByteSize::gib(2), ByteSize::gib(1));
        against(ByteSize::gib(2), total, available).unwrap();
        assert!(against(ByteSize(ByteSize::gib(2).0 + 4096), total, available).is_err());
    }
}
