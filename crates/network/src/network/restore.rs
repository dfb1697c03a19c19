//! Tables of nft that somebody has deleted while the network is in use, as `nft flush ruleset` and other programs' firewalls do: put
//! back with all published ports. Without the host's table nothing keeps guests from the host; without the namespace's they reach nobody.

use std::collections::BTreeMap;
use std::io;

use netlink::{Body, Socket};

use super::Network;
use crate::egress::Egresses;
use crate::published::Published;
use crate::quoted::{INET, NFNL_SUBSYS_NFTABLES};
use crate::rules::{self, INSIDE};
use crate::{Error, PortMapping};

// linux/netfilter/nf_tables.h
const NFT_MSG_GETTABLE: u16 = 1;
const NFTA_TABLE_NAME: u16 = 1;

/// Which ports each slot has published.
pub type Ports = BTreeMap<u32, Vec<PortMapping>>;

impl Network {
    /// Whether one of the two tables is missing: two short questions to the kernel.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn is_damaged(&self) -> Result<bool, Error> {
        // Whoever changes them does it in one step each.
        Ok(!self.has_host_table()? || !self.has_inner_table()?)
    }

    /// Makes the tables that are missing, the host's with these published ports, the namespace's with slots that send where `egresses` says.
    ///
    /// # Errors
    /// nft refuses.
    pub fn restore(&self, ports: &Ports, egresses: &Egresses) -> Result<(), Error> {
        let _table = self.lock_table();
        let known = self.lock();
        if !self.has_inner_table()? {
            let links = self
                .inner
                .list()
                .map_err(Error::host("listing the namespace's links"))?;
            self.apply_inside(&known, &self.with_unknown(egresses, &links)?)?;
            log::warn!(
                "the table {INSIDE} of the network's namespace had been deleted by another program and was made again"
            );
        }
        if !self.has_host_table()? {
            let published = self.elements(ports, Published::default())?;
            self.apply_host(&published)?;
            let name = &self.config.instance;
            log::warn!(
                "the nft table `inet {name}` had been deleted by another program and was made again with all published ports"
            );
        }
        Ok(())
    }

    /// Publishes those of these ports that are not, as after a table was lost while no daemon ran.
    ///
    /// # Errors
    /// nft refuses.
    pub fn publish_again(&self, ports: &Ports) -> Result<(), Error> {
        if ports.values().all(Vec::is_empty) {
            return Ok(());
        }
        let _table = self.lock_table();
        let missing = self.elements(ports, Published::read(&self.config.instance)?)?;
        if missing.is_empty() {
            return Ok(());
        }
        log::warn!(
            "published ports were missing in the nft table `inet {}` and are published again",
            self.config.instance
        );
        rules::apply("published ports", &missing.add(&self.config.instance))
    }

    /// The elements for those of these ports that `there` does not have; of two slots with the same port only the first gets it.
    fn elements(&self, ports: &Ports, there: Published) -> Result<Published, Error> {
        let mut taken = there.by_slot(&self.ranges);
        let mut new = Published::default();
        for (&slot, mappings) in ports {
            for mapping in mappings {
                let of_another = taken.values().flatten().any(|other| other.conflicts_with(mapping));
                if !of_another {
                    new.extend(Published::of(mapping, &self.ranges, slot)?);
                    taken.entry(slot).or_default().push(mapping.clone());
                }
            }
        }
        Ok(new)
    }

    fn has_host_table(&self) -> Result<bool, Error> {
        has_table(&self.config.instance).map_err(Error::host("looking for the host's nft table"))
    }

    pub(super) fn has_inner_table(&self) -> Result<bool, Error> {
        let look = || has_table(INSIDE).map_err(Error::host("looking for the namespace's nft table"));
        self.inside.run(look)
    }
}

/// Whether this thread's namespace has a table `inet NAME`.
fn has_table(name: &str) -> io::Result<bool> {
    let mut body = Body::new(&[INET, 0, 0, 0]);
    body.text(NFTA_TABLE_NAME, name);
    let asked = Socket::netfilter()?.request(NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETTABLE, 0, &body);
    match asked {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        asked => asked.map(|()| true),
    }
}
