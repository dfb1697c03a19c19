//! CPUs that belong to one sandbox: found, kept free of everything else, and given back.
//!
//! ```text
//!  shared ─── isolate ───► isolated (an operator's) ─┐
//!    │  └──── dedicate ──────────────────────────────┴─► dedicated: a vCPU each, Linux's all the same
//!    └─────── reserve ─────► bare: offline for Linux, a guest's alone (basalt.ko)
//! ```
//! What is isolated or dedicated is kept free by Linux's own means, all of them files: tasks by cpusets (and by their affinity, where
//! they are in the root cgroup), interrupts and unbound work by their masks; timers and RCU's callbacks are moved by taking the CPU
//! offline and online again. A journal in `/run` says whose a CPU is and what every file said before; it is written before anything is
//! changed, so that whoever comes after a crash can put it back: `release` of a sandbox that is gone, by any daemon of the host.
//!
//! Does not know what a sandbox is but its id and its cgroup, nor who takes CPUs offline for a reservation.

mod choice;
mod error;
mod fence;
mod files;
mod journal;
mod tasks;
mod threads;

use std::fs;
use std::path::{Path, PathBuf};

use base::CpuSet;
use serde::{Deserialize, Serialize};

pub use error::Error;
pub use threads::{CONTROL, place};

use choice::{Host, choose};
use files::CpuFile;
use journal::{Journal, Locked};

const POSSIBLE: &str = "devices/system/cpu/possible";
const SYS: &str = "/sys";
const JOURNAL: &str = "/run/basalt-cpus";

/// Where things are.
#[derive(Clone, Debug)]
struct Places {
    /// procfs.
    proc: PathBuf,
    /// sysfs.
    sys: PathBuf,
    /// The top of the cgroups; looked for when it is needed, which is not for each sandbox that starts.
    cgroup: Option<PathBuf>,
    /// Where the journal is; gone after a boot.
    journal: PathBuf,
}

/// Whose a CPU is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// A sandbox's id.
    pub sandbox: String,
    /// Its cgroup: when that is gone, so is the sandbox.
    pub cgroup: PathBuf,
    /// Who has taken the CPUs, by its number and when it began: while that is there, the sandbox may be about to start.
    taker: (u32, u64),
}

impl Owner {
    /// A sandbox that this process starts.
    pub fn new(sandbox: &str, cgroup: &Path) -> Self {
        let taker = std::process::id();
        Self {
            sandbox: sandbox.to_owned(),
            cgroup: cgroup.to_owned(),
            taker: (taker, tasks::started("/proc".as_ref(), taker).unwrap_or(0)),
        }
    }

    /// Something runs in its cgroup, or somebody is about to have something run there.
    fn is_there(&self) -> bool {
        let Ok(events) = fs::read_to_string(self.cgroup.join("cgroup.events")) else {
            return false;
        };
        let (taker, start) = self.taker;
        events.lines().any(|line| line == "populated 1") || tasks::started("/proc".as_ref(), taker) == Some(start)
    }
}

/// What a CPU of the host is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// By everything.
    Shared,
    /// By nobody: an operator has isolated it, and a sandbox that is to own CPUs takes it first.
    Isolated,
    /// By a vCPU of a sandbox of the class `dedicated`.
    Dedicated,
    /// By a guest alone: Linux has given it up.
    Bare,
    /// By nobody: it is offline.
    Offline,
}

/// A CPU of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its number, as Linux counts them.
    pub number: u32,
    /// Its NUMA node, where it is online.
    pub node: Option<u32>,
    /// What it is used for.
    pub used: Use,
    /// The id of the sandbox that owns it.
    pub sandbox: Option<String>,
    /// Linux has no timer tick there while one task runs (`nohz_full=`).
    pub tickless: bool,
}

/// The host's CPUs, and who has them.
#[derive(Debug)]
pub struct Isolation {
    places: Places,
}

/// One more may be found, or something else is wrong.
#[derive(Debug)]
pub enum Refused<E> {
    /// This CPU cannot be had.
    Cpu(u32, E),
    /// None can.
    All(E),
}

impl Isolation {
    /// This host's. Without cgroups nothing can be isolated, and CPUs be reserved all the same.
    pub fn of_host() -> Self {
        Self {
            places: Places {
                proc: "/proc".into(),
                sys: SYS.into(),
                cgroup: None,
                journal: JOURNAL.into(),
            },
        }
    }

