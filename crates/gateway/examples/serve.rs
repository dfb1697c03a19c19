//! A development aid, and what the page's test runs against: a gateway whose node has no machines. Its sandboxes are values, and what is
//! started in one runs right here, by the real agent in this process: whoever reaches the port with the key can do everything that this
//! process can. It reads lines: `stop` and `start` end the gateway and serve another one over the same node, `log TEXT` has sandboxes'
//! commands have written that.
//!
//! ```text
//! cargo run -p basalt-gateway --example serve -- 3000 STATE_DIR
//! ```

#[path = "../tests/gateway/fake/mod.rs"]
#[expect(dead_code, reason = "the tests need more of it")]
mod fake;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use control::{KeyInfo, Keys, Secret, Sqlite, Tenants};
use gateway::{Answer, BuildsConfig, Facade, Gateway, LimitsConfig, Listeners, Node, Owner, Parts, Tokens};
use node_api::message::Item;
use node_api::{ClientError, Request, Used};
use tokio::runtime::Runtime;

use fake::FakeNode;

type Failure = Box<dyn std::error::Error>;

/// The node, whose machines use more at one time and less at another.
#[derive(Default)]
struct Moving {
    node: FakeNode,
    seen: Mutex<HashMap<String, (u64, u64)>>,
}

impl Moving {
    /// What one uses: it follows from its id and the time alone.
    fn change(&self, id: &str, used: &mut Used) {
        let now = fake::now_ns();
        let seed = u64::from_str_radix(id, 16).unwrap_or(0).wrapping_mul(0x9e37_79b9) % 997;
        let tick = now / 5_000_000_000;
        let wave = |period: u64| (tick + seed).wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(17) % period;
        let slow = (tick + seed) % 90;
        let per_cent = if slow < 40 {
            4 + wave(6)
        } else {
            25 + slow / 2 + wave(12)
        };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, cpu_usec) = seen.entry(id.to_owned()).or_insert((used.started_ns, 0));
        *cpu_usec += now.saturating_sub(*at) / 1000 * per_cent * 2 / 100;
        *at = now;
        used.cpu_usec = *cpu_usec;
        used.memory = (150 + 2 * slow + seed % 60 + wave(5)) << 20;
        used.disk = (90 + seed) << 20;
    }
}

impl Node for Moving {
    fn ask(&self, owner: &Owner, request: Request) -> Result<Answer, ClientError> {
        let tenant = match owner {
            Owner::Tenant(tenant) => Some(&**tenant),
            Owner::Gateway => None,
        };
        let (mut items, reply, fds) = self.node.answer(tenant, request);
        for item in &mut items {
            if let Item::BriefUsage(all) = item {
                for one in all {
                    let id = one.id.clone();
                    one.used.iter_mut().for_each(|used| self.change(&id, used));
                }
            }
        }
        Ok(Answer {
            items,
            reply: reply?,
            fds,
        })
    }
}

struct Served {
    node: Arc<Moving>,
    state: PathBuf,
    address: SocketAddr,
}

impl Served {
    /// A gateway that serves until its runtime ends.
    fn start(&self) -> Result<Runtime, Failure> {
        let store = Arc::new(Sqlite::open(&self.state)?);
        let gateway = Gateway::new(Parts {
            node: Arc::clone(&self.node) as Arc<dyn Node>,
            store,
            envd: Arc::new(Facade::default()),
            tokens: Tokens::open(&self.state)?,
            domain: None,
            limits: LimitsConfig::default(),
            builds: BuildsConfig::new(self.state.join("uploads")),
        });
        let runtime = Runtime::new()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address))?;
        say(&format!("listening at {}", listener.local_addr()?))?;
        let (stop, stopped) = tokio::sync::watch::channel(false);
        runtime.spawn(async move {
            let served = gateway::serve(gateway, Listeners::plain(listener), stopped).await;
            drop(stop);
            served
        });
        Ok(runtime)
    }
}

/// Tells whoever started this.
fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// A key, printed for whoever started this.
fn key(state: &Path) -> Result<String, Failure> {
    let (store, secret) = (Sqlite::open(state)?, Secret::new()?);
    let info = KeyInfo {
        id: secret.id.clone(),
        tenant: "default".into(),
        name: "example".into(),
        created: 1,
        last_used: None,
        revoked: None,
    };
    store.make_tenant(&info.tenant, 1)?;
    store.add_key(&info, &secret.hash)?;
    Ok(secret.text)
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let port: u16 = arguments.next().ok_or("say the port to listen at")?.parse()?;
    let state = PathBuf::from(arguments.next().ok_or("say the directory for the gateway's state")?);
    say(&format!("key {}", key(&state)?))?;
    let served = Served {
        node: Arc::default(),
        state,
        address: (Ipv4Addr::LOCALHOST, port).into(),
    };
    let mut runtime = Some(served.start()?);
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("stop", _) => runtime.take().into_iter().for_each(Runtime::shutdown_background),
            ("start", _) => runtime = Some(served.start()?),
            ("log", text) => served
                .node
                .node
                .set_log(format!("1763710727.000000000 o F {text}\n").as_bytes()),
            _ => return Err(format!("`{line}` is neither stop, start nor log").into()),
        }
        say("done")?;
    }
    Ok(())
}
