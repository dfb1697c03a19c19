//! From a sandbox's record to a running VMM with its configuration and descriptors. Makes the sockets of `run/ID`, opens
//! files, starts the process; what is started is told to the VMM elsewhere.

use std::ffi::CString;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use host::jail::{self, Identity, Isolation, Launch};
use network::Attachment;
use node_api::{Class, CpuModel, Paging, Resources};
use rustix::net::SocketType;
use vmm_api::config::DeviceSpec;
use vmm_api::devices::{
    BlockConfig, BlockEngine, ConsoleConfig, DeviceConfig, FsConfig, FsDirectory, FsSource, IommuConfig, MacAddress,
    NetConfig, NetLimits, PmemConfig, RngConfig, VsockConfig, VsockSink,
};
use vmm_api::{FdRef, MemoryMode, PageRuns, RestoreConfig, SnapshotFiles, VmConfig};
use wire::packet::PacketSocket;

use crate::Error;
use crate::config::Config;
use crate::guest::reidentify;
use crate::resources::cpus::OwnedCpus;
use crate::resources::limits;
use crate::resources::volume_shares::{self, Shared, Source};
use crate::saved::memory_files;
use crate::saved::prefetch;
use crate::saved::snapshots::Place;
use crate::store::database::Stored;
use crate::store::paths::SandboxPaths;
use crate::vmm::accelerator::{self, Window};
use crate::vmm::cmdline::command_line_for;
use crate::vmm::files::{append, listen, open, open_writable};

/// The guest's own context id: the same in every guest (virtio 1.2, 5.10.4: 0 to 2 are taken).
const GUEST_CID: u32 = 3;

/// What the guest reads as the disks' serial numbers, and how its agent finds them.
pub(crate) const ROOT_SERIAL: &str = "root";
pub(crate) const WRITABLE_SERIAL: &str = "writable";

/// More request queues than this do not make one disk faster.
const MAX_QUEUES: u32 = 4;

/// What is kept of a guest's console, and of its command's log.
const CONSOLE_KEEP: u64 = 256 << 10;
const LOG_KEEP: u64 = 16 << 20;

const NO_ASSETS: &str =
    "run `make run` in Basalt's source tree, or set BASALT_ASSETS (basaltd: --assets) to the directory that has it";
/// What a snapshot consists of, and what helps if it cannot be opened.
const STATE: &str = "the snapshot's state";
const MEMORY: &str = "the snapshot's memory";
const LOOK_AT_IT: &str = "see that it is there and that its disk can be read; `basalt snapshot verify` and `template verify` look at all of it";
const USERFAULTFD: &str = "/dev/userfaultfd";
const NO_KVM: &str = "`basalt doctor` tells more";

/// A configuration, the descriptors that it counts, and this side's ends of what was made for it.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) config: VmConfig,
    pub(crate) fds: Fds,
    /// Where the guest's first connection arrives.
    pub(crate) acceptor: PacketSocket,
    /// For the VMM.
    pub(crate) inherited: Inherited,
}

/// What a VMM has open when it starts.
#[derive(Debug)]
pub(crate) struct Inherited {
    control: OwnedFd,
    kvm: Option<File>,
    /// The files of what is to be restored, the state first, if the VMM may read them before it is asked to.
    snapshot: Vec<File>,
}

impl Inherited {
    /// A control socket that listens, in a directory of its own.
    fn new(paths: &SandboxPaths) -> Result<Self, Error> {
        fs::create_dir_all(&paths.run).map_err(Error::file("make", &paths.run))?;
        Ok(Self {
            control: listen(&paths.control(), SocketType::SEQPACKET)?,
            kvm: None,
            snapshot: Vec::new(),
        })
    }

    /// The control socket.
    #[cfg(test)]
    pub(crate) fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// KVM beside it, if that is to run it: the VMM makes a VM and reads what is saved at `place` while everything else is prepared.
    pub(crate) fn to_restore(
        config: &Config,
        stored: &Stored,
        paths: &SandboxPaths,
        place: &Place,
    ) -> Result<Self, Error> {
        let kvm = match stored.sandbox.config.resources.class {
            Class::Standard | Class::Dedicated => Some(open_writable("KVM", &config.kvm, NO_KVM)?),
            Class::Bare => None,
        };
        let snapshot = match stored.sandbox.config.paging {
            Paging::Mapped | Paging::Eager if kvm.is_some() => {
                let memory = memory_files::paths(place.directory());
                let memory = memory.iter().map(|path| open(MEMORY, path, LOOK_AT_IT));
                let state = open(STATE, &place.state(), LOOK_AT_IT);
                std::iter::once(state).chain(memory).collect::<Result<_, _>>()?
            }
            // Its memory is not mapped from the files, or pinned.
            _ => Vec::new(),
        };
        Ok(Self {
            kvm,
            snapshot,
            ..Self::new(paths)?
        })
    }

