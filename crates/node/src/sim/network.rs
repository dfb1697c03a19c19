//! A network of numbers: which slots have a TAP that somebody has open, and what is published of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_api::GuestNetwork;
use base::Egress;
use network::{Attachment, Egresses, Error, PortMapping, Ports, SlotState};

use super::faults::Faults;
use crate::resources::network::{OpenNetwork, SetUp};

/// The network, which outlives daemons.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    pub(crate) faults: Faults,
    kernel: Arc<Mutex<Kernel>>,
}

/// What the kernel has of it.
#[derive(Debug, Default)]
struct Kernel {
    /// Slots that somebody has, and those of which something is published.
    slots: BTreeMap<u32, SlotState>,
    /// Slots with a TAP, in use or made ahead.
    taps: BTreeSet<u32>,
    /// Where slots may send that are restricted.
    egresses: Egresses,
    /// To where slots' guests have no connections any more.
    ended: Egresses,
    /// Where those might send that were attached, at that moment.
    first: Egresses,
    is_up: bool,
    /// Another program has deleted its tables, and with them all that was published.
    is_damaged: bool,
}

impl Kernel {
    fn slot(&mut self, slot: u32) -> &mut SlotState {
        self.slots.entry(slot).or_insert(SlotState {
            slot,
            in_use: false,
            published: Vec::new(),
        })
    }

    /// Makes the table anew, with slots that send where `told` says; of whom nothing is told is as restricted as can be if it was at all.
    fn restrict_all(&mut self, told: &Egresses) {
        let was = std::mem::take(&mut self.egresses);
        let unknown = was.into_keys().filter(|slot| !told.contains_key(slot));
        let unknown: Vec<u32> = unknown
            .filter(|slot| self.slots.get(slot).is_some_and(|slot| slot.in_use))
            .collect();
        self.egresses
            .extend(unknown.into_iter().map(|slot| (slot, Egress::nothing())));
        let told = told.iter().filter(|(_, egress)| egress.restricts());
        self.egresses.extend(told.map(|(slot, egress)| (*slot, egress.clone())));
    }

    /// Publishes those that the slot has not published; a port of another one is refused.
    fn publish(&mut self, slot: u32, ports: &[PortMapping]) -> Result<(), Error> {
        let others = self.slots.values().filter(|other| other.slot != slot);
        for other in others {
            let conflicts =
                |mapping: &&PortMapping| other.published.iter().any(|one| one.host_port == mapping.host_port);
            if let Some(mapping) = ports.iter().find(conflicts) {
                return Err(Error::PortPublished {
                    mapping: mapping.clone(),
                    slot: other.slot,
                });
            }
        }
        let published = &mut self.slot(slot).published;
        let new: Vec<_> = ports.iter().filter(|port| !published.contains(port)).cloned().collect();
        published.extend(new);
        Ok(())
    }

    /// The same for many; of two slots with the same port only the first gets it.
    fn publish_all(&mut self, ports: &Ports) {
        for (&slot, mappings) in ports {
            for mapping in mappings {
                // It is another one's.
                drop(self.publish(slot, std::slice::from_ref(mapping)));
            }
        }
    }
}

impl Network {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            ..Self::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Slots that somebody has, with what is published of them.
    pub(crate) fn taken(&self) -> BTreeMap<u32, Vec<PortMapping>> {
        let kernel = self.lock();
        let slots = kernel.slots.values();
        let taken = slots.filter(|slot| slot.in_use || !slot.published.is_empty());
        taken.map(|slot| (slot.slot, slot.published.clone())).collect()
    }

    /// Where slots may send that are restricted.
    pub(crate) fn egresses(&self) -> Egresses {
        self.lock().egresses.clone()
    }

    /// To where their guests have no connections any more.
    pub(crate) fn ended(&self) -> Egresses {
        self.lock().ended.clone()
    }

    /// Guests have connections, as those that a daemon had to end which was killed before.
    pub(crate) fn connect(&self) {
        self.lock().ended.clear();
    }

    /// Somebody has a slot who is nobody's sandbox, and may send nowhere.
    pub(crate) fn occupy(&self, slot: u32) {
        let mut kernel = self.lock();
        kernel.slot(slot).in_use = true;
        kernel.egresses.insert(slot, Egress::nothing());
    }

    /// Whoever has a slot ends, and nobody looks after what it had.
    pub(crate) fn leave(&self, slot: u32) {
        self.lock().slot(slot).in_use = false;
    }

    /// Where a slot might send when it was attached last.
    pub(crate) fn first_egress(&self, slot: u32) -> Option<Egress> {
        self.lock().first.get(&slot).cloned()
    }

    /// Another program deletes all tables.
    pub(crate) fn damage(&self) {
        let mut kernel = self.lock();
        kernel.is_damaged = true;
        for slot in kernel.slots.values_mut() {
            slot.published.clear();
        }
    }

    fn call(&self, name: &str) -> Result<(), Error> {
        let called = self.faults.call_host(&format!("network {name}"));
        called.map_err(|source| host(name, source))
    }
}

fn host(what: &str, source: io::Error) -> Error {
    Error::Host {
        what: what.to_owned(),
        source,
    }
}

impl SetUp for Network {
    /// Makes the tables that are missing, with nothing in them.
    fn open(&self, _: &str, egresses: &Egresses) -> Result<Arc<dyn OpenNetwork>, Error> {
        self.call("open")?;
        let mut kernel = self.lock();
        (kernel.is_up, kernel.is_damaged) = (true, false);
        kernel.restrict_all(egresses);
        let told = kernel.egresses.iter().filter(|(slot, _)| egresses.contains_key(slot));
        let told = told.map(|(slot, egress)| (*slot, egress.clone()));
        kernel.ended = told.collect();
        Ok(Arc::new(self.clone()))
    }

