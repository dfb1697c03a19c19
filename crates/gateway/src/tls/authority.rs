//! An authority of the gateway's own for each of its domains: a key and a certificate in the state directory, made once, and certificates for
//! the domain, which are made anew at each start and in time. The authority can vouch for names below the domain and for loopback addresses, and for nothing
//! else, so that whoever trusts it trusts it for no other site. Knows no connection.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{TlsError, Trusted, provider, public};
use crate::domain_name::Domain;

/// Authorities begin at 1 January 2025, whenever they are made: one that was made with a clock that was ahead is good when that is put back.
const FIRST: Duration = Duration::from_secs(1_735_689_600);

/// How long an authority is good, and when another one is made at a start.
const AUTHORITY: Duration = Duration::from_secs(10 * 365 * DAY);
const AUTHORITY_LEFT: Duration = Duration::from_secs(365 * DAY);

/// How long a certificate is good, and after how long the next one is made.
const CERTIFICATE: Duration = Duration::from_secs(90 * DAY);
const AGE: Duration = Duration::from_secs(30 * DAY);

/// Certificates begin so long ago: other machines' clocks may be late.
const LATE: Duration = Duration::from_secs(DAY);

const DAY: u64 = 24 * 3600;

/// What is kept.
#[derive(Serialize, Deserialize)]
struct Kept {
    /// Until when, in seconds since 1970.
    not_after: u64,
    /// Its certificate, as PEM.
    certificate: String,
    /// Its key, as PEM.
    key: String,
}

/// The authority.
pub(super) struct Authority {
    /// Below which it can vouch for names.
    domain: Domain,
    kept: Kept,
    issuer: Issuer<'static, KeyPair>,
}

/// Whether it is time for another certificate. One whose beginning is to come, as the clock was put back, is of no use either.
pub(super) fn is_due(issued: SystemTime, now: SystemTime) -> bool {
    now.duration_since(issued).is_ok_and(|age| age >= AGE)
        || issued.duration_since(now).is_ok_and(|ahead| ahead >= LATE)
}

/// Its file: key and certificate together, so that neither is ever there without the other. Another domain has another one, so that
/// whoever tries one does not lose that which programs trust.
fn path_of(state: &Path, domain: &Domain) -> PathBuf {
    state.join(format!("authority-{}.json", domain.name()))
}

/// The certificate of a domain's authority in this state directory, as PEM; `None` where none was made.
///
/// # Errors
/// It cannot be read.
pub fn certificate_of(state: &Path, domain: &Domain) -> Result<Option<String>, TlsError> {
    Ok(read(&path_of(state, domain))?.map(|kept| kept.certificate))
}

/// A certificate of an authority that vouches for nothing, to compare others with.
pub(super) fn example(domain: &Domain) -> Result<CertificateDer<'static>, TlsError> {
    let key = KeyPair::generate().map_err(made)?;
    let params = params(domain, &key).map_err(made)?;
    let certificate = params.self_signed(&key).map_err(made)?;
    Ok(certificate.der().clone())
}

impl Authority {
    /// The one in this directory. It is made if there is none, or if its time is almost over.
    pub(super) fn open(state: &Path, public: &Path, domain: &Domain, now: SystemTime) -> Result<Self, TlsError> {
        let path = path_of(state, domain);
        let left = seconds(now + AUTHORITY_LEFT);
        let kept = match read(&path)? {
            Some(kept) if kept.not_after > left => kept,
            before => {
                let made = make(domain, now)?;
                write(&path, &made)?;
                let why = match before {
                    None => "",
                    Some(_) => " in place of that whose time is almost over",
                };
                let name = domain.name();
                log::info!(
                    "a certificate authority for {name} was made{why}: programs trust it by `basalt-gateway env`"
                );
                made
            }
        };
        let unusable = |why: String| TlsError::Content {
            path: path.clone(),
            why: format!("{why}; remove it, and programs have to trust a new authority"),
        };
        let key = KeyPair::from_pem(&kept.key).map_err(|error| unusable(error.to_string()))?;
        // Nobody would take what it vouches for.
        Trusted::check(&kept.certificate, domain).map_err(|error| unusable(error.to_string()))?;
        let params = params(domain, &key).map_err(made)?;
        public::publish(public, &kept.certificate)?;
        Ok(Self {
            domain: domain.clone(),
            issuer: Issuer::new(params, key),
            kept,
        })
    }

    fn chain(&self) -> Result<CertificateDer<'static>, String> {
        CertificateDer::from_pem_slice(self.kept.certificate.as_bytes()).map_err(|error| error.to_string())
    }

    /// A new certificate, with a key of its own that is kept nowhere.
    pub(super) fn issue(&self, now: SystemTime) -> Result<CertifiedKey, TlsError> {
        let domain = self.domain.name();
        let name = |name: String| name.try_into().map(SanType::DnsName).map_err(made);
        let addresses = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        let mut params = CertificateParams::default();
        params.subject_alt_names = [name(format!("*.{domain}"))?, name(domain.to_owned())?]
            .into_iter()
            .chain(addresses.map(SanType::IpAddress))
            .collect();
        params.distinguished_name = named(&format!("*.{domain}"));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = ((now - LATE).into(), (now + CERTIFICATE).into());
        let key = KeyPair::generate().map_err(made)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(made)?;
        let authority = self.chain().map_err(TlsError::Make)?;
        let chain = vec![certificate.der().clone(), authority];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok(CertifiedKey::from_der(chain, key, &provider())?)
    }
}

fn made(error: rcgen::Error) -> TlsError {
    TlsError::Make(error.to_string())
}

