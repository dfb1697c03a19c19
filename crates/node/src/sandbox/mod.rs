//! What a sandbox is to the daemon: its entry, the table of all, its name, its slot, its command. Does no work on the host.

pub(crate) mod command;
pub(crate) mod entry;
pub(crate) mod lifecycle;
pub(crate) mod names;
pub(crate) mod registry;
pub(crate) mod slots;
