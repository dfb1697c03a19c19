//! A development aid: serves one machine, this one, as an E2B sandbox on a loopback port, so that the unmodified SDKs can be tried against
//! this crate without a virtual machine. The agent runs in this process and starts commands right here: whoever reaches the port can do
//! everything that this process can. The few requests of E2B's API that make a sandbox are answered by a stand-in; no product has them.
//!
//! ```text
//! cargo run -p basalt-envd --example serve -- 49000 [USER]
//! E2B_API_KEY=e2b_00 E2B_API_URL=http://127.0.0.1:49000 E2B_SANDBOX_URL=http://127.0.0.1:49000 python3 program.py
//! ```

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use agent::{Reaper, Server, ServerConfig};
use agent_api::{ExecRequest, PROTOCOL};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use envd::{Access, Connecting, Guest, GuestError, Memory, Opened, Sandbox, VERSION};
use http::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};

/// Which sandbox is made next.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// What all sandboxes' tokens are.
const TOKEN: &str = "example-token";

/// The agent in this process.
struct InProcess {
    server: Server,
    command: ExecRequest,
    /// All connections, which end with the sandbox.
    open: Arc<Mutex<Vec<UnixStream>>>,
}

impl InProcess {
    fn end(&self) {
        for stream in self.open.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // One that has ended already is as good.
            drop(stream.shutdown(std::net::Shutdown::Both));
        }
    }
}

impl Guest for InProcess {
    fn connect(&self) -> Connecting<'_> {
        let (server, open) = (self.server.clone(), Arc::clone(&self.open));
        Box::pin(async move {
            let shake_hands = move || {
                let (mut near, far) = UnixStream::pair()?;
                server.serve_in_thread(far);
                open.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(near.try_clone()?);
                let version = wire::offer(&mut near, PROTOCOL, None).map_err(std::io::Error::other)?;
                near.set_nonblocking(true)?;
                Ok::<_, std::io::Error>((near, version))
            };
            let failed = |error: String| GuestError::Other(error);
            let joined = tokio::task::spawn_blocking(shake_hands).await;
            let (stream, version) = joined
                .map_err(|error| failed(error.to_string()))?
                .map_err(|error| failed(error.to_string()))?;
            Ok(Opened {
                stream: tokio::net::UnixStream::from_std(stream).map_err(|error| failed(error.to_string()))?,
                command: self.command.clone(),
                version,
            })
        })
    }
}

/// A sandbox that is not there any more.
struct Gone;

impl Guest for Gone {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async { Err(GuestError::NotRunning) })
    }
}

/// A sandbox, and what ends its connections.
type Made = (Arc<Sandbox>, Arc<InProcess>);

/// The stand-in for the API, and the sandboxes it has made.
struct Service {
    guest: Arc<InProcess>,
    sandboxes: Mutex<HashMap<String, Made>>,
}

impl Service {
    fn described(id: &str) -> Value {
        json!({
            "templateID": "base", "sandboxID": id, "clientID": "0", "envdVersion": VERSION, "envdAccessToken": TOKEN,
            "startedAt": "2026-01-01T00:00:00Z", "endAt": "2036-01-01T00:00:00Z", "cpuCount": 1, "memoryMB": 512,
            "diskSizeMB": 1024, "state": "running", "metadata": {},
        })
    }

    fn make(&self, envs: &Value) -> Value {
        let mut sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        // Never one that was there before.
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let id = format!("i{:06}", next);
        let mut command = self.guest.command.clone();
        for (name, value) in envs.as_object().into_iter().flatten() {
            command
                .env
                .push(format!("{name}={}", value.as_str().unwrap_or_default()).into());
        }
        let guest = Arc::new(InProcess {
            server: self.guest.server.clone(),
            command,
            open: Arc::default(),
        });
        let access = Access {
            token: Some(TOKEN.to_owned()),
        };
        let sandbox = Sandbox::new(
            id.clone(),
            Arc::clone(&guest) as Arc<dyn Guest>,
            access,
            Memory::default().share(),
        );
        sandboxes.insert(id.clone(), (sandbox, guest));
        Self::described(&id)
    }

    fn find(&self, id: &str) -> Option<Arc<Sandbox>> {
        let sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        sandboxes.get(id).map(|(sandbox, _)| Arc::clone(sandbox))
    }

    /// Answers one of the requests that make, find and end a sandbox; `None` for those of a sandbox itself.
    async fn api(&self, request: Request<Body>) -> Result<Response<Body>, Request<Body>> {
        let path = request.uri().path().to_owned();
        let path = path.strip_prefix("/v2").unwrap_or(&path);
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let id_of = |parts: &[&str]| (*parts.get(1).unwrap_or(&"")).to_owned();
        let id = id_of(&parts);
        match (request.method(), parts.as_slice()) {
            (&Method::POST, ["sandboxes"]) => {
                let body = axum::body::to_bytes(request.into_body(), 1 << 20)
                    .await
                    .unwrap_or_default();
                let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
                Ok(answer(StatusCode::CREATED, Some(self.make(&asked["envVars"]))))
            }
            (_, ["sandboxes", _, ..]) if self.find(&id).is_none() => {
                let gone = json!({"code": 404, "message": format!("sandbox {id} was not found")});
                Ok(answer(StatusCode::NOT_FOUND, Some(gone)))
            }
            (&Method::DELETE, ["sandboxes", _]) => {
                let removed = self
                    .sandboxes
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(&id);
                if let Some((_, guest)) = removed {
                    guest.end();
                }
                Ok(answer(StatusCode::NO_CONTENT, None))
            }
            (&Method::POST, ["sandboxes", _, "timeout"]) => Ok(answer(StatusCode::NO_CONTENT, None)),
            (&Method::GET, ["sandboxes", _]) | (&Method::POST, ["sandboxes", _, "connect"]) => {
                Ok(answer(StatusCode::OK, Some(Self::described(&id))))
            }
            _ => Err(request),
        }
    }
}

fn answer(status: StatusCode, body: Option<Value>) -> Response<Body> {
    let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let json = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, json);
    response
}

async fn serve(State(service): State<Arc<Service>>, request: Request<Body>) -> Response<Body> {
    let request = match service.api(request).await {
        Ok(response) => return response,
        Err(request) => request,
    };
    let id = request
        .headers()
        .get("e2b-sandbox-id")
        .and_then(|id| id.to_str().ok())
        .map(str::to_owned);
    // An address with a signature says no sandbox: then it is the last one.
    let newest = || {
        let sandboxes = service.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        sandboxes
            .iter()
            .max_by_key(|(id, _)| (*id).clone())
            .map(|(_, (sandbox, _))| Arc::clone(sandbox))
    };
    let sandbox = id.as_ref().map_or_else(newest, |id| service.find(id));
    let gone = || {
        Sandbox::new(
            id.clone().unwrap_or_default(),
            Arc::new(Gone),
            Access::default(),
            Memory::default().share(),
        )
    };
    sandbox.unwrap_or_else(gone).handle(request).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let port: u16 = arguments.next().ok_or("say the port to listen at")?.parse()?;
    let guest = InProcess {
        server: Server::new(ServerConfig::in_place(), Reaper::start()?),
        command: ExecRequest {
            env: vec![format!("PATH={}", std::env::var("PATH")?).into()],
            cwd: "/".into(),
            user: arguments.next(),
            ..ExecRequest::default()
        },
        open: Arc::default(),
    };
    let service = Service {
        guest: Arc::new(guest),
        sandboxes: Mutex::default(),
    };
    let router = Router::new().fallback(serve).with_state(Arc::new(service));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    axum::serve(listener, router).await?;
    Ok(())
}
