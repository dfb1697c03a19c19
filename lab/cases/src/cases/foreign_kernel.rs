//! A distribution's own kernel, as its package has it (bzImage), boots unmodified as far as our agent.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use vmm_api::ExitReason;

use crate::vm::Builder;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "foreign-kernel",
    limit: Duration::from_secs(240),
    host,
    guest: None,
};

/// The lab host's own kernel, as its package has it: beside its modules, where they came apart from the root image.
pub(crate) fn kernel() -> Result<PathBuf> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let beside = PathBuf::from("/lib/modules").join(release).join("vmlinuz");
    if beside.exists() {
        return Ok(beside);
    }
    for entry in std::fs::read_dir("/boot")? {
        let path = entry?.path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
        {
            return Ok(path);
        }
    }
    bail!("the lab host has no kernel in /boot")
}

fn host(host: &Host) -> Result<()> {
    let kernel = kernel()?;
    // Its virtio drivers are modules, which our initramfs does not have: the serial port is all it can use.
    let mut machine = Builder::new(host)?
        .kernel(&kernel)?
        .cpus(2)
        .cmdline("console=ttyS0 panic=-1 reboot=t quiet")
        .start()?;
    machine.wait_console("basalt-agent", Duration::from_secs(120))?;
    ensure!(!machine.console()?.contains("Kernel panic"), "{}", machine.console()?);
    let reason = machine.end(Duration::from_secs(60))?;
    ensure!(
        matches!(reason, ExitReason::PowerOff | ExitReason::Reset),
        "it ended because {reason}"
    );
    Ok(())
}
