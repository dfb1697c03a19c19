//! What can be asked of a sandbox in which state. Pure; what is done then is the operations' affair.
//!
//! ```text
//!  Creating ─► Starting ─► Running ◄──► Paused
//!                 ▲           │            │
//!                 │           ▼            │
//!              Exited ◄─── Stopping ◄──────┘          any ─► Removing
//!
//!  Running ─► Suspended ─► Starting
//! ```
//! A state with an arrow from it that nobody asked for (Creating, Starting, Stopping, Removing) belongs to an operation that is under way
//! (`store::operation`); the others are states of rest.

use std::sync::Arc;

use node_api::{PauseReason, Sandbox, State};

use crate::Error;
use crate::error::space::Lacking;
use crate::sandbox::entry::Entry;
use crate::vmm::vm::Vm;

/// Something that is asked of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Start,
    Stop,
    /// By a signal to its command.
    Signal,
    /// By the end of its VMM.
    Kill,
    Pause,
    /// It goes on, if it was paused or suspended.
    Unpause,
    Suspend,
    /// A connection to its agent.
    Exec,
    Snapshot,
    Rollback,
    Move,
    /// It gets devices of the host.
    Attach,
    /// It gives them back.
    Detach,
    /// Its memory is of another size.
    Update,
    /// It may run for some other time.
    Limit,
    /// It may send elsewhere.
    Network,
    /// What was built in it becomes a template.
    Keep,
    /// Unless by force.
    Remove,
}

impl Verb {
    /// Whether a sandbox in this state can be asked; what to do instead.
    pub(crate) fn admits(self, state: State) -> Result<(), &'static str> {
        let admitted = match self {
            Self::Start => state == State::Exited,
            Self::Stop => matches!(
                state,
                State::Exited | State::Suspended | State::Running | State::Paused | State::Stopping
            ),
            Self::Signal => matches!(state, State::Running | State::Stopping),
            Self::Kill => matches!(state, State::Running | State::Paused | State::Stopping),
            Self::Pause => matches!(state, State::Running | State::Paused),
            Self::Unpause => matches!(state, State::Running | State::Paused | State::Suspended),
            Self::Exec | Self::Suspend | Self::Snapshot | Self::Move | Self::Attach | Self::Detach | Self::Keep => {
                state == State::Running
            }
            Self::Limit | Self::Network => !matches!(state, State::Creating | State::Removing),
            Self::Rollback | Self::Update => matches!(state, State::Exited | State::Running | State::Paused),
            // What it has in its memory is nowhere else.
            Self::Remove => !state.has_vm() && state != State::Suspended,
        };
        match (admitted, self, state) {
            (true, ..) => Ok(()),
            (_, Self::Remove, _) => Err("stop it first, or remove it with --force"),
            (_, Self::Start, State::Running) => Err("it runs already"),
            (_, Self::Suspend, State::Suspended) => Err("it is that already"),
            (.., State::Suspended) => Err("let it go on with `basalt resume`, or end it with `basalt stop`"),
            (.., State::Exited) => Err("start it again with `basalt start`"),
            (.., State::Paused) => Err("let it go on with `basalt unpause`"),
            (.., State::Creating | State::Starting) => Err("wait until it runs"),
            (.., State::Stopping | State::Removing) => Err("run another with `basalt run`"),
            (.., State::Running) => Err("ask again"),
        }
    }

    /// The same of a sandbox, with the reason for people.
    pub(crate) fn check(self, sandbox: &Sandbox) -> Result<(), Error> {
        self.admits(sandbox.state).map_err(|next| refusal(sandbox, next))
    }
}

/// One that was stopped for want of space needs that, whatever else is asked of it.
fn refusal(sandbox: &Sandbox, next: &'static str) -> Error {
    if sandbox.pause_reason == Some(PauseReason::NoSpace) {
        return Lacking::Stopped(sandbox.name.clone()).into();
    }
    Error::WrongState {
        name: sandbox.name.clone(),
        state: sandbox.state,
        next,
    }
}

impl Entry {
    /// The VM of one that can be asked so.
    pub(crate) fn vm_for(&self, verb: Verb) -> Result<Arc<Vm>, Error> {
        let inner = self.lock();
        let sandbox = &inner.stored.sandbox;
        verb.check(sandbox)?;
        // It has ended just now.
        inner.vm.clone().ok_or_else(|| refusal(sandbox, "ask again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 8] = [
        State::Creating,
        State::Starting,
        State::Running,
        State::Paused,
        State::Stopping,
        State::Exited,
        State::Removing,
        State::Suspended,
    ];

    #[test]
    fn every_verb_is_admitted_in_these_states_alone() {
        // In the order of `STATES`.
        let table = [
            (Verb::Start, "-----x--"),
            (Verb::Stop, "--xxxx-x"),
            (Verb::Signal, "--x-x---"),
            (Verb::Kill, "--xxx---"),
            (Verb::Pause, "--xx----"),
            (Verb::Unpause, "--xx---x"),
            (Verb::Suspend, "--x-----"),
            (Verb::Exec, "--x-----"),
            (Verb::Snapshot, "--x-----"),
            (Verb::Rollback, "--xx-x--"),
            (Verb::Move, "--x-----"),
            (Verb::Attach, "--x-----"),
            (Verb::Detach, "--x-----"),
            (Verb::Update, "--xx-x--"),
            (Verb::Limit, "-xxxxx-x"),
            (Verb::Network, "-xxxxx-x"),
            (Verb::Keep, "--x-----"),
            (Verb::Remove, "x----xx-"),
        ];
        for (verb, states) in table {
            let admitted = STATES.map(|state| if verb.admits(state).is_ok() { 'x' } else { '-' });
            assert_eq!(String::from_iter(admitted), states, "{verb:?}");
        }
    }

    #[test]
    fn a_refusal_tells_what_to_do() {
        let mut sandbox = crate::testing::stored("aaaaaaaaaaaa", "web").sandbox;
        let told = |sandbox: &Sandbox, verb: Verb| verb.check(sandbox).unwrap_err().to_string();
        assert!(told(&sandbox, Verb::Exec).contains("basalt start"));
        sandbox.state = State::Running;
        assert!(told(&sandbox, Verb::Start).contains("it runs already"));
        assert!(told(&sandbox, Verb::Remove).contains("--force"));
        sandbox.state = State::Suspended;
        assert!(told(&sandbox, Verb::Exec).contains("basalt resume"));
        assert!(told(&sandbox, Verb::Suspend).contains("already"));
        assert!(told(&sandbox, Verb::Remove).contains("--force"));
        sandbox.state = State::Paused;
        assert!(told(&sandbox, Verb::Exec).contains("basalt unpause"));
        sandbox.pause_reason = Some(PauseReason::NoSpace);
        assert!(told(&sandbox, Verb::Exec).contains("space"));
    }
}
