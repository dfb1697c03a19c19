//! What the node tells of itself: metrics and spans. Changes nothing.

pub(crate) mod metrics;
pub(crate) mod trace;
