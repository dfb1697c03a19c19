//! What a program is given to trust: an authority's certificate, if that can vouch for one domain and for nothing else; alone, and with what
//! this machine trusts, for programs that take one file in place of the machine's. It is written where no gateway can change it: a gateway
//! that was taken over must not vouch for other sites to those who trust it. Knows no key.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use sha2::{Digest, Sha256};

use super::public::{CERTIFICATE, write};
use super::{TlsError, authority};
use crate::domain_name::Domain;

/// Where systems have the certificates that they trust: Debian, Red Hat, SUSE, Alpine.
const SYSTEM: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The most bytes of these.
const MAX_SYSTEM: u64 = 16 << 20;

/// An authority's certificate that was looked at.
pub struct Trusted {
    certificate: CertificateDer<'static>,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The authority was not there, or was another one.
    pub is_new: bool,
    /// Certificates that this machine trusts were found, and are there too.
    pub has_system: bool,
}

impl Trusted {
    /// The file of all certificates together.
    pub const BUNDLE: &'static str = "ca-bundle.pem";

    /// The one certificate in this text, which is to be for this domain and for nothing else.
    ///
    /// # Errors
    /// It can vouch for something else, or is none.
    pub fn check(pem: &str, domain: &Domain) -> Result<Self, TlsError> {
        let no = |why: String| TlsError::Untrusted(domain.to_string(), why);
        let mut all: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(pem.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(|error| no(error.to_string()))?;
        let (Some(certificate), true) = (all.pop(), all.is_empty()) else {
            return Err(no("there is not one certificate, but none or several".to_owned()));
        };
        let found = constraints(certificate.clone()).map_err(|error| no(error.to_string()))?;
        let wanted = constraints(authority::example(domain)?).map_err(|error| no(error.to_string()))?;
        match wanted.is_some() && found == wanted && domain.name().contains('.') {
            true => Ok(Self { certificate }),
            false => Err(no("it could vouch for other names".to_owned())),
        }
    }

    /// SHA-256 of the certificate, as everybody writes it.
    pub fn fingerprint(&self) -> String {
        hex::encode(Sha256::digest(&self.certificate))
    }

    /// Writes the certificate, and a bundle with it, to a directory, which is made if there is none.
    ///
    /// # Errors
    /// The host refuses.
    pub fn write(&self, directory: &Path) -> Result<Written, TlsError> {
        self.write_with(directory, system())
    }

    fn write_with(&self, directory: &Path, mut bundle: Vec<u8>) -> Result<Written, TlsError> {
        let has_system = !bundle.is_empty();
        if has_system && !bundle.ends_with(b"\n") {
            bundle.push(b'\n');
        }
        let pem = self.pem();
        bundle.extend_from_slice(pem.as_bytes());
        write(directory, Self::BUNDLE, &bundle)?;
        let is_new = write(directory, CERTIFICATE, pem.as_bytes())?;
        Ok(Written { is_new, has_system })
    }

    /// What was looked at and nothing else: the text may have had more.
    fn pem(&self) -> String {
        let text = base64::engine::general_purpose::STANDARD.encode(&self.certificate);
        let mut pem = "-----BEGIN CERTIFICATE-----\n".to_owned();
        let mut rest = &*text;
        while !rest.is_empty() {
            let (line, left) = rest.split_at(rest.len().min(64));
            pem.push_str(line);
            pem.push('\n');
            rest = left;
        }
        pem.push_str("-----END CERTIFICATE-----\n");
        pem
    }
}

/// For what a certificate can vouch, as it is written in it.
fn constraints(certificate: CertificateDer<'static>) -> Result<Option<Vec<u8>>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate)?;
    let constraints = roots.roots.first().and_then(|root| root.name_constraints.as_ref());
    Ok(constraints.map(|text| text.to_vec()))
}

/// The certificates that this machine trusts; none where none are found.
fn system() -> Vec<u8> {
    for path in SYSTEM {
        let Ok(file) = File::open(path) else { continue };
        let mut bytes = Vec::new();
        match file.take(MAX_SYSTEM).read_to_end(&mut bytes) {
            Ok(_) => return bytes,
            Err(error) => log::warn!("{path} cannot be read, and is left out of {}: {error}", Trusted::BUNDLE),
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, IsCa, KeyPair};

    use super::*;

    fn domain(text: &str) -> Domain {
        text.parse().unwrap()
    }

    fn pem(certificate: &CertificateDer<'static>) -> String {
        let certificate = certificate.clone();
        Trusted { certificate }.pem()
    }

    #[test]
    fn an_authority_of_more_than_the_domain_is_not_trusted() {
        let own = domain("sb.example:8443");
        let good = authority::example(&own).unwrap();
        let trusted = Trusted::check(&pem(&good), &own).unwrap();
        assert_eq!(trusted.certificate, good);
        // One without constraints, of another domain, of a whole top level; and two at once.
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let any = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let other = authority::example(&domain("example")).unwrap();
        for bad in [
            any.pem(),
            pem(&other),
            pem(&good) + &any.pem(),
            String::new(),
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned(),
        ] {
            assert!(Trusted::check(&bad, &own).is_err(), "{bad}");
        }
        assert!(Trusted::check(&pem(&other), &domain("example")).is_err());
    }

    #[test]
    fn a_bundle_has_what_the_machine_trusts_and_the_authority() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b");
        let certificate = authority::example(&domain("sb.example")).unwrap();
        let trusted = Trusted { certificate };
        let written = |is_new, has_system| Written { is_new, has_system };
        assert_eq!(trusted.write_with(&path, Vec::new()).unwrap(), written(true, false));
        let bundle = || std::fs::read_to_string(path.join(Trusted::BUNDLE)).unwrap();
        assert_eq!(bundle(), trusted.pem());
        assert_eq!(
            trusted.write_with(&path, b"system".to_vec()).unwrap(),
            written(false, true)
        );
        assert_eq!(bundle(), format!("system\n{}", trusted.pem()));
        assert_eq!(std::fs::read_to_string(path.join(CERTIFICATE)).unwrap(), trusted.pem());
        let read = CertificateDer::from_pem_slice(trusted.pem().as_bytes()).unwrap();
        assert_eq!(read, trusted.certificate);
    }
}
