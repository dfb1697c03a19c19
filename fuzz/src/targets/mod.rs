//! The parsers under test. A new parser of untrusted input gets a target here, with seeds that reach its depths.
//!
//! A target is a name, seeds and a function that must neither panic nor hang on any bytes.

mod accel;
mod accel_cuda;
mod accel_dispatch;
mod balloon;
mod bare;
mod builds;
mod copy;
mod devices;
mod dns;
mod envd;
mod export;
mod guest;
mod image;
mod iommu;
mod kernel;
mod messages;
mod node;
mod pluggable;
mod ptx;
mod registry;
mod restored;
mod rings;
mod shares;
mod snapshot;

use crate::run::Target;

/// All of them.
pub(crate) fn all() -> Vec<Target> {
    vec![
        messages::frames(),
        messages::handshake(),
        messages::agent_requests(),
        messages::agent_replies(),
        messages::vmm_packets(),
        envd::requests(),
        envd::agent(),
        dns::questions(),
        builds::plans(),
        rings::hostile_peer(),
        guest::pci_config(),
        guest::virtqueue(),
        guest::transport(),
        bare::instructions(),
        bare::page_tables(),
        guest::network_control(),
        devices::block(),
        devices::vsock(),
        devices::greeting(),
        accel::opencl::calls(),
        accel::opencl::replies(),
        accel::cuda::calls(),
        accel::cuda::replies(),
        accel_cuda::calls(),
        accel_dispatch::dispatch(),
        ptx::modules(),
        ptx::fat_binaries(),
        balloon::requests(),
        balloon::state(),
        iommu::requests(),
        iommu::state(),
        pluggable::requests(),
        pluggable::state(),
        export::streams(),
        export::archives(),
        copy::streams(),
        shares::messages(),
        shares::replies(),
        image::archive(),
        image::layers(),
        kernel::image(),
        registry::documents(),
        registry::artifacts(),
        registry::challenges(),
        registry::tokens(),
        registry::complaints(),
        registry::locations(),
        snapshot::container(),
        snapshot::checksums(),
        snapshot::sections(),
        restored::devices(),
        node::requests(),
        node::records(),
        node::memory_lists(),
        node::logs(),
        node::consoles(),
        node::scrapes(),
        node::counters(),
        node::settings(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_target_has_a_name_of_its_own_and_seeds_that_end_differently_from_garbage() {
        let targets = all();
        let names: BTreeSet<_> = targets.iter().map(|target| target.name).collect();
        assert_eq!(names.len(), targets.len());
        for target in targets {
            let garbage = (target.parse)(b"\x01garbage\xff");
            let outcomes: BTreeSet<_> = target.seeds.iter().map(|seed| (target.parse)(seed)).collect();
            assert!(
                outcomes.iter().any(|&outcome| outcome != garbage),
                "{}: the seeds are as bad as garbage",
                target.name
            );
        }
    }
}
