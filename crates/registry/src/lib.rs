//! Images from and to registries, by the OCI distribution specification 1.1: [`pull`] into an [`image::Store`], [`push`]
//! out of one.
//!
//! The way of a pull: [`Location`] is what the user names; for each mirror and then the registry itself a [`session`]
//! finds out how to speak to it and answers its challenges ([`challenge`], [`credentials`]); the manifest says which blobs
//! there are; [`blob`] fetches them, several at a time, into the store's downloads, where an interrupted one goes on and
//! another process's is waited for; the store makes an image of them. What is no image goes the same ways ([`artifact`]).
//!
//! No operation can hang: [`job`] has a deadline for all of it, a limit for silence, and a flag that cancels it. The crate
//! deliberately knows no VM, keeps no state of its own, and asks nobody for a password: credentials are given to it.

mod artifact;
mod blob;
mod certificates;
mod challenge;
pub mod credentials;
mod error;
mod job;
mod location;
mod progress;
mod pull;
mod push;
mod session;
pub mod untrusted;

pub use artifact::{Artifact, ArtifactManifest, Look, PulledArtifact, pull_artifact, push_artifact};
pub use certificates::machine_authorities;
pub use challenge::{Challenge, Scheme};
pub use credentials::{Credentials, Secret};
pub use error::Error;
pub use job::{Cancel, Options, Peer};
pub use location::Location;
pub use progress::{BlobState, Progress};
pub use pull::{Pull, pull};
pub use push::{Push, push};
