//! The daemon's sockets: a thread a connection, bounded in number. What is asked on one is [`Connection`]'s business.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::{Epoll, EventFd, Interest};
use node_api::NodeInfo;
use observe::Repeated;
use wire::packet::PacketSocket;

use crate::Error;
use crate::api::bounds::{self, Seat, Seats};
use crate::api::connection::Connection;
use crate::api::listeners::Listener;
use crate::api::scope::Scope;
use crate::node::Node;
use crate::socket_file;

const STOP: u64 = 0;
/// Of the first listener; the others' follow.
const LISTENER: u64 = 1;

/// How long an asker may take none of an answer.
const SEND_PATIENCE: Duration = Duration::from_secs(30);

/// Between two attempts to let somebody in.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Said as long as nobody can be let in.
static NOT_LET_IN: Repeated = Repeated::new(Duration::from_secs(10));

/// The daemon.
#[derive(Debug)]
pub struct Server {
    pub(super) node: Arc<Node>,
    /// Until it serves.
    listeners: Vec<Listener>,
    pub(super) stop: Arc<EventFd>,
    pub(super) quitting: Arc<AtomicBool>,
    seats: Seats,
    /// What this program's file was when it started.
    program: Option<(PathBuf, FileId)>,
}

type FileId = (u64, u64);

impl Server {
    /// Listens on the state directory's socket, in a cgroup of its own if nobody keeps this process in another.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(node: Arc<Node>) -> Result<Self, Error> {
        node.leave_cgroup();
        let admin = Listener::bind(node.paths.socket(), node.config.sockets.group, Scope::Admin)?;
        Self::new(node, admin)
    }

    /// The same on a socket that a service manager listens on.
    ///
    /// # Errors
    /// It is no socket of the right kind.
    pub fn inherit(node: Arc<Node>, listener: OwnedFd) -> Result<Self, Error> {
        let admin = Listener::inherit(listener, node.paths.socket(), node.config.sockets.group)?;
        Self::new(node, admin)
    }

    fn new(node: Arc<Node>, admin: Listener) -> Result<Self, Error> {
        let sockets = &node.config.sockets;
        let path = sockets.gateway.clone().unwrap_or_else(|| node.paths.gateway_socket());
        let gateway = Listener::bind(path, sockets.gateway_group, Scope::Gateway)?;
        Ok(Self {
            listeners: vec![admin, gateway],
            stop: Arc::new(EventFd::new().map_err(Error::host("making an eventfd"))?),
            quitting: Arc::default(),
            seats: Seats::default(),
            program: std::env::current_exe()
                .ok()
                .and_then(|path| Some((path.clone(), file_id(&path)?))),
            node,
        })
    }

    /// What ends [`Server::serve`] when it is signalled.
    pub fn stopper(&self) -> Arc<EventFd> {
        Arc::clone(&self.stop)
    }

    /// Serves until it is told to stop. Sandboxes that are detached run on.
    ///
    /// # Errors
    /// Nobody can be waited for.
    pub fn serve(mut self) -> Result<(), Error> {
        let mut listeners = std::mem::take(&mut self.listeners);
        let tokens = LISTENER..;
        let epoll = Epoll::new().map_err(Error::host("waiting for clients"))?;
        epoll
            .add(self.stop.as_ref(), STOP, Interest::READ)
            .and_then(|()| {
                (listeners.iter().zip(tokens.clone())).try_for_each(|(one, token)| one.register(&epoll, token))
            })
            .map_err(Error::host("waiting for clients"))?;
        let server = Arc::new(self);
        let mut ready = Vec::new();
        loop {
            epoll
                .wait(&mut ready, Some(socket_file::LOOK))
                .map_err(Error::host("waiting for clients"))?;
            if ready.iter().any(|event| event.token == STOP) {
                break;
            }
            for (listener, token) in listeners.iter_mut().zip(tokens.clone()) {
                listener.look_after(&epoll, token);
                match listener.accept() {
                    Ok(Some(socket)) => server.let_in(socket, listener.scope),
                    Ok(None) => (),
                    Err(error) => {
                        not_let_in(&error);
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        }
        server.quitting.store(true, Ordering::SeqCst);
        server.node.end_builds();
        listeners.into_iter().try_for_each(Listener::close)
    }

    /// Serves somebody, if there is room.
    fn let_in(self: &Arc<Self>, socket: OwnedFd, scope: Scope) {
        let most = self.node.budget.connections();
        match self.seats.take(most) {
            Some(seat) => self.serve_in_thread(socket, scope, seat),
            None => {
                not_let_in(&format!("{most} are connected"));
                if let Err(error) = bounds::turn_away(socket, most) {
                    log::debug!("a refused client does not know why: {error}");
                }
            }
        }
    }

    fn serve_in_thread(self: &Arc<Self>, socket: OwnedFd, scope: Scope, seat: Seat) {
        let server = Arc::clone(self);
        let work = move || {
            let _seat = seat;
            let limit = Some(SEND_PATIENCE);
            if let Err(error) =
                rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Send, limit)
            {
                log::warn!("the time limit for sending to a client cannot be set: {error}");
            }
            Connection::new(&server, PacketSocket::from_fd(socket), scope).serve();
        };
        if let Err(error) = crate::thread::spawn("asker", work) {
            not_let_in(&error);
        }
    }

    /// What it says of itself.
    pub(super) fn info(&self) -> NodeInfo {
        let now = self.program.as_ref().map(|(path, then)| file_id(path) != Some(*then));
        NodeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            replaced: now.unwrap_or(false),
            managed: self.node.config.managed,
            running: self.node.sandboxes.running(),
            promised: self.node.budget.promised(),
            zeroed_memory: self.node.zeroed.told(),
        }
    }
}

/// Logs that somebody is turned away, or has to wait.
fn not_let_in(why: &dyn std::fmt::Display) {
    NOT_LET_IN.say(|more| log::warn!("connections cannot be accepted now: {why}{more}"));
}

fn file_id(path: &std::path::Path) -> Option<FileId> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}
