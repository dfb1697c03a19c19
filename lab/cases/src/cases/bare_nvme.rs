//! A guest that owns its CPUs and has a disk of the host's: the disk's interrupts reach the guest's CPUs, and nobody else.
//!
//! The lab's NVMe disk goes from the host to a guest with the host's own kernel, which has a driver for it. Under load, no interrupt of
//! the disk is seen by the host, or makes a vCPU leave its guest; when the host moves its interrupts, by taking a CPU offline, they stay
//! the guest's. When the VMM is killed under load, CPUs and disk are the host's again. It is the same with interrupts remapped by the
//! IOMMU and without (`basalt-lab up --kernel-args intremap=off`).

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base::ByteSize;
use reservation::Device;
use rustix::process::{Pid, Signal, kill_process};
use vfio::{Device as _, Function};
use vmm_api::devices::VfioPciConfig;

use super::bare::{CPU, Module, in_lab, online, run, wait_online};
use super::foreign_kernel::kernel;
use super::snapshot_files::Files;
use crate::vm::{self, Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "bare-nvme",
    limit: Duration::from_secs(400),
    host,
    guest: Some(guest),
};

/// NVM Express (PCI Code and ID Assignment, base class 01h).
const CLASS: &str = "0x010802";

const DEVICES: &str = "/sys/bus/pci/devices";
const DRIVERS: &str = "/sys/bus/pci/drivers";
const INTERRUPTS: &str = "/proc/interrupts";

/// Where the host writes what the guest is to find, and the other way round.
const FOR_GUEST: u64 = 0;
const FOR_HOST: u64 = 1 << 20;
/// Where the guest's load is, and how much.
const LOAD: u64 = 16 << 20;

const BLOCK: usize = 4096;
const THREADS: u64 = 2;
/// Written and read back, by each thread.
const BLOCKS: u64 = 500;

/// The command register, and its bit that has a function answer to addresses (PCI 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_SPACE: u8 = 1 << 1;

/// More than the doorbells of what tells the host, and far fewer than requests, each of which rings two.
const BESIDES: u64 = 200;

/// A word of the guest half: go on until somebody ends it.
const FOR_EVER: &str = "for-ever";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let all = online()?;
    let disk = Disk::find()?;
    disk.fill(FOR_GUEST, b'h')?;
    disk.fill(FOR_HOST, 0)?;
    let given = disk.give()?;
    let device = Device::open(Device::PATH)?;
    let cpus = u32::try_from(std::thread::available_parallelism()?.get())?;
    for vcpus in 1..cpus.min(3) {
        loaded(host, &device, &given, vcpus).with_context(|| format!("with {vcpus} vCPUs"))?;
        wait_online(&all)?;
    }
    drop(device);
    let disk = given.take_back()?;
    disk.check(FOR_HOST, b'g').context("what the guest has written")?;
    disk.fill(FOR_GUEST, b'a')?;
    disk.check(FOR_GUEST, b'a')?;
    module.unload()
}

