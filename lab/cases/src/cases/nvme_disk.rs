//! The lab's NVMe disk as a device of a guest's, for the cases that give it away: taken from the host and given back, a guest with the
//! host's own kernel, which has a driver for it, and the load there. Knows no engine; the guest half is the same under all.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_api::PciRequest;
use anyhow::{Context, Result, bail, ensure};
use base::ByteSize;
use rustix::process::{Pid, Signal, kill_process};
use vfio::{Device as _, Function};
use vmm_api::{DeviceSpec, FdRef, FunctionState};

use super::bare::run;
use super::foreign_kernel::kernel;
use super::snapshot_files::Files;
use crate::Host;
use crate::daemon::wait_for;
use crate::function_files::{self, Hand};
use crate::kernel_log::{complaints, is_dma_fault, kernel_log};
use crate::vm::{self, Builder, Vm};

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
pub(super) const THREADS: u64 = 2;
/// Written and read back, by each thread.
const BLOCKS: u64 = 500;

/// The command register, and its bit that has a function answer to addresses (PCI 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_SPACE: u8 = 1 << 1;
/// And the one that has it reach memory.
const BUS_MASTER: u8 = 1 << 2;

/// Registers in BAR 0 (NVM Express 1.4, 3.1): configuration, status, the admin queues' sizes and places, and the doorbell that tells how far
/// their first one is filled.
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const ADMIN_TAIL: u64 = 0x1000;

/// Words of the guest half: go on until somebody ends it; tell whether there is such a file.
const FOR_EVER: &str = "for-ever";
const EXISTS: &str = "exists";

pub(super) type Agent = agent_api::Connection<UnixStream>;

/// A guest that has the disk, and who sees what of it.
pub(super) struct Guest<'a> {
    /// The case's name, by which its guest half is called.
    case: &'static str,
    host: &'a Host,
    pub(super) machine: Vm,
    pub(super) agent: Agent,
    /// The host's own hand on the disk.
    disk: Function,
}

/// What a guest says of its load.
pub(super) struct Said {
    pub(super) requests: u64,
    /// Interrupts of the disk that it got.
    pub(super) taken: u64,
}

impl<'a> Guest<'a> {
    /// Boots one that `builder` has the processors of.
    pub(super) fn boot(case: &'static str, host: &'a Host, mut builder: Builder<'_>, disk: &Given) -> Result<Self> {
        let (config, hand) = function_files::open(&disk.name, |fd| builder.fd(fd))?;
        tell(&format!("the disk is given by {}", hand.way()));
        builder.device("disk", &config)?;
        let (machine, agent) = start(host, builder)?;
        Self::with(case, host, (machine, agent), hand)
    }

    /// The same, that gets the disk when it has booted, loses it, and gets it again; its agent has no hand in that: ACPI tells the kernel.
    pub(super) fn boot_and_attach(
        case: &'static str,
        host: &'a Host,
        builder: Builder<'_>,
        disk: &Given,
    ) -> Result<Self> {
        let (mut machine, mut agent) = start(host, builder.acpi_hotplug())?;
        let (hand, slot) = put_on_bus(&mut machine, disk)?;
        is_found(&mut agent, case, slot, true)?;
        machine.vmm.client.detach("disk")?;
        is_found(&mut agent, case, slot, false)?;
        drop(hand);
        wait_for("the disk to be closed", || {
            let told = machine.vmm.client.functions()?;
            Ok(told.functions.is_empty() && !told.busy)
        })?;
        let (hand, slot) = put_on_bus(&mut machine, disk)?;
        is_found(&mut agent, case, slot, true)?;
        Self::with(case, host, (machine, agent), hand)
    }

    fn with(case: &'static str, host: &'a Host, (machine, agent): (Vm, Agent), hand: Hand) -> Result<Self> {
        Ok(Self {
            case,
            host,
            machine,
            agent,
            disk: hand.function()?,
        })
    }

    /// Loads the disk in the guest, and checks what is there.
    pub(super) fn load(&mut self) -> Result<Said> {
        let said = vm::guest_half(&mut self.agent, self.case, &[])?;
        let (requests, taken) = said
            .trim()
            .split_once(' ')
            .with_context(|| format!("the guest says {said:?}"))?;
        let said = Said {
            requests: requests.parse()?,
            taken: taken.parse()?,
        };
        // Each thread waits for each of its requests.
        ensure!(
            said.taken >= said.requests / THREADS,
            "the guest has made {} requests and got {} interrupts",
            said.requests,
            said.taken
        );
        Ok(said)
    }

    /// The disk's registers go for a moment, as when a driver resets it.
    pub(super) fn take_registers_away(&self) -> Result<()> {
        let config = self.disk.region(vfio::CONFIG_REGION)?;
        let mut command = [0; 2];
        self.disk.read(&config, COMMAND, &mut command)?;
        self.disk
            .write(&config, COMMAND, &[command[0] & !MEMORY_SPACE, command[1]])?;
        Ok(self.disk.write(&config, COMMAND, &command)?)
    }

