//! Ends the host while a guest runs busily on a CPU that it owns: by a reboot without any warning, a panic, or another kernel (kexec). Whoever
//! looks whether it went as it should is outside (`cargo xtask test --only host-ends`): this program does not outlive it.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::Duration;

use agent_api::ExecRequest;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use reservation::Device;
use rustix::system::{RebootCommand, reboot};

use crate::Host;
use crate::cases::bare::{self, CPU, Module};
use crate::vm::Builder;

/// How the host ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    /// reboot(2), as by `reboot -f`
    Reboot,
    /// A crash by SysRq, with a reboot a second later
    Panic,
    /// The same kernel once more, without a root
    Kexec,
}

/// The kernel that is booted by kexec, and what it is told: it says who it is, finds no root, and reboots.
const KERNEL: &str = "/boot/vmlinuz";
const WORDS: &std::ffi::CStr = c"console=ttyS0 loglevel=7 panic=-1 root=none";

/// Linux, include/uapi/linux/kexec.h.
const KEXEC_FILE_NO_INITRAMFS: libc::c_ulong = 4;

/// Does not return, but for an error.
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
    let machine = Builder::new(host)?
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