fn seconds(moment: SystemTime) -> u64 {
    moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A subject, which cannot be longer than 64 characters (X.520).
fn named(name: &str) -> DistinguishedName {
    let mut all = DistinguishedName::new();
    all.push(DnType::OrganizationName, "Basalt");
    all.push(DnType::CommonName, name.chars().take(64).collect::<String>());
    all
}

/// What its certificate says. Two that were made for one domain differ in name, as clients look for authorities by that.
fn params(domain: &Domain, key: &KeyPair) -> Result<CertificateParams, rcgen::Error> {
    let mark = hex::encode(Sha256::digest(key.public_key_raw()));
    let mut params = CertificateParams::default();
    params.distinguished_name = named(&format!("Basalt gateway {}", mark.get(..16).unwrap_or_default()));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![
            GeneralSubtree::DnsName(domain.name().to_owned()),
            GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix([127, 0, 0, 0], 8)),
            GeneralSubtree::IpAddress(CidrSubnet::V6(Ipv6Addr::LOCALHOST.octets(), [0xff; 16])),
        ],
        excluded_subtrees: Vec::new(),
    });
    Ok(params)
}

fn make(domain: &Domain, now: SystemTime) -> Result<Kept, TlsError> {
    let key = KeyPair::generate().map_err(made)?;
    let mut params = params(domain, &key).map_err(made)?;
    let begins = UNIX_EPOCH + FIRST;
    // One that was made with a clock that stood still is good for some years, too.
    let ends = now.max(begins) + AUTHORITY;
    (params.not_before, params.not_after) = (begins.into(), ends.into());
    let certificate = params.self_signed(&key).map_err(made)?;
    Ok(Kept {
        not_after: seconds(ends),
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}

fn read(path: &Path) -> Result<Option<Kept>, TlsError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(file("read", path)(source)),
    };
    let kept = serde_json::from_str(&text).map_err(|error| TlsError::Content {
        path: path.to_owned(),
        why: format!("{error}; remove it, and programs have to trust a new authority"),
    })?;
    Ok(Some(kept))
}

fn write(path: &Path, kept: &Kept) -> Result<(), TlsError> {
    let text = serde_json::to_string(kept).map_err(|error| TlsError::Make(error.to_string()))?;
    public::replace_file(path, text.as_bytes(), 0o600).map_err(file("write", path))
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError::File { what, path, source }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::pki_types::{ServerName, UnixTime};

    use super::*;

    fn open(directory: &Path, now: SystemTime) -> Authority {
        Authority::open(
            directory,
            &directory.join("public"),
            &"sb.example".parse().unwrap(),
            now,
        )
        .unwrap()
    }

    fn judge(authority: &Authority, chain: &[CertificateDer<'static>], name: &str, at: SystemTime) -> bool {
        use rustls::client::danger::ServerCertVerifier;
        let mut roots = RootCertStore::empty();
        roots.add(authority.chain().unwrap()).unwrap();
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build();
        let at = UnixTime::since_unix_epoch(Duration::from_secs(seconds(at)));
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let judged = verifier
            .unwrap()
            .verify_server_cert(&chain[0], &chain[1..], &name, &[], at);
        judged.is_ok()
    }

    #[test]
    fn an_authority_vouches_for_its_domain_and_for_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let authority = open(directory.path(), now);
        let chain = authority.issue(now).unwrap().cert;
        for name in ["sb.example", "api.sb.example", "127.0.0.1", "::1"] {
            assert!(judge(&authority, &chain, name, now), "{name}");
        }
        // Whoever has its key gains nothing elsewhere.
        for name in ["api.openai.example", "192.0.2.1"] {
            let params = CertificateParams::new([name.to_owned()]).unwrap();
            let key = KeyPair::generate().unwrap();
            let forged = params.signed_by(&key, &authority.issuer).unwrap();
            assert!(!judge(&authority, &[forged.der().clone()], name, now), "{name}");
        }
        let params = CertificateParams::new(["x.sb.example".to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let other = params.signed_by(&key, &authority.issuer).unwrap();
        assert!(judge(&authority, &[other.der().clone()], "x.sb.example", now));
    }

    /// Machines have clocks that are wrong until somebody sets them.
    #[test]
    fn an_authority_that_was_made_at_a_wrong_time_is_good_at_the_right_one() {
        let now = SystemTime::now();
        for wrong in [now + 800 * LATE, UNIX_EPOCH + LATE] {
            let directory = tempfile::tempdir().unwrap();
            let made = open(directory.path(), wrong);
            let authority = open(directory.path(), now);
            assert_eq!(authority.kept.certificate, made.kept.certificate);
            let chain = authority.issue(now).unwrap().cert;
            assert!(judge(&authority, &chain, "api.sb.example", now), "{wrong:?}");
        }
    }

    #[test]
    fn times_overlap() {
        let directory = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let authority = open(directory.path(), now);
        let chain = authority.issue(now).unwrap().cert;
        let good = |at| judge(&authority, &chain, "api.sb.example", at);
        assert!(good(now - LATE / 2) && good(now + AGE) && good(now + CERTIFICATE - LATE));
        assert!(!good(now + CERTIFICATE + LATE));
        assert!(!is_due(now, now + AGE - LATE) && is_due(now, now + AGE) && is_due(now, now - LATE));
        assert!(!is_due(now, now - LATE / 2));
        // The same one after a start, and another one in the last of its years.
        let certificate = |at| open(directory.path(), at).kept.certificate;
        assert_eq!(certificate(now), authority.kept.certificate);
        let late = now + AUTHORITY - AUTHORITY_LEFT;
        assert_eq!(certificate(late - LATE), authority.kept.certificate);
        assert_ne!(certificate(late), authority.kept.certificate);
    }
}
