//! Commands that are kept: they go on without the connection that started them, and any connection can find them and attach
//! to them. `table.rs` is where they are found, `audience.rs` who is attached. Does not start them (`exec.rs` does).
//!
//! ```text
//!  exec ─► reserved ─► in the table ─ has ended, output is sent ─► out of the table ─► Exited to all who are attached
//! ```

mod audience;
mod table;

use std::sync::Arc;

use agent_api::{ExitStatus, Kept};

use crate::session::Session;

pub(crate) use audience::{Attachment, Audience};
pub(crate) use table::{Registered, Reservation, Table};

/// One of them.
pub(crate) struct Command {
    pub(crate) session: Session,
    pub(crate) audience: Audience,
}

/// All of them.
pub(crate) type Commands = Table<Command>;

/// The place of a command that runs: in the table, and before its audience. Who drops it leaves nobody waiting.
pub(crate) struct Place {
    registered: Registered<Command>,
    command: Arc<Command>,
}

impl Place {
    /// A command takes its place, with the connection that started it, if that is to be attached to it.
    pub(crate) fn take(
        reservation: Reservation<Command>,
        session: Session,
        kept: Kept,
        first: Option<&Arc<Attachment>>,
    ) -> Self {
        let pid = session.pid();
        let command = Arc::new(Command {
            session,
            audience: Audience::default(),
        });
        if let Some(first) = first {
            // Nobody has ended it, and nothing was told yet.
            drop(command.audience.enter(first));
        }
        Self {
            registered: reservation.register(pid, kept, Arc::clone(&command)),
            command,
        }
    }

    /// The command.
    pub(crate) fn command(&self) -> &Arc<Command> {
        &self.command
    }

    /// Who is attached.
    pub(crate) fn audience(&self) -> &Audience {
        &self.command.audience
    }

    /// It has ended. Who is told so does not find it any more.
    pub(crate) fn end(&self, status: ExitStatus) {
        self.registered.remove();
        self.command.audience.end(Some(status));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.registered.remove();
        // Both are so already, unless moving the command's bytes has failed.
        self.command.session.finish();
        self.command.audience.end(None);
    }
}
