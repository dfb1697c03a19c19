//! Endpoints of the tag `metrics`: what sandboxes use and have used, as the host counts it. No guest is asked, as that would wake it. What
//! is not in the history yet is asked of the node.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use node_api::list::ListConfig;
use node_api::{Sandbox, Used};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::{Id, Query, sandbox_id};
use super::failures::Failures;
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::history::Point;
use crate::launch::{is_for_build, is_paused};
use crate::time_text;

/// The most sandboxes that are asked for at once.
const MOST: usize = 100;

/// What a sandbox uses.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metric {
    /// When that was.
    #[schema(format = DateTime)]
    timestamp: String,
    /// The same in seconds since 1970.
    timestamp_unix: u64,
    /// Virtual CPUs.
    cpu_count: u32,
    /// Per cent of all of them, since the point before.
    cpu_used_pct: f64,
    /// Bytes of the host's memory that its machine has.
    mem_used: u64,
    /// Bytes of its memory.
    mem_total: u64,
    /// Not known on the host: 0.
    mem_cache: u64,
    /// Bytes that its disk takes on the host.
    disk_used: u64,
    /// Bytes of its disk.
    disk_total: u64,
}

/// What several use, by their ids.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Metrics {
    /// Those that run.
    sandboxes: BTreeMap<String, Metric>,
}

/// Which sandboxes.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct MetricsQuery {
    /// Their ids, with commas between them.
    sandbox_ids: String,
}

/// From when to when.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct SpanQuery {
    /// Seconds since 1970.
    start: Option<u64>,
    /// Seconds since 1970.
    end: Option<u64>,
}

fn metric(sandbox: &Sandbox, point: Point) -> Metric {
    let resources = &sandbox.config.resources;
    let all = 1000 * resources.cpus.max(1);
    let at = u64::from(point.at);
    Metric {
        timestamp: time_text::text(at * 1_000_000_000),
        timestamp_unix: at,
        cpu_count: resources.cpus,
        cpu_used_pct: (100.0 * f64::from(point.cpu) / f64::from(all)).min(100.0),
        mem_used: point.memory(),
        mem_total: resources.memory.bytes(),
        mem_cache: 0,
        disk_used: point.disk(),
        disk_total: resources.disk.map_or(0, |disk| disk.bytes()),
    }
}

/// What a sandbox uses and has used, the oldest first: every five seconds of the last hour, and every minute of the last day.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/metrics", tag = "metrics", params(("sandboxID" = String, Path), SpanQuery),
    responses((status = 200, body = [Metric]), Failures))]
pub(crate) async fn one(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Query(span): Query<SpanQuery>,
) -> Result<Json<Vec<Metric>>, Error> {
    let (start, end) = (span.start.unwrap_or(0), span.end.unwrap_or(u64::MAX));
    if start > end {
        return Err(Error::invalid("`start` is after `end`"));
    }
    let sandbox = gateway.sandbox(&principal, &id).await?;
    let mut points = gateway.history.between(&id, start, end);
    let now = time_text::now_ns();
    let is_asked = (start..=end).contains(&(now / 1_000_000_000));
    if is_asked && !is_paused(sandbox.state) && gateway.history.newest(&id, now).is_none() {
        let samples = gateway.nodes.stats(&principal.owner(), id).await?;
        points.extend(samples.iter().map(|sample| {
            let used = Used {
                started_ns: sandbox.started_ns.unwrap_or(sandbox.created_ns),
                cpu_usec: sample.usage.cpu_usec,
                memory: sample.usage.memory,
                disk: sample.usage.disk,
            };
            Point::since_start(now, &used)
        }));
    }
    Ok(Json(points.into_iter().map(|point| metric(&sandbox, point)).collect()))
}

/// What several sandboxes use.
#[utoipa::path(get, path = "/sandboxes/metrics", tag = "metrics", params(MetricsQuery), responses((status = 200, body = Metrics), Failures))]
pub(crate) async fn several(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Query(query): Query<MetricsQuery>,
) -> Result<Json<Metrics>, Error> {
    let ids: Vec<&str> = query.sandbox_ids.split(',').filter_map(sandbox_id).collect();
    if ids.is_empty() || ids.len() > MOST {
        return Err(Error::invalid(format!(
            "`sandbox_ids` has {} ids of sandboxes: give 1 to {MOST}",
            ids.len()
        )));
    }
    let owner = principal.owner();
    let mut its = gateway.nodes.list(&owner, ListConfig::default()).await?;
    its.retain(|sandbox| ids.contains(&sandbox.id.as_str()) && !is_for_build(sandbox) && !is_paused(sandbox.state));
    let now = time_text::now_ns();
    let mut newest: HashMap<&str, Point> = HashMap::new();
    let kept = its
        .iter()
        .map(|one| (one.id.as_str(), gateway.history.newest(&one.id, now)));
    newest.extend(kept.filter_map(|(id, point)| Some((id, point?))));
    if newest.len() < its.len() {
        for asked in gateway.nodes.usage(&owner).await? {
            let its = its.iter().find(|one| one.id == asked.id);
            if let Some((one, used)) = its.zip(asked.used) {
                newest.entry(&one.id).or_insert_with(|| Point::since_start(now, &used));
            }
        }
    }
    let shown = its
        .iter()
        .filter_map(|one| Some((one.id.clone(), metric(one, *newest.get(one.id.as_str())?))));
    Ok(Json(Metrics {
        sandboxes: shown.collect(),
    }))
}
