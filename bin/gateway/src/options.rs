//! The gateway's flags and verbs. Knows nothing of what they do.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use base::ByteSize;
use control::{DEFAULT_TENANT, Quota};
use gateway::{Domain, Facade, LimitsConfig, VolumesConfig};
use log::LevelFilter;

const HELP: &str = "\
basalt-gateway: serves a node's sandboxes by the API that the E2B SDKs speak (see docs/gateway.md)

Usage: basalt-gateway [--listen ADDRESS] [--node-socket PATH] [--state DIR] [--rate NUMBER] [--log-level LEVEL]
                      [--volume-size SIZE] [--volumes NUMBER] [--memory-budget SIZE]
                      [--domain DOMAIN [--tls ADDRESS|off] [--tls-cert FILE --tls-key FILE] [--ca-dir DIR]
                      [--dns ADDRESS]]
       basalt-gateway env [--tenant NAME] [--name TEXT] [--json] [--ca-dir DIR] [--state DIR]
       basalt-gateway ca [--json] [--state DIR]
       basalt-gateway keys create [--tenant NAME] [--name TEXT] [--json] [--state DIR]
       basalt-gateway keys list [--tenant NAME] [--json] [--state DIR]
       basalt-gateway keys revoke ID [--state DIR]
       basalt-gateway tenants list [--json] [--state DIR]
       basalt-gateway tenants set NAME [--sandboxes NUMBER] [--vcpus NUMBER] [--memory SIZE]
                      [--volumes NUMBER] [--volume-space SIZE] [--state DIR]
       basalt-gateway audit [--tenant NAME] [--limit NUMBER] [--json] [--state DIR]
       basalt-gateway openapi

  --listen ADDRESS    where to serve without TLS: a port of 127.0.0.1 or [::1]; 127.0.0.1:3000
  --node-socket PATH  the socket of the node's daemon; /var/lib/basalt/gateway.sock
  --state DIR         where keys, tenants, the audit log, the secret of tokens and the certificate authority are kept,
                      for this user alone; /var/lib/basalt-gateway
  --domain DOMAIN     sandboxes' ports are asked for at <port>-<id>.DOMAIN, and the API at api.DOMAIN, by TLS; with
                      headers alone if it is not given. At port 443 unless one follows behind a colon
  --tls ADDRESS       where to serve by TLS, others than this machine too if it is not a loopback address; that port of
                      127.0.0.1. `off` if something else before it speaks TLS
  --tls-cert FILE, --tls-key FILE
                      a certificate for DOMAIN and *.DOMAIN with its chain, and its key, as PEM; read again when they
                      change, and at SIGHUP. One of an own authority, which is made once, if they are not given
  --ca-dir DIR        where that authority's certificate is put for programs to read, as ca.pem; the state directory
  --dns ADDRESS       where to answer for DOMAIN and all names below it as a name server: a port of a loopback address
  --rate NUMBER       requests a second of one key; 100
  --volume-size SIZE  how large each volume is: what a tenant can write to it at most; 1G
  --volumes NUMBER    volumes that each tenant may have; 20, and for one tenant with `tenants set`
  --memory-budget SIZE
                      what messages, lists and events of all sandboxes' processes and files may hold; 512M
  --log-level LEVEL   off, error, warn, info (default), debug or trace
  --version           print the version
  --help              print this text

  env                 print what moves a program with the E2B SDKs to this gateway, for a shell's eval. The key is that of
                      E2B_API_KEY if it is good here, or a new one. What they are to trust is written to --ca-dir:
                      basalt-env/DOMAIN of the caller's cache directory, or of /var/cache where that is root
  ca                  print the certificate of the gateway's own authority, as PEM
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
  basalt-gateway --domain sb.localhost:3443 --state ~/.local/share/basalt-gateway
  eval \"$(basalt-gateway env --state ~/.local/share/basalt-gateway)\"
  export E2B_API_KEY=$(basalt-gateway keys create --name laptop)
  basalt-gateway tenants set default --sandboxes 20 --memory 16G
";

/// With less no tenant could ask for a list of the longest.
const SMALLEST_BUDGET: ByteSize = ByteSize::mib(64);