    /// Gives a sandbox so many CPUs, which nothing else uses from then on, and divides its cgroup: its threads go to [`CONTROL`] in it,
    /// and [`place`] takes the vCPUs from there to their CPUs. In rising order, a vCPU each.
    ///
    /// # Errors
    /// There are not so many, or the kernel refuses; nothing has changed then.
    pub fn dedicate(&self, owner: &Owner, count: usize) -> Result<CpuSet, Error> {
        let mut locked = self.lock()?;
        let cpus = choose(&self.host(&locked.journal)?, &CpuSet::default(), count)?;
        for cpu in cpus.iter() {
            locked.journal.dedicated.insert(cpu, owner.clone());
        }
        let done = self.apply(&mut locked).and_then(|()| {
            let others = self.possible()?.minus(&locked.journal.isolated());
            threads::divide(&owner.cgroup, &cpus, &others, self.node_of(&cpus).as_deref())?;
            // It may use all that is not isolated, whatever that will be.
            CpuFile::of_cgroup(&owner.cgroup.join(CONTROL)).is_new(&mut locked.journal);
            locked.store()
        });
        if let Err(error) = done {
            threads::unite(&owner.cgroup);
            locked.journal.forget(&owner.sandbox);
            self.take_back(&mut locked);
            return Err(error);
        }
        Ok(cpus)
    }

    /// Has `reserve` take so many CPUs from Linux for a sandbox.
    ///
    /// # Errors
    /// There are not so many ([`Error::Spare`]), or the journal cannot be kept; inside, what `reserve` says.
    pub fn reserve<T, E>(
        &self,
        sandbox: &str,
        count: usize,
        reserve: impl Fn(&CpuSet) -> Result<T, Refused<E>>,
    ) -> Result<Result<T, E>, Error> {
        let mut locked = self.lock()?;
        let mut refused = CpuSet::default();
        let mut last = None;
        loop {
            let cpus = match (choose(&self.host(&locked.journal)?, &refused, count), last.take()) {
                (Ok(cpus), _) => cpus,
                (Err(_), Some(error)) => return Ok(Err(error)),
                (Err(error), None) => return Err(error),
            };
            for cpu in cpus.iter() {
                locked.journal.reserved.insert(cpu, sandbox.to_owned());
            }
            locked.store()?;
            match reserve(&cpus) {
                Ok(reserved) => return Ok(Ok(reserved)),
                Err(why) => {
                    locked.journal.forget(sandbox);
                    locked.store()?;
                    match why {
                        Refused::All(error) => return Ok(Err(error)),
                        Refused::Cpu(cpu, error) if !cpus.contains(cpu) => return Ok(Err(error)),
                        Refused::Cpu(cpu, error) => {
                            refused.insert(cpu);
                            last = Some(error);
                        }
                    }
                }
            }
        }
    }

    /// A sandbox has ended: what it owned is the host's again, or isolated as before. It is fine if it owned nothing.
    ///
    /// # Errors
    /// The journal cannot be kept, or a file not be put back.
    pub fn release(&self, sandbox: &str) -> Result<(), Error> {
        if !self.is_used()? {
            return Ok(());
        }
        let mut locked = self.lock()?;
        locked.journal.forget(sandbox);
        self.apply(&mut locked)
    }

    /// Gives back what sandboxes owned that are gone.
    ///
    /// # Errors
    /// As [`Isolation::release`].
    pub fn sweep(&self) -> Result<(), Error> {
        self.release("")
    }

    /// Keeps CPUs free of everything until they are given back, for sandboxes that will own them.
    ///
    /// # Errors
    /// One is not online, the host's first, or a sandbox's; or the kernel refuses. Nothing has changed then.
    pub fn isolate(&self, cpus: &CpuSet) -> Result<(), Error> {
        let mut locked = self.lock()?;
        let host = self.host(&locked.journal)?;
        if let Some(owned) = locked.journal.owner_among(cpus) {
            return Err(Error::owned(owned));
        }
        let absent = cpus.minus(&host.online);
        if !absent.is_empty() {
            return Err(Error::NotOnline(absent));
        }
        if let Some(first) = host.online.first().filter(|first| cpus.contains(*first)) {
            return Err(Error::First(first));
        }
        let pool = locked.journal.pool.clone();
        locked.journal.pool = pool.or(cpus);
        if let Err(error) = self.apply(&mut locked) {
            locked.journal.pool = pool;
            self.take_back(&mut locked);
            return Err(error);
        }
        Ok(())
    }

    /// Everything may use them again; those that a sandbox owns, when it has ended. All that are isolated, if none are named.
    ///
    /// # Errors
    /// One is not isolated; or a file cannot be put back.
    pub fn give_back(&self, cpus: Option<&CpuSet>) -> Result<CpuSet, Error> {
        let mut locked = self.lock()?;
        let pool = locked.journal.pool.clone();
        let cpus = cpus.cloned().unwrap_or_else(|| pool.clone());
        let others = cpus.minus(&pool);
        if let Some(owned) = locked.journal.owner_among(&others) {
            return Err(Error::owned(owned));
        }
        if !others.is_empty() {
            return Err(Error::NotIsolated(others));
        }
        locked.journal.pool = pool.minus(&cpus);
        self.apply(&mut locked)?;
        Ok(cpus)
    }

