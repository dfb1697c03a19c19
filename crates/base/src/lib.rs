//! Owned kernel objects and the small vocabulary everything above is written in.
//!
//! Event fds, an epoll wrapper, memfds, files of bounded size, sparse files, free space, threads, workers whose state comes back when they
//! stop, calling threads out of system calls, mappings of descriptors, byte sizes, ratios, sets of CPUs, addresses of PCI functions, names of the
//! Container Device Interface, ranges of IP addresses and where a machine may send, the limit of open files, and the points at
//! which tests kill. This crate does not know what a virtual machine is.

pub mod bound;
pub mod cdi_name;
pub mod cpu_set;
pub mod egress;
pub mod epoll;
pub mod event;
pub mod ioctl;
pub mod mapping;
pub mod memfd;
pub mod nudge;
pub mod open_files;
pub mod pci_address;
pub mod points;
pub mod ratio;
pub mod size;
pub mod space;
pub mod sparse;
pub mod thread;
pub mod worker;

pub use bound::FileBound;
pub use cdi_name::{CdiKind, CdiName, CdiNameError};
pub use cpu_set::CpuSet;
pub use egress::{Cidr, Egress, EgressError, Unreachable};
pub use epoll::{Epoll, Interest, Ready};
pub use event::EventFd;
pub use mapping::Mapping;
pub use nudge::Nudge;
pub use pci_address::{PciAddress, PciAddressError};
pub use points::Points;
pub use ratio::{Ratio, RatioError};
pub use size::ByteSize;
pub use worker::{StopSignal, Worker};