/// What serving needs to know.
#[derive(Debug)]
pub(crate) struct Serve {
    pub(crate) listen: SocketAddr,
    pub(crate) node_socket: PathBuf,
    pub(crate) state: PathBuf,
    pub(crate) names: Option<Names>,
    pub(crate) limits: LimitsConfig,
    pub(crate) volumes: VolumesConfig,
    /// Bytes.
    pub(crate) memory_budget: usize,
    pub(crate) log_level: LevelFilter,
}

/// How it is reached by names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) domain: Domain,
    pub(crate) tls: Option<TlsOptions>,
    pub(crate) dns: Option<SocketAddr>,
}

/// What is served by TLS.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TlsOptions {
    pub(crate) listen: SocketAddr,
    pub(crate) certificate: Certificate,
}

/// With which certificate.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Certificate {
    /// One of an own authority, whose certificate is put there.
    Own { public: PathBuf },
    /// Files.
    Files { certificate: PathBuf, key: PathBuf },
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

/// Whose program is moved to the gateway, and how it is told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Environment {
    pub(crate) tenant: Option<String>,
    /// Of a key that is made for it.
    pub(crate) name: Option<String>,
    pub(crate) json: bool,
    /// Where what it is to trust is put.
    pub(crate) public: Option<PathBuf>,
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Command {
    Serve(Serve),
    Manage(PathBuf, Work),
    Environment(PathBuf, Environment),
    Authority { state: PathBuf, json: bool },
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
    names: WrittenNames,
    rate: Option<NonZeroU32>,
    volume_size: Option<ByteSize>,
    volumes: Option<u32>,
    memory_budget: Option<ByteSize>,
    log_level: Option<LevelFilter>,
    tenant: Option<String>,
    name: Option<String>,
    json: bool,
    limit: Option<usize>,
    quota: Quota,
}

/// What of it is about names.
#[derive(Debug, Default, PartialEq, Eq)]
struct WrittenNames {
    domain: Option<String>,
    tls: Option<String>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    ca_dir: Option<PathBuf>,
    dns: Option<String>,
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
            Long("domain") => written.names.domain = Some(parser.value()?.string()?),
            Long("tls") => written.names.tls = Some(parser.value()?.string()?),
            Long("tls-cert") => written.names.tls_cert = Some(parser.value()?.into()),
            Long("tls-key") => written.names.tls_key = Some(parser.value()?.into()),
            Long("ca-dir") => written.names.ca_dir = Some(parser.value()?.into()),
            Long("dns") => written.names.dns = Some(parser.value()?.string()?),
            Long("rate") => written.rate = Some(parser.value()?.parse().context("--rate")?),
            Long("volume-size") => written.volume_size = Some(parser.value()?.parse().context("--volume-size")?),
            Long("volumes") => written.volumes = Some(parser.value()?.parse().context("--volumes")?),
            Long("volume-space") => {
                let size: ByteSize = parser.value()?.parse().context("--volume-space")?;
                written.quota.volume_space = Some(size.bytes());
            }
            Long("memory-budget") => written.memory_budget = Some(parser.value()?.parse().context("--memory-budget")?),
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
    written.work(state)
}

