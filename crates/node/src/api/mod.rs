//! How requests reach the node. Decides nothing about sandboxes.

mod answers;
mod bounds;
mod connection;
mod listeners;
mod scope;
pub(crate) mod server;
mod tenant_volumes;
