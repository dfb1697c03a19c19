//! A development aid: the whole gateway over the node of its tests, which has no machines, at a loopback port. The real agent runs in this
//! process and starts commands right here, as whoever started it: whoever has the key can do everything that this process can. Made for
//! what needs a gateway and no virtual machine: the requests that Schemathesis makes up, and figures of the gateway itself.
//!
//! ```text
//! cargo run -p basalt-gateway --example fake_gateway -- DIRECTORY [PORT [USER]]
//! ```
//!
//! The first line that it prints is a JSON object with `url` and `key`; state is kept in DIRECTORY. Commands run
//! as USER where nobody says another. It ends when its standard input does.

#[path = "../tests/gateway/fake/mod.rs"]
#[expect(dead_code, reason = "tests look at the node in ways that serving does not need")]
mod fake;

use std::error::Error;
use std::io::Write;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use control::{ControlStore, KeyInfo, Secret, Sqlite};
use gateway::{Answer, BuildsConfig, Facade, Gateway, LimitsConfig, Listeners, Node, Owner, Parts, Tokens};
use node_api::{ClientError, Reply, Request};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Requests a second: more than any client here makes.
const RATE: NonZeroU32 = NonZeroU32::new(1_000_000).unwrap();

struct Faked {
    node: fake::FakeNode,
    user: Option<String>,
}

impl Node for Faked {
    fn ask(&self, owner: &Owner, request: Request) -> Result<Answer, ClientError> {
        let tenant = match owner {
            Owner::Tenant(tenant) => Some(&**tenant),
            Owner::Gateway => None,
        };
        let (items, reply, fds) = self.node.answer(tenant, request);
        let mut reply = reply?;
        if let Reply::Agent { command, .. } = &mut reply {
            command.user.clone_from(&self.user);
        }
        Ok(Answer { items, reply, fds })
    }
}

/// A key of a new tenant.
fn make_key(store: &dyn ControlStore) -> Result<String, Box<dyn Error>> {
    let secret = Secret::new()?;
    store.make_tenant("example", 1)?;
    let info = KeyInfo {
        id: secret.id.clone(),
        tenant: "example".into(),
        name: "example".into(),
        created: 1,
        last_used: None,
        revoked: None,
    };
    store.add_key(&info, &secret.hash)?;
    Ok(secret.text)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let state: PathBuf = arguments.next().ok_or("say a directory for the state")?.into();
    let port: u16 = match arguments.next() {
        Some(port) => port.to_string_lossy().parse()?,
        None => 0,
    };
    if let Some(level) = std::env::var_os("LOG_LEVEL") {
        observe::logger::init("fake_gateway: ", level.to_string_lossy().parse()?)?;
    }
    base::open_files::raise()?;
    let store: Arc<dyn ControlStore> = Arc::new(Sqlite::open(&state)?);
    let key = make_key(store.as_ref())?;
    let gateway = Gateway::new(Parts {
        node: Arc::new(Faked {
            node: fake::FakeNode::default(),
            user: arguments.next().map(|user| user.to_string_lossy().into_owned()),
        }),
        store,
        envd: Arc::new(Facade::default()),
        tokens: Tokens::open(&state)?,
        domain: None,
        limits: LimitsConfig {
            rate: RATE,
            burst: RATE,
            per_sandbox: 250,
            ..LimitsConfig::default()
        },
        builds: BuildsConfig::new(state.join("uploads")),
    });
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let told = serde_json::json!({"url": format!("http://{}", listener.local_addr()?), "key": key});
    let mut out = std::io::stdout();
    writeln!(out, "{told}")?;
    out.flush()?;
    let (stop, stopped) = watch::channel(false);
    std::thread::spawn(move || {
        // It is not read for what it says.
        drop(std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
        stop.send_replace(true);
    });
    gateway::serve(gateway, Listeners::plain(listener), stopped).await?;
    Ok(())
}