    /// All CPUs of the host.
    ///
    /// # Errors
    /// The host does not tell.
    pub fn cpus(&self) -> Result<Vec<Cpu>, Error> {
        let journal = journal::read(&self.places.journal)?;
        let host = self.host(&journal)?;
        let present = self.list("devices/system/cpu/present")?;
        let describe = |number: u32| {
            let used = match number {
                _ if journal.dedicated.contains_key(&number) => Use::Dedicated,
                _ if journal.reserved.contains_key(&number) => Use::Bare,
                _ if !host.online.contains(number) => Use::Offline,
                _ if journal.pool.contains(number) => Use::Isolated,
                _ => Use::Shared,
            };
            let node = host.nodes.iter().find(|(_, cpus)| cpus.contains(number));
            Cpu {
                number,
                node: node.map(|(node, _)| *node),
                used,
                sandbox: journal.owner(number).map(str::to_owned),
                tickless: host.tickless.contains(number),
            }
        };
        Ok(present.iter().map(describe).collect())
    }

    /// Somebody has isolated or reserved something since the boot.
    fn is_used(&self) -> Result<bool, Error> {
        let path = journal::path(&self.places.journal);
        path.try_exists().map_err(Error::file("look for", &path))
    }

    /// What was owned by whom is no more is nobody's.
    fn lock(&self) -> Result<Locked, Error> {
        let mut locked = Locked::open(&self.places.journal)?;
        if locked.journal.is_empty() {
            return Ok(locked);
        }
        let online = self.online()?;
        if let Some(gone) = locked.journal.drop_stale(&online) {
            // Whoever removes their cgroups may come later.
            let divided = gone.iter().filter(|cgroup| cgroup.is_dir());
            divided.for_each(|cgroup| threads::unite(cgroup));
            self.apply(&mut locked)?;
        }
        Ok(locked)
    }

    /// After a failure, which is what is told.
    fn take_back(&self, locked: &mut Locked) {
        if let Err(error) = self.apply(locked) {
            log::warn!("what could not be isolated is not given back whole, until something is again: {error:?}");
        }
    }

    /// Makes the host what the journal says.
    fn apply(&self, locked: &mut Locked) -> Result<(), Error> {
        // What it is to be, for whoever has to go on.
        locked.store()?;
        if locked.journal.is_without_effect() {
            return Ok(());
        }
        let top = match &self.places.cgroup {
            Some(top) => top.clone(),
            None => crate::cgroup::mount_point()?,
        };
        // Whoever was to bring it back is gone.
        if let Some(cpu) = locked.journal.emptying {
            self.bring_online(cpu)?;
            locked.journal.emptying = None;
        }
        let isolated = locked.journal.isolated();
        let before = locked.journal.applied.clone();
        if !before.contains(&isolated) {
            locked.journal.applied.push(isolated.clone());
        }
        let files = match isolated.is_empty() {
            true => Vec::new(),
            false => self.narrow(&top, locked, &before, &isolated)?,
        };
        // A cgroup with one in it that owns CPUs is not kept off any more, and one without is no way to such.
        files::restore(&mut locked.journal, &files, &self.possible()?)?;
        if isolated.is_empty() {
            fence::disable(locked);
        }
        self.move_tasks(&top, locked, &before, &isolated)?;
        locked.journal.emptied = locked.journal.emptied.and(&isolated);
        for cpu in isolated.minus(&locked.journal.emptied).iter() {
            self.empty(locked, cpu)?;
        }
        locked.journal.applied = [isolated].into_iter().filter(|all| !all.is_empty()).collect();
        if locked.journal.applied.is_empty() && locked.journal.missed.is_empty() {
            locked.journal.tasks.clear();
        }
        locked.store()
    }

    /// Has all files that say where something may be say no isolated CPU; which those are.
    fn narrow(
        &self,
        top: &Path,
        locked: &mut Locked,
        before: &[CpuSet],
        isolated: &CpuSet,
    ) -> Result<Vec<CpuFile>, Error> {
        let open: Vec<PathBuf> = locked.journal.dedicated.values().map(|it| it.cgroup.clone()).collect();
        fence::enable(top, &open, locked)?;
        let mut files = fence::files(top, &open)?;
        files.extend(files::of_host(&self.places)?);
        for file in &files {
            file.remember(&mut locked.journal, before)?;
        }
        locked.store()?;
        let control = self.possible()?.minus(isolated);
        let narrowed = files
            .iter()
            .try_for_each(|file| file.narrow(&locked.journal, isolated, &control));
        narrowed.map(|()| files)
    }

