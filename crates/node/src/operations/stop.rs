//! How a sandbox comes to its end, and what is done about it.
//!
//! ```text
//!  stop ─► SIGTERM to its command ─► grace ─► power off ─► SIGKILL to its VMM ─┐
//!  kill ───────────────────────────────────────────────────────────────────────┤
//!  by itself ──────────────────────────────────────────────────────────────────┴─► settle: why, clear, exited, (destroy)
//! ```
//! `settle` is called by the monitor alone, once for each VMM that has run. Everything here may find it done already.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use agent_api::log::{What, read};
use agent_api::{ExitStatus, PowerAction, Shutdown};
use base::{ByteSize, points};
use node_api::{Ended, EventKind, State};
use observe::span::span;

use crate::node::Node;
use crate::resources::budget::Changed;
use crate::resources::held;
use crate::resources::limits;
use crate::sandbox::entry::{Entry, Inner, Unsettled};
use crate::sandbox::lifecycle::Verb;
use crate::store::database::CameZeroed;
use crate::store::operation::Operation;
use crate::store::records::sync_directory;
use crate::store::remove::remove_directory;
use crate::store::unfinished::unfinished;
use crate::{Error, clock};

/// The end of a log in which its last record lies.
const LOG_END: u64 = 4096;

/// How long the rest may take after the VMM is gone.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

impl Node {
    /// Ends a sandbox in order; the rest of it after `grace`.
    pub(crate) fn stop(&self, entry: &Arc<Entry>, grace: Duration) -> Result<(), Error> {
        let _operation = entry.operate_to_stop();
        // It was being made, and that was given up.
        if entry.lock().gone {
            return Ok(());
        }
        self.stop_now(entry, grace)
    }

    /// The same for who has its turn already.
    pub(crate) fn stop_now(&self, entry: &Arc<Entry>, grace: Duration) -> Result<(), Error> {
        let stored = entry.stored();
        let state = stored.sandbox.state;
        Verb::Stop.check(&stored.sandbox)?;
        match state {
            State::Exited => return Ok(()),
            State::Suspended => return self.end_suspended(entry),
            _ => (),
        }
        let Some(vm) = entry.vm() else {
            return self.wait_for_end(entry);
        };
        self.mark_stopping(entry)?;
        if stored.sandbox.pause_reason.is_some() && !self.has_space_for(entry) {
            // It would stop again before its command has heard of anything.
            log::warn!(
                "sandbox {} is ended without being asked: there is no space for what it writes",
                entry.id
            );
            vm.kill()?;
            self.points.at(points::STOP_KILLED);
            return self.wait_for_end(entry);
        }
        if state == State::Paused
            && let Err(error) = vm.ask("the VM was resumed", vmm_api::VmmClient::resume)
        {
            log::info!("cannot resume sandbox {} to stop it: {error}", entry.id);
        }
        self.points.at(points::STOP_RECORDED);
        if let Err(error) = self.ask_to_end(entry, &vm, grace) {
            // It is killed next, which needs nobody's help.
            log::info!("cannot stop sandbox {} cleanly, killing its VMM: {error}", entry.id);
        }
        vm.kill()?;
        self.points.at(points::STOP_KILLED);
        self.wait_for_end(entry)
    }

    /// SIGTERM, then the power button; returns when it has ended or did not.
    fn ask_to_end(&self, entry: &Entry, vm: &crate::vmm::vm::Vm, grace: Duration) -> Result<(), Error> {
        let failed = |error| vm.diagnose("it was stopped", error);
        let mut agent = vm.agent()?;
        let has_command = entry.stored().has_command();
        if has_command {
            agent.signal_main(libc::SIGTERM).map_err(failed)?;
        }
        self.points.at(points::STOP_SIGNALLED);
        if has_command && entry.wait(Some(grace), Inner::has_ended) {
            return Ok(());
        }
        // Where there is no command, all that was started in it is told.
        let grace = if has_command { Duration::ZERO } else { grace };
        let shutdown = Shutdown {
            how: PowerAction::PowerOff,
            grace_ms: u32::try_from(grace.as_millis()).unwrap_or(u32::MAX),
        };
        let limit = Some(self.config.limits.answer);
        let ordered = agent.set_read_timeout(limit).and_then(|()| agent.shutdown(shutdown));
        ordered.map_err(failed)?;
        // The agent answers before it begins, and takes the grace from then on.
        entry.wait(Some(grace + self.config.limits.power_off), Inner::has_ended);
        Ok(())
    }

