//! What this program's work is made of: recorded always, shown by `run --trace`, sent to a collector where the environment
//! names one. Knows the names of no daemon's parts.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_api::FIRST_OUTPUT;
use observe::span::{self, Operation, now_ns, record};
use observe::{Span, SpanId, TraceContext, marks};
use otlp::Exporter;
use serde::Serialize;

use crate::cli::Verb;
use crate::output::Output;

/// This program in a trace.
const SERVICE: &str = "basalt";

/// How the steps of the way into the lab begin.
pub(crate) const IN_LAB: &str = "lab: ";

/// The part of a command's time that ends with its first output.
const TO_FIRST_OUTPUT: &str = "to the first output";

/// How long the end of this program may wait for the collector.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Characters of the bar that shows when something was.
const BAR: usize = 30;

/// What becomes of the spans of one verb.
pub(crate) struct Tracing<'o> {
    operation: Operation,
    exporter: Option<Exporter>,
    /// They are shown when it is done.
    show: bool,
    output: &'o Output,
}

impl<'o> Tracing<'o> {
    /// Looks at the flags and the environment. This program began at `began_ns`.
    pub(crate) fn of(verb: &Verb, began_ns: u64, output: &'o Output) -> Self {
        let show = matches!(verb, Verb::Run(args) if args.trace);
        let exporter = Exporter::from_environment(env!("CARGO_PKG_VERSION")).unwrap_or_else(|error| {
            log::error!("no spans are sent: {error}");
            None
        });
        Self {
            operation: Operation {
                service: SERVICE,
                name: verb.span_name(),
                parent: TraceContext::from_environment(),
                detailed: show,
                began_ns: Some(began_ns),
            },
            exporter,
            show,
            output,
        }
    }

    /// Does the work.
    pub(crate) fn follow(self, work: impl FnOnce() -> anyhow::Result<u8>) -> anyhow::Result<u8> {
        let (outcome, spans) = record(self.operation, || {
            let outcome = work();
            if let Err(error) = &outcome {
                span::failed(error);
            }
            outcome
        });
        // Where nobody took part nothing was made. Of the way into the lab this program tells, and of what was made there the
        // lab's own `basalt`.
        if self.show
            && spans
                .iter()
                .any(|span| span.service != SERVICE || span.name.starts_with(IN_LAB))
            && let Some(report) = Report::of(&spans)
        {
            self.output.aside(&report, || report.text());
        }
        if let Some(exporter) = self.exporter {
            // The daemon sends its own.
            exporter.export(spans.into_iter().filter(|span| span.service == SERVICE).collect());
            if !exporter.flush(FLUSH_LIMIT) {
                log::info!("the collector took longer than {FLUSH_LIMIT:?}");
            }
        }
        outcome
    }
}

/// A command that was started at `started_ns` has ended.
pub(crate) fn output(started_ns: u64) {
    let now = now_ns();
    let first = marks::all().into_iter().find(|mark| mark.name == FIRST_OUTPUT);
    match first.filter(|mark| mark.at_ns >= started_ns) {
        Some(first) => {
            span::past(SERVICE, TO_FIRST_OUTPUT, started_ns, first.at_ns);
            span::past(SERVICE, "command, from there on", first.at_ns, now);
        }
        None => span::past(SERVICE, "command, without output", started_ns, now),
    }
}

/// Where the time of a creation went.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    /// From this program's first instruction to the command's first output, or to its end where there was none.
    total_ms: f64,
    /// The part of it that lies in no phase that has no parts.
    unexplained_ms: f64,
    /// Each before its parts. What `own_ms` they have adds up to the whole.
    phases: Vec<Phase>,
}

/// A span in the window.
#[derive(Debug, Serialize)]
struct Phase {
    service: String,
    name: String,
    depth: usize,
    start_ms: f64,
    duration_ms: f64,
    /// While nothing more particular was going on: each moment belongs to the deepest phase, and of several to the one
    /// that began last.
    own_ms: f64,
    #[serde(skip)]
    has_parts: bool,
}

#[allow(clippy::cast_precision_loss, reason = "nanoseconds of one run are far below 2^53")]
fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

/// A span on its way to a phase.
struct Placed<'s> {
    span: &'s Span,
    depth: usize,
    has_parts: bool,
    start: u64,
    end: u64,
    own: u64,
}

impl Report {
    fn of(spans: &[Span]) -> Option<Self> {
        let root = spans.last()?;
        let first = spans.iter().find(|span| span.name == TO_FIRST_OUTPUT);
        let end = first.map_or(root.end_ns, |span| span.end_ns);
        let mut placed = Vec::new();
        place(spans, root, 0, (root.start_ns, end), &mut placed);
        share(&mut placed);
        let unexplained = placed.iter().filter(|one| one.has_parts).map(|one| one.own).sum();
        let phase = |one: &Placed<'_>| Phase {
            service: one.span.service.clone(),
            name: one.span.name.clone(),
            depth: one.depth,
            start_ms: milliseconds(one.start - root.start_ns),
            duration_ms: milliseconds(one.end - one.start),
            own_ms: milliseconds(one.own),
            has_parts: one.has_parts,
        };
        Some(Self {
            trace: root.trace.to_string(),
            total_ms: milliseconds(end.saturating_sub(root.start_ns)),
            unexplained_ms: milliseconds(unexplained),
            phases: placed.iter().map(phase).collect(),
        })
    }

    fn text(&self) -> String {
        let mut text = format!("basalt: where the {:.1} ms of this start went\n", self.total_ms);
        text.push_str("   start ms    own ms\n");
        for phase in &self.phases {
            let name = format!(
                "{:indent$}{}: {}",
                "",
                phase.service,
                phase.name,
                indent = 2 * phase.depth
            );
            let rest = if phase.has_parts && phase.own_ms > 0.0 {
                " (between its parts)"
            } else {
                ""
            };
            text.push_str(&format!(
                "{:>11.1}{:>10.1}  {}  {name}{rest}\n",
                phase.start_ms,
                phase.own_ms,
                self.bar(phase)
            ));
        }
        let share = 100.0 * self.unexplained_ms / self.total_ms.max(f64::MIN_POSITIVE);
        text.push_str(&format!(
            "{:>21.1}  in all; {:.1} ms ({share:.1} %) of it between parts, explained by none\n",
            self.total_ms, self.unexplained_ms
        ));
        text
    }

    /// When it was, as a part of the whole.
    fn bar(&self, phase: &Phase) -> String {
        let scale = |value: f64| {
            let cells = value / self.total_ms.max(f64::MIN_POSITIVE) * 30.0;
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a number of cells from 0 to 30"
            )]
            let cells = cells.clamp(0.0, 30.0) as usize;
            cells
        };
        let start = scale(phase.start_ms).min(BAR - 1);
        let length = scale(phase.duration_ms).max(1).min(BAR - start);
        format!(
            "{}{}{}",
            " ".repeat(start),
            "#".repeat(length),
            " ".repeat(BAR - start - length)
        )
    }
}

