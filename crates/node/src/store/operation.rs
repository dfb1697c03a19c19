//! What is under way with a sandbox. It is written before anything of it is done, and taken away when the sandbox has come to rest: whoever
//! finds it, the next daemon too, knows what to take back or to finish.

use node_api::{SandboxConfig, State};
use serde::{Deserialize, Deserializer, Serialize};

/// What is under way with a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operation {
    /// A machine comes up, the first one of a sandbox that nobody has been told of, or another one.
    Start,
    /// Its machine ends, as somebody wants.
    Stop,
    /// All of it goes.
    Remove,
    /// It is held still for a snapshot.
    Snapshot,
    /// It is saved, and its machine ends.
    Suspend {
        /// It is saved, on the disk: when its machine is gone it is suspended, and nothing goes on with that.
        is_saved: bool,
    },
    /// It goes on from what was saved when it was suspended.
    Resume {
        /// Its machine has run on, or may have: it must not go on from what was saved any more.
        is_spent: bool,
    },
    /// It is put back to a snapshot.
    Rollback {
        /// The inode of its own disk, which is exchanged for the snapshot's.
        own_disk: Option<u64>,
    },
    /// It becomes another class, by way of files in its directory.
    Move {
        /// What it was.
        was: Box<SandboxConfig>,
        /// The boot of the host at which the files were written, once they are: from then on it goes on from them alone. What was written
        /// may not have reached the disk when the host booted again.
        saved_at: Option<String>,
    },
}

impl Operation {
    /// It is over when its machine is gone: nothing else was to be done.
    pub(crate) fn ends_with_machine(&self) -> bool {
        matches!(
            self,
            Self::Stop
                | Self::Snapshot
                | Self::Suspend { is_saved: false }
                | Self::Resume { is_spent: true }
                | Self::Move { saved_at: None, .. }
        )
    }

    /// Without a machine it is suspended.
    pub(crate) fn leaves_suspended(&self) -> bool {
        matches!(
            self,
            Self::Suspend { is_saved: true } | Self::Resume { is_spent: false }
        )
    }

    /// What is shown of a sandbox while this is under way, where that is not what it was.
    pub(crate) fn shown(&self) -> Option<State> {
        match self {
            Self::Start => Some(State::Starting),
            Self::Stop => Some(State::Stopping),
            Self::Remove => Some(State::Removing),
            Self::Snapshot | Self::Suspend { .. } | Self::Resume { .. } | Self::Rollback { .. } | Self::Move { .. } => {
                None
            }
        }
    }

    /// What was under way with a sandbox in this state, as daemons wrote it that knew states alone.
    pub(crate) fn of_state(state: State) -> Option<Self> {
        match state {
            State::Creating | State::Starting => Some(Self::Start),
            State::Stopping => Some(Self::Stop),
            State::Removing => Some(Self::Remove),
            State::Running | State::Paused | State::Suspended | State::Exited => None,
        }
    }

    /// Reads one, or what earlier daemons had in its place: whether a sandbox was held for a snapshot.
    pub(crate) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Self>, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Known {
            Held(bool),
            Operation(Option<Operation>),
        }
        Ok(match Known::deserialize(from)? {
            Known::Held(held) => held.then_some(Self::Snapshot),
            Known::Operation(operation) => operation,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::database::Stored;

    #[test]
    fn what_earlier_daemons_wrote_is_understood() {
        let stored = crate::testing::stored("aaaaaaaaaaaa", "web");
        let mut written = serde_json::to_value(&stored).unwrap();
        assert_eq!(written.get("operation"), None);
        for (held, wanted) in [(true, Some(Operation::Snapshot)), (false, None)] {
            written["held"] = held.into();
            let read: Stored = serde_json::from_value(written.clone()).unwrap();
            assert_eq!(read.operation, wanted);
        }
        let mut stored = stored;
        for (state, wanted) in [
            (State::Creating, Some(Operation::Start)),
            (State::Starting, Some(Operation::Start)),
            (State::Stopping, Some(Operation::Stop)),
            (State::Removing, Some(Operation::Remove)),
            (State::Running, None),
            (State::Paused, None),
            (State::Suspended, None),
            (State::Exited, None),
        ] {
            stored.sandbox.state = state;
            assert_eq!(stored.under_way(), wanted, "{state:?}");
        }
    }

    #[test]
    fn each_is_read_as_it_was_written() {
        let was = Box::new(crate::testing::stored("aaaaaaaaaaaa", "web").sandbox.config);
        let saved_at = Some("a-boot".to_owned());
        for operation in [
            Operation::Start,
            Operation::Stop,
            Operation::Remove,
            Operation::Snapshot,
            Operation::Suspend { is_saved: true },
            Operation::Resume { is_spent: false },
            Operation::Rollback { own_disk: Some(7) },
            Operation::Move { was, saved_at },
        ] {
            let mut stored = crate::testing::stored("aaaaaaaaaaaa", "web");
            stored.begins(operation.clone());
            let read: Stored = serde_json::from_str(&serde_json::to_string(&stored).unwrap()).unwrap();
            assert_eq!(read, stored);
            assert_eq!(read.under_way(), Some(operation));
        }
    }
}
