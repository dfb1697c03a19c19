//! The network that sandboxes have a place in: set up when the first of them needs it, and one at a time. Knows slots, not sandboxes.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use network::{Attachment, Network, NetworkConfig, PortMapping, Ports, SlotState};

use crate::Error;

/// A network that is set up. What each function does and when it fails is told at [`Network`]'s.
pub(crate) trait OpenNetwork: fmt::Debug + Send + Sync {
    fn attach(&self, slot: u32, queues: usize) -> Result<Attachment, network::Error>;
    /// What a device is made of that takes the place of one that has its TAP.
    fn attachment(&self) -> Attachment;
    fn publish(&self, slot: u32, ports: &[PortMapping]) -> Result<(), network::Error>;
    fn detach(&self, slot: u32) -> Result<(), network::Error>;
    fn release(&self, slot: u32) -> Result<(), network::Error>;
    fn slots(&self) -> Result<Vec<SlotState>, network::Error>;
    fn missing(&self, slots: &[u32]) -> Vec<u32>;
    fn prepare(&self, slots: &[u32]) -> Result<(), network::Error>;
    fn is_damaged(&self) -> Result<bool, network::Error>;
    fn restore(&self, ports: &Ports) -> Result<(), network::Error>;
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

    fn restore(&self, ports: &Ports) -> Result<(), network::Error> {
        Self::restore(self, ports)
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
    /// Sets this instance's up, or what is missing of it.
    fn open(&self, instance: &str) -> Result<Arc<dyn OpenNetwork>, network::Error>;
    /// Some daemon has set it up.
    fn exists(&self, instance: &str) -> bool;
}

/// In this kernel.
#[derive(Debug)]
pub(crate) struct InKernel;

impl SetUp for InKernel {
    fn open(&self, instance: &str) -> Result<Arc<dyn OpenNetwork>, network::Error> {
        Ok(Arc::new(Network::open(&NetworkConfig::new(instance))?))
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
    /// What every slot has published whose machine there is, from before it comes up until it has ended: what is put back where the
    /// tables are lost. Held while ports are published or taken back, and before `opened`.
    published: Mutex<Ports>,
}

impl NodeNetwork {
    pub(crate) fn new(instance: String, how: Option<Arc<dyn SetUp>>) -> Self {
        Self {
            instance,
            how,
            opened: Mutex::new(None),
            published: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn OpenNetwork>>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_published(&self) -> MutexGuard<'_, Ports> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sandboxes can have one.
    pub(crate) fn is_possible(&self) -> bool {
        self.how.is_some()
    }

    /// The network, set up if it is not.
    pub(crate) fn get(&self) -> Result<Arc<dyn OpenNetwork>, Error> {
        let how = self.how.as_ref().ok_or(Error::NoNetwork)?;
        let mut opened = self.lock();
        if let Some(network) = opened.as_ref() {
            return Ok(Arc::clone(network));
        }
        Ok(Arc::clone(opened.insert(how.open(&self.instance)?)))
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
        let mut published = self.lock_published();
        network.publish(slot, &ports)?;
        published.insert(slot, ports);
        Ok(())
    }

    /// An earlier daemon has published these of a slot whose machine runs on.
    pub(crate) fn has_published(&self, slot: u32, ports: Vec<PortMapping>) {
        self.lock_published().insert(slot, ports);
    }

    /// Takes back what a slot has, whose machine has ended.
    pub(crate) fn give_back(&self, slot: u32, has_ports: bool) -> Result<(), Error> {
        let network = self.get()?;
        let mut published = self.lock_published();
        published.remove(&slot);
        if has_ports {
            network.detach(slot)?;
        } else {
            drop(published);
            network.release(slot)?;
        }
        Ok(())
    }

    /// Puts tables back that somebody has deleted, with all that is published.
    pub(crate) fn restore(&self) -> Result<(), Error> {
        if self.with(|network| network.is_damaged()).transpose()? != Some(true) {
            return Ok(());
        }
        let published = self.lock_published();
        self.with(|network| network.restore(&published)).transpose()?;
        Ok(())
    }

    /// Publishes what is missing of all that is published, where the tables were lost while no daemon ran.
    pub(crate) fn publish_again(&self) -> Result<(), Error> {
        let published = self.lock_published();
        self.with(|network| network.publish_again(&published)).transpose()?;
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
