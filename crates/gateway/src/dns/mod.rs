//! A name server for one domain, over UDP and TCP: one message at a time by UDP, as an answer takes no longer than to read the question, and
//! a bounded number of connections. Knows no name.

mod zone;

use std::io;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, watch};

pub use zone::{NoName, Zone};

/// The largest question; all that are of use here are smaller.
const MAX_QUESTION: usize = 4096;

/// Connections at once; more wait to be accepted.
const CONNECTIONS: usize = 64;

/// How long a connection may be quiet.
const QUIET: Duration = Duration::from_secs(10);

/// Between two attempts when the host has no means left.
const PAUSE: Duration = Duration::from_millis(100);

/// How many ports are tried where any will do: one may be taken for UDP alone.
const TRIES: usize = 16;

/// Where questions come.
pub struct Dns {
    udp: UdpSocket,
    tcp: TcpListener,
    zone: Arc<Zone>,
}

impl Dns {
    /// Listens at this address by both protocols.
    ///
    /// # Errors
    /// It is taken, or may not be used.
    pub fn bind(address: SocketAddr, zone: Zone) -> io::Result<Self> {
        let mut tries = match address.port() {
            0 => TRIES,
            _ => 1,
        };
        loop {
            tries -= 1;
            match sockets(address) {
                Ok((udp, tcp)) => {
                    let zone = Arc::new(zone);
                    return Ok(Self { udp, tcp, zone });
                }
                Err(error) if tries == 0 => return Err(error),
                Err(_) => (),
            }
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The host does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.udp.local_addr()
    }

    /// Answers until `stop` says so.
    pub async fn serve(self, mut stop: watch::Receiver<bool>) {
        let Self { udp, tcp, zone } = self;
        tokio::select! {
            () = by_udp(&udp, &zone) => (),
            () = by_tcp(&tcp, &zone) => (),
            _ = stop.wait_for(|stop| *stop) => (),
        }
    }
}

fn sockets(address: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
    let tcp = std::net::TcpListener::bind(address)?;
    let udp = StdUdpSocket::bind(tcp.local_addr()?)?;
    tcp.set_nonblocking(true)?;
    udp.set_nonblocking(true)?;
    Ok((UdpSocket::from_std(udp)?, TcpListener::from_std(tcp)?))
}

async fn by_udp(socket: &UdpSocket, zone: &Zone) {
    let mut question = vec![0; MAX_QUESTION];
    loop {
        let (length, client) = match socket.recv_from(&mut question).await {
            Ok(received) => received,
            Err(error) => {
                log::warn!("no question can be received now: {error}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let Some(answer) = question.get(..length).and_then(|question| zone.answer(question)) else {
            continue;
        };
        if let Err(error) = socket.send_to(&answer, client).await {
            log::debug!("{client} has no answer: {error}");
        }
    }
}

async fn by_tcp(listener: &TcpListener, zone: &Arc<Zone>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // Nobody closes it.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, client)) => {
                let zone = Arc::clone(zone);
                tokio::spawn(async move {
                    if let Err(error) = converse(stream, &zone).await {
                        log::debug!("the connection of {client} ended: {error}");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                log::warn!("nobody can ask now: {error}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Questions and answers with their length before them (RFC 1035, 4.2.2), until the client has no more or is quiet for too long.
async fn converse(mut stream: TcpStream, zone: &Zone) -> io::Result<()> {
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let mut question = Vec::new();
    loop {
        let turn = async {
            let length = usize::from(stream.read_u16().await?);
            if length > MAX_QUESTION {
                return Err(io::Error::other(format!("a question of {length} bytes is too long")));
            }
            question.resize(length, 0);
            stream.read_exact(&mut question).await?;
            let answer = zone
                .answer(&question)
                .ok_or_else(|| io::Error::other("what came is no question"))?;
            let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
            stream.write_all(&[&length.to_be_bytes()[..], &answer].concat()).await
        };
        match tokio::time::timeout(QUIET, turn).await.map_err(late)? {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            done => done?,
        }
    }
}
