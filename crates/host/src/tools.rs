//! What else is at hand: io_uring, programs, the lab, Basalt's own assets. Looks, and starts nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::check::Check;

/// The name of the check that says whether sandboxes can run in the lab.
pub(crate) const LAB: &str = "lab";

/// What a directory of assets must hold.
pub const ASSETS: [&str; 3] = ["vmlinux", "initramfs.cpio", "basalt-vmm"];

/// What the lab is made of, by the names under which recipes keep them in the cache.
const LAB_PARTS: [&str; 2] = ["emulator", "lab-host"];

pub(crate) fn io_uring() -> Check {
    const NAME: &str = "io-uring";
    // Offered since Linux 5.1; `io_uring_disabled` since 6.6: 0 for all, 1 for a group, 2 for none.
    match fs::read_to_string("/proc/sys/kernel/io_uring_disabled")
        .as_deref()
        .map(str::trim)
    {
        Ok("0") => Check::ok(NAME, "offered"),
        Ok("1") if rustix::process::getuid().is_root() => Check::ok(NAME, "offered to root and one group"),
        Ok(value) => Check::warn(
            NAME,
            format!("switched off (kernel.io_uring_disabled = {value}): disks are served by threads"),
            "sysctl kernel.io_uring_disabled=0",
        ),
        Err(_) if probe_io_uring() => Check::ok(NAME, "offered"),
        Err(_) => Check::warn(
            NAME,
            "not offered by this kernel: disks are served by threads",
            "use Linux 5.11 or later, with CONFIG_IO_URING",
        ),
    }
}

fn probe_io_uring() -> bool {
    // SAFETY: io_uring_setup(0, null) only reads its arguments: no entries is EINVAL, a null pointer EFAULT; ENOSYS
    // and EPERM say that there is none for us.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 0, std::ptr::null_mut::<libc::c_void>()) };
    let errno = std::io::Error::last_os_error().raw_os_error();
    result < 0 && !matches!(errno, Some(libc::ENOSYS | libc::EPERM))
}

pub(crate) fn erofs() -> Check {
    const NAME: &str = "erofs-tools";
    match find_program("fsck.erofs") {
        Some(path) => Check::ok(NAME, path.display().to_string()),
        None => Check::ok(NAME, "not installed; only Basalt's own tests use fsck.erofs"),
    }
}

/// Finds a program as a shell would, also where root's PATH is not ours.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| is_executable(candidate))
}

/// A regular file with an execute bit.
pub fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

pub(crate) fn assets(directory: &Path) -> Check {
    const NAME: &str = "assets";
    let missing: Vec<&str> = ASSETS
        .into_iter()
        .filter(|name| !directory.join(name).is_file())
        .collect();
    if missing.is_empty() {
        Check::ok(NAME, directory.display().to_string())
    } else {
        Check::fail(
            NAME,
            format!("{} lacks {}", directory.display(), missing.join(", ")),
            "run `make run` in Basalt's source tree, or set BASALT_ASSETS to the directory that has them",
        )
    }
}

/// The lab matters only where there is no KVM: there its absence is a failure.
pub(crate) fn lab(program: Option<&Path>, cache: &Path, needed: bool) -> Check {
    let absent = |found: String, next: &str| {
        if needed {
            Check::fail(LAB, found, next)
        } else {
            Check::ok(LAB, format!("{found}; not needed here"))
        }
    };
    let Some(program) = program.filter(|p| is_executable(p)) else {
        return absent(
            "basalt-lab is not installed beside basalt".into(),
            "run `make run` in Basalt's source tree",
        );
    };
    let missing: Vec<&str> = LAB_PARTS
        .into_iter()
        .filter(|part| !cache.join(part).join("current").exists())
        .collect();
    if missing.is_empty() {
        Check::ok(
            LAB,
            format!("{} with its parts in {}", program.display(), cache.display()),
        )
    } else {
        absent(
            format!("{} lacks {}", cache.display(), missing.join(", ")),
            "run `make run` in Basalt's source tree",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn a_missing_lab_fails_only_where_it_is_needed() {
        let nowhere = Path::new("/nonexistent/basalt");
        assert_eq!(lab(None, nowhere, true).status, Status::Fail);
        assert_eq!(lab(None, nowhere, false).status, Status::Ok);
        let lacking = lab(Some(Path::new("/bin/sh")), nowhere, true);
        assert_eq!(lacking.status, Status::Fail);
        assert!(lacking.found.contains("emulator, lab-host"), "{lacking:?}");
    }

    #[test]
    fn missing_assets_are_named() {
        let check = assets(Path::new("/nonexistent/basalt"));
        assert_eq!(check.status, Status::Fail);
        for name in ASSETS {
            assert!(check.found.contains(name), "{check:?}");
        }
        assert!(check.next.is_some());
    }

    #[test]
    fn programs_are_found_as_files_that_can_be_executed() {
        assert!(find_program("sh").is_some_and(|p| p.is_absolute()));
        assert_eq!(find_program("no-such-program-of-basalt"), None);
        assert!(!is_executable(Path::new("/etc/passwd")));
        assert!(!is_executable(Path::new("/")));
    }
}
