//! Takes away a directory in which things may be mounted: these first, as what lies in another file system (a `/dev` of the host's) is not the
//! directory's. Does not know whose it is.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::mount::{UnmountFlags, unmount};

/// Mount points of this process, one a line (proc_pid_mountinfo(5)).
const MOUNTS: &str = "/proc/self/mountinfo";

/// Unmounts what is mounted at or below it, and removes it. One that is not there is gone already.
///
/// # Errors
/// Something below is in use, and then nothing is removed.
pub(crate) fn remove(directory: &Path) -> Result<()> {
    for place in below(&fs::read(MOUNTS)?, directory).iter().rev() {
        unmount(place, UnmountFlags::NOFOLLOW).with_context(|| format!("cannot unmount {}", place.display()))?;
    }
    let left = below(&fs::read(MOUNTS)?, directory);
    ensure!(left.is_empty(), "{left:?} are still mounted");
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}

/// Mount points at or below a directory, in the order in which they were mounted: the fifth word of each line.
fn below(mounts: &[u8], directory: &Path) -> Vec<PathBuf> {
    let lines = mounts.split(|byte| *byte == b'\n');
    let places = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4));
    let places = places.map(|place| PathBuf::from(OsString::from_vec(unescape(place))));
    places.filter(|place| place.starts_with(directory)).collect()
}

/// Blanks, tabs, line ends and backslashes are a backslash and three octal digits there.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut rest = text;
    while let [first, others @ ..] = rest {
        let digits = others.get(..3).filter(|_| *first == b'\\');
        let code = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(code.unwrap_or(*first));
        rest = others.get(if code.is_some() { 3 } else { 0 }..).unwrap_or_default();
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_below_is_found_and_not_what_is_beside() {
        let mounts = b"22 1 0:20 / / rw - overlay overlay rw\n\
            40 22 7:0 / /mnt/basalt-bench-1/root/lower ro - erofs /dev/loop0 ro\n\
            41 22 0:40 / /mnt/basalt-bench-12/root rw - tmpfs none rw\n\
            42 40 0:5 / /mnt/basalt-bench-1/root/with\\040blank rw - devtmpfs none rw\n";
        assert_eq!(
            below(mounts, Path::new("/mnt/basalt-bench-1")),
            ["/mnt/basalt-bench-1/root/lower", "/mnt/basalt-bench-1/root/with blank"].map(PathBuf::from)
        );
        assert_eq!(unescape(br"a\134040\x\04"), br"a\040\x\04");
    }

    #[test]
    fn a_directory_goes_with_what_is_in_it_and_one_that_is_gone_is_no_error() {
        let directory = std::env::temp_dir().join(format!("bench-scratch-{}", std::process::id()));
        fs::create_dir_all(directory.join("root/lower")).unwrap();
        remove(&directory).unwrap();
        assert!(!directory.exists());
        remove(&directory).unwrap();
    }
}
