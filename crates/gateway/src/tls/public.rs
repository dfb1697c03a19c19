//! What everybody may read of an authority: its certificate alone, for programs that add it to those that they trust, and together with
//! those that this machine trusts, for programs that take one file in place of theirs. Knows no key.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::TlsError;

/// The certificate's file.
pub const CERTIFICATE: &str = "ca.pem";

/// The file of all certificates together.
pub const BUNDLE: &str = "ca-bundle.pem";

/// Where systems have the certificates that they trust: Debian, Red Hat, SUSE, Alpine.
const SYSTEM: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The most bytes of these.
const MAX_SYSTEM: u64 = 16 << 20;

/// Writes both files if they are not there as they should be.
pub(super) fn publish(directory: &Path, certificate: &str) -> Result<(), TlsError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| TlsError::File {
            what: "write",
            path,
            source,
        }
    };
    let mut bundle = system();
    if !bundle.is_empty() && !bundle.ends_with(b"\n") {
        bundle.push(b'\n');
    }
    bundle.extend_from_slice(certificate.as_bytes());
    fs::create_dir_all(directory).map_err(failed(directory))?;
    for (name, bytes) in [(CERTIFICATE, certificate.as_bytes()), (BUNDLE, &bundle)] {
        let path = directory.join(name);
        if fs::read(&path).is_ok_and(|there| there == bytes) {
            continue;
        }
        replace_file(&path, bytes, 0o644).map_err(failed(&path))?;
    }
    Ok(())
}

/// The certificates that this machine trusts; none where none are found.
fn system() -> Vec<u8> {
    for path in SYSTEM {
        let Ok(file) = File::open(path) else { continue };
        let mut bytes = Vec::new();
        match file.take(MAX_SYSTEM).read_to_end(&mut bytes) {
            Ok(_) => return bytes,
            Err(error) => log::warn!("{path} cannot be read, and is left out of {BUNDLE}: {error}"),
        }
    }
    Vec::new()
}

/// Writes a file that is there whole or as it was, also after a power failure.
///
/// # Errors
/// The host refuses.
pub fn replace_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = Path::new(&name);
    match fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => (),
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(new, path)?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}
