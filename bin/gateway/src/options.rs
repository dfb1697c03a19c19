//! The gateway's flags and verbs. Knows nothing of what they do.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use base::ByteSize;
use control::{DEFAULT_TENANT, Quota};
use gateway::LimitsConfig;
use log::LevelFilter;

const HELP: &str = "\
basalt-gateway: serves a node's sandboxes by the API that the E2B SDKs speak (see docs/gateway.md)

Usage: basalt-gateway [--listen ADDRESS] [--node-socket PATH] [--state DIR] [--domain DOMAIN] [--rate NUMBER]
                      [--log-level LEVEL]
       basalt-gateway keys create [--tenant NAME] [--name TEXT] [--json] [--state DIR]
       basalt-gateway keys list [--tenant NAME] [--json] [--state DIR]
       basalt-gateway keys revoke ID [--state DIR]
       basalt-gateway tenants list [--json] [--state DIR]
       basalt-gateway tenants set NAME [--sandboxes NUMBER] [--vcpus NUMBER] [--memory SIZE] [--state DIR]
       basalt-gateway audit [--tenant NAME] [--limit NUMBER] [--json] [--state DIR]
       basalt-gateway openapi

  --listen ADDRESS    where to serve: a port of 127.0.0.1 or [::1]; 127.0.0.1:3000
  --node-socket PATH  the socket of the node's daemon; /var/lib/basalt/gateway.sock
  --state DIR         where keys, tenants, the audit log and the secret of tokens are kept, for this user alone;
                      /var/lib/basalt-gateway
  --domain DOMAIN     sandboxes' ports are asked for at <port>-<id>.DOMAIN, and the API at api.DOMAIN; with headers alone
                      if it is not given
  --rate NUMBER       requests a second of one key; 100
  --log-level LEVEL   off, error, warn, info (default), debug or trace
  --version           print the version
  --help              print this text

  keys create         make a key and print it, once: only its hash is kept
  keys list           the keys that there are, and when they were last used
  keys revoke ID      a key is good for nothing any more
  tenants list        the tenants that there are, and how much they may have
  tenants set NAME    how much a tenant may have; what is not given is not limited
  audit               what was changed, by which key, the newest first; 100 rows
  openapi             print the API's document, as GET /openapi.json of a gateway answers it
  --tenant NAME       whose; `default`, or everybody's where something is listed
  --json              for programs

SIGTERM and SIGINT end it, when it has answered what it has begun.

Examples:
  basalt-gateway --state ~/.local/share/basalt-gateway --node-socket /run/basalt-gateway/basaltd.sock
  export E2B_API_KEY=$(basalt-gateway keys create --name laptop)
  export E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3000
  basalt-gateway tenants set default --sandboxes 20 --memory 16G
";

/// What serving needs to know.
#[derive(Debug)]
pub(crate) struct Serve {
    pub(crate) listen: SocketAddr,
    pub(crate) node_socket: PathBuf,
    pub(crate) state: PathBuf,
    pub(crate) domain: Option<String>,
    pub(crate) limits: LimitsConfig,
    pub(crate) log_level: LevelFilter,
}

