//! Machines and disks on disk: snapshots, templates, and the files that they consist of. `Snapshots` and `Templates`
//! own their directories, and take what else they need as arguments. Starts and stops nothing, and knows neither the
//! node nor how a VMM is run.

pub(crate) mod accelerator;
pub(crate) mod checks;
pub(crate) mod checksums;
pub(crate) mod disk;
pub(crate) mod host_traits;
pub(crate) mod memory_files;
pub(crate) mod prefetch;
pub(crate) mod programs;
pub(crate) mod snapshots;
pub(crate) mod state_file;
pub(crate) mod templates;
