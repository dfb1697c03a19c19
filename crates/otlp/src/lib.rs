//! Sends spans to an OpenTelemetry collector: OTLP over HTTP, in JSON (OpenTelemetry Protocol 1.x, "OTLP/HTTP").
//!
//! Whoever has spans hands them over and goes on: a thread collects them into batches and posts them. What a collector
//! does not take in time is dropped and counted; nothing here ever makes anybody wait but [`Exporter::flush`], which has a
//! limit. Plain HTTP only: a collector stands on the same host or behind one that does. Does not know what spans are about.

mod document;
mod endpoint;
mod exporter;

pub use document::document;
pub use endpoint::Endpoint;
pub use exporter::Exporter;

/// Why spans cannot be sent anywhere.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Where to send them is not understood.
    #[error(
        "{variable}=`{value}` is no collector that spans can be sent to: write http://HOST:PORT (OTLP/HTTP, such as http://127.0.0.1:4318)"
    )]
    Endpoint {
        /// The environment variable.
        variable: &'static str,
        /// What is in it.
        value: String,
    },
    /// A protocol that is not spoken.
    #[error(
        "OTEL_EXPORTER_OTLP_PROTOCOL=`{0}`: spans are sent as http/json only; leave it out, most collectors take that on port 4318"
    )]
    Protocol(String),
    /// Headers that are none.
    #[error("OTEL_EXPORTER_OTLP_HEADERS has `{0}`, which is no NAME=VALUE")]
    Header(String),
    /// No thread.
    #[error("the thread that sends spans cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}
