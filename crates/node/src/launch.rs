//! From a specification to a VM configuration with its descriptors. Opens files and makes sockets; starts nothing.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use vmm_api::config::DeviceSpec;
use vmm_api::devices::{BlockConfig, BlockEngine, ConsoleConfig, DeviceConfig, RngConfig, VsockConfig};
use vmm_api::{FdRef, VmConfig};
use wire::packet::PacketSocket;

use crate::ring::Ring;
use crate::{Error, SandboxSpec};

/// The guest's own context id: the same in every guest (virtio 1.2, 5.10.4: 0 to 2 are taken).
const GUEST_CID: u32 = 3;

/// What the guest reads as the root disk's serial number, and how its agent finds it.
pub(crate) const ROOT_SERIAL: &str = "root";

/// More request queues than this do not make one disk faster.
const MAX_QUEUES: u32 = 4;

const NO_ASSETS: &str = "run `make run` in Basalt's source tree, or set BASALT_ASSETS to the directory that has it";
const NO_KVM: &str = "`basalt doctor` tells more";

/// A configuration, the descriptors that it counts, and this side's ends of what was made for it.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) config: VmConfig,
    pub(crate) fds: Fds,
    pub(crate) acceptor: PacketSocket,
    pub(crate) console: Ring,
}

/// Descriptors in the order in which a packet carries them.
#[derive(Debug, Default)]
pub(crate) struct Fds(Vec<OwnedFd>);

impl Fds {
    fn add(&mut self, fd: impl Into<OwnedFd>) -> Result<FdRef, Error> {
        let position = u32::try_from(self.0.len()).map_err(|_| Error::host("counting")(io::ErrorKind::Other))?;
        self.0.push(fd.into());
        Ok(FdRef(position))
    }

    pub(crate) fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }
}

/// Opens everything.
pub(crate) fn prepare(spec: SandboxSpec) -> Result<Prepared, Error> {
    let mut fds = Fds::default();
    let kernel = fds.add(open("the guest kernel", &spec.kernel, NO_ASSETS)?)?;
    let initramfs = fds.add(open("the guest's initramfs", &spec.initramfs, NO_ASSETS)?)?;
    let kvm = fds.add(open_kvm(&spec.kvm)?)?;
    let (console, console_end) =
        Ring::start("the guest's console", spec.console_copy).map_err(Error::host("making a pipe"))?;
    let serial = fds.add(console_end.try_clone().map_err(Error::host("making a pipe"))?)?;
    let output = fds.add(console_end)?;
    let (acceptor, vmm_acceptor) =
        PacketSocket::pair().map_err(|e| Error::host("making a socket")(io::Error::other(e)))?;
    let vsock = VsockConfig {
        cid: GUEST_CID,
        listener: None,
        acceptor: Some(fds.add(vmm_acceptor)?),
        sinks: Vec::new(),
    };
    let root = BlockConfig {
        file: fds.add(spec.root)?,
        read_only: true,
        queues: u16::try_from(spec.cpus.clamp(1, MAX_QUEUES)).unwrap_or(1),
        serial: ROOT_SERIAL.to_owned(),
        engine: BlockEngine::Auto,
    };
    let devices = vec![
        device("root", &root)?,
        device("vsock", &vsock)?,
        device("rng", &RngConfig {})?,
        device(
            "console",
            &ConsoleConfig {
                input: None,
                output: Some(output),
                keep: None,
            },
        )?,
    ];
    let config = VmConfig {
        cpus: spec.cpus,
        memory: spec.memory,
        kernel,
        initramfs: Some(initramfs),
        cmdline: spec.cmdline,
        kvm: Some(kvm),
        serial: Some(serial),
        serial_keep: None,
        devices,
    };
    config.validate()?;
    Ok(Prepared {
        config,
        fds,
        acceptor,
        console,
    })
}

fn device<C: DeviceConfig>(id: &str, config: &C) -> Result<DeviceSpec, Error> {
    DeviceSpec::new(id, config).map_err(|e| Error::host("writing a device's configuration")(io::Error::other(e)))
}

fn open(what: &'static str, path: &Path, next: &'static str) -> Result<File, Error> {
    File::open(path).map_err(|cause| Error::Open {
        what,
        path: path.to_owned(),
        cause,
        next,
    })
}

fn open_kvm(path: &Path) -> Result<File, Error> {
    File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|cause| Error::Open {
            what: "KVM",
            path: path.to_owned(),
            cause,
            next: NO_KVM,
        })
}
