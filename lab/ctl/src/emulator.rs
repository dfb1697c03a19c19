//! The emulated machine: an AMD host with SVM and x2APIC, as QEMU's command line. Does not know what boots on it.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use lab_init::contract::{AGENT_PORT, EXT4_DISK, MODULES_DISK, ROOT_DISK, XFS_DISK};

use crate::parts::Parts;
use crate::state::State;
use crate::tsc;

/// What every processor of a lab has and has not: SVM with nested paging for kvm-amd, x2APIC because our virtual machines use it. No vgif: our
/// guests do not use it, and the emulated host died more often with it, of a fault that the emulator's recipe mends now.
const CPU: &str = "+svm,+npt,+x2apic,-vgif";

/// The processor, if nobody says which.
pub(crate) const CPU_MODEL: &str = "EPYC-Rome";

/// `quiet`: the console is a serial port, where a character costs an exit. `mitigations=off`: nothing hostile runs in the
/// lab, and flushes are dear to emulate. `panic=-1` with `-no-reboot` ends the emulator when the kernel panics. `no_timer_check`: a timer whose
/// thread of the emulator waits for a processor is late, and Linux panics of one that it counts no ticks of.
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off no_timer_check";

/// Whose IOMMU the host has, which remaps interrupts as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Iommu {
    /// VT-d; an AMD processor does not mind
    Intel,
    /// AMD-Vi; needs the newer kernel
    Amd,
}

impl Iommu {
    /// As QEMU is told of it.
    fn device(self) -> &'static str {
        match self {
            Self::Intel => "intel-iommu,intremap=on,eim=on",
            // Without DMA remapping (QEMU 11) it would translate interrupts alone; `xtsup` is what x2APIC needs.
            Self::Amd => "amd-iommu,intremap=on,xtsup=on,dma-remap=on",
        }
    }

    /// As the kernel is. `iommu=pt`: of the host's own drivers nobody is kept from memory, so that the lab pays for the IOMMU only where
    /// something is given to a guest.
    fn words(self) -> &'static str {
        match self {
            Self::Intel => "intel_iommu=on iommu=pt",
            Self::Amd => "iommu=pt",
        }
    }
}

/// The data disks: name of the file, serial number, size. Sparse: they take what is written to them.
pub(crate) const DATA_DISKS: [(&str, &str, u64); 2] =
    [("xfs.raw", XFS_DISK, 32 << 30), ("ext4.raw", EXT4_DISK, 8 << 30)];

/// A disk that is a PCI function of its own kind, for cases that give one to a guest: name of the file, serial number, size. The lab's
/// init has nothing to do with it, and what is on it is whoever's who used it last.
const NVME_DISK: (&str, &str, u64) = ("nvme.raw", "basalt-nvme", 256 << 20);

/// It has no shadow doorbells (NVM Express 1.4, 5.7): Linux's driver before 6.8 writes them before it has told the disk of them, once the disk was
/// reset under load. The disk misses requests then, and the guest waits for each for 30 s (docs/lab.md, traps).
const NVME_OPTIONS: &str = "dbcs=off";

/// A network function without MSI and MSI-X, which interrupts by its pin alone, and reaches memory as the IOMMU lets it (`iommu_platform`), for
/// cases that give it to a guest. Its network has a router that answers echoes, and leads nowhere. The lab's init leaves it alone.
/// Beside it one that has MSI-X, on such a network of its own.
const PIN_FUNCTIONS: [&str; 8] = [
    "-netdev",
    "user,id=pin,net=10.0.9.0/24,restrict=on",
    "-device",
    "virtio-net-pci,netdev=pin,mac=52:54:00:00:03:01,romfile=,addr=0xb,disable-legacy=on,iommu_platform=on,vectors=0",
    "-netdev",
    "user,id=messages,net=10.0.9.0/24,restrict=on",
    "-device",
    "virtio-net-pci,netdev=messages,mac=52:54:00:00:03:02,romfile=,addr=0xd,disable-legacy=on,iommu_platform=on",
];

/// QEMU's educational device, whose DMA a program in a guest can use without a driver. By itself it reaches 28 bits of addresses.
const EDUCATIONAL_DEVICE: [&str; 2] = ["-device", "edu,addr=0xc,dma_mask=0xffffffffff"];

/// More functions to give to guests, where the host's kernel has drivers of them: a network device with virtual functions, whose packets its
/// own switch passes on, and two that are on one wire, of which one reaches memory as the IOMMU lets it only (`iommu_platform`).
const FUNCTIONS: [&str; 12] = [
    "-netdev",
    "hubport,hubid=1,id=igb",
    "-device",
    "igb,netdev=igb,mac=52:54:00:00:01:01,romfile=,addr=0x8",
    "-netdev",
    "hubport,hubid=2,id=wire0",
    "-device",
    "virtio-net-pci,netdev=wire0,mac=52:54:00:00:02:01,romfile=,addr=0x9,disable-legacy=on,iommu_platform=on",
    "-netdev",
    "hubport,hubid=2,id=wire1",
    "-device",
    "virtio-net-pci,netdev=wire1,mac=52:54:00:00:02:02,romfile=,addr=0xa",
];

