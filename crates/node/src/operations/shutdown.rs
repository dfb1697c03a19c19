//! The end of all sandboxes at once, when the host goes down or Basalt is removed: each in order, all at the same time; then
//! what the node keeps in the kernel. Knows nothing of why.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::Error;
use crate::node::Node;
use crate::sandbox::entry::Entry;

/// What became of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// So many had a VM and have none now.
    pub ended: usize,
    /// So many could not be ended, which the log tells of.
    pub failed: usize,
}

impl Node {
    /// Ends all sandboxes, each as `stop` does, and removes those that asked for it. Where that went well, network and
    /// cgroups go, too; the next sandbox that is started makes them again.
    ///
    /// # Errors
    /// The kernel keeps something.
    pub fn end_all(&self, grace: Duration) -> Result<Ending, Error> {
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let running: Vec<_> = entries.into_iter().filter(|entry| entry.state().has_vm()).collect();
        let failed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for entry in &running {
                let failed = &failed;
                let work = move || {
                    if let Err(error) = self.end_one(entry, grace) {
                        log::error!("sandbox {} cannot be ended: {error}", entry.id);
                        failed.fetch_add(1, Ordering::SeqCst);
                    }
                };
                let thread = std::thread::Builder::new().name("end".into()).stack_size(512 << 10);
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    // Then one after the other, so that none is left out.
                    log::warn!("sandbox {} has to wait for its end: {error}", entry.id);
                    work();
                }
            }
        });
        let failed = failed.into_inner();
        if failed == 0 {
            self.take_away()?;
        }
        Ok(Ending {
            ended: running.len() - failed,
            failed,
        })
    }

    /// Removes the sandboxes that templates are built in, when this daemon ends: nobody could keep what is built. The next daemon
    /// removes one that stays.
    pub(crate) fn end_builds(&self) {
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        for entry in entries.iter().filter(|entry| entry.stored().building) {
            log::info!(
                "sandbox {}, in which a template is built, ends with the daemon",
                entry.id
            );
            if let Err(error) = self.remove(entry, true) {
                log::error!("sandbox {}, in which a template was built, stays: {error}", entry.id);
            }
        }
    }

    fn end_one(&self, entry: &Arc<Entry>, grace: Duration) -> Result<(), Error> {
        self.stop(entry, grace)?;
        let limit = self.config.limits.kill;
        if entry.stored().sandbox.config.remove && !entry.wait(Some(limit), |inner| inner.gone) {
            return Err(Error::Deadline {
                what: "the removal of a sandbox that has ended",
                limit,
            });
        }
        Ok(())
    }
}
