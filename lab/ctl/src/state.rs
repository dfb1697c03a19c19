//! The lab's directory on this machine: what is in it, who may change it, and whether the lab it speaks of still runs.
//! Does not know how a lab is started.
//!
//! ```text
//!  lab.json          how to reach the running lab; other programs may read it
//!  token             what a client must know, 0600
//!  qemu.pid qmp.sock   of the emulator
//!  disks/            data disks, sparse; kept
//!  logs/             console.log and emulator.log of this start, *.1 of the one before; kept
//!  shares/           how each directory is reached that is served to the lab (`share`)
//!  fwd.sock          where ports of this machine are reserved (`ports`)
//!  checked.json      which files of this machine were in this start of the lab when `ready` looked last
//!  synced.json       what was uploaded to the data disk; kept
//! ```

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

/// Bytes that a unix socket's path may have, its ending zero not counted (unix(7), `sun_path`).
const SOCKET_PATH_LIMIT: usize = 107;

/// What `lab.json` says. Written when the lab answers, removed when it is down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lab {
    /// Where the lab's agent is reached, `127.0.0.1:PORT`.
    pub(crate) address: String,
    /// File with the token, as 64 hexadecimal digits.
    pub(crate) token_file: PathBuf,
    /// The emulator's process.
    pub(crate) pid: u32,
    /// When the lab was started, in seconds since 1970.
    pub(crate) started: u64,
    /// Processors of the lab.
    pub(crate) cpus: u32,
    /// Memory of the lab, in MiB.
    pub(crate) memory_mib: u64,
    /// SHA-256 over what it was made of: emulator, host system, init.
    pub(crate) made_of: String,
}

/// The directory.
#[derive(Clone, Debug)]
pub(crate) struct State {
    directory: PathBuf,
}

/// The right to start and stop the lab. Held on the directory itself, so that no lock file is left behind, and given back
/// by the kernel however the holder ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _directory: File,
}

