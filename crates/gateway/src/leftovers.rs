//! What a gateway that was killed has left on the node: the snapshot of a fork that nobody removes any more. Knows no request.

use std::sync::Arc;
use std::time::Duration;

use node_api::Request;

use crate::Error;
use crate::error::with_causes;
use crate::gateway::Gateway;
use crate::launch::FORK;
use crate::node::Owner;
use crate::time_text;

/// Longer than any fork takes, one of another gateway of this node too.
const OLD: Duration = Duration::from_secs(3600);

/// How often it is looked for.
const EVERY: Duration = Duration::from_secs(3600);

/// Removes it, now and later.
pub(crate) async fn remove_always(gateway: Arc<Gateway>) {
    loop {
        match gateway.remove_leftovers(OLD).await {
            Ok(0) => (),
            Ok(removed) => log::info!("{removed} snapshots of forks were removed that an earlier gateway had left"),
            Err(error) => log::warn!("snapshots of earlier forks may stay for now: {}", with_causes(&error)),
        }
        tokio::time::sleep(EVERY).await;
    }
}

impl Gateway {
    /// Removes snapshots of forks, of all tenants, that are older than this; says how many. One that cannot be removed is logged and stays
    /// for the next time.
    ///
    /// # Errors
    /// The node cannot be asked which there are.
    pub async fn remove_leftovers(&self, old: Duration) -> Result<usize, Error> {
        let before = time_text::now_ns().saturating_sub(u64::try_from(old.as_nanos()).unwrap_or(u64::MAX));
        let mut removed = 0;
        for snapshot in self.nodes.snapshots(&Owner::Gateway).await? {
            if !snapshot.name.starts_with(FORK) || snapshot.created_ns > before {
                continue;
            }
            let name = snapshot.name.clone();
            match self.nodes.done(&Owner::Gateway, Request::RemoveSnapshot { name }).await {
                Ok(()) => removed += 1,
                Err(error) => log::warn!("snapshot {} of a fork stays: {}", snapshot.name, with_causes(&error)),
            }
        }
        Ok(removed)
    }
}
