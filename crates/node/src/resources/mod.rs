//! What a sandbox holds of the host beside its files: CPUs, devices, parts of an accelerator's time, limits, TAPs, volumes, what it is
//! promised, the space for them, and memory that is zeroed for it ahead. Knows no operation.

pub(crate) mod accelerators;
pub(crate) mod budget;
pub(crate) mod cpus;
pub(crate) mod devices;
pub(crate) mod held;
pub(crate) mod limits;
pub(crate) mod memory_state;
pub(crate) mod network;
pub(crate) mod own_cgroup;
pub(crate) mod space;
pub(crate) mod tap_pool;
pub(crate) mod tenant_volumes;
pub(crate) mod volume_shares;
pub(crate) mod volumes;
pub(crate) mod zeroed_memory;
