//! The loop that owns all steps' transitions: starts what may start, a few at a time, and notes how each ends.
//!
//! Knows no step's meaning. The order in the list is the priority among steps that may run at the same time.

use std::collections::HashMap;
use std::fs;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde_json::json;

use super::board::{Board, Mode};
use super::interrupt::Stop;
use super::summary::{self, Row, contribution};
use super::task::Measured;
use super::{Counts, Outcome, Plan, Report, Step, Stopped, Task, timings};
use crate::context::Context;

/// So many steps may be in the background at once: two with tests, which wait most of the time and so leave a processor idle by themselves,
/// and one that compiles; those follow one another anyway.
const IN_BACKGROUND: usize = 3;

/// How many lines of a failed step's log are shown.
const TAIL: usize = 30;

/// How to run a list of steps.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// Only these steps and what they need; empty for all.
    pub(crate) only: Vec<String>,
    /// For machines.
    pub(crate) json: bool,
    /// Go on with independent steps after a failure.
    pub(crate) keep_going: bool,
    /// End with the table and the count of tests; without tests, fail.
    pub(crate) counts: bool,
    /// What `cargo xtask` was called with, for the line that repeats a step.
    pub(crate) verb: &'static str,
    /// The verb has no `--only STEP`, by which a step could be repeated.
    pub(crate) whole: bool,
}

/// How a step ended, sent from its thread.
struct Ended {
    index: usize,
    outcome: Outcome,
    seconds: f64,
    report: Report,
    error: Option<anyhow::Error>,
    measured: Measured,
}

/// Runs `steps`; the number is the exit status.
pub(crate) fn run_steps(context: &Context, steps: Vec<Step>, options: &Options) -> Result<u8> {
    let steps = choose(steps, &options.only)?;
    fs::create_dir_all(context.logs())?;
    let names: Vec<_> = steps.iter().map(|step| step.name).collect();
    let board = Board::new(Mode::choose(options.json, context.ci), &names)?;
    let stop = Stop::listen()?;
    let begun = Instant::now();
    let run = Run {
        context,
        steps: &steps,
        options,
        board: &board,
        stop: &stop,
    };
    let rows = run.all();
    board.close();
    let seconds = begun.elapsed().as_secs_f64();
    let rows = rows?;
    let times = timings::path(&context.logs(), options.verb);
    timings::write(&times, &rows, seconds)?;
    finish(&rows, options, &board, &stop, seconds)
}

/// Steps that run or may run at the same time: in the background, and others.
#[derive(Debug, Default, PartialEq, Eq)]
struct Places {
    beside: usize,
    front: usize,
}

impl Places {
    fn of(&self, step: &Step) -> usize {
        if step.in_background { self.beside } else { self.front }
    }

    fn of_mut(&mut self, step: &Step) -> &mut usize {
        if step.in_background {
            &mut self.beside
        } else {
            &mut self.front
        }
    }
}

struct Run<'a> {
    context: &'a Context,
    steps: &'a [Step],
    options: &'a Options,
    board: &'a Board,
    stop: &'a Stop,
}

