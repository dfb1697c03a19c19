//! What a client has, saved and made again by another server: names, modules, and the bytes of its memory, which go into a file and come from
//! there.
//!
//! ```text
//!   save:    memory, modules' code ──▶ places in a file; all else ──▶ Saved
//!   restore: modules, as they were loaded ──▶ allocations ──▶ bytes ──▶ State
//! ```
//! What was saved is the client's own, and a stranger's: it has what its quota lets it have, and what does not fit together is refused.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::modules::{Modules, SavedModules};
use crate::{Client, Error, State};

/// Bytes that are copied at a time, where they are not all zero: the host has no page of those.
const PIECE: usize = 64 << 10;

/// What a client has. `P` is where bytes of its are in a file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Saved<P> {
    /// Kinds and names.
    objects: Vec<(String, u32)>,
    /// Addresses of allocations, how long they are, and their bytes.
    memory: Vec<(u64, u64, P)>,
    modules: SavedModules<P>,
    /// Names, ages in nanoseconds, and whether they have a time.
    events: Vec<(u32, Option<u64>, bool)>,
    generators: Vec<(u32, u64, u64)>,
    /// Codes of failures that nobody was told of, and that everybody is.
    pending: Option<i32>,
    broken: Option<i32>,
    used: u64,
}

impl State {
    /// All of it; `put` takes bytes, and says where they are.
    ///
    /// # Errors
    ///
    /// What `put` says.
    pub fn save<P, E>(&self, put: &mut dyn FnMut(&[u8]) -> Result<P, E>) -> Result<Saved<P>, E> {
        let objects = self.objects.all().map(|(kind, name)| (kind.to_owned(), name));
        let events = self.events.all().map(|(name, age, has_time)| {
            let age = age.map(|age| u64::try_from(age.as_nanos()).unwrap_or(u64::MAX));
            (name, age, has_time)
        });
        let memory = self.memory.all();
        let memory = memory.map(|(begin, bytes)| Ok((begin, bytes.len() as u64, put(bytes)?)));
        Ok(Saved {
            objects: objects.collect(),
            memory: memory.collect::<Result<_, E>>()?,
            modules: self.modules.save(put)?,
            events: events.collect(),
            generators: self.generators.all().collect(),
            pending: self.pending.as_ref().map(Error::code),
            broken: self.broken.as_ref().map(Error::code),
            used: self.used(),
        })
    }

    /// The same again, for a client that may have `total` bytes; `get` gives the bytes of a place.
    ///
    /// # Errors
    ///
    /// It has more than it may have, or what was saved does not fit together.
    pub fn restore<'b, P>(
        saved: &Saved<P>,
        total: u64,
        get: &dyn Fn(&P) -> Option<&'b [u8]>,
        client: &mut dyn Client,
    ) -> Result<Self, Error> {
        let mut state = Self::new(total);
        for (kind, name) in &saved.objects {
            state.objects.add(kind, *name)?;
        }
        let code = |place: &P| get(place).map(<[u8]>::to_vec);
        state.modules = Modules::restore(&saved.modules, &code, &mut state.memory, client)?;
        for (begin, length, place) in &saved.memory {
            state.memory.add(*begin, *length, client)?;
            let into = state.memory.bytes_mut(*begin, *length)?;
            let bytes = get(place).filter(|bytes| bytes.len() == into.len());
            let bytes = bytes.ok_or(Error::Invalid("memory that is not in what was saved"))?;
            for (into, bytes) in into.chunks_mut(PIECE).zip(bytes.chunks(PIECE)) {
                if bytes.iter().any(|byte| *byte != 0) {
                    into.copy_from_slice(bytes);
                }
            }
        }
        if state.used() != saved.used {
            return Err(Error::Invalid("memory that does not come to what was saved"));
        }
        let now = Instant::now();
        for (name, age, has_time) in &saved.events {
            state.events.add(*name, (now, age.map(Duration::from_nanos)), *has_time);
        }
        for generator in &saved.generators {
            state.generators.add(*generator);
        }
        state.pending = saved.pending.map(Error::Before);
        state.broken = saved.broken.map(Error::Before);
        Ok(state)
    }
}
