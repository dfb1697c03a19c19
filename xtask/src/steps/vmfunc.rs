//! The step `vmfunc`: the system of lab/vmfunc (a hypervisor, a frozen server and hostile clients) in Bochs, an emulator of an Intel processor,
//! and what it prints compared with lab/vmfunc/expected.txt.
//!
//! Knows how the programs are built and which machine is emulated; what the lines mean is in lab/vmfunc.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Counts, Report, Step, Task};

/// The emulator.
pub(crate) const BOCHS: Recipe = Recipe {
    name: "bochs",
    dir: "lab/vmfunc/bochs",
};

const SOURCE: &str = "lab/vmfunc";
const TARGET: &str = "x86_64-unknown-none";
const PROFILE: &str = "bare";
/// Guests, which the hypervisor has in it; then what the emulator loads as it is.
const GUESTS: [&str; 4] = ["server_kernel", "server", "client_kernel", "client"];
const FLAT: [&str; 2] = ["firmware", "hypervisor"];

/// Compiling takes some 20 seconds of a processor, running 2.
const LIMIT: Duration = Duration::from_secs(20 * 60);
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// What Rust has for programs without an operating system.
pub(crate) fn bare_target() -> Step {
    super::build::target("bare-target", TARGET)
}

/// The step.
pub(crate) fn vmfunc() -> Step {
    Step::new("vmfunc", |context, task| {
        // The hypervisor has its guests in it.
        let programs = build_guests(context, task)?;
        lint(context, task, &programs)?;
        build(context, task, &programs)?;
        let printed = run(context, task, &programs)?;
        let expected = fs::read_to_string(context.root.join(SOURCE).join("expected.txt"))?;
        let judged = judge(&expected, &printed);
        for line in &judged.wrong {
            task.say(line)?;
        }
        let mut report = Report::from(judged.counts);
        report.detail = format!("{} in Bochs; {}", report.detail, judged.figures.join(", "));
        Ok(report)
    })
    .hint("`cargo xtask vmfunc` repeats it; the step's log has all that was printed, and lab/vmfunc/README.md says what it means")
}

fn cargo(context: &Context, words: &[&str]) -> Command {
    let mut command = super::cargo(context, words);
    command.current_dir(context.root.join(SOURCE));
    command
}

/// Its workspace is its own, so what is checked of the other's sources is checked here.
fn lint(context: &Context, task: &mut Task, guests: &Path) -> Result<()> {
    let mut fmt = Command::new("cargo");
    fmt.args(["fmt", "--check"]).current_dir(context.root.join(SOURCE));
    task.run_within(&mut fmt, LIMIT)?;
    let mut clippy = cargo(
        context,
        &["clippy", "--locked", "--profile", PROFILE, "--target", TARGET],
    );
    clippy.args(["--", "-D", "warnings"]).env("VMFUNC_GUESTS", guests);
    task.run_within(&mut clippy, LIMIT)?;
    Ok(())
}

/// The guests; the directory in which all programs are.
fn build_guests(context: &Context, task: &mut Task) -> Result<PathBuf> {
    let mut command = cargo(
        context,
        &["build", "--locked", "--profile", PROFILE, "--target", TARGET],
    );
    for guest in GUESTS {
        command.args(["--bin", guest]);
    }
    task.run_within(&mut command, LIMIT)?;
    Ok(context.target().join(TARGET).join(PROFILE))
}

/// The other programs.
fn build(context: &Context, task: &mut Task, guests: &Path) -> Result<()> {
    for program in FLAT {
        let words = [
            "rustc",
            "--locked",
            "--profile",
            PROFILE,
            "--target",
            TARGET,
            "--bin",
            program,
        ];
        let mut command = cargo(context, &words);
        command
            .args(["--", "-C", "link-arg=--oformat=binary"])
            .env("VMFUNC_GUESTS", guests);
        task.run_within(&mut command, LIMIT)?;
    }
    Ok(())
}

/// Runs the machine until it ends itself; what it has printed.
fn run(context: &Context, task: &mut Task, programs: &Path) -> Result<Vec<String>> {
    let bochs = BOCHS.path(context)?;
    let work = context.target().join("vmfunc");
    fs::create_dir_all(&work)?;
    for program in FLAT {
        fs::copy(programs.join(program), work.join(program))?;
    }
    fs::copy(bochs.join("vgabios"), work.join("vgabios")).context("the recipe `bochs` left no vgabios")?;
    fs::write(work.join("bochsrc"), MACHINE)?;
    // Debian's Bochs has its debugger built in, and waits for a command.
    fs::write(work.join("commands"), "c\nquit\n")?;
    // Its screen can be had over the network, which nobody wants: so it has no network.
    let mut command = Command::new("unshare");
    command.arg("--net").arg(bochs.join("bochs"));
    command
        .args(["-q", "-f", "bochsrc", "-rc", "commands"])
        .current_dir(&work);
    // It always ends with an error: the machine ends by what Bochs takes for one.
    let finished = task.finish_within(&mut command, RUN_LIMIT)?;
    let lines = finished.out.iter().chain(&finished.err);
    let printed: Vec<_> = lines
        .filter_map(|line| line.split_once("vmfunc:"))
        .map(|(_, line)| line.to_owned())
        .collect();
    if printed.is_empty() {
        let last = finished
            .err
            .last()
            .or(finished.out.last())
            .map_or("nothing", String::as_str);
        bail!("the machine printed nothing; `unshare` (which needs root) or Bochs said {last:?} last");
    }
    Ok(printed)
}