/// `unsafe` does not wait for the real disk: what is written survives the emulator's death, in the page cache of this machine, and the
/// disks are only a cache. An error is reported to the lab; the default would stop it.
const DISK_OPTIONS: &str = "cache=unsafe,discard=unmap,detect-zeroes=unmap,werror=report,rerror=report";

/// What a person may choose.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// Processors.
    pub(crate) cpus: u32,
    /// Memory in MiB.
    pub(crate) memory_mib: u64,
    /// Its processor, as QEMU calls it, maybe with features to add (`,+NAME`) and to leave out (`,-NAME`).
    pub(crate) cpu_model: String,
    /// Its IOMMU.
    pub(crate) iommu: Iommu,
    /// More words for the kernel's command line.
    pub(crate) kernel_args: String,
}

/// Memory of a lab, in MiB, if nobody says how much.
const MEMORY_MIB: u64 = 6144;

/// Memory that the lab's Linux leaves to guests whose memory is not translated, as cases need it: two of the least that boots, above 4 GiB,
/// and two pieces from where processors start. The cases read it off the command line.
const RESERVED_WORDS: &str = "memmap=288M$0x100000000 memmap=64K$0x20000";
/// So much memory a lab must have for that, in MiB: 2048 of it are below 4 GiB (q35 with more than 2815).
const RESERVED_FROM_MIB: u64 = 3072;

fn reserved_words(memory_mib: u64) -> &'static str {
    if memory_mib < RESERVED_FROM_MIB {
        return "";
    }
    RESERVED_WORDS
}

/// How much memory the lab gets: what is wished, if this machine has that much.
pub(crate) fn memory(wished: Option<u64>) -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let here = total_mib(&info).context("/proc/meminfo has no MemTotal")?;
    match wished {
        Some(wished) if wished > here => {
            bail!("the lab cannot have {wished} MiB of memory: this machine has {here} MiB; ask for less with --memory")
        }
        Some(wished) => Ok(wished),
        None => Ok(MEMORY_MIB.min(here / 2)),
    }
}

fn total_mib(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? / 1024)
}

/// Makes the data disks that are missing.
pub(crate) fn make_disks(state: &State) -> Result<()> {
    for (name, _, size) in DATA_DISKS.into_iter().chain([NVME_DISK]) {
        let path = state.disk(name);
        let make = || {
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            // Never shortened: a longer one was made by another version, and holds a file system of that size.
            if file.metadata()?.len() < size {
                file.set_len(size)
            } else {
                Ok(())
            }
        };
        make().with_context(|| format!("cannot make the data disk {}", path.display()))?;
    }
    Ok(())
}

/// A port of the loopback interface that is free at this moment.
pub(crate) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no TCP port of 127.0.0.1 is free")?;
    Ok(listener.local_addr()?.port())
}

/// Starts the emulator as a daemon; returns when it has checked its arguments and taken the port.
pub(crate) fn start(state: &State, parts: &Parts, machine: &Machine, port: u16) -> Result<()> {
    let log = state.emulator_log();
    let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let status = command(state, parts, machine, port)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .status()
        .with_context(|| format!("cannot run the emulator {}", parts.emulator.display()))?;
    if status.success() {
        return Ok(());
    }
    let said = fs::read_to_string(&log).unwrap_or_default();
    bail!(
        "{}",
        reason(&said).unwrap_or_else(|| format!("the emulator gave no reason ({status})"))
    );
}

/// What the emulator complained of: its last line that is no warning.
fn reason(log: &str) -> Option<String> {
    let line = log
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty() && !line.contains("warning:"))?;
    Some(match line.split_once("qemu-system-x86_64: ") {
        Some((_, message)) if message.contains("Could not set up host forwarding rule") => {
            format!("a TCP port is taken by another program: {message}")
        }
        Some((_, message)) => format!("the emulator says: {message}"),
        None => format!("the emulator says: {line}"),
    })
}

