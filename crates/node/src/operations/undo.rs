//! What is done about an operation that failed, or in the midst of which the daemon died: one and the same, from what the record tells.

use std::sync::Arc;

use node_api::{Ended, State};

use crate::Error;
use crate::error::words::with_causes;
use crate::node::Node;
use crate::sandbox::entry::Entry;
use crate::saved::disk;
use crate::store::operation::Operation;

impl Node {
    /// Does the work of an operation that is in the record already, and takes it back if that fails. The first error is told.
    pub(crate) fn carry_out<T>(&self, entry: &Entry, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        work().map_err(|error| {
            let undone = self.undo(entry, &error.to_string());
            error.after_undo(undone)
        })
    }

    /// Brings a sandbox to rest whose operation has not come to its end, for this reason. What somebody was not told of is gone.
    pub(crate) fn undo(&self, entry: &Entry, reason: &str) -> Result<(), Error> {
        let undone = self.take_back(entry, reason);
        self.is_interrupted(entry, undone.is_err());
        undone
    }

    /// Whether it was left on the way; whoever was is looked after.
    pub(crate) fn is_interrupted(&self, entry: &Entry, interrupted: bool) {
        entry.lock().interrupted = interrupted;
        if interrupted {
            self.hold.lack.tell();
        }
    }

    fn take_back(&self, entry: &Entry, reason: &str) -> Result<(), Error> {
        let stored = entry.stored();
        if !stored.is_acknowledged() {
            return self.destroy(entry);
        }
        let ended = || Ended::Failed(reason.to_owned());
        match stored.under_way() {
            None => Ok(()),
            Some(Operation::Start) => {
                self.clear(entry)?;
                self.exited(entry, ended())
            }
            Some(Operation::Rollback { own_disk }) => {
                self.clear(entry)?;
                let path = self.sandbox_paths(entry).disk();
                // What it has written is not lost with its memory.
                if let Some(Err(error)) = own_disk.map(|own| disk::put_back(&path, own)) {
                    log::error!("sandbox {} has the snapshot's disk, not its own: {error}", entry.id);
                }
                disk::clean_beside(&path)?;
                self.exited(entry, ended())
            }
            Some(Operation::Move { was, saved_at }) => {
                log::warn!("sandbox {} goes on as it was: {reason}", entry.id);
                self.undo_move(entry, *was, saved_at.as_deref()).or_else(|error| {
                    log::error!("sandbox {} cannot go on as it was: {}", entry.id, with_causes(&error));
                    self.give_move_up(entry, &error.to_string())
                })
            }
            Some(Operation::Snapshot) => self.let_go_on_if_there(entry),
            Some(Operation::Stop) => {
                self.clear(entry)?;
                self.exited(entry, self.learn(entry, ended))
            }
            Some(Operation::Remove) => self.destroy(entry),
        }
    }

    /// Lets one go on that is held still. One whose machine is gone is not held any more: its end is settled elsewhere.
    pub(crate) fn let_go_on_if_there(&self, entry: &Entry) -> Result<(), Error> {
        let Some(vm) = entry.vm() else { return Ok(()) };
        self.let_go_on(&vm)?;
        self.note_change(entry, |stored| stored.rests_as(State::Running))
    }

    /// Brings everybody to rest who was left on the way; how many still are.
    pub(crate) fn undo_again(&self) -> usize {
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let mut left = 0;
        for entry in entries {
            let Some(_operation) = entry.try_operate() else {
                continue;
            };
            let waits = {
                let inner = entry.lock();
                inner.interrupted && !inner.gone
            };
            if !waits {
                continue;
            }
            if let Err(error) = self.undo(&entry, "it was interrupted") {
                left += 1;
                log::error!("sandbox {} is left on the way: {}", entry.id, with_causes(&error));
            }
        }
        left
    }
}
