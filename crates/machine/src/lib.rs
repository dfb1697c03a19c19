//! The board: vCPU threads, the VM state machine, interrupt routing, power; over boxed devices. Does not know any
//! concrete device, and no engine but by its traits.
//!
//! ```text
//!            start                 pause
//!  created ────────▶ running ─────────────────▶ paused
//!                       ▲  │                       │ │
//!                       │  │        resume         │ │
//!                       └──┼───────────────────────┘ │
//!                          │ guest ends, stop        │ stop
//!                          ▼                         ▼
//!                        ended ◀─────────────────────┘
//! ```
//! One thread, the owner of [`Machine`], makes all transitions; vCPU threads only report.

mod deflation;
mod devices;
mod error;
mod exits;
mod functions;
mod growth;
mod halt;
mod iommu;
mod machine;
mod map_thread;
pub mod platform;
#[cfg(test)]
mod quiesced_tests;
mod ram;
mod rollback;
mod root;
mod run_control;
mod saved;
mod servers;
mod vcpu;

pub use deflation::{Ballooned, DeflationInfo};
pub use devices::{Devices, NamedDevice};
pub use error::MachineError;
pub use functions::{FunctionState, NamedFunction};
pub use growth::{GrowthInfo, Pluggable};
pub use iommu::Iommu;
pub use machine::{Machine, MachineConfig};
pub use ram::map_ahead;
pub use saved::{MachineState, Quiesced, SerialOutput, Shape};
pub use vcpu::{End, FIRST_RUN};
