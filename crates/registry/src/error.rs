//! What can go wrong between a registry and this machine, each in a sentence with the next step.

use std::path::PathBuf;

/// Why an image could not be pulled or pushed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store, the disk, or what the image says of itself.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// Not an image in a registry.
    #[error("{text:?} is no image in a registry ({problem}): use HOST/NAME or HOST:PORT/NAME:TAG")]
    BadLocation {
        /// What was given.
        text: String,
        /// What is wrong.
        problem: String,
    },
    /// No answer.
    #[error("the registry {host} cannot be reached ({problem}): check its name, the network and the proxy settings")]
    Unreachable {
        /// The registry, or the server that it has sent us to.
        host: String,
        /// What was found.
        problem: String,
    },
    /// Its certificate is from nobody we know, or there is none.
    #[error(
        "the registry {host} cannot be trusted ({problem}): put its authority's certificate into \
         /etc/containers/certs.d/{host}/ca.crt, or say that it is insecure"
    )]
    Untrusted {
        /// The registry.
        host: String,
        /// What is wrong with it.
        problem: String,
    },
    /// It wants to know who asks.
    #[error("the registry {host} wants credentials for {repository}: `podman login {host}` stores some")]
    NeedsCredentials {
        /// The registry.
        host: String,
        /// What was asked for.
        repository: String,
    },
    /// It does not know who asks.
    #[error("the registry {host} refuses the credentials for {repository}: `podman login {host}` replaces them")]
    WrongCredentials {
        /// The registry.
        host: String,
        /// What was asked for.
        repository: String,
    },
    /// It knows who asks and refuses.
    #[error("the registry {host} forbids access to {repository}{detail}: ask its owner for the permission")]
    Denied {
        /// The registry.
        host: String,
        /// What was asked for.
        repository: String,
        /// What it says.
        detail: String,
    },
    /// It has no such image.
    #[error("the registry {host} has no image {repository} with {reference}{detail}: check the name and the tag")]
    NoSuchImage {
        /// The registry.
        host: String,
        /// The repository.
        repository: String,
        /// Tag or digest.
        reference: String,
        /// What it says.
        detail: String,
    },
    /// Something else lies there.
    #[error("{location} in its registry is {found} and no {wanted}: check the name; `basalt pull` fetches images")]
    SomethingElse {
        /// What was asked for.
        location: String,
        /// What it should be.
        wanted: String,
        /// What it is.
        found: String,
    },
    /// A status that cannot be gone on from.
    #[error("the registry {host} answers {status} for {what}{detail}: try again later, or ask its owner")]
    Status {
        /// The registry.
        host: String,
        /// What was asked for.
        what: String,
        /// The HTTP status.
        status: u16,
        /// What it says.
        detail: String,
    },
    /// An answer that is not what the specification says.
    #[error("the registry {host} answers for {what} what cannot be used ({problem}): is it a registry?")]
    BadAnswer {
        /// The registry.
        host: String,
        /// What was asked for.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// Other bytes than were asked for.
    #[error(
        "the registry {host} has sent {what} with digest sha256:{found} instead of {expected}: nothing of it was used; its \
         copy is damaged, push the image again"
    )]
    WrongDigest {
        /// The registry.
        host: String,
        /// What was asked for.
        what: String,
        /// Its digest.
        expected: String,
        /// That of what came, 64 digits.
        found: String,
    },
    /// More or fewer bytes than were asked for.
    #[error(
        "the registry {host} has sent {found} bytes of {what} instead of {expected}: nothing of it was used; its copy is \
         damaged, push the image again"
    )]
    WrongSize {
        /// The registry.
        host: String,
        /// What was asked for.
        what: String,
        /// The bytes that it has.
        expected: u64,
        /// The bytes that came, or more.
        found: u64,
    },
    /// The connection breaks again and again.
    #[error(
        "the connection to the registry {host} broke {attempts} times in {what} ({problem}): try again, what has been downloaded is kept for it"
    )]
    Broken {
        /// The registry.
        host: String,
        /// What was being moved.
        what: String,
        /// How often it was tried.
        attempts: u32,
        /// What happened last.
        problem: String,
    },
    /// It took too long.
    #[error("not finished within {seconds} s: try again, what has been downloaded is kept for it, or allow more time")]
    Deadline {
        /// The limit.
        seconds: u64,
    },
    /// Somebody has changed their mind.
    #[error("cancelled: what has been downloaded is kept for a day")]
    Cancelled,
    /// A file with credentials cannot be used.
    #[error("the credentials in {} cannot be used ({problem}): repair or remove that file", .path.display())]
    BadCredentials {
        /// The file.
        path: PathBuf,
        /// What is wrong with it; nothing secret.
        problem: String,
    },
    /// A program that keeps credentials has failed.
    #[error("the credential helper {program} failed ({problem}): run it by hand, or remove it from {}", .path.display())]
    Helper {
        /// Its name.
        program: String,
        /// What happened; nothing secret.
        problem: String,
        /// The file that names it.
        path: PathBuf,
    },
    /// Certificates that cannot be read.
    #[error("the certificates in {} cannot be used ({problem}): repair or remove that file", .path.display())]
    BadCertificates {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl Error {
    /// Whether another place may have what this one could not give. What is wrong here, such as a full disk, is wrong
    /// everywhere.
    pub(crate) fn another_may_do(&self) -> bool {
        !matches!(
            self,
            Self::Image(_) | Self::Cancelled | Self::Deadline { .. } | Self::BadLocation { .. }
        )
    }

    /// Whether the disk is full.
    pub(crate) fn is_disk_full(&self) -> bool {
        matches!(
            self,
            Self::Image(image::Error::NoSpace { .. } | image::Error::NoRoom { .. })
        )
    }
}
