//! What a clone, and a rollback, are made of: the spans of the daemon, the VMM and the agent, one below the other, by when each begins
//! after the request and how long it takes. Recording them costs some time of its own: `clone` measures without.

use anyhow::{Context, Result};
use node_api::{Client, Request, RollbackConfig};
use observe::Span;
use observe::span::{Operation, record};

use crate::clone::{clone_of, remove};
use crate::figures::Bench;
use crate::kept::{KEPT, keep};
use crate::report::Figure;
use crate::run::Node;

const FROM: &str = "begins at";
const TAKES: &str = "takes";
/// What no span tells of.
const REST: &str = "(the rest)";

const CLONE: &str = Node::CLONE;

/// A part of a request, in its place: its name with those of what it is part of, and when it was.
#[derive(Debug, PartialEq)]
struct Part {
    path: String,
    from_ms: f64,
    takes_ms: f64,
}

/// All parts of a request, each behind what it is part of, in the order in which they began.
fn parts(spans: &[Span]) -> Vec<Part> {
    let Some(root) = spans.last() else { return Vec::new() };
    let mut all = Vec::new();
    add(spans, root, "", root.start_ns, &mut all);
    all
}

fn add(spans: &[Span], span: &Span, above: &str, zero_ns: u64, all: &mut Vec<Part>) {
    let path = match above {
        "" => span.name.clone(),
        above => format!("{above} > {}", span.name),
    };
    let takes_ns = span.end_ns.saturating_sub(span.start_ns);
    all.push(Part {
        path: path.clone(),
        from_ms: ms(span.start_ns.saturating_sub(zero_ns)),
        takes_ms: ms(takes_ns),
    });
    let mut below: Vec<&Span> = spans.iter().filter(|part| part.parent == Some(span.id)).collect();
    below.sort_by_key(|part| part.start_ns);
    // Parts may be beside one another.
    let (mut covered_ns, mut until_ns) = (0, span.start_ns);
    for part in &below {
        covered_ns += part.end_ns.saturating_sub(part.start_ns.max(until_ns));
        until_ns = until_ns.max(part.end_ns);
        add(spans, part, &path, zero_ns, all);
    }
    if !below.is_empty() {
        all.push(Part {
            path: format!("{path} > {REST}"),
            from_ms: ms(until_ns.saturating_sub(zero_ns)),
            takes_ms: ms(takes_ns.saturating_sub(covered_ns)),
        });
    }
}

fn ms(ns: u64) -> f64 {
    std::time::Duration::from_nanos(ns).as_secs_f64() * 1000.0
}

/// A figure of what something is made of.
pub(crate) fn figure_of(what: &str) -> Figure {
    Figure::beside(&format!("What {what} is made of"), "ms", [FROM, TAKES])
}

/// Puts the parts of one request there.
pub(crate) fn put(figure: &mut Figure, spans: &[Span]) {
    for part in parts(spans) {
        figure.put(&part.path, FROM, part.from_ms);
        figure.put(&part.path, TAKES, part.takes_ms);
    }
}

/// The spans of one request.
pub(crate) fn recorded(client: &mut Client, name: &'static str, request: Request) -> Result<Vec<Span>> {
    let operation = Operation {
        service: "basalt-bench",
        name,
        parent: None,
        detailed: true,
        began_ns: None,
    };
    let (answer, spans) = record(operation, || client.ask(request));
    answer?;
    Ok(spans)
}

impl Bench<'_> {
    /// Prints them.
    pub(crate) fn waterfall(&mut self) -> Result<()> {
        const TEMPLATE: &str = "a clone of a template";
        const SNAPSHOT: &str = "a clone of a snapshot";
        const ROLLBACK: &str = "a rollback in place";
        let node = Node::new(self.world)?;
        node.originate()?;
        let mut client = Client::connect(&node.socket())?;
        keep(&mut client, Node::ORIGIN)?;
        let mut figures: Vec<Figure> = [TEMPLATE, SNAPSHOT, ROLLBACK].map(figure_of).into();
        for _ in 0..self.runs {
            let spans = self.again("waterfall", TEMPLATE, || {
                // What an attempt that failed has left; usually there is none.
                drop(remove(&mut client, CLONE));
                let run = Request::Run(Box::new(node.config(CLONE, false)?));
                let template = recorded(&mut client, TEMPLATE, run)?;
                remove(&mut client, CLONE)?;
                let snapshot = recorded(&mut client, SNAPSHOT, clone_of(KEPT, CLONE))?;
                remove(&mut client, CLONE)?;
                let back = Request::Rollback(RollbackConfig {
                    sandbox: Node::ORIGIN.into(),
                    snapshot: KEPT.into(),
                    ..RollbackConfig::default()
                });
                Ok([template, snapshot, recorded(&mut client, ROLLBACK, back)?])
            })?;
            for (figure, spans) in figures.iter_mut().zip(&spans) {
                put(figure, spans);
            }
        }
        let first = figures.first().context("no figure")?;
        anyhow::ensure!(first.series.len() > 2, "the daemon told nothing of what it did");
        self.report.figures.extend(figures);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use observe::{SpanId, TraceId};

    use super::*;

    fn span(id: u64, parent: u64, name: &str, (start, end): (u64, u64)) -> Span {
        Span {
            trace: TraceId::new(1).unwrap(),
            id: SpanId::new(id).unwrap(),
            parent: SpanId::new(parent),
            name: name.to_owned(),
            service: "test".to_owned(),
            start_ns: start * 1_000_000,
            end_ns: end * 1_000_000,
            attributes: Vec::new(),
            error: None,
        }
    }

    #[test]
    fn parts_stand_in_their_place_and_the_rest_is_what_none_covers() {
        let all = [
            span(3, 2, "VM", (112, 118)),
            span(4, 1, "beside", (115, 125)),
            span(2, 1, "restore", (110, 120)),
            span(1, 0, "clone", (100, 130)),
        ];
        let told: Vec<_> = parts(&all)
            .into_iter()
            .map(|part| (part.path, part.from_ms, part.takes_ms))
            .collect();
        let wanted = [
            ("clone", 0.0, 30.0),
            ("clone > restore", 10.0, 10.0),
            ("clone > restore > VM", 12.0, 6.0),
            ("clone > restore > (the rest)", 18.0, 4.0),
            ("clone > beside", 15.0, 10.0),
            ("clone > (the rest)", 25.0, 15.0),
        ];
        assert_eq!(told, wanted.map(|(path, from, takes)| (path.to_owned(), from, takes)));
        assert!(parts(&[]).is_empty());
    }
}