fn command(state: &State, parts: &Parts, machine: &Machine, port: u16) -> Command {
    let mut command = Command::new(&parts.emulator);
    command.args([
        "-name",
        "basalt-lab",
        "-daemonize",
        "-no-reboot",
        "-nodefaults",
        "-display",
        "none",
    ]);
    command.args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu"]);
    command.arg(format!("{},{CPU}", machine.cpu_model));
    // Before any device that is behind it.
    command.args(["-device", machine.iommu.device()]);
    command.args([
        "-smp",
        &machine.cpus.to_string(),
        "-m",
        &format!("{}M", machine.memory_mib),
    ]);
    command.arg("-pidfile").arg(state.pid_file());
    command
        .arg("-qmp")
        .arg(with_path("unix:", &state.qmp(), ",server=on,wait=off"));
    command.arg("-serial").arg(with_path("file:", &state.console(), ""));
    command
        .arg("-kernel")
        .arg(&parts.kernel)
        .arg("-initrd")
        .arg(state.initramfs());
    let words = [
        KERNEL_COMMAND_LINE,
        machine.iommu.words(),
        reserved_words(machine.memory_mib),
        &time_words(),
        &machine.kernel_args,
    ]
    .join(" ");
    command.args(["-append", words.trim_end()]);
    disk(&mut command, &parts.root, ROOT_DISK, "readonly=on");
    if let Some(modules) = &parts.modules {
        disk(&mut command, modules, MODULES_DISK, "readonly=on");
    }
    for (name, serial, _) in DATA_DISKS {
        disk(&mut command, &state.disk(name), serial, DISK_OPTIONS);
    }
    let (name, serial, _) = NVME_DISK;
    drive(&mut command, &state.disk(name), serial, DISK_OPTIONS);
    command
        .arg("-device")
        .arg(format!("nvme,drive={serial},serial={serial},{NVME_OPTIONS}"));
    command.args(PIN_FUNCTIONS);
    command.args(EDUCATIONAL_DEVICE);
    command.args([
        "-netdev",
        &format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:{AGENT_PORT}"),
    ]);
    command.args(["-device", "virtio-net-pci,netdev=net,romfile="]);
    if parts.modules.is_some() {
        command.args(FUNCTIONS);
    }
    command
}

/// The emulated TSC is this machine's own. Where Linux trusts that one, the lab may too, which it does not do by itself
/// because the emulator does not show `constant_tsc`: reading the time is then an instruction, not an access to an HPET.
///
/// How fast it counts is said, too: Linux would find that out by an emulated timer, and on a busy machine finds a rate that is wrong by as much as a
/// factor of four, by which all of the lab's clocks go.
fn time_words() -> String {
    const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    match fs::read_to_string(CLOCK) {
        Ok(clock) if clock.trim() == "tsc" => {
            let rate = tsc::kilohertz().map(|rate| format!(" tsc_early_khz={rate}"));
            format!("tsc=reliable{}", rate.unwrap_or_default())
        }
        // Another clock, or none that we may see.
        _ => String::new(),
    }
}

fn drive(command: &mut Command, file: &Path, serial: &str, options: &str) {
    let drive = format!("if=none,id={serial},format=raw,{options},file=");
    command.arg("-drive").arg(with_path(&drive, file, ""));
}

/// Doorbells are handled by the thread that rings, and by no event of the main loop's: one has been lost, and its queue stood still
/// (docs/lab.md).
fn disk(command: &mut Command, file: &Path, serial: &str, options: &str) {
    drive(command, file, serial, options);
    command
        .arg("-device")
        .arg(format!("virtio-blk-pci,drive={serial},serial={serial},ioeventfd=off"));
}

/// An option with a path in it, where a comma is written twice (QEMU's documentation, "-drive").
fn with_path(before: &str, path: &Path, after: &str) -> std::ffi::OsString {
    let mut option = std::ffi::OsString::from(before);
    option.push(path.to_string_lossy().replace(',', ",,"));
    option.push(after);
    option
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulators_reason_is_its_last_complaint() {
        let log = "/x/qemu-system-x86_64: warning: TCG doesn't support requested feature: CPUID.80000001H:ECX\n\
                   /x/qemu-system-x86_64: -netdev user: Could not set up host forwarding rule 'tcp:127.0.0.1:22-:1024'\n";
        let said = reason(log).unwrap();
        assert!(
            said.starts_with("a TCP port is taken") && said.contains("127.0.0.1:22"),
            "{said}"
        );
        assert_eq!(reason("qemu-system-x86_64: warning: nothing\n"), None);
        assert_eq!(reason(""), None);
        assert_eq!(
            reason("qemu-system-x86_64: cannot set up guest memory 'pc.ram': Cannot allocate memory\n").unwrap(),
            "the emulator says: cannot set up guest memory 'pc.ram': Cannot allocate memory"
        );
    }

    #[test]
    fn a_lab_gets_no_more_memory_than_there_is() {
        assert_eq!(total_mib("MemTotal:       24682100 kB\nMemFree: 1 kB\n"), Some(24103));
        assert_eq!(total_mib("MemFree: 1 kB\n"), None);
        let error = memory(Some(1 << 30)).unwrap_err().to_string();
        assert!(error.contains("cannot have 1073741824 MiB"), "{error}");
        assert_eq!(memory(Some(1)).unwrap(), 1);
        assert!(memory(None).unwrap() <= MEMORY_MIB);
    }

    #[test]
    fn memory_is_reserved_where_there_is_some_above_4_gib() {
        assert!(reserved_words(MEMORY_MIB).contains("memmap=288M$0x100000000"));
        assert_eq!(reserved_words(RESERVED_FROM_MIB - 1), "");
    }

    #[test]
    fn commas_in_paths_do_not_end_an_option() {
        assert_eq!(with_path("file:", Path::new("/a,b/c"), ",x=y"), "file:/a,,b/c,x=y");
    }

    #[test]
    fn a_free_port_can_be_taken() {
        let port = free_port().unwrap();
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
