//! The step `cases`: VM cases inside the lab, or right here where there is hardware virtualization.
//!
//! Outlives the emulated host: when that dies or stands still (docs/lab.md, traps), it is started afresh, and the cases go
//! on with the one that ran. Cases that failed are run once more when all others have ended, each on a lab that has just
//! been started. What a run comes to is in `case_sum`; what a case tests, and when one is made once more within a host, the
//! runner knows (lab/cases).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::case_sum::{AGAIN_AT_MOST, Again, Sum};
use super::sandbox::{self, Lab, lab_command_in, only_with_a_lab};
use super::tests::CASES_IN_LAB;
use crate::context::Context;
use crate::runner::task::cpu_seconds;
use crate::runner::{Finished, Report, Step, Task};

/// Each case has a hard limit of its own; this one ends the whole when they together take too long. They took some 2 400 s beside
/// compilers that had both processors as well (the sum of a run in parts).
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// Bringing programs into the lab, and the lab up.
const SETUP_LIMIT: Duration = Duration::from_secs(5 * 60);
/// Where the case `package` looks.
const PACKAGES_IN_LAB: &str = "/opt/basalt/bin/basalt-packages";
/// Where the case `cuda` looks.
const CUDA_IN_LAB: &str = "/opt/basalt/bin/basalt-cuda-programs";
/// Where the runner keeps what cases leave (its default), and where it does for those that are run once more.
const LOGS: &str = "/var/lib/basalt/cases";
const LOGS_AGAIN: &str = "/var/lib/basalt/cases-again";

/// All cases but those of a newer host.
pub(crate) fn cases() -> Step {
    Step::new("cases", |context, task| Site::Default.run_all(context, task))
        .hint("the case's console log is named above; `cargo xtask test --only cases` repeats the cases")
}

/// Those of a host with a newer kernel, in a lab of its own, which ends with them.
pub(crate) fn newer_cases() -> Step {
    in_own_lab("newer-cases", Site::Newer)
        .hint("the case's console log is named above; `cargo xtask long --only newer-cases` repeats the cases")
}

/// The same as `cases`, in the emulator that is compiled here.
pub(crate) fn fast_cases() -> Step {
    in_own_lab("fast-cases", Site::Fast)
        .hint("the case's console log is named above; `cargo xtask long --only fast-cases` repeats the cases")
}

fn in_own_lab(name: &'static str, site: Site) -> Step {
    Step::new(name, move |context, task| {
        let up = sandbox::another_host(context, task, site.lab());
        let ran = up.and_then(|()| site.run_all(context, task));
        let down = sandbox::take_down(context, task, site.lab());
        ran.and_then(|report| down.map(|()| report))
    })
    .plan(only_with_a_lab)
}

/// Where cases run, and which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Site {
    /// In the lab, or right here where there is hardware virtualization.
    Default,
    Newer,
    Fast,
}

impl Site {
    fn lab(self) -> Lab {
        match self {
            Self::Default => Lab::Default,
            Self::Newer => Lab::Newer,
            Self::Fast => Lab::Fast,
        }
    }

