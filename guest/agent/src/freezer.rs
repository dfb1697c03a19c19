//! Lets all commands stand still, wherever in the hierarchy of cgroups they went, and go on again. The agent itself is in
//! the hierarchy's root, which cannot be frozen. Does not know what is done while they stand still.
//!
//! ```text
//!            freeze                          thaw
//!  running ─────────► every cgroup frozen ─────────► running
//!     ▲  no new command from here on │
//!     └────── one does not freeze ───┘
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;

/// How long all processes may take to stand still. One that waits for a disk does so when the disk has answered.
const LIMIT: Duration = Duration::from_secs(10);

/// How often it is looked whether they do.
const STEP: Duration = Duration::from_millis(1);

/// How long after the thaw a lost connection is taken for one that the restore has ended.
const NOTICED: Duration = Duration::from_secs(5);

/// The switch.
#[derive(Debug)]
pub(crate) struct Freezer {
    /// The root of the hierarchy, and in it the cgroup above those of the commands.
    mount: PathBuf,
    base: PathBuf,
    /// What is frozen; held by whoever freezes or re-identifies, of whom there is one at a time.
    frozen: Mutex<Vec<PathBuf>>,
    state: RwLock<FreezerState>,
}

#[derive(Debug, Default)]
struct FreezerState {
    /// No command may start.
    is_frozen: bool,
    thawed: Option<Instant>,
}

/// The right to freeze and to thaw.
pub(crate) struct Turn<'a> {
    freezer: &'a Freezer,
    frozen: MutexGuard<'a, Vec<PathBuf>>,
}

/// While it lives nothing is frozen.
pub(crate) struct MayStart<'a>(#[expect(dead_code, reason = "held, not read")] RwLockReadGuard<'a, FreezerState>);

impl Freezer {
    pub(crate) fn new(mount: &Path, base: &Path) -> Self {
        Self {
            mount: mount.to_owned(),
            base: base.to_owned(),
            frozen: Mutex::default(),
            state: RwLock::default(),
        }
    }

    /// Leave to start a command, or to change files. What comes while somebody freezes or re-identifies waits for its outcome.
    pub(crate) fn may_start(&self) -> Result<MayStart<'_>, Error> {
        let mut state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        if state.is_frozen {
            drop(state);
            // A client that has the acknowledgement of a re-identification in hand may be quicker than the thaw.
            drop(self.turn());
            state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_frozen {
            return Err(Error::Refused(
                "the sandbox is frozen for a snapshot: nothing can be started or stored in it until that is taken"
                    .to_owned(),
            ));
        }
        Ok(MayStart(state))
    }

    /// A restore ends all connections, and nobody has left: what runs behind them goes on. Those that end while
    /// everything stands still, or just afterwards, are taken for such, but for those of commands that were started after it.
    pub(crate) fn spares(&self, started: Instant) -> bool {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let thawed = |at: Instant| started < at && at.elapsed() < NOTICED;
        state.is_frozen || state.thawed.is_some_and(thawed)
    }

    /// Waits for whoever freezes or thaws now.
    pub(crate) fn turn(&self) -> Turn<'_> {
        Turn {
            freezer: self,
            frozen: self.frozen.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    fn set_frozen(&self, is_frozen: bool) -> bool {
        let state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        set(state, is_frozen)
    }

    /// No command may start from here on; whether that was so. Those that are being started are waited for, but not for ever: one may look
    /// for its directory where nobody answers, as in a file system of a program (FUSE), and others are to be started meanwhile.
    fn stop_starts(&self, end: Instant) -> Result<bool, Error> {
        loop {
            match self.state.try_write() {
                Ok(state) => return Ok(set(state, true)),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(set(poisoned.into_inner(), true)),
                Err(TryLockError::WouldBlock) if Instant::now() < end => thread::sleep(STEP),
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Refused(format!(
                        "a command is being started and does not come to it within {LIMIT:?}: its directory or its program may be in a file \
                         system that does not answer, such as one of FUSE; try again later"
                    )));
                }
            }
        }
    }

    /// Back into the hierarchy's root, if somebody has moved this process: engines that nest cgroups move all that they find.
    fn step_out(&self) -> Result<(), Error> {
        // Only the root of all has no such file. Where the hierarchy is a part of another, this process is not in it.
        if self.mount.join("cgroup.freeze").exists() {
            return Ok(());
        }
        let procs = self.mount.join("cgroup.procs");
        fs::write(&procs, "0").map_err(Error::system(format!(
            "moving the agent by writing {}",
            procs.display()
        )))
    }

    /// Every cgroup that is not within another of them: those of the commands, so that a command which is started later
    /// does not stand still with them, and those that processes made for themselves beside ours.
    fn outermost(&self) -> Result<Vec<PathBuf>, Error> {
        let mut found = Vec::new();
        for parent in [&self.mount, &self.base] {
            let entries = fs::read_dir(parent).map_err(Error::system(format!("reading {}", parent.display())))?;
            let dirs = entries
                .flatten()
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            found.extend(dirs.map(|entry| entry.path()).filter(|path| *path != self.base));
        }
        Ok(found)
    }
}

