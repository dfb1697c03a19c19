//! What a sandbox is made of, and the checks that need no VMM.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use base::ByteSize;
use host::MemInfo;
use vmm_api::{ConfigError, config};

use crate::Error;

/// A sandbox to launch.
#[derive(Debug)]
pub struct SandboxSpec {
    /// The root file system: an erofs image, open for reading.
    pub root: File,
    /// Number of vCPUs.
    pub cpus: u32,
    /// Guest memory.
    pub memory: ByteSize,
    /// The guest's host name.
    pub hostname: String,
    /// The guest kernel.
    pub kernel: PathBuf,
    /// The initramfs with the agent.
    pub initramfs: PathBuf,
    /// The KVM device, [`host::kvm::DEVICE`].
    pub kvm: PathBuf,
    /// The VMM program.
    pub vmm: PathBuf,
    /// The kernel command line, from [`crate::command_line`].
    pub cmdline: String,
    /// How long the guest may take until its agent is ready.
    pub boot_limit: Duration,
    /// Where the guest's console is copied to, whole.
    pub console_copy: Option<File>,
}

/// Checks a number of vCPUs; warns of more than this host has.
///
/// # Errors
/// Not 1 to 64.
pub fn check_cpus(cpus: u32) -> Result<(), Error> {
    if cpus == 0 || cpus > config::MAX_CPUS {
        return Err(ConfigError::Cpus(cpus).into());
    }
    let have = host::online_cpus();
    if cpus > have {
        log::warn!("{cpus} virtual CPUs share the {have} of this host");
    }
    Ok(())
}

/// Checks an amount of memory against what this host has; warns where it would have to be taken from others.
///
/// # Errors
/// Less than a guest needs, or more than the host has.
pub fn check_memory(asked: ByteSize) -> Result<(), Error> {
    if asked < config::MIN_MEMORY {
        return Err(ConfigError::MemoryTooSmall(asked).into());
    }
    let MemInfo { total, available } = MemInfo::read().map_err(Error::host("reading /proc/meminfo"))?;
    against(asked, total, available)
}

fn against(asked: ByteSize, total: ByteSize, available: ByteSize) -> Result<(), Error> {
    if asked > total {
        return Err(Error::MoreMemoryThanHost {
            asked,
            total,
            available,
        });
    }
    if asked > available {
        log::warn!("{asked} of memory were asked for, and only {available} of {total} are available");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_make_no_vm_are_refused_with_the_limits() {
        assert!(check_cpus(0).unwrap_err().to_string().contains("1 to 64"));
        assert!(check_cpus(1000).unwrap_err().to_string().contains("1000 CPUs"));
        check_cpus(1).unwrap();
        assert!(
            check_memory(ByteSize::mib(1))
                .unwrap_err()
                .to_string()
                .contains("32 MiB")
        );
        let error = check_memory(ByteSize::gib(1 << 20)).unwrap_err();
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
