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
use host::jail;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Signal, set_parent_process_death_signal};
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
    /// What `basalt run` gives a sandbox; the files are its root image and its writable disk.
    Sandbox(PathBuf, PathBuf),
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
    child: Process,
    client: Option<VmmClient>,
    lines: Receiver<Line>,
    heard: String,
    _kept: Vec<OwnedFd>,
}

/// A VMM's process.
enum Process {
    Plain(Child),
    /// It ends with its control socket, too.
    Jailed(jail::Child),
}

impl Process {
    fn id(&self) -> u32 {
        match self {
            Self::Plain(child) => child.id(),
            Self::Jailed(child) => child.pid,
        }
    }

    fn end(&mut self) {
        // Fails when it has ended by itself, which is fine.
        match self {
            Self::Plain(child) => {
                drop(child.kill());
                drop(child.wait());
            }
            Self::Jailed(child) => {
                drop(child.kill());
                drop(child.wait());
            }
        }
    }
}

/// How a VMM is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Walls {
    /// As a node does it: `host::jail`, and `--jail`.
    Jail,
    /// The same for a guest that gets a function of the host's, for which its memory is locked.
    JailThatLocks,
    /// As any program.
    None,
}

/// CLOCK_MONOTONIC in nanoseconds; what the trace events have too.
pub(crate) use observe::span::now_ns;

/// QEMU's arguments: its smallest machine, without what Basalt does not have either.
pub(crate) fn qemu_arguments(setup: &Setup, machine: &str, more: &[&str]) -> Vec<String> {
    qemu_arguments_with(setup, machine, "128", more)
}

/// The same with another size of memory, as `-m` takes it.
pub(crate) fn qemu_arguments_with(setup: &Setup, machine: &str, memory: &str, more: &[&str]) -> Vec<String> {
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let mut arguments: Vec<String> = [
        "-M",
        machine,
        "-enable-kvm",
        "-cpu",
        "host",
        "-m",
        memory,
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
            child: Process::Plain(child),
            client: None,
            lines: listen(reader),
            heard: String::new(),
            _kept: Vec::new(),
        })
    }

    /// Starts Basalt's VMM and has it make and start the guest; that is part of the time.
    pub(crate) fn basalt(vmm: &Path, setup: &Setup, devices: &Devices, walls: &Walls) -> Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        let mut parts = Parts::default();
        let (config, kept) = parts.config(setup, devices, writer.into())?;
        let mut machine = Self::without_guest(vmm, walls, reader)?;
        machine._kept = kept;
        let client = machine.client()?;
        client.create(config, &parts.fds())?;
        client.start()?;
        Ok(machine)
    }

    /// Starts Basalt's VMM alone; `reader` is the other end of the console that its guest will have.
    pub(crate) fn without_guest(vmm: &Path, walls: &Walls, reader: PipeReader) -> Result<Self> {
        let (near, far) = PacketSocket::pair()?;
        let far = OwnedFd::from(far);
        let started_ns = now_ns();
        let child = match walls {
            Walls::Jail => Process::Jailed(start_jailed(vmm, &far, false)?),
            Walls::JailThatLocks => Process::Jailed(start_jailed(vmm, &far, true)?),
            Walls::None => Process::Plain(start_plain(vmm, &far)?),
        };
        drop(far);
        Ok(Self {
            started_ns,
            child,
            client: Some(VmmClient::new(near)),
            lines: listen(reader),
            heard: String::new(),
            _kept: Vec::new(),
        })
    }

    /// The control socket of Basalt's VMM.
    pub(crate) fn client(&mut self) -> Result<&mut VmmClient> {
        self.client.as_mut().context("QEMU has no such control socket")
    }

    /// Fails when the VMM has ended, where it is a plain child.
    pub(crate) fn check_alive(&mut self) -> Result<()> {
        match &mut self.child {
            Process::Plain(child) => check_alive(child),
            Process::Jailed(_) => Ok(()),
        }
    }

    /// The VMM's process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the VMM has reached and when; QEMU tells nothing.
    pub(crate) fn marks(&mut self) -> Result<Vec<vmm_api::Mark>> {
        match &mut self.client {
            Some(client) => Ok(client.info()?.marks),
            None => Ok(Vec::new()),
        }
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
        let found = self.wait_within(text, PATIENCE)?;
        found.with_context(|| {
            format!(
                "`{text}` did not come within {PATIENCE:?}; the guest wrote:\n{}",
                self.heard
            )
        })
    }

    /// The same where it may come later; nothing if it has not come by then.
    pub(crate) fn wait_within(&mut self, text: &str, limit: Duration) -> Result<Option<Line>> {
        let deadline = Instant::now() + limit;
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) if line.text.contains(text) => return Ok(Some(line)),
                Ok(line) => self.heard.push_str(&format!("{}\n", line.text)),
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended without `{text}`; it wrote:\n{}", self.heard)
                }
            }
        }
    }
}

/// Fails when a process has ended that should not have.
pub(crate) fn check_alive(child: &mut Child) -> Result<()> {
    match child.try_wait()? {
        None => Ok(()),
        Some(status) => bail!("it has ended ({status}); what it said of that is on standard error"),
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.child.end();
    }
}

