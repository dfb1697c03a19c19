//! The parsers of what registries and token servers answer, each with bytes in and a verdict out, for whoever feeds them more than
//! tests do (`basalt-fuzz`). A pull itself calls them where they are.

use crate::{ArtifactManifest, Error, Location, artifact, pull, session};

/// The manifest of an artifact at `location` that has the type `wanted`; `header` is what HTTP says of its own type.
///
/// # Errors
/// What it is instead, or what is wrong with it.
pub fn artifact(header: &str, manifest: &[u8], location: &Location, wanted: &str) -> Result<ArtifactManifest, Error> {
    let media_type = pull::media_type(header, manifest);
    artifact::parse(location.host(), &media_type, manifest, (location, wanted))
}

/// Whether there is a token in a token server's answer.
///
/// # Errors
/// What is wrong with it.
pub fn token(answer: &[u8]) -> Result<(), &'static str> {
    session::token_in(answer).map(drop)
}

/// What a message says of the error that a registry has answered with.
pub fn complaint(body: &[u8]) -> String {
    session::complaint_in(body)
}
