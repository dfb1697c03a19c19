//! Every device that this VMM can have. The one file that names them.

use device::DeviceModule;

/// The modules, in the order of their kinds' names.
const MODULES: [&dyn DeviceModule; 6] = [
    &block::MODULE,
    &console::MODULE,
    &virtiofs::MODULE,
    &net::MODULE,
    &rng::MODULE,
    &vsock::MODULE,
];

/// The module of one kind.
pub(crate) fn find(kind: &str) -> Option<&'static dyn DeviceModule> {
    MODULES.iter().find(|module| module.kind() == kind).copied()
}

/// The names of all kinds, for an error's next step.
pub(crate) fn kinds() -> String {
    MODULES.map(DeviceModule::kind).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_is_found_by_the_name_that_the_api_uses() {
        use vmm_api::devices::{BlockConfig, ConsoleConfig, DeviceConfig, FsConfig, NetConfig, RngConfig, VsockConfig};
        for kind in [
            BlockConfig::KIND,
            ConsoleConfig::KIND,
            FsConfig::KIND,
            NetConfig::KIND,
            RngConfig::KIND,
            VsockConfig::KIND,
        ] {
            assert_eq!(find(kind).map(DeviceModule::kind), Some(kind));
        }
        assert!(find("floppy").is_none());
        assert_eq!(kinds(), "block, console, fs, net, rng, vsock");
    }
}
