//! CPU models: a named part of what a host's processors offer, which guests on different hosts see alike, and whether a host
//! offers all that a guest was once shown. Knows CPUID and no engine: leaves come in and go out as plain numbers.
//!
//! ```text
//!  what a host offers ── present(model) ──▶ what a guest is shown ── saved ──▶ missing(shown, what another host offers)
//! ```
//! The features' names, and which model has which, are in `features`; the other leaves are in `present`, and what is this VM's own in
//! `topology`.

mod features;
mod missing;
mod owned;
mod present;
mod topology;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};

pub use missing::missing;
pub use owned::{OWNED_LAST_BASIC, OWNED_LAST_EXTENDED, owned};
pub use present::{present, xfeatures};
pub use topology::{former_hash, topology};

/// One CPUID leaf. It is written as a tuple; one with names, as it was once, is read as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct CpuidEntry {
    /// EAX on input.
    pub function: u32,
    /// ECX on input.
    pub index: u32,
    /// Whether `index` matters.
    pub indexed: bool,
    /// EAX, EBX, ECX, EDX on output.
    pub registers: [u32; 4],
}

impl Serialize for CpuidEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.function, self.index, self.indexed, self.registers).serialize(serializer)
    }
}

/// Which processor a guest is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CpuModel {
    /// All that the host offers.
    #[default]
    #[serde(rename = "host")]
    Host,
    /// What of the host's a guest of every class can be shown.
    #[serde(rename = "common")]
    Common,
    /// The level v2 of the x86-64 psABI: with SSE4.2, without AVX.
    #[serde(rename = "x86-64-v2")]
    V2,
    /// The level v3, and AES: with AVX2.
    #[serde(rename = "x86-64-v3")]
    V3,
    /// The level v4: with AVX-512.
    #[serde(rename = "x86-64-v4")]
    V4,
}

impl CpuModel {
    /// All of them, the one that shows least of a processor last but for [`CpuModel::Host`].
    pub const ALL: [Self; 5] = [Self::Host, Self::Common, Self::V4, Self::V3, Self::V2];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Common => "common",
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
            Self::V4 => "x86-64-v4",
        }
    }
}

impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CpuModel {
    type Err = CpuError;

    fn from_str(text: &str) -> Result<Self, CpuError> {
        let found = Self::ALL.into_iter().find(|model| model.name() == text);
        found.ok_or_else(|| CpuError::Unknown(text.to_owned()))
    }
}

/// Why a guest cannot be shown a processor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    /// No such model.
    #[error("`{0}` is no CPU model: give host, common, x86-64-v2, x86-64-v3 or x86-64-v4")]
    Unknown(String),
    /// The host's processor, or its KVM, has less than the model.
    #[error("this host's CPU lacks {lacks}, which the CPU model {model} has: choose {}", fallback(*.model))]
    Model {
        /// The model.
        model: CpuModel,
        /// What is missing, by the names of Linux.
        lacks: String,
    },
}

fn fallback(model: CpuModel) -> &'static str {
    match model {
        CpuModel::V4 => "x86-64-v3, x86-64-v2 or host",
        CpuModel::V3 => "x86-64-v2 or host",
        CpuModel::V2 | CpuModel::Common | CpuModel::Host => "host",
    }
}

/// A hash over leaves (64-bit FNV-1a), which tells one host's offer from another's.
pub fn hash(leaves: &[CpuidEntry]) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x100_0000_01b3;
    let words = leaves.iter().flat_map(|leaf| {
        let [eax, ebx, ecx, edx] = leaf.registers;
        [leaf.function, leaf.index, eax, ebx, ecx, edx]
    });
    words
        .flat_map(u32::to_le_bytes)
        .fold(BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// EAX, EBX, ECX, EDX: places in [`CpuidEntry::registers`].
const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// The register of a leaf, 0 where there is no such leaf.
fn register(leaves: &[CpuidEntry], function: u32, index: u32, register: usize) -> u32 {
    let leaf = leaves
        .iter()
        .find(|leaf| leaf.function == function && leaf.index == index);
    leaf.map_or(0, |leaf| leaf.registers[register])
}

/// Whose processors follow which manual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vendor {
    /// AMD and Hygon.
    Amd,
    /// Intel, and those who do as Intel does.
    Intel,
}

impl Vendor {
    fn of(leaves: &[CpuidEntry]) -> Self {
        match &vendor(leaves) {
            b"AuthenticAMD" | b"HygonGenuine" => Self::Amd,
            _ => Self::Intel,
        }
    }
}

/// The twelve letters of leaf 0.
fn vendor(leaves: &[CpuidEntry]) -> [u8; 12] {
    let mut letters = [0; 12];
    for (place, at) in letters.chunks_exact_mut(4).zip([EBX, EDX, ECX]) {
        place.copy_from_slice(&register(leaves, 0, 0, at).to_le_bytes());
    }
    letters
}

#[cfg(test)]
mod tests;