    fn exists(&self, _: &str) -> bool {
        self.lock().is_up
    }
}

impl OpenNetwork for Network {
    fn attach(&self, slot: u32, _: usize) -> Result<Attachment, Error> {
        self.call("attach")?;
        let mut kernel = self.lock();
        kernel.taps.insert(slot);
        let egress = kernel.egresses.get(&slot).cloned().unwrap_or_default();
        kernel.first.insert(slot, egress);
        let was_in_use = std::mem::replace(&mut kernel.slot(slot).in_use, true);
        assert!(!was_in_use, "slot {slot} is attached twice");
        drop(kernel);
        Ok(Attachment {
            taps: vec![File::open("/dev/null").unwrap().into()],
            ..self.attachment()
        })
    }

    fn attachment(&self) -> Attachment {
        Attachment {
            taps: Vec::new(),
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

    fn restrict(&self, slot: u32, egress: &Egress) -> Result<(), Error> {
        if !egress.restricts() && !self.lock().egresses.contains_key(&slot) {
            return Ok(());
        }
        self.call("restrict")?;
        let mut kernel = self.lock();
        let kernel = &mut *kernel;
        if kernel.is_damaged {
            return Err(host("restrict", io::Error::other("there is no such table")));
        }
        for all in [&mut kernel.egresses, &mut kernel.ended] {
            match egress.restricts() {
                true => all.insert(slot, egress.clone()),
                false => all.remove(&slot),
            };
        }
        Ok(())
    }

    fn publish(&self, slot: u32, ports: &[PortMapping]) -> Result<(), Error> {
        self.call("publish")?;
        let mut kernel = self.lock();
        assert!(
            kernel.slot(slot).in_use,
            "slot {slot} publishes ports, and nobody has it"
        );
        match kernel.is_damaged {
            true => Err(host("publish", io::Error::other("there is no such table"))),
            false => kernel.publish(slot, ports),
        }
    }

    fn detach(&self, slot: u32) -> Result<(), Error> {
        self.call("detach")?;
        self.lock().slots.remove(&slot);
        Ok(())
    }

    /// What is published stays.
    fn release(&self, slot: u32) -> Result<(), Error> {
        self.call("release")?;
        self.lock().slot(slot).in_use = false;
        Ok(())
    }

    fn slots(&self) -> Result<Vec<SlotState>, Error> {
        Ok(self.lock().slots.values().cloned().collect())
    }

    fn missing(&self, slots: &[u32]) -> Vec<u32> {
        let kernel = self.lock();
        slots
            .iter()
            .copied()
            .filter(|slot| !kernel.taps.contains(slot))
            .collect()
    }

    fn prepare(&self, slots: &[u32]) -> Result<(), Error> {
        self.lock().taps.extend(slots);
        Ok(())
    }

    fn is_damaged(&self) -> Result<bool, Error> {
        self.call("is_damaged")?;
        Ok(self.lock().is_damaged)
    }

    fn restore(&self, ports: &Ports, egresses: &Egresses) -> Result<(), Error> {
        self.call("restore")?;
        let mut kernel = self.lock();
        if std::mem::take(&mut kernel.is_damaged) {
            kernel.publish_all(ports);
            kernel.restrict_all(egresses);
        }
        Ok(())
    }

    fn publish_again(&self, ports: &Ports) -> Result<(), Error> {
        self.call("publish_again")?;
        self.lock().publish_all(ports);
        Ok(())
    }

    fn teardown(self: Arc<Self>) -> Result<(), Error> {
        *self.lock() = Kernel::default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_its_tap_from_when_it_is_attached_until_the_network_is_taken_away() {
        let network = Network::default();
        let opened = network.open("test", &Egresses::default()).unwrap();
        opened.attach(3, 1).unwrap();
        opened.prepare(&[4]).unwrap();
        assert_eq!(opened.missing(&[3, 4, 5]), [5]);
        opened.detach(3).unwrap();
        assert_eq!(opened.missing(&[3, 4, 5]), [5], "it stays for the next one");
        opened.teardown().unwrap();
        assert!(!network.exists("test"));
        assert_eq!(
            network.open("test", &Egresses::default()).unwrap().missing(&[3, 4, 5]),
            [3, 4, 5]
        );
    }

    #[test]
    fn a_port_is_one_slots_and_is_gone_with_the_tables() {
        let network = Network::default();
        let opened = network.open("test", &Egresses::default()).unwrap();
        let ports = |text: &str| vec![text.parse::<PortMapping>().unwrap()];
        for slot in [1, 2] {
            opened.attach(slot, 1).unwrap();
        }
        opened.publish(1, &ports("80:80")).unwrap();
        opened.publish(1, &ports("80:80")).unwrap();
        let refused = opened.publish(2, &ports("80:81")).unwrap_err();
        assert!(matches!(refused, Error::PortPublished { slot: 1, .. }), "{refused}");
        network.damage();
        assert!(opened.is_damaged().unwrap() && opened.publish(2, &ports("81:80")).is_err());
        let nothing = Egresses::default();
        opened.restore(&Ports::from([(2, ports("81:80"))]), &nothing).unwrap();
        assert!(!opened.is_damaged().unwrap());
        assert_eq!(network.taken(), BTreeMap::from([(1, Vec::new()), (2, ports("81:80"))]));
    }
}
