//! The gateway as a process: flags, listeners, signals; and what its operator does with keys, tenants and the audit log. Everything else is
//! crate `gateway`.

mod environment;
mod manage;
mod options;
mod serving;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use control::{ControlStore, Sqlite};
use gateway::{BuildsConfig, CertificateSource, Dns, Facade, Gateway, Listeners, Parts, SocketNode, Tls, Tokens, Zone};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::options::{Certificate, Command, Environment, Names, Serve, TlsOptions};
use crate::serving::Serving;

/// How long threads may take that wait for the node when all connections are gone.
const LAST_WORK: Duration = Duration::from_secs(5);

/// Serves until it is told to end.
async fn serve(options: Serve) -> Result<()> {
    let store: Arc<dyn ControlStore> = Arc::new(Sqlite::open(&options.state)?);
    let gateway = Gateway::new(Parts {
        node: Arc::new(SocketNode::new(&options.node_socket)),
        store,
        envd: Arc::new(Facade::default()),
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
        let port = domain.split_once(':').map_or("443", |(_, port)| port);
        if port.parse() != Ok(reached.port()) {
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

async fn listen_by_tls(options: &TlsOptions, state: &Path, domain: &str) -> Result<(TcpListener, Arc<Tls>)> {
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
    let tls = Tls::open(&source, domain)?;
    let listener = TcpListener::bind(options.listen).await.with_context(|| {
        format!(
            "cannot listen at {} by TLS: give the domain another port (--domain NAME:PORT), or say by --tls where to listen",
            options.listen
        )
    })?;
    Ok((listener, tls))
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
    for warning in environment::warnings(&serving) {
        eprintln!("basalt-gateway: {warning}");
    }
    environment::text(&environment::variables(&serving, &key), asked.json)
}

/// The certificate of the gateway's own authority.
fn authority(state: &Path, as_json: bool) -> Result<String> {
    let Some(certificate) = gateway::certificate_of(state)? else {
        bail!(
            "there is no certificate authority in {}: a gateway makes one when it is started with --domain and without --tls-cert",
            state.display()
        );
    };
    if !as_json {
        return Ok(certificate);
    }
    let path = Serving::read(state)?
        .ca
        .map(|directory| directory.join(gateway::CERTIFICATE));
    let told = serde_json::json!({"certificate": certificate, "path": path});
    Ok(format!("{told}\n"))
}

/// Root does it as whose the state directory is: a file of root's there would be of no use to a gateway that is somebody else.
fn become_owner(state: &Path) -> Result<()> {
    use rustix::process::{Gid, Uid};
    use std::os::unix::fs::MetadataExt;
    let Ok(metadata) = std::fs::metadata(state) else {
        return Ok(());
    };
    if !rustix::process::geteuid().is_root() || metadata.uid() == 0 {
        return Ok(());
    }
    let (user, group) = (Uid::from_raw(metadata.uid()), Gid::from_raw(metadata.gid()));
    // This process has one thread yet.
    rustix::thread::set_thread_groups(&[group])
        .and_then(|()| rustix::thread::set_thread_res_gid(group, group, group))
        .and_then(|()| rustix::thread::set_thread_res_uid(user, user, user))
        .with_context(|| format!("cannot become the owner of {}", state.display()))
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Print(text) => show(text),
        Command::Document => {
            let document = gateway::openapi().context("the API's document cannot be written")?;
            show(&format!("{document}\n"))
        }
        Command::Manage(state, work) => {
            become_owner(&state)?;
            show(&manage::run(&Sqlite::open(&state)?, &work)?)
        }
        Command::Environment(state, asked) => {
            become_owner(&state)?;
            show(&environment(&state, &asked)?)
        }
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
