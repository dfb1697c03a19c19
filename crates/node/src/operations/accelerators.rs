//! Sandboxes that have an accelerator, with what their servers tell of them.

use std::sync::Arc;
use std::time::Duration;

use accel_arbiter::{Priority, Report};
use node_api::{AcceleratorInfo, AcceleratorPart, AcceleratorPriority, AcceleratorStats};

use crate::node::Node;
use crate::sandbox::entry::Entry;
use crate::store::database::Stored;
use crate::vmm::accelerator_stats::{self, PATIENCE};

impl Node {
    /// All that have one, whether they run or not.
    pub(crate) fn list_accelerators(&self) -> Vec<AcceleratorInfo> {
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let mut all: Vec<_> = entries
            .iter()
            .filter_map(|entry| self.accelerator_info(entry))
            .collect();
        all.sort_by(|one, other| one.sandbox.cmp(&other.sandbox));
        all
    }

    fn accelerator_info(&self, entry: &Entry) -> Option<AcceleratorInfo> {
        let sandbox = entry.stored().sandbox;
        let accelerator = sandbox.config.accelerator?;
        let (stats, why) = match self.accelerator_stats(entry) {
            Some(Ok(stats)) => (Some(stats), None),
            Some(Err(why)) => (None, Some(why)),
            None => (None, None),
        };
        Some(AcceleratorInfo {
            server: sandbox.accelerator.filter(|_| sandbox.state.has_vm()),
            part: self.accelerators.report().get(&sandbox.id).map(part),
            sandbox: sandbox.name,
            id: sandbox.id,
            state: sandbox.state,
            accelerator,
            stats,
            why,
        })
    }

    /// What the server of its accelerator tells, or why it does not; nothing of a sandbox that has none now.
    pub(crate) fn accelerator_stats(&self, entry: &Entry) -> Option<Result<AcceleratorStats, String>> {
        let stored = entry.stored();
        if !has_server(&stored) {
            return None;
        }
        let path = self.sandbox_paths(entry).accelerator();
        Some(accelerator_stats::ask(&path, PATIENCE).map_err(|error| {
            format!(
                "its server tells nothing: {error}; see {}",
                self.sandbox_paths(entry).accelerator_log().display()
            )
        }))
    }
}

/// Somebody serves an accelerator of it.
fn has_server(stored: &Stored) -> bool {
    stored.sandbox.state.has_vm() && stored.sandbox.accelerator.is_some()
}

fn part(report: &Report) -> AcceleratorPart {
    AcceleratorPart {
        share: report.share.weight,
        priority: match report.share.priority {
            Priority::Low => AcceleratorPriority::Low,
            Priority::High => AcceleratorPriority::High,
        },
        is_connected: report.is_connected,
        used_ns: nanoseconds(report.used),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
