//! Looks every few seconds at what all sandboxes use, and keeps it. One question to the node is for all of them; no VMM and no guest is
//! asked, so that who is idle stays so. Knows no endpoint.

use std::sync::Arc;
use std::time::Duration;

use observe::Repeated;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::Error;
use crate::error::with_causes;
use crate::gateway::Gateway;
use crate::history::INTERVAL;
use crate::node::Owner;
use crate::time_text;

/// Said as long as the node does not tell it.
static FAILS: Repeated = Repeated::new(Duration::from_secs(300));

/// Looks until the gateway is to end.
pub(crate) async fn run(gateway: Arc<Gateway>, mut stop: watch::Receiver<bool>) {
    let mut times = tokio::time::interval(INTERVAL);
    // What was missed is missed.
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = times.tick() => (),
            _ = stop.wait_for(|stop| *stop) => break,
        }
        if let Err(error) = sample(&gateway).await {
            FAILS.say(|more| {
                log::warn!(
                    "metrics have a gap, as the node does not tell them: {}{more}",
                    with_causes(&error)
                )
            });
        }
    }
}

/// Looks once.
///
/// # Errors
/// The node does not tell it.
pub async fn sample(gateway: &Gateway) -> Result<(), Error> {
    let all = gateway.nodes.usage(&Owner::Gateway).await?;
    gateway.history.add(time_text::now_ns(), &all);
    Ok(())
}
