//! A gateway to test, with what is around it: a node, a store, keys of two tenants, a façade that only says what it was asked.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use control::{ControlStore, KeyInfo, Secret, Sqlite};
use gateway::{
    Answer, Answering, BuildsConfig, Envd, EnvdSandbox, Gateway, LimitsConfig, Node, Owner, Parts, Service, Tokens,
    VolumesConfig,
};
use http::{HeaderMap, Request, Response, StatusCode};
use node_api::ClientError;
use serde_json::{Value, json};

use crate::fake::FakeNode;

/// How long is waited for what has to come.
pub(crate) const SOON: Duration = Duration::from_secs(20);

struct Faked(Arc<FakeNode>);

impl Node for Faked {
    fn ask(&self, owner: &Owner, request: node_api::Request) -> Result<Answer, ClientError> {
        let (items, reply, fds) = {
            let tenant = match owner {
                Owner::Tenant(tenant) => Some(&**tenant),
                Owner::Gateway => None,
            };
            self.0.answer(tenant, request)
        };
        Ok(Answer {
            items,
            reply: reply?,
            fds,
        })
    }
}

/// Answers with what it was asked.
struct Echo;

impl Envd for Echo {
    fn version(&self) -> &str {
        "0.6.4"
    }

    fn handle(&self, sandbox: EnvdSandbox, request: Request<Body>) -> Answering {
        Box::pin(async move {
            let path = request.uri().path().to_owned();
            let env = match sandbox.guest.connect().await {
                Ok(opened) => opened.command.env.len(),
                Err(error) => panic!("{error}"),
            };
            let body = to_bytes(request.into_body(), 1 << 20).await.unwrap();
            let told = json!({
                "id": sandbox.id, "token": sandbox.token, "path": path, "env": env, "body": String::from_utf8_lossy(&body),
            });
            Response::new(Body::from(told.to_string()))
        })
    }

    fn forget(&self, _: &str) {}
}

/// All of it.
pub(crate) struct Bed {
    pub(crate) node: Arc<FakeNode>,
    pub(crate) store: Arc<Sqlite>,
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) service: Service,
    /// A key of the tenant `one`.
    pub(crate) key: String,
    /// A key of the tenant `two`.
    pub(crate) other_key: String,
    pub(crate) directory: tempfile::TempDir,
}

/// An answer that has come to its end.
#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) json: Value,
}

