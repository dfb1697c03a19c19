//! Slots that are given back: nothing of what their guests had is left for the next one.

use std::net::IpAddr;

use super::{Network, tap_name};
use crate::published::Published;
use crate::{Error, conntrack, rules};

impl Network {
    /// Takes back everything that the slot has published.
    ///
    /// # Errors
    /// nft refuses.
    pub fn unpublish(&self, slot: u32) -> Result<(), Error> {
        let _table = self.lock_table();
        let own = Published::read(&self.config.instance)?.of_slot(&self.ranges, slot)?;
        if own.is_empty() {
            return Ok(());
        }
        rules::apply("published ports", &own.delete(&self.config.instance))?;
        // Somebody may have come by way of them after the slot was given back once, and the tables made anew.
        let _known = self.lock();
        self.released().remove(&slot);
        Ok(())
    }

    /// Ends whatever the slot has: its published ports, its connections, and its TAP if somebody still has it open. A TAP
    /// that nobody has open stays in the pool; packets do not wait in one. Nothing to do for a slot that has nothing.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn detach(&self, slot: u32) -> Result<(), Error> {
        self.unpublish(slot)?;
        self.release(slot)
    }

    /// The same for a slot that is known to publish nothing: nft takes tens of milliseconds to say so.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn release(&self, slot: u32) -> Result<(), Error> {
        let _known = self.lock();
        let name = tap_name(slot);
        if let Some(link) = self.state_of(&name)?
            && link.carrier
        {
            let removed = self.inner.remove(link.index);
            removed.map_err(Error::host(format!("removing the TAP {name}")))?;
        } else if self.released().contains(&slot) {
            // A sandbox that has ended is removed.
            return Ok(());
        }
        let (v4, v6) = (self.ranges.slot_v4(slot)?, self.ranges.slot_v6(slot)?);
        let forgotten = conntrack::forget(&[IpAddr::V4(v4), IpAddr::V6(v6)]);
        forgotten.map_err(Error::host(format!("forgetting the connections of {v4} and {v6}")))?;
        self.released().insert(slot);
        Ok(())
    }
}