impl Run<'_> {
    fn all(&self) -> Result<Vec<Row>> {
        // One more than there are processors: many steps wait for the network or for a disk.
        let places = Places {
            beside: IN_BACKGROUND,
            front: thread::available_parallelism()?.get() + 1,
        };
        let mut rows: Vec<Option<Row>> = self.steps.iter().map(|_| None).collect();
        let mut started = vec![false; self.steps.len()];
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let mut running = Places::default();
            loop {
                self.block(&mut rows, &started);
                while let Some(index) = self.next(&rows, &started, |step| running.of(step) < places.of(step)) {
                    started[index] = true;
                    *running.of_mut(&self.steps[index]) += 1;
                    let sender = sender.clone();
                    scope.spawn(move || self.step(index, &sender));
                }
                if running == Places::default() {
                    break;
                }
                let ended = receiver.recv().context("a step's thread ended without a word")?;
                let index = ended.index;
                *running.of_mut(&self.steps[index]) -= 1;
                rows[index] = Some(self.note(ended));
            }
            Ok(())
        })
        .and_then(|()| {
            rows.into_iter()
                .collect::<Option<Vec<_>>>()
                .context("a step was never run: a cycle in `after`")
        })
    }

    /// The first step in the list that may start now and has a place.
    fn next(&self, rows: &[Option<Row>], started: &[bool], has_place: impl Fn(&Step) -> bool) -> Option<usize> {
        let mut open = (0..self.steps.len()).filter(|&index| !started[index] && rows[index].is_none());
        open.find(|&index| {
            let step = &self.steps[index];
            has_place(step)
                && step.after.iter().all(|name| self.met(rows, name))
                && step.follows.iter().all(|name| self.ended(rows, name))
        })
    }

    /// Whether a step has ended or is not run at all.
    fn ended(&self, rows: &[Option<Row>], name: &str) -> bool {
        !self.steps.iter().any(|step| step.name == name) || rows.iter().flatten().any(|row| row.name == name)
    }

    fn met(&self, rows: &[Option<Row>], name: &str) -> bool {
        rows.iter()
            .flatten()
            .any(|row| row.name == name && row.outcome.satisfies())
    }

    /// Steps whose prerequisites failed, and everything that has not begun when we are to stop.
    fn block(&self, rows: &mut [Option<Row>], started: &[bool]) {
        loop {
            let failed = |rows: &[Option<Row>], name: &str| {
                rows.iter()
                    .flatten()
                    .any(|row| row.name == name && !row.outcome.satisfies())
            };
            let next = (0..self.steps.len())
                .filter(|&i| !started[i] && rows[i].is_none())
                .find_map(|index| {
                    let cause = self.steps[index].after.iter().find(|name| failed(rows, name));
                    match cause {
                        Some(cause) => Some((index, format!("needs {cause}"))),
                        None => self.stop.requested().then(|| (index, "not begun".to_owned())),
                    }
                });
            let Some((index, detail)) = next else { return };
            let step = &self.steps[index];
            self.board.end(index, Outcome::Blocked.word(), 0.0, &detail);
            let counts = contribution(Outcome::Blocked, step.is_check, Counts::default());
            rows[index] = Some(Row {
                detail,
                counts,
                ..Row::new(step.name, Outcome::Blocked)
            });
        }
    }

    /// Runs one step on its own thread.
    fn step(&self, index: usize, sender: &Sender<Ended>) {
        let begun = Instant::now();
        self.board.begin(index);
        let mut measured = Measured::default();
        let (outcome, report, error) = match self.attempt(index, &mut measured) {
            Ok((outcome, report)) => (outcome, report, None),
            Err(error) if error.is::<Stopped>() => (Outcome::Stopped, Report::default(), None),
            Err(error) => (Outcome::Failed, Report::default(), Some(error)),
        };
        let ended = Ended {
            index,
            outcome,
            seconds: begun.elapsed().as_secs_f64(),
            report,
            error,
            measured,
        };
        // The receiver lives as long as the scope that this thread belongs to.
        let _ = sender.send(ended);
    }

    fn attempt(&self, index: usize, measured: &mut Measured) -> Result<(Outcome, Report)> {
        let step = &self.steps[index];
        if let Some(ended) = self.unneeded(step)? {
            return Ok(ended);
        }
        let log = self.context.logs().join(format!("{}.log", step.name));
        let task = Task::new(index, &log, self.board.clone(), self.stop.clone())?;
        let mut task = task.in_background(step.in_background);
        // Another run may have done it while this one waited.
        if let Some(ended) = self.unneeded(step)? {
            return Ok(ended);
        }
        let worked = (step.work)(self.context, &mut task).inspect_err(|error| {
            // The error itself is reported by whoever gets it; the log is only more complete with it.
            let _ = task.say(&format!("error: {error:#}"));
        });
        *measured = task.measured();
        let report = worked?;
        let outcome = match report {
            Report {
                counts: Counts { failed: 1.., .. },
                ..
            } => Outcome::Failed,
            Report { cached: true, .. } => Outcome::Cached,
            Report { .. } => Outcome::Ok,
        };
        Ok((outcome, report))
    }

    fn unneeded(&self, step: &Step) -> Result<Option<(Outcome, Report)>> {
        Ok(match (step.plan)(self.context)? {
            Plan::Run => None,
            Plan::Done => Some((Outcome::Cached, Report::default())),
            Plan::NotNeeded(detail) => Some((
                Outcome::NotNeeded,
                Report {
                    detail,
                    ..Report::default()
                },
            )),
        })
    }

    /// Shows how a step ended.
    fn note(&self, ended: Ended) -> Row {
        let Ended {
            index,
            outcome,
            seconds,
            report,
            error,
            measured,
        } = ended;
        let step = &self.steps[index];
        let detail = match &error {
            Some(error) => format!("{error:#}"),
            None => report.detail,
        };
        self.board.end(index, outcome.word(), seconds, &detail);
        for line in &report.show {
            self.board.note(line);
        }
        let mut explained = String::new();
        if outcome == Outcome::Failed {
            explained = self.explain(step);
            self.board.note(&explained);
            if !self.options.keep_going {
                self.stop.because_of_failure();
            }
        }
        let counts = contribution(outcome, step.is_check, report.counts);
        Row {
            name: step.name,
            outcome,
            seconds,
            detail,
            counts,
            explained,
            remarks: report.remarks,
            measured,
        }
    }

    /// The end of a failed step's log, and what to do.
    fn explain(&self, step: &Step) -> String {
        let path = self.context.logs().join(format!("{}.log", step.name));
        let log = fs::read(&path).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL)..];
        let mut text = String::new();
        for line in tail {
            text.push_str("    | ");
            text.push_str(line);
            text.push('\n');
        }
        text.push_str(&format!("    full log: {}", self.context.short(&path).display()));
        if !step.hint.is_empty() {
            text.push_str(&format!("\n    {}", step.hint));
        }
        if !self.options.whole {
            let (verb, name) = (self.options.verb, step.name);
            text.push_str(&format!("\n    to repeat: cargo xtask {verb} --only {name}"));
        }
        text
    }
}