fn loaded(host: &Host, device: &Device, disk: &Given, vcpus: u32) -> Result<()> {
    let reservation = device.reserve(&(CPU..CPU + vcpus).collect::<Vec<_>>())?;
    let reservation = reservation.as_fd().try_clone_to_owned()?;
    let (container, function) = vfio::host::take(&disk.name)?;
    let kept = Function::from_fd(function.as_fd().try_clone_to_owned()?)?;
    let initramfs = host.scratch.join("initramfs");
    fs::write(
        &initramfs,
        foreign::initramfs(&host.binaries.join("basalt-agent"), &[])?,
    )?;
    let mut builder = Builder::new(host)?
        .kernel(&kernel()?)?
        .initramfs(File::open(&initramfs)?)?
        .cpus(vcpus)
        .memory(ByteSize::mib(256))
        .reservation(reservation)?;
    let config = VfioPciConfig {
        container: builder.fd(container),
        function: builder.fd(OwnedFd::from(function)),
    };
    builder.device("disk", &config)?;
    let mut machine = builder.start()?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    let before = Seen::of(&mut machine)?;
    let said = vm::guest_half(&mut agent, CASE.name, &[])?;
    let after = Seen::of(&mut machine)?;
    let (requests, taken) = said
        .trim()
        .split_once(' ')
        .with_context(|| format!("the guest says {said:?}"))?;
    let (requests, taken): (u64, u64) = (requests.parse()?, taken.parse()?);
    tell(&format!(
        "{vcpus} vCPUs: {requests} requests, {taken} interrupts of the disk in the guest, {} in the host, exits {:?}",
        after.host - before.host,
        after.since(&before)
    ));
    // Two threads, each of which waits for each request.
    ensure!(
        taken >= requests / THREADS,
        "the guest has made {requests} requests and got {taken} interrupts"
    );
    ensure!(
        after.host == before.host,
        "the host has got {} interrupts of a disk that is the guest's",
        after.host - before.host
    );
    // Neither interrupts and their ends nor the disk's doorbells are exits.
    for reason in ["other", "hypercall", "msr"] {
        ensure!(
            after.exits(reason) == before.exits(reason),
            "vCPUs have left their guest while its disk interrupted it: {:?}",
            after.since(&before)
        );
    }
    stays()?;
    let registers = after.exits("memory") - before.exits("memory");
    ensure!(
        registers < BESIDES,
        "{requests} requests have had {registers} exits of registers"
    );
    let nmis = after.exits("nmi") - before.exits("nmi");
    ensure!(nmis <= registers, "vCPUs were called out of their guest {nmis} times");
    moved(&mut machine, &mut agent, vcpus)?;
    taken_away(&mut machine, &mut agent, &kept, requests)?;
    drop(kept);
    not_saved(host, &mut machine)?;
    killed(machine, agent)
}

/// What is in the host's device is in no snapshot.
fn not_saved(host: &Host, machine: &mut Vm) -> Result<()> {
    machine.vmm.client.pause()?;
    let saved = Files::new(host, "refused").take(machine);
    let refused = saved.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(
        refused.contains("device `disk` is the host's"),
        "it was saved: {refused}"
    );
    for file in fs::read_dir(&host.scratch)? {
        let path = file?.path();
        if path.file_stem().is_some_and(|stem| stem == "refused") {
            fs::remove_file(path)?;
        }
    }
    Ok(machine.vmm.client.resume()?)
}

type Agent = agent_api::Connection<std::os::unix::net::UnixStream>;

/// Nobody moves the disk's interrupts by hand.
fn stays() -> Result<()> {
    let text = fs::read_to_string(INTERRUPTS)?;
    let numbers = text.lines().filter(|line| line.contains("vfio-msix"));
    // Of those that its driver uses; the first two are for commands and for reading and writing.
    for line in numbers.take(2) {
        let number = line.split(':').next().unwrap_or(line).trim();
        let moved = fs::write(format!("/proc/irq/{number}/smp_affinity_list"), "0");
        ensure!(
            moved.is_err(),
            "the host has moved a disk's interrupt that is a guest's: {line}"
        );
    }
    Ok(())
}

/// The host takes the CPU offline that has the disk's interrupts by its own account: they come to it for a moment, and then not any more.
fn moved(machine: &mut Vm, agent: &mut Agent, vcpus: u32) -> Result<()> {
    let cpus = u32::try_from(fs::read_dir("/sys/devices/system/cpu")?.count())?;
    let free = CPU + vcpus;
    let switch = PathBuf::from(format!("/sys/devices/system/cpu/cpu{free}/online"));
    if cpus <= free || !switch.exists() {
        return Ok(());
    }
    let before = Seen::of(machine)?;
    fs::write(&switch, "0")?;
    vm::guest_half(agent, CASE.name, &[])?;
    let moved = Seen::of(machine)?;
    fs::write(&switch, "1")?;
    vm::guest_half(agent, CASE.name, &[])?;
    let after = Seen::of(machine)?;
    tell(&format!(
        "{} interrupts in the host when CPU {free} went offline, {} when it came back",
        moved.host - before.host,
        after.host - moved.host
    ));
    // One that comes by way of the host has all of them pointed again.
    ensure!(after.host - before.host < 20, "the disk's interrupts stayed the host's");
    Ok(())
}

