//! The host's devices that sandboxes may have: which are bound, who has which, and how each was before. Knows sandboxes by their ids, and not
//! what they do with devices; how a function is bound is `vfio::host`'s affair.
//!
//! ```text
//!              bind                        claim                    release
//!  the host's ─────▶ Binding ──▶ Ready ────────────▶ Claimed ─────────────────▶ Resetting ──▶ Ready
//!       ▲                          │ ▲                                              │
//!       │                          │ └── next boot, with --persist ── Waiting       └──▶ Quarantined
//!       └──────── Unbinding ◀──────┴──────────────── unbind ◀───────────────────────────────┘
//! ```
//! Each stage is in the database before sysfs is written, with how the function was before: whoever dies on the way is followed by a daemon
//! that takes back what nobody was told of (`Binding`), and finishes what somebody had begun to end (`Unbinding`, `Resetting`). What sysfs
//! says counts, and it says nothing of an earlier boot: such rows go, or are bound anew where somebody has asked for that.
//!
//! Three locks. `changing` comes first, and whoever has it may wait for the kernel to bind; `table` is held for moments. A device that is
//! `Resetting` is its resetter's, behind `resets` alone: nobody who has `changing` waits for that.

mod bind;
mod cdi;
mod claim;
mod error;
mod recover;
mod resets;
mod shown;
mod vfio_host;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::cdi::Directories;
use base::{PciAddress, Points};
use node_api::BindTerms;
use vfio::host::Sysfs;
use vfio::host::checks::Terms;

use self::cdi::ReportedFiles;
pub(crate) use self::error::Error as DevicesError;
use self::resets::Resets;
#[cfg(test)]
pub(crate) use self::vfio_host::NullFiles;
pub(crate) use self::vfio_host::{FunctionFiles, HostPlace, ThisVfio, VfioHost};
use crate::Error;
use crate::resources::space::Hold;
use crate::store::StateStore;
use crate::store::devices::{Stage, StoredDevice, StoredDevices};

/// What is outside of the node.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) sysfs: Sysfs,
    pub(crate) vfio: Arc<dyn VfioHost>,
    /// Where devices have names.
    pub(crate) cdi: Directories,
    /// The host's boot.
    pub(crate) boot: String,
    /// The node's own directory, whose disk is never given away.
    pub(crate) own: PathBuf,
    pub(crate) points: Points,
}

/// The host's devices that sandboxes may have.
#[derive(Debug)]
pub(crate) struct Devices {
    outside: Outside,
    store: Arc<StateStore>,
    hold: Arc<Hold>,
    /// Held by whoever binds, claims or gives back.
    changing: Mutex<()>,
    table: Mutex<BTreeMap<PciAddress, StoredDevice>>,
    reported: ReportedFiles,
    resets: Resets,
}

impl Devices {
    /// Those that an earlier daemon has kept, put right. What cannot be put right stays as it is, which the log tells.
    pub(crate) fn open(outside: Outside, (store, hold): (Arc<StateStore>, Arc<Hold>), kept: StoredDevices) -> Self {
        let table = kept.devices.into_iter().map(|device| (device.address(), device));
        let devices = Self {
            outside,
            store,
            hold,
            changing: Mutex::default(),
            table: Mutex::new(table.collect()),
            reported: ReportedFiles::default(),
            resets: Resets::default(),
        };
        devices.recover(kept.changes);
        devices
    }

    /// The way to VFIO's files.
    pub(crate) fn vfio(&self) -> &dyn VfioHost {
        self.outside.vfio.as_ref()
    }

    fn sysfs(&self) -> &Sysfs {
        &self.outside.sysfs
    }

    fn point(&self, name: &str) {
        self.outside.points.at(name);
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<PciAddress, StoredDevice>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, address: PciAddress) -> Option<StoredDevice> {
        self.table().get(&address).cloned()
    }

    /// Keeps devices as they are now, all of them or none: in the database first.
    fn keep(&self, devices: Vec<StoredDevice>) -> Result<(), Error> {
        self.hold.with_room(|| self.store.put_devices(&devices))?;
        let mut table = self.table();
        table.extend(devices.into_iter().map(|device| (device.address(), device)));
        Ok(())
    }

    /// The same of one that is at another stage.
    fn advance(&self, device: &StoredDevice, stage: Stage) -> Result<(), Error> {
        let device = StoredDevice {
            stage,
            ..device.clone()
        };
        self.keep(vec![device])
    }

    /// Forgets one of which nothing is left to do.
    fn forget(&self, address: PciAddress) -> Result<(), Error> {
        self.hold.with_room(|| self.store.forget_device(address))?;
        self.table().remove(&address);
        Ok(())
    }

    fn terms(&self, terms: BindTerms) -> Terms {
        Terms {
            store: Some(self.outside.own.clone()),
            force: terms.force,
            allow_no_reset: terms.allow_no_reset,
        }
    }
}