    /// What is in the host's device is in no snapshot.
    pub(super) fn not_saved(&mut self) -> Result<()> {
        self.machine.vmm.client.pause()?;
        let saved = Files::new(self.host, "refused").take(&mut self.machine);
        let refused = saved.err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(
            refused.contains("device `disk` is the host's"),
            "it was saved: {refused}"
        );
        for file in fs::read_dir(&self.host.scratch)? {
            let path = file?.path();
            if path.file_stem().is_some_and(|stem| stem == "refused") {
                fs::remove_file(path)?;
            }
        }
        Ok(self.machine.vmm.client.resume()?)
    }

    /// The disk is taken from the guest, and then told to look for commands where nothing is mapped: the host's IOMMU faults. So it would
    /// have said so, had anything before reached what was not mapped.
    pub(super) fn faults_once_detached(mut self) -> Result<()> {
        let mut log = kernel_log()?;
        self.machine.vmm.client.detach("disk")?;
        wait_for("the guest's memory to be unmapped", || {
            let told = self.machine.vmm.client.functions()?;
            Ok(told.functions.is_empty() && !told.busy)
        })?;
        let said = complaints(&mut log)?;
        ensure!(said.is_empty(), "the host has complained already: {said:?}");
        let (config, bar) = (self.disk.region(vfio::CONFIG_REGION)?, self.disk.region(0)?);
        self.disk.write(&config, COMMAND, &[MEMORY_SPACE | BUS_MASTER, 0])?;
        let write = |at: u64, value: u32| self.disk.write(&bar, at, &value.to_le_bytes());
        let is_ready = |wanted: u32| {
            let mut status = [0; 4];
            self.disk.read(&bar, CSTS, &mut status)?;
            Ok(u32::from_le_bytes(status) & 1 == wanted)
        };
        write(CC, 0)?;
        wait_for("the disk to stop", || is_ready(0))?;
        // Queues of 32 entries, far above what the guest has.
        for (at, value) in [
            (AQA, 0x1f_001f),
            (ASQ, 0),
            (ASQ + 4, 9),
            (ACQ, 0x1000),
            (ACQ + 4, 9),
            (CC, 0x46_0001),
        ] {
            write(at, value)?;
        }
        wait_for("the disk to be ready", || is_ready(1))?;
        write(ADMIN_TAIL, 1)?;
        let mut faults = Vec::new();
        wait_for("a fault of the IOMMU", || {
            faults.extend(complaints(&mut log)?);
            Ok(faults.iter().any(|line| is_dma_fault(line)))
        })?;
        tell(&format!("a disk without memory: {}", faults.join("; ")));
        self.disk.write(&config, COMMAND, &[0, 0])?;
        drop(self.disk);
        self.machine.vmm.client.stop()?;
        self.machine.vmm.wait_status(Duration::from_secs(20))?;
        Ok(())
    }

    /// The VMM is killed while the disk works.
    pub(super) fn kill(self) -> Result<()> {
        let Self {
            case,
            mut machine,
            mut agent,
            disk,
            ..
        } = self;
        drop(disk);
        agent.exec_detached(&agent_api::ExecRequest {
            argv: [vm::GUEST_HALF, "guest", case, FOR_EVER].map(Into::into).to_vec(),
            ..agent_api::ExecRequest::default()
        })?;
        std::thread::sleep(Duration::from_secs(2));
        let vmm = i32::try_from(machine.vmm.pid()).ok().and_then(Pid::from_raw);
        kill_process(vmm.context("a process")?, Signal::KILL)?;
        machine.vmm.wait_status(Duration::from_secs(20))?;
        Ok(())
    }
}

pub(super) fn tell(what: &str) {
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    {
        println!("{what}");
    }
}

/// Starts a guest with the host's own kernel, whose agent answers.
fn start(host: &Host, builder: Builder<'_>) -> Result<(Vm, Agent)> {
    let initramfs = host.scratch.join("initramfs");
    fs::write(
        &initramfs,
        foreign::initramfs(&host.binaries.join("basalt-agent"), &[])?,
    )?;
    let builder = builder
        .kernel(&kernel()?)?
        .initramfs(File::open(&initramfs)?)?
        .memory(ByteSize::mib(256))
        .pinned();
    let machine = builder.start()?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    Ok((machine, agent))
}

/// Waits until a guest's kernel has found by itself what is in a slot, or that nothing is.
fn is_found(agent: &mut Agent, case: &str, slot: u8, there: bool) -> Result<()> {
    let path = format!("/sys/bus/pci/devices/0000:00:{slot:02x}.0");
    let began = Instant::now();
    wait_for(
        &format!("the guest to find by ACPI that {path} is there ({there})"),
        || Ok(vm::guest_half(agent, case, &[EXISTS, &path])?.trim() == there.to_string()),
    )?;
    tell(&format!("found by ACPI ({there}) within {:?}", began.elapsed()));
    Ok(())
}

