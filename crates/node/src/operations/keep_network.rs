//! The network's tables of nft while sandboxes run: other programs of the host delete them with all others' (`nft flush ruleset`), and they
//! are put back. Knows which ports sandboxes have published, not what a table says.

use std::sync::Arc;
use std::time::Duration;

use network::Ports;
use node_api::State;
use observe::Repeated;

use crate::Error;
use crate::node::Node;
use crate::operations::start::parse_ports;

/// How often the tables are looked for, which takes two system calls.
const LOOK: Duration = Duration::from_secs(10);

/// Said as long as they cannot be looked for, or put back.
static NOT_KNOWN: Repeated = Repeated::new(Duration::from_secs(600));

impl Node {
    /// Looks after the network from here on.
    pub(crate) fn start_network_upkeep(self: &Arc<Self>) -> Result<(), Error> {
        if !self.network.is_possible() {
            return Ok(());
        }
        let node = Arc::clone(self);
        crate::thread::spawn("upkeep", move || {
            loop {
                std::thread::sleep(LOOK);
                if let Err(error) = node.restore_network() {
                    NOT_KNOWN.say(|more| {
                        log::error!("whether the network's nft tables are there is not known: {error}{more}");
                    });
                }
            }
        })
    }

    /// Puts tables back that somebody has deleted.
    pub(crate) fn restore_network(&self) -> Result<(), Error> {
        if self.network.with(|network| network.is_damaged()).transpose()? != Some(true) {
            return Ok(());
        }
        let ports = self.published()?;
        self.network.with(|network| network.restore(&ports)).transpose()?;
        Ok(())
    }

    /// Publishes what is published of sandboxes that run, where the tables were lost while no daemon ran.
    pub(crate) fn publish_again(&self) -> Result<(), Error> {
        let ports = self.published()?;
        self.network.with(|network| network.publish_again(&ports)).transpose()?;
        Ok(())
    }

    /// Of all that run. One that is being started publishes its own.
    fn published(&self) -> Result<Ports, Error> {
        let mut ports = Ports::new();
        let entries: Vec<_> = self.entries().values().cloned().collect();
        for stored in entries.iter().map(|entry| entry.stored()) {
            let sandbox = &stored.sandbox;
            if stored.networked && matches!(sandbox.state, State::Running | State::Paused | State::Stopping) {
                ports.insert(stored.slot, parse_ports(&sandbox.config.ports)?);
            }
        }
        Ok(ports)
    }
}