/// The table, the sum and the exit status.
fn finish(rows: &[Row], options: &Options, board: &Board, stop: &Stop, seconds: f64) -> Result<u8> {
    let mut sum = Counts::default();
    for row in rows {
        sum += row.counts;
    }
    let bad = rows.iter().any(|row| !row.outcome.satisfies());
    if options.counts {
        board.note(&summary::table(rows));
        board.note(&timings::slowest(rows));
        // Once more, as the first time was many lines ago, and a CI server may keep only the last ones.
        for row in rows.iter().filter(|row| !row.explained.is_empty()) {
            board.note(&format!("{} failed:\n{}", row.name, row.explained));
        }
    }
    board.note(&format!("{seconds:.1} s in all"));
    for remark in rows.iter().flat_map(|row| &row.remarks) {
        board.note(remark);
    }
    for row in rows.iter().filter(|row| row.outcome == Outcome::Failed) {
        board.note(&format!("failed: {}: {}", row.name, row.detail));
    }
    let empty = options.counts && options.only.is_empty() && sum.passed + sum.failed == 0;
    if empty {
        board.note("no test was executed: that is a failure");
    }
    let counts = json!({"passed": sum.passed, "failed": sum.failed, "skipped": sum.skipped});
    board.object(&json!({"ok": !bad && !empty, "seconds": seconds, "counts": counts}));
    if let Some(signal) = stop.signal() {
        board.note("interrupted; the same command goes on from here");
        return Ok(u8::try_from(128 + signal).unwrap_or(1));
    }
    if options.counts {
        board.note(&sum.to_string());
    }
    Ok(u8::from(bad || empty))
}

