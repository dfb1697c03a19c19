//! What answers at a sandbox's port 49983, as the gateway sees it: something that takes requests. Which protocol that is, and how it comes
//! by processes and files, is crate `envd`'s.

use std::future::Future;
use std::pin::Pin;

use axum::body::Body;
use http::{Request, Response};

use crate::guest::Guest;

/// An answer that is to come.
pub type Answering = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// One sandbox that a request is for.
#[derive(Clone)]
pub struct EnvdSandbox {
    /// Its id.
    pub id: String,
    /// Whose it is.
    pub tenant: String,
    /// When its machine was last started, in nanoseconds since 1970: what was known of its processes before is not true any more.
    pub started_ns: u64,
    /// What whoever asks has to show.
    pub token: String,
    /// Where its agent is.
    pub guest: Guest,
}

/// The façade.
pub trait Envd: Send + Sync + 'static {
    /// The version of E2B's envd whose features it has.
    fn version(&self) -> &str;

    /// Answers a request. It checks the token, as some requests show it as a signature.
    fn handle(&self, sandbox: EnvdSandbox, request: Request<Body>) -> Answering;

    /// A sandbox is gone, with all that is kept of it.
    fn forget(&self, id: &str);
}