/// The disk's registers go for a moment, as when a driver resets it: the guest has them no more, exits there and is served.
fn taken_away(machine: &mut Vm, agent: &mut Agent, disk: &Function, requests: u64) -> Result<()> {
    let config = disk.region(vfio::CONFIG_REGION)?;
    let mut command = [0; 2];
    disk.read(&config, COMMAND, &mut command)?;
    disk.write(&config, COMMAND, &[command[0] & !MEMORY_SPACE, command[1]])?;
    disk.write(&config, COMMAND, &command)?;
    let before = Seen::of(machine)?;
    vm::guest_half(agent, CASE.name, &[])?;
    let after = Seen::of(machine)?;
    let registers = after.exits("memory") - before.exits("memory");
    tell(&format!("{registers} exits of registers that were taken away"));
    ensure!(
        registers >= requests && after.host == before.host,
        "the guest still has registers that were taken away: {:?}",
        after.since(&before)
    );
    Ok(())
}

/// The VMM is killed while the disk works.
fn killed(mut machine: Vm, mut agent: Agent) -> Result<()> {
    agent.exec_detached(&agent_api::ExecRequest {
        argv: [vm::GUEST_HALF, "guest", CASE.name, FOR_EVER].map(Into::into).to_vec(),
        ..agent_api::ExecRequest::default()
    })?;
    std::thread::sleep(Duration::from_secs(2));
    let vmm = i32::try_from(machine.vmm.pid()).ok().and_then(Pid::from_raw);
    kill_process(vmm.context("a process")?, Signal::KILL)?;
    machine.vmm.wait_status(Duration::from_secs(20))?;
    Ok(())
}

fn tell(what: &str) {
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    {
        println!("{what}");
    }
}

/// What the host sees of a guest's interrupts.
struct Seen {
    /// Those of the disk that came to the host.
    host: u64,
    exits: BTreeMap<String, u64>,
}

impl Seen {
    fn of(machine: &mut Vm) -> Result<Self> {
        let exits = machine.vmm.client.metrics()?.into_iter();
        let exits = exits.filter(|sample| sample.name == "engine_exits_total");
        Ok(Self {
            host: interrupts("vfio-msix")?,
            exits: exits
                .map(|sample| {
                    let reason = sample.labels.iter().find(|(key, _)| key == "reason");
                    (
                        reason.map(|(_, reason)| reason.clone()).unwrap_or_default(),
                        sample.value,
                    )
                })
                .collect(),
        })
    }

    fn exits(&self, reason: &str) -> u64 {
        self.exits.get(reason).copied().unwrap_or(0)
    }

