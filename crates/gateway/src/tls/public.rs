//! An authority's certificate where everybody may read it, for programs that add it to those that they trust; and files that are replaced as
//! a whole. Knows no key.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::TlsError;

/// The certificate's file.
pub const CERTIFICATE: &str = "ca.pem";

/// Writes it if it is not there as it should be; whether it was not.
pub(super) fn publish(directory: &Path, certificate: &str) -> Result<bool, TlsError> {
    write(directory, CERTIFICATE, certificate.as_bytes())
}

/// Writes a file for everybody if it is not there as it should be; whether it was not.
pub(super) fn write(directory: &Path, name: &str, bytes: &[u8]) -> Result<bool, TlsError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| TlsError::File {
            what: "write",
            path,
            source,
        }
    };
    fs::create_dir_all(directory).map_err(failed(directory))?;
    let path = directory.join(name);
    if fs::read(&path).is_ok_and(|there| there == bytes) {
        return Ok(false);
    }
    replace_file(&path, bytes, 0o644).map_err(failed(&path))?;
    Ok(true)
}

/// Writes a file that is there whole or as it was, also after a power failure. Of several who write it at once one is the last.
///
/// # Errors
/// The host refuses.
pub fn replace_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{:016x}.new", u64::from_ne_bytes(random)));
    let new = Path::new(&name);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(new)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(new, path));
    if let Err(error) = written {
        // What was the matter with it counts.
        drop(fs::remove_file(new));
        return Err(error);
    }
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_may_write_the_same_file_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca.pem");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..20 {
                        replace_file(path, &[b'0' + writer; 1000], 0o644).unwrap();
                    }
                });
            }
        });
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() == 1000 && bytes.iter().all(|byte| *byte == bytes[0]));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