impl Turn<'_> {
    /// Freezes everything, then does `then`. If either fails, what was frozen here goes on.
    pub(crate) fn freeze(&mut self, then: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.freeze_within(LIMIT, then)
    }

    fn freeze_within(&mut self, limit: Duration, then: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let was_frozen = self.freezer.stop_starts(Instant::now() + limit)?;
        let before = self.frozen.len();
        let result = self.freeze_all(Instant::now() + limit).and_then(|()| then());
        if result.is_err() {
            let undone: Vec<_> = self.frozen.drain(before..).collect();
            // That it could not be undone either would say less than why it had to be.
            drop(write_all(&undone, "0"));
            if !was_frozen {
                self.freezer.set_frozen(false);
            }
        }
        result
    }

    /// A process that is not frozen yet can make another cgroup: until nothing new is found.
    fn freeze_all(&mut self, end: Instant) -> Result<(), Error> {
        self.freezer.step_out()?;
        loop {
            let mut new = self.freezer.outermost()?;
            new.retain(|path| !self.frozen.contains(path));
            // What somebody in the sandbox froze stays so.
            new.retain(|path| read(path, "cgroup.freeze").is_none_or(|text| text.trim() != "1"));
            if new.is_empty() {
                return Ok(());
            }
            self.frozen.extend(new.iter().cloned());
            write_all(&new, "1")?;
            for path in &new {
                wait_for(path, end)?;
            }
        }
    }

    /// Lets everything go on. What cannot is tried nevertheless, each.
    pub(crate) fn thaw(&mut self) -> Result<(), Error> {
        write_all(&self.frozen, "0")?;
        self.frozen.clear();
        self.freezer.set_frozen(false);
        Ok(())
    }
}

fn set(mut state: RwLockWriteGuard<'_, FreezerState>, is_frozen: bool) -> bool {
    if state.is_frozen && !is_frozen {
        state.thawed = Some(Instant::now());
    }
    std::mem::replace(&mut state.is_frozen, is_frozen)
}

/// Writes to all of them, and tells the first failure. A cgroup that is gone, or goes meanwhile, has nobody in it.
fn write_all(paths: &[PathBuf], text: &str) -> Result<(), Error> {
    let mut result = Ok(());
    for path in paths {
        let file = path.join("cgroup.freeze");
        match fs::write(&file, text) {
            Err(error) if !is_gone(&error) && result.is_ok() => {
                result = Err(Error::system(format!("writing {text} to {}", file.display()))(error));
            }
            _ => {}
        }
    }
    result
}

/// `ENODEV` is what a file says whose cgroup was removed after it was opened.
fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

fn wait_for(path: &Path, end: Instant) -> Result<(), Error> {
    while let Some(events) = read(path, "cgroup.events") {
        if events.lines().any(|line| line == "frozen 1") {
            return Ok(());
        }
        if Instant::now() >= end {
            return Err(Error::Refused(format!(
                "the processes in {} do not stand still within {LIMIT:?}: one of them waits for a disk, or for a device, \
                 that does not answer; try again later",
                path.display()
            )));
        }
        thread::sleep(STEP);
    }
    Ok(())
}

/// A file of a cgroup; `None` if the cgroup is gone.
fn read(path: &Path, name: &str) -> Option<String> {
    fs::read_to_string(path.join(name)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_does_not_come_to_its_start_keeps_no_other() {
        let nowhere = Path::new("/nonexistent");
        let freezer = Freezer::new(nowhere, nowhere);
        let hangs = freezer.may_start().unwrap();
        let mut turn = freezer.turn();
        thread::scope(|scope| {
            // While somebody waits to freeze others may start.
            let starts = scope.spawn(|| {
                thread::sleep(20 * STEP);
                freezer.may_start().is_ok()
            });
            let refused = turn.freeze_within(200 * STEP, || Ok(())).unwrap_err().to_string();
            assert!(refused.contains("is being started"), "{refused}");
            assert!(starts.join().unwrap());
        });
        drop(turn);
        assert!(freezer.may_start().is_ok(), "it is not frozen");
        drop(hangs);
        assert!(!freezer.stop_starts(Instant::now()).unwrap() && freezer.stop_starts(Instant::now()).unwrap());
    }
}
