//! How a guest's agent and the host's server of a forwarded accelerator speak: programs of the guest connect to the agent, and the agent
//! passes on what they say and hands them what they get. Every connection is the host's, to [`ACCELERATOR_PORT`].
//!
//! ```text
//!   host ── Begin::Control ──▶ agent        then FromGuest and FromHost, for as long as the server is there
//!   host ── Begin::Pair    ──▶ agent        then the stream is a client's: the agent gives it away, and reads nothing of it
//! ```
//! Messages are frames of kind [`MESSAGE`] with JSON. Knows nothing of what clients and servers say to each other.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Read, Write};
use wire::{FrameReader, FrameWriter};

use crate::Error;

/// The agent's port for the accelerator's server.
pub const ACCELERATOR_PORT: u32 = 1026;

/// The label of the window's file system, by which the agent finds the device.
pub const LABEL: &str = "basalt-accel";

/// OpenCL's driver for programs of the guest, a file of that file system.
pub const OPENCL_DRIVER: &str = "libbasalt_opencl.so";

/// The same for programs of an image whose C library is musl.
pub const OPENCL_DRIVER_MUSL: &str = "libbasalt_opencl-musl.so";

/// CUDA's libraries for programs of the guest: one file, which programs look for by all of [`CUDA_NAMES`].
pub const CUDA_DRIVER: &str = "libbasalt_cuda.so";

/// Names of CUDA's libraries: those of versions that are served, and of older ones, whose programs are told that they are not
/// (`accel/spec/cuda`).
pub const CUDA_NAMES: &[&str] = &[
    "libcublas.so.13",
    "libcublas.so.12",
    "libcublas.so.11",
    "libcublas.so.10",
    "libcublasLt.so.13",
    "libcublasLt.so.12",
    "libcublasLt.so.11",
    "libcublasLt.so.10",
    "libcuda.so.1",
    "libcudart.so.13",
    "libcudart.so.12",
    "libcudart.so.11.0",
    "libcudart.so.10.2",
    "libcudart.so.10.1",
    "libcudnn.so.9",
    "libcudnn.so.8",
    "libcudnn.so.7",
    "libcufft.so.12",
    "libcufft.so.11",
    "libcufft.so.10",
    "libcufile.so.0",
    "libcupti.so.13",
    "libcupti.so.12",
    "libcurand.so.10",
    "libcusolver.so.12",
    "libcusolver.so.11",
    "libcusparse.so.12",
    "libcusparse.so.11",
    "libcusparse.so.10",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvidia-ml.so.1",
    "libnvrtc.so.13",
    "libnvrtc.so.12",
    "libnvshmem_host.so.3",
];

/// The kind of all frames.
const MESSAGE: u16 = 1;

/// The highest version of this protocol.
pub const VERSION: u32 = 1;

/// The first message of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Begin {
    /// The server's own connection; one that is there already is over.
    Control {
        /// What the server speaks.
        version: u32,
        /// Clients that it goes on with, which were served when their machine was saved.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        resumed: Vec<u64>,
    },
    /// A stream for a client.
    Pair {
        /// Whose.
        client: u64,
        /// Which, from 0.
        pair: u32,
    },
}

/// What an agent says on the control connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromGuest {
    /// A program wants to be a client.
    Connect {
        /// By what number it is known from now on.
        client: u64,
        /// What it said.
        hello: String,
        /// Files of the window's file system that nobody in the guest has open.
        free: Vec<String>,
    },
    /// A client is gone.
    Gone {
        /// Which.
        client: u64,
    },
}

/// What a server says on the control connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromHost {
    /// It serves a client.
    Accept {
        /// Which.
        client: u64,
        /// The file of the window's file system that the client gets first, where it gets one.
        file: Option<String>,
        /// How many streams it gets behind that. They come by connections of their own, before or after this.
        pairs: u32,
        /// What the client is told.
        welcome: String,
    },
    /// It does not.
    Refuse {
        /// Which.
        client: u64,
        /// What the client is told.
        welcome: String,
    },
    /// It serves a client no more.
    Over {
        /// Which.
        client: u64,
    },
}

/// Sends one message.
///
/// # Errors
/// The stream's.
pub fn send<W: Write>(writer: &FrameWriter<W>, message: &impl Serialize) -> Result<(), Error> {
    let json = serde_json::to_vec(message).map_err(Error::Malformed)?;
    Ok(writer.send(MESSAGE, 0, &json)?)
}

/// The next message; `None` at the stream's end.
///
/// # Errors
/// The stream's, or that it is no message.
pub fn receive<T: DeserializeOwned, R: Read>(reader: &mut FrameReader<R>) -> Result<Option<T>, Error> {
    match reader.read()? {
        None => Ok(None),
        Some(frame) if frame.kind == MESSAGE => {
            Ok(Some(serde_json::from_slice(frame.payload).map_err(Error::Malformed)?))
        }
        Some(frame) => Err(Error::UnexpectedFrame(frame.kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cudas_libraries_are_those_that_the_library_is_made_for() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../accel/client-cuda/src/generated/files.txt"
        );
        let files = std::fs::read_to_string(path).unwrap();
        assert_eq!(files.lines().collect::<Vec<_>>(), CUDA_NAMES, "{path}");
    }

    #[test]
    fn what_is_sent_is_received_and_other_frames_are_not() {
        let mut bytes = Vec::new();
        let said = FromGuest::Connect {
            client: 7,
            hello: r#"{"pairs":1}"#.to_owned(),
            free: vec!["slot-0".to_owned()],
        };
        let writer = FrameWriter::new(&mut bytes);
        send(&writer, &said).unwrap();
        writer.send(MESSAGE + 1, 0, b"{}").unwrap();
        let mut reader = FrameReader::new(&bytes[..]);
        assert_eq!(receive(&mut reader).unwrap(), Some(said));
        assert!(receive::<FromGuest, _>(&mut reader).is_err());
        assert_eq!(receive::<FromGuest, _>(&mut reader).unwrap(), None);
    }
}
