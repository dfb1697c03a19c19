//! A VM for cases that need more, or less, than a sandbox has: any devices, any kernel, pause and resume.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent_api::log::LOG_PORT;
use agent_api::{
    Collected, Connection, DiskName, ExecRequest, GuestNetwork, OsText, Prepare, RootDisk, Upload, VSOCK_PORT,
};
use anyhow::{Context, Result, bail, ensure};
use base::ByteSize;
use rustix::event::{PollFd, PollFlags};
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits, ConsoleConfig, DeviceConfig, RngConfig, VsockConfig};
use vmm_api::{
    CpuModel, DeviceSpec, Event, ExitReason, FdRef, MemoryMode, MetricSample, Paging, RestoreConfig, SnapshotFiles,
    VmConfig,
};
use wire::packet::PacketSocket;

use crate::{AGAIN, Host, stall};

pub(crate) use crate::vmm::{Vmm, kvm};

/// How long an emulated guest may take to boot.
pub(crate) const BOOT: Duration = Duration::from_secs(90);

/// How long a VMM has to tell what became of its guest, once nobody needs that any more.
const ANSWER: Duration = Duration::from_secs(2);

/// Where the guest half of a case lies in the guest.
pub(crate) const GUEST_HALF: &str = "/cases";

/// The serial number of the disk with the image.
const ROOT_SERIAL: &str = "root";

/// What a VM is to be made of, step by step.
pub(crate) struct Builder<'a> {
    host: &'a Host,
    config: VmConfig,
    fds: Vec<OwnedFd>,
    /// Its memory stays where it is, for whoever else reaches it.
    pinned: bool,
}

impl<'a> Builder<'a> {
    /// Our kernel and agent, one vCPU, 128 MiB, vsock, an image and a console that is kept in the case's logs.
    pub(crate) fn new(host: &'a Host) -> Result<Self> {
        // Each character of an early console is two exits, and a kernel that tells everything writes twenty thousand.
        let level = match std::env::var_os(AGAIN) {
            Some(_) => log::LevelFilter::Debug,
            None => log::LevelFilter::Warn,
        };
        let config = VmConfig {
            cpus: 1,
            memory: ByteSize::mib(128),
            cpu: CpuModel::Host,
            kernel: FdRef(0),
            initramfs: None,
            cmdline: node::command_line(level),
            kvm: None,
            reservation: None,
            memory_mode: MemoryMode::default(),
            busy_poll_us: None,
            serial: None,
            serial_keep: None,
            acpi_hotplug: false,
            devices: Vec::new(),
        };
        let mut builder = Self {
            host,
            config,
            fds: Vec::new(),
            pinned: false,
        };
        builder.config.kernel = builder.fd(File::open(host.asset("vmlinux")).context("the guest kernel")?);
        let initramfs = builder.fd(File::open(host.asset("initramfs.cpio")).context("the initramfs")?);
        builder.config.initramfs = Some(initramfs);
        let console = File::create(host.logs.join("console"))?;
        builder.config.serial = Some(builder.fd(console.try_clone()?));
        let output = Some(builder.fd(console));
        builder.device(
            "console",
            &ConsoleConfig {
                input: None,
                output,
                keep: None,
            },
        )?;
        builder.device("rng", &RngConfig {})?;
        let file = builder.fd(host.image()?);
        let serial = ROOT_SERIAL.to_owned();
        let root = BlockConfig {
            file,
            read_only: true,
            queues: 1,
            serial,
            engine: BlockEngine::Auto,
            limits: BlockLimits::default(),
        };
        builder.device("root", &root)?;
        Ok(builder)
    }

    pub(crate) fn cpus(mut self, cpus: u32) -> Self {
        self.config.cpus = cpus;
        self
    }

    /// Its kernel is told by ACPI of functions that come and leave.
    pub(crate) fn acpi_hotplug(mut self) -> Self {
        self.config.acpi_hotplug = true;
        self
    }

    pub(crate) fn cpu(mut self, model: CpuModel) -> Self {
        self.config.cpu = model;
        self
    }