impl State {
    /// The directory, made if it is missing.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        for wanted in [directory.to_owned(), directory.join("disks"), directory.join("logs")] {
            builder.create(&wanted).with_context(|| {
                format!(
                    "cannot make {}; name another place with BASALT_LAB_STATE",
                    wanted.display()
                )
            })?;
        }
        let directory = directory
            .canonicalize()
            .with_context(|| format!("cannot resolve {}", directory.display()))?;
        let state = Self { directory };
        let length = state.qmp().as_os_str().len();
        if length > SOCKET_PATH_LIMIT {
            bail!(
                "the path {} has {length} bytes and a socket's may have {SOCKET_PATH_LIMIT}; name a shorter \
                 directory with BASALT_LAB_STATE",
                state.qmp().display()
            );
        }
        Ok(state)
    }

    pub(crate) fn token(&self) -> PathBuf {
        self.directory.join("token")
    }

    pub(crate) fn pid_file(&self) -> PathBuf {
        self.directory.join("qemu.pid")
    }

    pub(crate) fn qmp(&self) -> PathBuf {
        self.directory.join("qmp.sock")
    }

    pub(crate) fn initramfs(&self) -> PathBuf {
        self.directory.join("initramfs.cpio")
    }

    pub(crate) fn console(&self) -> PathBuf {
        self.directory.join("logs/console.log")
    }

    pub(crate) fn emulator_log(&self) -> PathBuf {
        self.directory.join("logs/emulator.log")
    }

    pub(crate) fn standstill(&self) -> PathBuf {
        self.directory.join("logs/standstill.log")
    }

    pub(crate) fn disk(&self, name: &str) -> PathBuf {
        self.directory.join("disks").join(name)
    }

    pub(crate) fn synced(&self) -> PathBuf {
        self.directory.join("synced.json")
    }

    /// Directories that are served to the lab: a file each.
    pub(crate) fn shares(&self) -> PathBuf {
        self.directory.join("shares")
    }

    pub(crate) fn shares_log(&self) -> PathBuf {
        self.directory.join("logs/shares.log")
    }

    /// Where ports are reserved. No longer than [`Self::qmp`], so that both fit into a socket's address.
    pub(crate) fn forward_socket(&self) -> PathBuf {
        self.directory.join("fwd.sock")
    }

    pub(crate) fn ports_log(&self) -> PathBuf {
        self.directory.join("logs/ports.log")
    }

    /// What was found equal to this machine's files, in this start of the lab.
    pub(crate) fn checked(&self) -> PathBuf {
        self.directory.join("checked.json")
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    fn lab_json(&self) -> PathBuf {
        self.directory.join("lab.json")
    }

    /// Waits for the lock, at most `patience`; `waiting` is called once if there is something to wait for.
    pub(crate) fn lock(&self, patience: Duration, waiting: impl FnOnce()) -> Result<Lock> {
        let directory = File::open(&self.directory)?;
        let deadline = Instant::now() + patience;
        let mut waiting = Some(waiting);
        loop {
            match directory.try_lock() {
                Ok(()) => return Ok(Lock { _directory: directory }),
                Err(fs::TryLockError::WouldBlock) => {}
                Err(fs::TryLockError::Error(error)) => return Err(error).context("cannot lock the lab's directory"),
            }
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            if Instant::now() > deadline {
                bail!(
                    "another basalt-lab has been starting or stopping the lab for {} seconds",
                    patience.as_secs()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The lab that runs, if one does.
    pub(crate) fn running(&self) -> Result<Option<Lab>> {
        let Some(lab) = self.read_lab()? else { return Ok(None) };
        Ok((self.emulator()? == Some(lab.pid)).then_some(lab))
    }

    fn read_lab(&self) -> Result<Option<Lab>> {
        let path = self.lab_json();
        match fs::read(&path) {
            // Half a file, from a machine that lost power while it was written, says nothing about a running lab.
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Says to everybody that the lab runs.
    pub(crate) fn write_lab(&self, lab: &Lab) -> Result<()> {
        write_new(&self.lab_json(), &serde_json::to_vec_pretty(lab)?)
    }

    /// The emulator's process, if it runs: the number in the pid file, if that process was started with that pid file.
    /// A number that now belongs to another program is not taken for the emulator.
    pub(crate) fn emulator(&self) -> Result<Option<u32>> {
        let path = self.pid_file();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let Ok(pid) = text.trim().parse::<u32>() else {
            return Ok(None);
        };
        // Fails if there is no such process; empty if it is dead and not yet reaped.
        let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        Ok(is_emulator(&command_line, &path).then_some(pid))
    }

    /// Kills the emulator if it runs, and waits until it is gone.
    pub(crate) fn kill_emulator(&self) -> Result<()> {
        for (signal, patience) in [
            (Signal::TERM, Duration::from_secs(3)),
            (Signal::KILL, Duration::from_secs(10)),
        ] {
            let Some(pid) = self.emulator()? else { return Ok(()) };
            if let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                match rustix::process::kill_process(target, signal) {
                    Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                    Err(error) => return Err(error).with_context(|| format!("cannot end the emulator, process {pid}")),
                }
            }
            if self.wait_until_gone(patience)? {
                return Ok(());
            }
        }
        bail!("the emulator, process {:?}, does not end", self.emulator()?)
    }

    /// Waits until the emulator has ended; says whether it has.
    pub(crate) fn wait_until_gone(&self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        while self.emulator()?.is_some() {
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(true)
    }

    /// Removes what belongs to a lab that does not run: all but disks, logs and the record of what the disks hold.
    pub(crate) fn clean(&self) -> Result<()> {
        for path in [
            self.lab_json(),
            self.token(),
            self.pid_file(),
            self.qmp(),
            self.initramfs(),
            self.forward_socket(),
            self.checked(),
        ] {
            remove(&path)?;
        }
        // Whoever serves them ends with the emulator.
        match fs::remove_dir_all(self.shares()) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.shares().display()))
            }
            _ => Ok(()),
        }
    }

    /// Forgets what the data disks hold of our files: after a lab that was killed, a file may be shorter than it was sent.
    pub(crate) fn forget_synced(&self) -> Result<()> {
        remove(&self.synced())
    }

    /// Whether files of a start are left although no emulator runs: it was killed, or it ended by itself.
    pub(crate) fn is_stale(&self) -> Result<bool> {
        let left = [self.lab_json(), self.token(), self.pid_file(), self.qmp()]
            .iter()
            .any(|path| path.exists());
        Ok(left && self.running()?.is_none())
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Whether this command line (as in `/proc/PID/cmdline`) is that of an emulator that was given this pid file.
fn is_emulator(command_line: &[u8], pid_file: &Path) -> bool {
    let arguments: Vec<&[u8]> = command_line.split(|byte| *byte == 0).collect();
    arguments
        .windows(2)
        .any(|pair| pair == [b"-pidfile".as_slice(), pid_file.as_os_str().as_encoded_bytes()])
}

/// Writes a file that only its owner may read, beside its place first: a reader sees all of it or the one before.
pub(crate) fn write_new(path: &Path, contents: &[u8]) -> Result<()> {
    let beside = path.with_extension("new");
    let write = || {
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&beside)?;
        file.write_all(contents)?;
        fs::rename(&beside, path)
    };
    write().or_else(|error| {
        // What was written of it is of no use; that it cannot be removed matters less than the first error.
        drop(fs::remove_file(&beside));
        Err(error).with_context(|| format!("cannot write {}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    struct Fixture(State);

    impl Fixture {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("basalt-lab-{}-{name}", std::process::id()));
            Self(State::open(&path).unwrap())
        }
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0.directory).unwrap();
        }
    }

    fn lab(state: &State, pid: u32) -> Lab {
        Lab {
            address: "127.0.0.1:1".into(),
            token_file: state.token(),
            pid,
            started: 1,
            cpus: 2,
            memory_mib: 1024,
            made_of: String::new(),
        }
    }

    #[test]
    fn an_emulator_is_told_by_its_own_pid_file() {
        let path = Path::new("/s/qemu.pid");
        assert!(is_emulator(b"qemu\0-M\0q35\0-pidfile\0/s/qemu.pid\0-smp\0two\0", path));
        assert!(!is_emulator(b"qemu\0-pidfile\0/other/qemu.pid\0", path));
        assert!(!is_emulator(b"vi\0/s/qemu.pid\0", path));
        assert!(!is_emulator(b"", path));
    }

    #[test]
    fn nothing_runs_in_a_new_directory() {
        let fixture = Fixture::new("new");
        assert_eq!(fixture.0.running().unwrap(), None);
        assert_eq!(fixture.0.emulator().unwrap(), None);
        assert!(!fixture.0.is_stale().unwrap());
        fixture.0.kill_emulator().unwrap();
    }

    #[test]
    fn a_number_that_now_is_another_process_is_stale_and_is_not_killed() {
        let fixture = Fixture::new("reused");
        let state = &fixture.0;
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        fs::write(state.pid_file(), other.id().to_string()).unwrap();
        state.write_lab(&lab(state, other.id())).unwrap();
        assert_eq!(state.running().unwrap(), None);
        assert!(state.is_stale().unwrap());
        state.kill_emulator().unwrap();
        assert!(other.try_wait().unwrap().is_none(), "a stranger was killed");
        state.clean().unwrap();
        assert!(!state.is_stale().unwrap());
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_running_emulator_is_found_and_can_be_killed() {
        let fixture = Fixture::new("running");
        let state = &fixture.0;
        // A shell with the same arguments stands in for the emulator.
        let mut child = Command::new("sh")
            .args(["-c", "while sleep 0.1; do :; done", "-pidfile"])
            .arg(state.pid_file())
            .spawn()
            .unwrap();
        let expected = lab(state, child.id());
        fs::write(state.pid_file(), format!("{}\n", child.id())).unwrap();
        state.write_lab(&expected).unwrap();
        // Until the shell has replaced the copy of this test, the command line is this test's.
        while state.running().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(state.running().unwrap(), Some(expected));
        let reaper = std::thread::spawn(move || child.wait().unwrap());
        state.kill_emulator().unwrap();
        assert!(!reaper.join().unwrap().success());
        assert!(state.is_stale().unwrap());
    }

    #[test]
    fn half_a_state_file_is_no_lab() {
        let fixture = Fixture::new("half");
        fs::write(fixture.0.lab_json(), "{\"address\":\"127.0").unwrap();
        assert_eq!(fixture.0.running().unwrap(), None);
        assert!(fixture.0.is_stale().unwrap());
    }

    #[test]
    fn the_lock_is_exclusive_and_leaves_no_file() {
        let fixture = Fixture::new("lock");
        let before = fs::read_dir(fixture.0.directory()).unwrap().count();
        let held = fixture.0.lock(Duration::ZERO, || {}).unwrap();
        let mut waited = false;
        let error = fixture.0.lock(Duration::from_millis(60), || waited = true).unwrap_err();
        assert!(error.to_string().starts_with("another basalt-lab"), "{error}");
        assert!(waited);
        drop(held);
        // A process that another test is starting holds it, too, until its exec.
        fixture.0.lock(Duration::from_secs(90), || {}).unwrap();
        assert_eq!(fs::read_dir(fixture.0.directory()).unwrap().count(), before);
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_with_the_numbers() {
        let path = std::env::temp_dir().join("x".repeat(120));
        let error = State::open(&path).unwrap_err().to_string();
        fs::remove_dir_all(&path).unwrap();
        assert!(error.contains("107") && error.contains("BASALT_LAB_STATE"), "{error}");
    }
}
