//! Writes a cpio archive in the "newc" format: the part of the initramfs that changes with every start. Knows files and
//! directories only, which is all that part holds.
//!
//! Format: Linux `Documentation/driver-api/early-userspace/buffer-format.rst`. A kernel reads several archives one after
//! another, if each begins at a multiple of four bytes.

use anyhow::{Context, Result};

const MAGIC: &str = "070701";
/// Ends an archive.
const TRAILER: &str = "TRAILER!!!";
const S_IFREG: u32 = 0o100_000;
const S_IFDIR: u32 = 0o040_000;

/// An archive that is being written, in memory.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    next_inode: u32,
}

impl Archive {
    /// Adds a directory. Its parents must have been added before it.
    pub(crate) fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        self.entry(path, S_IFDIR | mode, 2, &[])
    }

    /// Adds a regular file.
    pub(crate) fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.entry(path, S_IFREG | mode, 1, data)
    }

    /// Ends the archive and gives its bytes.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>> {
        self.entry(TRAILER, 0, 1, &[])?;
        Ok(self.bytes)
    }

    fn entry(&mut self, path: &str, mode: u32, links: u32, data: &[u8]) -> Result<()> {
        let size = u32::try_from(data.len()).with_context(|| format!("{path} is too large for an initramfs"))?;
        let name = u32::try_from(path.len() + 1).with_context(|| format!("the name {path} is too long"))?;
        self.next_inode += 1;
        // c_ino, c_mode, c_uid, c_gid, c_nlink, c_mtime, c_filesize, c_maj, c_min, c_rmaj, c_rmin, c_namesize, c_chksum
        let fields = [self.next_inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name, 0];
        self.bytes.extend(MAGIC.as_bytes());
        for field in fields {
            self.bytes.extend(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(data);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        let mut archive = Archive::default();
        archive.directory("lab", 0o700).unwrap();
        archive.file("lab/token", 0o600, b"secret!").unwrap();
        archive.file("init", 0o755, &[7; 1000]).unwrap();
        archive.finish().unwrap()
    }

    #[test]
    fn headers_are_110_bytes_and_everything_is_aligned() {
        let bytes = sample();
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[..6], b"070701");
        // c_mode of the first entry, then its name right after the header.
        assert_eq!(&bytes[14..22], b"000041C0");
        assert_eq!(&bytes[110..114], b"lab\0");
        // 110 + 4 is 114, so the next header stands at 116.
        assert_eq!(&bytes[116..122], b"070701");
        let tail = &bytes[bytes.len() - 124..];
        assert_eq!(&tail[..6], b"070701");
        assert!(tail[110..].starts_with(b"TRAILER!!!\0"));
    }

    /// Reads an archive as the kernel does: name, mode and data of each entry.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            let field = |at: usize| {
                let digits = std::str::from_utf8(&bytes[6 + 8 * at..14 + 8 * at]).unwrap();
                u32::from_str_radix(digits, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = std::str::from_utf8(&bytes[110..110 + name_size - 1])
                .unwrap()
                .to_owned();
            let data = (110 + name_size).next_multiple_of(4);
            if name == TRAILER {
                assert_eq!(bytes.len(), data);
                return entries;
            }
            entries.push((name, mode, bytes[data..data + size].to_vec()));
            bytes = &bytes[(data + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn what_was_written_is_read_back() {
        let expected = [
            ("lab".to_owned(), 0o040_700, Vec::new()),
            ("lab/token".to_owned(), 0o100_600, b"secret!".to_vec()),
            ("init".to_owned(), 0o100_755, vec![7; 1000]),
        ];
        assert_eq!(read(&sample()), expected);
    }
}
