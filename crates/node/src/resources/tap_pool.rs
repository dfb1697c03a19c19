//! TAPs that wait ready: those of the slots that come next are made while nobody waits for one. Making one takes some netlink
//! calls and a run of nft; opening one that is there takes none. Knows of sandboxes which slots come next, and no more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::Error;
use crate::resources::network::NodeNetwork;
use crate::sandbox::registry::Sandboxes;

/// So many are made ahead, once fewer than half of them are left.
const AHEAD: usize = 8;

/// Between two looks at whether they are made.
const STEP: Duration = Duration::from_millis(10);

/// Makes TAPs ahead.
#[derive(Debug)]
pub(crate) struct TapPool {
    network: Arc<NodeNetwork>,
    sandboxes: Arc<Sandboxes>,
    /// A thread makes some.
    filling: AtomicBool,
}

/// The right to make some, which one thread has at a time; given back when dropped.
#[derive(Debug)]
struct Filling(Arc<TapPool>);

impl Filling {
    fn run(self) {
        if let Err(error) = self.0.make() {
            log::warn!("no TAPs are made ahead: {error}");
        }
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.0.filling.store(false, Ordering::SeqCst);
    }
}

impl TapPool {
    pub(crate) fn new(network: Arc<NodeNetwork>, sandboxes: Arc<Sandboxes>) -> Arc<Self> {
        Arc::new(Self {
            network,
            sandboxes,
            filling: AtomicBool::new(false),
        })
    }

    /// Sees to it that the next sandboxes find their TAPs, in a thread of its own. Nobody waits for that, and a sandbox that finds
    /// none makes it.
    pub(crate) fn fill(self: &Arc<Self>) {
        if self.network.if_set_up().is_none() {
            return;
        }
        let Some(filling) = self.begin() else { return };
        if let Err(error) = crate::thread::spawn("taps", move || filling.run()) {
            log::warn!("no TAPs are made ahead: {error}");
        }
    }

    /// `None` if somebody makes some.
    fn begin(self: &Arc<Self>) -> Option<Filling> {
        let begun = !self.filling.swap(true, Ordering::SeqCst);
        begun.then(|| Filling(Arc::clone(self)))
    }

    fn make(&self) -> Result<(), Error> {
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

    /// How many of the next sandboxes find theirs, and of how many that is looked at; `None` where no network is set up.
    pub(crate) fn ready(&self) -> Option<(usize, usize)> {
        let network = self.network.if_set_up()?;
        let missing = network.missing(&self.sandboxes.coming_slots(AHEAD)).len();
        Some((AHEAD.saturating_sub(missing), AHEAD))
    }

    /// Waits until nobody makes any: whoever takes the network away has to be alone with it.
    pub(crate) fn wait(&self, limit: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        while self.filling.load(Ordering::SeqCst) {
            if Instant::now() > deadline {
                let what = "TAPs were made ahead";
                return Err(Error::Deadline { what, limit });
            }
            std::thread::sleep(STEP);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::network::Network;

    /// More than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(30);

    fn pool() -> Arc<TapPool> {
        let network = NodeNetwork::new("test".to_owned(), Some(Arc::new(Network::default())));
        TapPool::new(Arc::new(network), Arc::default())
    }

    #[test]
    fn one_makes_taps_at_a_time_and_is_waited_for() {
        let pool = pool();
        let filling = pool.begin().unwrap();
        assert!(pool.begin().is_none());
        let waited = pool.wait(Duration::from_millis(30));
        assert!(matches!(waited, Err(Error::Deadline { .. })), "{waited:?}");
        drop(filling);
        pool.wait(Duration::ZERO).unwrap();
        assert!(pool.begin().is_some());
    }

    #[test]
    fn the_taps_of_the_next_slots_are_made_once_a_network_is_there_and_when_few_are_left() {
        let pool = pool();
        pool.fill();
        assert!(
            !pool.filling.load(Ordering::SeqCst),
            "there is no network to make them in"
        );
        let network = pool.network.get().unwrap();
        let missing = || {
            pool.fill();
            pool.wait(PATIENCE).unwrap();
            network.missing(&(0..12).collect::<Vec<_>>())
        };
        assert_eq!(missing(), [8, 9, 10, 11]);
        let register = |number: u32| {
            let stored = crate::testing::stored(&format!("{number:012x}"), "");
            pool.sandboxes
                .register(stored, Some(&number.to_string()), |_| Ok(()))
                .unwrap();
        };
        (0..4).for_each(register);
        assert_eq!(missing(), [8, 9, 10, 11], "half of them are left");
        register(4);
        assert!(missing().is_empty());
    }
}
