//! What a pull or push tells of itself while it runs.

/// One step. Steps of several blobs come from several threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// A layer or a config.
    Blob {
        /// `sha256:` and 64 digits.
        digest: String,
        /// What happens to it.
        state: BlobState,
        /// Bytes that are there.
        done: u64,
        /// Bytes that it has.
        total: u64,
    },
    /// All blobs are here and become one image.
    Converting(image::Progress),
}

/// What happens to a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlobState {
    /// Another pull is fetching it.
    Waiting,
    /// It is on its way.
    Moving,
    /// It was there already.
    Present,
    /// It has come, and is what its digest says.
    Done,
}