    pub(crate) fn memory(mut self, memory: ByteSize) -> Self {
        self.config.memory = memory;
        self
    }

    /// On CPUs that Linux has given up.
    pub(crate) fn reservation(mut self, reservation: OwnedFd) -> Result<Self> {
        self.config.reservation = Some(self.fd(reservation));
        // A guest's kernel asks it for more once a minute. One that moves keeps the devices that it has.
        if self.config.cpu == CpuModel::Host {
            self.config.devices.retain(|device| device.id != "rng");
        }
        Ok(self)
    }

    /// With memory that a device of the host's reaches.
    pub(crate) fn pinned(self) -> Self {
        Self { pinned: true, ..self }
    }

    /// In memory that nobody translates; it has to be given a reservation too.
    pub(crate) fn identity(mut self) -> Self {
        self.config.memory_mode = MemoryMode::Identity;
        self
    }

    /// Its devices look for its next request for so long; it has to be given a reservation too.
    pub(crate) fn busy_poll(mut self, busy_poll: Duration) -> Result<Self> {
        self.config.busy_poll_us = Some(u32::try_from(busy_poll.as_micros())?);
        Ok(self)
    }

    pub(crate) fn kernel(mut self, path: &Path) -> Result<Self> {
        let fd = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let index = usize::try_from(self.config.kernel.0)?;
        *self.fds.get_mut(index).context("a VM without a kernel")? = fd.into();
        Ok(self)
    }

    pub(crate) fn initramfs(mut self, file: File) -> Result<Self> {
        let initramfs = self.config.initramfs.context("a VM without an initramfs")?;
        *self
            .fds
            .get_mut(usize::try_from(initramfs.0)?)
            .context("a VM without an initramfs")? = file.into();
        Ok(self)
    }

    pub(crate) fn cmdline(mut self, words: &str) -> Self {
        self.config.cmdline = words.to_owned();
        self
    }

    /// A descriptor that travels with the configuration.
    pub(crate) fn fd(&mut self, fd: impl Into<OwnedFd>) -> FdRef {
        self.fds.push(fd.into());
        FdRef(u32::try_from(self.fds.len() - 1).unwrap_or(u32::MAX))
    }

    pub(crate) fn device<C: DeviceConfig>(&mut self, id: &str, config: &C) -> Result<()> {
        self.config.devices.push(DeviceSpec::new(id, config)?);
        Ok(())
    }

    /// Builds and starts the VM, with a vsock device whose connections come to us.
    pub(crate) fn start(self) -> Result<Vm> {
        self.start_listening(None)
    }

    /// The same, with a socket at which connections to the guest are asked for.
    pub(crate) fn start_listening(mut self, listener: Option<OwnedFd>) -> Result<Vm> {
        let acceptor = self.vsock(listener)?;
        let mut vmm = self.vmm()?;
        self.give_kvm()?;
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(AsFd::as_fd).collect();
        vmm.client.create(self.config, &fds)?;
        drop(self.fds);
        vmm.client.start()?;
        Ok(Vm {
            vmm,
            acceptor,
            console: self.host.logs.join("console"),
        })
    }

    /// KVM travels with the configuration, where no reservation does.
    fn give_kvm(&mut self) -> Result<()> {
        if self.config.reservation.is_none() {
            self.config.kvm = Some(self.fd(kvm()?));
        }
        Ok(())
    }

    /// A process for it, which may pin memory if it has to.
    fn vmm(&self) -> Result<Vmm> {
        let log = self.host.logs.join("vmm");
        match self.pinned || self.config.reservation.is_some() {
            true => Vmm::spawn_pinned(&self.host.binaries, &log),
            false => Vmm::spawn(&self.host.binaries, &log),
        }
    }

