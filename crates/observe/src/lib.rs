//! Logging and the metric registry; components register themselves, this crate knows none of them.
