//! How requests reach the node. Decides nothing about sandboxes.

mod bounds;
pub(crate) mod server;
