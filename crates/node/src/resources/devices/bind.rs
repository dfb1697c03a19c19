//! Devices from the host and back to it, and virtual functions made. One at a time; the stages around each write to sysfs are those of `mod`.

use base::PciAddress;
use base::points::{
    DEVICE_BINDING, DEVICE_BOUND, DEVICE_GIVEN_BACK, DEVICE_READY, DEVICE_STEP, DEVICE_UNBINDING, VFS_MADE,
    VFS_RECORDED, VFS_STEP,
};
use node_api::BindTerms;
use vfio::host::DeviceError;
use vfio::host::binding::{self, BindingRecord, Goal};
use vfio::host::vfs::{self, VfRecord};
use vfio::host::{checks, inventory, users};

use super::shown::state_of;
use super::{Devices, DevicesError};
use crate::Error;
use crate::store::devices::{Stage, StoredDevice, VfChange};

impl Devices {
    /// Takes a device from the host. It is fine if it was taken before; the terms are these from now on.
    pub(crate) fn bind(&self, address: PciAddress, terms: BindTerms) -> Result<(), Error> {
        self.await_resets(&[address]);
        let _changing = self.changing();
        self.bind_in_turn(address, terms)
    }

    pub(super) fn bind_in_turn(&self, address: PciAddress, terms: BindTerms) -> Result<(), Error> {
        let known = self.find(address);
        match known.as_ref().map(|known| &known.stage) {
            Some(Stage::Ready | Stage::Claimed { .. }) => return self.bind_again(address, terms),
            Some(Stage::Resetting) => return Err(self.busy(address)),
            Some(Stage::Quarantined { why }) => {
                let why = why.clone();
                return Err(DevicesError::Quarantined { address, why }.into());
            }
            // What was left on the way, or never came.
            Some(Stage::Binding | Stage::Unbinding | Stage::Waiting { .. }) | None => (),
        }
        let function = inventory::find(self.sysfs(), address).map_err(DevicesError::from)?;
        if terms.persist && function.physical.is_some() {
            return Err(DevicesError::PersistentVf(address).into());
        }
        checks::check(self.sysfs(), &function, &self.terms(terms)).map_err(DevicesError::from)?;
        let record = match known {
            // Sysfs says by now what a daemon has left, and not how it was.
            Some(known) if known.boot == self.outside.boot && !matches!(known.stage, Stage::Waiting { .. }) => {
                known.record
            }
            _ => BindingRecord::take(self.sysfs(), address).map_err(DevicesError::from)?,
        };
        let device = StoredDevice {
            terms,
            boot: self.outside.boot.clone(),
            record,
            stage: Stage::Binding,
        };
        self.keep(vec![device.clone()])?;
        self.point(DEVICE_BINDING);
        let bound = self.drive(&device.record, Goal::Bound).and_then(|()| {
            self.point(DEVICE_BOUND);
            self.advance(&device, Stage::Ready)
        });
        if let Err(error) = bound {
            return Err(error.after_undo(self.give_back(&device)));
        }
        self.point(DEVICE_READY);
        // Of the others nothing is true after a power failure.
        if terms.persist { self.store.sync() } else { Ok(()) }
    }

    /// One that is bound already.
    fn bind_again(&self, address: PciAddress, terms: BindTerms) -> Result<(), Error> {
        let Some(known) = self.find(address).filter(|known| known.terms != terms) else {
            return Ok(());
        };
        if terms.persist && inventory::find(self.sysfs(), address).is_ok_and(|function| function.physical.is_some()) {
            return Err(DevicesError::PersistentVf(address).into());
        }
        self.keep(vec![StoredDevice { terms, ..known }])?;
        self.store.sync()
    }

