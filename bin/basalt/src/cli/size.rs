//! How large a virtual machine is: what `run` and `template build` have in common. Whether a size that is not given is the usual one
//! or a template's is for whoever asks.

use base::ByteSize;
use clap::Args;
use node_api::{Class, CpuModel, Idle, MemoryMode, Resources};

use super::parse;

/// How large it is.
#[derive(Args, Clone, Debug)]
pub(crate) struct SizeArgs {
    /// Number of virtual CPUs, 1 to 64 [default: 1].
    #[arg(long, value_name = "N", value_parser = parse::cpus)]
    pub(crate) cpus: Option<u32>,

    /// Memory of the virtual machine, such as 512m or 2g [default: 512m].
    #[arg(short, long, value_name = "SIZE", value_parser = parse::memory)]
    pub(crate) memory: Option<ByteSize>,

    /// Size of the disk that takes what is written, such as 10g; 0 keeps that in memory instead [default: 10g].
    #[arg(long, value_name = "SIZE", value_parser = parse::disk)]
    pub(crate) disk: Option<ByteSize>,

    /// Processor that the guest sees: host, which is all that this host has; common, what every class has of that; or x86-64-v2,
    /// x86-64-v3 or x86-64-v4, with which snapshots can go on on other hosts [default: the daemon's, host].
    #[arg(long, value_name = "MODEL")]
    pub(crate) cpu_model: Option<CpuModel>,
}

impl SizeArgs {
    /// The usual size where nothing else was given.
    pub(crate) fn resources(&self) -> Resources {
        self.over(Resources {
            cpus: 1,
            memory: ByteSize::mib(512),
            boot_memory: None,
            max_memory: None,
            held_memory: None,
            inflated: None,
            disk: Some(ByteSize::gib(10)),
            cpu_model: None,
            class: Class::Standard,
            idle: Idle::Halt,
            memory_mode: MemoryMode::Translated,
            free_page_reporting: false,
            guest_iommu: false,
        })
    }

    /// That size where nothing else was given.
    pub(crate) fn over(&self, usual: Resources) -> Resources {
        Resources {
            cpus: self.cpus.unwrap_or(usual.cpus),
            memory: self.memory.unwrap_or(usual.memory),
            boot_memory: usual.boot_memory,
            max_memory: usual.max_memory,
            held_memory: None,
            inflated: None,
            disk: self
                .disk
                .map_or(usual.disk, |disk| Some(disk).filter(|disk| disk.bytes() > 0)),
            cpu_model: self.cpu_model.or(usual.cpu_model),
            class: usual.class,
            idle: usual.idle,
            memory_mode: usual.memory_mode,
            free_page_reporting: usual.free_page_reporting,
            guest_iommu: usual.guest_iommu,
        }
    }

    /// The same for a command line.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        words.extend(self.cpus.map(|cpus| format!("--cpus={cpus}")));
        words.extend(self.memory.map(|memory| format!("--memory={}", memory.bytes())));
        words.extend(self.disk.map(|disk| format!("--disk={}", disk.bytes())));
        words.extend(self.cpu_model.map(|model| format!("--cpu-model={model}")));
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_wins() {
        let none = SizeArgs {
            cpus: None,
            memory: None,
            disk: None,
            cpu_model: None,
        };
        let usual = none.resources();
        assert_eq!((usual.cpus, usual.disk), (1, Some(ByteSize::gib(10))));
        assert_eq!(usual.memory, ByteSize::mib(512));
        assert!(none.words().is_empty());
        let given = SizeArgs {
            cpus: Some(3),
            memory: None,
            disk: Some(ByteSize(0)),
            cpu_model: Some(CpuModel::V3),
        };
        let other = given.over(usual.clone());
        assert_eq!((other.cpus, other.memory, other.disk), (3, usual.memory, None));
        assert_eq!((usual.cpu_model, other.cpu_model), (None, Some(CpuModel::V3)));
        assert_eq!(given.words(), ["--cpus=3", "--disk=0", "--cpu-model=x86-64-v3"]);
    }
}
