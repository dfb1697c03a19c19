//! Logging and the metric registry. Components register themselves; this crate knows none of them.

pub mod logger;
pub mod metrics;
pub mod rate;

pub use metrics::{Counter, Registry, Sample};
pub use rate::RateLimit;
