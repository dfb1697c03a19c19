//! A guest under either peer, behind one type: started, heard, ended. Knows both peers' ways to start, and that
//! nothing but these differs between them.

use std::fs::File;
use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base::ByteSize;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use vmm_api::devices::{
    BlockConfig, BlockEngine, BlockLimits, ConsoleConfig, DeviceConfig, MacAddress, NetConfig, NetLimits, RngConfig,
    VsockConfig,
};
use vmm_api::{DeviceSpec, FdRef, VmConfig, VmmClient};
use wire::packet::PacketSocket;

use crate::net;

/// Memory of every guest.
pub(crate) const MEMORY: ByteSize = ByteSize::mib(128);

/// How long a line of an emulated guest may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The peer.
pub(crate) const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// What differs from a guest with nothing but a serial port.
#[derive(Clone, Debug)]
pub(crate) enum Devices {
    /// Nothing but the serial port.
    Serial,
    /// What `basalt run` gives a sandbox; the file is its root image.
    Sandbox(PathBuf),
    /// A disk, and how it is reached.
    Disk(PathBuf, BlockEngine),
    /// The benchmark's TAP.
    Network,
}

/// A guest to be.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) cmdline: String,
}

/// A line that the guest has written.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// When its end was read, CLOCK_MONOTONIC.
    pub(crate) time_ns: u64,
    pub(crate) text: String,
}

/// A started guest; it ends when this is dropped.
pub(crate) struct Machine {
    /// Just before the VMM was started, CLOCK_MONOTONIC.
    pub(crate) started_ns: u64,
    child: Child,
    client: Option<VmmClient>,
    lines: Receiver<Line>,
    heard: String,
    _kept: Vec<OwnedFd>,
}

/// CLOCK_MONOTONIC in nanoseconds; what the trace events have too.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// QEMU's arguments: its smallest machine, without what Basalt does not have either.
pub(crate) fn qemu_arguments(setup: &Setup, machine: &str, more: &[&str]) -> Vec<String> {
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let mut arguments: Vec<String> = [
        "-M",
        machine,
        "-enable-kvm",
        "-cpu",
        "host",
        "-m",
        "128",
        "-smp",
        "1",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-serial",
        "stdio",
        "-no-reboot",
        "-kernel",
    ]
    .map(str::to_owned)
    .to_vec();
    arguments.push(path(&setup.kernel));
    arguments.extend(["-initrd".to_owned(), path(&setup.initramfs)]);
    arguments.extend(["-append".to_owned(), setup.cmdline.clone()]);
    arguments.extend(more.iter().map(|&word| word.to_owned()));
    arguments
}

/// QEMU's machine without PCI.
pub(crate) const MICROVM: &str = "microvm,pit=off,pic=off,rtc=off,acpi=on,isa-serial=on";
/// QEMU's machine with it.
pub(crate) const MICROVM_PCI: &str = "microvm,pit=off,pic=off,rtc=off,acpi=on,isa-serial=on,pcie=on";

impl Machine {
    /// Starts QEMU.
    pub(crate) fn qemu(arguments: &[String]) -> Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        let mut command = Command::new(QEMU);
        command.args(arguments).stdin(Stdio::null()).stdout(writer);
        end_with_us(&mut command);
        let started_ns = now_ns();
        let child = command.spawn().with_context(|| format!("{QEMU} cannot be started"))?;
        drop(command);
        Ok(Self {
            started_ns,
            child,
            client: None,
            lines: listen(reader),
            heard: String::new(),
            _kept: Vec::new(),
        })
    }

    /// Starts Basalt's VMM and has it make and start the guest; that is part of the time.
    pub(crate) fn basalt(vmm: &Path, setup: &Setup, devices: &Devices) -> Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        let mut parts = Parts::default();
        let (config, acceptor) = parts.config(setup, devices, writer.into())?;
        let (near, far) = PacketSocket::pair()?;
        let far = OwnedFd::from(far);
        // Only this one child is started while it is inheritable.
        fcntl_setfd(&far, FdFlags::empty())?;
        let mut command = Command::new(vmm);
        command.arg("--control-fd").arg(far.as_raw_fd().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        end_with_us(&mut command);
        let started_ns = now_ns();
        let child = command
            .spawn()
            .with_context(|| format!("{} cannot be started", vmm.display()))?;
        drop(far);
        let mut machine = Self {
            started_ns,
            child,
            client: None,
            lines: listen(reader),
            heard: String::new(),
            _kept: acceptor,
        };
        let mut client = VmmClient::new(near);
        let fds: Vec<BorrowedFd<'_>> = parts.0.iter().map(AsFd::as_fd).collect();
        client.create(config, &fds)?;
        client.start()?;
        machine.client = Some(client);
        Ok(machine)
    }

    /// The VMM's process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The VMM's counters; QEMU has none.
    pub(crate) fn metrics(&mut self) -> Result<Vec<vmm_api::MetricSample>> {
        match &mut self.client {
            Some(client) => Ok(client.metrics()?),
            None => Ok(Vec::new()),
        }
    }

    /// The next line that holds `text`.
    pub(crate) fn wait_for(&mut self, text: &str) -> Result<Line> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) if line.text.contains(text) => return Ok(line),
                Ok(line) => self.heard.push_str(&format!("{}\n", line.text)),
                Err(RecvTimeoutError::Timeout) => {
                    bail!(
                        "`{text}` did not come within {PATIENCE:?}; the guest wrote:\n{}",
                        self.heard
                    )
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended without `{text}`; it wrote:\n{}", self.heard)
                }
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Fails when it has ended by itself, which is fine.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Has a VMM killed when this program ends in whatever way; a guest left behind would disturb what is measured next.
#[allow(unsafe_code, reason = "something is to be done between fork and exec")]
fn end_with_us(command: &mut Command) {
    let with_us = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
    // SAFETY: the closure makes one system call (prctl(2), PR_SET_PDEATHSIG), touches no memory and takes no lock.
    unsafe { command.pre_exec(with_us) };
}

