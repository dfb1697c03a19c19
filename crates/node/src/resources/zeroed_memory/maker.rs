//! Who makes one piece of zeroed memory. On Linux a child process fills it: shared memory is charged to the cgroup of whoever touches it
//! first, for as long as it is there, and the daemon's own may be limited. Knows neither how many there are nor whom they are for.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use host::cgroup::{Limits, Root};
use host::zeroed_memory::{self, Pages};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use vmm_api::devices::ZEROED_PIECE;

use crate::Error;
use crate::vmm::process;

/// The cgroup of what is ready, and of what has been handed out of it as long as that is there, beside those of sandboxes.
const CGROUP: &str = "zeroed-memory";

/// The least weight of processor time that a cgroup can have (Linux `cgroup-v2.rst`, `cpu.weight`): within a cgroup of its own even an idle
/// process has the whole weight of that against other ones.
const LEAST_WEIGHT: u64 = 1;

/// A piece, filled.
#[derive(Debug)]
pub(crate) struct Filled {
    pub(crate) file: OwnedFd,
    pub(crate) pages: Pages,
}

/// Makes pieces, one at a time.
pub(crate) trait Maker: fmt::Debug + Send + Sync {
    /// Makes a piece of [`ZEROED_PIECE`], in a cgroup of its own where there are some. Fails soon after `cancel` was told.
    fn make(&self, cgroups: Option<&Root>, cancel: &Cancel) -> Result<Filled, Error>;

    /// Why the last one came in small pages.
    fn why_small(&self) -> String;
}

/// By which what is being made is given up.
#[derive(Debug, Default)]
pub(crate) struct Cancel(Mutex<Cancelled>);

#[derive(Debug, Default)]
struct Cancelled {
    is: bool,
    /// Who makes it.
    process: Option<OwnedFd>,
}

impl Cancel {
    fn lock(&self) -> MutexGuard<'_, Cancelled> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody wants it any more: who makes it is killed.
    pub(crate) fn cancel(&self) {
        let mut inner = self.lock();
        inner.is = true;
        inner.process.iter().for_each(kill);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.lock().is
    }

    /// From here on this process makes it.
    fn watch(&self, process: OwnedFd) {
        let mut inner = self.lock();
        if inner.is {
            kill(&process);
        }
        inner.process = Some(process);
    }
}

fn kill(process: &OwnedFd) {
    if let Err(error) = process::kill(process) {
        log::warn!("the process that zeroes memory is not killed, and ends when it has done so: {error}");
    }
}

/// A program that fills the file which is its standard input, and ends as `host::zeroed_memory::fill_for_parent` says.
#[derive(Debug)]
pub(crate) struct ByChild {
    /// It is told the cgroup in which it is to be.
    pub(crate) command: fn(cgroup: Option<&std::path::Path>) -> Command,
}

impl ByChild {
    /// This program itself, by the flag that its command line has for it. By the file that runs: a newer one may lie in its place.
    pub(crate) fn this_program() -> Self {
        Self {
            command: |cgroup| {
                let mut command = Command::new("/proc/self/exe");
                let mut flag = std::ffi::OsString::from("--fill-memory");
                if let Some(cgroup) = cgroup {
                    flag.push("=");
                    flag.push(cgroup);
                }
                command.arg(flag);
                command
            },
        }
    }
}

impl Maker for ByChild {
    fn make(&self, cgroups: Option<&Root>, cancel: &Cancel) -> Result<Filled, Error> {
        let cgroup = cgroups.map(cgroup).transpose()?;
        let file = zeroed_memory::file(ZEROED_PIECE)?;
        let theirs = file.try_clone().map_err(Error::host("opening a file twice"))?;
        let mut child = (self.command)(cgroup.as_deref())
            .stdin(theirs)
            .stdout(Stdio::null())
            .spawn()
            .map_err(Error::host("starting the process that zeroes memory"))?;
        match pidfd(&child) {
            Ok(process) => cancel.watch(process),
            // It cannot be cancelled, and ends when it is filled.
            Err(error) => log::warn!("the process that zeroes memory cannot be watched: {error}"),
        }
        let status = child
            .wait()
            .map_err(Error::host("waiting for the process that zeroes memory"))?;
        Ok(Filled {
            file,
            pages: pages(status).map_err(Error::host("zeroing memory in a process of its own"))?,
        })
    }

    fn why_small(&self) -> String {
        zeroed_memory::why_small()
    }
}

/// Its cgroup, made if it is not there.
fn cgroup(root: &Root) -> Result<std::path::PathBuf, Error> {
    let has_weight = root.missing().iter().all(|missing| missing.controller != "cpu");
    let limits = Limits {
        cpu_weight: has_weight.then_some(LEAST_WEIGHT),
        ..Limits::default()
    };
    Ok(root.create(CGROUP, &limits)?.path().to_owned())
}

/// Removes the cgroup, if it is there: nothing is being made. What has been handed out is charged to the one above it from then on.
pub(crate) fn remove_cgroup(root: &Root) -> Result<(), Error> {
    Ok(root.remove(CGROUP)?)
}

fn pidfd(child: &std::process::Child) -> io::Result<OwnedFd> {
    let number = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let number = number.ok_or_else(|| io::Error::other("its number is none"))?;
    Ok(pidfd_open(number, PidfdFlags::empty())?)
}