/// Puts a span and all below it into the window, each before its parts and these in the order of their beginnings.
fn place<'s>(spans: &'s [Span], span: &'s Span, depth: usize, window: (u64, u64), placed: &mut Vec<Placed<'s>>) {
    let (start, end) = (
        span.start_ns.clamp(window.0, window.1),
        span.end_ns.clamp(window.0, window.1),
    );
    // What was over before, or began after, took none of this time.
    if span.end_ns < window.0 || span.start_ns >= window.1 {
        return;
    }
    let at = placed.len();
    placed.push(Placed {
        span,
        depth,
        has_parts: false,
        start,
        end: end.max(start),
        own: 0,
    });
    let mut parts: Vec<&Span> = spans.iter().filter(|part| part.parent == Some(span.id)).collect();
    parts.sort_by_key(|part| part.start_ns);
    for part in parts {
        place(spans, part, depth + 1, window, placed);
    }
    let has_parts = placed.len() > at + 1;
    if let Some(one) = placed.get_mut(at) {
        one.has_parts = has_parts;
    }
}

/// Gives each moment to one span: the deepest, and of several the one that began last.
fn share(placed: &mut [Placed<'_>]) {
    let mut moments: Vec<u64> = placed.iter().flat_map(|one| [one.start, one.end]).collect();
    moments.sort_unstable();
    moments.dedup();
    let mut owned: BTreeMap<SpanId, u64> = BTreeMap::new();
    for (from, to) in moments.iter().zip(moments.iter().skip(1)) {
        let here = placed.iter().filter(|one| one.start <= *from && *to <= one.end);
        if let Some(owner) = here.max_by_key(|one| (one.depth, one.start)) {
            *owned.entry(owner.span.id).or_default() += to - from;
        }
    }
    for one in placed {
        one.own = owned.get(&one.span.id).copied().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A span by name, with its parent's name and its times.
    fn spans(all: &[(&str, &str, u64, u64)]) -> Vec<Span> {
        let id = |name: &str| {
            let place = all.iter().position(|one| one.0 == name)?;
            SpanId::new(u64::try_from(place).unwrap() + 1)
        };
        let span = |&(name, parent, start, end): &(&str, &str, u64, u64)| Span {
            trace: "4bf92f3577b34da6a3ce929d0e0e4736".parse().unwrap(),
            id: id(name).unwrap(),
            parent: id(parent),
            name: name.to_owned(),
            service: "test".to_owned(),
            start_ns: start * 1_000_000,
            end_ns: end * 1_000_000,
            attributes: Vec::new(),
            error: None,
        };
        all.iter().map(span).collect()
    }

    fn own(report: &Report) -> Vec<(&str, usize, f64)> {
        report
            .phases
            .iter()
            .map(|phase| (phase.name.as_str(), phase.depth, phase.own_ms))
            .collect()
    }

    #[test]
    fn every_moment_belongs_to_one_phase_and_gaps_are_shown() {
        let report = Report::of(&spans(&[
            ("boot", "daemon", 30, 70),
            ("kernel", "daemon", 40, 65),
            ("early", "daemon", 5, 15),
            ("daemon", "all", 10, 80),
            (TO_FIRST_OUTPUT, "all", 80, 100),
            ("command, from there on", "all", 100, 500),
            ("all", "", 0, 500),
        ]))
        .unwrap();
        let expected = [
            ("all", 0, 5.0),
            // Clocks of two programs: a part may begin before the whole.
            ("daemon", 1, 25.0),
            ("early", 2, 10.0),
            ("boot", 2, 15.0),
            ("kernel", 2, 25.0),
            (TO_FIRST_OUTPUT, 1, 20.0),
        ];
        assert_eq!(own(&report), expected);
        assert_eq!((report.total_ms, report.unexplained_ms), (100.0, 30.0));
        let sum: f64 = report.phases.iter().map(|phase| phase.own_ms).sum();
        assert!((sum - report.total_ms).abs() < 1e-9);
        let text = report.text();
        assert!(text.contains("30.0 ms (30.0 %) of it between parts"), "{text}");
        assert!(text.contains("test: daemon (between its parts)\n"), "{text}");
    }

    #[test]
    fn without_output_the_end_is_the_end() {
        let report = Report::of(&spans(&[("part", "all", 2, 4), ("all", "", 0, 10)])).unwrap();
        assert_eq!(own(&report), [("all", 0, 8.0), ("part", 1, 2.0)]);
        assert!(Report::of(&[]).is_none());
    }
}
