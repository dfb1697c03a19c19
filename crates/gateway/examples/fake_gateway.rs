//! A development aid, and what tests run against: the whole gateway over the node of its tests, which has no machines, at a loopback port.
//! Sandboxes are values, and what is started in one runs right here, by the real agent in this process, as whoever started it: whoever has
//! the key can do everything that this process can.
//!
//! ```text
//! cargo run -p basalt-gateway --example fake_gateway -- DIRECTORY [PORT [USER]]
//! ```
//!
//! State is kept in DIRECTORY; commands run as USER where nobody says another. The first line that it prints is a JSON object with `url`
//! and `key`. It reads lines, and says `done` to each: `stop` and `start` end the gateway and serve another one over the same node,
//! `log TEXT` has sandboxes' commands have written that. It ends when its standard input does.

#[path = "../tests/gateway/fake/mod.rs"]
#[expect(dead_code, reason = "the tests need more of it")]
mod fake;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use control::{KeyInfo, Keys, Secret, Sqlite, Tenants};
use gateway::{
    Answer, BuildsConfig, Facade, Gateway, LimitsConfig, Listeners, Node, Owner, Parts, Tokens, VolumesConfig,
};
use node_api::message::Item;
use node_api::{ClientError, Reply, Request, Used};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use fake::FakeNode;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Requests a second: more than any client here makes.
const RATE: NonZeroU32 = NonZeroU32::new(1_000_000).unwrap();

/// The node, whose machines use more at one time and less at another.
#[derive(Default)]
struct Moving {
    node: FakeNode,
    /// As whom commands run where nobody says another.
    user: Option<String>,
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
    fn ask(&self, owner: &Owner, request: Request) -> std::result::Result<Answer, ClientError> {
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
        let mut reply = reply?;
        if let Reply::Agent { command, .. } = &mut reply {
            command.user.clone_from(&self.user);
        }
        Ok(Answer { items, reply, fds })
    }
}

/// What stays when one gateway ends and another begins.
struct Served {
    node: Arc<Moving>,
    store: Arc<Sqlite>,
    state: PathBuf,
    address: SocketAddr,
}

impl Served {
    /// A gateway that serves until its runtime ends.
    fn start(&mut self) -> Result<Runtime> {
        let gateway = Gateway::new(Parts {
            node: Arc::clone(&self.node) as Arc<dyn Node>,
            store: Arc::clone(&self.store) as _,
            envd: Arc::new(Facade::default()),
            tokens: Tokens::open(&self.state)?,
            domain: None,
            limits: LimitsConfig {
                rate: RATE,
                burst: RATE,
                per_sandbox: 250,
                ..LimitsConfig::default()
            },
            builds: BuildsConfig::new(self.state.join("uploads")),
            volumes: VolumesConfig::default(),
        });
        let runtime = Runtime::new()?;
        let listener = runtime.block_on(TcpListener::bind(self.address))?;
        // The next one listens at the same port.
        self.address = listener.local_addr()?;
        let (stop, stopped) = watch::channel(false);
        runtime.spawn(async move {
            let served = gateway::serve(gateway, Listeners::plain(listener), stopped).await;
            drop(stop);
            served
        });
        Ok(runtime)
    }
}

/// Tells whoever started this.
fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// A key of a new tenant.
fn make_key(store: &Sqlite) -> Result<String> {
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

fn main() -> Result<()> {
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
    let store = Arc::new(Sqlite::open(&state)?);
    let key = make_key(&store)?;
    let node = Arc::new(Moving {
        user: arguments.next().map(|user| user.to_string_lossy().into_owned()),
        ..Moving::default()
    });
    let mut served = Served {
        node: Arc::clone(&node),
        store,
        state,
        address: (Ipv4Addr::LOCALHOST, port).into(),
    };
    let mut runtime = Some(served.start()?);
    say(&serde_json::json!({"url": format!("http://{}", served.address), "key": key}).to_string())?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("stop", _) => runtime.take().into_iter().for_each(Runtime::shutdown_background),
            ("start", _) => runtime = Some(served.start()?),
            ("log", text) => node
                .node
                .set_log(format!("1763710727.000000000 o F {text}\n").as_bytes()),
            _ => return Err(format!("`{line}` is neither stop, start nor log").into()),
        }
        say("done")?;
    }
    Ok(())
}