/// Reads what a guest writes and notes when each line was complete.
fn listen(mut reader: PipeReader) -> Receiver<Line> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        let mut pending = Vec::new();
        while let Ok(count) = reader.read(&mut buffer) {
            let time_ns = now_ns();
            if count == 0 {
                return;
            }
            pending.extend_from_slice(&buffer[..count]);
            while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send(Line { time_ns, text }).is_err() {
                    return;
                }
            }
        }
    });
    receiver
}

/// The descriptors that travel with a configuration.
#[derive(Default)]
struct Parts(Vec<OwnedFd>);

impl Parts {
    fn add(&mut self, fd: impl Into<OwnedFd>) -> Result<FdRef> {
        let position = u32::try_from(self.0.len())?;
        self.0.push(fd.into());
        Ok(FdRef(position))
    }

    fn open(&mut self, path: &Path) -> Result<FdRef> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        self.add(file)
    }

    /// The configuration, and what must stay open on this side.
    fn config(&mut self, setup: &Setup, devices: &Devices, console: OwnedFd) -> Result<(VmConfig, Vec<OwnedFd>)> {
        let kernel = self.open(&setup.kernel)?;
        let initramfs = Some(self.open(&setup.initramfs)?);
        let second = console.try_clone()?;
        let serial = Some(self.add(console)?);
        let (specs, kept) = match devices {
            Devices::Serial => (Vec::new(), Vec::new()),
            Devices::Disk(path, engine) => (vec![self.disk("disk", path, *engine)?], Vec::new()),
            Devices::Sandbox(root) => self.sandbox(root, second)?,
            Devices::Network => (vec![self.network()?], Vec::new()),
        };
        let config = VmConfig {
            cpus: 1,
            memory: MEMORY,
            kernel,
            initramfs,
            cmdline: setup.cmdline.clone(),
            kvm: None,
            serial,
            serial_keep: None,
            devices: specs,
        };
        Ok((config, kept))
    }

    /// As `node` makes it, in the same order.
    fn sandbox(&mut self, root: &Path, console: OwnedFd) -> Result<(Vec<DeviceSpec>, Vec<OwnedFd>)> {
        let (near, far) = PacketSocket::pair()?;
        let vsock = VsockConfig {
            cid: 3,
            listener: None,
            acceptor: Some(self.add(OwnedFd::from(far))?),
            sinks: Vec::new(),
        };
        let output = Some(self.add(console)?);
        let specs = vec![
            self.disk("root", root, BlockEngine::Auto)?,
            spec("vsock", &vsock)?,
            spec("rng", &RngConfig {})?,
            spec(
                "console",
                &ConsoleConfig {
                    input: None,
                    output,
                    keep: None,
                },
            )?,
        ];
        Ok((specs, vec![OwnedFd::from(near)]))
    }

    fn network(&mut self) -> Result<DeviceSpec> {
        let config = NetConfig {
            taps: vec![self.add(net::open_tap()?)?],
            mac: MacAddress(net::MAC),
            mtu: 1500,
            limits: NetLimits::default(),
        };
        spec("net", &config)
    }

    fn disk(&mut self, id: &str, path: &Path, engine: BlockEngine) -> Result<DeviceSpec> {
        let config = BlockConfig {
            file: self.open(path)?,
            read_only: true,
            queues: 1,
            serial: id.to_owned(),
            engine,
            limits: BlockLimits::default(),
        };
        spec(id, &config)
    }
}

fn spec<C: DeviceConfig>(id: &str, config: &C) -> Result<DeviceSpec> {
    Ok(DeviceSpec::new(id, config)?)
}
