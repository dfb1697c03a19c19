//! The gateway as a process: flags, listeners, signals; and what its operator does with keys, tenants and the audit log. Everything else is
//! crate `gateway`.

mod environment;
mod manage;
mod options;
mod serving;
mod state;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use control::{ControlStore, Sqlite};
use gateway::{
    BuildsConfig, CertificateSource, Dns, Domain, Facade, Gateway, Listeners, Parts, SocketNode, Tls, Tokens, Zone,
};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::options::{Certificate, Command, Environment, Names, Serve, TlsOptions};
use crate::serving::Serving;
use crate::state::Before;

/// How long threads may take that wait for the node when all connections are gone.
const LAST_WORK: Duration = Duration::from_secs(5);

/// Serves until it is told to end.
async fn serve(options: Serve) -> Result<()> {
    state::refuse_others(&options.state)?;
    let store: Arc<dyn ControlStore> = Arc::new(Sqlite::open(&options.state)?);
    let lock = state::lock(&options.state)?;
    let gateway = Gateway::new(Parts {
        node: Arc::new(SocketNode::new(&options.node_socket)),
        store,
        envd: Arc::new(Facade::with_memory(options.memory_budget)),
        tokens: Tokens::open(&options.state)?,
        domain: options.names.as_ref().map(|names| names.domain.clone()),
        limits: options.limits,
        builds: BuildsConfig::new(options.state.join("uploads")),
        volumes: options.volumes,
    });
    let plain = TcpListener::bind(options.listen)
        .await
        .with_context(|| format!("cannot listen at {}", options.listen))?;
    let (stop, stopped) = watch::channel(false);
    let address = plain.local_addr()?;
    log::info!("serving at http://{address}");
    let mut serving = Serving {
        plain: address,
        domain: None,
        ca: None,
        dns: None,
    };
    let mut listeners = Listeners::plain(plain);
    if let Some(names) = &options.names {
        serve_names(names, &options.state, (&mut listeners, &mut serving), &stopped).await?;
    }
    serving.write(&options.state)?;
    let tls = listeners.tls.as_ref().map(|(_, tls)| Arc::clone(tls));
    watch_signals(stop, tls)?;
    let mut ends = stopped.clone();
    tokio::spawn(async move {
        // The next one may begin when this one takes nobody any more.
        drop(ends.wait_for(|stop| *stop).await);
        drop(lock);
    });
    gateway::serve(gateway, listeners, stopped)
        .await
        .context("the listener failed")
}

/// Begins what names need: TLS and a name server.
async fn serve_names(
    names: &Names,
    state: &Path,
    (listeners, serving): (&mut Listeners, &mut Serving),
    stopped: &watch::Receiver<bool>,
) -> Result<()> {
    let domain = &names.domain;
    serving.domain = Some(domain.clone());
    let mut reached = serving.plain;
    if let Some(options) = &names.tls {
        let (listener, tls) = listen_by_tls(options, state, domain).await?;
        reached = listener.local_addr()?;
        log::info!("serving at https://api.{domain}, by {reached}");
        let port = domain.port();
        if port != reached.port() {
            log::warn!("clients ask for names of {domain} at port {port}, which has to lead to {reached}");
        }
        if let Certificate::Own { public } = &options.certificate {
            serving.ca = Some(public.clone());
        }
        tokio::spawn(Arc::clone(&tls).keep(stopped.clone()));
        listeners.tls = Some((listener, tls));
    }
    if let Some(address) = names.dns {
        let dns = Dns::bind(address, Zone::new(domain, ways_to(reached))?)
            .with_context(|| format!("cannot answer as a name server at {address}"))?;
        let address = dns.address()?;
        log::info!("answering for {domain} as a name server at {address}");
        serving.dns = Some(address);
        tokio::spawn(dns.serve(stopped.clone()));
    }
    Ok(())
}

async fn listen_by_tls(options: &TlsOptions, state: &Path, domain: &Domain) -> Result<(TcpListener, Arc<Tls>)> {
    let source = match &options.certificate {
        Certificate::Own { public } => CertificateSource::Own {
            state: state.to_owned(),
            public: public.clone(),
        },
        Certificate::Files { certificate, key } => CertificateSource::Files {
            certificate: certificate.clone(),
            key: key.clone(),
        },
    };
    // First of all: who cannot serve changes no certificate.
    let listener = TcpListener::bind(options.listen).await.with_context(|| {
        format!(
            "cannot listen at {} by TLS: give the domain another port (--domain NAME:PORT), or say by --tls where to listen",
            options.listen
        )
    })?;
    Ok((listener, Tls::open(&source, domain)?))
}

