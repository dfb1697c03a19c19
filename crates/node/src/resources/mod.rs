//! What a sandbox holds of the host beside its files: CPUs, limits, TAPs, volumes, and what it is promised. Knows no operation.

pub(crate) mod budget;
pub(crate) mod cpus;
pub(crate) mod limits;
pub(crate) mod own_cgroup;
pub(crate) mod tap_pool;
pub(crate) mod volume_shares;
pub(crate) mod volumes;
