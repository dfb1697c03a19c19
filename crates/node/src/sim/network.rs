//! A network of numbers: which slots have a TAP that somebody has open, and what is published of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_api::GuestNetwork;
use network::{Attachment, Error, PortMapping, Ports, SlotState};

use super::faults::Faults;
use crate::resources::network::{OpenNetwork, SetUp};

/// The network, which outlives daemons.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    pub(crate) faults: Faults,
    slots: Arc<Mutex<BTreeMap<u32, SlotState>>>,
    /// Slots whose TAPs were made ahead.
    prepared: Arc<Mutex<BTreeSet<u32>>>,
    is_up: Arc<Mutex<bool>>,
}

impl Network {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            ..Self::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, SlotState>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// OpenNetwork that somebody has, with what is published of them.
    pub(crate) fn taken(&self) -> BTreeMap<u32, Vec<PortMapping>> {
        let slots = self.lock();
        let taken = slots.values().filter(|slot| slot.in_use || !slot.published.is_empty());
        taken.map(|slot| (slot.slot, slot.published.clone())).collect()
    }

    fn call(&self, name: &str) -> Result<(), Error> {
        let called = self.faults.call_host(&format!("network {name}"));
        called.map_err(|source| Error::Host {
            what: name.to_owned(),
            source,
        })
    }
}

impl SetUp for Network {
    fn open(&self, _: &str) -> Result<Arc<dyn OpenNetwork>, Error> {
        self.call("open")?;
        *self.is_up.lock().unwrap() = true;
        Ok(Arc::new(self.clone()))
    }

    fn exists(&self, _: &str) -> bool {
        *self.is_up.lock().unwrap()
    }
}

impl OpenNetwork for Network {
    fn attach(&self, slot: u32, _: usize) -> Result<Attachment, Error> {
        self.call("attach")?;
        let state = SlotState {
            slot,
            in_use: true,
            published: Vec::new(),
        };
        let before = self.lock().insert(slot, state);
        assert!(
            before.is_none_or(|before| !before.in_use),
            "slot {slot} is attached twice"
        );
        Ok(self.attachment())
    }

    fn attachment(&self) -> Attachment {
        Attachment {
            taps: vec![File::open("/dev/null").unwrap().into()],
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            guest: GuestNetwork {
                addresses: Vec::new(),
                gateways: Vec::new(),
                dns: Vec::new(),
                search: Vec::new(),
                mtu: 1500,
            },
        }
    }

    fn publish(&self, slot: u32, ports: &[PortMapping]) -> Result<(), Error> {
        self.call("publish")?;
        self.lock().get_mut(&slot).unwrap().published = ports.to_vec();
        Ok(())
    }

    fn detach(&self, slot: u32) -> Result<(), Error> {
        self.call("detach")?;
        self.lock().remove(&slot);
        Ok(())
    }

    fn release(&self, slot: u32) -> Result<(), Error> {
        self.call("release")?;
        self.lock().remove(&slot);
        Ok(())
    }

    fn slots(&self) -> Result<Vec<SlotState>, Error> {
        Ok(self.lock().values().cloned().collect())
    }

    fn missing(&self, slots: &[u32]) -> Vec<u32> {
        let prepared = self.prepared.lock().unwrap();
        slots.iter().copied().filter(|slot| !prepared.contains(slot)).collect()
    }

    fn prepare(&self, slots: &[u32]) -> Result<(), Error> {
        self.prepared.lock().unwrap().extend(slots);
        Ok(())
    }

    fn is_damaged(&self) -> Result<bool, Error> {
        Ok(false)
    }

    fn restore(&self, _: &Ports) -> Result<(), Error> {
        Ok(())
    }

    fn publish_again(&self, _: &Ports) -> Result<(), Error> {
        Ok(())
    }

    fn teardown(self: Arc<Self>) -> Result<(), Error> {
        self.lock().clear();
        *self.is_up.lock().unwrap() = false;
        Ok(())
    }
}
