//! The agent of a sandbox that has no machine.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::thread;

use agent::{Reaper, RootMode, Server, ServerConfig};
use agent_api::message::{Reply, Request, kind};
use agent_api::{RequestFailure, RequestFailureKind};
use wire::{FrameReader, FrameWriter};

/// What a sandbox's agent is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Agent {
    /// One that connects to ports of this host's own loopback address, and does nothing else.
    #[default]
    Ports,
    /// The real one, in this process: commands run on this host, as this user.
    Real,
}

impl Agent {
    /// Starts one; the client's end, which has shaken hands, and the version that is spoken there.
    pub fn start(self) -> (OwnedFd, u16) {
        let (mut near, far) = UnixStream::pair().unwrap();
        match self {
            Self::Ports => {
                thread::spawn(move || serve(far));
                (near.into(), agent_api::PROTOCOL.version)
            }
            Self::Real => {
                real().serve_in_thread(far);
                let version = wire::offer(&mut near, agent_api::PROTOCOL, None).unwrap();
                (near.into(), version)
            }
        }
    }
}

fn real() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let config = ServerConfig {
            token: None,
            root: RootMode::AsIs,
            cgroups: None,
            power: None,
            log: None,
            clones: None,
            started_ns: agent::boottime_ns(),
        };
        Server::new(config, Reaper::start().unwrap())
    })
}

fn serve(stream: UnixStream) {
    let writer = FrameWriter::new(stream.try_clone().unwrap());
    let mut reader = FrameReader::new(stream);
    let send = |reply: &Reply| writer.send(kind::CONTROL, 0, &serde_json::to_vec(reply).unwrap());
    while let Ok(Some(frame)) = reader.read() {
        let reply = match serde_json::from_slice(frame.payload) {
            Ok(Request::Connect { port }) => match TcpStream::connect(("127.0.0.1", port)) {
                Ok(there) => {
                    if send(&Reply::Done).is_ok() {
                        join(reader.into_inner(), there);
                    }
                    return;
                }
                Err(error) => Reply::RequestFailed(RequestFailure {
                    kind: RequestFailureKind::NotFound,
                    message: error.to_string(),
                }),
            },
            _ => Reply::Refused {
                message: "this agent only connects to ports".into(),
            },
        };
        if send(&reply).is_err() {
            return;
        }
    }
}

fn join(here: UnixStream, there: TcpStream) {
    let (mut here_in, mut there_out) = (here.try_clone().unwrap(), there.try_clone().unwrap());
    let up = thread::spawn(move || {
        pump(&mut here_in, &mut there_out);
        drop(there_out.shutdown(Shutdown::Write));
    });
    let (mut there_in, mut here_out) = (there, here);
    pump(&mut there_in, &mut here_out);
    drop(here_out.shutdown(Shutdown::Write));
    up.join().unwrap();
}

fn pump(from: &mut impl Read, to: &mut impl Write) {
    let mut buffer = [0; 4096];
    while let Ok(got) = from.read(&mut buffer) {
        if got == 0 || to.write_all(&buffer[..got]).is_err() {
            return;
        }
    }
}
