//! The network figures: one TCP stream each way, and requests and responses, between a guest and its host over a TAP. Both
//! halves: the host's serves, the guest's takes the time. Which VMM is between them it does not know.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netlink::Links;

use crate::guest::{END, RESULT, say};
use crate::machine::now_ns;

/// The word on the guest's command line by which its init knows what to measure.
pub(crate) const WORD: &str = "network";

/// The TAP that every contender uses in turn.
pub(crate) const TAP: &str = "bench0";
/// The guest's Ethernet address; the first byte says that it is local.
pub(crate) const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x17];

const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const PREFIX: u8 = 24;
const PORT: u16 = 7000;

const CHUNK: usize = 128 << 10;
const MIB: u64 = 1 << 20;

/// What is done over one connection; its first byte says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The guest sends.
    ToHost = b'h',
    /// The host sends.
    ToGuest = b'g',
    /// One byte there, one byte back.
    Responses = b'r',
}

/// One figure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    kind: Kind,
    /// MiB, or requests.
    count: u64,
}

impl Workload {
    pub(crate) fn unit(&self) -> &'static str {
        match self.kind {
            Kind::Responses => "requests/s",
            Kind::ToHost | Kind::ToGuest => "MiB/s",
        }
    }
}

/// All of them, in the order in which they are done.
pub(crate) const WORKLOADS: [Workload; 3] = [
    Workload {
        name: "tcp-stream-to-host",
        kind: Kind::ToHost,
        count: 96,
    },
    Workload {
        name: "tcp-stream-to-guest",
        kind: Kind::ToGuest,
        count: 96,
    },
    Workload {
        name: "tcp-request-response",
        kind: Kind::Responses,
        count: 1000,
    },
];

/// The host's side: a TAP with an address, and a server. Goes with this.
pub(crate) struct HostSide {
    _tap: Tap,
}

/// The TAP, which is removed with this.
pub(crate) struct Tap;

impl Tap {
    pub(crate) fn new() -> Result<Self> {
        // One that a killed run has left is as good, but may have another owner.
        remove_tap()?;
        ip(&format!("tuntap add dev {TAP} mode tap vnet_hdr"))?;
        let tap = Self;
        ip(&format!("link set {TAP} up"))?;
        Ok(tap)
    }
}

impl HostSide {
    pub(crate) fn new() -> Result<Self> {
        let side = Self { _tap: Tap::new()? };
        ip(&format!("address add {HOST}/{PREFIX} dev {TAP}"))?;
        let listener = TcpListener::bind((HOST, PORT))?;
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    if let Err(error) = serve(stream) {
                        eprintln!("network: the host's side of a connection: {error:#}");
                    }
                });
            }
        });
        Ok(side)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        if let Err(error) = remove_tap() {
            eprintln!("network: {error:#}");
        }
    }
}

fn remove_tap() -> Result<()> {
    let links = Links::open()?;
    if let Some(link) = links.get(TAP)? {
        links.remove(link.index)?;
    }
    Ok(())
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {arguments}: {error}");
    Ok(())
}

/// Opens the TAP as QEMU does.
#[allow(unsafe_code, reason = "a TAP is opened by ioctl")]
pub(crate) fn open_tap() -> Result<OwnedFd> {
    // linux/if_tun.h; libc gives it a type that differs between C libraries.
    const TUNSETIFF: libc::Ioctl = 0x4004_54ca_u32 as libc::Ioctl;
    let tap = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .context("cannot open /dev/net/tun")?;
    // SAFETY: 1. `ifreq` is plain data for which all zeros is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(TAP.bytes()) {
        *place = byte.cast_signed() as libc::c_char;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags)?;
    // SAFETY: 1. the request is an `ifreq` with a terminated name and flags set, which lives for the call.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETIFF, &raw mut request) };
    ensure!(result == 0, "cannot open {TAP}: {}", std::io::Error::last_os_error());
    Ok(tap.into())
}