    /// Stops it if it runs, and starts it.
    pub(crate) fn restart(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        grace: Duration,
    ) -> Result<crate::operations::stages::Started, Error> {
        let _operation = self.turn(entry)?;
        if entry.state() == State::Suspended {
            // What is in its memory is given up by who says so.
            Verb::Start.check(&entry.stored().sandbox)?;
        }
        // If there is no room for it to boot, it runs on.
        let held = self.admit_restart(entry)?;
        self.stop_now(entry, grace)?;
        let started = self.start_again(entry, held.as_ref().map(Changed::promise))?;
        if let Some(held) = held {
            held.keep();
        }
        Ok(started)
    }

    /// Ends its VM at once; what was in it is not needed any more.
    pub(crate) fn end_for_another(&self, entry: &Entry, vm: &crate::vmm::vm::Vm) -> Result<(), Error> {
        self.mark_stopping(entry)?;
        vm.kill()?;
        self.wait_for_end(entry)
    }

    /// Whoever is busy with it takes back what it does.
    fn mark_stopping(&self, entry: &Entry) -> Result<(), Error> {
        self.note_change(entry, |stored| {
            // It has ended just now.
            if !stored.sandbox.state.has_vm() {
                return;
            }
            stored.sandbox.state = State::Stopping;
            stored.stopped = true;
            if stored.operation.as_ref().is_none_or(Operation::ends_with_machine) {
                stored.operation = Some(Operation::Stop);
            }
        })
    }

    /// For who has its turn: what could not be taken away of its machine is taken away now.
    fn wait_for_end(&self, entry: &Entry) -> Result<(), Error> {
        self.wait_until_ended(entry)?;
        self.settle_again(entry)
    }

    /// The same for who has not.
    fn wait_for_end_without_turn(&self, entry: &Entry) -> Result<(), Error> {
        self.wait_until_ended(entry)?;
        if entry.lock().is_over() {
            return Ok(());
        }
        let _operation = entry.operate();
        self.settle_again(entry)
    }

    fn wait_until_ended(&self, entry: &Entry) -> Result<(), Error> {
        let limit = self.config.limits.kill + SETTLE_LIMIT;
        let ended = entry.wait(Some(limit), Inner::has_ended);
        ended.then_some(()).ok_or(Error::Deadline {
            what: "the end of the VMM",
            limit,
        })
    }

    /// Sends its command a signal; SIGKILL ends the VM.
    pub(crate) fn kill(&self, entry: &Arc<Entry>, signal: i32) -> Result<(), Error> {
        let vm = entry.vm_for(match signal {
            libc::SIGKILL => Verb::Kill,
            _ => Verb::Signal,
        })?;
        if signal == libc::SIGKILL {
            self.mark_stopping(entry)?;
            vm.kill()?;
            self.wait_for_end_without_turn(entry)?;
            return self.kill_suspended(entry);
        }
        if !entry.stored().has_command() {
            return Err(Error::Invalid(format!(
                "sandbox {} has no command that could be signalled: `basalt stop` ends it, `basalt exec` signals what runs in it",
                entry.stored().sandbox.name
            )));
        }
        let mut agent = vm.agent()?;
        agent
            .signal_main(signal)
            .map_err(|error| vm.diagnose("its command was signalled", error))
    }

    /// Somebody was about to suspend what was to be killed.
    fn kill_suspended(&self, entry: &Entry) -> Result<(), Error> {
        if entry.state() != State::Suspended {
            return Ok(());
        }
        let _operation = entry.operate();
        match entry.state() {
            State::Suspended => self.end_suspended(entry),
            // It was resumed meanwhile, by who wants it to run.
            _ => Ok(()),
        }
    }

