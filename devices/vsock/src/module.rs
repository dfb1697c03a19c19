//! The module: makes devices out of their configuration.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use device::{CreateError, DeviceContext, DeviceModule, FdTable};
use rustix::net::SocketType;
use rustix::net::sockopt;
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, VsockConfig};
use wire::packet::PacketSocket;

use crate::device::Vsock;
use crate::host::Host;
use crate::metrics::Metrics;
use crate::sink::Sink;
use crate::switch::Switch;

/// The module of kind `vsock`.
pub static MODULE: Module = Module;

/// Makes vsock devices.
#[derive(Debug)]
pub struct Module;

impl DeviceModule for Module {
    fn kind(&self) -> &'static str {
        VsockConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
    ) -> Result<Box<dyn VirtioDevice>, CreateError> {
        let config: VsockConfig = device::parse_config(spec)?;
        // 5.10.4: 0, 1, 2 and 2^32 - 1 are reserved.
        if !(3..u32::MAX).contains(&config.cid) {
            return Err(CreateError::Value(format!(
                "{} cannot be a guest's context id: choose 3 to 4294967294",
                config.cid
            )));
        }
        let listener = fds.take_optional(config.listener)?;
        let acceptor = fds.take_optional(config.acceptor)?;
        if let Some(listener) = &listener {
            check(listener, "listener", SocketType::STREAM, true)?;
        }
        if let Some(acceptor) = &acceptor {
            check(acceptor, "acceptor", SocketType::SEQPACKET, false)?;
        }
        let sinks = config.sinks.iter().map(|sink| {
            let file = fds.take(sink.file)?;
            Ok(Arc::new(Sink::new(sink.port, file.into(), sink.keep)))
        });
        let sinks = sinks.collect::<Result<_, CreateError>>()?;
        let host = Host::new(listener, acceptor.map(PacketSocket::from_fd)).with_sinks(sinks);
        let metrics = Metrics::register(context.metrics, context.id);
        let switch = Switch::new(config.cid, host, metrics).map_err(|source| CreateError::Host {
            what: "waiting for the listener",
            source,
        })?;
        Ok(Box::new(Vsock::new(config.cid, switch)))
    }
}

/// Checks that a descriptor is the kind of socket it should be, and makes it non-blocking.
fn check(socket: &OwnedFd, name: &'static str, kind: SocketType, listening: bool) -> Result<(), CreateError> {
    let host = |error: rustix::io::Errno| CreateError::Host {
        what: name,
        source: error.into(),
    };
    let fits = sockopt::socket_type(socket).map_err(host)? == kind
        && sockopt::socket_acceptconn(socket).map_err(host)? == listening;
    if !fits {
        return Err(CreateError::Value(format!(
            "the {name} is not a {} socket",
            if listening {
                "listening stream"
            } else {
                "connected packet"
            }
        )));
    }
    rustix::io::ioctl_fionbio(socket, true).map_err(host)
}
