//! What all parts share: the node, the store, tokens, limits. Knows no endpoint.

use std::sync::Arc;

use control::ControlStore;

use crate::builds::{Builds, BuildsConfig};
use crate::domain_name::Domain;
use crate::envd_port::Envd;
use crate::history::History;
use crate::idempotency::Idempotency;
use crate::limits::{Limits, LimitsConfig};
use crate::locks::Locks;
use crate::node::{Node, Nodes};
use crate::store::Store;
use crate::tokens::Tokens;
use crate::volumes::VolumesConfig;

/// What a gateway is made of.
pub struct Parts {
    /// The node.
    pub node: Arc<dyn Node>,
    /// Who may ask, and how much.
    pub store: Arc<dyn ControlStore>,
    /// What answers at port 49983.
    pub envd: Arc<dyn Envd>,
    /// By what sandboxes are reached.
    pub tokens: Tokens,
    /// Sandboxes' ports are at `<port>-<id>.<domain>`, and the API at `api.<domain>`.
    pub domain: Option<Domain>,
    /// How much is done at once.
    pub limits: LimitsConfig,
    /// How templates are built.
    pub builds: BuildsConfig,
    /// How large volumes are, and how many there may be.
    pub volumes: VolumesConfig,
}

/// A gateway.
pub struct Gateway {
    pub(crate) nodes: Nodes,
    pub(crate) store: Store,
    pub(crate) envd: Arc<dyn Envd>,
    pub(crate) tokens: Tokens,
    pub(crate) domain: Option<Domain>,
    pub(crate) limits: Limits,
    pub(crate) builds: Builds,
    pub(crate) volumes: VolumesConfig,
    /// Whoever lets a sandbox go on holds its lock.
    pub(crate) resuming: Locks,
    pub(crate) idempotency: Idempotency,
    /// What sandboxes have used.
    pub(crate) history: History,
}

impl Gateway {
    /// Of these parts.
    pub fn new(parts: Parts) -> Arc<Self> {
        let store = Store::new(parts.store);
        Arc::new(Self {
            nodes: Nodes::new(parts.node),
            builds: Builds::new(parts.builds, store.clone()),
            volumes: parts.volumes,
            store,
            envd: parts.envd,
            tokens: parts.tokens,
            domain: parts.domain,
            limits: Limits::new(parts.limits),
            resuming: Locks::new(1),
            idempotency: Idempotency::default(),
            history: History::default(),
        })
    }
}
