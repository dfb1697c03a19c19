//! TAPs that wait ready: those of the slots that come next are made while nobody waits for one. Making one takes some netlink
//! calls and a run of nft; opening one that is there takes none. Knows no sandbox.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Error;
use crate::node::Node;

/// So many are made ahead, once fewer than half of them are left.
const AHEAD: usize = 8;

/// Between two looks at whether they are made.
const STEP: Duration = Duration::from_millis(10);

impl Node {
    /// Sees to it that the next sandboxes find their TAPs, in a thread of its own. Nobody waits for that, and a sandbox that finds
    /// none makes it.
    pub(crate) fn stock_taps(self: &Arc<Self>) {
        if self.network.if_set_up().is_none() || !self.sandboxes.slots().begin_stock() {
            return;
        }
        let node = Arc::clone(self);
        let work = move || {
            if let Err(error) = node.make_taps() {
                log::warn!("no TAPs are made ahead: {error}");
            }
            node.sandboxes.slots().end_stock();
        };
        if let Err(error) = crate::thread::spawn("taps", work) {
            self.sandboxes.slots().end_stock();
            log::warn!("no TAPs are made ahead: {error}");
        }
    }

    fn make_taps(&self) -> Result<(), Error> {
        let Some(network) = self.network.if_set_up() else {
            return Ok(());
        };
        let missing = network.missing(&self.sandboxes.coming_slots(AHEAD));
        if missing.len() > AHEAD / 2 {
            // Few at a time: whoever attaches meanwhile waits for them.
            for few in missing.chunks(2) {
                network.prepare(few)?;
            }
        }
        Ok(())
    }

    /// Waits until nobody makes any: whoever takes the network away has to be alone with it.
    pub(crate) fn wait_for_stock(&self) -> Result<(), Error> {
        let limit = self.config.limits.answer;
        let deadline = Instant::now() + limit;
        while self.sandboxes.slots().is_stocking() {
            if Instant::now() > deadline {
                let what = "TAPs were made ahead";
                return Err(Error::Deadline { what, limit });
            }
            std::thread::sleep(STEP);
        }
        Ok(())
    }
}
