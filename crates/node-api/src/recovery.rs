//! What a daemon found wrong with its state directory when it was started, and what it did about it: plain data, which the
//! daemon writes to `recovery.json` and `basalt doctor` reads. Knows no database and no directory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The report's name, in the state directory.
pub const REPORT: &str = "recovery.json";

/// The directory of what was set aside, in the state directory.
pub const QUARANTINE: &str = "quarantine";

/// How the name of a database begins that was damaged and set aside, in the state directory.
pub const DAMAGED_DATABASE: &str = "node.db.damaged-";

/// What was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// The node's database.
    Database,
    /// A sandbox, its record or its directory.
    Sandbox,
    /// A snapshot's directory.
    Snapshot,
    /// A template's directory.
    Template,
    /// The directory of a VMM's sockets.
    Run,
    /// A VMM process.
    Vmm,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Database => "database",
            Self::Sandbox => "sandbox",
            Self::Snapshot => "snapshot",
            Self::Template => "template",
            Self::Run => "run",
            Self::Vmm => "vmm",
        })
    }
}

/// What was done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The sandbox is known again, by its own record.
    Adopted,
    /// One of the two copies was older or damaged, and was written again from the other.
    Repaired,
    /// Moved to the quarantine, or renamed beside where it was: nothing of it was deleted.
    SetAside,
    /// Nothing of it is left but its name in the database, which has gone too.
    Forgotten,
    /// It was not touched.
    LeftAlone,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Adopted => "adopted",
            Self::Repaired => "repaired",
            Self::SetAside => "set aside",
            Self::Forgotten => "forgotten",
            Self::LeftAlone => "left alone",
        })
    }
}

/// One thing that was wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What kind of thing it is about.
    pub subject: Subject,
    /// Its name, id or path.
    pub name: String,
    /// What was done.
    pub outcome: Outcome,
    /// What was wrong, and where it is now.
    pub why: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}: {}", self.subject, self.name, self.outcome, self.why)
    }
}

/// All that was wrong at the last start that found anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// When: nanoseconds since 1970.
    pub time_ns: u64,
    /// What.
    pub findings: Vec<Finding>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_a_line_and_survives_json() {
        let recovery = Recovery {
            time_ns: 7,
            findings: vec![Finding {
                subject: Subject::Sandbox,
                name: "web".into(),
                outcome: Outcome::SetAside,
                why: "it has no record".into(),
            }],
        };
        assert_eq!(
            recovery.findings[0].to_string(),
            "sandbox web set aside: it has no record"
        );
        let text = serde_json::to_string(&recovery).unwrap();
        assert!(text.contains(r#""outcome":"set-aside""#), "{text}");
        assert_eq!(serde_json::from_str::<Recovery>(&text).unwrap(), recovery);
    }
}
