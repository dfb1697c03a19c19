//! Runs cases one after the other, each in a process group of its own, with a hard limit and one retry of a time-out or
//! of a guest that stopped before its agent ran.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::daemon::TEMPLATES;
use crate::{AGAIN, Case, LOGS, cases, kernel_log, leaks, stall};

/// Cases whose processes are to die of calls that their filters do not have. In all others it is a fault, also where nobody misses them.
const ENDS_BY_FILTERS: [&str; 1] = ["jail-calls"];

enum Outcome {
    Passed,
    Failed,
    TimedOut,
    /// It failed because a guest stopped early in its boot.
    Stalled,
}

/// Prints the names, one a line.
pub(crate) fn print(list: Cases) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    for case in list {
        writeln!(out, "{}", case.name)?;
    }
    Ok(true)
}

/// Has the daemon run that most cases share, with its network: it is no leak of the first of them.
fn start_daemon() -> Result<()> {
    // Those of a run before may be of other programs.
    if Path::new(TEMPLATES).exists() {
        std::fs::remove_dir_all(TEMPLATES)?;
    }
    std::fs::create_dir_all(TEMPLATES)?;
    std::fs::set_permissions(TEMPLATES, std::fs::Permissions::from_mode(0o700))?;
    let basalt = std::env::current_exe()?.with_file_name("basalt");
    let image = crate::python_image()?;
    let output = Command::new(&basalt)
        .args(["run", "--rm", &image, "--", "true"])
        .env("BASALT_ENGINE", "kvm")
        .output()
        .with_context(|| format!("{} cannot be run", basalt.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "the daemon does not start: {said}");
    Ok(())
}

/// A list of cases.
pub(crate) type Cases = &'static [&'static Case];

/// Which cases to run.
pub(crate) enum Choice<'a> {
    /// This one.
    Case(&'a str),
    /// Those whose name contains `filter`, beginning with the case `from`.
    All {
        list: Cases,
        filter: &'a str,
        from: Option<&'a str>,
    },
}

impl Choice<'_> {
    fn cases(&self) -> Result<Vec<&'static Case>> {
        match *self {
            Choice::Case(name) => Ok(vec![crate::find(name)?]),
            Choice::All { list, filter, from } => {
                let first = match from {
                    Some(name) => list.iter().position(|case| case.name == name),
                    None => Some(0),
                };
                let first = first.with_context(|| format!("there is no case `{}`", from.unwrap_or_default()))?;
                let behind = list.iter().copied().skip(first);
                Ok(behind.filter(|case| case.name.contains(filter)).collect())
            }
        }
    }
}

/// Runs the chosen cases, each within `patience` times its limit; true when all passed and there was one.
pub(crate) fn run(choice: &Choice<'_>, patience: u32, logs: &Path) -> Result<bool> {
    let chosen = choice.cases()?;
    start_daemon()?;
    let (mut passed, mut failed, mut retried) = (0, 0, 0);
    let mut out = std::io::stdout().lock();
    for case in &chosen {
        let (began, limit) = (Instant::now(), case.limit * patience);
        let mut outcome = one(case, limit, logs, false)?;
        let reason = match outcome {
            Outcome::Passed | Outcome::Failed => None,
            Outcome::TimedOut => Some(format!("no end within {limit:?}")),
            Outcome::Stalled => Some("a guest stopped before its agent ran, or reset".to_owned()),
        };
        if let Some(reason) = reason {
            // The emulated host sometimes stops making progress (docs/lab.md, traps); a second time is a failure.
            retried += 1;
            let seconds = began.elapsed().as_secs_f64();
            writeln!(out, "retry  {} {seconds:.1} s: {reason}", case.name)?;
            show_tail(&mut out, &logs.join(case.name).join("output"))?;
            keep_first(&logs.join(case.name))?;
            outcome = one(case, limit, logs, true)?;
        }
        let seconds = began.elapsed().as_secs_f64();
        match outcome {
            Outcome::Passed => {
                passed += 1;
                writeln!(out, "ok     {} {seconds:.1} s", case.name)?;
            }
            Outcome::Failed | Outcome::TimedOut | Outcome::Stalled => {
                failed += 1;
                let output = logs.join(case.name).join("output");
                writeln!(out, "FAILED {} {seconds:.1} s: {}", case.name, reason_in(&output)?)?;
                show_tail(&mut out, &output)?;
            }
        }
        out.flush()?;
    }
    let all = match choice {
        Choice::Case(_) => cases::ALL,
        Choice::All { list, .. } => *list,
    };
    let skipped = all.len().saturating_sub(chosen.len());
    writeln!(
        out,
        "cases: {} run, {failed} failed, {retried} retried, {skipped} skipped",
        chosen.len()
    )?;
    writeln!(out, "{passed} passed, {failed} failed, {skipped} skipped")?;
    Ok(failed == 0 && passed > 0)
}

