//! Writes an initramfs: a cpio archive in the "newc" format (Linux, Documentation/driver-api/early-userspace/
//! buffer-format.rst), the same bytes for the same input.
//!
//! Knows the format, not what goes into the guest; that is `steps::guest`.

use anyhow::{Context as _, Result, bail};

/// "newc": 14 fields as 8 hexadecimal digits.
const MAGIC: &str = "070701";
/// The entry that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// File type bits of a mode (stat(2)).
const S_IFDIR: u32 = 0o040_000;
const S_IFCHR: u32 = 0o020_000;
const S_IFREG: u32 = 0o100_000;

/// An archive being written. Parents must be added before what they hold.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

/// What differs between kinds of entries.
struct Entry<'a> {
    mode: u32,
    links: u32,
    device: (u32, u32),
    data: &'a [u8],
}

impl Archive {
    /// A directory; `mode` is its permissions.
    pub(crate) fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        self.add(
            path,
            &Entry {
                mode: S_IFDIR | mode,
                links: 2,
                device: (0, 0),
                data: &[],
            },
        )
    }

    /// A regular file.
    pub(crate) fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.add(
            path,
            &Entry {
                mode: S_IFREG | mode,
                links: 1,
                device: (0, 0),
                data,
            },
        )
    }

    /// A character device.
    pub(crate) fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> Result<()> {
        self.add(
            path,
            &Entry {
                mode: S_IFCHR | mode,
                links: 1,
                device: (major, minor),
                data: &[],
            },
        )
    }

    /// The whole archive.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>> {
        self.put(
            0,
            TRAILER,
            &Entry {
                mode: 0,
                links: 1,
                device: (0, 0),
                data: &[],
            },
        )?;
        Ok(self.bytes)
    }

    fn add(&mut self, path: &str, entry: &Entry<'_>) -> Result<()> {
        if path.is_empty() || path.starts_with('/') || path.contains('\0') {
            bail!("{path:?} is no path inside an archive");
        }
        self.entries += 1;
        self.put(self.entries, path, entry)
    }

    fn put(&mut self, inode: u32, path: &str, entry: &Entry<'_>) -> Result<()> {
        let size = u32::try_from(entry.data.len()).with_context(|| format!("{path} is larger than cpio can hold"))?;
        let name_size = u32::try_from(path.len() + 1)?;
        let (owner, group, time, check) = (0, 0, 0, 0);
        let (device_major, device_minor) = (0, 0);
        let fields = [
            inode,
            entry.mode,
            owner,
            group,
            entry.links,
            time,
            size,
            device_major,
            device_minor,
            entry.device.0,
            entry.device.1,
            name_size,
            check,
        ];
        self.bytes.extend(MAGIC.bytes());
        for field in fields {
            self.bytes.extend(format!("{field:08X}").bytes());
        }
        self.bytes.extend(path.bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend(entry.data);
        self.align();
        Ok(())
    }

    /// Names and data end on multiples of four.
    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn the_header_is_the_formats() {
        let mut archive = Archive::default();
        archive.file("init", 0o755, b"abcde").unwrap();
        let bytes = archive.finish().unwrap();
        let header = "070701\
            00000001000081ED0000000000000000000000010000000000000005\
            0000000000000000000000000000000000000005\
            00000000";
        assert_eq!(std::str::from_utf8(&bytes[..110]).unwrap(), header);
        assert_eq!(&bytes[110..124], b"init\0\0abcde\0\0\0");
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn a_path_must_be_relative() {
        assert!(Archive::default().directory("/dev", 0o755).is_err());
        assert!(Archive::default().directory("", 0o755).is_err());
    }

    /// Another reader of the format agrees, where one is installed.
    #[test]
    fn cpio_lists_what_was_packed() {
        let mut archive = Archive::default();
        archive.directory("dev", 0o755).unwrap();
        archive.character_device("dev/console", 0o600, 5, 1).unwrap();
        let bytes = archive.finish().unwrap();
        let Ok(mut child) = Command::new("cpio")
            .arg("-tv")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
        else {
            // The header's test stands for itself where there is no cpio.
            return;
        };
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        for wanted in ["drwxr-xr-x", "crw-------", "5,   1"] {
            assert!(text.contains(wanted), "{text}");
        }
    }
}