/// Gives a guest that runs the disk, and has its agent look for it; the case's own hand on it.
pub(super) fn attach(machine: &mut Vm, agent: &mut Agent, disk: &Given) -> Result<Hand> {
    let (hand, slot) = put_on_bus(machine, disk)?;
    let added = agent.pci(&PciRequest::Add {
        address: format!("0000:00:{slot:02x}.0"),
        wait_ms: 20_000,
    })?;
    let names = added.context("the guest does not have the disk")?.names;
    ensure!(!names.is_empty(), "the guest's driver has found no disk");
    Ok(hand)
}

/// The disk on a guest's bus, and where; the case's own hand on it.
fn put_on_bus(machine: &mut Vm, disk: &Given) -> Result<(Hand, u8)> {
    let mut files = Vec::new();
    let (config, hand) = function_files::open(disk.address(), |fd| {
        files.push(fd);
        FdRef(u32::try_from(files.len() - 1).unwrap_or(u32::MAX))
    })?;
    tell(&format!("the disk is given by {}", hand.way()));
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    machine.vmm.client.attach(DeviceSpec::new("disk", &config)?, &fds)?;
    drop(files);
    let mut slot = None;
    wait_for("the disk to be on the guest's bus", || {
        slot = match &machine.vmm.client.functions()?.functions[..] {
            [function] => match &function.state {
                FunctionState::Present { slot } => Some(*slot),
                FunctionState::Mapping => None,
                other => bail!("the disk is {other:?}"),
            },
            other => bail!("the VM has {other:?}"),
        };
        Ok(slot.is_some())
    })?;
    Ok((hand, slot.context("a place")?))
}

/// How many interrupts this kernel has got, of those whose names contain `name`.
pub(super) fn interrupts(name: &str) -> Result<u64> {
    let text = fs::read_to_string(INTERRUPTS)?;
    let columns = text.lines().next().map_or(0, |first| first.split_whitespace().count());
    let of = text.lines().filter(|line| line.contains(name));
    let counts = of.flat_map(|line| line.split_whitespace().skip(1).take(columns));
    Ok(counts.filter_map(|count| count.parse::<u64>().ok()).sum())
}

/// The lab's NVMe disk while it is the host's.
pub(super) struct Disk {
    function: String,
    path: PathBuf,
}

impl Disk {
    pub(super) fn find() -> Result<Self> {
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

    /// Its name on the host's bus.
    pub(super) fn address(&self) -> &str {
        &self.function
    }

    fn open(&self) -> Result<File> {
        direct(&self.path)
    }

    /// Leaves what the guest is to find, and nothing where it is to write.
    pub(super) fn prepare(&self) -> Result<()> {
        self.fill(FOR_GUEST, b'h')?;
        self.fill(FOR_HOST, 0)
    }

    /// Looks at what guests have written, and uses it once more.
    pub(super) fn look_back(&self) -> Result<()> {
        self.check(FOR_HOST, b'g').context("what the guest has written")?;
        self.fill(FOR_GUEST, b'a')?;
        self.check(FOR_GUEST, b'a')
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
    pub(super) fn give(self) -> Result<Given> {
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
pub(super) struct Given {
    name: String,
}

impl Given {
    /// Its name on the host's bus.
    pub(super) fn address(&self) -> &str {
        &self.name
    }

    pub(super) fn take_back(self) -> Result<Disk> {
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

/// In the guest: loads the disk and checks it, and says how many requests and interrupts that were. Or does what a word says.
pub(super) fn guest(arguments: &[String]) -> Result<()> {
    if let [EXISTS, path] = &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        tell(&Path::new(path).exists().to_string());
        return Ok(());
    }
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

/// What is written from at once, and read to.
const PIECE: usize = 1 << 20;

/// What a guest keeps for its kernel and this program.
const KEPT: u64 = 64 << 20;

/// In the guest: writes to the disk from nearly all of its memory, and reads back to other memory; says how many bytes that was.
pub(super) fn prove(_: &[String]) -> Result<()> {
    let disk = Disk::find()?;
    let file = direct(&disk.path)?;
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let free = meminfo.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let free = free.and_then(|free| free.split_whitespace().next());
    let free: u64 = free.context("no MemFree")?.parse::<u64>()? << 10;
    let pieces = usize::try_from(free.saturating_sub(KEPT))? / PIECE;
    let mut memory = vec![0_u8; (pieces + 2) * PIECE];
    let start = memory.as_ptr().align_offset(PIECE);
    let (back, pieces) = memory[start..].split_at_mut(PIECE);
    let mut proved = 0;
    // Far from each other, and in all of them something else than before.
    let salt = u64::from(std::process::id());
    for (number, piece) in (salt..).zip(pieces.chunks_exact_mut(PIECE)) {
        for (word, bytes) in (0_u64..).zip(piece.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word).to_le_bytes());
        }
        let at = LOAD + number % 128 * PIECE as u64;
        file.write_all_at(piece, at).context("writing to the disk")?;
        file.read_exact_at(back, at).context("reading from the disk")?;
        ensure!(piece == back, "what was read back differs at {at:#x}");
        // The next reads elsewhere.
        back.fill(0);
        proved += PIECE;
    }
    tell(&proved.to_string());
    Ok(())
}