/// Where clients of this machine find what listens there, as nobody else is told by the name server.
fn ways_to(listens: SocketAddr) -> Vec<IpAddr> {
    match listens.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => vec![Ipv4Addr::LOCALHOST.into()],
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
        one => vec![one],
    }
}

fn watch_signals(stop: watch::Sender<bool>, tls: Option<Arc<Tls>>) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("waiting for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("waiting for SIGINT")?;
    let mut hangup = signal(SignalKind::hangup()).context("waiting for SIGHUP")?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => {
                    if let Some(tls) = tls.clone() {
                        // Files are read there.
                        tokio::task::spawn_blocking(move || tls.reload());
                    }
                }
            }
        }
        log::info!("no more requests are taken; those that are under way are answered");
        stop.send_replace(true);
    });
    Ok(())
}

/// A key that nobody has seen is lost: that it could not be shown is an error.
fn show(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("writing to standard output")
}

/// What moves a program to the gateway.
fn environment(state: &Path, asked: &Environment) -> Result<String> {
    serving::wait(state);
    let before = state::become_owner(state)?;
    let serving = Serving::read(state)?;
    let store = Sqlite::open(state)?;
    let (tenant, shown) = (
        asked.tenant.as_deref(),
        std::env::var("E2B_API_KEY").unwrap_or_default(),
    );
    let key = match manage::is_good(&store, &shown, tenant)? {
        true => shown,
        false => manage::new_key(&store, tenant, asked.name.as_deref().unwrap_or("env"))?,
    };
    let own = match (&serving.domain, &serving.ca) {
        (Some(domain), Some(_)) => Some((domain, certificate(state, domain)?)),
        _ => None,
    };
    drop(store);
    // What programs trust is written by who calls, where the gateway cannot change it.
    before.map(Before::restore).transpose()?;
    let mut warnings = environment::warnings(&serving);
    let trusted = match own {
        Some((domain, certificate)) => {
            let (directory, said) = environment::trust(&certificate, domain, asked.public.as_deref())?;
            warnings.extend(said);
            Some(directory)
        }
        None => None,
    };
    for warning in warnings {
        eprintln!("basalt-gateway: {warning}");
    }
    environment::text(&environment::variables(&serving, &key, trusted.as_deref()), asked.json)
}

/// The certificate of the gateway's own authority for a domain.
fn certificate(state: &Path, domain: &Domain) -> Result<String> {
    gateway::certificate_of(state, domain)?.with_context(|| {
        format!(
            "there is no certificate authority for {} in {}: a gateway makes one when it is started with --domain and without --tls-cert",
            domain.name(),
            state.display()
        )
    })
}

/// The certificate of the gateway's own authority.
fn authority(state: &Path, as_json: bool) -> Result<String> {
    serving::wait(state);
    state::become_owner(state)?;
    let serving = Serving::read(state)?;
    let domain = serving
        .domain
        .context("the gateway has no certificate authority: it makes one when it is started with --domain and without --tls-cert")?;
    let certificate = certificate(state, &domain)?;
    if !as_json {
        return Ok(certificate);
    }
    let path = serving.ca.map(|directory| directory.join(gateway::CERTIFICATE));
    let told = serde_json::json!({"certificate": certificate, "path": path});
    Ok(format!("{told}\n"))
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Print(text) => show(text),
        Command::Document => {
            let document = gateway::openapi().context("the API's document cannot be written")?;
            show(&format!("{document}\n"))
        }
        Command::Manage(state, work) => {
            state::become_owner(&state)?;
            show(&manage::run(&Sqlite::open(&state)?, &work)?)
        }
        Command::Environment(state, asked) => show(&environment(&state, &asked)?),
        Command::Authority { state, json } => show(&authority(&state, json)?),
        Command::Serve(options) => {
            observe::logger::init("basalt-gateway: ", options.log_level)?;
            if let Err(error) = base::open_files::raise() {
                log::warn!("the limit of open files stays as it is: {error}");
            }
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .enable_all()
                .build()
                .context("starting threads")?;
            let served = runtime.block_on(serve(options));
            // What the node is still being asked for is carried out there, whether somebody waits or not.
            runtime.shutdown_timeout(LAST_WORK);
            served
        }
    }
}

fn main() -> ExitCode {
    match options::parse().and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("basalt-gateway: {error:#}");
            ExitCode::FAILURE
        }
    }
}
