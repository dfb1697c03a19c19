//! The Container Device Interface, version 1.1.0 of its specification: files in which whoever makes devices says what a container needs to
//! use one, each by a name. They are found, read and checked here, looked up by name, and written. Does not know what a device node
//! leads to, and nothing of PCI functions or virtual machines.

mod directories;
mod edits;
mod spec;

pub use directories::{Broken, Directories, Error, Found, Registry};
pub use edits::{ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice};
pub use spec::{Device, Format, Spec, SpecError};
