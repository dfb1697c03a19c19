//! Where slots may send, while guests have them and before.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use base::{Egress, Unreachable};

use super::{Network, slot_of, tap_name};
use crate::egress::{self, Egresses};
use crate::plan::{DNS_V6, GATEWAY_V4};
use crate::{Error, conntrack, rules};
use netlink::links::Link;

impl Network {
    /// Has a slot send where `egress` lets it, and nowhere else, from the next packet on: in one step, and all of it or nothing. Connections
    /// of its guest to where that is not are ended on the host, so that nothing comes back by them either.
    ///
    /// Nothing is done for a slot that is not restricted and is not to be.
    ///
    /// # Errors
    /// The slot is out of range, or nft or the kernel refuses.
    pub fn restrict(&self, slot: u32, egress: &Egress) -> Result<(), Error> {
        self.ranges.slot_v4(slot)?;
        if !egress.restricts() && !self.restricted().contains(&slot) {
            return Ok(());
        }
        let table = self.lock_table();
        let script = egress::of_slot(slot, egress);
        // Nor does whoever opens a TAP wait for nft.
        self.inside
            .run_aside(move || rules::apply("where a guest sends", &script))?;
        match egress.restricts() {
            true => self.restricted().insert(slot),
            false => self.restricted().remove(&slot),
        };
        drop(table);
        if egress.restricts() && self.has_guest(slot)? {
            self.end_unreachable(&BTreeMap::from([(slot, egress.unreachable())]))?;
        }
        Ok(())
    }

    fn has_guest(&self, slot: u32) -> Result<bool, Error> {
        let _known = self.lock();
        Ok(self.state_of(&tap_name(slot))?.is_some_and(|link| link.carrier))
    }

    /// The same for all guests that there are when the network is opened: whoever has changed where one may send may have been killed before
    /// its connections were ended.
    pub(super) fn end_all_unreachable(&self, egresses: &Egresses, links: &[Link]) -> Result<(), Error> {
        let in_use: BTreeSet<u32> = links.iter().filter(|link| link.carrier).filter_map(slot_of).collect();
        let restricted = egresses
            .iter()
            .filter(|(slot, egress)| in_use.contains(slot) && egress.restricts());
        let of: BTreeMap<u32, Unreachable> = restricted.map(|(slot, egress)| (*slot, egress.unreachable())).collect();
        match of.is_empty() {
            true => Ok(()),
            false => self.end_unreachable(&of),
        }
    }

    /// Ends what slots' guests have with whom they cannot reach. The kernel's list of all connections may be long: nobody waits meanwhile.
    fn end_unreachable(&self, of: &BTreeMap<u32, Unreachable>) -> Result<(), Error> {
        let ended = conntrack::end(|own, peer| {
            let slot = match own {
                IpAddr::V4(own) => self.ranges.slot_of_v4(own),
                IpAddr::V6(own) => self.ranges.slot_of_v6(own),
            };
            let its = slot.and_then(|slot| of.get(&slot));
            its.is_some_and(|unreachable| self.is_cut(unreachable, peer))
        });
        let slots = || of.keys().map(u32::to_string).collect::<Vec<_>>().join(", ");
        ended.map_err(|error| Error::host(format!("ending connections of the network's slots {}", slots()))(error))
    }

    /// Whether a connection with this one, as the host tracks it, cannot go on. What answers the host can.
    fn is_cut(&self, unreachable: &Unreachable, peer: IpAddr) -> bool {
        let ranges = &self.ranges;
        if [IpAddr::V4(ranges.host_v4()), ranges.host_v6().into()].contains(&peer) {
            return false;
        }
        // Guests know who tells them names by another address.
        unreachable.has(match peer {
            IpAddr::V4(peer) if peer == ranges.dns_v4() => GATEWAY_V4.into(),
            IpAddr::V6(peer) if peer == ranges.dns_v6() => DNS_V6.into(),
            peer => peer,
        })
    }

    /// Where slots may send from when the namespace's table is made anew: as the caller knows, and nowhere of one that has a guest of which the
    /// caller knows nothing, unless the table that is there says that it may.
    pub(super) fn with_unknown(&self, told: &Egresses, links: &[Link]) -> Result<Egresses, Error> {
        let mut all = told.clone();
        let in_use = links.iter().filter(|link| link.carrier).filter_map(slot_of);
        let unknown: BTreeSet<u32> = in_use.filter(|slot| !told.contains_key(slot)).collect();
        if unknown.is_empty() {
            return Ok(all);
        }
        let restricted = match self.has_inner_table()? {
            true => Some(self.inside.run(egress::restricted)?),
            false => None,
        };
        for slot in unknown {
            if restricted.as_ref().is_none_or(|restricted| restricted.contains(&slot)) {
                log::error!(
                    "slot {slot} of the network has a guest, and where that may send is not known: it reaches nothing"
                );
                all.insert(slot, Egress::nothing());
            }
        }
        Ok(all)
    }
}