/// The steps that were asked for with everything that they need, in the list's order.
fn choose(steps: Vec<Step>, only: &[String]) -> Result<Vec<Step>> {
    let index: HashMap<&str, usize> = steps
        .iter()
        .enumerate()
        .map(|(index, step)| (step.name, index))
        .collect();
    let mut wanted = vec![only.is_empty(); steps.len()];
    let mut open: Vec<&str> = only.iter().map(String::as_str).collect();
    open.extend(
        steps
            .iter()
            .filter(|_| only.is_empty())
            .flat_map(|step| step.after.iter().copied()),
    );
    while let Some(name) = open.pop() {
        let Some(&place) = index.get(name) else {
            let names: Vec<_> = steps.iter().map(|step| step.name).collect();
            bail!("there is no step {name}; the steps are {}", names.join(", "));
        };
        if !std::mem::replace(&mut wanted[place], true) {
            open.extend(steps[place].after.iter().copied());
        }
    }
    Ok(steps
        .into_iter()
        .zip(wanted)
        .filter_map(|(step, wanted)| wanted.then_some(step))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static ORDER: AtomicUsize = AtomicUsize::new(0);

    fn context(dir: &std::path::Path) -> Context {
        Context {
            root: dir.to_owned(),
            cache: dir.join("cache"),
            kvm: false,
            ci: true,
        }
    }

    fn ok(name: &'static str) -> Step {
        Step::new(name, |_, _| Ok(Report::default()))
    }

    fn bad(name: &'static str) -> Step {
        Step::new(name, |_, task| {
            task.say("the last words")?;
            bail!("broken")
        })
    }

    fn rows(steps: &[Step], keep_going: bool) -> Vec<Row> {
        let dir = tempfile::tempdir().unwrap();
        let context = context(dir.path());
        fs::create_dir_all(context.logs()).unwrap();
        let options = Options {
            keep_going,
            ..Options::default()
        };
        let board = Board::silent(steps.len());
        Run {
            context: &context,
            steps,
            options: &options,
            board: &board,
            stop: &Stop::default(),
        }
        .all()
        .unwrap()
    }

    fn outcomes(rows: &[Row]) -> Vec<Outcome> {
        rows.iter().map(|row| row.outcome).collect()
    }

    #[test]
    fn prerequisites_run_first_even_when_listed_later() {
        let first = Step::new("first", |_, _| {
            assert_eq!(ORDER.fetch_add(1, Ordering::SeqCst), 1);
            Ok(Report::default())
        });
        let second = Step::new("second", |_, _| {
            assert_eq!(ORDER.fetch_add(1, Ordering::SeqCst), 0);
            Ok(Report::default())
        });
        assert_eq!(
            outcomes(&rows(&[first.after(&["second"]), second], false)),
            [Outcome::Ok, Outcome::Ok]
        );
    }

    #[test]
    fn what_needs_a_failed_step_is_blocked_and_the_rest_goes_on() {
        let steps = [bad("a"), ok("b").after(&["a"]).check(), ok("c").after(&["b"]), ok("d")];
        let rows = rows(&steps, true);
        assert_eq!(
            outcomes(&rows),
            [Outcome::Failed, Outcome::Blocked, Outcome::Blocked, Outcome::Ok]
        );
        assert_eq!(rows[0].counts.failed, 1);
        assert_eq!(rows[1].counts.skipped, 1);
    }

    #[test]
    fn what_follows_a_failed_step_waits_for_it_and_runs() {
        let last = ok("b").follows(&["a", "not in the list"]);
        let rows = rows(&[last, bad("a")], true);
        assert_eq!(outcomes(&rows), [Outcome::Ok, Outcome::Failed]);
    }

    /// As many steps as there are places see each other, while those in the background wait for all of them.
    #[test]
    fn steps_in_the_background_take_no_place_and_are_few_at_once() {
        static FRONT: AtomicUsize = AtomicUsize::new(0);
        static BESIDE: AtomicUsize = AtomicUsize::new(0);
        let all = thread::available_parallelism().unwrap().get() + 1;
        let all_are_there = move || {
            let deadline = Instant::now() + std::time::Duration::from_secs(20);
            while FRONT.load(Ordering::SeqCst) < all {
                if Instant::now() > deadline {
                    bail!("a step in the background has the place of another");
                }
                thread::sleep(std::time::Duration::from_millis(5));
            }
            Ok(Report::default())
        };
        let beside = |name| {
            let work = move |_: &Context, _: &mut Task| {
                if BESIDE.fetch_add(1, Ordering::SeqCst) >= IN_BACKGROUND {
                    bail!("more than {IN_BACKGROUND} are in the background at once");
                }
                let report = all_are_there();
                BESIDE.fetch_sub(1, Ordering::SeqCst);
                report
            };
            Step::new(name, work).in_background()
        };
        // Each its own name: two of one name wait for each other's log.
        let front = |number| {
            Step::new(format!("front{number}").leak(), move |_, _| {
                FRONT.fetch_add(1, Ordering::SeqCst);
                all_are_there()
            })
        };
        let mut steps: Vec<_> = ["one", "two", "three", "four"].map(beside).into();
        steps.extend((0..all).map(front));
        for row in rows(&steps, true) {
            assert_eq!(row.outcome, Outcome::Ok, "{}", row.detail);
        }
    }

    #[test]
    fn failed_tests_make_a_failed_step() {
        let counts = Counts {
            passed: 3,
            failed: 1,
            skipped: 0,
        };
        let step = Step::new("tests", move |_, _| {
            Ok(Report {
                counts,
                ..Report::default()
            })
        });
        assert_eq!(outcomes(&rows(&[step], true)), [Outcome::Failed]);
    }

    #[test]
    fn only_brings_prerequisites_and_knows_no_other_names() {
        let list = || vec![ok("a"), ok("b").after(&["a"]), ok("c")];
        let names: Vec<_> = choose(list(), &["b".into()])
            .unwrap()
            .iter()
            .map(|step| step.name)
            .collect();
        assert_eq!(names, ["a", "b"]);
        assert!(format!("{}", choose(list(), &["x".into()]).err().unwrap()).contains("a, b, c"));
    }

    #[test]
    fn times_of_parts_are_kept_when_a_step_fails() {
        let step = Step::new("cases", |_, task| {
            task.part(timings::Part {
                name: "boot".into(),
                result: "ok".into(),
                seconds: 1.0,
            });
            bail!("broken")
        });
        let rows = rows(&[step], true);
        assert_eq!((rows[0].outcome, rows[0].measured.parts.len()), (Outcome::Failed, 1));
    }

    #[test]
    fn no_test_executed_is_a_failure() {
        let board = Board::silent(0);
        let options = Options {
            counts: true,
            ..Options::default()
        };
        assert_eq!(finish(&[], &options, &board, &Stop::default(), 0.0).unwrap(), 1);
    }
}
