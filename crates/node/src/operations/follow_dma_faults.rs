//! DMA of a sandbox's devices that an IOMMU has refused: counted, and told as events. A guest has its devices reach whatever it likes, so that
//! this says nothing of the host; but where no guest is at fault, memory was not mapped that should be.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use node_api::EventKind;
use vfio::host::dma_faults::{DmaFault, FaultLog};

use crate::Error;
use crate::node::Node;
use crate::sandbox::entry::Entry;

/// Whether faults are seen at all.
#[derive(Debug, Default)]
pub(crate) struct FaultWatch(AtomicBool);

impl FaultWatch {
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, on: bool) {
        self.0.store(on, Ordering::Relaxed);
    }
}

impl Node {
    /// Follows the host's kernel log, from here on. Without the right to read that, faults are not counted, and `stats` says so.
    pub(crate) fn start_following_dma_faults(self: &Arc<Self>) -> Result<(), Error> {
        let mut log = match FaultLog::open() {
            Ok(log) => log,
            Err(error) => {
                log::info!(
                    "DMA faults of devices are not counted, as the kernel's log (/dev/kmsg) cannot be read: {error}"
                );
                return Ok(());
            }
        };
        self.dma_faults.set(true);
        let node = Arc::clone(self);
        crate::thread::spawn("dma-faults", move || {
            let error = loop {
                match log.wait() {
                    Ok(fault) => node.count_dma_fault(&fault),
                    Err(error) => break error,
                }
            };
            node.dma_faults.set(false);
            log::error!("DMA faults of devices are not counted any more: reading the kernel's log: {error}");
        })
    }

    /// Counts a fault with the sandbox that has the device, if one has.
    pub(crate) fn count_dma_fault(&self, fault: &DmaFault) {
        let Some(sandbox) = self.devices.owner_of(|device| fault.is_of(device)) else {
            return;
        };
        // It may be gone by now.
        if let Some(entry) = self.entries().get(&sandbox).cloned() {
            self.tell_dma_fault(&entry, fault);
        }
    }

    fn tell_dma_fault(&self, entry: &Entry, fault: &DmaFault) {
        let sandbox = {
            let mut inner = entry.lock();
            inner.dma_faults += 1;
            inner.stored.sandbox.clone()
        };
        // Each event goes to everybody who listens, and a guest can make as many as it likes.
        entry.lines.dma_fault.say(|more| {
            let why = format!("{fault}{more}");
            log::warn!("sandbox {}: {why}", entry.id);
            self.events.tell_why(EventKind::DmaFault, &sandbox, why);
        });
    }
}
