//! Functions of the host's PCI bus that a running VM gets and gives back.

use serde::{Deserialize, Serialize};

/// Which functions of the host's a VM has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Functions {
    /// Bytes of the guest's memory that functions can reach: mapped by the host's IOMMU, and pinned. A piece that is being mapped does not
    /// count yet.
    pub mapped: u64,
    /// Bytes that are to be: what the guest boots with, and what it is to have plugged; it is mapped in whole pieces of 128 MiB. 0 where the VM has no function and gets none.
    pub total: u64,
    /// Requests to the IOMMU that mapped something, since its first function came.
    #[serde(default)]
    pub map_calls: u64,
    /// Bytes that these mapped, whatever was unmapped since.
    #[serde(default)]
    pub map_bytes: u64,
    /// Microseconds in which memory was being filled and mapped for that. By both follows how fast that goes on this host.
    #[serde(default)]
    pub map_usec: u64,
    /// Requests of the guest to plug memory, or to take it back from its balloon, that was mapped already.
    #[serde(default)]
    pub plug_hits: u64,
    /// Those that waited for memory to be mapped.
    #[serde(default)]
    pub plug_misses: u64,
    /// Why no more memory is being mapped ahead of the guest, though more is to be. It is tried again.
    #[serde(default)]
    pub error: Option<String>,
    /// Whether its functions came by files of their own, and so must further ones; `false` where they came by IOMMU groups, or there is none.
    /// A VMM of before, which takes no such files, does not say.
    #[serde(default)]
    pub iommufd: Option<bool>,
    /// A function may say how memory is filled for it ([`crate::devices::VfioPciConfig::memory_fill`]); `false` where a VMM of before does not
    /// know that.
    #[serde(default)]
    pub memory_fill: bool,
    /// Bytes of hot-pluggable memory that came zeroed ([`crate::Request::AddZeroedMemory`]); `None` of a VMM that takes none: one of before, or
    /// one whose engine or memory does not allow it.
    #[serde(default)]
    pub zeroed_memory: Option<u64>,
    /// Memory is being mapped, or unmapped after the last function: until then its pages stay where they are, and IOMMU groups are open.
    pub busy: bool,
    /// Each of them, in the order in which they were asked for.
    pub functions: Vec<FunctionInfo>,
}

/// One function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionInfo {
    /// Its name within the VM.
    pub id: String,
    /// Where it stands.
    pub state: FunctionState,
}

/// Where a function stands.
///
/// ```text
///  attach ──▶ Mapping ──▶ Present ──▶ detach: Leaving ──▶ gone
///                 └─────▶ Failed ───▶ detach: gone
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FunctionState {
    /// The guest's memory is being mapped for it.
    Mapping,
    /// It is on the guest's bus: device number `slot`, function 0, of bus 0. A guest that runs finds it when it looks.
    Present {
        /// The device number, 1 to 31.
        slot: u8,
    },
    /// It is off the guest's bus, and closed when no vCPU is in an access to it any more.
    Leaving,
    /// The memory could not be mapped, or the function not be put on the bus. Nothing of it is left but this.
    Failed(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_of_before_takes_no_zeroed_memory() {
        let told = r#"{"mapped":0,"total":0,"busy":false,"functions":[]}"#;
        assert_eq!(serde_json::from_str::<Functions>(told).unwrap(), Functions::default());
        let takes = Functions {
            zeroed_memory: Some(0),
            ..Functions::default()
        };
        let again = serde_json::from_str(&serde_json::to_string(&takes).unwrap());
        assert_eq!(again.ok(), Some(takes), "none yet is not none at all");
    }
}
