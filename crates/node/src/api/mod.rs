//! How requests reach the node. Decides nothing about sandboxes.

mod answers;
mod bounds;
pub(crate) mod server;
