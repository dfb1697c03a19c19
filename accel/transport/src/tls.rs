//! Certificates for streams to other machines, of files with PEM. Knows no connection.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
pub use rustls::{ClientConfig, ServerConfig};

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is no PEM, or has not what it is to have.
    #[error("cannot use {}: {reason}; give a file with PEM", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// What is in the files does not fit together.
    #[error("these certificates and keys cannot be used: {0}")]
    Unfit(String),
}

/// A certificate with those that vouch for it, and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The certificates.
    pub certificate: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// What a client has: it trusts servers whose certificates one in `authorities` has signed, and has an identity where the server asks
/// for one.
///
/// # Errors
/// Files that cannot be used.
pub fn client(authorities: &Path, identity: Option<&Identity>) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(unfit)?;
    let builder = builder.with_root_certificates(roots(authorities)?);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => builder
            .with_client_auth_cert(certificates(&identity.certificate)?, key(&identity.key)?)
            .map_err(unfit)?,
    };
    Ok(Arc::new(config))
}

/// What a server has: its identity, and, if it serves only clients whose certificates are signed, who signs them.
///
/// # Errors
/// Files that cannot be used.
pub fn server(identity: &Identity, clients: Option<&Path>) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(unfit)?;
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path)?), provider).build();
            builder.with_client_cert_verifier(verifier.map_err(unfit)?)
        }
    };
    let config = builder.with_single_cert(certificates(&identity.certificate)?, key(&identity.key)?);
    Ok(Arc::new(config.map_err(unfit)?))
}

fn unfit(error: impl std::fmt::Display) -> TlsError {
    TlsError::Unfit(error.to_string())
}

fn of_file(path: &Path, error: impl std::fmt::Display) -> TlsError {
    TlsError::File {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if found.is_empty() => Err(of_file(path, "there is no certificate in it")),
        read => read.map_err(|error| of_file(path, error)),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| of_file(path, error))
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| of_file(path, error))?;
    }
    Ok(roots)
}
