//! The image's own part in becoming a clone: programs in one directory, run one after the other, as root and with a time
//! limit, while the commands stand still. Does not know what they do.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_api::{ExecRequest, ExitStatus};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::cgroup::Cgroups;
use crate::reaper::Reaper;
use crate::session::{self, Ends};
use crate::{Error, say};

/// Most of a hook's output that goes to the console.
const OUTPUT_LIMIT: usize = 4 * 1024;

/// How long a killed hook may take to go.
const CLEAR_LIMIT: Duration = Duration::from_secs(2);

/// What to run, and how.
pub(crate) struct Hooks<'a> {
    pub(crate) dir: &'a Path,
    /// For each of them.
    pub(crate) limit: Duration,
    /// `BASALT_CLONE_ID`.
    pub(crate) clone_id: Option<&'a str>,
}

/// Runs them all in order of name; the first that fails is the last.
pub(crate) fn run_all(hooks: &Hooks<'_>, cgroups: &Cgroups, reaper: &Reaper) -> Result<(), Error> {
    for path in list(hooks.dir)? {
        run_one(hooks, &path, cgroups, reaper)?;
    }
    Ok(())
}

/// Executable files whose name does not begin with a dot, in order of name; none without a directory.
fn list(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let fail = || Error::system(format!("reading the hooks in {}", dir.display()));
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(fail())?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(fail())?;
        let hidden = entry.file_name().as_bytes().starts_with(b".");
        let path = entry.path();
        let executable = |data: fs::Metadata| data.is_file() && data.permissions().mode() & 0o111 != 0;
        if !hidden && fs::metadata(&path).is_ok_and(executable) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn run_one(hooks: &Hooks<'_>, path: &Path, cgroups: &Cgroups, reaper: &Reaper) -> Result<(), Error> {
    let refused = |what: String| {
        Err(Error::Refused(format!(
            "the hook {} {what}; what it wrote is on the guest's console",
            path.display()
        )))
    };
    let request = ExecRequest {
        argv: vec![path.as_os_str().into()],
        env: hooks
            .clone_id
            .map(|id| format!("BASALT_CLONE_ID={id}").into())
            .into_iter()
            .collect(),
        ..ExecRequest::default()
    };
    let (_session, mut ends) = match session::start(&request, reaper, Some(cgroups)) {
        Ok(started) => started,
        Err(failure) => return refused(format!("cannot be started: {failure}")),
    };
    let mut output = Vec::new();
    let status = follow(&mut ends, hooks.limit, &mut output);
    tell(path, &output);
    match status? {
        Some(ExitStatus::Code(0)) => Ok(()),
        Some(ExitStatus::Code(code)) => refused(format!("ended with code {code}")),
        Some(ExitStatus::Signal(number)) => refused(format!("was ended by signal {number}")),
        None => refused(format!("did not end within {:?} and was killed", hooks.limit)),
    }
}

/// Takes its output until it has ended, and how it did; `None` if it was killed at the limit. What it leaves running is a
/// command like any other.
fn follow(ends: &mut Ends<'_>, limit: Duration, output: &mut Vec<u8>) -> Result<Option<ExitStatus>, Error> {
    let end = Instant::now() + limit;
    let mut open: Vec<OwnedFd> = [ends.streams.stdout.take(), ends.streams.stderr.take()]
        .into_iter()
        .flatten()
        .collect();
    loop {
        let exit = ends.shared.lock().exit;
        open.retain(|fd| take(fd, output));
        if exit.is_some() {
            return Ok(exit);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            if let Some(cgroup) = &ends.cgroup {
                cgroup.kill()?;
                cgroup.clear(CLEAR_LIMIT);
            }
            return Ok(None);
        }
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut fds = vec![PollFd::new(&ends.shared.wake, PollFlags::IN)];
        fds.extend(
            open.iter()
                .map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)),
        );
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::system("waiting for a hook")(errno)),
        }
        drop(fds);
        ends.shared.wake.consume();
    }
}

/// Takes what is there; false at its end. The descriptor does not block, and a hook that writes for ever is left to its limit.
fn take(fd: &OwnedFd, output: &mut Vec<u8>) -> bool {
    let mut buffer = [0; 4096];
    for _ in 0..16 {
        match rustix::io::read(fd, &mut buffer) {
            Ok(0) => return false,
            Ok(got) => {
                let room = OUTPUT_LIMIT.saturating_sub(output.len()).min(got);
                output.extend_from_slice(buffer.get(..room).unwrap_or_default());
            }
            Err(Errno::AGAIN) => return true,
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

/// Its output, for the console.
fn tell(path: &Path, output: &[u8]) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    for line in String::from_utf8_lossy(output).lines() {
        // A line of the agent's own; what would move the cursor is shown, not done.
        say(format_args!("hook {name}: {}", line.escape_debug()));
    }
    if output.len() == OUTPUT_LIMIT {
        say(format_args!(
            "hook {name}: (no more than {OUTPUT_LIMIT} bytes are shown)"
        ));
    }
}
