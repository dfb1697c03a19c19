//! The whole gateway over a node that has no machines: requests of HTTP in, answers out. What is in the node afterwards counts as much as
//! what was answered.

mod fake;

mod access;
mod build_lives;
mod builds;
mod lifecycle;
mod metrics;
mod names;
mod network;
mod page;
mod ports;
mod sandboxes;
mod snapshots;
mod support;
mod uploads;
mod volumes;