/// The machine. Names of files are short, because Bochs has no room for long ones. Its firmware is ours, and the hypervisor is in its memory when it
/// starts; it has no disk and makes no noise.
const MACHINE: &str = "plugin_ctrl: unmapped=1, speaker=0
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=0, ignore_bad_msrs=1
memory: guest=64, host=64
romimage: file=firmware
vgaromimage: file=vgabios
optramimage1: file=hypervisor, address=0x100000
display_library: rfb, options=\"timeout=0\"
port_e9_hack: enabled=1
log: log
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
";

/// What came of a comparison.
struct Judged {
    counts: Counts,
    wrong: Vec<String>,
    figures: Vec<String>,
}

/// Figures that are told when all is well.
const TOLD: [&str; 3] = [
    "exits of 10000 calls",
    "exits of 10000 VMCALLs",
    "instructions of a null call with the loop around it",
];

/// Compares what was printed with what has to be, scenario by scenario.
fn judge(expected: &str, printed: &[String]) -> Judged {
    let wanted = expected
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let wanted = scenarios(wanted);
    let seen = scenarios(printed.iter().map(String::as_str));
    let mut judged = Judged {
        counts: Counts::default(),
        wrong: Vec::new(),
        figures: Vec::new(),
    };
    let names: Vec<_> = wanted
        .keys()
        .chain(seen.keys().filter(|name| !wanted.contains_key(*name)))
        .collect();
    for name in names {
        let (wanted, seen) = (wanted.get(name).map(Vec::as_slice), seen.get(name).map(Vec::as_slice));
        let (wanted, seen) = (wanted.unwrap_or_default(), seen.unwrap_or_default());
        let mut all_right = wanted.len() == seen.len();
        for at in 0..wanted.len().max(seen.len()) {
            let (wanted, seen) = (wanted.get(at).copied(), seen.get(at).copied());
            if wanted.zip(seen).is_none_or(|(wanted, seen)| !matches(wanted, seen)) {
                all_right = false;
                let shown = |line: Option<&str>| line.map_or("nothing", str::trim).to_owned();
                judged
                    .wrong
                    .push(format!("{name}: wanted {}, got {}", shown(wanted), shown(seen)));
            }
        }
        judged.figures.extend(seen.iter().filter_map(|line| told(line)));
        if all_right {
            judged.counts.passed += 1;
        } else {
            judged.counts.failed += 1;
        }
    }
    judged
}

fn told(line: &str) -> Option<String> {
    let (name, value) = line.trim().strip_prefix("figure ")?.split_once(": ")?;
    TOLD.contains(&name).then(|| format!("{value} {name}"))
}

/// Lines by scenario; what comes before the first is `start`.
fn scenarios<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut found = BTreeMap::<_, Vec<_>>::new();
    let mut name = "start";
    for line in lines {
        name = line.strip_prefix("scenario ").unwrap_or(name);
        found.entry(name).or_default().push(line);
    }
    found
}

/// Whether a line is as it has to be. Figures have conditions: `= 0`, `<= 400`, `>= 10`.
fn matches(wanted: &str, seen: &str) -> bool {
    let (Some((wanted_name, condition)), Some((seen_name, value))) = (of_figure(wanted), of_figure(seen)) else {
        return wanted == seen;
    };
    let (Some((sign, limit)), Ok(value)) = (condition.split_once(' '), value.parse::<u64>()) else {
        return false;
    };
    let Ok(limit) = limit.parse::<u64>() else { return false };
    wanted_name == seen_name
        && match sign {
            "=" => value == limit,
            "<=" => value <= limit,
            ">=" => value >= limit,
            _ => false,
        }
}

fn of_figure(line: &str) -> Option<(&str, &str)> {
    line.trim().strip_prefix("figure ")?.split_once(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: &str =
        "# words\n\nready\nscenario one\n  figure exits of 10000 calls: = 0\n  end\nscenario two\n  figure n: <= 400\n";

    fn judged(printed: &str) -> (u64, u64, Vec<String>) {
        let lines: Vec<_> = printed.lines().map(str::to_owned).collect();
        let judged = judge(EXPECTED, &lines);
        (judged.counts.passed, judged.counts.failed, judged.wrong)
    }

    #[test]
    fn what_is_as_it_has_to_be_passes() {
        let text = "ready\nscenario one\n  figure exits of 10000 calls: 0\n  end\nscenario two\n  figure n: 98\n";
        assert_eq!(judged(text), (3, 0, Vec::new()));
    }

    #[test]
    fn another_line_a_missing_one_and_one_too_many_fail() {
        for (text, failed) in [
            (
                "ready\nscenario one\n  figure exits of 10000 calls: 1\n  end\nscenario two\n  figure n: 98\n",
                1,
            ),
            (
                "ready\nscenario one\n  figure exits of 10000 calls: 0\nscenario two\n  figure n: 98\n",
                1,
            ),
            (
                "ready\nscenario one\n  figure exits of 10000 calls: 0\n  end\n  more\nscenario two\n  figure n: 401\n",
                2,
            ),
            ("ready\nscenario one\n  figure exits of 10000 calls: 0\n  end\n", 1),
            (
                "ready\nscenario one\n  figure exits of 10000 calls: 0\n  end\nscenario two\n  figure n: 98\nscenario three\n",
                1,
            ),
        ] {
            let (passed, found, wrong) = judged(text);
            assert_eq!(
                (found, wrong.is_empty()),
                (failed, false),
                "{passed} passed with {text}"
            );
        }
    }

    #[test]
    fn figures_have_conditions() {
        assert!(matches("  figure n: >= 10", "  figure n: 44"));
        assert!(!matches("  figure n: >= 10", "  figure n: 9"));
        assert!(!matches("  figure n: >= 10", "  figure m: 44"));
        assert!(!matches("  figure n: 10", "  figure n: 10"));
        assert!(!matches("  figure n: = 10", "  figure n: ten"));
    }
}
