//! The container's root: the image read-only, a disk or a tmpfs over it, and this process moved into it. Everything that is started
//! afterwards finds it as `/`; the initial root lies hidden below.
//!
//! ```text
//!  /basalt/lower  image, read-only  ┐
//!  /basalt/rw     disk or tmpfs     ┴─► /basalt/root  overlay ─► moved to /
//! ```

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::{DiskName, GuestNetwork, Prepare, RootDisk};
use observe::marks;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_move, unmount};
use rustix::process::{chdir, chroot};

use super::early::ensure_dir;
use super::net;
use crate::{Error, STACK_SIZE, say};

const BASE: &str = "/basalt";
const LOWER: &str = "/basalt/lower";
const WRITABLE: &str = "/basalt/rw";
const ROOT: &str = "/basalt/root";

/// Kernel file systems that move along.
const MOVED: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Nothing is prepared in the background, which each clone of a machine that has just booted would do anew. What is not
/// written of inode tables are holes of a sparse file; ext4(5) has the first, the kernel's `ext4/super.rst` both.
const EXT4_OPTIONS: &CStr = c"noinit_itable,no_prefetch_block_bitmaps";

/// When a file was read is not kept; when one was written over is kept in memory until something else of its inode is written, or
/// somebody syncs (mount(8), `lazytime`): it alone is no reason for a transaction.
const DISK_FLAGS: MountFlags = MountFlags::NOATIME.union(MountFlags::LAZYTIME);

/// How long the disk may take to appear.
const DISK_WAIT: Duration = Duration::from_secs(5);
const DISK_STEP: Duration = Duration::from_millis(5);

/// A root that is put together, and gone when this is dropped.
#[derive(Debug)]
pub(crate) struct Assembled([Mounted; 3]);

/// Puts the root together, aside.
pub(crate) fn assemble(prepare: &Prepare) -> Result<Assembled, Error> {
    for dir in [BASE, LOWER, WRITABLE, ROOT] {
        ensure_dir(dir, 0o755)?;
    }
    // Most of both is waiting for a disk. What is mounted is dropped, and so undone, on every early return.
    let (lower, writable) = thread::scope(|scope| {
        let image = thread::Builder::new()
            .name("image".to_owned())
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, || mount_image(&prepare.root))
            .map_err(Error::system("starting a thread"));
        let writable = mount_writable(prepare);
        let image = image.and_then(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        (image, writable)
    });
    let (lower, writable) = (lower?, writable?);
    let upper = format!("{WRITABLE}/upper");
    let work = format!("{WRITABLE}/work");
    ensure_dir(&upper, 0o755)?;
    ensure_dir(&work, 0o755)?;
    let options = c_string(format!("lowerdir={LOWER},upperdir={upper},workdir={work}"))?;
    let result = mount("overlay", ROOT, "overlay", MountFlags::empty(), options.as_c_str());
    let root = Mounted::new(ROOT, result, || "mounting the overlay".to_owned())?;
    for dir in MOVED {
        ensure_dir(inside(dir), 0o755)?;
    }
    // Dropped in this order where it comes to nothing: what lies on the others first.
    Ok(Assembled([root, writable, lower]))
}

impl Assembled {
    /// Moves this process (all its threads) into it; what holds the writable layer, by a directory of it.
    pub(crate) fn enter(self) -> Result<File, Error> {
        let writable = File::open(WRITABLE).map_err(Error::system(format!("opening {WRITABLE}")))?;
        move_in()?;
        // From here on nothing is undone. The overlay holds both layers; their own places are not reachable any more.
        for mounted in self.0 {
            mounted.keep();
        }
        Ok(writable)
    }
}

fn mount_image(disk: &RootDisk) -> Result<Mounted, Error> {
    let device = wait_for(&disk.disk)?;
    let what = || format!("mounting {} ({}) as the image", device.display(), disk.fs);
    let lower = Mounted::new(LOWER, mount(&device, LOWER, &disk.fs, MountFlags::RDONLY, None), what)?;
    marks::mark("image mounted");
    Ok(lower)
}

