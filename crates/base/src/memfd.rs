//! Anonymous files in memory.

use std::fs::File;
use std::io;

use rustix::fs::{MemfdFlags, SealFlags};

/// Makes an anonymous file of `size` bytes, closed on exec, whose size is sealed: nobody who receives the
/// descriptor can shrink it under a mapping.
///
/// # Errors
/// Those of memfd_create(2), ftruncate(2) and fcntl(2).
pub fn sized(name: &str, size: u64) -> io::Result<File> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, size)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(File::from(fd))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_size_cannot_change() {
        let file = super::sized("test", 4096).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4096);
        assert!(file.set_len(0).is_err());
        assert!(file.set_len(8192).is_err());
    }
}
