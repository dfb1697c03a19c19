//! The VMM's own socket: requests in the wrong state, wrong configurations, wrong descriptors; each refused in words,
//! the VMM alive afterwards; a VMM with a named socket outlives its driver, and is not started over a stale one.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base::ByteSize;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmm_api::{
    ClientError, CpuModel, DeviceSpec, ErrorKind, FdRef, Paging, RestoreConfig, SnapshotFiles, VmConfig, VmState,
    VmmClient,
};
use wire::packet::PacketSocket;

use crate::cases::foreign_kernel;
use crate::vm::{self, Builder, Vmm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "vmm-api",
    limit: Duration::from_secs(180),
    host,
    guest: None,
};

fn host(host: &Host) -> Result<()> {
    wrong_configurations(host)?;
    wrong_kernels(host)?;
    inherited_kvm(host)?;
    a_metric_counts(host)?;
    named_socket(host)
}

fn refusal(result: Result<(), ClientError>, kind: ErrorKind, words: &str) -> Result<()> {
    match result {
        Err(ClientError::Refused(error)) => {
            ensure!(error.kind == kind, "{:?} instead of {kind:?}: {error}", error.kind);
            ensure!(
                error.message.contains(words),
                "the message does not say `{words}`: {error}"
            );
            Ok(())
        }
        other => bail!("`{words}` was due, not {other:?}"),
    }
}

/// A configuration that works: descriptor 0 is a kernel, 1 is KVM.
fn good() -> VmConfig {
    VmConfig {
        cpus: 1,
        memory: ByteSize::mib(128),
        cpu: CpuModel::Host,
        kernel: FdRef(0),
        initramfs: None,
        cmdline: String::new(),
        kvm: Some(FdRef(1)),
        reservation: None,
        memory_mode: vmm_api::MemoryMode::default(),
        busy_poll_us: None,
        serial: None,
        serial_keep: None,
        acpi_hotplug: false,
        devices: Vec::new(),
    }
}

