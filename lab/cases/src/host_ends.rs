//! Ends the host while a guest runs busily on a CPU that it owns: by a reboot without any warning, a panic, or another kernel (kexec). Whoever
//! looks whether it went as it should is outside (`cargo xtask test --only host-ends`): this program does not outlive it. And ends a guest whose
//! CPU hangs, which the host outlives.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use agent_api::ExecRequest;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use reservation::Device;
use rustix::process::{Pid, Signal, kill_process};
use rustix::system::{RebootCommand, reboot};

use crate::Host;
use crate::cases::bare::{self, CPU, Module};
use crate::kernel_log::{complaints, kernel_log};
use crate::vm::{Builder, Vm};

/// How the host ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    /// reboot(2), as by `reboot -f`
    Reboot,
    /// A crash by SysRq, with a reboot a second later
    Panic,
    /// The same kernel once more, without a root
    Kexec,
    /// It does not: the guest's CPU hangs, which somebody outside sees to when this program says `runs`, and tells it by a line
    Hang,
}

/// What it says when the guest's CPU is to hang; that is to answer again not before [`HANGS`] have passed since this program was told that it does.
const RUNS: &str = "runs";
const FROZEN: &str = "frozen";
const HANGS: Duration = Duration::from_secs(25);

/// What basalt.ko gives a CPU before it is lost (`STEP_LIMIT_MS` of kmod/claim.c), and what a busy host takes besides.
const GIVEN: Duration = Duration::from_secs(5);
const BUSY: Duration = Duration::from_secs(15);

/// Whoever sees to the hang tries once more then: a thread of the emulator's that stands still has all others wait for it now and then
/// (docs/bare.md), and what takes so long on the host's clock shows nothing.
const STOOD_STILL: &str = "the host stood still as long as its CPU did";

const LOST: &str = "does not come out of its guest: it is lost until the next boot";

/// The kernel that is booted by kexec, and what it is told: it says who it is, finds no root, and reboots.
const KERNEL: &str = "/boot/vmlinuz";
const WORDS: &std::ffi::CStr = c"console=ttyS0 loglevel=7 panic=-1 root=none";

/// Linux, include/uapi/linux/kexec.h.
const KEXEC_FILE_NO_INITRAMFS: libc::c_ulong = 4;

/// Returns from a hang alone, but for an error.
pub(crate) fn end(host: &Host, way: Way) -> Result<()> {
    if !bare::in_lab()? {
        bail!("only a lab is ended by this");
    }
    // The notifiers' words are to be on the console.
    fs::write("/proc/sys/kernel/printk", "7")?;
    let _module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let all = bare::online()?;
    let reservation = device.reserve(&[CPU])?;
    let mut machine = Builder::new(host)?
        .reservation(std::os::fd::OwnedFd::from(reservation))?
        .start()?;
    let mut agent = machine.agent()?;
    let argv = ["sh", "-c", "while :; do :; done"].map(Into::into).to_vec();
    let request = ExecRequest {
        argv,
        ..ExecRequest::default()
    };
    let _busy = agent.exec(&request)?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(bare::online()? != all, "a guest owns a CPU, and Linux has all");
    rustix::fs::sync();
    match way {
        Way::Hang => return hang(&device, &mut machine),
        Way::Reboot => reboot(RebootCommand::Restart)?,
        Way::Panic => {
            fs::write("/proc/sys/kernel/panic", "1")?;
            File::options()
                .write(true)
                .open("/proc/sysrq-trigger")?
                .write_all(b"c")?;
        }
        Way::Kexec => {
            load_kernel().with_context(|| format!("{KERNEL} cannot be loaded for kexec"))?;
            reboot(RebootCommand::Kexec)?;
        }
    }
    bail!("the host goes on")
}

/// The VMM can be killed although its guest's CPU hears nothing; the CPU is lost, nobody else gets it, and Linux can have it when it is well.
fn hang(device: &Device, machine: &mut Vm) -> Result<()> {
    writeln!(std::io::stdout(), "{RUNS}")?;
    let mut told = String::new();
    std::io::stdin().read_line(&mut told)?;
    ensure!(told.trim() == FROZEN, "nobody had the guest's CPU hang");
    let began = Instant::now();
    let lost = is_lost(device, machine);
    if began.elapsed() >= HANGS {
        lost.context(STOOD_STILL)?;
        bail!(STOOD_STILL);
    }
    lost?;
    // What hung goes on, and Linux is given the CPU by hand.
    let deadline = began + HANGS + BUSY;
    while let Err(error) = bring_online() {
        ensure!(
            Instant::now() < deadline,
            "a CPU that answers again cannot be brought online: {error}"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(writeln!(std::io::stdout(), "online again")?)
}

/// While it hangs.
fn is_lost(device: &Device, machine: &mut Vm) -> Result<()> {
    let mut log = kernel_log()?;
    let vmm = Pid::from_raw(i32::try_from(machine.vmm.pid())?).context("no process")?;
    let killed = Instant::now();
    kill_process(vmm, Signal::KILL)?;
    let status = machine.vmm.wait_status(GIVEN + BUSY);
    status.context("the VMM of a CPU that hangs cannot be killed")?;
    let took = killed.elapsed();
    ensure!(took >= GIVEN, "the VMM was gone after {took:?}: its CPU did not hang");
    let told = complaints(&mut log)?;
    ensure!(
        told.iter().any(|line| line.contains(LOST)),
        "the kernel does not say that the CPU is lost: {told:?}"
    );
    match device.reserve(&[CPU]) {
        Ok(_) => bail!("a CPU that is lost was reserved"),
        Err(error) => writeln!(std::io::stdout(), "lost after {took:?}; {error}")?,
    }
    ensure!(
        bare::run("rmmod", &["basalt"]).is_err(),
        "the module of a CPU that is lost was unloaded"
    );
    ensure!(bring_online().is_err(), "Linux has a CPU that is lost");
    Ok(())
}

/// As an administrator does (Linux, Documentation/core-api/cpu_hotplug.rst).
fn bring_online() -> std::io::Result<()> {
    fs::write(format!("/sys/devices/system/cpu/cpu{CPU}/online"), "1")
}

/// kexec_file_load(2).
#[allow(unsafe_code, reason = "neither the standard library nor rustix has this call")]
fn load_kernel() -> Result<()> {
    let kernel = File::open(KERNEL)?;
    let words = WORDS.to_bytes_with_nul();
    // SAFETY: 1. the descriptor is open until the call has returned; 2. the words are as long as is said, with their zero; 3. the kernel
    // keeps copies of both.
    let result = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            -1,
            words.len(),
            words.as_ptr(),
            KEXEC_FILE_NO_INITRAMFS,
        )
    };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}