    /// The client of a sandbox that is not detached has what it wanted, or is gone.
    pub(crate) fn end_foreground(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let remove = entry.stored().sandbox.config.remove;
        entry.lock().attached = false;
        if let Some(vm) = entry.vm() {
            let _span = span("machine ended");
            // The agent powers off when its client has gone; nobody needs what is not written yet if it is removed.
            if remove || !entry.wait(Some(self.config.limits.power_off), Inner::has_ended) {
                vm.kill()?;
            }
            self.wait_for_end_without_turn(entry)?;
        }
        if remove {
            let _span = span("sandbox removed");
            self.remove(entry, true)?;
        }
        Ok(())
    }

    /// A VMM has ended: keeps why, and takes away what belonged to it.
    pub(crate) fn settle(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        // It may have another one already.
        let Some(vm) = entry.vm().filter(|vm| vm.wait(Duration::ZERO)) else {
            return Ok(());
        };
        let ending = entry.ending();
        // Who has its turn may have dealt with the end meanwhile, and started it again.
        if !entry.vm().is_some_and(|now| Arc::ptr_eq(&now, &vm)) {
            return Ok(());
        }
        let stored = entry.stored();
        let ended = self.learn(entry, || {
            let error = vm.end("its command was running");
            Ended::Failed(self.with_cause(entry, error).to_string())
        });
        self.points.at(points::END_LEARNT);
        self.settle_with(entry, ended, &ending)?;
        drop(ending);
        self.points.at(points::END_RECORDED);
        if stored.sandbox.config.remove && !entry.lock().attached {
            let _operation = entry.operate();
            // Somebody may have started it again meanwhile.
            if entry.state() == State::Exited {
                self.destroy(entry)?;
            }
        }
        Ok(())
    }

    /// Its machine has ended so: takes away what belonged to it, and keeps why. What fails is tried again.
    pub(crate) fn settle_as(&self, entry: &Entry, ended: Ended) -> Result<(), Error> {
        self.settle_with(entry, ended, &entry.ending())
    }

    fn settle_with(&self, entry: &Entry, ended: Ended, ending: &MutexGuard<'_, ()>) -> Result<(), Error> {
        let vmm = entry.stored().sandbox.vmm;
        let settled = self.clear_with(entry, ending).and_then(|()| {
            self.points.at(points::END_CLEARED);
            self.exited_during(entry, ended.clone(), Operation::ends_with_machine)
        });
        if settled.is_err() {
            let ended = Some(ended);
            self.set_unsettled(entry, Unsettled { vmm, ended });
        }
        settled
    }

    /// Whoever waits for its end, or looks after who was left on the way, deals with it.
    pub(crate) fn set_unsettled(&self, entry: &Entry, unsettled: Unsettled) {
        entry.lock().unsettled = Some(unsettled);
        entry.notify();
        self.hold.lack.tell();
    }

    /// Deals with the end of its machine where that failed before; for who has its turn.
    pub(crate) fn settle_again(&self, entry: &Entry) -> Result<(), Error> {
        let Some(unsettled) = entry.lock().unsettled().cloned() else {
            return Ok(());
        };
        match unsettled.ended {
            Some(ended) => self.settle_as(entry, ended)?,
            None => self.rests_without(entry)?,
        }
        // It may be one that goes when it has exited, which whoever has its turn need not wait for.
        let remove = entry.stored().sandbox.config.remove;
        let mut inner = entry.lock();
        inner.unsettled = None;
        inner.interrupted |= remove;
        Ok(())
    }

    /// Tells a VMM that was killed for the memory it took from one that died otherwise.
    pub(crate) fn with_cause(&self, entry: &Entry, error: Error) -> Error {
        let Error::VmmDied { during, log } = error else {
            return error;
        };
        let usage = self
            .cgroup(entry)
            .and_then(|cgroup| Ok(cgroup.map(|cgroup| cgroup.usage()).transpose()?));
        match usage {
            Ok(Some(usage)) if usage.memory.is_some_and(|memory| memory.oom_kills > 0) => {
                let config = entry.stored().sandbox.config;
                Error::VmmTookMemory {
                    guest: config.resources.memory,
                    limit: ByteSize(limits::memory_max(&config)),
                    log,
                }
            }
            Ok(_) => Error::VmmDied { during, log },
            Err(error) => {
                log::info!(
                    "cannot read from the cgroup of sandbox {} why its VMM died: {error}",
                    entry.id
                );
                Error::VmmDied { during, log }
            }
        }
    }

