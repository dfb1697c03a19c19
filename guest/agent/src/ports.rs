//! A connection becomes one to a TCP port of the machine's loopback addresses. One thread carries bytes both ways, and the end of each way by
//! itself, in a fixed amount of memory. Knows nothing of what is carried.
//!
//! ```text
//!  client ── up ──► port      each: bytes ─► end of the source ─► what is held is written ─► end is passed on
//!  client ◄─ down ─ port      the client is gone: up is brought to its end within LINGER, down is thrown away
//!                             the port takes no more: up is thrown away, down comes to its end
//! ```

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use agent_api::message::Reply;
use agent_api::{Duplex, RequestFailure, RequestFailureKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use wire::{FrameReader, FrameWriter};

use crate::{Error, send_reply};

/// Bytes on their way in one direction.
const BUFFER: usize = 32 * 1024;

/// How long a port may take to answer. A process that accepts nothing has the kernel wait.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How long a port may take for the last bytes of a client that is gone.
const LINGER: Duration = Duration::from_secs(10);

/// How often it is looked whether a client is gone that sends nothing more. A vsock socket does not say so by itself.
const LOOK: Duration = Duration::from_secs(30);

/// Connects to the port and carries bytes until both directions have ended; whether the connection is used up. An error is returned only
/// for the connection itself.
pub(crate) fn serve<S: Duplex>(port: u16, reader: &mut FrameReader<S>, writer: &FrameWriter<S>) -> Result<bool, Error> {
    let connected = connect(port);
    // Whatever the answer is: what is meant for a port must not be taken for a request. An end alone is none.
    let early = recv(reader.get_ref(), &mut [0][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    if early.is_ok_and(|(_, count)| count > 0) {
        return Err(Error::EarlyBytes { port });
    }
    let stream = match connected {
        Ok(stream) => stream,
        Err(failure) => {
            send_reply(writer, &Reply::RequestFailed(failure))?;
            return Ok(false);
        }
    };
    send_reply(writer, &Reply::Done)?;
    Relay {
        client: reader.get_ref(),
        port: &stream,
        up: Way::new(),
        down: Way::new(),
        gone: None,
    }
    .run()?;
    Ok(true)
}

fn connect(port: u16) -> Result<TcpStream, RequestFailure> {
    let mut failure = None;
    for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        let address = SocketAddr::new(address, port);
        match connect_to(address) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    Err(match failure {
        Some(error) if error.kind() != ErrorKind::ConnectionRefused => RequestFailure {
            kind: RequestFailureKind::Other,
            message: format!("port {port} does not answer at 127.0.0.1: {error}"),
        },
        _ => RequestFailure {
            kind: RequestFailureKind::NotFound,
            message: format!("port {port} is not open: nothing listens at 127.0.0.1:{port} or [::1]:{port}"),
        },
    })
}

fn connect_to(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, CONNECT_LIMIT)?;
    // A port that nobody listens at can be given to the very socket that wants to connect to it, which then speaks to itself.
    if stream.local_addr()? == address {
        return Err(ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// One direction.
struct Way {
    buffer: Vec<u8>,
    /// What is held of it.
    from: usize,
    to: usize,
    /// The source has ended.
    ended: bool,
    /// The other side knows.
    told: bool,
    /// The other side takes nothing any more.
    unwanted: bool,
}

impl Way {
    fn new() -> Self {
        Self {
            buffer: vec![0; BUFFER],
            from: 0,
            to: 0,
            ended: false,
            told: false,
            unwanted: false,
        }
    }

    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Waits for the source.
    fn wants_input(&self) -> bool {
        !self.ended && self.to < self.buffer.len()
    }

    /// Waits for the other side.
    fn wants_output(&self) -> bool {
        !self.is_empty()
    }

    /// Takes what the source has; fails if the source is broken.
    fn fill(&mut self, source: BorrowedFd<'_>) -> Result<(), Errno> {
        if !self.wants_input() {
            return Ok(());
        }
        let space = self.buffer.get_mut(self.to..).unwrap_or_default();
        match recv(source, space, RecvFlags::DONTWAIT) {
            Ok((0, _)) => self.ended = true,
            Ok((got, _)) if !self.unwanted => self.to += got,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                self.ended = true;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives the other side what it takes; fails if that is broken.
    fn drain(&mut self, sink: BorrowedFd<'_>) -> Result<(), Errno> {
        let held = self.buffer.get(self.from..self.to).unwrap_or_default();
        if held.is_empty() {
            return Ok(());
        }
        match send(sink, held, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => self.from += count,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                self.throw_away();
                return Err(error);
            }
        }
        if self.is_empty() {
            (self.from, self.to) = (0, 0);
        }
        Ok(())
    }

    fn throw_away(&mut self) {
        (self.from, self.to) = (0, 0);
        self.unwanted = true;
    }

    /// The end is to be passed on, now; true once.
    fn is_to_be_ended(&mut self) -> bool {
        let now = self.ended && self.is_empty() && !self.told;
        self.told |= now;
        now
    }
}

/// Both directions.
struct Relay<'a, S: Duplex> {
    client: &'a S,
    port: &'a TcpStream,
    up: Way,
    down: Way,
    /// The client is gone; until when its last bytes may be on their way.
    gone: Option<Instant>,
}

impl<S: Duplex> Relay<'_, S> {
    fn run(&mut self) -> Result<(), Error> {
        while !self.is_over() {
            self.wait()?;
            self.carry();
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        let up_is_over = self.up.told || self.up.unwanted;
        match self.gone {
            Some(until) => up_is_over || Instant::now() >= until,
            None => up_is_over && self.down.told,
        }
    }

    fn carry(&mut self) {
        if self.up.fill(self.client.as_fd()).is_err() {
            self.lose();
        }
        if self.up.drain(self.port.as_fd()).is_err() {
            self.up.unwanted = true;
        }
        if self.up.is_to_be_ended() {
            // Fails only where the port has ended too.
            drop(self.port.shutdown(Shutdown::Write));
            if !self.down.told {
                self.look();
            }
        }
        if self.down.fill(self.port.as_fd()).is_err() {
            // A reset: it takes nothing any more either.
            self.up.throw_away();
        }
        if self.down.drain(self.client.as_fd()).is_err() {
            self.lose();
        }
        if self.down.is_to_be_ended() {
            self.client.close_writing();
        }
    }

    /// Whether the client is gone, and has not only ended its direction: then it takes not even nothing.
    fn look(&mut self) {
        let sent = send(self.client, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        if !matches!(sent, Ok(_) | Err(Errno::AGAIN | Errno::INTR)) {
            self.lose();
        }
    }

    fn lose(&mut self) {
        self.down.throw_away();
        self.gone = self.gone.or(Some(Instant::now() + LINGER));
    }

    /// Waits until something can be carried. Whoever is not waited for is not looked at either: its end would be told again and again.
    fn wait(&mut self) -> Result<(), Error> {
        let client = interest(self.up.wants_input(), self.down.wants_output());
        let port = interest(self.down.wants_input() && self.gone.is_none(), self.up.wants_output());
        // A client that sends nothing more, or is not read, is waited for only to be gone. One that has also had all can only say that it
        // has ended, again and again.
        let watched = self.gone.is_none() && !self.up.wants_input() && !self.down.told;
        let mut fds = Vec::with_capacity(2);
        if !client.is_empty() || watched {
            fds.push(PollFd::new(self.client, client));
        }
        if !port.is_empty() {
            fds.push(PollFd::new(self.port, port));
        }
        let limit = match self.gone {
            Some(until) => Some(until.saturating_duration_since(Instant::now())),
            None => watched.then_some(LOOK),
        };
        let limit = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Error::system("waiting for a port's bytes")(error)),
        }
        let ends = PollFlags::HUP | PollFlags::ERR;
        let ended = fds.first().is_some_and(|fd| fd.revents().intersects(ends));
        let silent = fds.iter().all(|fd| fd.revents().is_empty());
        if watched && ended {
            self.lose();
        } else if watched && silent {
            self.look();
        }
        Ok(())
    }
}

fn interest(input: bool, output: bool) -> PollFlags {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, input);
    flags.set(PollFlags::OUT, output);
    flags
}