    /// All of it, by the option of the VMM that says which it is.
    fn all(&self) -> impl Iterator<Item = (&'static str, BorrowedFd<'_>)> {
        let snapshot = self.snapshot.iter().enumerate().map(|(index, file)| {
            let option = if index == 0 { "--state-fd" } else { "--memory-fd" };
            (option, file.as_fd())
        });
        let kvm = self.kvm.iter().map(|kvm| ("--kvm-fd", kvm.as_fd()));
        std::iter::once(("--control-fd", self.control.as_fd()))
            .chain(kvm)
            .chain(snapshot)
    }
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

/// The same for a VM that is restored.
#[derive(Debug)]
pub(crate) struct Restoring {
    pub(crate) config: RestoreConfig,
    pub(crate) fds: Fds,
}

impl Restoring {
    /// Whether its kernel is told that it goes on from a state of before. That takes a clone's first milliseconds, and is needed
    /// where commands had run in what it is a clone of.
    pub(crate) fn told_if(mut self, commands_ran: bool) -> Self {
        self.config.skip_notification = !commands_ran;
        self
    }
}

/// What is common to both.
struct Stage {
    fds: Fds,
    serial: Option<FdRef>,
    devices: Vec<DeviceSpec>,
    acceptor: PacketSocket,
}

/// What a VMM has of the host besides what is in its sandbox's directories.
#[derive(Debug)]
pub(crate) struct Outside<'a> {
    /// The image's file system.
    pub(crate) image: &'a Path,
    pub(crate) attachment: Option<Attachment>,
    pub(crate) cpus: &'a dyn OwnedCpus,
    /// What it shares with its accelerator's server.
    pub(crate) window: Option<File>,
}

/// Opens everything.
pub(crate) fn prepare(
    config: &Config,
    stored: &Stored,
    paths: &SandboxPaths,
    outside: Outside<'_>,
) -> Result<Prepared, Error> {
    let inherited = Inherited::new(paths)?;
    let cpus = outside.cpus;
    let mut stage = stage(config, stored, paths, &paths.vsock(), outside)?;
    let resources = &stored.sandbox.config.resources;
    let (kvm, reservation) = match resources.class {
        Class::Standard | Class::Dedicated => {
            let kvm = open_writable("KVM", &config.kvm, NO_KVM)?;
            (Some(stage.fds.add(kvm)?), None)
        }
        Class::Bare => (None, Some(stage.fds.add(cpus.reserve(stored)?)?)),
    };
    let kernel = stage.fds.add(open("the guest kernel", &config.kernel, NO_ASSETS)?)?;
    let initramfs = stage
        .fds
        .add(open("the guest's initramfs", &config.initramfs, NO_ASSETS)?)?;
    let config = VmConfig {
        cpus: resources.cpus,
        memory: resources.boots_with(),
        cpu: resources.cpu_model.unwrap_or_default(),
        kernel,
        initramfs: Some(initramfs),
        cmdline: command_line_for(config.log_level, resources),
        kvm,
        reservation,
        memory_mode: match resources.memory_mode {
            node_api::MemoryMode::Translated => MemoryMode::Translated,
            node_api::MemoryMode::Identity => MemoryMode::Identity,
        },
        busy_poll_us: None,
        serial: stage.serial,
        serial_keep: stage.serial.map(|_| CONSOLE_KEEP),
        acpi_hotplug: false,
        devices: stage.devices,
    };
    config.validate()?;
    Ok(Prepared {
        config,
        fds: stage.fds,
        acceptor: stage.acceptor,
        inherited,
    })
}

