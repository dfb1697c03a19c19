//! Names of a client's objects, and what annotations say that calls do to them; and why calls fail.
//!
//! Knows no call. Every back end of CUDA has these, whatever its objects are.

use std::collections::BTreeSet;

use accel_proto::cuda::{CudaStreamT, KINDS};
use accel_proto::{AnyHandle, Effect, Kind};

/// Objects of a client at a time.
const MOST: usize = 1 << 20;
/// Names that each stream has without being made: NULL, the legacy one, and the thread's own.
const OWN_STREAMS: u32 = 3;

/// Why a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// A number that means nothing.
    InvalidValue,
    /// There is not enough memory, or too many objects.
    OutOfMemory,
    /// A name that no object has.
    InvalidHandle,
    /// An address in no allocation.
    IllegalAddress,
}

impl Failure {
    /// The runtime's code (CUDA Runtime API, `cudaError_t`).
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::InvalidValue => 1,
            Self::OutOfMemory => 2,
            Self::InvalidHandle => 400,
            Self::IllegalAddress => 700,
        }
    }
}

/// Which objects a client has.
#[derive(Debug, Default)]
pub struct Objects(
    /// Names and their kinds: of two names the numbers differ, which are compared first.
    BTreeSet<(u32, &'static str)>,
);

impl Objects {
    /// What a call does to one of them: there is one more, one less, or it has to be there.
    ///
    /// # Errors
    ///
    /// There is no such object, there is one already, or there are too many.
    pub fn affect(&mut self, effect: Effect, handle: AnyHandle) -> Result<(), Failure> {
        if handle.raw < OWN_STREAMS && handle.c_type == CudaStreamT::C_TYPE {
            return Ok(());
        }
        let handle = (handle.raw, handle.c_type);
        match effect {
            Effect::Creates if self.0.len() >= MOST => Err(Failure::OutOfMemory),
            Effect::Creates if self.0.insert(handle) => Ok(()),
            Effect::Creates => Err(Failure::InvalidValue),
            Effect::Drops if self.0.remove(&handle) => Ok(()),
            Effect::Changes | Effect::Content | Effect::Uses if self.0.contains(&handle) => Ok(()),
            Effect::Drops | Effect::Changes | Effect::Content | Effect::Uses => Err(Failure::InvalidHandle),
        }
    }

    /// All of them: their kinds' C types, and their names.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.0.iter().map(|(raw, kind)| (*kind, *raw))
    }

    /// One more, of a kind that there may not be.
    ///
    /// # Errors
    ///
    /// There is no such kind, the object is there already, or there are too many.
    pub fn add(&mut self, kind: &str, raw: u32) -> Result<(), Failure> {
        let kind = KINDS.iter().find(|known| **known == kind);
        let c_type = kind.copied().ok_or(Failure::InvalidValue)?;
        self.affect(Effect::Creates, AnyHandle { c_type, raw })
    }
}
