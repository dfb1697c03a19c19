//! The network's tables of nft while sandboxes run: other programs of the host delete them with all others' (`nft flush ruleset`), and they
//! are put back. Knows neither what a table says nor who has published what.

use std::sync::Arc;
use std::time::Duration;

use observe::Repeated;

use crate::Error;
use crate::node::Node;

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
                if let Err(error) = node.network.restore() {
                    NOT_KNOWN.say(|more| {
                        log::error!("whether the network's nft tables are there is not known: {error}{more}");
                    });
                }
            }
        })
    }
}