/// The same for a VM that goes on from a snapshot: the devices are those that it had, as both are made here. Its guest opens no
/// connection but to where output is kept.
pub(crate) fn prepare_restore(
    config: &Config,
    stored: &Stored,
    paths: &SandboxPaths,
    outside: Outside<'_>,
    place: &Place,
) -> Result<Restoring, Error> {
    let cpus = outside.cpus;
    let stage = stage(config, stored, paths, &paths.vsock(), outside)?;
    let (mut config, mut fds) = from_place(stage, place)?;
    if stored.sandbox.config.resources.class.is_bare() {
        config.reservation = Some(fds.add(cpus.reserve(stored)?)?);
    }
    config.anonymous_holes = stored.sandbox.config.devices_reach_all();
    let pages = prefetch::pages(place, stored.sandbox.config.paging);
    match stored.sandbox.config.paging {
        Paging::Mapped => config.write_set = pages,
        Paging::Eager => (config.write_set, config.paging) = (pages, vmm_api::Paging::Eager),
        Paging::OnDemand => {
            config.paging = vmm_api::Paging::OnDemand {
                userfaultfd: fds.add(userfaultfd()?)?,
                order: pages,
            };
        }
    }
    Ok(Restoring { config, fds })
}

/// What tells a VMM which pages of its memory are touched.
fn userfaultfd() -> Result<File, Error> {
    let opened = File::options().read(true).write(true).open(USERFAULTFD);
    opened.map_err(Error::Userfaultfd)
}

/// Refuses a way for memory that this host does not have, before anything is made.
pub(crate) fn check_paging(paging: Paging) -> Result<(), Error> {
    match paging {
        Paging::OnDemand => userfaultfd().map(drop),
        Paging::Mapped | Paging::Eager => Ok(()),
    }
}

/// The same for a VM that is there and goes back to a snapshot. Its vsock listens beside the one that it has.
pub(crate) fn prepare_rollback(
    config: &Config,
    stored: &Stored,
    paths: &SandboxPaths,
    outside: Outside<'_>,
    place: &Place,
) -> Result<(RestoreConfig, Fds), Error> {
    let (mut config, mut fds) = from_place(stage(config, stored, paths, &paths.next_vsock(), outside)?, place)?;
    config.write_set = prefetch::pages(place, Paging::Mapped);
    // One with volumes gets another VMM.
    share(&mut config.devices, &mut fds, Vec::new(), stored.share_slots)?;
    config.validate()?;
    Ok((config, fds))
}

/// The vsock that listens beside the other takes its place.
pub(crate) fn take_next_vsock(paths: &SandboxPaths) -> Result<(), Error> {
    let next = paths.next_vsock();
    fs::rename(&next, paths.vsock()).map_err(Error::file("rename", &next))
}

fn from_place(mut stage: Stage, place: &Place) -> Result<(RestoreConfig, Fds), Error> {
    let memory = memory_files::paths(place.directory());
    let memory = memory.iter().map(|path| stage.fds.add(open(MEMORY, path, LOOK_AT_IT)?));
    let memory = memory.collect::<Result<_, _>>()?;
    let files = SnapshotFiles {
        state: stage.fds.add(open(STATE, &place.state(), LOOK_AT_IT)?)?,
        memory,
    };
    let config = RestoreConfig {
        files,
        // It has been inherited, or is there.
        kvm: None,
        reservation: None,
        serial: stage.serial,
        serial_keep: stage.serial.map(|_| CONSOLE_KEEP),
        devices: stage.devices,
        write_set: PageRuns::new(),
        skip_notification: false,
        paging: vmm_api::Paging::Mapped,
        anonymous_holes: false,
    };
    config.validate()?;
    Ok((config, stage.fds))
}

fn stage(
    config: &Config,
    stored: &Stored,
    paths: &SandboxPaths,
    vsock: &Path,
    Outside {
        image,
        attachment,
        window,
        ..
    }: Outside<'_>,
) -> Result<Stage, Error> {
    let vsock = listen(vsock, SocketType::STREAM)?;
    let mut fds = Fds::default();
    let (acceptor, vmm_acceptor) =
        PacketSocket::pair().map_err(|e| Error::host("making a socket")(io::Error::other(e)))?;
    let serial = match config.talkative() {
        true => Some(fds.add(append(&paths.console())?)?),
        false => None,
    };
    let mut devices = devices(&mut fds, stored, paths, image, (vsock, vmm_acceptor))?;
    if let Some(attachment) = attachment {
        let limits = limits::for_network(&stored.sandbox.config.limits);
        devices.push(interface(&mut fds, attachment, limits)?);
    }
    if let Some(window) = window {
        let file = fds.add(window)?;
        devices.push(device(
            "accelerator",
            &PmemConfig {
                file,
                private: false,
                parts: Vec::new(),
            },
        )?);
    }
    Ok(Stage {
        fds,
        serial,
        devices,
        acceptor,
    })
}

