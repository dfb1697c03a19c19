//! The server of forwarded accelerator calls: a back end, a socket, and whoever connects. Everything else is crate `accel-server`.
//!
//! A signal ends it as any process: clients see it by the window's life word, and the next server replaces the socket.

mod carrier;
mod confine;
mod guest;
mod options;

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use accel_server::{Backend, Server};
use accel_transport::tls;
use anyhow::{Context as _, Result, bail};
use base::ByteSize;

use crate::guest::Inherited;
use crate::options::{Certificates, Command, Options, Place};

fn serve(options: &Options) -> Result<()> {
    match &options.place {
        Place::Host(socket) => {
            observe::logger::init("basalt-accel-server: ", options.log_level)?;
            let control = control(options)?;
            let (backend, listener) = match &options.jail {
                None => {
                    let backend = options.backend.open()?;
                    (backend, Server::listen(socket)?)
                }
                // The socket's path is one of the host's, which a jail does not have.
                Some(jail) => {
                    let listener = Server::listen(socket)?;
                    confine::enter(jail, options.backend.library(), options.arena, Vec::new())?;
                    (options.backend.open()?, listener)
                }
            };
            log::info!("{} is served on {}", backend.name(), socket.display());
            let control = control.as_ref().map(|control| (control, 0));
            Ok(server(options, backend, control)?.serve(listener)?)
        }
        Place::Remote(address, certificates) => {
            observe::logger::init("basalt-accel-server: ", options.log_level)?;
            let control = control(options)?;
            let tls = match certificates {
                Some(Certificates { own, clients }) => Some(tls::server(own, clients.as_deref())?),
                None => None,
            };
            let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
            // What it listens on is all that it has of the network. It shares no memory with such clients.
            if let Some(jail) = &options.jail {
                confine::enter(jail, options.backend.library(), ByteSize(0), Vec::new())?;
            }
            let control = control.as_ref().map(|control| (control, 0));
            let server = server(options, options.backend.open()?, control)?;
            // Whoever has asked for port 0 learns which one it is.
            eprintln!("basalt-accel-server: listening on {}", listener.local_addr()?);
            Ok(server.serve_remote(&listener, tls)?)
        }
        Place::Passive(paths) => {
            observe::logger::init("basalt-accel-server: ", options.log_level)?;
            if !accel_transport::may_be_linked() {
                bail!(
                    "--passive is for a guest on an AMD processor, of a sandbox of the class `bare`; use --socket here"
                );
            }
            let open = |path: &PathBuf| {
                let file = File::options().read(true).write(true).open(path);
                file.with_context(|| format!("cannot open the window {}", path.display()))
            };
            let windows = paths.iter().map(open).collect::<Result<Vec<_>>>()?;
            let server = server(options, options.backend.open()?, None)?;
            // What would come from a disk later never comes: it takes an interrupt. Memory that comes later is none of a disk's.
            rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT)
                .context("cannot keep all of this program in memory; run it as root")?;
            let begin = accel_transport::run_when_others_sleep;
            match accel_server::serve_passive(&server, windows, begin, accel_transport::wait_to_be_entered)? {}
        }
        Place::Guest(fds) => {
            // First of all: it relies on nothing else being open.
            let mut inherited = Inherited::take(*fds)?;
            observe::logger::init("basalt-accel-server: ", options.log_level)?;
            let control = match inherited.take_control() {
                Some(listener) => Some(listener),
                None => control(options)?,
            };
            let confined = match &options.jail {
                Some(jail) => Some(confine::enter(
                    jail,
                    options.backend.library(),
                    // That is the machine's, and is there.
                    ByteSize(0),
                    inherited.take_mounts(),
                )?),
                None => None,
            };
            let slots = guest::format(&mut inherited)?;
            guest::supervise((options, control.as_ref()), &inherited, &slots, confined.as_ref())
        }
    }
}

/// Where statistics are told, which is made while the host's paths are there.
fn control(options: &Options) -> Result<Option<UnixListener>> {
    let listener = options.control.as_deref().map(Server::listen_for_stats);
    Ok(listener.transpose()?)
}

/// A server with its limits, which tells statistics if it is to, and how many served before it.
fn server(options: &Options, backend: Backend, control: Option<(&UnixListener, u64)>) -> Result<Arc<Server>> {
    let server = Server::with_limits(backend, options.settings(), &options.limits)?;
    let server = Arc::new(match options.coalesce {
        Some(most) => server.coalescing(most),
        None => server,
    });
    if let Some((control, restarts)) = control {
        server.tell_stats(control.try_clone()?, restarts)?;
    }
    Ok(server)
}

fn main() -> ExitCode {
    let result = options::parse().and_then(|command| match command {
        Command::Serve(options) => serve(&options),
        Command::Print(text) => {
            use std::io::Write as _;
            Ok(std::io::stdout().write_all(text.as_bytes())?)
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("basalt-accel-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}