    /// The same with threads that no cpuset holds.
    fn move_tasks(&self, top: &Path, locked: &mut Locked, before: &[CpuSet], isolated: &CpuSet) -> Result<(), Error> {
        let (online, possible) = (self.online()?, self.possible()?);
        let missed = locked.journal.missed.clone();
        let masks = tasks::Masks {
            possible: &possible,
            online: &online,
            before,
            missed: &missed,
            isolated,
        };
        let moves = tasks::plan(top, &self.places.proc, &masks, &mut locked.journal.tasks)?;
        // What comes back when its guest ends is to be theirs again.
        let reserved: CpuSet = locked.journal.reserved.keys().copied().collect();
        locked.journal.missed = reserved.minus(&online);
        locked.store()?;
        tasks::carry_out(&moves);
        Ok(())
    }

    /// Moves what is bound to a CPU and cannot be asked to go: timers, and callbacks of RCU.
    fn empty(&self, locked: &mut Locked, cpu: u32) -> Result<(), Error> {
        locked.journal.emptying = Some(cpu);
        locked.store()?;
        match fs::write(self.switch(cpu), "0") {
            Ok(()) => self.bring_online(cpu)?,
            Err(error) => log::warn!("timers that CPU {cpu} has stay there, as it cannot be taken offline: {error}"),
        }
        locked.journal.emptying = None;
        locked.journal.emptied.insert(cpu);
        locked.store()
    }

    fn bring_online(&self, cpu: u32) -> Result<(), Error> {
        let path = self.switch(cpu);
        fs::write(&path, "1").map_err(Error::file("write", &path))
    }

    fn switch(&self, cpu: u32) -> PathBuf {
        self.places.sys.join(format!("devices/system/cpu/cpu{cpu}/online"))
    }

    /// Limits the cgroup of a sandbox that owns no CPUs to those that are not isolated. It is fine if none is.
    ///
    /// # Errors
    /// The journal cannot be kept, or the kernel refuses.
    pub fn admit(&self, cgroup: &Path) -> Result<(), Error> {
        if !self.is_used()? {
            return Ok(());
        }
        // Nobody isolates anything meanwhile.
        let mut locked = self.lock()?;
        let isolated = locked.journal.isolated();
        if isolated.is_empty() {
            return Ok(());
        }
        let file = CpuFile::of_cgroup(cgroup);
        file.is_new(&mut locked.journal);
        locked.store()?;
        file.narrow(&locked.journal, &isolated, &self.possible()?.minus(&isolated))
    }

    fn host(&self, journal: &Journal) -> Result<Host, Error> {
        Ok(Host {
            online: self.online()?,
            owned: journal.owned(),
            pool: journal.pool.clone(),
            tickless: self.tickless(),
            nodes: self.nodes(),
        })
    }

    fn online(&self) -> Result<CpuSet, Error> {
        self.list("devices/system/cpu/online")
    }

    fn possible(&self) -> Result<CpuSet, Error> {
        self.list(POSSIBLE)
    }

    /// None where Linux was built without.
    fn tickless(&self) -> CpuSet {
        self.list("devices/system/cpu/nohz_full").unwrap_or_default()
    }

    fn list(&self, name: &str) -> Result<CpuSet, Error> {
        files::list(&self.places.sys.join(name))
    }

    /// A kernel without NUMA has none.
    fn nodes(&self) -> Vec<(u32, CpuSet)> {
        let Ok(entries) = fs::read_dir(self.places.sys.join("devices/system/node")) else {
            return Vec::new();
        };
        let node = |entry: fs::DirEntry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            Some((number, files::list(&entry.path().join("cpulist")).ok()?))
        };
        let mut nodes: Vec<(u32, CpuSet)> = entries.flatten().filter_map(node).collect();
        nodes.sort_by_key(|(number, _)| *number);
        nodes
    }

    /// The nodes of these CPUs, as `cpuset.mems` has them; nothing where there is one anyway.
    fn node_of(&self, cpus: &CpuSet) -> Option<String> {
        let nodes = self.nodes();
        let own = nodes.iter().filter(|(_, all)| !all.and(cpus).is_empty());
        let own: CpuSet = own.map(|(number, _)| *number).collect();
        (nodes.len() > 1 && !own.is_empty()).then(|| own.to_string())
    }
}

/// What a directory of the kernel's has in it.
fn names(path: &Path) -> Result<Vec<String>, Error> {
    let failed = |cause| Error::file("list", path)(cause);
    let entries = fs::read_dir(path).map_err(failed)?;
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests;
