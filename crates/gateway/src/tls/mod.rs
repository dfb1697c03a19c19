//! TLS before HTTP: handshakes that are bounded in time and number, with a certificate that may be another one for the next connection. Where
//! certificates come from is [`authority`]'s and [`files`]'s to know. Knows no request.
//!
//! ```text
//!  authority (own, in the state directory) ─┐
//!                                           ├─▶ certificate in use ─▶ handshake ─▶ server
//!  files (given, read again when changed) ──┘
//! ```

mod authority;
mod files;
mod public;
mod trusted;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::domain_name::Domain;
use crate::locks::Locks;

use authority::Authority;
use files::Files;

pub use authority::certificate_of;
pub use public::{CERTIFICATE, replace_file};
pub use trusted::{Trusted, Written};

/// How long a client may take for its handshake, the wait for a place included.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Handshakes that are under way at once, of all and of one address: each may hold the largest first message that TLS has.
const HANDSHAKES: usize = 256;
const HANDSHAKES_OF_ONE: usize = 64;

/// How often it is looked whether a certificate has to be made or read again.
const LOOK: Duration = Duration::from_secs(10);

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error("cannot {what} {}", path.display())]
    File {
        /// What was to be done.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{} is of no use: {why}", path.display())]
    Content {
        /// Which file.
        path: PathBuf,
        /// Why it is not.
        why: String,
    },
    /// A certificate cannot be made.
    #[error("cannot make a certificate: {0}")]
    Make(String),
    /// An authority is not one of a gateway's domain alone.
    #[error("the certificate authority for {0} is not to be trusted: {1}")]
    Untrusted(String, String),
    /// The library refuses what is to be served.
    #[error("TLS cannot be served with this certificate")]
    Library(#[from] rustls::Error),
}

/// Where the certificate comes from.
#[derive(Clone, Debug)]
pub enum CertificateSource {
    /// An authority of its own, in the state directory.
    Own {
        /// The state directory.
        state: PathBuf,
        /// Where the authority's certificate is put for everybody.
        public: PathBuf,
    },
    /// Files, which are read again when they change.
    Files {
        /// The certificate and those that lead to its authority, as PEM.
        certificate: PathBuf,
        /// Its key, as PEM.
        key: PathBuf,
    },
}

/// What handshakes are done with.
pub struct Tls {
    acceptor: TlsAcceptor,
    current: Arc<Current>,
    source: Mutex<Source>,
    handshakes: Semaphore,
    of_one: Locks,
}

enum Source {
    Own {
        authority: Box<Authority>,
        issued: SystemTime,
    },
    Files(Files),
}

/// The certificate that is in use.
#[derive(Debug)]
struct Current(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    // Whatever name a client asks for: there is one certificate, and it is the client's to judge.
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl Tls {
    /// For this domain.
    ///
    /// # Errors
    /// There is no certificate, and none can be made.
    pub fn open(source: &CertificateSource, domain: &Domain) -> Result<Arc<Self>, TlsError> {
        let (source, first) = match source {
            CertificateSource::Own { state, public } => {
                let now = SystemTime::now();
                let authority = Authority::open(state, public, domain, now)?;
                let first = authority.issue(now)?;
                let authority = Box::new(authority);
                (Source::Own { authority, issued: now }, first)
            }
            CertificateSource::Files { certificate, key } => {
                let (files, first) = Files::open(certificate, key, domain.name())?;
                (Source::Files(files), first)
            }
        };
        let current = Arc::new(Current(RwLock::new(Arc::new(first))));
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&current) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(Self {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            current,
            source: Mutex::new(source),
            handshakes: Semaphore::new(HANDSHAKES),
            of_one: Locks::new(HANDSHAKES_OF_ONE),
        }))
    }

    /// Shakes hands with a client, which is this one. Who comes from one address waits for others of it before taking a place of all.
    pub(crate) async fn accept(&self, stream: TcpStream, client: &str) -> io::Result<TlsStream<TcpStream>> {
        let shake = async {
            let _turn = self.of_one.lock(client).await;
            // Nobody closes it.
            let _place = self.handshakes.acquire().await.map_err(io::Error::other)?;
            self.acceptor.accept(stream).await
        };
        let shaken = tokio::time::timeout(HANDSHAKE, shake).await;
        shaken.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Has the certificate made again in time, or read again when its files have changed, until `stop` says so.
    pub async fn keep(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => (),
                _ = stop.wait_for(|stop| *stop) => return,
            }
            let tls = Arc::clone(&self);
            // Files are read and keys made there.
            if let Err(error) = tokio::task::spawn_blocking(move || tls.refresh(SystemTime::now())).await {
                log::error!("certificates are not looked at: {error}");
            }
        }
    }

    /// Takes another certificate into use if it is time, or if files have changed. What cannot be used changes nothing.
    pub fn refresh(&self, now: SystemTime) {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let next = match &mut *source {
            Source::Own { authority, issued } => match authority::is_due(*issued, now) {
                false => return,
                true => authority.issue(now).inspect(|_| *issued = now),
            },
            Source::Files(files) => match files.changed() {
                None => return,
                Some(read) => read,
            },
        };
        match next {
            Ok(next) => {
                *self.current.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
                log::info!("new connections get a new certificate");
            }
            Err(error) => {
                let why = crate::error::with_causes(&error);
                log::error!("the certificate of before stays in use: {why}");
            }
        }
    }

    /// Reads files again, whether they seem changed or not.
    pub fn reload(&self) {
        if let Source::Files(files) = &mut *self.source.lock().unwrap_or_else(PoisonError::into_inner) {
            files.forget();
        }
        self.refresh(SystemTime::now());
    }
}
