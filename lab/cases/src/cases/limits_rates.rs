//! Rates of disks and of the network: bytes over the time that they took, against what was asked for and against none. At the end the
//! network's nft tables are deleted, and come back.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::limits::{number, start, usage};
use crate::basalt::expect_code;
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const DISK: Case = Case {
    name: "limits-disk",
    limit: Duration::from_secs(300),
    host: disk,
    guest: None,
};

pub(crate) const NETWORK: Case = Case {
    name: "limits-network",
    limit: Duration::from_secs(300),
    host: network,
    guest: None,
};

/// How much more than the rate may come through: the burst is a tenth of a second, a request or packet may leave a debt, and
/// clocks are read at a distance.
const TOLERANCE: f64 = 1.15;

/// Does something and says how many bytes a second went by, as stats at `path` count them; and how many in all.
fn rate(daemon: &Daemon<'_>, name: &str, path: &str, work: impl FnOnce() -> Result<()>) -> Result<(f64, u64)> {
    let before = number(&usage(daemon, name)?, path)?;
    let begun = Instant::now();
    work()?;
    let elapsed = begun.elapsed().as_secs_f64();
    let bytes = number(&usage(daemon, name)?, path)? - before;
    let bytes_f = f64::from(u32::try_from(bytes).context("too many bytes")?);
    eprintln!("{name} {path}: {bytes} bytes in {elapsed:.2} s");
    Ok((bytes_f / elapsed, bytes))
}

fn disk(host: &Host) -> Result<()> {
    const WRITE: f64 = 262_144.0;
    const READ: f64 = 1_048_576.0;
    let daemon = Daemon::with_templates(host)?;
    let flags = ["--disk", "64m", "--disk-write-rate", "256k", "--disk-read-rate", "1m"];
    start(host, &daemon, "slow", &flags, &["sleep", "10000"])?;
    start(host, &daemon, "free", &["--disk", "64m"], &["sleep", "10000"])?;
    let run = |name: &str, script: &str| daemon.ok(&["exec", name, "sh", "-c", script]).map(drop);
    let write = "dd if=/dev/zero of=/file bs=64k count=12 conv=fsync 2>/dev/null";
    let read = "for i in 1 2 3; do dd if=/file of=/dev/null bs=64k iflag=direct 2>/dev/null; done";
    let mut rates = Vec::new();
    for name in ["slow", "free"] {
        let (written, bytes) = rate(&daemon, name, "/block/bytes_out", || run(name, write))?;
        ensure!(bytes >= 512 << 10, "{name} wrote {bytes} bytes only");
        let (read, bytes) = rate(&daemon, name, "/block/bytes_in", || run(name, read))?;
        ensure!(bytes >= 2 << 20, "{name} read {bytes} bytes only");
        rates.push((written, read));
    }
    let [(slow_written, slow_read), (free_written, free_read)] = rates.as_slice() else {
        anyhow::bail!("two sandboxes have {} rates", rates.len());
    };
    ensure!(
        *slow_written <= WRITE * TOLERANCE,
        "{slow_written} bytes a second were written"
    );
    ensure!(*slow_read <= READ * TOLERANCE, "{slow_read} bytes a second were read");
    // Otherwise this says nothing.
    ensure!(
        *free_written > WRITE * 1.5,
        "without a limit {free_written} bytes a second were written"
    );
    ensure!(
        *free_read > READ * 1.5,
        "without a limit {free_read} bytes a second were read"
    );
    let throttled = usage(&daemon, "slow")?["vmm"]["block_throttled_total{device=writable}"].as_u64();
    ensure!(throttled > Some(0), "the disk's own count of waits is {throttled:?}");
    daemon.end()
}

/// Takes what comes, says how much it was, and sends as much back.
const ECHO: &str = "
import socket
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(('0.0.0.0', 7300))
server.listen()
while True:
    client, _ = server.accept()
    count = 0
    while True:
        data = client.recv(65536)
        if not data:
            break
        count += len(data)
    client.sendall(b'.')
    client.sendall(bytes(count))
    client.close()
