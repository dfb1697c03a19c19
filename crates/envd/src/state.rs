//! What the requests of one sandbox share. Knows no request.

use std::sync::Arc;

use agent_api::ExecRequest;

use crate::agent::{Channel, Reach};
use crate::error::Error;
use crate::filesystem::Watchers;
use crate::memory::Share;

/// One sandbox, as those see it who answer a request.
pub(crate) struct State {
    pub(crate) reach: Arc<Reach>,
    pub(crate) watchers: Arc<Watchers>,
    /// What may be held for its requests: its tenant's share.
    pub(crate) memory: Share,
}

impl State {
    /// A new connection to the sandbox's agent, and what its commands begin with.
    pub(crate) async fn open(&self) -> Result<(Channel, ExecRequest), Error> {
        self.reach.open().await
    }
}