fn start_plain(vmm: &Path, control: &OwnedFd) -> Result<Child> {
    // Only this one child is started while it is inheritable.
    fcntl_setfd(control, FdFlags::empty())?;
    let mut command = Command::new(vmm);
    command.arg("--control-fd").arg(control.as_raw_fd().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    end_with_us(&mut command);
    command
        .spawn()
        .with_context(|| format!("{} cannot be started", vmm.display()))
}

/// As `node` does, but for the cgroup, which costs the process nothing.
fn start_jailed(vmm: &Path, control: &OwnedFd, locks_memory: bool) -> Result<jail::Child> {
    let program = File::open(vmm).with_context(|| format!("{} cannot be opened", vmm.display()))?;
    let log = File::options().write(true).open("/dev/null")?;
    let words = [
        vmm.to_string_lossy().into_owned(),
        "--control-fd".to_owned(),
        jail::number_of(0).to_string(),
        "--jail".to_owned(),
    ];
    let arguments = words
        .iter()
        .map(|word| jail::argument(word))
        .collect::<Result<Vec<_>, _>>()?;
    let pool = jail::Pool::default();
    let identity = pool.identity(pool.count - 1).context("there is no user for the VMM")?;
    Ok(jail::spawn(&jail::Launch {
        program: program.as_fd(),
        arguments: &arguments,
        environment: &[],
        descriptors: &[control.as_fd()],
        log: log.as_fd(),
        cgroup: None,
        isolation: jail::Isolation::Full(identity),
        open_files: None,
        locks_memory,
    })?)
}

/// What the host's kernel calls a program that `start_jailed` starts: it is executed from the descriptor behind those
/// that it is given (`fs/exec.c`, `alloc_bprm`).
pub(crate) fn jailed_name() -> String {
    format!("/dev/fd/{}", jail::number_of(1))
}

/// Has a VMM killed when this program ends in whatever way; a guest left behind would disturb what is measured next.
#[allow(unsafe_code, reason = "something is to be done between fork and exec")]
pub(crate) fn end_with_us(command: &mut Command) {
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

/// A configuration's descriptors, which travel with it.
#[derive(Default)]
pub(crate) struct Parts(Vec<OwnedFd>);

impl Parts {
    /// In the order in which they were added.
    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }

    pub(crate) fn add(&mut self, fd: impl Into<OwnedFd>) -> Result<FdRef> {
        let position = u32::try_from(self.0.len())?;
        self.0.push(fd.into());
        Ok(FdRef(position))
    }

    fn open(&mut self, path: &Path) -> Result<FdRef> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        self.add(file)
    }

    /// The configuration, and what must stay open on this side.
    pub(crate) fn config(
        &mut self,
        setup: &Setup,
        devices: &Devices,
        console: OwnedFd,
    ) -> Result<(VmConfig, Vec<OwnedFd>)> {
        let kernel = self.open(&setup.kernel)?;
        let kvm = File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .context("cannot open /dev/kvm")?;
        let kvm = Some(self.add(kvm)?);
        let initramfs = Some(self.open(&setup.initramfs)?);
        let second = console.try_clone()?;
        let serial = Some(self.add(console)?);
        let (specs, kept) = match devices {
            Devices::Serial => (Vec::new(), Vec::new()),
            Devices::Disk(path, engine) => (vec![self.disk("disk", path, *engine, true)?], Vec::new()),
            Devices::Sandbox(root, writable) => self.sandbox(root, writable, second)?,
            Devices::Network => (vec![self.network()?], Vec::new()),
        };
        let config = VmConfig {
            cpus: 1,
            memory: MEMORY,
            cpu: vmm_api::CpuModel::Host,
            kernel,
            initramfs,
            cmdline: setup.cmdline.clone(),
            kvm,
            reservation: None,
            memory_mode: vmm_api::MemoryMode::default(),
            busy_poll_us: None,
            serial,
            serial_keep: None,
            acpi_hotplug: false,
            devices: specs,
        };
        Ok((config, kept))
    }

    /// As `node` makes it, in the same order.
    fn sandbox(&mut self, root: &Path, writable: &Path, console: OwnedFd) -> Result<(Vec<DeviceSpec>, Vec<OwnedFd>)> {
        let (near, far) = PacketSocket::pair()?;
        let vsock = VsockConfig {
            cid: 3,
            listener: None,
            acceptor: Some(self.add(OwnedFd::from(far))?),
            sinks: Vec::new(),
        };
        let output = Some(self.add(console)?);
        let specs = vec![
            self.disk("root", root, BlockEngine::Auto, true)?,
            self.disk("writable", writable, BlockEngine::Auto, false)?,
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
            self.network()?,
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

    fn disk(&mut self, id: &str, path: &Path, engine: BlockEngine, read_only: bool) -> Result<DeviceSpec> {
        let file = File::options().read(true).write(!read_only).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let config = BlockConfig {
            file: self.add(file)?,
            read_only,
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
