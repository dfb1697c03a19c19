//! The gateway: the REST API that the E2B SDKs speak, and the way of a request to a sandbox's port. It runs without any right of its own,
//! beside the node's daemon, which it asks over that one's socket. Knows the node by its contract alone, and opens no file of a sandbox
//! but what the node has opened for it.
//!
//! ```text
//!  server ─▶ router ─┬─▶ api ─▶ guard (auth, limits, audit) ─▶ handlers ─▶ launch, origin, plan ─▶ node
//!                    └─▶ ports ─┬─▶ envd (port 49983)
//!                               └─▶ proxy ─▶ guest ─▶ a server in the sandbox
//! ```

mod api;
mod auth;
mod envd_port;
mod error;
mod facade;
mod gateway;
mod guest;
mod idempotency;
mod labels;
mod launch;
mod limits;
mod locks;
mod metering;
mod node;
mod origin;
mod plan;
mod ports;
mod proxy;
mod router;
mod server;
mod show;
mod store;
mod time_text;
mod tokens;

pub use api::openapi;
pub use envd_port::{Answering, Envd, EnvdSandbox};
pub use error::Error;
pub use facade::Facade;
pub use gateway::{Gateway, Parts};
pub use guest::Guest;
pub use limits::LimitsConfig;
pub use node::{Answer, Node, Owner, SocketNode};
pub use server::{Service, serve};
pub use tokens::Tokens;
