//! What is done for builds besides: when the gateway begins, what an earlier one has left of its builds is taken away; now and then, what is of
//! no use any more; when it ends, builds are ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control::{Build, Failure};
use node_api::ListConfig;

use crate::Error;
use crate::error::with_causes;
use crate::gateway::Gateway;
use crate::labels;
use crate::node::Owner;
use crate::time_text;

/// Between two attempts when the node cannot be asked, and between two looks for what is of no use.
const AGAIN: Duration = Duration::from_secs(5);
const ROUND: Duration = Duration::from_secs(3600);

/// How long a build may wait for being started, in nanoseconds.
const WAITS: u64 = 24 * 3600 * 1_000_000_000;

/// Why builds have failed that an earlier gateway has begun.
const ENDED: &str = "the gateway was ended while this was being built: build it again";

impl Gateway {
    /// Has builds of an earlier gateway be failed. Before anybody can begin one.
    ///
    /// # Errors
    /// The store or the directory of uploads cannot be used.
    pub(crate) async fn recover_builds(&self) -> Result<Vec<Build>, Error> {
        self.builds.files.clean().await?;
        let failure = Failure {
            message: ENDED.to_owned(),
            step: None,
        };
        let now = time_text::now_ns();
        self.store.with(move |store| store.fail_unfinished(&failure, now)).await
    }

    /// Takes away what is left of those, and what is of no use. What cannot be removed is tried again, and keeps nothing else.
    pub(crate) async fn keep_house(self: Arc<Self>, mut left: Vec<Build>) {
        loop {
            let mut stay = Vec::new();
            for build in left {
                if let Err(error) = self.remove_left(&build).await {
                    log::warn!(
                        "what is left of build {} cannot be removed yet: {}",
                        build.id,
                        with_causes(&error)
                    );
                    stay.push(build);
                }
            }
            left = stay;
            self.remove_useless().await;
            let before = time_text::now_ns().saturating_sub(WAITS);
            let dropped = self.store.with(move |store| store.drop_waiting(before)).await;
            for done in [dropped, self.builds.files.sweep(&self.builds.needed()).await] {
                if let Err(error) = done {
                    log::warn!("what is of no use of builds stays for a while: {}", with_causes(&error));
                }
            }
            tokio::time::sleep(if left.is_empty() { ROUND } else { AGAIN }).await;
        }
    }

    /// What of one build is left; what is of no use is removed behind it, so that one that stays keeps nothing.
    async fn remove_left(&self, build: &Build) -> Result<(), Error> {
        let list = ListConfig {
            labels: BTreeMap::from([(labels::BUILD.to_owned(), build.id.clone())]),
            all: true,
            ..ListConfig::default()
        };
        for sandbox in self.nodes.list(&Owner::Gateway, list).await? {
            match self.remove(&Owner::Gateway, &sandbox.id).await {
                Err(error) if crate::node::is_missing(&error) => (),
                done => done?,
            }
        }
        self.remove_snapshot(&Owner::Gateway, &build.id).await
    }

    /// Ends all builds; those that are under way take a moment for it, which [`no_changes`](crate::limits::Limits::no_changes) waits for.
    pub(crate) fn end_builds(&self) {
        self.builds.cancel(None);
    }
}
