//! The use cases: each file is one thing that can be asked of a sandbox, from the request to the sandbox at rest again, with what is
//! undone when a step fails. Does not know how requests arrive.

mod accelerators;
pub(crate) mod admission;
mod attach;
pub(crate) mod build_template;
pub(crate) mod change_class;
pub(crate) mod clone;
pub(crate) mod detach_for;
pub(crate) mod device_start;
pub(crate) mod follow_clock;
pub(crate) mod follow_dma_faults;
pub(crate) mod keep_network;
mod list_pools;
pub(crate) mod requests;
pub(crate) mod resize;
pub(crate) mod rollback;
pub(crate) mod save_template;
pub(crate) mod shutdown;
pub(crate) mod snapshot;
pub(crate) mod stages;
pub(crate) mod start;
pub(crate) mod stop;
pub(crate) mod suspend;
pub(crate) mod time_limits;
pub(crate) mod undo;
mod update_network;
pub(crate) mod verify;
mod zeroed_memory;