    /// How it ended: as its log says, or because somebody wanted it, or `otherwise`.
    pub(crate) fn learn(&self, entry: &Entry, otherwise: impl FnOnce() -> Ended) -> Ended {
        let stored = entry.stored();
        let log = self.sandbox_paths(entry).log();
        match last_exit(&log, stored.log_from) {
            Ok(Some(status)) => Ended::Command(status),
            _ if stored.stopped => Ended::Stopped,
            Ok(None) => otherwise(),
            Err(error) => Ended::Failed(format!("how it ended is not known, as its log cannot be read: {error}")),
        }
    }

    /// It has exited, and rests.
    pub(crate) fn exited(&self, entry: &Entry, ended: Ended) -> Result<(), Error> {
        self.exited_during(entry, ended, |_| true)
    }

    /// The same for one with which something may be under way that goes on without this machine: `rests` tells which is over.
    fn exited_during(&self, entry: &Entry, ended: Ended, rests: impl Fn(&Operation) -> bool) -> Result<(), Error> {
        // Before anybody sees that it has ended, and gives it the next one.
        drop(entry.take_promise());
        let stored = entry.stored();
        if stored.operation.as_ref().is_some_and(Operation::leaves_suspended) {
            return self.rests_suspended(entry);
        }
        if stored.keeps_devices() && stored.operation.as_ref().is_some_and(&rests) {
            // There is no next machine.
            self.devices.release(&entry.id)?;
        }
        let now = clock::now_ns();
        self.note_change(entry, |stored| {
            let sandbox = &mut stored.sandbox;
            (sandbox.state, sandbox.vmm) = (State::Exited, None);
            (sandbox.accelerator, sandbox.accelerator_ended) = (None, None);
            (sandbox.ended_ns, sandbox.ended) = (Some(now), Some(ended.clone()));
            if stored.operation.as_ref().is_none_or(&rests) {
                sandbox.ends_ns = None;
            }
            sandbox.config.resources = sandbox.config.resources.holding(ByteSize(0));
            stored.came_zeroed = CameZeroed::default();
            stored.operation = stored.operation.take().filter(|operation| !rests(operation));
            if !stored.keeps_devices() {
                stored.detached.clear();
            }
        })?;
        self.events.tell(EventKind::Exit, &entry.stored().sandbox);
        Ok(())
    }

    /// Its machine is gone as that of one that is suspended.
    fn rests_suspended(&self, entry: &Entry) -> Result<(), Error> {
        let was = entry.stored().operation;
        self.note_change(entry, |stored| {
            let sandbox = &mut stored.sandbox;
            (sandbox.vmm, sandbox.ends_ns) = (None, None);
            (sandbox.accelerator, sandbox.accelerator_ended) = (None, None);
            stored.came_zeroed = CameZeroed::default();
            stored.rests_as(State::Suspended);
        })?;
        if matches!(was, Some(Operation::Suspend { .. })) {
            self.events.tell(EventKind::Suspend, &entry.stored().sandbox);
        }
        Ok(())
    }

    /// Kills and takes away all that belongs to a VM, whether it is there or not.
    pub(crate) fn clear(&self, entry: &Entry) -> Result<(), Error> {
        self.clear_with(entry, &entry.ending())
    }

    fn clear_with(&self, entry: &Entry, _ending: &MutexGuard<'_, ()>) -> Result<(), Error> {
        let providers = self.providers();
        held::ALL.iter().try_for_each(|held| held.release(&providers, entry))
    }