    /// The last device; gives what the guest's connections come to.
    fn vsock(&mut self, listener: Option<OwnedFd>) -> Result<PacketSocket> {
        let (acceptor, theirs) = PacketSocket::pair()?;
        let acceptor_fd = Some(self.fd(OwnedFd::from(theirs)));
        let listener = listener.map(|fd| self.fd(fd));
        let config = VsockConfig {
            cid: 3,
            listener,
            acceptor: acceptor_fd,
            sinks: Vec::new(),
        };
        self.device("vsock", &config)?;
        Ok(acceptor)
    }

    /// Restores the VM from a snapshot of one with these devices, in place of booting it. It is paused then.
    pub(crate) fn restore(self, listener: OwnedFd, state: File, memory: Vec<File>) -> Result<Vm> {
        self.restore_ahead(listener, state, memory, &[])
    }

    /// The same by a VMM that has read the files `ahead`, if there are any; they need not be the same.
    pub(crate) fn restore_ahead(
        mut self,
        listener: OwnedFd,
        state: File,
        memory: Vec<File>,
        ahead: &[File],
    ) -> Result<Vm> {
        let acceptor = self.vsock(Some(listener))?;
        // The state travels where the kernel does otherwise, and nothing where the initramfs does.
        let initramfs = self.config.initramfs.context("a VM without an initramfs")?;
        let mut memory = memory.into_iter();
        let lowest = memory.next().context("a snapshot without memory")?;
        for (place, file) in [(self.config.kernel, state), (initramfs, lowest)] {
            *self
                .fds
                .get_mut(usize::try_from(place.0)?)
                .context("a VM without a kernel")? = file.into();
        }
        let others: Vec<FdRef> = memory.map(|file| self.fd(file)).collect();
        let files = SnapshotFiles {
            state: self.config.kernel,
            memory: [initramfs].into_iter().chain(others).collect(),
        };
        let mut vmm = match ahead {
            [] => self.vmm()?,
            ahead => Vmm::spawn_ahead(&self.host.binaries, &self.host.logs.join("vmm"), ahead)?,
        };
        if ahead.is_empty() {
            self.give_kvm()?;
        }
        let config = RestoreConfig {
            files,
            kvm: self.config.kvm,
            reservation: self.config.reservation,
            serial: self.config.serial,
            serial_keep: None,
            devices: self.config.devices,
            write_set: Vec::new(),
            skip_notification: false,
            paging: Paging::Mapped,
            anonymous_holes: false,
        };
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(AsFd::as_fd).collect();
        vmm.client.restore(config, &fds)?;
        Ok(Vm {
            vmm,
            acceptor,
            console: self.host.logs.join("console"),
        })
    }
}

/// A started VM.
pub(crate) struct Vm {
    pub(crate) vmm: Vmm,
    acceptor: PacketSocket,
    console: PathBuf,
}

impl Vm {
    /// Waits until the guest dials `port` on the host. The agent's log, which it offers to every host, is not taken.
    pub(crate) fn accept(&self, port: u32, limit: Duration) -> Result<UnixStream> {
        loop {
            if !readable(&self.acceptor, limit)? {
                bail!(
                    "the guest did not dial port {port} within {limit:?}; its VMM:\n{}its console:\n{}",
                    stall::evidence(self.vmm.pid()),
                    self.console()?
                );
            }
            let (bytes, fds) = self.acceptor.receive()?;
            let dialled = bytes.as_slice().try_into().map(u32::from_le_bytes)?;
            if dialled == LOG_PORT {
                continue;
            }
            ensure!(dialled == port, "the guest dialled port {dialled}, not {port}");
            let fd = fds
                .into_iter()
                .next()
                .context("the connection came without a descriptor")?;
            return Ok(UnixStream::from(fd));
        }
    }

    /// The agent's connection, its root prepared.
    pub(crate) fn agent(&self) -> Result<Connection<UnixStream>> {
        self.agent_with(None)
    }

