//! Finds what a lab is made of: the emulator and the host system in the cache, our programs beside this one. Says where
//! each comes from if it is missing. Does not run any of it.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use sha2::{Digest, Sha256};

/// Directory below `target/` where cargo puts static programs.
const MUSL_RELEASE: &str = "../x86_64-unknown-linux-musl/release";

/// Which kernel a lab's host runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HostKernel {
    /// That of the root image's release, Linux 6.1
    Default,
    /// Linux 6.12 with iommufd, and more functions that a guest can be given
    Newer,
}

/// Which QEMU emulates a lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Emulator {
    /// That of the host's kernel: Debian's build of QEMU 10, or of 11 for the newer kernel
    Default,
    /// QEMU 10 compiled with a patch that forgets fewer translations; for the default kernel
    Fast,
}

/// The emulator's file.
const QEMU: &str = "qemu-system-x86_64";

/// The parts of a lab that are files on this machine.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    /// QEMU.
    pub(crate) emulator: PathBuf,
    /// Kernel of the lab.
    pub(crate) kernel: PathBuf,
    /// First part of the initramfs: modules.
    pub(crate) base: PathBuf,
    /// Root image.
    pub(crate) root: PathBuf,
    /// Image of the kernel's modules, where the root image has another's.
    pub(crate) modules: Option<PathBuf>,
    /// Our init.
    pub(crate) init: PathBuf,
}

/// Where things are kept, from the environment.
pub(crate) fn cache() -> Result<PathBuf> {
    from_environment("BASALT_CACHE", ".cache/basalt")
}

/// The lab's own directory.
pub(crate) fn state() -> Result<PathBuf> {
    from_environment("BASALT_LAB_STATE", ".cache/basalt/lab")
}

fn from_environment(variable: &str, below_home: &str) -> Result<PathBuf> {
    if let Some(value) = env::var_os(variable).filter(|value| !value.is_empty()) {
        return std::path::absolute(&value).with_context(|| format!("{variable} is no path"));
    }
    match env::var_os("HOME").filter(|home| !home.is_empty()) {
        Some(home) => Ok(Path::new(&home).join(below_home)),
        None => bail!("neither {variable} nor HOME is set; set {variable} to a directory"),
    }
}

impl Parts {
    /// Finds everything in this cache and beside this program.
    pub(crate) fn find(cache: &Path, kernel: HostKernel, emulator: Emulator) -> Result<Self> {
        // Resolved, so that a lab keeps what it was started with when `current` moves on.
        let made = |name: &str, by: &str, file: &str| {
            let link = cache.join(name).join("current");
            let path = link.canonicalize().unwrap_or(link).join(file);
            if !path.is_file() {
                bail!("the lab's {name} is missing ({} does not exist); {by}", path.display());
            }
            Ok(path)
        };
        let host = |file| made("lab-host", "`make run` makes it, by lab/host/recipe.sh", file);
        let newer = |file| {
            const BY: &str = "`cargo xtask long --only newer-kernel` makes it, by lab/newer-kernel/recipe.sh";
            made("newer-kernel", BY, file)
        };
        let emulator = match (kernel, emulator) {
            (HostKernel::Default, Emulator::Default) => {
                made("emulator", "`make run` makes it, by lab/emulator/recipe.sh", QEMU)?
            }
            (HostKernel::Default, Emulator::Fast) => {
                const BY: &str = "`cargo xtask long --only fast-emulator` makes it, by lab/fast-emulator/recipe.sh";
                made("fast-emulator", BY, QEMU)?
            }
            (HostKernel::Newer, Emulator::Fast) => {
                bail!("the fast emulator has no IOMMU for the newer kernel: leave --emulator or --kernel out")
            }
            (HostKernel::Newer, Emulator::Default) => {
                const BY: &str = "`cargo xtask long --only newer-emulator` makes it, by lab/newer-emulator/recipe.sh";
                made("newer-emulator", BY, QEMU)?
            }
        };
        let (root, init) = (host("rootfs.erofs")?, program("basalt-lab-init")?);
        let (kernel, base, modules) = match kernel {
            HostKernel::Default => (host("vmlinuz")?, host("base.cpio")?, None),
            HostKernel::Newer => (newer("vmlinuz")?, newer("base.cpio")?, Some(newer("modules.erofs")?)),
        };
        Ok(Self {
            emulator,
            kernel,
            base,
            root,
            modules,
            init,
        })
    }

    /// SHA-256 over the recipes' results, which are named by the hash of what made them, and over our init's contents.
    pub(crate) fn fingerprint(&self) -> Result<String> {
        let mut sum = Sha256::new();
        for path in [&self.emulator, &self.root].into_iter().chain(&self.modules) {
            sum.update(path.as_os_str().as_encoded_bytes());
            sum.update([0]);
        }
        sum.update(fs::read(&self.init).with_context(|| format!("cannot read {}", self.init.display()))?);
        Ok(hex::encode(sum.finalize()))
    }
}

