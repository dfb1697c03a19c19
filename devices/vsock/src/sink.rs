//! A port that ends in a file: what guests write to it outlives them, and needs nobody on the host to read it.
//!
//! The file is bounded, as guests may write for ever. Knows nothing of what is written.

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use base::FileBound;
use virtio::buffers::Cursor;
use vm_memory::VolatileMemoryError;

use crate::ring::transfer;

/// Copied at once.
const BOUNCE: usize = 4096;

/// A port and its file. Connections share it.
#[derive(Debug)]
pub(crate) struct Sink {
    port: u32,
    file: Mutex<(File, FileBound)>,
}

impl Sink {
    /// Appends to `file`, which is open for that, and keeps its last `keep` bytes.
    pub(crate) fn new(port: u32, file: File, keep: u64) -> Self {
        Self {
            port,
            file: Mutex::new((file, FileBound::new(keep))),
        }
    }

    /// The port of the host's.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// Appends the next `length` bytes.
    ///
    /// # Errors
    /// The disk is full, or the like; some of it may be there.
    pub(crate) fn append(&self, payload: &mut Cursor<'_, '_>, length: usize) -> io::Result<()> {
        let mut guard = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, bound) = &mut *guard;
        let (_, error) = transfer(payload, length, |slice| {
            let mut bounce = [0; BOUNCE];
            let mut done = 0;
            while done < slice.len() {
                let count = slice.offset(done)?.copy_to(&mut bounce);
                file.write_all(&bounce[..count]).map_err(VolatileMemoryError::IOError)?;
                done += count;
            }
            Ok(done)
        });
        error.map_or(Ok(()), Err)?;
        bound.wrote(&*file, length as u64)
    }
}
