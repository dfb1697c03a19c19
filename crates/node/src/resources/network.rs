//! The network that sandboxes have a place in: set up when the first of them needs it, and one at a time. Knows slots, not sandboxes.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Egress;
use network::{Attachment, Egresses, Network, NetworkConfig, PortMapping, Ports, SlotState};

use crate::Error;

/// A network that is set up. What each function does and when it fails is told at [`Network`]'s.
pub(crate) trait OpenNetwork: fmt::Debug + Send + Sync {
    fn attach(&self, slot: u32, queues: usize) -> Result<Attachment, network::Error>;
    /// What a device is made of that takes the place of one that has its TAP.
    fn attachment(&self) -> Attachment;
    fn restrict(&self, slot: u32, egress: &Egress) -> Result<(), network::Error>;
    fn publish(&self, slot: u32, ports: &[PortMapping]) -> Result<(), network::Error>;
    fn detach(&self, slot: u32) -> Result<(), network::Error>;
    fn release(&self, slot: u32) -> Result<(), network::Error>;
    fn slots(&self) -> Result<Vec<SlotState>, network::Error>;
    fn missing(&self, slots: &[u32]) -> Vec<u32>;
    fn prepare(&self, slots: &[u32]) -> Result<(), network::Error>;
    fn is_damaged(&self) -> Result<bool, network::Error>;
    fn restore(&self, ports: &Ports, egresses: &Egresses) -> Result<(), network::Error>;
    fn publish_again(&self, ports: &Ports) -> Result<(), network::Error>;
    /// Nothing is done while somebody else has it.
    fn teardown(self: Arc<Self>) -> Result<(), network::Error>;
}

impl OpenNetwork for Network {
    fn attach(&self, slot: u32, queues: usize) -> Result<Attachment, network::Error> {
        Self::attach(self, slot, queues)
    }

    fn attachment(&self) -> Attachment {
        Self::attachment(self)
    }

    fn restrict(&self, slot: u32, egress: &Egress) -> Result<(), network::Error> {
        Self::restrict(self, slot, egress)
    }

    fn publish(&self, slot: u32, ports: &[PortMapping]) -> Result<(), network::Error> {
        Self::publish(self, slot, ports)
    }

    fn detach(&self, slot: u32) -> Result<(), network::Error> {
        Self::detach(self, slot)
    }

    fn release(&self, slot: u32) -> Result<(), network::Error> {
        Self::release(self, slot)
    }

    fn slots(&self) -> Result<Vec<SlotState>, network::Error> {
        Self::slots(self)
    }

    fn missing(&self, slots: &[u32]) -> Vec<u32> {
        Self::missing(self, slots)
    }

    fn prepare(&self, slots: &[u32]) -> Result<(), network::Error> {
        Self::prepare(self, slots.iter().copied())
    }

    fn is_damaged(&self) -> Result<bool, network::Error> {
        Self::is_damaged(self)
    }

    fn restore(&self, ports: &Ports, egresses: &Egresses) -> Result<(), network::Error> {
        Self::restore(self, ports, egresses)
    }

    fn publish_again(&self, ports: &Ports) -> Result<(), network::Error> {
        Self::publish_again(self, ports)
    }

    fn teardown(self: Arc<Self>) -> Result<(), network::Error> {
        Arc::into_inner(self).map_or(Ok(()), Self::teardown)
    }
}

/// Sets networks up.
pub(crate) trait SetUp: fmt::Debug + Send + Sync {
    /// Sets this instance's up, or what is missing of it, with slots that send where `egresses` says.
    fn open(&self, instance: &str, egresses: &Egresses) -> Result<Arc<dyn OpenNetwork>, network::Error>;
    /// Some daemon has set it up.
    fn exists(&self, instance: &str) -> bool;
}

/// In this kernel.
#[derive(Debug)]
pub(crate) struct InKernel;

impl SetUp for InKernel {
    fn open(&self, instance: &str, egresses: &Egresses) -> Result<Arc<dyn OpenNetwork>, network::Error> {
        Ok(Arc::new(Network::open(&NetworkConfig::new(instance), egresses)?))
    }

    fn exists(&self, instance: &str) -> bool {
        Path::new("/run/netns").join(instance).exists()
    }
}

/// The node's network.
#[derive(Debug)]
pub(crate) struct NodeNetwork {
    instance: String,
    /// `None` where sandboxes have no network.
    how: Option<Arc<dyn SetUp>>,
    opened: Mutex<Option<Arc<dyn OpenNetwork>>>,
    /// Held while any of it changes, and before `opened`.
    kept: Mutex<Kept>,
}

/// What every slot has whose machine there is, from before that comes up until it has ended: what is put back where the tables are lost.
#[derive(Debug, Default)]
struct Kept {
    published: Ports,
    /// Of each, also where it may send everywhere: of one that is not here nothing is known.
    egresses: Egresses,
}