impl Got {
    /// It has this status.
    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.json);
        if status >= 400 {
            assert_eq!(self.json["code"], status, "{}", self.json);
            assert!(self.json["message"].is_string(), "{}", self.json);
        }
        self.json
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self::with(LimitsConfig::default())
    }

    pub(crate) fn with(limits: LimitsConfig) -> Self {
        Self::made(limits, |_| ())
    }

    /// With what answers at port 49983.
    pub(crate) fn with_envd(envd: Arc<dyn Envd>) -> Self {
        Self::made(LimitsConfig::default(), |parts| parts.envd = envd)
    }

    /// With other bounds of builds.
    pub(crate) fn with_builds(limits: LimitsConfig, change: impl FnOnce(&mut BuildsConfig)) -> Self {
        Self::made(limits, |parts| change(&mut parts.builds))
    }

    /// With other bounds of volumes.
    pub(crate) fn with_volumes(volumes: VolumesConfig) -> Self {
        Self::made(LimitsConfig::default(), |parts| parts.volumes = volumes)
    }

    fn made(limits: LimitsConfig, change: impl FnOnce(&mut Parts)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        let store = Arc::new(Sqlite::open(&state).unwrap());
        let node = Arc::new(FakeNode::default());
        let mut parts = parts(&node, &store, &state, limits);
        change(&mut parts);
        let gateway = Gateway::new(parts);
        Self {
            service: Service::new(Arc::clone(&gateway)),
            gateway,
            key: make_key(store.as_ref(), "one"),
            other_key: make_key(store.as_ref(), "two"),
            node,
            store,
            directory,
        }
    }

    /// With so many requests of one key in a moment.
    pub(crate) fn with_burst(burst: u32) -> Self {
        let number = |n| NonZeroU32::new(n).unwrap();
        Self::with(LimitsConfig {
            rate: number(1),
            burst: number(burst),
            ..LimitsConfig::default()
        })
    }

    /// Another gateway over the same node and store, as if this one were gone.
    pub(crate) fn successor(&self) -> Arc<Gateway> {
        let state = self.directory.path().join("state");
        Gateway::new(parts(&self.node, &self.store, &state, LimitsConfig::default()))
    }

    /// What is in the directory of a tenant's uploads.
    pub(crate) fn uploads(&self, tenant: &str) -> Vec<String> {
        let directory = self.directory.path().join("state/uploads").join(tenant);
        let Ok(all) = std::fs::read_dir(directory) else {
            return Vec::new();
        };
        all.map(|one| one.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Sends a request.
    pub(crate) async fn send(&self, request: Request<Body>) -> Got {
        let (head, body) = self.service.answer(request).await.into_parts();
        let bytes = to_bytes(body, 16 << 20).await.unwrap();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Got {
            status: head.status,
            headers: head.headers,
            json: serde_json::from_slice(&bytes).unwrap_or(Value::String(text)),
        }
    }

    /// Asks with the first tenant's key.
    pub(crate) async fn ask(&self, method: &str, path: &str, body: Value) -> Got {
        self.send(request(method, path, Some(&self.key), body)).await
    }

    pub(crate) async fn get(&self, path: &str) -> Got {
        self.ask("GET", path, Value::Null).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Got {
        self.ask("POST", path, body).await
    }

    /// A new sandbox of the template `base`; its id.
    pub(crate) async fn make(&self, mut body: Value) -> String {
        if body.is_null() {
            body = json!({});
        }
        if body.get("templateID").is_none() {
            body["templateID"] = json!("base");
        }
        let made = self.post("/v2/sandboxes", body).await.is(201);
        made["sandboxID"].as_str().unwrap().to_owned()
    }

    /// The state of a sandbox, as it is told.
    pub(crate) async fn state(&self, id: &str) -> String {
        let told = self.get(&format!("/sandboxes/{id}")).await.is(200);
        told["state"].as_str().unwrap().to_owned()
    }

    /// Seconds that a sandbox has left.
    pub(crate) fn left(&self, id: &str) -> u64 {
        let ends = self.node.sandbox(id).unwrap().ends_ns.unwrap();
        ends.saturating_sub(crate::fake::now_ns()).div_ceil(1_000_000_000)
    }
}

fn parts(node: &Arc<FakeNode>, store: &Arc<Sqlite>, state: &Path, limits: LimitsConfig) -> Parts {
    Parts {
        node: Arc::new(Faked(Arc::clone(node))),
        store: Arc::clone(store) as Arc<dyn ControlStore>,
        envd: Arc::new(Echo),
        tokens: Tokens::open(state).unwrap(),
        domain: Some("sb.example".parse().unwrap()),
        limits,
        builds: BuildsConfig::new(state.join("uploads")),
        volumes: VolumesConfig::default(),
    }
}

pub(crate) fn request(method: &str, path: &str, key: Option<&str>, body: Value) -> Request<Body> {
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "127.0.0.1:3000");
    if let Some(key) = key {
        request = request.header("x-api-key", key);
    }
    let body = match body {
        Value::Null => Body::empty(),
        body => Body::from(body.to_string()),
    };
    request.body(body).unwrap()
}

pub(crate) fn make_key(store: &dyn ControlStore, tenant: &str) -> String {
    let secret = Secret::new().unwrap();
    store.make_tenant(tenant, 1).unwrap();
    let info = KeyInfo {
        id: secret.id.clone(),
        tenant: tenant.into(),
        name: "test".into(),
        created: 1,
        last_used: None,
        revoked: None,
    };
    store.add_key(&info, &secret.hash).unwrap();
    secret.text
}

/// Waits until something is so.
pub(crate) async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !is().await {
        assert!(Instant::now() < end, "{what} does not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
