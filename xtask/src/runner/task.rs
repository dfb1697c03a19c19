//! A step at work: runs commands in process groups of their own, keeps every line in the step's log, and tells the
//! display the last one.
//!
//! Does not know what a step does, nor which steps there are.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, setpriority_pgrp, waitid};

use super::board::Board;
use super::interrupt::Stop;
use super::timings::Part;

/// How long a child may take to clean up after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(10);
/// How long output is read on after the child's end: a daemon that it left behind may hold the pipe open for ever.
const AFTERMATH: Duration = Duration::from_millis(500);
/// How often a waiting step looks at the stop flag and at its time limit.
const TICK: Duration = Duration::from_millis(100);
/// The priority of what runs in the background (sched(7)): next to nothing where others want the processor.
const LOWEST: i32 = 19;
/// Linux, include/asm-generic/param.h: USER_HZ, in which proc(5) counts processor time.
const TICKS_A_SECOND: f64 = 100.0;

/// What one step writes to and asks.
pub(crate) struct Task {
    index: usize,
    log: File,
    board: Board,
    stop: Stop,
    in_background: bool,
    measured: Measured,
}

/// What was measured of a step, whether it went well or not.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measured {
    /// Processor seconds of its commands, with those of the children that they waited for.
    pub(crate) cpu: f64,
    /// Parts of it that have a time of their own.
    pub(crate) parts: Vec<Part>,
}

/// Which of the child's two streams a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Out,
    Err,
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// The lines of its standard output.
    pub(crate) out: Vec<String>,
    /// The lines of its standard error.
    pub(crate) err: Vec<String>,
}

impl Task {
    /// Opens the log afresh; `index` is the step's place on the board. Another run of this checkout that is at the same
    /// step holds the log's lock: then this waits for it.
    pub(crate) fn new(index: usize, log_path: &Path, board: Board, stop: Stop) -> Result<Self> {
        let log = File::options().create(true).truncate(false).write(true).open(log_path);
        let log = log.with_context(|| format!("cannot write {}", log_path.display()))?;
        let task = Self {
            index,
            log,
            board,
            stop,
            in_background: false,
            measured: Measured::default(),
        };
        while task.log.try_lock().is_err() {
            task.board
                .progress(index, "another run is at this step; waiting for it");
            task.check_stop()?;
            thread::sleep(TICK);
        }
        task.log.set_len(0)?;
        Ok(task)
    }

    /// Has its commands run at the lowest priority.
    pub(crate) fn in_background(mut self, yes: bool) -> Self {
        self.in_background = yes;
        self
    }

    /// Notes a line: to the log, and as the step's progress.
    pub(crate) fn say(&mut self, line: &str) -> Result<()> {
        writeln!(self.log, "{line}")?;
        self.board.progress(self.index, line);
        Ok(())
    }

    /// Notes a part of the step that has a time of its own, such as a lab case.
    pub(crate) fn part(&mut self, part: Part) {
        self.measured.parts.push(part);
    }

    /// Adds processor seconds of a process that is no child of the step's, such as the lab's emulator.
    pub(crate) fn add_cpu(&mut self, seconds: f64) {
        self.measured.cpu += seconds;
    }

    /// What was measured so far; the step's end takes it.
    pub(crate) fn measured(self) -> Measured {
        self.measured
    }

    /// Runs a command that must succeed within `limit`.
    pub(crate) fn run_within(&mut self, command: &mut Command, limit: Duration) -> Result<Finished> {
        let finished = self.finish_within(command, limit)?;
        if !finished.status.success() {
            bail!("`{}` ended with {}", shown(command), finished.status);
        }
        Ok(finished)
    }

    /// Runs a command to its end, whatever that is; standard input is empty.
    pub(crate) fn finish_within(&mut self, command: &mut Command, limit: Duration) -> Result<Finished> {
        self.check_stop()?;
        let name = shown(command);
        writeln!(self.log, "+ {name}")?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start `{name}`"))?;
        if self.in_background {
            // What it starts has it from it. A child that has ended meanwhile needs none.
            match setpriority_pgrp(Some(Pid::from_child(&child)), LOWEST) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => self.say(&format!("`{name}` runs at the usual priority: {error}"))?,
            }
        }
        let lines = read_both(&mut child)?;
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let started = Instant::now();
        let mut ended: Option<(ExitStatus, Instant)> = None;
        loop {
            match lines.recv_timeout(TICK) {
                Ok((stream, line)) => {
                    self.say(&line)?;
                    if stream == Stream::Out {
                        out.push(line)
                    } else {
                        err.push(line)
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.wait(&mut child, &name, started, limit)?;
                    return Ok(Finished { status, out, err });
                }
            }
            if let Some((status, at)) = ended {
                if at.elapsed() > AFTERMATH {
                    return Ok(Finished { status, out, err });
                }
            } else if let Some(status) = self.ended(&mut child)? {
                ended = Some((status, Instant::now()));
            } else {
                self.stop_if_due(&mut child, &name, started, limit)?;
            }
        }
    }

