//! The gateway as a process: flags, a listener, signals; and what its operator does with keys, tenants and the audit log. Everything else is
//! crate `gateway`.

mod manage;
mod options;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use control::{ControlStore, Sqlite};
use gateway::{Facade, Gateway, Parts, SocketNode, Tokens};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::options::{Command, Serve};

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
        domain: options.domain,
        limits: options.limits,
    });
    let listener = TcpListener::bind(options.listen)
        .await
        .with_context(|| format!("cannot listen at {}", options.listen))?;
    log::info!("serving at http://{}", listener.local_addr()?);
    let (stop, stopped) = watch::channel(false);
    let mut terminate = signal(SignalKind::terminate()).context("waiting for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("waiting for SIGINT")?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => (),
            _ = interrupt.recv() => (),
        }
        log::info!("no more requests are taken; those that are under way are answered");
        stop.send_replace(true);
    });
    gateway::serve(gateway, listener, stopped)
        .await
        .context("the listener failed")
}

/// A key that nobody has seen is lost: that it could not be shown is an error.
fn show(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("writing to standard output")
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Print(text) => show(text),
        Command::Document => {
            let document = gateway::openapi().context("the API's document cannot be written")?;
            show(&format!("{document}\n"))
        }
        Command::Manage(state, work) => {
            let text = manage::run(&Sqlite::open(&state)?, &work)?;
            show(&text)
        }
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
