//! Logging, the metric registry, spans. Components register themselves; this crate knows none of them.

pub mod context;
pub mod exposition;
pub mod log_limit;
pub mod logger;
pub mod marks;
pub mod metrics;
pub mod redact;
pub mod span;

pub use context::{SpanId, TraceContext, TraceId};
pub use log_limit::{LogLimit, Repeated};
pub use metrics::{Counter, Registry, Sample};
pub use span::Span;
