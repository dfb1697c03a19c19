//! A virtual function of the host's network device that a sandbox has: TCP between it and the host in both directions, compared, by the
//! function's own DMA and interrupts; it is taken away under load, and given again.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::bare::{in_lab, run};
use super::device_attach::expect_state;
use super::interface;
use super::nvme_disk::tell;
use crate::basalt::expect_code;
use crate::daemon::{Daemon, wait_for};
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-network",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// An Intel 82576: what the lab has (lab/ctl).
const VENDOR_DEVICE: (&str, &str) = ("0x8086", "0x10c9");

/// Addresses for documentation (RFC 5737): the host's end and the guest's.
const HOST: &str = "192.0.2.1";
const GUEST: &str = "192.0.2.2";

/// Bytes each way.
const SIZE: usize = 24 << 20;

/// In the guest, behind [`interface::UP`]: connects to the host, and sends back all that it gets.
const ECHO: &str = "
peer, port = sys.argv[3], int(sys.argv[4])
with socket.create_connection((peer, port), 60, (own, 0)) as wire:
    count = 0
    while piece := wire.recv(1 << 16):
        wire.sendall(piece)
        count += len(piece)
print(count)
";

fn echo_script() -> String {
    [interface::UP, ECHO].concat()
}

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    for module in ["igb", "vfio-pci"] {
        run("modprobe", &[module])?;
    }
    let port = Port::find()?;
    let daemon = Daemon::with_templates(host)?;
    let mut log = kernel_log()?;
    daemon.ok(&["device", "vfs", &port.address, "2"])?;
    port.up()?;
    let function = virtual_function(&daemon, &port.address)?;
    daemon.ok(&["device", "bind", &function])?;
    let words = ["run", "-d", "--name", "net", "--memory", "256m", "--device", &function];
    daemon.ok(&[&words[..], &[&host.digest, "--", "sleep", "10000"]].concat())?;
    let name = interface(&daemon)?;
    let before = port.received()?;
    echo(&daemon, &name)?;
    let passed = port.received()? - before;
    ensure!(passed >= SIZE as u64, "{passed} bytes came through the host's device");
    taken_under_load(&daemon, &function, &name)?;
    daemon.ok(&["device", "attach", "net", &function])?;
    let name = interface(&daemon)?;
    echo(&daemon, &name)?;
    daemon.ok(&["rm", "--force", "net"])?;
    expect_state(&daemon, &function, "ready")?;
    daemon.ok(&["device", "unbind", &function])?;
    daemon.ok(&["device", "vfs", &port.address, "0"])?;
    port.down()?;
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

/// The host's end: the physical function.
struct Port {
    address: String,
    interface: String,
}

impl Port {
    fn find() -> Result<Self> {
        let mut found = None;
        wait_for("the host's driver of its network device", || {
            for entry in fs::read_dir("/sys/class/net")? {
                let device = entry?.path();
                let told = |name: &str| fs::read_to_string(device.join("device").join(name)).unwrap_or_default();
                if (told("vendor").trim(), told("device").trim()) == VENDOR_DEVICE {
                    let address = fs::canonicalize(device.join("device"))?;
                    found = Some(Self {
                        address: last(&address)?,
                        interface: last(&device)?,
                    });
                }
            }
            Ok(found.is_some())
        })?;
        found.context(
            "the lab has no network device with virtual functions: start it with `basalt-lab up --kernel newer`",
        )
    }

    fn up(&self) -> Result<()> {
        let own = format!("{HOST}/24");
        run("ip", &["address", "replace", &own, "dev", &self.interface])?;
        run("ip", &["link", "set", &self.interface, "up"])?;
        let carrier = format!("/sys/class/net/{}/carrier", self.interface);
        wait_for("the network device's link", || {
            Ok(fs::read_to_string(&carrier).is_ok_and(|text| text.trim() == "1"))
        })
    }

    /// As it was found: nobody's.
    fn down(&self) -> Result<()> {
        run("ip", &["link", "set", &self.interface, "down"])?;
        run("modprobe", &["-r", "igb"])?;
        Ok(())
    }

    /// Bytes that came in so far.
    fn received(&self) -> Result<u64> {
        let path = format!("/sys/class/net/{}/statistics/rx_bytes", self.interface);
        Ok(fs::read_to_string(path)?.trim().parse()?)
    }
}

fn last(path: &Path) -> Result<String> {
    Ok(path
        .file_name()
        .context("a path without a name")?
        .to_string_lossy()
        .into_owned())
}