/// Configurations that do not, each with words of the sentence that says why.
fn wrong() -> [(VmConfig, &'static str); 6] {
    let device = |kind: &str, config| DeviceSpec {
        id: kind.to_owned(),
        kind: kind.to_owned(),
        config,
    };
    let floppy = device("floppy", serde_json::json!({}));
    let no_file = serde_json::json!({"file": 7, "read_only": true, "queues": 1, "serial": ""});
    let with = |change: &dyn Fn(&mut VmConfig)| {
        let mut config = good();
        change(&mut config);
        config
    };
    [
        (with(&|c| c.cpus = 0), "give 1 to 64"),
        (with(&|c| c.cpus = 1000), "1000 CPUs"),
        (with(&|c| c.memory = ByteSize::mib(1)), "at least 32 MiB"),
        (with(&|c| c.kernel = FdRef(3)), "file descriptor 3 did not come"),
        (
            with(&|c| c.devices = vec![floppy.clone()]),
            "there are balloon, block, console, fs, iommu, mem, net, pmem, rng, vfio-pci, vsock",
        ),
        (
            with(&|c| c.devices = vec![device("block", no_file.clone())]),
            "file descriptor 7",
        ),
    ]
}

fn wrong_configurations(host: &Host) -> Result<()> {
    let mut vmm = Vmm::spawn(&host.binaries, &host.logs.join("vmm-wrong"))?;
    ensure!(vmm.client.info()?.state == VmState::Empty, "a new VMM is not empty");
    let early = "needs a VM that is created; this one is empty";
    refusal(vmm.client.start(), ErrorKind::WrongState, early)?;
    let kernel = File::open(host.asset("vmlinux"))?;
    let kvm = vm::kvm()?;
    let fds = [kernel.as_fd(), kvm.as_fd()];
    for (config, words) in wrong() {
        refusal(vmm.client.create(config, &fds), ErrorKind::Invalid, words)?;
    }
    let twice = [kernel.as_fd(), kvm.as_fd(), kernel.as_fd()];
    refusal(
        vmm.client.create(good(), &twice),
        ErrorKind::Invalid,
        "nothing refers to",
    )?;
    let not_kvm = File::open("/dev/null")?;
    let created = vmm.client.create(good(), &[kernel.as_fd(), not_kvm.as_fd()]);
    refusal(created, ErrorKind::Host, "it is no KVM")?;
    // A jailed VMM has no path to it.
    let without = VmConfig { kvm: None, ..good() };
    let created = vmm.client.create(without, &[kernel.as_fd()]);
    refusal(created, ErrorKind::Invalid, "send it open")?;
    refusal(
        vmm.client.add_zeroed_memory(&[kernel.as_fd()]),
        ErrorKind::WrongState,
        "there is no VM",
    )?;
    // After all this a right one still works, once.
    vmm.client.create(good(), &fds)?;
    refusal(
        vmm.client.add_zeroed_memory(&[kernel.as_fd()]),
        ErrorKind::WrongState,
        "it has no memory that can be plugged",
    )?;
    ensure!(vmm.client.functions()?.zeroed_memory.is_none(), "it takes none");
    let no_servers = "make the VM with a `reservation`";
    refusal(vmm.client.freeze(1000).map(drop), ErrorKind::Host, no_servers)?;
    refusal(vmm.client.link(0, Some(kernel.as_fd())), ErrorKind::Host, no_servers)?;
    refusal(
        vmm.client.freeze(1).map(drop),
        ErrorKind::Invalid,
        "give 100 to 10000000",
    )?;
    refusal(vmm.client.link(4, None), ErrorKind::Invalid, "0 to 3")?;
    refusal(
        vmm.client.create(good(), &fds),
        ErrorKind::WrongState,
        "needs a VM that is empty",
    )?;
    refusal(vmm.client.resume(), ErrorKind::WrongState, "needs a VM that is paused")?;
    vmm.client.stop()?;
    ensure!(
        vmm.wait(Duration::from_secs(10))?,
        "the VMM did not end well after `stop`"
    );
    Ok(())
}

fn wrong_kernels(host: &Host) -> Result<()> {
    let whole = std::fs::read(host.asset("vmlinux"))?;
    let half = whole.get(..whole.len() / 2).context("an empty kernel")?;
    let broken: [(&str, &[u8]); 4] = [
        ("empty", b""),
        ("short", b"\x7fELF"),
        ("text", &[b'x'; 8192]),
        ("half", half),
    ];
    let kvm = vm::kvm()?;
    for (name, bytes) in broken {
        let path = host.scratch.join(name);
        std::fs::write(&path, bytes)?;
        let mut vmm = Vmm::spawn(&host.binaries, &host.logs.join("vmm-kernel"))?;
        let config = good();
        let file = File::open(&path)?;
        refusal(
            vmm.client.create(config, &[file.as_fd(), kvm.as_fd()]),
            ErrorKind::Boot,
            "the kernel cannot be",
        )
        .with_context(|| format!("the `{name}` kernel"))?;
    }
    // A whole one that would unpack itself to where this guest has no memory, and die without a word.
    let mut vmm = Vmm::spawn(&host.binaries, &host.logs.join("vmm-kernel"))?;
    let file = File::open(foreign_kernel::kernel()?)?;
    let config = VmConfig {
        memory: ByteSize::mib(32),
        ..good()
    };
    let created = vmm.client.create(config, &[file.as_fd(), kvm.as_fd()]);
    refusal(created, ErrorKind::Boot, "the kernel needs memory up to")
}

/// A VMM that inherits KVM makes a VM ahead, for a `restore`. That one is refused, or that it is no KVM at all, leaves a VMM that
/// can make another.
fn inherited_kvm(host: &Host) -> Result<()> {
    let log = host.logs.join("vmm-inherited");
    let kernel = File::open(host.asset("vmlinux"))?;
    let kvm = vm::kvm()?;
    let none = File::open("/dev/null")?;
    let path = host.scratch.join("no-snapshot");
    std::fs::write(&path, "no snapshot")?;
    let file = File::open(&path)?;
    let of_inherited = || VmConfig { kvm: None, ..good() };
    // Descriptor 0 is the state, 1 the memory, 2 is KVM where one is sent.
    let restore = |kvm| RestoreConfig {
        reservation: None,
        files: SnapshotFiles {
            state: FdRef(0),
            memory: vec![FdRef(1)],
        },
        kvm,
        serial: None,
        serial_keep: None,
        devices: Vec::new(),
        write_set: Vec::new(),
        skip_notification: false,
        paging: Paging::Mapped,
        anonymous_holes: false,
    };
    let ends = |mut vmm: Vmm| {
        vmm.client.stop()?;
        ensure!(
            vmm.wait(Duration::from_secs(10))?,
            "the VMM did not end well after `stop`"
        );
        Ok(())
    };

    // No KVM: it waits all the same, says so of whatever needs one, and takes a better one.
    let mut vmm = Vmm::spawn_with(&host.binaries, &log, Some(none.as_fd()))?;
    ensure!(vmm.client.info()?.state == VmState::Empty, "a new VMM is not empty");
    let files = [file.as_fd(), file.as_fd()];
    for _ in 0..2 {
        let restored = vmm.client.restore(restore(None), &files);
        refusal(restored, ErrorKind::Host, "it is no KVM")?;
    }
    let created = vmm.client.create(of_inherited(), &[kernel.as_fd()]);
    refusal(created, ErrorKind::Host, "it is no KVM")?;
    vmm.client.create(good(), &[kernel.as_fd(), kvm.as_fd()])?;
    ends(vmm)?;

    // The VM that was made ahead is gone with the first refusal; the next request makes its own, with the same KVM or another.
    let mut vmm = Vmm::spawn_with(&host.binaries, &log, Some(kvm.as_fd()))?;
    for _ in 0..2 {
        let restored = vmm.client.restore(restore(None), &files);
        refusal(restored, ErrorKind::Invalid, "this is no snapshot")?;
    }
    let sent = [file.as_fd(), file.as_fd(), none.as_fd()];
    let restored = vmm.client.restore(restore(Some(FdRef(2))), &sent);
    refusal(restored, ErrorKind::Host, "it is no KVM")?;
    ensure!(
        vmm.client.info()?.state == VmState::Empty,
        "a refusal has left something"
    );
    vmm.client.create(of_inherited(), &[kernel.as_fd()])?;
    vmm.client.start()?;
    ensure!(
        vmm.client.info()?.state == VmState::Running,
        "what was created does not run"
    );
    ends(vmm)
}

fn a_metric_counts(host: &Host) -> Result<()> {
    let mut machine = Builder::new(host)?.start()?;
    machine.agent()?;
    let metrics = machine.vmm.client.metrics()?;
    let exits: u64 = metrics
        .iter()
        .filter(|sample| sample.name == "vcpu_exits_total")
        .map(|sample| sample.value)
        .sum();
    ensure!(exits > 10, "{exits} exits were counted");
    let info = machine.vmm.client.info()?;
    ensure!(
        info.state == VmState::Running && info.cpus == 1 && info.memory == 128 << 20,
        "{info:?}"
    );
    ensure!(info.engine == "kvm", "the engine is {}", info.engine);
    Ok(())
}

/// A VMM that listens at `path`.
fn listening(host: &Host, path: &Path) -> Result<Child> {
    let process = Command::new(host.binaries.join("basalt-vmm"))
        .arg("--control")
        .arg(path)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    Ok(process)
}

/// A client of the VMM that listens at `path`, or will in a moment.
fn connect(path: &Path) -> Result<VmmClient> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let kind = SocketType::SEQPACKET;
        let socket: OwnedFd = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Ok(()) => return Ok(VmmClient::new(PacketSocket::from_fd(socket))),
            Err(error) if Instant::now() >= deadline => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn named_socket(host: &Host) -> Result<()> {
    let path = host.scratch.join("control");
    let mut process = listening(host, &path)?;
    let mut first = connect(&path)?;
    let kernel = File::open(host.asset("vmlinux"))?;
    // Not jailed, it opens KVM by itself.
    let config = VmConfig { kvm: None, ..good() };
    first.create(config, &[kernel.as_fd()])?;
    drop(first);
    let mut second = connect(&path)?;
    ensure!(
        second.info()?.state == VmState::Created,
        "the VM did not outlive its driver"
    );
    second.stop()?;
    drop(second);
    ensure!(process.wait()?.success(), "the VMM did not end well");
    ensure!(!path.exists(), "the socket is still there");
    stale_socket(host, &path)
}

/// A killed VMM leaves its socket; the next one at the same path says so and what to do, and that helps.
fn stale_socket(host: &Host, path: &Path) -> Result<()> {
    let mut killed = listening(host, path)?;
    drop(connect(path)?);
    killed.kill()?;
    killed.wait()?;
    ensure!(path.exists(), "a killed VMM has removed its socket");

    let refused = listening(host, path)?.wait_with_output()?;
    let text = String::from_utf8_lossy(&refused.stderr);
    ensure!(
        refused.status.code() == Some(1),
        "it ended with {}: {text}",
        refused.status
    );
    for words in [path.to_string_lossy().as_ref(), "remove it if it is stale"] {
        ensure!(text.contains(words), "the message does not say `{words}`: {text}");
    }
    // Whether it is stale is for its owner to say: nobody else has removed it.
    ensure!(path.exists(), "the refused VMM has removed the socket");

    std::fs::remove_file(path)?;
    let mut process = listening(host, path)?;
    connect(path)?.stop()?;
    ensure!(process.wait()?.success(), "the VMM did not end well");
    ensure!(!path.exists(), "the socket is still there");
    Ok(())
}