    /// Removes a sandbox; one that runs only by `force`. It is fine if it is gone.
    pub(crate) fn remove(&self, entry: &Arc<Entry>, force: bool) -> Result<(), Error> {
        let admitted = || match force {
            true => Ok(()),
            false => Verb::Remove.check(&entry.stored().sandbox),
        };
        admitted()?;
        self.kill_to_remove(entry)?;
        let _operation = entry.operate();
        if entry.lock().gone {
            return Ok(());
        }
        // Somebody may have started it meanwhile.
        admitted()?;
        let state = entry.state();
        if matches!(state, State::Running | State::Paused) {
            self.kill_to_remove(entry)?;
        }
        if state.has_vm()
            && let Err(error) = self.wait_for_end(entry)
        {
            log::error!("sandbox {} is removed although its end was not seen: {error}", entry.id);
        }
        self.destroy(entry)
    }

    /// Whoever is busy with it finds its VM gone, and is done soon.
    fn kill_to_remove(&self, entry: &Entry) -> Result<(), Error> {
        if entry.state().has_vm() {
            self.mark_stopping(entry)?;
        }
        entry.vm().map_or(Ok(()), |vm| vm.kill())
    }

    /// Takes away all of a sandbox.
    pub(crate) fn destroy(&self, entry: &Entry) -> Result<(), Error> {
        let destroyed = self.destroy_now(entry);
        self.set_interrupted(entry, destroyed.is_err());
        destroyed
    }

    fn destroy_now(&self, entry: &Entry) -> Result<(), Error> {
        self.note_change(entry, |stored| {
            stored.begins(Operation::Remove);
            stored.detached.clear();
        })?;
        self.points.at(points::REMOVE_RECORDED);
        self.clear(entry)?;
        self.points.at(points::REMOVE_CLEARED);
        if let Some(hidden) = hide(&self.sandbox_paths(entry).directory, entry.stored().lasts())? {
            remove_directory(&hidden)?;
        }
        self.points.at(points::REMOVE_FILES);
        self.forget(entry)?;
        self.points.at(points::REMOVE_DONE);
        Ok(())
    }
}

/// Takes the name of a sandbox's directory away, and then removes it. Without the name there is no sandbox, whatever the database
/// says after a power failure; with it nothing of the sandbox is missing.
fn hide(directory: &Path, lasts: bool) -> Result<Option<PathBuf>, Error> {
    let hidden = directory.with_file_name(unfinished().map_err(Error::host("reading entropy"))?);
    match fs::rename(directory, &hidden) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        renamed => renamed.map_err(Error::file("remove", directory))?,
    }
    if lasts && let Some(sandboxes) = directory.parent() {
        sync_directory(sandboxes)?;
    }
    Ok(Some(hidden))
}

/// How the command ended, as the last record of its log says, if that lies behind `from`. The guest writes the log: it can
/// lie about its own command, and about nothing else.
fn last_exit(log: &Path, from: u64) -> io::Result<Option<ExitStatus>> {
    let mut file = match File::open(log) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_END).max(from)))?;
    let mut end = Vec::new();
    file.take(LOG_END).read_to_end(&mut end)?;
    let last = end.split(|&byte| byte == b'\n').rev().find(|line| !line.is_empty());
    Ok(last.and_then(read).and_then(|record| match record.what {
        What::Exited(status) => Some(status),
        What::Output { .. } => None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_api::OutputStream;
    use agent_api::log::{write_exit, write_output};

    #[test]
    fn the_last_record_tells_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        assert_eq!(last_exit(&path, 0).unwrap(), None);
        let mut text = Vec::new();
        write_output(&mut text, 5, OutputStream::Stdout, &[b'x'; 10_000]);
        write_exit(&mut text, 1_000_000_000, ExitStatus::Code(4));
        fs::write(&path, &text).unwrap();
        assert_eq!(last_exit(&path, 0).unwrap(), Some(ExitStatus::Code(4)));
        let length = u64::try_from(text.len()).unwrap();
        assert_eq!(last_exit(&path, length).unwrap(), None, "an earlier run's");
        write_output(&mut text, 2_000_000_000, OutputStream::Stdout, b"started again\n");
        fs::write(&path, &text).unwrap();
        assert_eq!(last_exit(&path, 0).unwrap(), None);
    }
}
