//! Finds the lab's disks by their serial numbers, and formats the data disks that are blank. Knows no mount point.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A file system that a data disk gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// XFS with reflinks: clones of disks and images share their blocks.
    Xfs,
    /// ext4: what most hosts have.
    Ext4,
}

impl Format {
    /// Its name, for mount(2).
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Xfs => "xfs",
            Self::Ext4 => "ext4",
        }
    }

    /// The bytes that tell it on a disk, and where they are.
    fn magic(self) -> (u64, &'static [u8]) {
        match self {
            // XFS: sb_magicnum opens the superblock, big-endian.
            Self::Xfs => (0, b"XFSB"),
            // ext4: s_magic 0xEF53, at 0x38 of the superblock, which is at 1024; little-endian.
            Self::Ext4 => (1024 + 0x38, &[0x53, 0xef]),
        }
    }

    fn make(self) -> Command {
        // Formatting writes as little as possible: every byte goes through an emulated disk.
        let (program, options): (_, &[&str]) = match self {
            Self::Xfs => (
                "/usr/sbin/mkfs.xfs",
                &["-q", "-f", "-K", "-m", "reflink=1", "-l", "size=64m"],
            ),
            Self::Ext4 => (
                "/usr/sbin/mkfs.ext4",
                &["-q", "-F", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"],
            ),
        };
        let mut command = Command::new(program);
        command.args(options).env("PATH", crate::PATH);
        command
    }
}

/// What a disk holds, judged by its first blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Nothing: all zero.
    Blank,
    /// The file system asked for.
    Formatted,
    /// Something else.
    Foreign,
}

/// Waits for the disk with this serial number and says its device file.
pub(crate) fn find(serial: &str) -> Result<PathBuf> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(name) = by_serial(Path::new("/sys/block"), serial)? {
            return Ok(Path::new("/dev").join(name));
        }
        if Instant::now() > deadline {
            bail!("the disk {serial} did not appear within 10 seconds");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn by_serial(block: &Path, serial: &str) -> Result<Option<String>> {
    for entry in fs::read_dir(block).with_context(|| format!("cannot read {}", block.display()))? {
        let entry = entry?;
        // Disks that are not virtio-blk have no such file.
        let found = fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
        if found.trim() == serial {
            return Ok(Some(entry.file_name().to_string_lossy().into_owned()));
        }
    }
    Ok(None)
}

/// Judges what is on the disk.
pub(crate) fn inspect(device: &Path, format: Format) -> Result<Content> {
    let mut head = [0; 4096];
    let file = File::open(device).with_context(|| format!("cannot open {}", device.display()))?;
    file.read_exact_at(&mut head, 0)
        .with_context(|| format!("cannot read {}", device.display()))?;
    let (offset, magic) = format.magic();
    let found = head.get(usize::try_from(offset)?..).unwrap_or_default();
    Ok(if found.starts_with(magic) {
        Content::Formatted
    } else if head.iter().all(|byte| *byte == 0) {
        Content::Blank
    } else {
        Content::Foreign
    })
}

/// Makes a new file system on the disk; what was on it is gone.
pub(crate) fn format(device: &Path, format: Format) -> Result<()> {
    let output = format
        .make()
        .arg(device)
        .output()
        .with_context(|| format!("cannot run mkfs.{}", format.name()))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        let reason = reason.lines().next().unwrap_or("it gave no reason");
        bail!("mkfs.{} on {} failed: {reason}", format.name(), device.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str, bytes: &[u8], at: u64) -> PathBuf {
        let path = std::env::temp_dir().join(format!("lab-init-{}-{name}", std::process::id()));
        let file = File::create(&path).unwrap();
        file.set_len(8192).unwrap();
        file.write_all_at(bytes, at).unwrap();
        path
    }

    #[test]
    fn contents_are_told_apart() {
        let cases = [
            ("blank", &b""[..], 0, Content::Blank, Content::Blank),
            ("xfs", b"XFSB", 0, Content::Formatted, Content::Foreign),
            ("ext4", &[0x53, 0xef], 1080, Content::Foreign, Content::Formatted),
            ("other", b"\x7fELF", 0, Content::Foreign, Content::Foreign),
        ];
        for (name, bytes, at, xfs, ext4) in cases {
            let path = disk(name, bytes, at);
            assert_eq!(inspect(&path, Format::Xfs).unwrap(), xfs, "{name}");
            assert_eq!(inspect(&path, Format::Ext4).unwrap(), ext4, "{name}");
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn a_disk_is_found_by_its_serial_number_only() {
        let block = std::env::temp_dir().join(format!("lab-init-{}-block", std::process::id()));
        for (name, serial) in [("vda", "other\n"), ("vdb", "wanted\n"), ("vdc", "wanted-too\n")] {
            fs::create_dir_all(block.join(name)).unwrap();
            fs::write(block.join(name).join("serial"), serial).unwrap();
        }
        fs::create_dir_all(block.join("sr0")).unwrap();
        assert_eq!(by_serial(&block, "wanted").unwrap(), Some("vdb".to_owned()));
        assert_eq!(by_serial(&block, "absent").unwrap(), None);
        fs::remove_dir_all(&block).unwrap();
    }
}
