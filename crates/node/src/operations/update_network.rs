//! A sandbox that may send elsewhere from now on.
//!
//! ```text
//!  record ─► reaches the disk ─► the network's rules, if it has a machine ─► answered
//!     └ what fails: the record and the rules of before
//! ```
//! Who was answered has these rules whatever happens then: another machine of it is restricted before it can send, and so is one that runs
//! on while no daemon does.

use base::{Egress, points};
use node_api::Sandbox;
use observe::span::span;

use crate::Error;
use crate::node::Node;
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;

impl Node {
    /// Has a sandbox send where `egress` lets it, in place of where it could.
    pub(crate) fn update_network(&self, entry: &Entry, egress: &Egress) -> Result<Sandbox, Error> {
        let _operation = self.turn(entry)?;
        let stored = entry.stored();
        Verb::Network.check(&stored.sandbox)?;
        if !stored.networked {
            return Err(Error::WrongState {
                name: stored.sandbox.name,
                state: stored.sandbox.state,
                next: "it has no network, and gets none; run another one with --network node",
            });
        }
        let was = &stored.sandbox.config.egress;
        self.update(entry, |stored| stored.sandbox.config.egress = egress.clone())?;
        self.keep_and_restrict(entry, egress).map_err(|error| {
            let taken_back = self
                .note_change(entry, |stored| stored.sandbox.config.egress = was.clone())
                // What failed may be on the disk.
                .and_then(|()| self.store.reaches_disk(&entry.stored()));
            error.after_undo(taken_back)
        })?;
        Ok(self.inspect(entry))
    }

    fn keep_and_restrict(&self, entry: &Entry, egress: &Egress) -> Result<(), Error> {
        let stored = entry.stored();
        {
            let _span = span("record reaches the disk");
            self.store.reaches_disk(&stored)?;
        }
        self.points.at(points::NETWORK_RECORDED);
        // If its machine ends it is after this, or before.
        let _ending = entry.ending();
        if entry.vm().is_none() {
            return Ok(());
        }
        let _span = span("network");
        self.network.restore()?;
        self.network.restrict(stored.slot, egress)
    }
}
