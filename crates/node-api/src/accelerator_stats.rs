//! What the server of a sandbox's accelerator tells of itself, as the daemon passes it on, and what is listed of sandboxes that have one.
//! Does not know how a server is asked.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::accelerator::{Accelerator, AcceleratorPriority};
use crate::sandbox::{Process, State};

/// What a server tells. It is not trusted: all of it is its own word.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorStats {
    /// How often a process that served has ended, and another one serves since; all else is of the last one alone.
    pub restarts: u64,
    /// Programs that are connected.
    pub clients: u64,
    /// Objects of the API that they have.
    pub objects: u64,
    /// Memory of the accelerator.
    pub memory: AcceleratorMemory,
    /// Its time; none of an accelerator that takes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<AcceleratorTime>,
    /// Calls that failed, by the API's codes.
    pub errors: BTreeMap<i32, u64>,
    /// Calls that nobody carries out, by their names.
    pub not_served: BTreeMap<String, u64>,
}

/// Memory of an accelerator, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorMemory {
    /// What all programs have together.
    pub used: u64,
    /// The most that they had at a time.
    pub most: u64,
    /// What they may have.
    pub quota: Option<u64>,
    /// How often they were refused more.
    pub refused: u64,
}

/// Time of an accelerator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorTime {
    /// What complete commands have used, in nanoseconds.
    pub used_ns: u64,
    /// How long commands waited until it was their turn, in nanoseconds.
    pub held_up_ns: u64,
    /// Kernels that are complete.
    pub launches: u64,
    /// Reads, writes, copies and fills that are complete.
    pub transfers: u64,
    /// Commands that are not complete.
    pub in_flight: u64,
    /// Whether it is divided between sandboxes.
    pub is_shared: bool,
}

/// A sandbox's part of an accelerator's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorPart {
    /// Its share.
    pub share: u32,
    /// Whether it goes first.
    pub priority: AcceleratorPriority,
    /// Whether its server is connected, and so kept to its part.
    pub is_connected: bool,
    /// What it has used since this daemon knows of it, in nanoseconds, as its servers have said.
    pub used_ns: u64,
}

/// A sandbox that has an accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorInfo {
    /// The sandbox's name.
    pub sandbox: String,
    /// Its id.
    pub id: String,
    /// Where it stands.
    pub state: State,
    /// What it was asked to have.
    #[serde(flatten)]
    pub accelerator: Accelerator,
    /// The process that serves it; none where the sandbox has no machine, and where it has ended.
    pub server: Option<Process>,
    /// Its part of the time, of one that runs and takes some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<AcceleratorPart>,
    /// What its server tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stats: Option<AcceleratorStats>,
    /// Why that is not there, of one that runs, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_read_as_it_is_written() {
        let info = AcceleratorInfo {
            sandbox: "web".to_owned(),
            id: "aaaaaaaaaaaa".to_owned(),
            state: State::Running,
            accelerator: "opencl:share=300".parse().unwrap(),
            server: Some(Process { pid: 7, start: 9 }),
            part: Some(AcceleratorPart {
                share: 300,
                priority: AcceleratorPriority::High,
                is_connected: true,
                used_ns: 5,
            }),
            stats: Some(AcceleratorStats {
                time: Some(AcceleratorTime::default()),
                errors: BTreeMap::from([(-5, 2)]),
                ..AcceleratorStats::default()
            }),
            why: None,
        };
        let json = serde_json::to_value(&info).unwrap();
        assert_eq!((&json["api"], &json["share"]), (&"opencl".into(), &300.into()));
        assert_eq!(json["stats"]["errors"]["-5"], 2);
        assert_eq!(serde_json::from_value::<AcceleratorInfo>(json).unwrap(), info);
    }
}
