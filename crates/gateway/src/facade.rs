//! The glue to crate `envd`: one of its sandboxes for each that is asked for, kept as long as that runs, and the way to its agent. Knows
//! nothing of what is asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::body::Body;
use envd::{Access, Connecting, GuestError, Memory, Sandbox, Share};
use http::Request;
use node_api::ErrorKind;

use crate::Error;
use crate::envd_port::{Answering, Envd, EnvdSandbox};
use crate::guest::Guest;

/// So many sandboxes are kept; then some of those go that nobody is asking, those that nobody watches first, and of these the ones that
/// nobody has asked for the longest time.
const MOST: usize = 4096;
const AT_ONCE: usize = MOST / 16;

/// What answers at port 49983, by crate `envd`.
#[derive(Default)]
pub struct Facade {
    served: Mutex<Kept>,
    /// What all of them hold for their requests.
    memory: Memory,
}

#[derive(Default)]
struct Kept {
    sandboxes: HashMap<String, Served>,
    /// What each tenant may hold of that.
    shares: HashMap<String, Share>,
}

struct Served {
    started_ns: u64,
    sandbox: Arc<Sandbox>,
    /// When somebody asked for it last.
    asked: Instant,
}

impl Kept {
    fn make_room(&mut self) {
        let idle = self
            .sandboxes
            .iter()
            .filter(|(_, served)| Arc::strong_count(&served.sandbox) == 1);
        let mut idle: Vec<_> = idle
            .map(|(id, served)| (served.sandbox.is_watched(), served.asked, id.clone()))
            .collect();
        idle.sort();
        for (_, _, id) in idle.into_iter().take(AT_ONCE) {
            self.sandboxes.remove(&id);
        }
        self.shares.retain(|_, share| share.is_in_use());
    }
}

impl Facade {
    /// What is held at most where nobody says otherwise, in bytes.
    pub const MEMORY: usize = Memory::DEFAULT;

    /// One whose requests hold so many bytes at most, for all sandboxes together.
    #[must_use]
    pub fn with_memory(bytes: usize) -> Self {
        Self {
            served: Mutex::default(),
            memory: Memory::new(bytes),
        }
    }

    /// The sandbox as it is served since it was last started.
    fn get(&self, asked: EnvdSandbox) -> Arc<Sandbox> {
        let mut all = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let known = all.sandboxes.get_mut(&asked.id);
        // One that was started anew takes the place of the one before.
        let is_known = known.is_some();
        if let Some(served) = known.filter(|served| served.started_ns == asked.started_ns) {
            served.asked = now;
            return Arc::clone(&served.sandbox);
        }
        if !is_known && all.sandboxes.len() >= MOST {
            all.make_room();
        }
        let share = all.shares.entry(asked.tenant).or_insert_with(|| self.memory.share());
        let access = Access {
            token: Some(asked.token),
        };
        let sandbox = Sandbox::new(asked.id.clone(), Arc::new(asked.guest), access, share.clone());
        let served = Served {
            started_ns: asked.started_ns,
            sandbox: Arc::clone(&sandbox),
            asked: now,
        };
        all.sandboxes.insert(asked.id, served);
        sandbox
    }
}

impl Envd for Facade {
    fn version(&self) -> &str {
        envd::VERSION
    }

    fn handle(&self, sandbox: EnvdSandbox, request: Request<Body>) -> Answering {
        let sandbox = self.get(sandbox);
        Box::pin(async move { sandbox.handle(request).await })
    }

    fn forget(&self, id: &str) {
        let mut all = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        all.sandboxes.remove(id);
    }
}

impl envd::Guest for Guest {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move { Guest::connect(self).await.map_err(refused) })
    }
}

fn refused(error: Error) -> GuestError {
    match error {
        Error::NoSandbox(_) => GuestError::NotRunning,
        Error::Refused(refused) if matches!(refused.kind, ErrorKind::NotFound | ErrorKind::WrongState) => {
            GuestError::NotRunning
        }
        error @ (Error::Busy(_) | Error::NodeGone(_)) => GuestError::Busy(error.told().message),
        other => GuestError::Other(other.told().message),
    }
}

#[cfg(test)]
mod tests {
    use node_api::{ClientError, Request as NodeRequest};

    use super::*;
    use crate::node::{Answer, Node, Nodes, Owner};

    struct Refuses(ErrorKind);

    impl Node for Refuses {
        fn ask(&self, _: &Owner, _: NodeRequest) -> Result<Answer, ClientError> {
            Err(ClientError::Refused(node_api::ApiError {
                kind: self.0,
                message: "see /var/lib/basalt".into(),
                exit_code: 125,
            }))
        }
    }

    fn asked(id: &str, started_ns: u64, kind: ErrorKind) -> EnvdSandbox {
        EnvdSandbox {
            id: id.into(),
            tenant: "t".into(),
            started_ns,
            token: "t".into(),
            guest: Guest::new(Nodes::new(Arc::new(Refuses(kind))), id),
        }
    }

    #[test]
    fn a_sandbox_is_kept_until_it_is_started_anew_or_gone() {
        let facade = Facade::default();
        let get = |started| facade.get(asked("a", started, ErrorKind::Host));
        let first = get(1);
        assert!(Arc::ptr_eq(&first, &get(1)));
        let second = get(2);
        assert!(!Arc::ptr_eq(&first, &second));
        facade.forget("a");
        assert!(!Arc::ptr_eq(&second, &get(2)));
        let held = facade.get(asked("held", 1, ErrorKind::Host));
        for n in 0..2 * MOST {
            facade.get(asked(&n.to_string(), 1, ErrorKind::Host));
        }
        assert!(facade.served.lock().unwrap().sandboxes.len() <= MOST + 1);
        assert!(Arc::ptr_eq(&held, &facade.get(asked("held", 1, ErrorKind::Host))));
        // Of those that nobody asks the ones stay that were asked last.
        let is_kept = |id: &str| facade.served.lock().unwrap().sandboxes.contains_key(id);
        assert!(is_kept(&(2 * MOST - 1).to_string()) && !is_kept("0"));
        let old = (0..2 * MOST).map(|n| n.to_string()).find(|id| is_kept(id)).unwrap();
        facade.get(asked(&old, 1, ErrorKind::Host));
        for n in 0..2 * AT_ONCE {
            facade.get(asked(&format!("new {n}"), 1, ErrorKind::Host));
        }
        assert!(is_kept(&old), "it was asked for a moment ago");
    }

    #[tokio::test]
    async fn what_does_not_run_is_told_so_and_nothing_of_the_host() {
        let health = async |kind| {
            let request = Request::get("/health").body(Body::empty()).unwrap();
            let response = Facade::default().handle(asked("a", 1, kind), request).await;
            let status = response.status().as_u16();
            let body = axum::body::to_bytes(response.into_body(), 1 << 16).await.unwrap();
            (status, String::from_utf8(body.into()).unwrap())
        };
        for kind in [ErrorKind::NotFound, ErrorKind::WrongState] {
            let (status, body) = health(kind).await;
            assert_eq!(status, 502);
            assert!(body.contains("was not found"), "{body}");
        }
        let (_, body) = health(ErrorKind::Internal).await;
        assert!(!body.contains("/var/lib") && body.contains("incident"), "{body}");
    }
}
