//! The gateway: the REST API that the E2B SDKs speak, and the way of a request to a sandbox's port. It runs without any right of its own,
//! beside the node's daemon, which it asks over that one's socket. Knows the node by its contract alone, and opens no file of a sandbox
//! but what the node has opened for it.
//!
//! ```text
//!  tls ─▶ server ─▶ router ─┬─▶ ui (the page)
//!                           ├─▶ api ─▶ guard (auth, limits, audit) ─▶ handlers ─▶ launch, origin, plan, egress, builds ─▶ node
//!                           └─▶ ports ─┬─▶ envd (port 49983)
//!                                      └─▶ proxy ─▶ guest ─▶ a server in the sandbox
//!  dns (names of the domain, for clients)
//! ```

mod api;
mod auth;
mod builds;
mod dns;
mod domain_name;
mod egress;
mod envd_port;
mod error;
mod facade;
mod gateway;
mod guest;
mod history;
mod idempotency;
mod labels;
mod launch;
mod leftovers;
mod limits;
mod locks;
mod node;
mod origin;
mod places;
mod plan;
mod ports;
mod proxy;
mod router;
mod sampler;
mod server;
mod show;
mod store;
mod time_text;
mod tls;
mod tokens;
mod ui;
mod uuid;
mod volumes;

pub use api::openapi;
pub use builds::{BuildsConfig, check_build};
pub use dns::{Dns, NoName, Zone};
pub use domain_name::{Domain, NoDomain};
pub use envd_port::{Answering, Envd, EnvdSandbox};
pub use error::Error;
pub use facade::Facade;
pub use gateway::{Gateway, Parts};
pub use guest::Guest;
pub use limits::LimitsConfig;
pub use node::{Answer, Node, Owner, SocketNode};
pub use sampler::sample;
pub use server::{Listeners, Service, serve};
pub use tls::{CERTIFICATE, CertificateSource, Tls, TlsError, Trusted, Written, certificate_of, replace_file};
pub use tokens::Tokens;
pub use volumes::VolumesConfig;