/// The host's half of one connection: what to do, how much of it, then that.
fn serve(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut header = [0; 9];
    stream.read_exact(&mut header)?;
    let [kind, count @ ..] = header;
    let count = u64::from_le_bytes(count);
    let mut buffer = vec![7; CHUNK];
    if kind == Kind::ToHost as u8 {
        receive(&mut stream, &mut buffer, count)?;
        // The time ends when everything is here, not when it was sent.
        stream.write_all(&[1])?;
    } else if kind == Kind::ToGuest as u8 {
        send(&mut stream, &buffer, count)?;
    } else {
        for _ in 0..count {
            stream.read_exact(&mut header[..1])?;
            stream.write_all(&header[..1])?;
        }
    }
    // Ends when the other side has closed.
    while stream.read(&mut buffer)? > 0 {}
    Ok(())
}

fn send(stream: &mut TcpStream, buffer: &[u8], count: u64) -> Result<()> {
    let mut left = count;
    while left > 0 {
        let part = buffer.len().min(usize::try_from(left)?);
        stream.write_all(&buffer[..part])?;
        left -= part as u64;
    }
    Ok(())
}

fn receive(stream: &mut TcpStream, buffer: &mut [u8], count: u64) -> Result<()> {
    let mut left = count;
    while left > 0 {
        let part = buffer.len().min(usize::try_from(left)?);
        let length = stream.read(&mut buffer[..part])?;
        ensure!(length > 0, "the stream ended {left} bytes early");
        left -= length as u64;
    }
    Ok(())
}

/// The guest's half: sets its interface up, then everything in turn.
pub(crate) fn guest() -> Result<()> {
    let links = Links::open()?;
    let index = links.index("eth0").context("the guest has no interface eth0")?;
    links.up(index, None, None)?;
    links.address(index, GUEST.into(), PREFIX)?;
    // Whatever is slow the first time.
    for workload in WORKLOADS {
        perform(&workload, workload.count / 32)?;
    }
    for workload in WORKLOADS {
        let elapsed = perform(&workload, workload.count)?;
        say(&format!("{RESULT} {} {} {elapsed}", workload.name, workload.count));
    }
    say(END);
    Ok(())
}

/// The nanoseconds that it took.
fn perform(workload: &Workload, count: u64) -> Result<u64> {
    perform_at((HOST, PORT).into(), workload.kind, count)
}

fn perform_at(address: SocketAddr, kind: Kind, count: u64) -> Result<u64> {
    let mut stream = connect(address)?;
    stream.set_nodelay(true)?;
    let bytes = if kind == Kind::Responses { count } else { count * MIB };
    let mut buffer = vec![7; CHUNK];
    let mut header = vec![kind as u8];
    header.extend(bytes.to_le_bytes());
    stream.write_all(&header)?;
    let start = now_ns();
    match kind {
        Kind::ToHost => {
            send(&mut stream, &buffer, bytes)?;
            stream.read_exact(&mut buffer[..1])?;
        }
        Kind::ToGuest => receive(&mut stream, &mut buffer, bytes)?,
        Kind::Responses => {
            for _ in 0..count {
                stream.write_all(&[1])?;
                stream.read_exact(&mut buffer[..1])?;
            }
        }
    }
    let elapsed = now_ns() - start;
    stream.shutdown(Shutdown::Both)?;
    Ok(elapsed)
}

/// The link may take a moment.
fn connect(address: SocketAddr) -> Result<TcpStream> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= end => return Err(error).context("the host does not answer"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_halves_understand_each_other() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            for _ in 0..3 {
                serve(listener.accept().unwrap().0).unwrap();
            }
        });
        for kind in [Kind::ToHost, Kind::ToGuest, Kind::Responses] {
            assert!(perform_at(address, kind, 3).unwrap() > 0, "{kind:?}");
        }
        server.join().unwrap();
    }
}
