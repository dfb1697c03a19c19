//! Endpoint of the tag `trace`: what a sandbox's last start was made of. The node keeps that with the sandbox; here it becomes times since
//! the start's beginning, and a tree becomes a list with depths.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use observe::Span;
use serde::Serialize;
use utoipa::ToSchema;

use super::extract::Id;
use super::failures::Failures;
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;

/// The deepest that a part is shown; what is below is shown there.
const MAX_DEPTH: u32 = 8;

/// What a sandbox's last start was made of.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Trace {
    /// Parts, each behind the one that it is part of, in the order in which they began there. Empty when the node was started anew since.
    spans: Vec<TracePart>,
}

/// A part of a start.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TracePart {
    /// What was done.
    name: String,
    /// The program that did it.
    service: String,
    /// Microseconds from the start's beginning to the part's.
    start_us: u64,
    /// Microseconds that it took.
    duration_us: u64,
    /// How many parts it is part of.
    depth: u32,
}

/// What a sandbox's last start was made of.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/trace", tag = "trace", params(("sandboxID" = String, Path)),
    responses((status = 200, body = Trace), Failures))]
pub(crate) async fn trace(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
) -> Result<Json<Trace>, Error> {
    gateway.sandbox(&principal, &id).await?;
    let spans = gateway.nodes.trace(&principal.owner(), &id).await?;
    Ok(Json(Trace { spans: parts(&spans) }))
}

/// What others say of a start may be late or early, and their parts be part of anything: nothing is before its beginning, and each is there
/// once.
fn parts(spans: &[Span]) -> Vec<TracePart> {
    let zero = spans.last().map_or(0, |whole| whole.start_ns);
    let known: HashSet<_> = spans.iter().map(|span| span.id).collect();
    let mut by_parent: HashMap<Option<_>, Vec<&Span>> = HashMap::new();
    // The whole is the last one.
    for span in spans.iter().rev() {
        let parent = span.parent.filter(|parent| known.contains(parent));
        by_parent.entry(parent).or_default().push(span);
    }
    // What is to come next is at the end.
    for children in by_parent.values_mut() {
        children.sort_by_key(|span| span.start_ns.max(zero));
        children.reverse();
    }
    let mut parts = Vec::with_capacity(spans.len());
    let tops = by_parent.remove(&None).unwrap_or_default();
    let mut next: Vec<(&Span, u32)> = tops.into_iter().map(|span| (span, 0)).collect();
    while let Some((span, depth)) = next.pop() {
        parts.push(TracePart {
            name: span.name.clone(),
            service: span.service.clone(),
            start_us: span.start_ns.saturating_sub(zero) / 1000,
            duration_us: span.end_ns.saturating_sub(span.start_ns) / 1000,
            depth: depth.min(MAX_DEPTH),
        });
        let children = by_parent.remove(&Some(span.id)).unwrap_or_default();
        next.extend(children.into_iter().map(|child| (child, depth + 1)));
    }
    parts
}

#[cfg(test)]
mod tests {
    use observe::span::{Operation, past, record, span};

    use super::*;

    #[test]
    fn a_tree_is_a_list_with_depths() {
        let operation = Operation {
            service: "basaltd",
            name: "clone",
            parent: None,
            detailed: false,
            began_ns: Some(5_000_000),
        };
        let ((), spans) = record(operation, || {
            let _outer = span("disk");
            past("basalt-vmm", "copied", 6_000_000, 8_500_000);
            past("basalt-vmm", "too early", 1, 2);
        });
        let parts = parts(&spans);
        let told: Vec<(&str, u32)> = parts.iter().map(|part| (part.name.as_str(), part.depth)).collect();
        assert_eq!(told, [("clone", 0), ("disk", 1), ("too early", 2), ("copied", 2)]);
        assert_eq!((parts[3].start_us, parts[3].duration_us), (1000, 2500));
        assert_eq!(parts[2].start_us, 0);
        // One that is part of itself is part of nothing that is shown, and nothing hangs.
        let mut odd = spans;
        odd[0].parent = Some(odd[0].id);
        assert_eq!(super::parts(&odd).len(), 3);
        assert!(super::parts(&[]).is_empty());
    }
}
