//! The server of forwarded accelerator calls: a back end, a socket, and whoever connects. Everything else is crate `accel-server`.
//!
//! A signal ends it as any process: clients see it by the window's life word, and the next server replaces the socket.

mod options;

use std::process::ExitCode;
use std::sync::Arc;

use accel_server::{Backend, Server};
use anyhow::Result;

use crate::options::{Command, Options};

fn serve(options: &Options) -> Result<()> {
    observe::logger::init("basalt-accel-server: ", options.log_level)?;
    let backend = match &options.library {
        Some(library) => Backend::opencl(library)?,
        None => Backend::null(),
    };
    let listener = Server::listen(&options.socket)?;
    log::info!("{} is served on {}", backend.name(), options.socket.display());
    Ok(Arc::new(Server::new(backend, options.settings())).serve(listener)?)
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
