//! Files of zeroed memory in huge pages, made ahead for guests whose memory would be zeroed while somebody waits for it, and the process
//! that fills one. A file in small pages is of no use: to map it takes longer than to zero anonymous memory. Does not know who gets a
//! file, nor when there is time to make one.
//!
//! ```text
//!  file()            an unlinked file of a tmpfs of its own, which has no place in the tree, and asks for huge pages
//!  fill_for_parent() another process: idle, in a cgroup of its own, which shared memory is charged to for as long as it is there
//! ```

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use base::{ByteSize, Mapping};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::Error;
use crate::resources::chosen;

/// Which pages tmpfs has (Linux `admin-guide/mm/transhuge.rst`, "Hugepages in tmpfs/shmem").
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// How [`fill_for_parent`] ends, as an exit status.
pub const FILLED: u8 = 0;
/// All of it is there, but not in huge pages.
pub const SMALL_PAGES: u8 = 3;

/// How a filled file is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// In huge pages, all of it.
    Huge,
    /// At least a part in pages of 4 KiB.
    Small,
}

/// An empty file of `size` bytes, on a tmpfs of its own. It is unlinked, and nobody can give it a name.
///
/// # Errors
/// The kernel refuses: mounting needs `CAP_SYS_ADMIN`, and a kernel without transparent huge pages has no such tmpfs.
pub fn file(size: ByteSize) -> Result<OwnedFd, Error> {
    let at = |step| move |cause: Errno| failed(step, cause);
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(at("opening tmpfs (fsopen(2))"))?;
    let options = [
        // No limit: pages that are given back and touched again have to be there, and one that is touched is charged to who does so.
        ("size", "0".to_owned()),
        ("mode", "0700".to_owned()),
        ("huge", "always".to_owned()),
    ];
    for (option, value) in &options {
        fsconfig_set_string(&context, *option, value.as_str()).map_err(at(match *option {
            "huge" => "asking for huge pages (does this kernel have TRANSPARENT_HUGEPAGE?)",
            _ => "setting up tmpfs (fsconfig(2))",
        }))?;
    }
    match fsconfig_set_flag(&context, "noswap") {
        // Before Linux 6.4: what is swapped out before it is used is read again.
        Ok(()) | Err(Errno::INVAL) => (),
        Err(error) => return Err(failed("keeping tmpfs out of swap", error)),
    }
    fsconfig_create(&context).map_err(at("making a tmpfs"))?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(at("mounting a tmpfs"))?;
    // EXCL: open(2), O_TMPFILE: it cannot be linked to.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&mount, ".", flags, Mode::RUSR | Mode::WUSR).map_err(at("making a file on it"))?;
    rustix::fs::ftruncate(&file, size.bytes()).map_err(at("giving the file its size"))?;
    Ok(file)
}

/// Has all of a file's pages there, zeroed. fallocate(2) would not do it: tmpfs zeroes such pages when they are touched.
///
/// # Errors
/// It cannot be mapped, there is no memory left, or /proc does not tell which pages it has.
pub fn fill(file: impl AsFd) -> Result<Pages, Error> {
    let size = rustix::fs::fstat(&file).map_err(|error| failed("looking at the file", error))?;
    let too_large = |_| failed("mapping the file", Errno::FBIG);
    let length = usize::try_from(size.st_size).map_err(too_large)?;
    let mapping = Mapping::<u8>::new(&file, length).map_err(|error| failed("mapping the file", error))?;
    let place = mapping.as_ptr();
    // SAFETY: 1. the range is the mapping's, which lives until the end of this function; 2. the pages of a file that nobody else has are
    // filled with zeroes, and no reference leads there.
    let filled = unsafe { madvise(place.cast(), length, Advice::LinuxPopulateWrite) };
    filled.map_err(|error| failed("filling the file (MADV_POPULATE_WRITE)", error))?;
    let smaps = fs::read_to_string("/proc/self/smaps").map_err(|error| failed("reading /proc/self/smaps", error))?;
    match in_huge_pages(&smaps, place.addr()) == u64::try_from(length).ok() {
        true => Ok(Pages::Huge),
        false => Ok(Pages::Small),
    }
}

