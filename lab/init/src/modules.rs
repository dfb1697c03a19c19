//! Loads kernel modules with what they need, by the kernel's own `modules.dep`. Knows no module by name.

use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;

/// The modules of the running kernel.
pub(crate) struct Modules {
    directory: PathBuf,
    dependencies: String,
    builtin: String,
}

impl Modules {
    /// Reads the index of the running kernel's modules.
    pub(crate) fn of_running_kernel() -> Result<Self> {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let directory = PathBuf::from("/lib/modules").join(release);
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        Ok(Self {
            dependencies: read("modules.dep")?,
            builtin: read("modules.builtin")?,
            directory,
        })
    }

    /// Loads `name` after everything it depends on; nothing to do if it is built in or loaded already.
    pub(crate) fn load(&self, name: &str) -> Result<()> {
        let Some(paths) = load_order(&self.dependencies, name) else {
            if self.builtin.lines().any(|path| module_name(path) == module_name(name)) {
                return Ok(());
            }
            bail!("the lab's kernel has no module {name}");
        };
        for path in paths {
            let file = self.directory.join(path);
            let file = File::open(&file).with_context(|| format!("cannot open {}", file.display()))?;
            match rustix::system::finit_module(&file, c"", 0) {
                // Two threads may want the same one: the kernel lets the second wait until the first is done.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error).with_context(|| format!("the kernel refuses the module {path}")),
            }
        }
        Ok(())
    }
}

/// The files to load for `name`, in order. A line of modules.dep is `file: dependency dependency ...`, where a
/// dependency stands before those it depends on itself, so that the order of loading is from right to left.
fn load_order<'a>(dependencies: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let wanted = module_name(name);
    let (file, needs) = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(file, _)| module_name(file) == wanted)?;
    let mut order: Vec<&str> = needs.split_whitespace().rev().collect();
    order.push(file);
    Some(order)
}

/// A module's name as the kernel writes it, from a path or from a name with dashes.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/arch/x86/kvm/kvm-amd.ko: kernel/arch/x86/kvm/kvm.ko kernel/virt/lib/irqbypass.ko\n\
                       kernel/virt/lib/irqbypass.ko:\n";

    #[test]
    fn dependencies_come_first() {
        let order = load_order(DEP, "kvm_amd").unwrap();
        assert_eq!(
            order,
            [
                "kernel/virt/lib/irqbypass.ko",
                "kernel/arch/x86/kvm/kvm.ko",
                "kernel/arch/x86/kvm/kvm-amd.ko"
            ]
        );
        assert_eq!(load_order(DEP, "irqbypass").unwrap(), ["kernel/virt/lib/irqbypass.ko"]);
    }

    #[test]
    fn dashes_and_underscores_are_one_name() {
        assert_eq!(load_order(DEP, "kvm-amd"), load_order(DEP, "kvm_amd"));
        assert_eq!(module_name("kernel/fs/xfs/xfs.ko"), "xfs");
        assert_eq!(module_name("kernel/crypto/crc32c_generic.ko.xz"), "crc32c_generic");
    }

    #[test]
    fn a_module_that_does_not_exist_has_no_order() {
        assert_eq!(load_order(DEP, "kvm_intel"), None);
        assert_eq!(load_order("", "xfs"), None);
    }
}
