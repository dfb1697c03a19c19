//! Writes an initramfs: a cpio archive in the "newc" format, the same bytes for the same input.
//!
//! Format: Linux `Documentation/driver-api/early-userspace/buffer-format.rst`. A kernel reads several archives one after
//! another, if each begins at a multiple of four bytes; every archive written here ends at one. Knows the format, not
//! what goes into a guest or into the lab; never reads or writes a file.

/// What opens each entry.
const MAGIC: &str = "070701";
/// The entry that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// File type bits of a mode (stat(2)).
const S_IFDIR: u32 = 0o040_000;
const S_IFCHR: u32 = 0o020_000;
const S_IFREG: u32 = 0o100_000;

/// Why something cannot be in an archive.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The kernel unpacks names relative to its root.
    #[error("{0:?} is no path inside an archive: give a relative one without a zero byte")]
    Path(String),
    /// Sizes have eight hexadecimal digits.
    #[error("{path} has {size} bytes, an archive's entry holds 4294967295 at most")]
    TooLarge {
        /// The entry.
        path: String,
        /// Its size, or that of its name.
        size: usize,
    },
}

/// An archive that is being written, in memory. Parents must be added before what they hold.
#[derive(Debug, Default)]
pub struct Archive {
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
    /// Adds a directory; `mode` is its permissions.
    ///
    /// # Errors
    /// The path is not one inside an archive.
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<(), Error> {
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

    /// Adds a regular file.
    ///
    /// # Errors
    /// The path is not one inside an archive, or the file has 4 GiB or more.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> Result<(), Error> {
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

    /// Adds a character device.
    ///
    /// # Errors
    /// The path is not one inside an archive.
    pub fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> Result<(), Error> {
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

    /// Ends the archive and gives its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        let end = Entry {
            mode: 0,
            links: 1,
            device: (0, 0),
            data: &[],
        };
        // Its name and the zero byte after it; no data.
        self.put(0, TRAILER, (11, 0), &end);
        self.bytes
    }

    fn add(&mut self, path: &str, entry: &Entry<'_>) -> Result<(), Error> {
        if path.is_empty() || path.starts_with('/') || path.contains('\0') {
            return Err(Error::Path(path.to_owned()));
        }
        let digits = |size: usize| {
            u32::try_from(size).map_err(|_| Error::TooLarge {
                path: path.to_owned(),
                size,
            })
        };
        let sizes = (digits(path.len() + 1)?, digits(entry.data.len())?);
        self.entries += 1;
        self.put(self.entries, path, sizes, entry);
        Ok(())
    }

    /// Writes an entry; `sizes` are those of the name, with its zero byte, and of the data.
    fn put(&mut self, inode: u32, path: &str, sizes: (u32, u32), entry: &Entry<'_>) {
        let (owner, group, time, check) = (0, 0, 0, 0);
        let (own_major, own_minor) = (0, 0);
        // In the format's order.
        let fields = [
            inode,
            entry.mode,
            owner,
            group,
            entry.links,
            time,
            sizes.1,
            own_major,
            own_minor,
            entry.device.0,
            entry.device.1,
            sizes.0,
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

    fn sample() -> Vec<u8> {
        let mut archive = Archive::default();
        archive.directory("lab", 0o700).unwrap();
        archive.file("lab/token", 0o600, b"secret!").unwrap();
        archive.file("init", 0o755, &[7; 1000]).unwrap();
        archive.finish()
    }

    #[test]
    fn the_header_is_the_formats() {
        let mut archive = Archive::default();
        archive.file("init", 0o755, b"abcde").unwrap();
        let bytes = archive.finish();
        let header = "070701\
            00000001000081ED0000000000000000000000010000000000000005\
            0000000000000000000000000000000000000005\
            00000000";
        assert_eq!(std::str::from_utf8(&bytes[..110]).unwrap(), header);
        assert_eq!(&bytes[110..124], b"init\0\0abcde\0\0\0");
    }

    #[test]
    fn everything_is_aligned_and_the_trailer_ends_it() {
        let bytes = sample();
        assert_eq!(bytes.len() % 4, 0);
        // c_mode of the first entry, then its name right after the header.
        assert_eq!(&bytes[14..22], b"000041C0");
        assert_eq!(&bytes[110..114], b"lab\0");
        // 110 + 4 is 114, so the next header stands at 116.
        assert_eq!(&bytes[116..122], b"070701");
        let tail = &bytes[bytes.len() - 124..];
        assert_eq!(&tail[..6], b"070701");
        assert!(tail[110..].starts_with(b"TRAILER!!!\0"));
    }

    #[test]
    fn a_path_must_be_relative() {
        for path in ["/dev", "", "a\0b"] {
            assert_eq!(
                Archive::default().directory(path, 0o755),
                Err(Error::Path(path.to_owned()))
            );
        }
    }

    #[test]
    fn the_same_input_gives_the_same_bytes() {
        assert_eq!(sample(), sample());
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

    /// Another reader of the format agrees, where one is installed.
    #[test]
    fn cpio_lists_what_was_packed() {
        let mut archive = Archive::default();
        archive.directory("dev", 0o755).unwrap();
        archive.character_device("dev/console", 0o600, 5, 1).unwrap();
        let bytes = archive.finish();
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
