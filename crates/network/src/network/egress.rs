//! Where slots may send, while guests have them and before.

use std::collections::BTreeSet;
use std::net::IpAddr;

use base::Egress;

use super::{Network, slot_of, tap_name};
use crate::egress::{self, Egresses};
use crate::plan::{DNS_V6, GATEWAY_V4};
use crate::{Error, conntrack, rules};
use netlink::links::Link;

impl Network {
    /// Has a slot send where `egress` lets it, and nowhere else, from the next packet on: in one step, and all of it or nothing. Connections
    /// of its guest to where that is not are ended on the host, so that nothing comes back by them either.
    ///
    /// # Errors
    /// The slot is out of range, or nft or the kernel refuses.
    pub fn restrict(&self, slot: u32, egress: &Egress) -> Result<(), Error> {
        let (v4, v6) = (self.ranges.slot_v4(slot)?, self.ranges.slot_v6(slot)?);
        let _known = self.lock();
        let script = egress::of_slot(slot, egress);
        self.inside.run(move || rules::apply("where a guest sends", &script))?;
        let has_guest = self.state_of(&tap_name(slot))?.is_some_and(|link| link.carrier);
        if has_guest && egress.restricts() {
            let ended = conntrack::end(&[v4.into(), v6.into()], |peer| self.is_cut(egress, peer));
            ended.map_err(Error::host(format!("ending connections of {v4} and {v6}")))?;
        }
        Ok(())
    }

    /// Whether a connection with this one, as the host tracks it, cannot go on. What answers the host can.
    fn is_cut(&self, egress: &Egress, peer: IpAddr) -> bool {
        let ranges = &self.ranges;
        if [IpAddr::V4(ranges.host_v4()), ranges.host_v6().into()].contains(&peer) {
            return false;
        }
        // Guests know who tells them names by another address.
        egress.denies(match peer {
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