fn mount_writable(prepare: &Prepare) -> Result<Mounted, Error> {
    let result = match &prepare.writable {
        // A disk of the sandbox's own: what is written survives the machine.
        Some(disk) => {
            let device = wait_for(&disk.disk)?;
            let options = (disk.fs == "ext4").then_some(EXT4_OPTIONS);
            mount(&device, WRITABLE, &disk.fs, DISK_FLAGS, options)
        }
        None => mount_tmpfs(prepare.overlay_bytes)?,
    };
    let writable = Mounted::new(WRITABLE, result, || "mounting the writable layer".to_owned())?;
    marks::mark("writable layer mounted");
    Ok(writable)
}

fn mount_tmpfs(bytes: Option<u64>) -> Result<rustix::io::Result<()>, Error> {
    let options = c_string(bytes.map_or_else(|| "mode=755".to_owned(), |bytes| format!("mode=755,size={bytes}")))?;
    // No NODEV, no NOSUID: device nodes and setuid programs in the overlay's upper layer must work.
    Ok(mount(
        "tmpfs",
        WRITABLE,
        "tmpfs",
        MountFlags::empty(),
        options.as_c_str(),
    ))
}

/// The kernel file systems first, then the root itself, then this process.
fn move_in() -> Result<(), Error> {
    for dir in MOVED {
        mount_move(dir, inside(dir)).map_err(Error::system(format!("moving {dir} into the root")))?;
    }
    chdir(ROOT).map_err(Error::system("entering the root"))?;
    mount_move(".", "/").map_err(Error::system("moving the root"))?;
    chroot(".").map_err(Error::system("changing the root"))?;
    chdir("/").map_err(Error::system("entering the root"))
}

fn inside(dir: &str) -> PathBuf {
    PathBuf::from(format!("{ROOT}{dir}"))
}

fn c_string(text: String) -> Result<CString, Error> {
    CString::new(text).map_err(|error| Error::Refused(format!("a mount option cannot be used: {error}")))
}

/// A mount that is undone unless it is kept.
#[derive(Debug)]
struct Mounted(Option<&'static str>);

impl Mounted {
    fn new(target: &'static str, result: rustix::io::Result<()>, what: impl FnOnce() -> String) -> Result<Self, Error> {
        result.map_err(|errno| Error::system(what())(errno))?;
        Ok(Self(Some(target)))
    }

    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(target) = self.0
            && let Err(errno) = unmount(target, UnmountFlags::DETACH)
        {
            say(format_args!("{target} stays mounted: {errno}"));
        }
    }
}

/// The disk's device node; waits until it is there.
fn wait_for(disk: &DiskName) -> Result<PathBuf, Error> {
    let end = Instant::now() + DISK_WAIT;
    loop {
        let found = match disk {
            DiskName::Path(path) => Some(PathBuf::from(path)).filter(|path| path.exists()),
            DiskName::Serial(serial) => find_by_serial(Path::new("/sys/block"), serial)?,
        };
        if let Some(path) = found {
            return Ok(path);
        }
        if Instant::now() >= end {
            let name = match disk {
                DiskName::Path(path) => path.clone(),
                DiskName::Serial(serial) => format!("with the serial number {serial:?}"),
            };
            return Err(Error::Refused(format!("no disk {name} appeared within {DISK_WAIT:?}")));
        }
        thread::sleep(DISK_STEP);
    }
}

fn find_by_serial(blocks: &Path, wanted: &str) -> Result<Option<PathBuf>, Error> {
    let entries = fs::read_dir(blocks).map_err(Error::system(format!("reading {}", blocks.display())))?;
    for entry in entries.flatten() {
        // Not every kind of disk has the file.
        if fs::read_to_string(entry.path().join("serial")).is_ok_and(|serial| serial.trim_end() == wanted) {
            return Ok(Some(Path::new("/dev").join(entry.file_name())));
        }
    }
    Ok(None)
}

