//! Debian packages that the other steps need, installed in one go before they start.
//!
//! Asks dpkg first, so that a machine that has them is not touched. Recipes may install more by themselves; what most
//! of them need stands here, because one installation is quicker than many that wait for each other.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::recipe::apt_config;
use crate::runner::{Plan, Report, Step, Task};

/// Package and reason.
const PACKAGES: &[(&str, &str)] = &[
    ("build-essential", "the linker that rustc calls, and the guest kernel"),
    ("musl-tools", "C parts of static programs: SQLite and TLS in basaltd"),
    (
        "e2fsprogs",
        "mkfs.ext4 makes sandboxes' writable disks; e2fsck and debugfs in tests",
    ),
    ("bc", "the guest kernel's build"),
    ("bison", "the guest kernel's build"),
    ("flex", "the guest kernel's build"),
    ("libelf-dev", "the guest kernel's build (objtool)"),
    ("libssl-dev", "the guest kernel's build"),
    ("xz-utils", "unpacking the kernel's source"),
    ("cpio", "the lab's initramfs"),
    ("kmod", "the lab's modules"),
    (
        "sparse",
        "what the kernel module says of its pointers and locks, checked",
    ),
    ("pahole", "BTF of the kernel module, which headers of 6.12 ask for"),
    ("nftables", "the node's network, in tests too"),
    ("mmdebstrap", "images and the lab's root"),
    ("erofs-utils", "fsck.erofs in tests, the lab's root image"),
    ("openssl", "certificates and signatures in tests"),
    ("docker-registry", "the peer of pulls and pushes in tests"),
    ("skopeo", "reads and copies images of ours in tests"),
    ("clinfo", "an OpenCL program that the accelerator client's tests run"),
    (
        "ocl-icd-libopencl1",
        "the loader that accelerators' tests call OpenCL by",
    ),
    (
        "pocl-opencl-icd",
        "OpenCL on this host's CPUs, the back end of the accelerator server's tests",
    ),
    (
        "python3-venv",
        "clients of forwarded accelerators, and of the gateway, in tests",
    ),
];

/// What only a test of the gateway's page needs: 100 MB, which nobody has to wait for who runs a sandbox.
const BROWSER: &[(&str, &str)] = &[("chromium", "the browser in which the gateway's page is tested")];

const LIMIT: Duration = Duration::from_secs(20 * 60);

/// The step `apt-packages`.
pub(crate) fn packages() -> Step {
    step("apt-packages", PACKAGES)
}

/// The step `browser`.
pub(crate) fn browser() -> Step {
    step("browser", BROWSER)
}

fn step(name: &'static str, packages: &'static [(&'static str, &'static str)]) -> Step {
    Step::new(name, move |context, task| install(context, task, packages))
        .plan(move |_| {
            Ok(if missing(packages)?.is_empty() && lists_exist() {
                Plan::Done
            } else {
                Plan::Run
            })
        })
        .hint(
            "installing needs root and a reachable package mirror; `apt-get update` shows which of the two is missing",
        )
}

fn install(context: &Context, task: &mut Task, packages: &[(&'static str, &str)]) -> Result<Report> {
    let missing = missing(packages)?;
    if !rustix::process::geteuid().is_root() {
        bail!(
            "not root; as root, run: apt-get update && apt-get install -y {}",
            missing.join(" ")
        );
    }
    let config = apt_config(context)?;
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .args(args)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("APT_CONFIG", &config);
        command
    };
    // Recipes install packages, too.
    let lock = "DPkg::Lock::Timeout=600";
    let mut with_packages = vec!["install", "-y", "--no-install-recommends", "-o", lock];
    with_packages.extend(&missing);
    // Lists that are there but old name packages that the mirror has replaced: then they are fetched anew, once.
    let first = lists_exist() && task.run_within(&mut apt(&with_packages), LIMIT).is_ok();
    if !first {
        task.check_stop()?;
        task.run_within(&mut apt(&["update"]), LIMIT)?;
        if !missing.is_empty() {
            task.run_within(&mut apt(&with_packages), LIMIT)?;
        }
    }
    Ok(Report {
        detail: missing.join(" "),
        ..Report::default()
    })
}

fn missing(packages: &[(&'static str, &str)]) -> Result<Vec<&'static str>> {
    let status = fs::read_to_string("/var/lib/dpkg/status")
        .context("this is no Debian system (no /var/lib/dpkg/status); the setup steps know Debian 12 only")?;
    Ok(missing_of(packages, &status))
}

fn missing_of(packages: &[(&'static str, &str)], status: &str) -> Vec<&'static str> {
    let installed = installed(status);
    packages
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| !installed.contains(name))
        .collect()
}

/// Names of packages whose third status word is `installed` (deb-control; dpkg(1), "Package states").
fn installed(status: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut name = "";
    for line in status.lines() {
        if let Some(rest) = line.strip_prefix("Package: ") {
            name = rest;
        } else if line
            .strip_prefix("Status: ")
            .is_some_and(|words| words.split(' ').nth(2) == Some("installed"))
        {
            found.insert(name);
        }
    }
    found
}

/// Whether `apt-get update` has ever run here: fresh container images come without lists.
fn lists_exist() -> bool {
    let Ok(entries) = fs::read_dir("/var/lib/apt/lists") else {
        return false;
    };
    entries
        .flatten()
        .any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Package: bc\nStatus: install ok installed\nVersion: 1\n\n\
                          Package: flex\nStatus: deinstall ok config-files\n\n\
                          Package: kmod\nStatus: hold ok installed\n";

    #[test]
    fn removed_packages_are_missing_and_held_ones_are_not() {
        let packages = [("bc", ""), ("flex", ""), ("kmod", ""), ("bison", "")];
        assert_eq!(missing_of(&packages, STATUS), ["flex", "bison"]);
    }
}