";

fn network(host: &Host) -> Result<()> {
    const IN: f64 = 262_144.0;
    const OUT: f64 = 131_072.0;
    const COUNT: usize = 384 << 10;
    let daemon = Daemon::with_templates(host)?;
    let flags = ["-p", "7301:7300", "--net-in-rate", "256k", "--net-out-rate", "128k"];
    start(host, &daemon, "slow", &flags, &["python3", "-c", ECHO])?;
    start(host, &daemon, "free", &["-p", "7302:7300"], &["python3", "-c", ECHO])?;
    let mut rates = Vec::new();
    for (name, port) in [("slow", 7301), ("free", 7302)] {
        let mut stream = connect(port)?;
        let (received, bytes) = rate(&daemon, name, "/network/bytes_in", || {
            stream.write_all(&vec![7; COUNT])?;
            stream.shutdown(Shutdown::Write)?;
            // One byte says that all of it has come.
            Ok(stream.read_exact(&mut [0])?)
        })?;
        ensure!(bytes >= COUNT as u64, "{name} got {bytes} bytes only");
        let (sent, bytes) = rate(&daemon, name, "/network/bytes_out", || {
            let mut back = Vec::new();
            stream.read_to_end(&mut back)?;
            ensure!(back.len() == COUNT, "{} bytes came back", back.len());
            Ok(())
        })?;
        ensure!(bytes >= COUNT as u64 / 2, "{name} sent {bytes} bytes only");
        rates.push((received, sent));
    }
    let [(slow_in, slow_out), (free_in, free_out)] = rates.as_slice() else {
        anyhow::bail!("two sandboxes have {} rates", rates.len());
    };
    ensure!(*slow_in <= IN * TOLERANCE, "{slow_in} bytes a second came in");
    ensure!(*slow_out <= OUT * TOLERANCE, "{slow_out} bytes a second went out");
    ensure!(*free_in > IN * 1.5, "without a limit {free_in} bytes a second came in");
    ensure!(
        *free_out > OUT * 1.5,
        "without a limit {free_out} bytes a second went out"
    );
    gets_its_tables_back(&daemon, 7302)?;
    daemon.end()
}

/// The nft tables are deleted as another program of the host might do: the port answers no more, and the running daemon puts them back.
fn gets_its_tables_back(daemon: &Daemon<'_>, port: u16) -> Result<()> {
    let nft = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("nft").args(arguments).output()?;
        expect_code(&output, 0).with_context(|| format!("nft {}", arguments.join(" ")))?;
        Ok(String::from_utf8(output.stdout)?)
    };
    let listed = nft(&["list", "tables"])?;
    // As its cgroup is called. That of another daemon would come back while another case looks what is left.
    let name = daemon.cgroup().context("the daemon has no cgroup")?;
    let is_ours = |table: &&str| table.split_whitespace().last() == name.rsplit('/').next();
    let ours: Vec<_> = listed.lines().filter(is_ours).collect();
    ensure!(!ours.is_empty(), "the daemon has none of these tables: {listed}");
    for table in ours {
        nft(&[&["delete"], table.split_whitespace().collect::<Vec<_>>().as_slice()].concat())?;
    }
    let refused = TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_secs(2));
    ensure!(refused.is_err(), "the port answers without its table");
    let mut stream = connect(port)?;
    stream.write_all(b"again")?;
    stream.shutdown(Shutdown::Write)?;
    let mut back = Vec::new();
    stream.read_to_end(&mut back)?;
    ensure!(back.len() == 6, "{} bytes came back", back.len());
    Ok(())
}

/// A connection that the guest has accepted: its server may need a moment.
fn connect(port: u16) -> Result<TcpStream> {
    let mut found = None;
    wait_for("the guest's server", || {
        found = TcpStream::connect(("127.0.0.1", port)).ok();
        Ok(found.is_some())
    })?;
    let stream = found.context("no connection")?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}