impl Written {
    fn serve(self, state: PathBuf) -> Result<Serve> {
        if self.tenant.is_some() || self.name.is_some() || self.json || self.limit.is_some() || self.quota.is_limited()
        {
            bail!("--tenant, --name, --json, --limit and quotas are of use with env, keys, tenants and audit only");
        }
        let volumes = VolumesConfig::default();
        let memory_budget = match self.memory_budget {
            Some(size) if size < SMALLEST_BUDGET => {
                bail!("--memory-budget {size} is too little for one request: give {SMALLEST_BUDGET} or more")
            }
            Some(size) => usize::try_from(size.bytes()).with_context(|| format!("--memory-budget {size}"))?,
            None => Facade::MEMORY,
        };
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
            names: self.names.read(&state)?,
            log_level: self.log_level.unwrap_or(LevelFilter::Info),
            limits,
            memory_budget,
            volumes: VolumesConfig {
                size: self.volume_size.unwrap_or(volumes.size),
                most: self.volumes.unwrap_or(volumes.most),
            },
            state,
        })
    }

    fn work(mut self, state: PathBuf) -> Result<Command> {
        let public = match self.words == ["env"] {
            true => self.names.ca_dir.take(),
            false => None,
        };
        let of_server = self.listen.is_some() || self.node_socket.is_some() || self.rate.is_some();
        if self.words.starts_with(&["tenants", "set"].map(str::to_owned)) {
            self.quota.volumes = self.volumes.take().map(u64::from);
        }
        let of_bounds = self.volume_size.is_some() || self.volumes.is_some() || self.memory_budget.is_some();
        if of_server || of_bounds || self.log_level.is_some() || self.names != WrittenNames::default() {
            bail!(
                "--listen, --node-socket, --domain, --tls, --tls-cert, --tls-key, --ca-dir, --dns, --rate, --volume-size, --volumes, --memory-budget and --log-level are of use for serving only"
            );
        }
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        let work = match words[..] {
            ["env"] => {
                let (tenant, name, json) = (self.tenant, self.name, self.json);
                let public = public.as_deref().map(absolute).transpose()?;
                let asked = Environment {
                    tenant,
                    name,
                    json,
                    public,
                };
                return Ok(Command::Environment(state, asked));
            }
            ["ca"] => return Ok(Command::Authority { state, json: self.json }),
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
                "`{}` is no command: write env, ca, keys create, keys list, keys revoke ID, tenants list, tenants set NAME, audit or openapi",
                words.join(" ")
            ),
        };
        Ok(Command::Manage(state, work))
    }
}

impl WrittenNames {
    fn read(self, state: &Path) -> Result<Option<Names>> {
        let Some(text) = self.domain.as_deref() else {
            if self != Self::default() {
                bail!(
                    "--tls, --tls-cert, --tls-key, --ca-dir and --dns are about names: say by --domain which those are"
                );
            }
            return Ok(None);
        };
        let domain: Domain = text.parse().with_context(|| format!("--domain {text}"))?;
        let files = match (self.tls_cert, self.tls_key) {
            (Some(certificate), Some(key)) => Some((absolute(&certificate)?, absolute(&key)?)),
            (None, None) => None,
            _ => bail!("--tls-cert and --tls-key belong together: give both, or none"),
        };
        let usual = SocketAddr::from((Ipv4Addr::LOCALHOST, domain.port()));
        let listen = match self.tls.as_deref() {
            Some("off") => None,
            Some(text) => Some(
                text.parse()
                    .with_context(|| format!("--tls `{text}` is neither off nor an address: write IP:PORT"))?,
            ),
            None => Some(usual),
        };
        let tls = match (listen, files) {
            (None, None) => None,
            (None, Some(_)) => bail!("--tls-cert and --tls-key are of no use with --tls off"),
            (Some(listen), Some((certificate, key))) => Some(TlsOptions {
                listen,
                certificate: Certificate::Files { certificate, key },
            }),
            (Some(listen), None) => {
                let name = domain.name();
                if !name.contains('.') {
                    bail!(
                        "--domain `{name}` has one part, and clients take no certificate for all names right below it: write one such as sb.{name}"
                    );
                }
                let public = self.ca_dir.as_deref().map_or_else(|| Ok(state.to_owned()), absolute)?;
                Some(TlsOptions {
                    listen,
                    certificate: Certificate::Own { public },
                })
            }
        };
        let dns = self.dns.as_deref().map(|text| loopback("--dns", text)).transpose()?;
        if let Some(address) = dns.filter(|address| !address.ip().is_loopback()) {
            bail!(
                "--dns {address} can be reached by others: answer at a loopback address, and have a name server for others"
            );
        }
        Ok(Some(Names { domain, tls, dns }))
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} cannot be made absolute", path.display()))
}

fn loopback(flag: &str, text: &str) -> Result<SocketAddr> {
    text.parse()
        .with_context(|| format!("{flag} `{text}` is no address: write 127.0.0.1:PORT or [::1]:PORT"))
}

fn listen(text: &str) -> Result<SocketAddr> {
    let address = loopback("--listen", text)?;
    if !address.ip().is_loopback() {
        bail!(
            "--listen {address} can be reached by others, and keys would travel there unencrypted: listen there by TLS with --domain and --tls {address}"
        );
    }
    Ok(address)
}

#[cfg(test)]
mod tests;
