//! What is done about an operation that failed, or in the midst of which the daemon died: one and the same, from what the record tells.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

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
        self.set_interrupted(entry, undone.is_err());
        undone
    }

    /// One's turn to do something with a sandbox that is at rest, or can be brought to rest first.
    pub(crate) fn turn<'e>(&self, entry: &'e Entry) -> Result<MutexGuard<'e, ()>, Error> {
        let turn = entry.operate();
        let interrupted = entry.lock().is_interrupted();
        if interrupted {
            self.undo(entry, "it was interrupted")?;
        }
        // A daemon before this one may have been about to do that.
        self.return_left_devices(entry);
        Ok(turn)
    }

    /// Notes whether it was left on the way; whoever was is looked after.
    pub(crate) fn set_interrupted(&self, entry: &Entry, interrupted: bool) {
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
        self.settle_again(entry)?;
        let ended = || Ended::Failed(reason.to_owned());
        let stored = entry.stored();
        match stored.under_way() {
            None if stored.sandbox.state == State::Exited => self.remove_if_wanted(entry),
            None => Ok(()),
            Some(Operation::Start) => {
                self.clear(entry)?;
                self.exited(entry, ended())
            }
            Some(Operation::Rollback { own_disk }) => {
                self.clear(entry)?;
                let path = self.sandbox_paths(entry).disk();
                // What it has written is not lost with its memory.
                own_disk.map_or(Ok(()), |own| disk::put_back(&path, own))?;
                disk::clean_beside(&path)?;
                self.exited(entry, ended())
            }
            Some(Operation::Move { was, saved_at }) => {
                log::warn!("the move of sandbox {} is taken back: {reason}", entry.id);
                self.undo_move(entry, *was, saved_at.as_deref())
            }
            Some(Operation::Suspend { is_saved: true } | Operation::Resume { is_spent: false }) => {
                self.clear(entry)?;
                self.exited(entry, ended())
            }
            Some(Operation::Snapshot) => self.let_go_on_if_there(entry),
            Some(Operation::Suspend { is_saved: false } | Operation::Resume { is_spent: true }) => {
                self.let_go_on_if_there(entry)?;
                match entry.state() {
                    // It has no use for it any more, however it rests.
                    State::Running | State::Exited if !entry.lock().gone => self.forget_suspended(entry),
                    _ => Ok(()),
                }
            }
            Some(Operation::Stop) => self.ends(entry, ended),
            Some(Operation::Remove) => self.destroy(entry),
        }
    }

    /// Its machine is gone, or goes, and it has exited.
    fn ends(&self, entry: &Entry, otherwise: impl FnOnce() -> Ended) -> Result<(), Error> {
        self.settle_as(entry, self.learn(entry, otherwise))?;
        self.remove_if_wanted(entry)
    }

    /// One that has exited goes, if that was asked for with it.
    pub(crate) fn remove_if_wanted(&self, entry: &Entry) -> Result<(), Error> {
        let remove = entry.stored().sandbox.config.remove;
        match remove && !entry.lock().attached {
            true => self.destroy(entry),
            false => Ok(()),
        }
    }

    /// Lets one go on that is held still. One whose machine is gone is not held any more: its end is settled elsewhere.
    pub(crate) fn let_go_on_if_there(&self, entry: &Entry) -> Result<(), Error> {
        let Some(vm) = entry.vm() else {
            return self.note_change(entry, |stored| {
                if stored.sandbox.state == State::Exited {
                    stored.operation = None;
                }
            });
        };
        if let Err(error) = self.let_go_on(&entry.stored(), &vm) {
            return match vm.wait(Duration::ZERO) {
                // Nobody may have watched it yet.
                true => self.ends(entry, || Ended::Failed(error.to_string())),
                false => Err(error),
            };
        }
        // It may be one that had just begun to run.
        vm.watch(&self.monitor, &entry.id)
            .map_err(Error::host("waiting for the VMM's end"))?;
        if let Some(promise) = entry.promised() {
            promise.runs();
        }
        self.note_change(entry, |stored| {
            // Somebody may have ended it meanwhile.
            if stored.is_held() {
                stored.rests_as(State::Running);
            }
        })
    }

    /// Brings everybody to rest who was left on the way; how many still are.
    pub(crate) fn undo_again(self: &Arc<Self>) -> usize {
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let mut left = 0;
        for entry in entries {
            let waits = || entry.lock().is_interrupted();
            let Some(_operation) = entry.try_operate() else {
                // Whoever is busy with it may be about to leave it so.
                left += usize::from(waits());
                continue;
            };
            if !waits() {
                continue;
            }
            let undone = self.undo(&entry, "it was interrupted");
            if undone.is_ok() {
                // First, as it forgets why the devices of a machine before did not come.
                self.follow_size(&entry);
                self.return_left_devices(&entry);
                // Of devices that can be neither attached nor given back.
                left += usize::from(waits());
            }
            if let Err(error) = undone {
                left += 1;
                entry.lines.interrupted.say(|more| {
                    log::error!(
                        "what was begun with sandbox {} could be neither finished nor taken back, and is tried again: {}{more}",
                        entry.id,
                        with_causes(&error)
                    );
                });
            }
        }
        left
    }
}
