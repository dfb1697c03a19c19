//! What a daemon does with the devices that the one before it had, when it starts. Nothing here keeps it from starting: what cannot be put
//! right stays as it is in the database, and the log and `basalt device ls` tell of it. Claims are not judged: who is known to have a machine
//! keeps them, and the end of a machine, or a sandbox that nobody knows, gives them back (`resources::held`).

use vfio::host::binding;

use super::{Devices, DevicesError};
use crate::Error;
use crate::error::words::with_causes;
use crate::store::devices::{Stage, StoredDevice, VfChange};

impl Devices {
    pub(super) fn recover(&self, changes: Vec<VfChange>) {
        for change in changes {
            let physical = change.record.physical;
            let ended = match change.boot == self.outside.boot {
                true => self.end_vf_change(&change),
                // Sysfs has forgotten it.
                false => self.hold.with_room(|| self.store.forget_vf_change(physical)),
            };
            if let Err(error) = ended {
                log::error!(
                    "the virtual functions of {physical} are not as they were: {}",
                    with_causes(&error)
                );
            }
        }
        let kept: Vec<StoredDevice> = self.table().values().cloned().collect();
        for device in kept {
            let address = device.address();
            let done = match device.boot == self.outside.boot {
                true => self.recover_one(&device),
                false => self.after_boot(&device),
            };
            if let Err(error) = done {
                log::error!(
                    "the device {address} is not as it should be, and is tried again when the daemon starts next: {}",
                    with_causes(&error)
                );
            }
        }
    }

    /// One of this boot: sysfs tells how far it is.
    fn recover_one(&self, device: &StoredDevice) -> Result<(), Error> {
        let address = device.address();
        match &device.stage {
            // Nobody was told that it was bound; the other is finished.
            Stage::Binding | Stage::Unbinding => self.give_back(device),
            Stage::Resetting => self.reset(address),
            Stage::Waiting { .. } => self.bind_kept(device),
            Stage::Ready | Stage::Quarantined { .. } => {
                if binding::is_bound(self.sysfs(), address).map_err(DevicesError::from)? {
                    return Ok(());
                }
                log::warn!("the device {address} is not vfio-pci's any more, and is left to whoever has it");
                self.forget(address)
            }
            // Its machine may run.
            Stage::Claimed { .. } => Ok(()),
        }
    }

    /// One of an earlier boot: sysfs has forgotten it, and no machine has outlived that.
    fn after_boot(&self, device: &StoredDevice) -> Result<(), Error> {
        let address = device.address();
        match (device.terms.persist, &device.stage) {
            // Nobody was told of the first, and somebody did not want the other any more.
            (true, Stage::Binding | Stage::Unbinding) | (false, _) => {
                log::info!("the device {address} was bound before the host booted, and is the host's again");
                self.forget(address)
            }
            (true, _) => self.bind_kept(device),
        }
    }

    /// Binds one that is to be bound at each boot. Where that cannot be, as its disk is mounted by now, it waits for somebody who sees to it.
    fn bind_kept(&self, device: &StoredDevice) -> Result<(), Error> {
        let address = device.address();
        let waiting = |why: String| StoredDevice {
            boot: self.outside.boot.clone(),
            stage: Stage::Waiting { why },
            ..device.clone()
        };
        // What it was before is of another boot.
        self.keep(vec![waiting("the daemon has not come to it yet".to_owned())])?;
        match self.bind_in_turn(address, device.terms) {
            Ok(()) => {
                log::info!("the device {address} is bound again");
                Ok(())
            }
            Err(error) => {
                let why = with_causes(&error);
                log::error!("the device {address} is to be bound at each boot, and is not now: {why}");
                self.keep(vec![waiting(why)])
            }
        }
    }
}