    /// Both pipes are closed: the child is about to end, or has closed them and works on.
    fn wait(&mut self, child: &mut Child, name: &str, started: Instant, limit: Duration) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.ended(child)? {
                return Ok(status);
            }
            self.stop_if_due(child, name, started, limit)?;
            thread::sleep(TICK / 10);
        }
    }

    /// How the child ended, if it has. Its processor time is read while it is a zombie, before its number is free again.
    fn ended(&mut self, child: &mut Child) -> Result<Option<ExitStatus>> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if waitid(WaitId::Pid(Pid::from_child(child)), look).is_ok_and(|ended| ended.is_some()) {
            self.add_cpu(cpu_seconds(child.id().into()).unwrap_or_default());
        }
        Ok(child.try_wait()?)
    }

    fn stop_if_due(&self, child: &mut Child, name: &str, started: Instant, limit: Duration) -> Result<()> {
        if started.elapsed() > limit {
            end_group(child)?;
            bail!(
                "`{name}` took longer than its limit of {} s and was stopped",
                limit.as_secs()
            );
        }
        if self.stop.requested() {
            end_group(child)?;
            bail!(Stopped);
        }
        Ok(())
    }

    /// Fails when the run is being stopped; long steps without commands call it now and then.
    pub(crate) fn check_stop(&self) -> Result<()> {
        if self.stop.requested() {
            bail!(Stopped);
        }
        Ok(())
    }
}

/// The step did not fail; it was told to stop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopped;

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stopped")
    }
}

impl std::error::Error for Stopped {}

/// SIGTERM to the child's whole group, a while to clean up, then SIGKILL.
pub(crate) fn end_group(child: &mut Child) -> Result<()> {
    let group = Pid::from_child(child);
    let deadline = Instant::now() + GRACE;
    // The group may be gone already; that is what we want.
    let _ = kill_process_group(group, Signal::TERM);
    while child.try_wait()?.is_none() && Instant::now() < deadline {
        thread::sleep(TICK);
    }
    let _ = kill_process_group(group, Signal::KILL);
    child.wait()?;
    Ok(())
}

fn read_both(child: &mut Child) -> Result<Receiver<(Stream, String)>> {
    let (sender, receiver) = mpsc::channel();
    let out = child.stdout.take().context("the child has no standard output")?;
    let err = child.stderr.take().context("the child has no standard error")?;
    let second = sender.clone();
    thread::Builder::new().spawn(move || read_lines(Stream::Out, out, &sender))?;
    thread::Builder::new().spawn(move || read_lines(Stream::Err, err, &second))?;
    Ok(receiver)
}

/// Splits at newlines and at carriage returns, so that a progress meter shows up as lines too.
fn read_lines(stream: Stream, from: impl Read, to: &Sender<(Stream, String)>) {
    let mut line = Vec::new();
    for byte in BufReader::new(from).bytes() {
        let Ok(byte) = byte else { break };
        if byte != b'\n' && byte != b'\r' {
            line.push(byte);
            continue;
        }
        if !(line.is_empty() && byte == b'\r') && to.send((stream, text(&mut line))).is_err() {
            return;
        }
    }
    if !line.is_empty() {
        // Nobody listens any more only when the step has ended; then the rest does not matter.
        let _ = to.send((stream, text(&mut line)));
    }
}

fn text(line: &mut Vec<u8>) -> String {
    let text = String::from_utf8_lossy(line).into_owned();
    line.clear();
    text
}

/// Processor seconds of a process and of the children that it has waited for.
pub(crate) fn cpu_seconds(pid: u64) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // proc(5): fields 14 to 17 are utime, stime, cutime and cstime. The second field, the command's name, may hold spaces.
    let (_, rest) = stat.rsplit_once(") ")?;
    let ticks = rest
        .split(' ')
        .skip(11)
        .take(4)
        .map(|field| field.parse::<f64>().ok())
        .sum::<Option<f64>>()?;
    Some(ticks / TICKS_A_SECOND)
}

