//! Where things are: the checkout, the cache outside of it, and what this machine can do.
//!
//! Read once at the start and shared by all steps. Knows no step.

use std::env;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// The triple of everything that runs in the lab or in a guest: static, so that nothing has to be linked there.
pub(crate) const MUSL: &str = "x86_64-unknown-linux-musl";

/// Paths and facts that every step may need.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    /// The root of the checkout.
    pub(crate) root: PathBuf,
    /// Slow artefacts, by name and content hash; outside the tree, shared by checkouts.
    pub(crate) cache: PathBuf,
    /// Whether sandboxes can run on this machine itself; if not, they run in the lab.
    pub(crate) kvm: bool,
    /// Whether this is a CI run: no cleverness with terminals, and `--locked` everywhere.
    pub(crate) ci: bool,
}

impl Context {
    /// Finds the checkout from the manifest that cargo runs us with.
    pub(crate) fn find() -> Result<Self> {
        let root = match env::var_os("CARGO_MANIFEST_DIR") {
            Some(manifest) => PathBuf::from(manifest).join(".."),
            None => env::current_dir()?,
        };
        let root = root.canonicalize()?;
        if !root.join("layers.toml").exists() {
            bail!(
                "{} is not a Basalt checkout; call this as `cargo xtask` from inside one",
                root.display()
            );
        }
        let cache = match env::var_os("BASALT_CACHE") {
            Some(dir) => PathBuf::from(dir),
            None => {
                let home = env::var_os("HOME").context("neither BASALT_CACHE nor HOME is set; set one of them")?;
                PathBuf::from(home).join(".cache/basalt")
            }
        };
        Ok(Self {
            root,
            cache,
            kvm: kvm_usable(),
            ci: env::var_os("CI").is_some(),
        })
    }

    /// The build directory; always the checkout's own, because README and CLI name `target/release/basalt`.
    pub(crate) fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    /// Where the finished programs are.
    pub(crate) fn release(&self) -> PathBuf {
        self.target().join("release")
    }

    /// What the CLI needs beside itself: guest kernel, initramfs, VMM.
    pub(crate) fn assets(&self) -> PathBuf {
        self.release().join("basalt-assets")
    }

    /// One full log per step.
    pub(crate) fn logs(&self) -> PathBuf {
        self.target().join("setup-logs")
    }

    /// A path for messages: relative to the checkout where it lies inside.
    pub(crate) fn short<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.root).unwrap_or(path)
    }
}

/// Whether `/dev/kvm` is worth using. A KVM without vmx or svm exists (a software-only one) and opens well, but cannot
/// run a guest kernel, so the CPU's flags decide first. `basalt doctor` looks closer; this only chooses setup steps.
fn kvm_usable() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    has_virtualization(&cpuinfo) && OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
}

fn has_virtualization(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| line.split_whitespace().any(|flag| flag == "vmx" || flag == "svm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_decide_about_virtualization() {
        assert!(has_virtualization("flags\t\t: fpu vme svm sse\n"));
        assert!(has_virtualization("flags\t\t: fpu vmx\n"));
        assert!(!has_virtualization("flags\t\t: fpu svm_lock vmxoff\nbugs : vmx\n"));
    }
}