/// Files that say who this machine is, and directories that programs rely on. `hosts` and `hostname` belong to whoever
/// runs a container, not to its image, and are always written.
pub(crate) fn write_files(root: &Path, hostname: &str, network: Option<&GuestNetwork>) -> Result<(), Error> {
    let etc = root.join("etc");
    ensure_dir(&etc, 0o755)?;
    let own = net::own_address(network);
    let hosts = format!("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{own}\t{hostname}\n");
    replace(&etc.join("hosts"), &hosts)?;
    replace(&etc.join("hostname"), &format!("{hostname}\n"))?;
    let resolv = etc.join("resolv.conf");
    match net::resolv_conf(network) {
        Some(text) => replace(&resolv, &text)?,
        // Follows a link: one that leads nowhere counts as missing.
        None if !resolv.exists() => replace(&resolv, "# the host gives this sandbox no name server\n")?,
        None => {}
    }
    let tmp = root.join("tmp");
    if !tmp.exists() {
        ensure_dir(&tmp, 0o700)?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
        fs::set_permissions(&tmp, mode).map_err(Error::system("setting the mode of /tmp"))?;
    }
    Ok(())
}

/// Writes a file anew; a link is replaced, not followed.
fn replace(path: &Path, content: &str) -> Result<(), Error> {
    let fail = || Error::system(format!("writing {}", path.display()));
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(fail()(error)),
        _ => {}
    }
    fs::write(path, content).map_err(fail())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("basalt-agent-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn files_are_made_in_an_empty_root_and_images_keep_their_name_servers() {
        let dir = Dir::new("files");
        write_files(&dir.0, "box", None).unwrap();
        let read = |name: &str| fs::read_to_string(dir.0.join(name)).unwrap();
        assert!(read("etc/hosts").contains("127.0.0.1\tlocalhost\n") && read("etc/hosts").contains("127.0.1.1\tbox\n"));
        assert_eq!(read("etc/hostname"), "box\n");
        assert!(read("etc/resolv.conf").starts_with('#'));
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(dir.0.join("tmp")).unwrap().permissions());
        assert_eq!(mode & 0o7777, 0o1777);

        fs::write(dir.0.join("etc/resolv.conf"), "nameserver 192.0.2.1\n").unwrap();
        write_files(&dir.0, "other", None).unwrap();
        assert_eq!(read("etc/resolv.conf"), "nameserver 192.0.2.1\n");
        assert_eq!(read("etc/hostname"), "other\n");

        let network = GuestNetwork {
            dns: vec!["192.0.2.2".parse().unwrap()],
            ..GuestNetwork::default()
        };
        write_files(&dir.0, "other", Some(&network)).unwrap();
        assert_eq!(read("etc/resolv.conf"), "nameserver 192.0.2.2\n");
    }

    #[test]
    fn a_link_that_leads_nowhere_is_replaced() {
        let dir = Dir::new("link");
        fs::create_dir(dir.0.join("etc")).unwrap();
        std::os::unix::fs::symlink("/nowhere/at/all", dir.0.join("etc/resolv.conf")).unwrap();
        std::os::unix::fs::symlink("/nowhere/at/all", dir.0.join("etc/hosts")).unwrap();
        write_files(&dir.0, "box", None).unwrap();
        assert!(fs::symlink_metadata(dir.0.join("etc/resolv.conf")).unwrap().is_file());
        assert!(fs::symlink_metadata(dir.0.join("etc/hosts")).unwrap().is_file());
    }

    #[test]
    fn disks_are_found_by_their_serial_number() {
        let dir = Dir::new("serial");
        for (disk, serial) in [("vda", "other\n"), ("vdb", "root")] {
            fs::create_dir(dir.0.join(disk)).unwrap();
            fs::write(dir.0.join(disk).join("serial"), serial).unwrap();
        }
        fs::create_dir(dir.0.join("loop0")).unwrap();
        assert_eq!(find_by_serial(&dir.0, "root").unwrap(), Some("/dev/vdb".into()));
        assert_eq!(find_by_serial(&dir.0, "other").unwrap(), Some("/dev/vda".into()));
        assert_eq!(find_by_serial(&dir.0, "none").unwrap(), None);
    }
}
