//! A certificate and its key in files that somebody else keeps: read again when they are other files than before, as programs that renew
//! certificates replace them. Knows no connection.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;

use super::{TlsError, provider};

/// The largest file that is read.
const MAX_FILE: u64 = 1 << 20;

/// The most certificates between the domain's and its authority's.
const MAX_CHAIN: usize = 16;

/// The files.
pub(super) struct Files {
    certificate: PathBuf,
    key: PathBuf,
    domain: String,
    /// What they were when they were last read, whether that was of use or not; `None` if one of them was not there.
    seen: Option<[Stamp; 2]>,
    /// They are read again whatever they are.
    forgotten: bool,
    /// Why they were of no use at the last look.
    failed: Option<String>,
}

/// What another file differs in, or the same after it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl Files {
    /// These files, and what is in them.
    pub(super) fn open(certificate: &Path, key: &Path, domain: &str) -> Result<(Self, CertifiedKey), TlsError> {
        let mut files = Self {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            domain: domain.to_owned(),
            seen: None,
            forgotten: false,
            failed: None,
        };
        files.seen = Some(files.stamps()?);
        let read = files.read()?;
        Ok((files, read))
    }

    /// What is in them, if they have changed since they were last read. What could not be read is read again at each look, as it may have
    /// been the host's fault; why it cannot is told once.
    pub(super) fn changed(&mut self) -> Option<Result<CertifiedKey, TlsError>> {
        self.changed_by(Self::read)
    }

    fn changed_by(
        &mut self,
        read: impl FnOnce(&Self) -> Result<CertifiedKey, TlsError>,
    ) -> Option<Result<CertifiedKey, TlsError>> {
        let now = self.stamps().ok();
        if !self.forgotten && self.failed.is_none() && now == self.seen {
            return None;
        }
        (self.seen, self.forgotten) = (now, false);
        let read = read(self);
        let failed = read.as_ref().err().map(|error| crate::error::with_causes(error));
        let is_told = failed.is_some() && failed == self.failed;
        self.failed = failed;
        (!is_told).then_some(read)
    }

    /// They are read again at the next look, and what is wrong with them is told again.
    pub(super) fn forget(&mut self) {
        (self.forgotten, self.failed) = (true, None);
    }

    fn stamps(&self) -> Result<[Stamp; 2], TlsError> {
        Ok([stamp(&self.certificate)?, stamp(&self.key)?])
    }

    fn read(&self) -> Result<CertifiedKey, TlsError> {
        let unusable = |path: &Path| {
            let path = path.to_owned();
            move |error: rustls::pki_types::pem::Error| TlsError::Content {
                path,
                why: format!("it has no PEM of what is expected ({error})"),
            }
        };
        let text = content(&self.certificate)?;
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&text)
            .collect::<Result<_, _>>()
            .map_err(unusable(&self.certificate))?;
        if chain.is_empty() || chain.len() > MAX_CHAIN {
            return Err(TlsError::Content {
                path: self.certificate.clone(),
                why: format!("it has {} certificates, and 1 to {MAX_CHAIN} are expected", chain.len()),
            });
        }
        let key = PrivateKeyDer::from_pem_slice(&content(&self.key)?).map_err(unusable(&self.key))?;
        // It compares them, too.
        let read = CertifiedKey::from_der(chain, key, &provider()).map_err(|error| TlsError::Content {
            path: self.certificate.clone(),
            why: format!("with the key {} it cannot be used ({error})", self.key.display()),
        })?;
        self.check_names(&read.cert);
        Ok(read)
    }

    /// Clients refuse a certificate of other names; somebody may have a reason to use one all the same.
    fn check_names(&self, chain: &[CertificateDer<'static>]) {
        let Some(Ok(first)) = chain.first().map(ParsedCertificate::try_from) else {
            return;
        };
        for name in [
            format!("api.{}", self.domain),
            format!("3000-0123456789ab.{}", self.domain),
        ] {
            let Ok(server) = ServerName::try_from(name.as_str()) else {
                continue;
            };
            if let Err(error) = verify_server_name(&first, &server) {
                let path = self.certificate.display();
                log::warn!(
                    "{path} is not for {name}, and clients will refuse it: use one for *.{} ({error})",
                    self.domain
                );
                return;
            }
        }
    }
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError::File { what, path, source }
}

fn stamp(path: &Path) -> Result<Stamp, TlsError> {
    let data = fs::metadata(path).map_err(file("look at", path))?;
    Ok(Stamp {
        device: data.dev(),
        inode: data.ino(),
        bytes: data.size(),
        changed: (data.ctime(), data.ctime_nsec()),
    })
}

fn content(path: &Path) -> Result<Vec<u8>, TlsError> {
    let mut bytes = Vec::new();
    let opened = File::open(path).map_err(file("read", path))?;
    opened
        .take(MAX_FILE + 1)
        .read_to_end(&mut bytes)
        .map_err(file("read", path))?;
    match u64::try_from(bytes.len()) {
        Ok(length) if length <= MAX_FILE => Ok(bytes),
        _ => Err(TlsError::Content {
            path: path.to_owned(),
            why: format!("it is larger than {MAX_FILE} bytes"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_read_is_read_again_and_that_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let (certificate, key) = (directory.path().join("c.pem"), directory.path().join("k.pem"));
        let write = || {
            let made = rcgen::generate_simple_self_signed(["*.sb.example".to_owned()]).unwrap();
            fs::write(&certificate, made.cert.pem()).unwrap();
            fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        };
        write();
        let (mut files, first) = Files::open(&certificate, &key, "sb.example").unwrap();
        assert!(files.changed().is_none());
        write();
        // The files are right, and the host has no descriptor left.
        let fails = |_: &Files| Err(file("read", &certificate)(io::ErrorKind::Other.into()));
        assert!(matches!(files.changed_by(fails), Some(Err(_))));
        assert!(files.changed_by(fails).is_none());
        files.forget();
        assert!(matches!(files.changed_by(fails), Some(Err(_))));
        let Some(Ok(renewed)) = files.changed() else {
            panic!("the renewed certificate is lost")
        };
        assert_ne!(renewed.cert, first.cert);
        assert!(files.changed().is_none());
    }
}