    /// How the runner is told of them.
    fn list(self) -> &'static [&'static str] {
        match self {
            Self::Default | Self::Fast => &[],
            Self::Newer => &["--newer"],
        }
    }

    fn run_all(self, context: &Context, task: &mut Task) -> Result<Report> {
        let mut runner = Command::new(context.release().join("basalt-lab-cases"));
        let listed = task.run_within(runner.arg("list").args(self.list()), SETUP_LIMIT)?;
        let names = listed.out;
        let mut sum = Sum::default();
        let ran = if context.kvm {
            crate::cuda_programs::for_cases(context)?;
            run(context, task, self.lab(), &["run"]).map(|finished| sum.add(&finished))
        } else {
            self.run_in_lab(context, task, &names, &mut sum)
        };
        ran.and_then(|()| self.again(context, task, &mut sum))
            .inspect_err(|_| sum.tell(task))?;
        sum.tell(task);
        sum.report(&names)
    }

    fn run_in_lab(self, context: &Context, task: &mut Task, names: &[String], sum: &mut Sum) -> Result<()> {
        while let Some(next) = names.get(sum.ended()) {
            bring_programs(context, task, self.lab())?;
            let mut arguments = vec!["run", "--from", next];
            arguments.extend(self.list());
            let finished = run(context, task, self.lab(), &arguments)?;
            sum.add(&finished);
            if !sandbox::host_is_lost(&finished) {
                return Ok(());
            }
            let Some(during) = names.get(sum.ended()) else {
                return Ok(());
            };
            task.say(&format!(
                "the emulated host was lost under the case {during}; the cases go on in another"
            ))?;
            sum.host_lost(during)?;
            sandbox::another_host(context, task, self.lab())?;
        }
        Ok(())
    }

    /// Runs each case that failed once more, on a host that nothing has run on: what passes there is flaky, not broken. More
    /// failures than a few are no accident and stay what they are.
    fn again(self, context: &Context, task: &mut Task, sum: &mut Sum) -> Result<()> {
        let failed = sum.to_be_run_again();
        if failed.is_empty() && sum.has_failed() {
            task.say(&format!(
                "more than {AGAIN_AT_MOST} cases failed; none is run once more"
            ))?;
        }
        let lab = self.lab();
        for name in failed {
            task.say(&format!("once more, on a lab started for it: {name}"))?;
            if !context.kvm {
                sandbox::take_down(context, task, lab)?;
                sandbox::another_host(context, task, lab)?;
                bring_programs(context, task, lab)?;
            }
            let first = keep_logs(context, task, lab, [&name, LOGS, "first"])?;
            let finished = run(context, task, lab, &["run", "--case", &name, "--logs", LOGS_AGAIN])?;
            let lost = sandbox::host_is_lost(&finished);
            if lost {
                sandbox::another_host(context, task, lab)?;
            }
            let second = keep_logs(context, task, lab, [&name, LOGS_AGAIN, "second"])?;
            let short = |path: &Path| context.short(path).display().to_string();
            sum.ran_again(Again::of(&name, &finished, lost, [short(&first), short(&second)]));
        }
        Ok(())
    }
}

/// What is new of our programs, and the packages, which no case of a newer host installs.
fn bring_programs(context: &Context, task: &mut Task, lab: Lab) -> Result<()> {
    task.run_within(&mut lab_command_in(context, lab, &["sync"]), SETUP_LIMIT)?;
    if lab == Lab::Newer {
        return Ok(());
    }
    let packages = super::package::for_tests(context);
    let mut push = lab_command_in(context, lab, &["push"]);
    task.run_within(push.args(packages).arg(PACKAGES_IN_LAB), SETUP_LIMIT)?;
    let mut push = lab_command_in(context, lab, &["push"]);
    push.args(crate::cuda_programs::for_cases(context)?);
    task.run_within(push.arg(CUDA_IN_LAB), SETUP_LIMIT)?;
    Ok(())
}

/// The runner of cases with these arguments, in the lab if there is one, whose processor time counts as the step's.
fn run(context: &Context, task: &mut Task, lab: Lab, arguments: &[&str]) -> Result<Finished> {
    if context.kvm {
        let mut command = Command::new(context.release().join("basalt-lab-cases"));
        return task.finish_within(command.args(arguments).current_dir(&context.root), LIMIT);
    }
    let emulator = sandbox::emulator(context, task, lab)?;
    let before = cpu_seconds(emulator);
    let mut command = lab_command_in(context, lab, &["exec", "--", CASES_IN_LAB]);
    let finished = task.finish_within(command.args(arguments), LIMIT);
    // One that has died tells nothing any more.
    if let (Some(before), Some(after)) = (before, cpu_seconds(emulator)) {
        task.add_cpu(after - before);
    }
    finished
}

/// All files of text here and below, the end of each.
const TEXTS: &str = "find . -type f -exec grep -qI '' {} \\; -print | sort |
    while read -r file; do echo \"==> ${file#./} <==\"; tail -c 100000 \"$file\"; echo; done";

/// Everything that a case left in its directory below `logs`, as one file in the checkout's build directory: the lab may be
/// gone when somebody looks.
fn keep_logs(context: &Context, task: &mut Task, lab: Lab, [name, logs, attempt]: [&str; 3]) -> Result<PathBuf> {
    let script = format!("cd {logs}/{name} && {TEXTS}");
    let mut command = if context.kvm {
        Command::new("sh")
    } else {
        lab_command_in(context, lab, &["exec", "--", "sh"])
    };
    // A host that was lost may have lost these too: then the file says so.
    let finished = task.finish_within(command.args(["-c", &script]), SETUP_LIMIT)?;
    let home = context.logs().join("cases");
    fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
    let path = home.join(format!("{name}.{attempt}.log"));
    let lines: Vec<_> = finished.out.into_iter().chain(finished.err).collect();
    fs::write(&path, lines.join("\n") + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}