/// Bytes of the mapping that begins there which are mapped by huge pages of shared memory (proc_pid_smaps(5), "ShmemPmdMapped").
fn in_huge_pages(smaps: &str, start: usize) -> Option<u64> {
    let first = format!("{start:08x}-");
    let its = smaps.lines().skip_while(|line| !line.starts_with(&first)).skip(1);
    let line = its.map_while(|line| line.split_once(':').filter(|(name, _)| !name.contains(' ')));
    let (_, value) = line.into_iter().find(|(name, _)| *name == "ShmemPmdMapped")?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What a process does that was started to fill the file that is its standard input: it ends with whoever has started it, gives way to
/// all others, and is in `cgroup` before it touches the first page. How it ends: [`FILLED`] or [`SMALL_PAGES`].
///
/// # Errors
/// As [`fill`]; it cannot give way, or be there.
pub fn fill_for_parent(cgroup: Option<&Path>) -> Result<u8, Error> {
    // One that has died before this leaves a process that fills a file and ends.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| failed("asking for its parent's end", error))?;
    become_idle().map_err(|error| failed("giving way to others (SCHED_IDLE)", error))?;
    if let Some(cgroup) = cgroup {
        let procs = cgroup.join("cgroup.procs");
        fs::write(&procs, "0").map_err(|cause| Error::Cgroup {
            operation: "writing",
            path: procs,
            cause,
        })?;
    }
    match fill(io::stdin())? {
        Pages::Huge => Ok(FILLED),
        Pages::Small => Ok(SMALL_PAGES),
    }
}

/// sched(7), SCHED_IDLE. By number, and with the kernel's own parameter (`struct sched_param` of include/uapi/linux/sched/types.h): the C library
/// of a static program has another one, and only a stub of the call.
fn become_idle() -> io::Result<()> {
    let priority: libc::c_int = 0;
    // SAFETY: 1. the parameter lives through the call; 2. the call changes when this thread runs, and no memory.
    let done = unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, &raw const priority) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Why this host's tmpfs has small pages, as far as it tells.
pub fn why_small() -> String {
    match fs::read_to_string(ENABLED).ok().as_deref().and_then(chosen) {
        Some("deny") => format!("{ENABLED} is `deny`, so that no tmpfs has huge pages: echo never > {ENABLED}"),
        Some(_) => "the host has no 2 MiB of memory in one piece left at some place: free some, or write 1 to \
                    /proc/sys/vm/compact_memory"
            .to_owned(),
        None => format!("this kernel has no huge pages for tmpfs ({ENABLED} cannot be read)"),
    }
}

fn failed(step: &'static str, cause: impl Into<io::Error>) -> Error {
    Error::ZeroedMemory {
        step,
        cause: cause.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    const SIZE: ByteSize = ByteSize::mib(4);

    /// A file, where this process may mount and the kernel has such a tmpfs.
    fn file_or_reason() -> Option<OwnedFd> {
        match file(SIZE) {
            Ok(file) => Some(file),
            Err(error) if !rustix::process::geteuid().is_root() => {
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_filled_file_is_zeroes_of_its_size_without_a_name_and_no_more() {
        let Some(file) = file_or_reason() else { return };
        let pages = fill(&file).unwrap();
        let file = File::from(file);
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.len(), metadata.nlink()), (SIZE.bytes(), 0));
        assert_eq!(metadata.blocks() * 512, SIZE.bytes(), "all of it is there");
        let mut found = vec![1; 4 << 20];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.iter().all(|byte| *byte == 0));
        // There is no end of space, which a VMM could not bear.
        assert_eq!(rustix::fs::fstatfs(&file).unwrap().f_blocks, 0);
        let denied = fs::read_to_string(ENABLED).ok().as_deref().and_then(chosen) == Some("deny");
        match denied {
            true => assert_eq!(pages, Pages::Small),
            false => assert_eq!(pages, Pages::Huge),
        }
    }

    #[test]
    fn a_file_without_huge_pages_is_told_from_one_that_has_them() {
        // Of a memory file the kernel's own tmpfs decides, which has none unless somebody asks for them.
        let chose = fs::read_to_string(ENABLED).unwrap_or_default();
        if !matches!(chosen(&chose), Some("never" | "deny" | "advise")) {
            eprintln!("skipped: {ENABLED} is {}", chose.trim());
            return;
        }
        let file = base::memfd::sized("small", SIZE.bytes()).unwrap();
        assert_eq!(fill(&file).unwrap(), Pages::Small);
    }

    #[test]
    fn what_smaps_says_of_a_mapping_is_found() {
        let smaps = "\
7f0000000000-7f0008000000 rw-s 00000000 00:2b 5 /x (deleted)
Size:             131072 kB
ShmemPmdMapped:        0 kB
VmFlags: rd wr sh
7f0010000000-7f0018000000 rw-s 00000000 00:2b 6 /y (deleted)
Size:             131072 kB
ShmemPmdMapped:   131072 kB
7f0020000000-7f0028000000 rw-p 00000000 00:00 0
Size:             131072 kB
7f0030000000-7f0038000000 rw-s 00000000 00:2b 7 /z (deleted)
ShmemPmdMapped:     2048 kB
";
        let found = [0x7f00_0000_0000, 0x7f00_1000_0000, 0x7f00_3000_0000].map(|start| in_huge_pages(smaps, start));
        assert_eq!(found, [Some(0), Some(128 << 20), Some(2 << 20)]);
        assert_eq!(
            in_huge_pages(smaps, 0x7f00_2000_0000),
            None,
            "the next one's is not its own"
        );
        assert_eq!(in_huge_pages(smaps, 0x1000), None);
    }
}
