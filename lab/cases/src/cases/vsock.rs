//! Sockets between guest and host: both directions, many at once, large transfers, half-closed ends, refusals.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::vm::{self, Builder};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "vsock",
    limit: Duration::from_secs(300),
    host,
    guest: Some(guest),
};

/// The guest half's own port, and the host's.
const ECHO: u32 = 5000;
const BULK: u32 = 6000;
const BULK_BYTES: usize = 8 << 20;

fn host(host: &Host) -> Result<()> {
    let address = SocketAddr::from_abstract_name(format!("basalt-case-vsock-{}", std::process::id()))?;
    let listener = UnixListener::bind_addr(&address)?;
    let machine = Builder::new(host)?.start_listening(Some(listener.into()))?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    let mut half = vm::start_guest_half(agent, CASE.name);
    half.wait_for("listening")?;

    let refused = connect(&address, 4999);
    ensure!(refused.is_err(), "a port where nobody listens was connected to");

    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.push(connect(&address, ECHO)?);
    }
    for (index, stream) in streams.iter_mut().enumerate() {
        vm::echo(stream, format!("stream {index}").as_bytes())?;
    }
    vm::echo(&mut streams[0], &pattern(60_000))?;
    drop(streams);

    let mut bulk = machine.accept(BULK, Duration::from_secs(60))?;
    let mut received = Vec::new();
    bulk.read_to_end(&mut received)?;
    ensure!(
        received == pattern(BULK_BYTES),
        "{} bytes arrived, changed or cut short",
        received.len()
    );
    bulk.write_all(b"thanks")?;
    bulk.shutdown(Shutdown::Both)?;
    half.finish()
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| u8::try_from(index % 253).unwrap_or(0))
        .collect()
}

/// The VMM's own words for a connection from the host (docs/devices/vsock.md).
pub(super) fn connect(address: &SocketAddr, port: u32) -> Result<UnixStream> {
    let mut stream = UnixStream::connect_addr(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while byte != *b"\n" {
        if stream.read(&mut byte)? == 0 {
            bail!("port {port} was refused");
        }
        answer.push(byte[0]);
    }
    ensure!(
        answer.starts_with(b"OK "),
        "the answer is {:?}",
        String::from_utf8_lossy(&answer)
    );
    Ok(stream)
}

fn guest(_: &[String]) -> Result<()> {
    let listener = socket(libc::VMADDR_CID_ANY, ECHO, libc::bind)?;
    rustix::net::listen(&listener, 32)?;
    println_now("listening")?;
    let echo = std::thread::spawn(move || -> Result<()> {
        let mut workers = Vec::new();
        for _ in 0..20 {
            let stream = UnixStream::from(rustix::net::accept_with(&listener, rustix::net::SocketFlags::CLOEXEC)?);
            workers.push(std::thread::spawn(move || echo_all(stream)));
        }
        for worker in workers {
            worker
                .join()
                .map_err(|_| anyhow::anyhow!("an echo thread panicked"))??;
        }
        Ok(())
    });
    echo.join().map_err(|_| anyhow::anyhow!("the echo thread panicked"))??;
    let mut bulk = UnixStream::from(socket(libc::VMADDR_CID_HOST, BULK, libc::connect)?);
    bulk.write_all(&pattern(BULK_BYTES))?;
    bulk.shutdown(Shutdown::Write)?;
    let mut thanks = Vec::new();
    bulk.read_to_end(&mut thanks)
        .context("reading on the half-closed connection")?;
    ensure!(thanks == b"thanks", "the host said {thanks:?}");
    Ok(())
}

fn echo_all(mut stream: UnixStream) -> Result<()> {
    let mut buffer = [0; 16 << 10];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        stream.write_all(buffer.get(..length).context("more than there is room for")?)?;
    }
}

fn println_now(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

pub(super) type AddressCall = unsafe extern "C" fn(libc::c_int, *const libc::sockaddr, libc::socklen_t) -> libc::c_int;

/// A vsock stream socket on which `call` (bind or connect) has been done.
#[allow(unsafe_code, reason = "the standard library and rustix have no vsock addresses")]
pub(super) fn socket(cid: u32, port: u32, call: AddressCall) -> Result<OwnedFd> {
    // SAFETY: plain numbers; the result is checked.
    let number = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    ensure!(number >= 0, "socket: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    // SAFETY: a zeroed sockaddr_vm is a valid one.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK)?;
    address.svm_cid = cid;
    address.svm_port = port;
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>())?;
    // SAFETY: the pointer is to a whole sockaddr_vm of the length that is given.
    let result = unsafe { call(number, (&raw const address).cast(), length) };
    ensure!(result == 0, "port {port} of {cid}: {}", std::io::Error::last_os_error());
    Ok(fd)
}
