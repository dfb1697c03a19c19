//! What is written of a server's clients, and the file that it is in.
//!
//! ```text
//!   0 ─ the window, as long as it is ─ bytes of calls and of memory, each at a page ─ state, as JSON ─ its place and length, magic
//! ```
//! Whoever writes it and whoever reads it are servers of one tenant, each in a jail: it is checked as far as reading needs it.

use std::io;

use accel_proto::control::Completion;
use accel_transport::{Position, Transport};
use serde::{Deserialize, Serialize};

use crate::guest::Slot;
use crate::objects::{Map, Past};
use crate::table::SavedPlace;

/// The version of all of this. Others are refused.
pub(super) const VERSION: u32 = 1;

/// The file's end: place and length of the state, and this.
pub(super) const TRAILER: u64 = 24;
pub(super) const MAGIC: [u8; 8] = *b"BSLTACST";

/// What parts of the file begin at a multiple of.
pub(super) const PAGE: u64 = 4096;

/// What short parts begin at a multiple of: the longest type of OpenCL C, which memory that a back end works with in place has to be aligned
/// to (OpenCL API, CL_DEVICE_MEM_BASE_ADDR_ALIGN).
const SHORT: u64 = 128;

/// Bytes of the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bytes {
    pub(super) at: u64,
    pub(super) length: u64,
}

/// All of a server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) version: u32,
    /// Of the back end.
    pub(super) backend: String,
    /// Each platform's devices: names, versions, drivers' versions.
    pub(super) devices: Vec<Vec<[String; 3]>>,
    /// Parts of the window, of which it has so many bytes at the file's beginning.
    pub(super) slots: Vec<Slot>,
    pub(super) window: u64,
    pub(super) clients: Vec<ClientState>,
}

/// A client, and where it is in its window.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClientState {
    /// The agent's number of it.
    pub(super) number: u64,
    /// Its part of the window.
    pub(super) slot: String,
    pub(super) transport: Transport,
    pub(super) busy_poll_us: u64,
    pub(super) pairs: u32,
    pub(super) records: u32,
    pub(super) arena: u64,
    pub(super) positions: Vec<Position>,
    pub(super) objects: Objects,
}

/// Its objects.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Objects {
    /// Platforms that it was told of, by their places among all, in the order of their names.
    pub(super) platforms: Vec<usize>,
    /// Devices, by their platforms' and their own places.
    pub(super) devices: Vec<(usize, usize)>,
    /// Names of each sort, in the order of the sorts.
    pub(super) places: Vec<Vec<SavedPlace>>,
    /// How they are made again, in this order.
    pub(super) steps: Vec<Step>,
    /// Memory objects, by name, with what of them is mapped.
    pub(super) maps: Vec<(u32, Vec<Map>)>,
    /// Sorts and names, with errors that nobody was told of.
    pub(super) failures: Vec<(usize, u32, i32)>,
    /// Callbacks that are due: numbers of the client's, and states.
    pub(super) due: Vec<(u32, i32)>,
    /// What it has of CUDA.
    pub(super) cuda: Option<accel_cuda_reference::Saved<Bytes>>,
}

/// A call of the client's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Call {
    pub(super) op: u16,
    pub(super) arguments: Bytes,
    /// What it reads of the arena: from where, and what was there.
    pub(super) reads: Vec<(u64, Bytes)>,
}

/// How something is made again.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Step {
    Call(Call),
    /// Memory with these contents.
    Memory(Call, Bytes),
    Program(Program),
    /// An event of a command that is complete.
    Event {
        name: u32,
        context: u32,
        queue: Option<u32>,
        past: Past,
    },
    /// An event of the client's; positive while it is not set.
    UserEvent {
        name: u32,
        context: u32,
        status: i32,
    },
}

/// A program that was built: from its binaries, or, where the driver does not take these, by its calls.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Program {
    pub(super) name: u32,
    pub(super) context: u32,
    pub(super) devices: Vec<u32>,
    pub(super) binaries: Vec<Bytes>,
    pub(super) calls: Vec<Call>,
}

/// A callback as it is saved.
pub(super) fn due(completion: &Completion) -> (u32, i32) {
    (completion.callback.0, completion.status)
}

/// Where a server's state goes: parts of a file, in any order, each once.
pub trait Output {
    /// These bytes belong there.
    ///
    /// # Errors
    /// It is not taken.
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
}

/// The file as it grows.
pub(super) struct Writing<'o> {
    output: &'o mut dyn Output,
    end: u64,
}

impl std::fmt::Debug for Writing<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writing")
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

impl<'o> Writing<'o> {
    /// Behind what is there already.
    pub(super) fn new(output: &'o mut dyn Output, end: u64) -> Self {
        Self { output, end }
    }

    /// Room for so many bytes, from a page's beginning on; short ones lie one behind the other.
    pub(super) fn room(&mut self, length: u64) -> Bytes {
        let at = if length < PAGE {
            self.end.next_multiple_of(SHORT)
        } else {
            self.end.next_multiple_of(PAGE)
        };
        self.end = at.saturating_add(length);
        Bytes { at, length }
    }

    pub(super) fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.output.put(at, bytes)
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<Bytes> {
        let room = self.room(bytes.len() as u64);
        self.put(room.at, bytes).map(|()| room)
    }

    /// The state itself, and the file's end.
    pub(super) fn finish(mut self, state: &State) -> io::Result<u64> {
        let json = serde_json::to_vec(state).map_err(io::Error::other)?;
        let place = self.append(&json)?;
        let mut trailer = Vec::from(place.at.to_le_bytes());
        trailer.extend(place.length.to_le_bytes());
        trailer.extend(MAGIC);
        self.put(self.end, &trailer)?;
        Ok(self.end + TRAILER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nowhere;

    impl Output for Nowhere {
        fn put(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_part_is_where_a_back_end_can_work_with_it() {
        let mut nowhere = Nowhere;
        let mut file = Writing::new(&mut nowhere, PAGE);
        assert_eq!(file.append(b"odd").unwrap(), Bytes { at: PAGE, length: 3 });
        for (length, at) in [(64, 128), (8, 256), (128, 384), (4095, 512), (4096, 8192)] {
            let room = file.room(length);
            assert_eq!(room, Bytes { at: PAGE + at, length });
        }
    }
}