impl NodeNetwork {
    pub(crate) fn new(instance: String, how: Option<Arc<dyn SetUp>>) -> Self {
        Self {
            instance,
            how,
            opened: Mutex::new(None),
            kept: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn OpenNetwork>>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sandboxes can have one.
    pub(crate) fn is_possible(&self) -> bool {
        self.how.is_some()
    }

    /// The network, set up if it is not.
    pub(crate) fn get(&self) -> Result<Arc<dyn OpenNetwork>, Error> {
        let how = self.how.as_ref().ok_or(Error::NoNetwork)?;
        if let Some(network) = self.if_set_up() {
            return Ok(network);
        }
        let kept = self.lock_kept();
        let mut opened = self.lock();
        if let Some(network) = opened.as_ref() {
            return Ok(Arc::clone(network));
        }
        Ok(Arc::clone(opened.insert(how.open(&self.instance, &kept.egresses)?)))
    }

    /// The same where it was needed before.
    pub(crate) fn if_set_up(&self) -> Option<Arc<dyn OpenNetwork>> {
        self.lock().clone()
    }

    /// Does something with the network where it was needed before; nobody takes it away meanwhile.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&dyn OpenNetwork) -> T) -> Option<T> {
        self.lock().as_deref().map(work)
    }

    /// Publishes ports of a slot; they are there until it is given back.
    pub(crate) fn publish(&self, slot: u32, ports: Vec<PortMapping>) -> Result<(), Error> {
        let network = self.get()?;
        let mut kept = self.lock_kept();
        network.publish(slot, &ports)?;
        kept.published.insert(slot, ports);
        Ok(())
    }

    /// Has a slot send where `egress` lets it, until it is given back. If that fails it sends where it could before.
    ///
    /// The network is told also where it was to be so before: what somebody has begun who was killed, as ending connections, is done then.
    pub(crate) fn restrict(&self, slot: u32, egress: &Egress) -> Result<(), Error> {
        let network = self.get()?;
        // First, for tables that are put back meanwhile. Whatever fails from here on is taken back with the slot.
        let was = self.lock_kept().egresses.insert(slot, egress.clone());
        // What nft and the kernel take for it nobody else waits for.
        network.restrict(slot, egress).map_err(|error| {
            let taken_back = was.map_or(Ok(()), |was| {
                self.lock_kept().egresses.insert(slot, was.clone());
                network.restrict(slot, &was).map_err(Error::from)
            });
            Error::from(error).after_undo(taken_back)
        })
    }

    /// A machine was found in a slot of which nothing was said before: until now it could send nowhere if it was restricted.
    pub(crate) fn has_restricted(&self, slot: u32, egress: &Egress) -> Result<(), Error> {
        // Those of which something was said were restricted, and their connections ended, when the network was opened.
        drop(self.get()?);
        let is_told = self.lock_kept().egresses.contains_key(&slot);
        if is_told { Ok(()) } else { self.restrict(slot, egress) }
    }

    /// A record says so of a slot that may have a machine; before the network is needed.
    pub(crate) fn sends_by(&self, slot: u32, egress: Egress) {
        self.lock_kept().egresses.insert(slot, egress);
    }

    /// An earlier daemon has published these of a slot whose machine runs on.
    pub(crate) fn has_published(&self, slot: u32, ports: Vec<PortMapping>) {
        self.lock_kept().published.insert(slot, ports);
    }

    /// Takes back what a slot has, whose machine has ended.
    pub(crate) fn give_back(&self, slot: u32, has_ports: bool) -> Result<(), Error> {
        let network = self.get()?;
        let mut kept = self.lock_kept();
        kept.published.remove(&slot);
        if has_ports {
            network.detach(slot)?;
            drop(kept);
        } else {
            drop(kept);
            network.release(slot)?;
        }
        // The last: until here it may have a guest.
        network.restrict(slot, &Egress::default())?;
        self.lock_kept().egresses.remove(&slot);
        Ok(())
    }

    /// Puts tables back that somebody has deleted, with all that is published.
    pub(crate) fn restore(&self) -> Result<(), Error> {
        if self.with(|network| network.is_damaged()).transpose()? != Some(true) {
            return Ok(());
        }
        let kept = self.lock_kept();
        self.with(|network| network.restore(&kept.published, &kept.egresses))
            .transpose()?;
        Ok(())
    }

    /// Publishes what is missing of all that is published, where the tables were lost while no daemon ran.
    pub(crate) fn publish_again(&self) -> Result<(), Error> {
        let kept = self.lock_kept();
        self.with(|network| network.publish_again(&kept.published))
            .transpose()?;
        Ok(())
    }

    /// Some daemon has set it up.
    pub(crate) fn exists(&self) -> bool {
        self.how.as_ref().is_some_and(|how| how.exists(&self.instance))
    }

    /// Takes it away, if it is there; nobody has a place in it any more.
    pub(crate) fn take_away(&self) -> Result<(), Error> {
        if self.exists() {
            drop(self.get()?);
            let network = self.lock().take();
            network.map_or(Ok(()), OpenNetwork::teardown)?;
        }
        Ok(())
    }
}
