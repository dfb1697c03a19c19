//! What can go wrong on a connection, with the numbers. Knows the framing and the handshake, not what is sent.

use std::io;

/// An error of the wire layer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The stream itself failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The stream ended inside a frame or inside the handshake.
    #[error("the connection ended in the middle of {what}: {got} of {want} bytes came")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Bytes that came.
        got: usize,
        /// Bytes that were announced.
        want: usize,
    },
    /// A frame announces, or was given, more than the limit.
    #[error("a frame of {length} bytes exceeds the limit of {limit} bytes")]
    TooLarge {
        /// Length announced.
        length: usize,
        /// Longest payload allowed.
        limit: usize,
    },
    /// The first bytes are not a Basalt handshake.
    #[error("the other side does not speak a Basalt protocol (its first bytes are {0:02x?}); check the address")]
    NotBasalt([u8; 4]),
    /// A Basalt peer, but of another service.
    #[error("the other side speaks the protocol {theirs:?}, this side {ours:?}; check the address")]
    WrongProtocol {
        /// Name of this side.
        ours: String,
        /// Name the peer sent.
        theirs: String,
    },
    /// Same protocol, and no version that both sides speak.
    #[error(
        "the other side speaks version {theirs} of {name:?}, this side version {ours} and none older than {oldest}; use binaries of one \
         Basalt release on both sides"
    )]
    WrongVersion {
        /// Protocol name.
        name: String,
        /// The oldest version of this side.
        oldest: u16,
        /// The newest version of this side.
        ours: u16,
        /// The newest version of the peer.
        theirs: u16,
    },
    /// The server did not accept the token (or wants one and got none).
    #[error("the token was refused; it belongs to another or an earlier server")]
    TokenRefused,
    /// The handshake reply has a status that no version defines.
    #[error("the handshake reply has the unknown status {0}")]
    UnknownStatus(u16),
    /// The protocol's name does not fit its field.
    #[error("the protocol name {name:?} has {length} bytes; the handshake has room for {limit}")]
    NameTooLong {
        /// The name.
        name: String,
        /// Its length.
        length: usize,
        /// Size of the field.
        limit: usize,
    },
}
