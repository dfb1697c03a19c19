//! How requests reach the node. Decides nothing about sandboxes.

pub(crate) mod server;
