//! What a component's saved state is: a type with a name and a version. Knows no component.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::StateError;

/// A type whose values are saved. Its name never changes; its version rises with each change that an older reader would
/// take wrongly, and a golden file keeps each version readable.
pub trait Schema: Serialize + DeserializeOwned {
    /// What it is called in files.
    const KIND: &'static str;

    /// The version that is written.
    const VERSION: u32;

    /// The oldest version that is read as it is: what is new since has a default.
    const OLDEST: u32 = Self::VERSION;

    /// Reads a payload of `version`. A type with another history overrides this.
    ///
    /// # Errors
    /// The version is unknown, or the payload is no such state.
    fn load(version: u32, payload: &[u8]) -> Result<Self, StateError> {
        if !(Self::OLDEST..=Self::VERSION).contains(&version) {
            return Err(StateError::Version {
                kind: Self::KIND.to_owned(),
                found: version,
                known: Self::VERSION,
            });
        }
        serde_json::from_slice(payload).map_err(|source| StateError::Payload {
            kind: Self::KIND,
            source,
        })
    }
}

/// One component's state, as bytes with their name and version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// [`Schema::KIND`].
    pub kind: String,
    /// [`Schema::VERSION`].
    pub version: u32,
    /// The value.
    pub payload: Vec<u8>,
}

impl Saved {
    /// Saves a value.
    ///
    /// # Errors
    /// It has no form in a file; a bug of its type.
    pub fn of<T: Schema>(value: &T) -> Result<Self, StateError> {
        let payload = serde_json::to_vec(value).map_err(|source| StateError::Write { kind: T::KIND, source })?;
        Ok(Self {
            kind: T::KIND.to_owned(),
            version: T::VERSION,
            payload,
        })
    }

    /// Reads the value back, which `component` was saved as.
    ///
    /// # Errors
    /// It is of another kind or version, or damaged.
    pub fn read<T: Schema>(&self, component: &str) -> Result<T, StateError> {
        if self.kind != T::KIND {
            return Err(StateError::Kind {
                component: component.to_owned(),
                found: self.kind.clone(),
                expected: T::KIND,
            });
        }
        T::load(self.version, &self.payload)
    }
}