/// One of our programs as a static file: beside this program or in cargo's directory for static ones, whichever is newer.
pub(crate) fn find_program(name: &str) -> Result<Option<PathBuf>> {
    let here = own_directory()?;
    newest_static(&[here.join(name), here.join(MUSL_RELEASE).join(name)])
}

/// The same, of a program that there must be.
fn program(name: &str) -> Result<PathBuf> {
    find_program(name)?.with_context(|| {
        format!(
            "there is no static {name} beside this program; build it with \
             `cargo build --release --target x86_64-unknown-linux-musl --bin {name}`"
        )
    })
}

/// The directory with the guest's kernel and initramfs.
pub(crate) fn assets() -> Result<PathBuf> {
    match env::var_os("BASALT_ASSETS").filter(|value| !value.is_empty()) {
        Some(value) => Ok(PathBuf::from(value)),
        None => Ok(own_directory()?.join("basalt-assets")),
    }
}

fn own_directory() -> Result<PathBuf> {
    let own = env::current_exe().context("cannot tell where this program is")?;
    own.parent()
        .map(Path::to_owned)
        .context("this program is in no directory")
}

fn newest_static(candidates: &[PathBuf]) -> Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for path in candidates {
        if path.is_file() && is_static(path)? {
            found.push((fs::metadata(path)?.modified()?, path));
        }
    }
    Ok(found.into_iter().max().map(|(_, path)| path.clone()))
}

/// Whether a program needs no loader: an ELF file without a `PT_INTERP` header. The lab has glibc, but a guest does not,
/// and what runs in one must run in the other.
fn is_static(path: &Path) -> Result<bool> {
    const PT_INTERP: u32 = 3;
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut header = [0; 64];
    // Too short for an ELF header: no program.
    if file.read_exact_at(&mut header, 0).is_err() || !header.starts_with(b"\x7fELF\x02\x01") {
        return Ok(false);
    }
    // Elf64_Ehdr: e_phoff at 32, e_phentsize at 54, e_phnum at 56 (ELF-64 object file format, figure 3).
    let offset = u64::from_le_bytes(field(&header, 32)?);
    let size = u64::from(u16::from_le_bytes(field(&header, 54)?));
    let count = u64::from(u16::from_le_bytes(field(&header, 56)?));
    for index in 0..count {
        let mut kind = [0; 4];
        let at = index
            .checked_mul(size)
            .and_then(|skip| offset.checked_add(skip))
            .context("no ELF file")?;
        file.read_exact_at(&mut kind, at)
            .with_context(|| format!("{} is cut short", path.display()))?;
        if u32::from_le_bytes(kind) == PT_INTERP {
            return Ok(false);
        }
    }
    Ok(true)
}

fn field<const N: usize>(header: &[u8], at: usize) -> Result<[u8; N]> {
    Ok(header
        .get(at..at + N)
        .context("the ELF header is too short")?
        .try_into()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(kinds: &[u32]) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(64, 0);
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = u8::try_from(kinds.len()).unwrap();
        for kind in kinds {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 52]);
        }
        bytes
    }

    #[test]
    fn static_programs_are_told_from_dynamic_ones() {
        let path = std::env::temp_dir().join(format!("basalt-lab-elf-{}", std::process::id()));
        let cases: [(Vec<u8>, bool); 5] = [
            (elf(&[1, 1, 7]), true),
            (elf(&[6, 3, 1]), false),
            (b"#!/bin/sh\n".to_vec(), false),
            (Vec::new(), false),
            (vec![0; 100], false),
        ];
        for (bytes, expected) in cases {
            fs::write(&path, &bytes).unwrap();
            assert_eq!(is_static(&path).unwrap(), expected);
        }
        fs::write(&path, &elf(&[1, 1])[..70]).unwrap();
        assert!(is_static(&path).unwrap_err().to_string().ends_with("is cut short"));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_is_missing_is_named_with_where_it_comes_from() {
        let sentence = |kernel, emulator| {
            let found = Parts::find(Path::new("/nonexistent"), kernel, emulator);
            found.unwrap_err().to_string()
        };
        for (kernel, emulator, missing, made_by) in [
            (HostKernel::Default, Emulator::Default, "emulator", "make run"),
            (
                HostKernel::Default,
                Emulator::Fast,
                "fast-emulator",
                "cargo xtask long --only fast-emulator",
            ),
            (
                HostKernel::Newer,
                Emulator::Default,
                "newer-emulator",
                "cargo xtask long --only newer-emulator",
            ),
        ] {
            let error = sentence(kernel, emulator);
            let path = format!("/nonexistent/{missing}/current/qemu-system-x86_64");
            assert!(error.contains(&path), "{error}");
            assert!(
                error.contains(made_by) && error.contains(&format!("lab/{missing}/recipe.sh")),
                "{error}"
            );
        }
        let error = sentence(HostKernel::Newer, Emulator::Fast);
        assert!(error.contains("leave --emulator or --kernel out"), "{error}");
    }
}
