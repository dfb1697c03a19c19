//! The gateway that is asked: by HTTP at a port of the loopback, and by TLS with an authority of its own. It says what it is in one line, and
//! serves until its standard input ends; to a line of that, what it says is that a sandbox's command has written the line.

use std::io::BufRead;
use std::net::Ipv4Addr;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

use control::{KeyInfo, Keys, Secret, Sqlite, Tenants};
use gateway::{
    Answer, BuildsConfig, CertificateSource, Domain, Facade, Gateway, LimitsConfig, Listeners, Node, Owner, Parts, Tls,
    Tokens, VolumesConfig, certificate_of,
};
use node_api::{ClientError, Request};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

#[path = "../../../../crates/gateway/tests/gateway/fake/mod.rs"]
#[expect(dead_code, reason = "the gateway's own tests need more of it")]
mod fake;

use fake::FakeNode;

/// Requests of one key before it has to wait, which come back one a second: more than a case makes, but for the one that asks too often,
/// on however slow a machine.
const BURST: NonZeroU32 = NonZeroU32::new(150).unwrap();

struct Asked(Arc<FakeNode>);

impl Node for Asked {
    fn ask(&self, owner: &Owner, request: Request) -> Result<Answer, ClientError> {
        let tenant = match owner {
            Owner::Tenant(tenant) => Some(&**tenant),
            Owner::Gateway => None,
        };
        let (items, reply, fds) = self.0.answer(tenant, request);
        Ok(Answer {
            items,
            reply: reply?,
            fds,
        })
    }
}

/// A key of a tenant.
fn make_key(store: &Sqlite) -> String {
    let secret = Secret::new().unwrap();
    store.make_tenant("one", 1).unwrap();
    let info = KeyInfo {
        id: secret.id.clone(),
        tenant: "one".into(),
        name: "one".into(),
        created: 1,
        last_used: None,
        revoked: None,
    };
    store.add_key(&info, &secret.hash).unwrap();
    secret.text
}

/// Serves with this state directory.
pub(crate) fn serve(state: &Path) {
    let runtime = Runtime::new().unwrap();
    let store = Arc::new(Sqlite::open(state).unwrap());
    let key = make_key(&store);
    let node = Arc::new(FakeNode::default());
    let listen = || runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let (plain, by_tls) = (listen(), listen());
    let url = format!("http://{}", plain.local_addr().unwrap());
    let domain: Domain = format!("sb.localhost:{}", by_tls.local_addr().unwrap().port())
        .parse()
        .unwrap();
    let source = CertificateSource::Own {
        state: state.to_owned(),
        public: state.to_owned(),
    };
    let tls = Tls::open(&source, &domain).unwrap();
    let authority = certificate_of(state, &domain).unwrap().unwrap();
    let gateway = Gateway::new(Parts {
        node: Arc::new(Asked(Arc::clone(&node))),
        store,
        envd: Arc::new(Facade::default()),
        tokens: Tokens::open(state).unwrap(),
        domain: Some(domain.clone()),
        limits: LimitsConfig {
            rate: NonZeroU32::MIN,
            burst: BURST,
            ..LimitsConfig::default()
        },
        builds: BuildsConfig::new(state.join("uploads")),
        volumes: VolumesConfig::default(),
    });
    let (stop, stopped) = watch::channel(false);
    let listeners = Listeners {
        plain,
        tls: Some((by_tls, tls)),
    };
    runtime.spawn(async move {
        gateway::serve(gateway, listeners, stopped).await.unwrap();
        drop(stop);
    });
    crate::say(
        &serde_json::json!({ "url": url, "by_names": format!("https://api.{domain}"), "key": key, "authority": authority }).to_string(),
    );
    for line in std::io::stdin().lock().lines() {
        let text = line.unwrap();
        node.set_log(format!("1763710727.000000000 o F {text}\n").as_bytes());
        crate::say("done");
    }
}