fn one(case: &Case, limit: Duration, logs: &Path, again: bool) -> Result<Outcome> {
    let directory = logs.join(case.name);
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let mut output = File::create(directory.join("output"))?;
    let mut log = kernel_log::kernel_log()?;
    // Not by its path: a newer one may have been put there while the cases run.
    let mut child = Command::new("/proc/self/exe")
        .args(["host", case.name])
        .env(LOGS, &directory)
        .envs(again.then_some((AGAIN, "1")))
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .process_group(0)
        .spawn()?;
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            match forbidden(case, &mut log, &mut output)? {
                true => return Ok(Outcome::Failed),
                false if status.success() => return Ok(Outcome::Passed),
                false => (),
            }
            let told = std::fs::read(directory.join("output"))?;
            return Ok(if stall::tells(&String::from_utf8_lossy(&told)) {
                Outcome::Stalled
            } else {
                Outcome::Failed
            });
        }
        if Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?;
    }
    child.wait()?;
    leaks::kill_left_over()?;
    start_daemon()?;
    Ok(match forbidden(case, &mut log, &mut output)? {
        true => Outcome::Failed,
        false => Outcome::TimedOut,
    })
}

/// Whether a process of ours has died of its filter since, which is told in the case's output.
fn forbidden(case: &Case, log: &mut File, output: &mut File) -> Result<bool> {
    if ENDS_BY_FILTERS.contains(&case.name) {
        return Ok(false);
    }
    let calls = kernel_log::forbidden_calls(log)?;
    for call in &calls {
        let call = call.lines().next().unwrap_or_default();
        writeln!(
            output,
            "a process was ended for a system call that its filter does not have: {call}"
        )?;
    }
    Ok(!calls.is_empty())
}

/// What a case left in `directory` before it is made once more.
fn keep_first(directory: &Path) -> Result<()> {
    let kept = directory.with_extension("first");
    if kept.exists() {
        std::fs::remove_dir_all(&kept)?;
    }
    Ok(std::fs::rename(directory, kept)?)
}

/// Why a case failed, in one line that whoever sees only a run's end can do something with: it says so last.
fn reason_in(path: &Path) -> Result<String> {
    const LENGTH: usize = 800;
    let text = String::from_utf8_lossy(&std::fs::read(path)?).into_owned();
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    Ok(last
        .unwrap_or("it said nothing, or was stopped at its limit")
        .chars()
        .take(LENGTH)
        .collect())
}

/// The end of a failed case's output; the rest is in its file.
fn show_tail(out: &mut impl Write, path: &Path) -> Result<()> {
    const LINES: usize = 40;
    let text = String::from_utf8_lossy(&std::fs::read(path)?).into_owned();
    let lines: Vec<_> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(LINES)..] {
        writeln!(out, "  | {line}")?;
    }
    if std::io::stdout().is_terminal() {
        writeln!(out, "  (all of it: {})", path.display())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(choice: &Choice<'_>) -> Vec<&'static str> {
        choice.cases().unwrap().iter().map(|case| case.name).collect()
    }

    #[test]
    fn one_case_is_chosen_by_its_whole_name_and_many_by_a_part() {
        assert_eq!(names(&Choice::Case("snapshot")), ["snapshot"]);
        assert!(Choice::Case("snap").cases().is_err());
        let (filter, from) = ("snapshot", Some("cpu-models"));
        let list = cases::ALL;
        let behind = names(&Choice::All { list, filter, from });
        assert!(behind.len() > 1 && !behind.contains(&"snapshot"), "{behind:?}");
        for list in [cases::ALL, cases::NEWER] {
            let (filter, from) = ("", None);
            assert_eq!(names(&Choice::All { list, filter, from }).len(), list.len());
        }
        assert!(
            Choice::All {
                list,
                filter,
                from: Some("none")
            }
            .cases()
            .is_err()
        );
    }
}