/// What an operator does.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Work {
    CreateKey {
        tenant: String,
        name: String,
        json: bool,
    },
    ListKeys {
        tenant: Option<String>,
        json: bool,
    },
    RevokeKey {
        id: String,
    },
    ListTenants {
        json: bool,
    },
    SetTenant {
        tenant: String,
        quota: Quota,
    },
    Audit {
        tenant: Option<String>,
        limit: usize,
        json: bool,
    },
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Command {
    Serve(Serve),
    Manage(PathBuf, Work),
    Document,
    Print(&'static str),
}

/// Everything that can be written, before it is known what it is for.
#[derive(Debug, Default)]
struct Written {
    words: Vec<String>,
    state: Option<PathBuf>,
    listen: Option<String>,
    node_socket: Option<PathBuf>,
    domain: Option<String>,
    rate: Option<NonZeroU32>,
    log_level: Option<LevelFilter>,
    tenant: Option<String>,
    name: Option<String>,
    json: bool,
    limit: Option<usize>,
    quota: Quota,
}

/// Reads this process's arguments.
pub(crate) fn parse() -> Result<Command> {
    parse_from(lexopt::Parser::from_env())
}

fn parse_from(mut parser: lexopt::Parser) -> Result<Command> {
    use lexopt::prelude::*;
    let mut written = Written::default();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("state") => written.state = Some(parser.value()?.into()),
            Long("listen") => written.listen = Some(parser.value()?.string()?),
            Long("node-socket") => written.node_socket = Some(parser.value()?.into()),
            Long("domain") => written.domain = Some(parser.value()?.string()?),
            Long("rate") => written.rate = Some(parser.value()?.parse().context("--rate")?),
            Long("log-level") => written.log_level = Some(parser.value()?.parse().context("--log-level")?),
            Long("tenant") => written.tenant = Some(parser.value()?.string()?),
            Long("name") => written.name = Some(parser.value()?.string()?),
            Long("json") => written.json = true,
            Long("limit") => written.limit = Some(parser.value()?.parse().context("--limit")?),
            Long("sandboxes") => written.quota.sandboxes = Some(parser.value()?.parse().context("--sandboxes")?),
            Long("vcpus") => written.quota.vcpus = Some(parser.value()?.parse().context("--vcpus")?),
            Long("memory") => {
                let size: ByteSize = parser.value()?.parse().context("--memory")?;
                written.quota.memory = Some(size.bytes());
            }
            Long("version") => {
                return Ok(Command::Print(concat!(
                    "basalt-gateway ",
                    env!("CARGO_PKG_VERSION"),
                    "\n"
                )));
            }
            Short('h') | Long("help") => return Ok(Command::Print(HELP)),
            Value(word) => written.words.push(word.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    let state = written.state.take().unwrap_or_else(|| "/var/lib/basalt-gateway".into());
    let state = std::path::absolute(&state).with_context(|| format!("{} cannot be made absolute", state.display()))?;
    if written.words.is_empty() {
        return written.serve(state).map(Command::Serve);
    }
    if written.words == ["openapi"] {
        return Ok(Command::Document);
    }
    Ok(Command::Manage(state, written.work()?))
}

impl Written {
    fn serve(self, state: PathBuf) -> Result<Serve> {
        if self.tenant.is_some() || self.name.is_some() || self.json || self.limit.is_some() || self.quota.is_limited()
        {
            bail!("--tenant, --name, --json, --limit and quotas are of use with keys, tenants and audit only");
        }
        let mut limits = LimitsConfig::default();
        if let Some(rate) = self.rate {
            limits.burst = rate.saturating_mul(NonZeroU32::MIN.saturating_add(1));
            limits.rate = rate;
        }
        Ok(Serve {
            listen: listen(self.listen.as_deref().unwrap_or("127.0.0.1:3000"))?,
            node_socket: self
                .node_socket
                .unwrap_or_else(|| "/var/lib/basalt/gateway.sock".into()),
            domain: self.domain.as_deref().map(domain).transpose()?,
            log_level: self.log_level.unwrap_or(LevelFilter::Info),
            limits,
            state,
        })
    }

    fn work(self) -> Result<Work> {
        let of_server =
            self.listen.is_some() || self.node_socket.is_some() || self.domain.is_some() || self.rate.is_some();
        if of_server || self.log_level.is_some() {
            bail!("--listen, --node-socket, --domain, --rate and --log-level are of use for serving only");
        }
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        let work = match words[..] {
            ["keys", "create"] => Work::CreateKey {
                tenant: self.tenant.unwrap_or_else(|| DEFAULT_TENANT.to_owned()),
                name: self.name.unwrap_or_else(|| "unnamed".to_owned()),
                json: self.json,
            },
            ["keys", "list"] => Work::ListKeys {
                tenant: self.tenant,
                json: self.json,
            },
            ["keys", "revoke", id] => Work::RevokeKey { id: id.to_owned() },
            ["tenants", "list"] => Work::ListTenants { json: self.json },
            ["tenants", "set", tenant] => Work::SetTenant {
                tenant: tenant.to_owned(),
                quota: self.quota,
            },
            ["audit"] => Work::Audit {
                tenant: self.tenant,
                limit: self.limit.unwrap_or(100),
                json: self.json,
            },
            _ => bail!(
                "`{}` is no command: write keys create, keys list, keys revoke ID, tenants list, tenants set NAME, audit or openapi",
                words.join(" ")
            ),
        };
        Ok(work)
    }
}

fn listen(text: &str) -> Result<SocketAddr> {
    let address: SocketAddr = text
        .parse()
        .with_context(|| format!("--listen `{text}` is no address: write 127.0.0.1:PORT or [::1]:PORT"))?;
    if !address.ip().is_loopback() {
        bail!(
            "--listen {address} can be reached by others, and keys would travel there unencrypted: listen at 127.0.0.1 or [::1], with a proxy before it that speaks TLS"
        );
    }
    Ok(address)
}

/// A domain's name, with a port where that is not the usual one.
fn domain(text: &str) -> Result<String> {
    let (name, port) = text.split_once(':').unwrap_or((text, "443"));
    let is_label = |label: &str| {
        let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=63).contains(&label.len()) && label.bytes().all(good)
    };
    if name.len() > 200 || !name.split('.').all(is_label) || port.parse::<u16>().is_err() {
        bail!(
            "--domain `{text}` is no domain: write one in lower case such as sandboxes.example, or with a port behind a colon"
        );
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<Command> {
        parse_from(lexopt::Parser::from_args(words))
    }

    fn work(words: &[&str]) -> Work {
        match parsed(words) {
            Ok(Command::Manage(_, work)) => work,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_way_to_call_it() {
        assert!(matches!(parsed(&["openapi"]), Ok(Command::Document)));
        let Ok(Command::Serve(options)) = parsed(&[]) else {
            panic!()
        };
        assert_eq!(options.listen.to_string(), "127.0.0.1:3000");
        assert_eq!((options.domain, options.log_level), (None, LevelFilter::Info));
        let words = [
            "--listen",
            "[::1]:1",
            "--domain",
            "sb.example:8443",
            "--rate=7",
            "--state",
            "/s",
            "--node-socket",
            "/n",
        ];
        let Ok(Command::Serve(options)) = parsed(&words) else {
            panic!()
        };
        assert_eq!(
            (options.domain.as_deref(), options.state),
            (Some("sb.example:8443"), "/s".into())
        );
        assert_eq!((options.limits.rate.get(), options.limits.burst.get()), (7, 14));
        assert_eq!(
            work(&["keys", "create", "--tenant", "a", "--name", "ci", "--json"]),
            Work::CreateKey {
                tenant: "a".into(),
                name: "ci".into(),
                json: true
            }
        );
        assert_eq!(
            work(&["keys", "list"]),
            Work::ListKeys {
                tenant: None,
                json: false
            }
        );
        assert_eq!(work(&["keys", "revoke", "0a"]), Work::RevokeKey { id: "0a".into() });
        assert_eq!(work(&["tenants", "list", "--json"]), Work::ListTenants { json: true });
        let quota = Quota {
            sandboxes: Some(3),
            vcpus: None,
            memory: Some(1 << 30),
        };
        let words = ["tenants", "set", "a", "--sandboxes", "3", "--memory", "1G"];
        assert_eq!(
            work(&words),
            Work::SetTenant {
                tenant: "a".into(),
                quota
            }
        );
        assert_eq!(
            work(&["audit", "--limit", "5"]),
            Work::Audit {
                tenant: None,
                limit: 5,
                json: false
            }
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for words in [
            &["serve"][..],
            &["openapi", "now"],
            &["keys"],
            &["keys", "revoke"],
            &["keys", "list", "--listen", "127.0.0.1:1"],
            &["--tenant", "a"],
            &["--sandboxes", "3"],
            &["--listen", "3000"],
            &["--domain", "Sb.example"],
            &["--domain", "a..b"],
            &["--domain", "a:b"],
            &["--rate", "0"],
            &["--log-level", "loud"],
            &["tenants", "set", "a", "--memory", "much"],
        ] {
            assert!(parsed(words).is_err(), "{words:?}");
        }
        for address in ["0.0.0.0:3000", "[::]:3000", "192.0.2.1:3000"] {
            let error = parsed(&["--listen", address]).unwrap_err().to_string();
            assert!(error.contains(address) && error.contains("TLS"), "{error}");
        }
    }
}