fn pages(status: ExitStatus) -> io::Result<Pages> {
    match (status.code().map(u8::try_from), status.signal()) {
        (Some(Ok(zeroed_memory::FILLED)), _) => Ok(Pages::Huge),
        (Some(Ok(zeroed_memory::SMALL_PAGES)), _) => Ok(Pages::Small),
        (_, Some(signal)) => Err(io::Error::other(format!(
            "it was killed by signal {signal}, as for want of memory or by `memory.max`"
        ))),
        _ => Err(io::Error::other(format!(
            "it failed ({status}), and has said why in the daemon's log"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::Path;
    use std::time::{Duration, Instant};

    use super::*;

    /// Tells the test program that it is the process which fills a file, and where it is to be.
    const INNER: &str = "BASALT_TEST_FILL_MEMORY";

    const NAME: &str =
        "resources::zeroed_memory::maker::tests::a_process_of_its_own_makes_a_piece_of_zeroes_in_huge_pages";

    fn this_test(cgroup: Option<&Path>) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", NAME, "--nocapture"]);
        command.env(INNER, cgroup.unwrap_or(Path::new("")));
        command
    }

    #[expect(clippy::exit, reason = "this process is the one that fills a file")]
    fn fill_if_that_is_it() {
        if let Some(cgroup) = std::env::var_os(INNER) {
            let cgroup = Some(Path::new(&cgroup)).filter(|cgroup| !cgroup.as_os_str().is_empty());
            std::process::exit(zeroed_memory::fill_for_parent(cgroup).unwrap().into());
        }
    }

    /// Cgroups below one that goes with this, where they can be had.
    struct Cgroups(Option<Root>);

    impl Cgroups {
        fn new(name: &str) -> Self {
            let root = Root::open(&format!("basalt-{name}-{}", std::process::id()));
            Self(root.inspect_err(|error| eprintln!("without cgroups: {error}")).ok())
        }
    }

    impl Drop for Cgroups {
        fn drop(&mut self) {
            if let Some(root) = self.0.take() {
                remove_cgroup(&root).unwrap();
                root.remove_root().unwrap();
            }
        }
    }

    fn may_mount() -> bool {
        let may = rustix::process::geteuid().is_root();
        if !may {
            eprintln!("skipped: only root may make a tmpfs");
        }
        may
    }

    #[test]
    fn a_process_of_its_own_makes_a_piece_of_zeroes_in_huge_pages() {
        fill_if_that_is_it();
        if !may_mount() {
            return;
        }
        let cgroups = Cgroups::new("zeroed-test");
        let maker = ByChild { command: this_test };
        let made = maker.make(cgroups.0.as_ref(), &Cancel::default()).unwrap();
        if made.pages == Pages::Small {
            // A host whose memory is in small pieces has none; then this says why.
            eprintln!("in small pages: {}", maker.why_small());
        }
        let file = File::from(made.file);
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.blocks() * 512, ZEROED_PIECE.bytes(), "all of it is there");
        let mut found = [1; 4096];
        for place in [0, ZEROED_PIECE.bytes() / 2, ZEROED_PIECE.bytes() - 4096] {
            file.read_exact_at(&mut found, place).unwrap();
            assert_eq!(found, [0; 4096]);
        }
        // It is charged to that cgroup, and not to this process's.
        let Some(root) = &cgroups.0 else { return };
        let usage = root.find(CGROUP).unwrap().unwrap().usage().unwrap();
        assert!(usage.cpu_usec > 0, "nobody has worked in it");
        let shared = || {
            let stat = fs::read_to_string(root.path().join(CGROUP).join("memory.stat")).ok()?;
            let line = stat.lines().find_map(|line| line.strip_prefix("shmem "));
            line.map(|number| number.parse::<u64>().unwrap())
        };
        if shared().is_none() {
            eprintln!("this host has no memory controller");
            return;
        }
        assert_eq!(shared(), Some(ZEROED_PIECE.bytes()));
        // It is gone from there with its last user, soon: the kernel counts in batches.
        drop(file);
        let begun = Instant::now();
        while shared() != Some(0) {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?} are left", shared());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_process_that_is_not_wanted_any_more_is_killed() {
        if !may_mount() {
            return;
        }
        let sleeper = ByChild {
            command: |_| {
                let mut command = Command::new("sleep");
                command.arg("30");
                command
            },
        };
        let begun = Instant::now();
        for cancels_first in [true, false] {
            let cancel = Cancel::default();
            let made = std::thread::scope(|scope| {
                if cancels_first {
                    cancel.cancel();
                }
                let making = scope.spawn(|| sleeper.make(None, &cancel));
                std::thread::sleep(Duration::from_millis(20));
                if !cancels_first {
                    cancel.cancel();
                }
                making.join().unwrap()
            });
            let said = made.unwrap_err().to_string();
            assert!(said.contains("zeroing memory"), "{said}");
            assert!(cancel.is_cancelled());
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "it came to its own end");
    }

    #[test]
    fn how_the_process_ends_says_what_it_has_made() {
        let ended = |code: i32| pages(ExitStatus::from_raw(code));
        assert_eq!(ended(0).unwrap(), Pages::Huge);
        assert_eq!(ended(i32::from(zeroed_memory::SMALL_PAGES) << 8).unwrap(), Pages::Small);
        assert!(ended(1 << 8).unwrap_err().to_string().contains("daemon's log"));
        assert!(ended(9).unwrap_err().to_string().contains("signal 9"));
    }

    #[test]
    fn this_program_is_told_where_to_be() {
        let words = |cgroup: Option<&Path>| {
            let command = (ByChild::this_program().command)(cgroup);
            command.get_args().map(|word| word.to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(words(None), ["--fill-memory"]);
        assert_eq!(words(Some(Path::new("/a/b"))), ["--fill-memory=/a/b"]);
    }
}
