//! What the CLI needs beside itself to start a guest: the guest's kernel, its initramfs and the VMM.
//!
//! Knows what the initramfs holds (what `basalt-agent` as PID 1 expects before it has mounted anything), and not how the
//! agent works.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use cpio::Archive;

use super::KERNEL;
use super::build::publish;
use crate::context::Context;
use crate::runner::{Report, Step, Task};

/// What must be there before the agent runs; it makes every other directory by itself.
const DIRECTORIES: &[&str] = &["dev", "proc", "sys"];

/// The guest's image without its kernel stays below this (issue A1).
const INITRAMFS_LIMIT: usize = 16_000_000;

/// The step.
pub(crate) fn assets() -> Step {
    Step::new("assets", put)
        .hint("`basalt-agent` and the kernel recipe's vmlinux must exist; the steps before make them")
}

fn put(context: &Context, task: &mut Task) -> Result<Report> {
    let assets = context.assets();
    fs::create_dir_all(&assets)?;
    let kernel = KERNEL.path(context)?.join("vmlinux");
    publish(&kernel, &assets.join("vmlinux"))?;
    publish(&context.release().join("basalt-vmm"), &assets.join("basalt-vmm"))?;
    let agent = context.release().join("basalt-agent");
    let agent = fs::read(&agent).with_context(|| format!("cannot read {}", agent.display()))?;
    let packed = initramfs(&agent)?;
    if packed.len() > INITRAMFS_LIMIT {
        bail!(
            "the initramfs has {} bytes, more than the limit of {INITRAMFS_LIMIT}; make the agent smaller",
            packed.len()
        );
    }
    let fresh = assets.join("initramfs.new");
    fs::write(&fresh, &packed)?;
    publish(&fresh, &assets.join("initramfs.cpio"))?;
    fs::remove_file(&fresh)?;
    let size = |path: &Path| fs::metadata(path).map(|meta| meta.len());
    let detail = format!(
        "kernel {} kB, initramfs {} kB",
        size(&kernel)? / 1000,
        packed.len() / 1000
    );
    task.say(&detail)?;
    Ok(Report {
        detail,
        ..Report::default()
    })
}

/// The archive: the agent as `/init`, and before it the console, which the kernel opens for PID 1.
fn initramfs(agent: &[u8]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in DIRECTORIES {
        archive.directory(directory, 0o755)?;
    }
    // Linux, Documentation/admin-guide/devices.txt: 5:1 is the system console, 1:3 null.
    archive.character_device("dev/console", 0o600, 5, 1)?;
    archive.character_device("dev/null", 0o666, 1, 3)?;
    archive.file("init", 0o755, agent)?;
    Ok(archive.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_agent_gives_the_same_bytes() {
        let packed = initramfs(b"agent").unwrap();
        assert_eq!(packed, initramfs(b"agent").unwrap());
        assert_ne!(packed, initramfs(b"another").unwrap());
    }
}