fn devices(
    fds: &mut Fds,
    stored: &Stored,
    paths: &SandboxPaths,
    image: &Path,
    (listener, acceptor): (OwnedFd, PacketSocket),
) -> Result<Vec<DeviceSpec>, Error> {
    let resources = &stored.sandbox.config.resources;
    let queues = queues(resources);
    let disk = |file, read_only, serial: &str| BlockConfig {
        file,
        read_only,
        queues,
        serial: serial.to_owned(),
        engine: BlockEngine::Auto,
        limits: limits::for_disks(&stored.sandbox.config.limits),
    };
    let root = fds.add(open("the image", image, "import or pull it again")?)?;
    let mut devices = vec![device("root", &disk(root, true, ROOT_SERIAL))?];
    if resources.disk.is_some() {
        let file = fds.add(open_writable(
            "the writable disk",
            &paths.disk(),
            "see that it is there and that its file system can be written to",
        )?)?;
        devices.push(device("writable", &disk(file, false, WRITABLE_SERIAL))?);
    }
    let vsock = VsockConfig {
        cid: GUEST_CID,
        listener: Some(fds.add(listener)?),
        acceptor: Some(fds.add(acceptor)?),
        sinks: vec![VsockSink {
            port: agent_api::log::LOG_PORT,
            file: fds.add(append(&paths.log())?)?,
            keep: LOG_KEEP,
        }],
    };
    let console = ConsoleConfig {
        input: None,
        output: Some(fds.add(append(&paths.console())?)?),
        keep: Some(CONSOLE_KEEP),
    };
    devices.push(device("vsock", &vsock)?);
    // A guest's kernel asks it for more once a minute, which makes one that owns its CPUs leave them. Its agent is given entropy.
    // One that can be moved has what every class has.
    if !resources.class.is_bare() || resources.cpu_model == Some(CpuModel::Common) {
        devices.push(device("rng", &RngConfig {})?);
    }
    devices.push(device("console", &console)?);
    if let Some(memory) = limits::for_memory(&stored.sandbox.config) {
        devices.push(device("memory", &memory)?);
    }
    if let Some(balloon) = limits::for_balloon(&stored.sandbox.config) {
        devices.push(device("balloon", &balloon)?);
    }
    if resources.guest_iommu {
        devices.push(device("iommu", &IommuConfig {})?);
    }
    Ok(devices)
}

/// The guest's network interface.
fn interface(fds: &mut Fds, attachment: Attachment, limits: NetLimits) -> Result<DeviceSpec, Error> {
    let taps = attachment.taps.into_iter().map(|tap| fds.add(tap));
    let config = NetConfig {
        taps: taps.collect::<Result<_, _>>()?,
        mac: MacAddress(attachment.mac),
        mtu: attachment.mtu,
        limits,
    };
    device("net", &config)
}

/// Request queues of a device that can have several.
pub(crate) fn queues(resources: &Resources) -> u16 {
    u16::try_from(resources.cpus.clamp(1, MAX_QUEUES)).unwrap_or(1)
}

impl Prepared {
    /// Adds the directories that the guest shares with the host.
    pub(crate) fn share(&mut self, shared: Vec<Shared>, slots: usize) -> Result<(), Error> {
        share(&mut self.config.devices, &mut self.fds, shared, slots)?;
        Ok(self.config.validate()?)
    }
}

impl Restoring {
    /// The same for one that is restored.
    pub(crate) fn share(&mut self, shared: Vec<Shared>, slots: usize) -> Result<(), Error> {
        share(&mut self.config.devices, &mut self.fds, shared, slots)?;
        Ok(self.config.validate()?)
    }
}

/// Adds a device for each directory, and dormant ones until there are `slots`.
fn share(devices: &mut Vec<DeviceSpec>, fds: &mut Fds, shared: Vec<Shared>, slots: usize) -> Result<(), Error> {
    let count = shared.len();
    for volume in shared {
        let source = match volume.source {
            Source::Directory(directory) => FsSource::Directory(FsDirectory {
                directory: fds.add(directory.directory)?,
                descriptors: fds.add(directory.descriptors)?,
                read_only: directory.read_only,
                owners: directory.owners,
                max_files: directory.max_files,
            }),
            Source::Stream(socket) => FsSource::Stream(fds.add(socket)?),
        };
        devices.push(shared_directory(volume.tag, Some(source))?);
    }
    for index in count..slots {
        devices.push(shared_directory(reidentify::share_tag(index), None)?);
    }
    Ok(())
}

