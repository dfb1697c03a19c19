//! How large an image may be: an image is input from outside, and each of these is something it could be absurd about.

/// Bounds on what an import accepts. [`Limits::default`] leaves room for every image in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Layers of one image. Docker and containerd stop at 127, as overlayfs's mount options do.
    pub layers: u64,
    /// Entries of all layers together.
    pub entries: u64,
    /// Bytes of all layers together, decompressed.
    pub uncompressed: u64,
    /// Bytes of one path or link target: PATH_MAX.
    pub path: u64,
    /// Directories inside one another.
    pub depth: u64,
    /// Bytes of one extended attribute's value: `e_value_size` has 16 bits, Linux's XATTR_SIZE_MAX is one more.
    pub xattr_value: u64,
    /// Bytes of all extended attributes of one file: one of the largest and some; well within `i_xattr_icount`.
    pub xattrs: u64,
    /// Bytes of a PAX header, GNU long name, or JSON document.
    pub document: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            layers: 127,
            entries: 4_000_000,
            uncompressed: 64 << 30,
            path: 4096,
            depth: 1024,
            xattr_value: 65535,
            xattrs: 72 << 10,
            document: 4 << 20,
        }
    }
}

impl Limits {
    /// An error unless `found` is within `limit`.
    pub(crate) fn check(what: impl FnOnce() -> String, found: u64, limit: u64) -> Result<(), crate::Error> {
        if found > limit {
            Err(crate::Error::TooLarge {
                what: what(),
                found,
                limit,
            })
        } else {
            Ok(())
        }
    }
}
