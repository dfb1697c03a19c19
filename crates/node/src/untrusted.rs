//! The parsers of what strangers, guests and other users of the host write, each with text in and a verdict out, for whoever
//! feeds them more than tests do (`basalt-fuzz`). The daemon itself calls them where they are.

use node_api::transfer::Kind;
use vmm_api::MetricSample;

use crate::Error;

/// Whether a snapshot or a template that comes from elsewhere could have this `record.json`.
///
/// # Errors
/// What it says that it may not.
pub fn record(kind: Kind, text: &[u8]) -> Result<(), Error> {
    crate::transfer::record::judge(kind, text)
}

/// How many memory files such a one's state names.
///
/// # Errors
/// It is no state.
pub fn memory_files(state: &[u8]) -> Result<usize, String> {
    crate::saved::state_file::named(state)
}

/// Whether an HTTP request is answered with metrics.
///
/// # Errors
/// The status that it is refused with.
pub fn scrape(request: &[u8]) -> Result<(), &'static str> {
    crate::telemetry::metrics::judge_scrape(request)
}

/// What passes of the counters that a VMM reports.
pub fn counters(samples: Vec<MetricSample>) -> Vec<MetricSample> {
    crate::telemetry::metrics::judge_counters(samples)
}

/// The lines of a guest's console or of a VMM's log, as errors show them.
pub fn shown_lines(text: &[u8]) -> Vec<String> {
    crate::vmm::tail::lines(text)
}