    /// The same, in a guest that has a network.
    pub(crate) fn agent_with(&self, network: Option<&GuestNetwork>) -> Result<Connection<UnixStream>> {
        let stream = self.accept(VSOCK_PORT, BOOT)?;
        let mut agent = Connection::new(stream, None)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        agent.prepare(&Prepare {
            root: RootDisk {
                disk: DiskName::Serial(ROOT_SERIAL.into()),
                fs: "erofs".into(),
            },
            writable: None,
            overlay_bytes: None,
            hostname: "case".into(),
            machine_id: None,
            clock_ns: u64::try_from(now.as_nanos())?,
            // Cases need no secrets.
            entropy: vec![7; 64],
            network: network.cloned(),
            shared_directories: Vec::new(),
            tmpfs: Vec::new(),
            pids_max: None,
            accelerator: None,
        })?;
        Ok(agent)
    }

    /// What the guest has written to its console so far.
    pub(crate) fn console(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&std::fs::read(&self.console)?).into_owned())
    }

    /// Waits until `text` is on the console.
    pub(crate) fn wait_console(&self, text: &str, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !self.console()?.contains(text) {
            ensure!(
                Instant::now() < deadline,
                "`{text}` is not on the console:\n{}\nwhat its VMM's threads are doing:\n{}",
                self.console()?,
                stall::evidence(self.vmm.pid())
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Waits for the VM's end and for the process's.
    pub(crate) fn end(&mut self, limit: Duration) -> Result<ExitReason> {
        ensure!(
            readable(&self.vmm.client, limit)?,
            "the VM did not end within {limit:?}"
        );
        let reason = match self.vmm.client.wait_event()? {
            Event::Ended(reason) => reason,
            other => bail!("the VM does not end, but says {other:?}"),
        };
        ensure!(self.vmm.wait(Duration::from_secs(10))?, "the VMM ended with a failure");
        Ok(reason)
    }
}

impl Drop for Vm {
    /// Tells of an end that no case has waited for, or of a VM that runs what became of its guest's connections: it explains whatever the
    /// case failed with.
    fn drop(&mut self) {
        if !readable(&self.vmm.client, Duration::ZERO).is_ok_and(|readable| readable) {
            match self.vmm.client.metrics_by(Instant::now() + ANSWER) {
                Ok(samples) => eprintln!("a VM was left running: {}", vsock(&samples)),
                Err(error) => eprintln!("a VM was left whose VMM tells nothing: {error}"),
            }
        }
        if let Ok(status) = self.vmm.wait_status(Duration::ZERO)
            && let Some(signal) = status.terminating_signal()
        {
            eprintln!(
                "a VMM was ended by signal {signal}; of SIGSYS (31) the host's `dmesg` says which call was not allowed"
            );
        }
        // The VMM may have come to tell of it only now, or before its answer.
        let has_told = |vmm: &Vmm| vmm.client.has_events() || readable(&vmm.client, Duration::ZERO).is_ok_and(|it| it);
        if has_told(&self.vmm)
            && let Ok(Event::Ended(reason)) = self.vmm.client.wait_event()
        {
            eprintln!("{}{reason}", stall::BY_ITSELF);
        }
    }
}

/// Counters of a guest's vsock device that are not zero.
fn vsock(samples: &[MetricSample]) -> String {
    let counted = samples
        .iter()
        .filter(|sample| sample.name.starts_with("vsock_") && sample.value != 0);
    let words: Vec<_> = counted
        .map(|sample| {
            let labels: Vec<_> = sample.labels.iter().map(|(_, value)| value.as_str()).collect();
            format!("{} ({}) {}", sample.name, labels.join(" "), sample.value)
        })
        .collect();
    words.join(", ")
}

pub(crate) fn readable(fd: &impl AsFd, limit: Duration) -> Result<bool> {
    let limit = rustix::time::Timespec {
        tv_sec: limit.as_secs().try_into()?,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    Ok(rustix::event::poll(&mut fds, Some(&limit))? > 0)
}

/// Copies this program into the guest, so that [`guest_half`] can run it.
pub(crate) fn install(agent: &mut Connection<UnixStream>) -> Result<()> {
    let mut own = File::open("/proc/self/exe")?;
    let upload = Upload {
        path: GUEST_HALF.into(),
        mode: 0o755,
        size: own.metadata()?.len(),
    };
    agent.upload(&upload, &mut own)?;
    Ok(())
}

/// Runs the guest half of a case and gives what it wrote; fails if it failed.
pub(crate) fn guest_half(agent: &mut Connection<UnixStream>, name: &str, arguments: &[&str]) -> Result<String> {
    let argv = [GUEST_HALF, "guest", name]
        .iter()
        .chain(arguments)
        .map(|&word| word.into())
        .collect();
    let Collected { status, stdout, stderr } = agent
        .exec(&ExecRequest {
            argv,
            ..ExecRequest::default()
        })?
        .collect()?;
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    if status.exit_code() != 0 {
        bail!(
            "the guest half ended with {status:?}:\n{stdout}{}",
            String::from_utf8_lossy(&stderr)
        );
    }
    Ok(stdout)
}

/// Starts the guest half of a case and leaves it to itself: it goes on when the connection ends.
pub(crate) fn detach_guest_half(agent: &mut Connection<UnixStream>, name: &str) -> Result<()> {
    let argv = [GUEST_HALF, "guest", name].map(OsText::from).to_vec();
    agent.exec_detached(&ExecRequest {
        argv,
        ..ExecRequest::default()
    })?;
    Ok(())
}

/// Reads exactly what was written, both ways, and checks it.
pub(crate) fn echo(stream: &mut UnixStream, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes)?;
    let mut back = vec![0; bytes.len()];
    stream.read_exact(&mut back)?;
    ensure!(back == bytes, "{} bytes came back changed", bytes.len());
    Ok(())
}

/// A guest half that runs while the host half goes on.
pub(crate) struct GuestHalf {
    chunks: Receiver<Vec<u8>>,
    collected: String,
    worker: JoinHandle<Result<u8>>,
}

/// Starts the guest half of a case; a thread of its own reads what it writes.
pub(crate) fn start_guest_half(mut agent: Connection<UnixStream>, name: &'static str) -> GuestHalf {
    let (sender, chunks) = std::sync::mpsc::channel();
    let worker = std::thread::spawn(move || {
        let argv = [GUEST_HALF, "guest", name].map(OsText::from).to_vec();
        let mut running = agent.exec(&ExecRequest {
            argv,
            ..ExecRequest::default()
        })?;
        loop {
            match running.output.next()? {
                agent_api::Event::Stdout(bytes) | agent_api::Event::Stderr(bytes) => {
                    // Nobody listens any more when the host half has seen enough.
                    drop(sender.send(bytes.to_vec()));
                }
                agent_api::Event::Closed(_) => (),
                agent_api::Event::Exited(status) => return Ok(status.exit_code()),
            }
        }
    });
    GuestHalf {
        chunks,
        collected: String::new(),
        worker,
    }
}

impl GuestHalf {
    /// Everything it has written so far.
    pub(crate) fn collected(&self) -> &str {
        &self.collected
    }

    /// Takes in what it writes within `limit`.
    pub(crate) fn drain(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            match self
                .chunks
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(bytes) => self.collected.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => bail!("the guest half has ended; it wrote:\n{}", self.collected),
            }
        }
    }

    /// Waits until it has written `text`.
    pub(crate) fn wait_for(&mut self, text: &str) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        while !self.collected.contains(text) {
            ensure!(
                Instant::now() < deadline,
                "`{text}` did not come; this did:\n{}",
                self.collected
            );
            let step = Duration::from_millis(20);
            self.drain(step)?;
        }
        Ok(())
    }

    /// Waits for its end; fails if it failed.
    pub(crate) fn finish(mut self) -> Result<()> {
        while let Ok(bytes) = self.chunks.recv_timeout(BOOT) {
            self.collected.push_str(&String::from_utf8_lossy(&bytes));
        }
        let code = self
            .worker
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that reads panicked"))??;
        ensure!(
            code == 0,
            "the guest half ended with {code}; it wrote:\n{}",
            self.collected
        );
        Ok(())
    }
}
