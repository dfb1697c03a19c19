//! Runs steps: in parallel where they allow it, each with a log, with progress, and so that a run can be interrupted
//! and repeated.
//!
//! The runner knows steps only as names with prerequisites; what they do is in `steps`.
//!
//! ```text
//!             prerequisites met          run
//!   waiting ────────────────────▶ running ───▶ ok │ cached │ not needed │ failed │ stopped
//!      └── a prerequisite failed ─▶ blocked
//! ```

pub(crate) mod board;
pub(crate) mod interrupt;
mod schedule;
pub(crate) mod summary;
pub(crate) mod task;
pub(crate) mod timings;

use anyhow::Result;

use crate::context::Context;
pub(crate) use schedule::{Options, run_steps};
pub(crate) use summary::{Counts, Outcome};
pub(crate) use task::{Finished, Stopped, Task};
pub(crate) use timings::Part;

/// What a step reports when it went well.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    /// A few words after the time.
    pub(crate) detail: String,
    /// Lines that the person who ran this should see.
    pub(crate) show: Vec<String>,
    /// The tests that it ran.
    pub(crate) counts: Counts,
    /// Everything was there already.
    pub(crate) cached: bool,
    /// Lines that are said once more at the end of the run.
    pub(crate) remarks: Vec<String>,
}

/// Of a step whose result is how many tests passed.
impl From<Counts> for Report {
    fn from(counts: Counts) -> Self {
        Self {
            detail: counts.to_string(),
            counts,
            ..Self::default()
        }
    }
}

/// What to do with a step, asked right before it would run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Run it.
    Run,
    /// Its result exists.
    Done,
    /// It makes no sense here; with the reason.
    NotNeeded(String),
}

type PlanFn = Box<dyn Fn(&Context) -> Result<Plan> + Send + Sync>;
type WorkFn = Box<dyn Fn(&Context, &mut Task) -> Result<Report> + Send + Sync>;

/// One line of the step list.
pub(crate) struct Step {
    /// Its name on the board, in `--only` and of its log.
    pub(crate) name: &'static str,
    /// Names of the steps that must have gone well before.
    pub(crate) after: Vec<&'static str>,
    /// Names of steps that end before this begins, however they end and only if they are run at all: they would be in
    /// each other's way.
    pub(crate) follows: Vec<&'static str>,
    /// Whether it counts as a test by itself; steps that run tests report those instead.
    pub(crate) is_check: bool,
    /// Whether it takes what the others leave of the processors, at the lowest priority, and no place among them.
    pub(crate) in_background: bool,
    /// What to do when it failed.
    pub(crate) hint: &'static str,
    plan: PlanFn,
    work: WorkFn,
}

impl Step {
    /// A step that always runs, after nothing.
    pub(crate) fn new(
        name: &'static str,
        work: impl Fn(&Context, &mut Task) -> Result<Report> + Send + Sync + 'static,
    ) -> Self {
        let plan: PlanFn = Box::new(|_| Ok(Plan::Run));
        Self {
            name,
            after: Vec::new(),
            follows: Vec::new(),
            is_check: false,
            in_background: false,
            hint: "",
            plan,
            work: Box::new(work),
        }
    }

    /// Adds prerequisites.
    pub(crate) fn after(mut self, names: &[&'static str]) -> Self {
        self.after.extend(names);
        self
    }

    /// Adds steps to wait for.
    pub(crate) fn follows(mut self, names: &[&'static str]) -> Self {
        self.follows.extend(names);
        self
    }

    /// Adds the question whether to run at all.
    pub(crate) fn plan(mut self, plan: impl Fn(&Context) -> Result<Plan> + Send + Sync + 'static) -> Self {
        self.plan = Box::new(plan);
        self
    }

    /// Counts it as one test.
    pub(crate) fn check(mut self) -> Self {
        self.is_check = true;
        self
    }

    /// Has it run beside the others, with what they leave of the processors.
    pub(crate) fn in_background(mut self) -> Self {
        self.in_background = true;
        self
    }

    /// Says what to do when it fails.
    pub(crate) fn hint(mut self, hint: &'static str) -> Self {
        self.hint = hint;
        self
    }
}
