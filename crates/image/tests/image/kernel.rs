//! What the kernel shows of an image, mounted in a mount namespace of one thread: when the thread ends, however it
//! ends, nothing of it is left.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;

use crate::{Listing, Seen};

/// Runs `inside` in a thread with its own mounts.
pub(crate) fn with_own_mounts<T: Send>(inside: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let body = || {
            #[expect(
                deprecated,
                reason = "a mount namespace shares no memory or descriptors, so it is safe to unshare"
            )]
            rustix::thread::unshare(UnshareFlags::NEWNS).map_err(|error| format!("no mount namespace: {error}"))?;
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            mount_change("/", private).map_err(|error| format!("no private mounts: {error}"))?;
            Ok(inside())
        };
        scope
            .spawn(body)
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The listing, or why this machine cannot mount the image.
pub(crate) fn list(image: &Path) -> Result<Listing, String> {
    with_own_mounts(|| {
        let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        if !filesystems.contains("erofs")
            && !Command::new("modprobe")
                .arg("erofs")
                .status()
                .is_ok_and(|s| s.success())
        {
            return Err("this kernel has no erofs".to_owned());
        }
        let point = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "erofs", "-o", "loop,ro"])
            .arg(image)
            .arg(point.path());
        let output = mount
            .output()
            .map_err(|error| format!("mount cannot be run: {error}"))?;
        if !output.status.success() {
            let loops = Path::new("/dev/loop-control").exists();
            assert!(
                !loops,
                "the kernel refused the image: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            return Err("there are no loop devices".to_owned());
        }
        let mut listing = Listing::new();
        walk(point.path(), Vec::new(), &mut listing);
        // A process that another test is starting holds our open files until its exec.
        let gone = || Command::new("umount").arg(point.path()).status().unwrap().success();
        let mut left = 900;
        while !gone() {
            left -= 1;
            assert!(left > 0, "the image cannot be unmounted");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(listing)
    })?
}

fn walk(path: &Path, name: Vec<u8>, listing: &mut Listing) {
    let meta = fs::symlink_metadata(path).unwrap();
    let device = || {
        let rdev = meta.rdev();
        format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev)).into_bytes()
    };
    let (kind, data) = match meta.mode() >> 12 {
        0o10 => ('f', fs::read(path).unwrap()),
        0o04 => ('d', Vec::new()),
        0o12 => ('l', fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec()),
        0o02 => ('c', device()),
        0o06 => ('b', device()),
        0o01 => ('p', Vec::new()),
        other => panic!("type {other:o} of {}", path.display()),
    };
    if kind == 'd' {
        for entry in fs::read_dir(path).unwrap() {
            let entry = entry.unwrap().file_name();
            let below = if name.is_empty() {
                Vec::new()
            } else {
                [&name[..], b"/"].concat()
            };
            walk(&path.join(&entry), [&below, entry.as_bytes()].concat(), listing);
        }
    }
    let seen = Seen {
        kind,
        mode: u16::try_from(meta.mode() & 0o7777).unwrap(),
        uid: meta.uid(),
        gid: meta.gid(),
        mtime: (meta.mtime(), u32::try_from(meta.mtime_nsec()).unwrap()),
        nlink: u32::try_from(meta.nlink()).unwrap(),
        xattrs: xattrs(path),
        data,
    };
    listing.insert(name, seen);
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0u8; 65536];
    let len = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..len].split(|&byte| byte == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0u8; 65536];
            let len = rustix::fs::lgetxattr(path, CString::new(name).unwrap(), &mut value[..]).unwrap();
            (name.to_vec(), value[..len].to_vec())
        })
        .collect()
}
