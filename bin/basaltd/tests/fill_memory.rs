//! The program as a daemon starts it to have memory zeroed: what it makes of its standard input, and that it ends with whoever has started it.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base::ByteSize;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

const SIZE: ByteSize = ByteSize::mib(4);

fn filler() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_basaltd"));
    command.arg("--fill-memory");
    command
}

#[test]
fn a_file_that_is_its_standard_input_is_filled_and_its_status_tells_the_pages() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root may make a tmpfs");
        return;
    }
    let file = host::zeroed_memory::file(SIZE).unwrap();
    let file = File::from(file);
    assert_eq!(file.metadata().unwrap().blocks(), 0);
    let ended = filler().stdin(file.try_clone().unwrap()).status().unwrap();
    let told = ended.code().and_then(|code| u8::try_from(code).ok());
    assert!(
        [host::zeroed_memory::FILLED, host::zeroed_memory::SMALL_PAGES]
            .map(Some)
            .contains(&told),
        "{ended}"
    );
    assert_eq!(file.metadata().unwrap().blocks() * 512, SIZE.bytes());
}

#[test]
fn what_cannot_be_filled_is_told_with_the_cause() {
    let failed = filler().stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{said}");
    assert!(
        said.starts_with("basaltd: zeroed memory cannot be made ahead: "),
        "{said}"
    );
    // It does not fill what would be charged to somebody else.
    let file = tempfile_of(SIZE);
    let mut elsewhere = Command::new(env!("CARGO_BIN_EXE_basaltd"));
    let failed = elsewhere
        .arg("--fill-memory=/no/such/cgroup")
        .stdin(file.try_clone().unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8(failed.stderr).unwrap();
    assert!(
        !failed.status.success() && said.contains("/no/such/cgroup/cgroup.procs"),
        "{said}"
    );
    assert_eq!(file.metadata().unwrap().blocks(), 0);
}

/// A memory file, which the kernel's own tmpfs has.
fn tempfile_of(size: ByteSize) -> File {
    base::memfd::sized("basaltd-test", size.bytes()).unwrap()
}

/// sched(7), SCHED_IDLE, as proc_pid_stat(5) has it in field 41.
const IDLE: &str = "5";

/// The shell between has started it and waits for it. It waits itself, for somebody to read where it writes that it is in a cgroup.
#[test]
fn it_gives_way_to_all_others_and_ends_with_whoever_has_started_it() {
    let directory = tempfile::tempdir().unwrap();
    let made = Command::new("mkfifo")
        .arg(directory.path().join("cgroup.procs"))
        .status();
    assert!(made.unwrap().success());
    let script = "exec 3<&0; \"$1\" \"$2\" <&3 & echo $!; wait";
    let flag = format!("--fill-memory={}", directory.path().display());
    let mut shell = Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_basaltd"), &flag])
        .stdin(tempfile_of(SIZE))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut told = BufReader::new(shell.stdout.take().unwrap());
    told.read_line(&mut line).unwrap();
    let number = line.trim().parse().unwrap();
    let _ends = Ends::with_test(number);
    let stat = format!("/proc/{number}/stat");
    let fields = || -> Vec<String> {
        let stat = std::fs::read_to_string(&stat).unwrap_or_default();
        // Field 3 is the first behind the name.
        let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        rest.split(' ').map(str::to_owned).collect()
    };
    until("it gives way", || {
        fields().get(41 - 3).is_some_and(|policy| policy == IDLE)
    });
    shell.kill().unwrap();
    shell.wait().unwrap();
    until("it has ended", || {
        fields().first().is_none_or(|state| state.is_empty() || state == "Z")
    });
}

/// A process that does not outlive its test, whatever becomes of that.
struct Ends(OwnedFd);

impl Ends {
    fn with_test(number: i32) -> Self {
        Self(pidfd_open(Pid::from_raw(number).unwrap(), PidfdFlags::empty()).unwrap())
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        match pidfd_send_signal(&self.0, Signal::KILL) {
            // It has ended where the test has passed.
            Ok(()) | Err(Errno::SRCH) => (),
            Err(error) => eprintln!("a process may be left: {error}"),
        }
    }
}

fn until(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < end, "waited until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
