//! CPUs, memory, huge pages, disk space, reflinks: how much of what there is. Does not know what it is for.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use base::ByteSize;

use crate::check::Check;

/// Below this, `doctor` warns about memory: the least that a few sandboxes and a build of an image need.
const LITTLE_MEMORY: ByteSize = ByteSize::gib(1);

/// Below this, `doctor` warns about the disk: a language's image with its layers unpacked.
const LITTLE_DISK: ByteSize = ByteSize::gib(4);

/// What /proc/meminfo says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemInfo {
    /// All memory.
    pub total: ByteSize,
    /// What could be had without swapping.
    pub available: ByteSize,
    /// What is set aside in huge pages, of all sizes, whether anybody has them or not; part of `total`.
    pub huge: ByteSize,
}

impl MemInfo {
    /// Reads it.
    ///
    /// # Errors
    /// /proc is not mounted or not Linux's.
    pub fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        Self::parse(&text).ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal or MemAvailable"))
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Self {
            total: field(text, "MemTotal")?,
            available: field(text, "MemAvailable")?,
            // A kernel without hugetlbfs has no such line.
            huge: field(text, "Hugetlb").unwrap_or_default(),
        })
    }
}

fn field(text: &str, name: &str) -> Option<ByteSize> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let number = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ByteSize::kib(number))
}

/// CPUs that this process may run on.
pub fn online_cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

pub(crate) fn cpus() -> Check {
    let count = online_cpus();
    Check::ok("cpus", format!("{count} CPU{}", if count == 1 { "" } else { "s" }))
}

pub(crate) fn memory() -> Check {
    match MemInfo::read() {
        Ok(MemInfo { total, available, .. }) => {
            let found = format!("{available} of {total} available");
            if available < LITTLE_MEMORY {
                Check::warn(
                    "memory",
                    found,
                    "give sandboxes little with --memory, or end other programs",
                )
            } else {
                Check::ok("memory", found)
            }
        }
        Err(error) => Check::fail("memory", format!("unknown: {error}"), "mount /proc"),
    }
}

pub(crate) fn thp() -> Check {
    const NAME: &str = "transparent-huge-pages";
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    match fs::read_to_string(path).ok().as_deref().and_then(chosen) {
        Some(mode @ ("always" | "madvise")) => Check::ok(NAME, mode),
        Some(mode) => Check::warn(NAME, mode, format!("echo madvise > {path}, for faster guest memory")),
        None => Check::warn(
            NAME,
            "not offered by this kernel",
            "use a kernel with TRANSPARENT_HUGEPAGE",
        ),
    }
}

/// The word in brackets of `always [madvise] never`.
pub(crate) fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

pub(crate) fn huge_pages() -> Check {
    const NAME: &str = "huge-pages";
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let count = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|l| l.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    match (count("HugePages_Total"), count("HugePages_Free")) {
        (0, _) => Check::ok(NAME, "none reserved; none is needed"),
        (total, free) => Check::ok(NAME, format!("{free} of {total} free")),
    }
}

/// The nearest directory above `path`, or itself, that exists.
fn existing(path: &Path) -> PathBuf {
    path.ancestors()
        .find(|p| p.is_dir())
        .map_or_else(|| PathBuf::from("/"), Path::to_path_buf)
}

pub(crate) fn disk(state: &Path) -> Check {
    const NAME: &str = "disk-space";
    let place = existing(state);
    match rustix::fs::statvfs(&place) {
        Ok(s) => {
            let free = ByteSize(s.f_bavail.saturating_mul(s.f_frsize));
            let found = format!("{free} free for {}", state.display());
            if free < LITTLE_DISK {
                let next = format!("free some space there, or set BASALT_STATE; images need about {LITTLE_DISK}");
                Check::warn(NAME, found, next)
            } else {
                Check::ok(NAME, found)
            }
        }
        Err(error) => Check::fail(
            NAME,
            format!("{}: {error}", place.display()),
            "set BASALT_STATE to a directory",
        ),
    }
}

pub(crate) fn reflink(state: &Path) -> Check {
    const NAME: &str = "reflink";
    let place = existing(state);
    match try_reflink(&place) {
        Ok(true) => Check::ok(NAME, format!("files under {} can share blocks", place.display())),
        Ok(false) => Check::warn(
            NAME,
            format!(
                "files under {} cannot share blocks: copies of disks take space and time",
                place.display()
            ),
            "put the state directory on XFS or btrfs",
        ),
        Err(error) => Check::warn(
            NAME,
            format!("{} cannot be written to: {error}", place.display()),
            "run as its owner, or set BASALT_STATE to a directory of yours",
        ),
    }
}

/// Clones one block between two files without names, so that nothing is left behind.
fn try_reflink(directory: &Path) -> io::Result<bool> {
    use rustix::fs::{CWD, Mode, OFlags};
    let unnamed = || -> rustix::io::Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, directory, flags, Mode::RUSR | Mode::WUSR).map(File::from)
    };
    let (from, to) = match (unnamed(), unnamed()) {
        (Ok(from), Ok(to)) => (from, to),
        // Overlay and network file systems without O_TMPFILE have no reflink either.
        (Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR), _) => return Ok(false),
        (Err(e), _) | (_, Err(e)) => return Err(e.into()),
    };
    rustix::io::write(&from, &[1; 4096])?;
    Ok(rustix::fs::ioctl_ficlone(&to, &from).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn meminfo_is_read_in_kib() {
        let text = "MemTotal:       16 kB\nMemFree:  3 kB\nMemAvailable:    8 kB\n";
        let read = |huge| MemInfo {
            total: ByteSize(16_384),
            available: ByteSize(8192),
            huge: ByteSize(huge),
        };
        assert_eq!(MemInfo::parse(text), Some(read(0)));
        assert_eq!(MemInfo::parse(&format!("{text}Hugetlb:  4 kB\n")), Some(read(4096)));
        assert_eq!(MemInfo::parse("MemTotal: 16 kB\n"), None);
        assert_eq!(MemInfo::parse("MemTotal: many kB\nMemAvailable: 8 kB\n"), None);
        let real = MemInfo::read().unwrap();
        assert!(
            real.available <= real.total && real.total > ByteSize::mib(64),
            "{real:?}"
        );
    }

    #[test]
    fn the_bracketed_mode_is_the_chosen_one() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("always"), None);
    }

    #[test]
    fn a_state_directory_that_does_not_exist_is_judged_by_its_parent() {
        let missing = std::env::temp_dir().join("basalt-no-such").join("deeper");
        assert_eq!(existing(&missing), std::env::temp_dir());
        assert_ne!(disk(&missing).status, Status::Fail);
        assert!(!missing.exists());
    }
}