    /// Gives a device back to the host. It is fine if it is the host's.
    pub(crate) fn unbind(&self, address: PciAddress) -> Result<(), Error> {
        self.await_resets(&[address]);
        // All processes of the host are looked at, for which nobody else is to wait.
        let open = users::open_file(self.sysfs(), address);
        let _changing = self.changing();
        let known = self.find(address);
        let device = match known {
            Some(device) => match device.stage {
                Stage::Claimed { sandbox, .. } => return Err(DevicesError::InUse { address, sandbox }.into()),
                Stage::Resetting => return Err(self.busy(address)),
                // Nothing has been done with it at this boot: it is the host's, maybe in use.
                Stage::Waiting { .. } => {
                    self.forget(address)?;
                    return self.store.sync();
                }
                Stage::Binding | Stage::Ready | Stage::Quarantined { .. } | Stage::Unbinding => device,
            },
            None => {
                inventory::find(self.sysfs(), address).map_err(DevicesError::from)?;
                if !binding::has_trace(self.sysfs(), address).map_err(DevicesError::from)? {
                    return Ok(());
                }
                // By somebody else, or by a daemon whose database is lost.
                StoredDevice {
                    terms: BindTerms::default(),
                    boot: self.outside.boot.clone(),
                    record: BindingRecord::lost(address),
                    stage: Stage::Unbinding,
                }
            }
        };
        if let Some(file) = open.map_err(DevicesError::from)? {
            return Err(DevicesError::Open { address, file }.into());
        }
        let was_kept = device.terms.persist;
        self.advance(&device, Stage::Unbinding)?;
        self.point(DEVICE_UNBINDING);
        self.give_back(&device)?;
        if was_kept { self.store.sync() } else { Ok(()) }
    }

    /// Brings one back to how it was, and forgets it.
    pub(super) fn give_back(&self, device: &StoredDevice) -> Result<(), Error> {
        self.drive(&device.record, Goal::GivenBack)?;
        self.point(DEVICE_GIVEN_BACK);
        self.forget(device.address())
    }

    /// Does what is left to do until a function is whose it is to be.
    pub(super) fn drive(&self, record: &BindingRecord, goal: Goal) -> Result<(), Error> {
        let driven = binding::carry_out(self.sysfs(), record, goal, |_| {
            self.point(DEVICE_STEP);
            Ok::<(), DeviceError>(())
        });
        Ok(driven.map_err(DevicesError::from)?)
    }

    /// Has a physical function make so many virtual ones, which come to no driver of the host; which.
    pub(crate) fn make_vfs(&self, physical: PciAddress, count: u32) -> Result<Vec<PciAddress>, Error> {
        let _changing = self.changing();
        let sysfs = self.sysfs();
        let record = VfRecord::take(sysfs, physical, count).map_err(DevicesError::from)?;
        if record.count != count {
            self.are_vfs_free(physical)?;
            let change = VfChange {
                boot: self.outside.boot.clone(),
                record,
            };
            self.hold.with_room(|| self.store.put_vf_change(&change))?;
            self.point(VFS_RECORDED);
            let made = vfs::make_vfs(sysfs, &change.record, count, || {
                self.point(VFS_STEP);
                Ok::<(), DeviceError>(())
            });
            if made.is_ok() {
                self.point(VFS_MADE);
            }
            let made = made.map_err(|error| DevicesError::from(vfs::explain_vfs(sysfs, physical, error)).into());
            Error::first_of(made, self.end_vf_change(&change))?;
        }
        Ok(inventory::virtual_functions(sysfs, physical).map_err(DevicesError::from)?)
    }

    /// Nobody uses the virtual functions that there are.
    fn are_vfs_free(&self, physical: PciAddress) -> Result<(), Error> {
        let sysfs = self.sysfs();
        for bound in inventory::virtual_functions(sysfs, physical).map_err(DevicesError::from)? {
            if self.find(bound).is_some() || binding::is_bound(sysfs, bound).map_err(DevicesError::from)? {
                return Err(DevicesError::VfBound { physical, bound }.into());
            }
            checks::check_unused(sysfs, bound, &self.terms(BindTerms::default())).map_err(DevicesError::from)?;
        }
        Ok(())
    }

    /// Whether new virtual functions come to drivers is as it was, whatever has become of them.
    pub(super) fn end_vf_change(&self, change: &VfChange) -> Result<(), Error> {
        let put_back = vfs::put_autoprobe_back(self.sysfs(), &change.record, || {
            self.point(VFS_STEP);
            Ok::<(), DeviceError>(())
        });
        put_back.map_err(DevicesError::from)?;
        let physical = change.record.physical;
        self.hold.with_room(|| self.store.forget_vf_change(physical))
    }

    fn busy(&self, address: PciAddress) -> Error {
        let state = self
            .find(address)
            .map(|device| state_of(&device.stage))
            .unwrap_or_default();
        DevicesError::Busy { address, state }.into()
    }
}