/// The first virtual function that the physical one has made.
fn virtual_function(daemon: &Daemon<'_>, physical: &str) -> Result<String> {
    let all: Vec<Value> = serde_json::from_str(&daemon.ok(&["--json", "device", "ls"])?)?;
    let found = all.iter().find(|device| device["physical"] == physical);
    let found = found.with_context(|| format!("`device ls` shows no virtual function of {physical}: {all:?}"))?;
    Ok(found["address"].as_str().context("an address")?.to_owned())
}

/// What the guest's driver has called it.
fn interface(daemon: &Daemon<'_>) -> Result<String> {
    let mut name = None;
    wait_for("the guest's driver", || {
        let listed = daemon.ok(&["exec", "net", "ls", "/sys/class/net"])?;
        name = listed
            .split_whitespace()
            .find(|name| *name == "eth1")
            .map(str::to_owned);
        Ok(name.is_some())
    })?;
    name.context("a name")
}

fn load(daemon: &Daemon<'_>, name: &str, port: u16) -> Result<std::process::Child> {
    let port = port.to_string();
    daemon.start(&["exec", "net", "python3", "-c", &echo_script(), name, GUEST, HOST, &port])
}

/// A stream of bytes that does not repeat soon.
struct Noise(u64);

impl Noise {
    fn fill(&mut self, buffer: &mut [u8]) {
        for byte in buffer {
            // Numerical Recipes' linear congruence, of which the high bits are good.
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *byte = self.0.to_be_bytes()[0];
        }
    }
}

/// All that the guest is sent comes back, as it was.
fn echo(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    let listener = TcpListener::bind((HOST, 0))?;
    let mut guest = load(daemon, name, listener.local_addr()?.port())?;
    let wire = accept(&listener)?;
    let began = Instant::now();
    let mut sends = wire.try_clone()?;
    let sender = thread::spawn(move || -> std::io::Result<()> {
        let (mut noise, mut piece) = (Noise(1), vec![0; 1 << 16]);
        for _ in 0..SIZE / piece.len() {
            noise.fill(&mut piece);
            sends.write_all(&piece)?;
        }
        sends.shutdown(Shutdown::Write)
    });
    let (mut noise, mut wanted, mut came) = (Noise(1), vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut wire = wire;
    for at in 0..SIZE / wanted.len() {
        noise.fill(&mut wanted);
        wire.read_exact(&mut came)?;
        ensure!(came == wanted, "what came back differs in the piece {at}");
    }
    let took = began.elapsed();
    sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
    ensure!(guest.wait()?.success(), "the guest's end failed");
    tell(&format!("{} MiB there and back in {took:?}", SIZE >> 20));
    Ok(())
}

fn accept(listener: &TcpListener) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let mut found = None;
    wait_for("the guest to connect", || match listener.accept() {
        Ok((wire, _)) => {
            found = Some(wire);
            Ok(true)
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error.into()),
    })?;
    let wire = found.context("a connection")?;
    wire.set_nonblocking(false)?;
    wire.set_read_timeout(Some(Duration::from_secs(60)))?;
    wire.set_write_timeout(Some(Duration::from_secs(60)))?;
    Ok(wire)
}

/// It goes while packets are on their way; the guest lives on.
fn taken_under_load(daemon: &Daemon<'_>, function: &str, name: &str) -> Result<()> {
    let listener = TcpListener::bind((HOST, 0))?;
    let mut guest = load(daemon, name, listener.local_addr()?.port())?;
    let mut wire = accept(&listener)?;
    let mut reads = wire.try_clone()?;
    let reader = thread::spawn(move || {
        let mut piece = vec![0; 1 << 16];
        let mut count = 0_u64;
        while let Ok(got @ 1..) = reads.read(&mut piece) {
            count += got as u64;
        }
        count
    });
    let mut sends = wire.try_clone()?;
    let sender = thread::spawn(move || {
        let piece = vec![7; 1 << 16];
        while sends.write_all(&piece).is_ok() {}
    });
    thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    daemon.ok(&["device", "detach", "net", function])?;
    tell(&format!("taken from a guest that sends within {:?}", began.elapsed()));
    expect_state(daemon, function, "ready")?;
    wire.shutdown(Shutdown::Both)?;
    wire.flush()?;
    let came = reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
    sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?;
    ensure!(came > 0, "nothing was on its way");
    expect_code(
        &daemon.run(&["exec", "net", "test", "-e", &format!("/sys/class/net/{name}")])?,
        1,
    )?;
    // Its connection has no way any more, which it would notice after minutes.
    guest.kill()?;
    guest.wait()?;
    Ok(())
}
