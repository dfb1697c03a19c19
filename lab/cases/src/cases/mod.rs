//! Every case; a new one is a file here and a line below.

mod accelerator;
mod bad_input;
pub(crate) mod bare;
mod bare_identity;
mod bare_kicks;
mod bare_memory;
mod bare_nvme;
mod bare_rounds;
mod bare_server;
mod bare_switch;
mod block;
mod clock_jumps;
mod clones;
mod clones_connections;
mod clones_many;
mod clones_paging;
mod copy;
mod cpu_models;
mod cuda;
mod daemon_crashes;
mod daemon_cycles;
mod daemon_life;
mod dedicated;
mod device_attach;
mod device_edu;
mod device_intx;
mod device_lazy;
mod device_load;
mod device_memory;
mod device_network;
mod device_start;
mod device_zeroed;
mod devices;
mod disk_full;
mod egress;
mod foreign_kernel;
mod hostile;
mod identity_memory;
mod interface;
mod jail;
mod kernel_features;
mod kills;
mod kvm_nvme;
mod limits;
mod limits_rates;
mod memory_reporting;
mod memory_resize;
mod moves;
mod network;
mod nvme_disk;
mod package;
mod pause;
mod pmem;
mod private_state;
mod processors;
mod reidentify;
mod reidentify_clones;
mod run;
mod snapshot;
mod snapshot_file;
mod snapshot_files;
mod snapshot_fio;
mod snapshot_guest;
mod snapshot_pty;
mod snapshot_stub;
mod snapshot_volumes;
mod state_directory;
mod streams;
mod suspend;
mod template_build;
mod templates;
mod terminal;
mod vcpu_state;
mod vmm_api;
mod volumes;
mod volumes_clones;
mod vsock;

use crate::Case;

/// In the order in which they run: the simple ones first, so that the first failure says most.
pub(crate) const ALL: &[&Case] = &[
    &vcpu_state::CASE,
    &vmm_api::CASE,
    &devices::CASE,
    &processors::CASE,
    &block::CASE,
    &vsock::CASE,
    &pmem::CASE,
    &accelerator::CASE,
    &cuda::CASE,
    &network::CASE,
    &pause::CASE,
    &snapshot::CASE,
    &memory_resize::CASE,
    &memory_reporting::CASE,
    &cpu_models::CASE,
    &reidentify::CASE,
    &reidentify_clones::CASE,
    &foreign_kernel::CASE,
    &jail::WALLS,
    &jail::CALLS,
    &run::COMMANDS,
    &run::SETTINGS,
    &state_directory::CASE,
    &private_state::CASE,
    &disk_full::CASE,
    &kernel_features::CASE,
    &streams::CASE,
    &terminal::CASE,
    &terminal::SIGNALS,
    &bad_input::REFUSALS,
    &bad_input::BROKEN_GUESTS,
    &bad_input::BROKEN_HOSTS,
    &kills::VMM,
    &kills::CLI,
    &daemon_life::LIFE,
    &daemon_life::ADOPTION,
    &suspend::CASE,
    &egress::CASE,
    &volumes::CASE,
    &volumes_clones::CASE,
    &snapshot_volumes::CASE,
    &copy::COPY,
    &copy::TMPFS,
    &limits::CPU,
    &limits::PIDS,
    &limits::MEMORY,
    &limits::STATS,
    &limits_rates::DISK,
    &limits_rates::NETWORK,
    &clones::CASE,
    &clones_many::CASE,
    &clones_paging::CASE,
    &snapshot_file::CASE,
    &templates::CASE,
    &template_build::CASE,
    &daemon_cycles::CASE,
    &clock_jumps::CASE,
    &daemon_crashes::DAEMON,
    &daemon_crashes::VMM,
    &bare::RESERVATIONS,
    &bare::BOOT,
    &bare::CLASS,
    &bare_kicks::CASE,
    &bare_memory::CASE,
    &snapshot::MOVES,
    &moves::CASE,
    &bare_identity::CASE,
    &bare_identity::CLASS,
    &bare_nvme::CASE,
    &bare_server::CASE,
    &bare_server::accelerator::CASE,
    &bare_switch::CASE,
    &kvm_nvme::CASE,
    &device_memory::CASE,
    &device_start::CASE,
    &device_start::OF_TEMPLATE,
    &device_zeroed::CASE,
    &device_attach::CASE,
    &device_edu::CASE,
    &device_intx::CASE,
    &device_lazy::CASE,
    &bare_rounds::CASE,
    &dedicated::CASE,
    &hostile::CASE,
    &identity_memory::CASE,
    &package::CASE,
];

/// Those that a host with the newer kernel runs: what is given to guests in another way there, or is not there on the other.
pub(crate) const NEWER: &[&Case] = &[
    &kvm_nvme::CASE,
    &device_memory::CASE,
    &device_start::CASE,
    &device_attach::CASE,
    &device_zeroed::CASE,
    &device_edu::CASE,
    &device_intx::CASE,
    &device_lazy::CASE,
    &device_load::CASE,
    &device_network::CASE,
];
