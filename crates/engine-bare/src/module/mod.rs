//! The module basalt.ko as this crate speaks with it: its requests and structures, and the page that it shares with each vCPU.

pub(crate) mod page;
pub(crate) mod uapi;