    fn since(&self, before: &Self) -> BTreeMap<&str, u64> {
        let counts = self
            .exits
            .keys()
            .map(|reason| (reason.as_str(), self.exits(reason) - before.exits(reason)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

/// How many interrupts this kernel has got, of those whose names contain `name`.
fn interrupts(name: &str) -> Result<u64> {
    let text = fs::read_to_string(INTERRUPTS)?;
    let columns = text.lines().next().map_or(0, |first| first.split_whitespace().count());
    let of = text.lines().filter(|line| line.contains(name));
    let counts = of.flat_map(|line| line.split_whitespace().skip(1).take(columns));
    Ok(counts.filter_map(|count| count.parse::<u64>().ok()).sum())
}

/// The lab's NVMe disk while it is the host's.
struct Disk {
    function: String,
    path: PathBuf,
}

impl Disk {
    fn find() -> Result<Self> {
        for entry in fs::read_dir(DEVICES)? {
            let entry = entry?;
            if fs::read_to_string(entry.path().join("class"))?.trim() == CLASS {
                return Self::of(&entry.file_name().to_string_lossy());
            }
        }
        bail!("the lab has no NVMe disk: it was started by an older basalt-lab; `basalt-lab down` and up again")
    }

    fn of(function: &str) -> Result<Self> {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(path) = Self::namespace(function)? {
                return Ok(Self {
                    function: function.to_owned(),
                    path,
                });
            }
            ensure!(Instant::now() < limit, "the host's driver finds no disk in {function}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Of /sys/bus/pci/devices/FUNCTION/nvme/nvmeA/nvmeBnC, or where the kernel knows of several ways to a disk, nvmeBcAnC: /dev/nvmeBnC.
    fn namespace(function: &str) -> Result<Option<PathBuf>> {
        for controller in entries(&Path::new(DEVICES).join(function).join("nvme"))? {
            for disk in entries(&controller)? {
                let name = disk.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let Some((way, number)) = name.rsplit_once('n').filter(|(way, _)| way.starts_with("nvme")) else {
                    continue;
                };
                let path = Path::new("/dev").join(format!("{}n{number}", way.split('c').next().unwrap_or(way)));
                if path.exists() {
                    return Ok(Some(path));
                }
            }
        }
        Ok(None)
    }

    fn open(&self) -> Result<File> {
        direct(&self.path)
    }

    fn fill(&self, at: u64, byte: u8) -> Result<()> {
        let mut block = Block::new();
        block.bytes().fill(byte);
        Ok(self.open()?.write_all_at(block.bytes(), at)?)
    }

    fn check(&self, at: u64, byte: u8) -> Result<()> {
        let mut block = Block::new();
        self.open()?.read_exact_at(block.bytes(), at)?;
        ensure!(
            block.bytes().iter().all(|found| *found == byte),
            "{} differs at {at:#x}",
            self.path.display()
        );
        Ok(())
    }

    /// Takes it from the host.
    fn give(self) -> Result<Given> {
        run("modprobe", &["vfio-pci"])?;
        let remapped = fs::read_to_string(INTERRUPTS)?.contains("IR-PCI-MSI");
        tell(if remapped {
            "interrupts are remapped"
        } else {
            "interrupts are not remapped"
        });
        if !remapped {
            // A guest could have its disk write any interrupt to anybody. It is a guest of ours.
            fs::write("/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "1")?;
        }
        bind(&self.function, "vfio-pci")?;
        Ok(Given { name: self.function })
    }
}

/// The same while it is a guest's.
struct Given {
    name: String,
}

impl Given {
    fn take_back(self) -> Result<Disk> {
        bind(&self.name, "")?;
        Disk::of(&self.name)
    }
}

impl Drop for Given {
    /// After a failure, whose words are worth more than ours; it is nothing twice.
    fn drop(&mut self) {
        drop(bind(&self.name, ""));
    }
}

/// Gives a function to a driver, or to whichever wants it.
fn bind(function: &str, driver: &str) -> Result<()> {
    let directory = Path::new(DEVICES).join(function);
    fs::write(directory.join("driver_override"), format!("{driver}\n"))?;
    let now = fs::read_link(directory.join("driver")).ok();
    let now = now
        .as_deref()
        .and_then(Path::file_name)
        .map(|name| name.to_string_lossy().into_owned());
    match now.as_deref() {
        Some(now) if now == driver || (driver.is_empty() && now != "vfio-pci") => return Ok(()),
        Some(now) => fs::write(Path::new(DRIVERS).join(now).join("unbind"), function)?,
        None => (),
    }
    fs::write("/sys/bus/pci/drivers_probe", function).with_context(|| format!("{function} for {driver}"))
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(directory) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

/// Past the page cache, so that each access is a request.
fn direct(path: &Path) -> Result<File> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path);
    opened.with_context(|| path.display().to_string())
}

/// A block where one can be read to directly.
struct Block(Vec<u8>);

impl Block {
    fn new() -> Self {
        Self(vec![0; 2 * BLOCK])
    }

    fn bytes(&mut self) -> &mut [u8] {
        let start = self.0.as_ptr().align_offset(BLOCK);
        &mut self.0[start..start + BLOCK]
    }
}

/// In the guest: loads the disk and checks it, and says how many requests and interrupts that were.
fn guest(arguments: &[String]) -> Result<()> {
    let disk = Disk::find()?;
    disk.check(FOR_GUEST, b'h').context("what the host has written")?;
    disk.fill(FOR_HOST, b'g')?;
    let before = interrupts("nvme")?;
    loop {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let path = disk.path.clone();
                std::thread::spawn(move || load(&path, number))
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        if arguments.first().is_none_or(|word| word != FOR_EVER) {
            break;
        }
    }
    tell(&format!("{} {}", 2 * THREADS * BLOCKS, interrupts("nvme")? - before));
    Ok(())
}

fn load(path: &Path, number: u64) -> Result<()> {
    let file = direct(path)?;
    let mut block = Block::new();
    let mut read = Block::new();
    for index in 0..BLOCKS {
        // Spread, and each its own.
        let at = LOAD + ((index * 7919) % BLOCKS * THREADS + number) * BLOCK as u64;
        for (offset, byte) in block.bytes().iter_mut().enumerate() {
            *byte = u8::try_from((index * 31 + number * 7 + offset as u64) % 251)?;
        }
        file.write_all_at(block.bytes(), at)?;
        file.read_exact_at(read.bytes(), at)?;
        ensure!(block.bytes() == read.bytes(), "what was read back differs at {at:#x}");
    }
    Ok(())
}
