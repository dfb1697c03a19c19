//! The whole gateway over a node that has no machines: requests of HTTP in, answers out. What is in the node afterwards counts as much as
//! what was answered.

#[path = "../fake/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "the example uses the rest of it")]
mod fake;

mod access;
mod lifecycle;
mod ports;
mod sandboxes;
mod sdk;
mod snapshots;
mod support;