/// The command as one would type it, near enough for a log.
fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|arg| {
        let arg = arg.to_string_lossy();
        if arg.is_empty() || arg.contains([' ', '\'', '(', '$']) {
            format!("{arg:?}")
        } else {
            arg.into_owned()
        }
    }));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(dir: &Path, stop: &Stop) -> Task {
        Task::new(0, &dir.join("log"), Board::silent(1), stop.clone()).unwrap()
    }

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn streams_are_kept_apart_and_logged() {
        let dir = tempfile::tempdir().unwrap();
        let mut task = task(dir.path(), &Stop::default());
        let done = task
            .run_within(&mut sh("echo one; echo two >&2; printf 'three\\rfour'"), Duration::MAX)
            .unwrap();
        assert_eq!(done.out, ["one", "three", "four"]);
        assert_eq!(done.err, ["two"]);
        let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
        assert!(log.contains("two") && log.contains("four"), "{log}");
    }

    #[test]
    fn a_failure_names_the_command_and_its_status() {
        let dir = tempfile::tempdir().unwrap();
        let error = task(dir.path(), &Stop::default())
            .run_within(&mut sh("exit 3"), Duration::MAX)
            .unwrap_err();
        assert!(format!("{error}").contains("exit status: 3"), "{error}");
    }

    #[test]
    fn processor_time_of_commands_and_their_children_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let mut task = task(dir.path(), &Stop::default());
        let spin = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
        task.run_within(&mut sh("sleep 0.1"), Duration::MAX).unwrap();
        assert!(task.measured.cpu < 0.1, "{} s for a sleep", task.measured.cpu);
        task.run_within(&mut sh(&format!("sh -c '{spin}'; true")), Duration::MAX)
            .unwrap();
        assert!(task.measured().cpu > 0.05);
    }

    #[test]
    fn commands_in_the_background_have_the_lowest_priority() {
        let dir = tempfile::tempdir().unwrap();
        let ours = Command::new("nice").output().unwrap().stdout;
        let ours = String::from_utf8(ours).unwrap();
        for (in_background, wanted) in [(false, ours.trim()), (true, "19")] {
            let mut task = task(dir.path(), &Stop::default()).in_background(in_background);
            // A shell's child, started after the shell has been given its priority.
            let done = task.run_within(&mut sh("sleep 0.5; nice"), Duration::MAX).unwrap();
            assert_eq!(done.out, [wanted]);
        }
    }

    #[test]
    fn a_time_limit_ends_the_whole_group() {
        let dir = tempfile::tempdir().unwrap();
        // Whoever lives has its end of the fifo open. Both of ours are, so that nobody waits for the other.
        let fifo = dir.path().join("alive");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let ours = File::options().read(true).write(true).open(&fifo).unwrap();
        let mut reader = File::open(&fifo).unwrap();
        let script = format!("exec 3>{}; sleep 1000 & sleep 1000", fifo.display());
        let mut task = task(dir.path(), &Stop::default());
        let error = task.run_within(&mut sh(&script), Duration::from_secs(2)).unwrap_err();
        assert!(format!("{error}").contains("limit"), "{error}");
        drop(ours);
        let (ended, end) = mpsc::channel();
        thread::spawn(move || ended.send(reader.read_to_end(&mut Vec::new())));
        end.recv_timeout(Duration::from_secs(90))
            .expect("a grandchild survived")
            .unwrap();
    }

    #[test]
    fn a_stop_ends_the_child_and_is_told_from_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let stop = Stop::default();
        let later = stop.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            later.because_of_failure();
        });
        let error = task(dir.path(), &stop)
            .run_within(&mut sh("sleep 60"), Duration::MAX)
            .unwrap_err();
        assert!(error.is::<Stopped>(), "{error}");
    }

    #[test]
    fn a_second_run_waits_for_the_first_at_the_same_step() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let first = task(dir.path(), &Stop::default());
        let stop = Stop::default();
        let other = stop.clone();
        let path = log.clone();
        let second = thread::spawn(move || Task::new(0, &path, Board::silent(1), other).map(|_| ()));
        thread::sleep(Duration::from_millis(300));
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap().unwrap();
        let _third = task(dir.path(), &stop);
        stop.because_of_failure();
        assert!(Task::new(0, &log, Board::silent(1), stop).is_err());
    }

    #[test]
    fn a_daemon_that_keeps_the_pipe_does_not_hold_the_step() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let begun = Instant::now();
        task(dir.path(), &Stop::default())
            .run_within(
                &mut sh(&format!("sleep 1000 & echo $! > {}", pid.display())),
                Duration::MAX,
            )
            .unwrap();
        assert!(begun.elapsed() < Duration::from_secs(90));
        let pid = std::fs::read_to_string(pid).unwrap();
        let killed = Command::new("kill").arg(pid.trim()).status().unwrap();
        assert!(killed.success(), "the daemon was not left running");
    }
}