fn shared_directory(tag: String, source: Option<FsSource>) -> Result<DeviceSpec, Error> {
    device(&tag.clone(), &FsConfig { tag, source })
}

/// Who its VMM is on the host; `None` where VMMs are in no jail.
pub(crate) fn identity(config: &Config, stored: &Stored) -> Option<Identity> {
    let identity = config.users.and_then(|users| users.identity(stored.slot))?;
    match stored.sandbox.config.volumes.is_empty() {
        true => Some(identity),
        false => Some(identity.with_owners()),
    }
}

/// Starts VMMs.
pub(crate) trait Launcher: fmt::Debug + Send + Sync {
    /// Starts one; it waits for a driver at its control socket.
    fn launch(
        &self,
        config: &Config,
        stored: &Stored,
        paths: &SandboxPaths,
        inherited: &Inherited,
        cgroup: Option<&Path>,
    ) -> Result<jail::Child, Error>;

    /// Starts the server of its accelerator, which goes on from a state if there is one; the window is ready when this returns.
    fn launch_accelerator(
        &self,
        config: &Config,
        stored: &Stored,
        paths: &SandboxPaths,
        window: (&Window, Option<File>),
        cgroup: Option<&Path>,
    ) -> Result<accelerator::Launched, Error>;
}

/// As programs in jails.
#[derive(Debug)]
pub(crate) struct Jailed;

impl Launcher for Jailed {
    fn launch(
        &self,
        config: &Config,
        stored: &Stored,
        paths: &SandboxPaths,
        inherited: &Inherited,
        cgroup: Option<&Path>,
    ) -> Result<jail::Child, Error> {
        let program = open("the VMM", &config.programs.vmm, NO_ASSETS)?;
        let level = config.log_level.as_str().to_ascii_lowercase();
        let name = config.programs.vmm.as_os_str().as_bytes();
        let identity = identity(config, stored);
        let mut words = vec![name.to_vec(), b"--log-level".to_vec(), level.into_bytes()];
        let mut descriptors = Vec::new();
        for (option, fd) in inherited.all() {
            let number = jail::number_of(descriptors.len());
            words.extend([option.as_bytes().to_vec(), number.to_string().into_bytes()]);
            descriptors.push(fd);
        }
        // Without namespaces made for it, it would only pretend.
        words.extend(identity.map(|_| b"--jail".to_vec()));
        let volumes = !stored.sandbox.config.volumes.is_empty();
        words.extend(identity.filter(|_| volumes).map(|_| b"--volumes".to_vec()));
        if stored.sandbox.config.resources.class == Class::Dedicated {
            words.push(b"--own-cpus".to_vec());
        }
        let arguments: Vec<_> = words.into_iter().filter_map(|word| CString::new(word).ok()).collect();
        let log = append(&paths.vmm_log())?;
        let directory = cgroup
            .map(File::open)
            .transpose()
            .map_err(Error::host("opening the sandbox's cgroup"))?;
        let launch = Launch {
            program: program.as_fd(),
            arguments: &arguments,
            environment: &[],
            descriptors: &descriptors,
            log: log.as_fd(),
            cgroup: directory.as_ref().map(AsFd::as_fd),
            isolation: identity.map_or(Isolation::None, Isolation::Full),
            // Without root there are as many as there are.
            open_files: (volumes && identity.is_some()).then_some(volume_shares::OPEN_FILES),
            // All of its memory is pinned.
            locks_memory: stored.sandbox.config.resources.class.is_bare(),
        };
        Ok(jail::spawn(&launch)?)
    }

    fn launch_accelerator(
        &self,
        config: &Config,
        stored: &Stored,
        paths: &SandboxPaths,
        window: (&Window, Option<File>),
        cgroup: Option<&Path>,
    ) -> Result<accelerator::Launched, Error> {
        accelerator::launch(config, stored, paths, window, cgroup)
    }
}

fn device<C: DeviceConfig>(id: &str, config: &C) -> Result<DeviceSpec, Error> {
    DeviceSpec::new(id, config).map_err(|e| Error::host("writing a device's configuration")(io::Error::other(e)))
}
