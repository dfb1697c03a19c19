//! Every device that this VMM can have. The one file that names them.

use device::{BalloonModule, DeviceModule, FunctionModule, IommuModule, MemoryModule, PmemModule};

/// What makes devices of one kind.
#[derive(Clone, Copy)]
pub(crate) enum Module {
    /// Devices that this process is.
    Device(&'static dyn DeviceModule),
    /// One by which a guest gives memory back.
    Balloon(&'static dyn BalloonModule),
    /// One by which a guest says what functions of the host's reach.
    Iommu(&'static dyn IommuModule),
    /// One that plugs memory.
    Memory(&'static dyn MemoryModule),
    /// Files that are memory.
    Pmem(&'static dyn PmemModule),
    /// Functions of the host's.
    Function(&'static dyn FunctionModule),
}

impl Module {
    fn kind(&self) -> &'static str {
        match self {
            Self::Device(module) => module.kind(),
            Self::Balloon(module) => module.kind(),
            Self::Iommu(module) => module.kind(),
            Self::Memory(module) => module.kind(),
            Self::Pmem(module) => module.kind(),
            Self::Function(module) => module.kind(),
        }
    }
}

/// The modules, in the order of their kinds' names.
const MODULES: [Module; 11] = [
    Module::Balloon(&balloon::MODULE),
    Module::Device(&block::MODULE),
    Module::Device(&console::MODULE),
    Module::Device(&virtiofs::MODULE),
    Module::Iommu(&iommu::MODULE),
    Module::Memory(&virtio_mem::MODULE),
    Module::Device(&net::MODULE),
    Module::Pmem(&pmem::MODULE),
    Module::Device(&rng::MODULE),
    Module::Function(&vfio_pci::MODULE),
    Module::Device(&vsock::MODULE),
];

/// The module of one kind.
pub(crate) fn find(kind: &str) -> Option<Module> {
    MODULES.iter().find(|module| module.kind() == kind).copied()
}

/// The names of all kinds, for an error's next step.
pub(crate) fn kinds() -> String {
    MODULES.each_ref().map(Module::kind).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_is_found_by_the_name_that_the_api_uses() {
        use vmm_api::devices::{
            BalloonConfig, BlockConfig, ConsoleConfig, DeviceConfig, FsConfig, IommuConfig, MemConfig, NetConfig,
            PmemConfig, RngConfig, VfioPciConfig, VsockConfig,
        };
        for kind in [
            BalloonConfig::KIND,
            BlockConfig::KIND,
            ConsoleConfig::KIND,
            FsConfig::KIND,
            IommuConfig::KIND,
            MemConfig::KIND,
            NetConfig::KIND,
            PmemConfig::KIND,
            RngConfig::KIND,
            VfioPciConfig::KIND,
            VsockConfig::KIND,
        ] {
            assert_eq!(find(kind).map(|module| module.kind()), Some(kind));
        }
        assert!(find("floppy").is_none());
        assert_eq!(
            kinds(),
            "balloon, block, console, fs, iommu, mem, net, pmem, rng, vfio-pci, vsock"
        );
    }
}
