//! What the host's kernel says, from some time on. Knows no case.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, ensure};

/// What it would say of what concerns a case.
const WORDS: [&str; 9] = [
    "BUG",
    "WARNING",
    "NMI",
    "rcu",
    "No irq handler",
    "basalt",
    "nobody cared",
    " fault",
    "IO_PAGE_FAULT",
];

/// Whether a line tells of DMA that an IOMMU has not let pass: Intel's driver names an address, AMD's the event (AMD I/O Virtualization
/// Technology Specification 3.08, 2.5.3).
pub(crate) fn is_dma_fault(line: &str) -> bool {
    line.contains("fault addr") || line.contains("IO_PAGE_FAULT")
}

/// What the kernel has said since of what concerns it, at the level of warnings and above.
pub(crate) fn complaints(log: &mut fs::File) -> Result<Vec<String>> {
    said(log, |level, line| {
        level <= 4 && WORDS.iter().any(|word| line.contains(word))
    })
}

/// System calls that have ended a process of ours since, as its filter does not have them (audit, `AUDIT_SECCOMP`).
pub(crate) fn forbidden_calls(log: &mut fs::File) -> Result<Vec<String>> {
    said(log, |_, line| {
        line.contains("audit: type=1326 ") && line.contains("basalt") && line.contains(" sig=31 ")
    })
}

fn said(log: &mut fs::File, concerns: impl Fn(u32, &str) -> bool) -> Result<Vec<String>> {
    let mut all = Vec::new();
    let mut buffer = [0; 8192];
    loop {
        match log.read(&mut buffer) {
            Ok(count) => {
                let line = String::from_utf8_lossy(buffer.get(..count).unwrap_or_default()).into_owned();
                let level: u32 = line.split(',').next().unwrap_or_default().parse().unwrap_or(0);
                // Above 7 it is a program that speaks (kmsg(4)).
                if level <= 7 && concerns(level, &line) {
                    all.push(line);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(all),
            // Overtaken by what was written meanwhile.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => (),
            Err(error) => return Err(error).context("/dev/kmsg"),
        }
    }
}

/// Fails if an IOMMU has kept DMA from memory since.
pub(crate) fn expect_no_dma_fault(log: &mut fs::File) -> Result<()> {
    let said = complaints(log)?;
    let faults: Vec<_> = said.iter().filter(|line| is_dma_fault(line)).collect();
    ensure!(faults.is_empty(), "the host's IOMMU saw {faults:?}");
    Ok(())
}

/// Its log, from now on.
pub(crate) fn kernel_log() -> Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    let mut log = options.read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
    complaints(&mut log)?;
    Ok(log)
}
