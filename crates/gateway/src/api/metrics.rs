//! Endpoints of the tag `metrics`: what sandboxes use now, as the host counts it. No guest is asked, as that would wake it. There is no
//! history yet: a sandbox has one sample, or none if it does not run.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use node_api::list::ListConfig;
use node_api::{Sample, Sandbox};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::{Id, Query, sandbox_id};
use super::failures::Failures;
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
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
    /// Per cent of all of them, since somebody last asked.
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

fn metric(gateway: &Gateway, sandbox: &Sandbox, sample: &Sample, now: u64) -> Metric {
    let resources = &sandbox.config.resources;
    let started = sandbox.started_ns.unwrap_or(sandbox.created_ns);
    let seen = (now, sample.usage.cpu_usec);
    Metric {
        timestamp: time_text::text(now),
        timestamp_unix: now / 1_000_000_000,
        cpu_count: resources.cpus,
        cpu_used_pct: gateway.meter.percent(&sandbox.id, resources.cpus, started, seen),
        mem_used: sample.usage.memory,
        mem_total: resources.memory.bytes(),
        mem_cache: 0,
        disk_used: sample.usage.disk,
        disk_total: resources.disk.map_or(0, |disk| disk.bytes()),
    }
}

/// What a sandbox uses.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/metrics", tag = "metrics", params(("sandboxID" = String, Path), SpanQuery),
    responses((status = 200, body = [Metric]), Failures))]
pub(crate) async fn one(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Query(span): Query<SpanQuery>,
) -> Result<Json<Vec<Metric>>, Error> {
    if span.start.zip(span.end).is_some_and(|(start, end)| start > end) {
        return Err(Error::invalid("`start` is after `end`"));
    }
    let sandbox = gateway.sandbox(&principal, &id).await?;
    let now = time_text::now_ns();
    let seconds = now / 1_000_000_000;
    let is_outside = span.start.is_some_and(|start| seconds < start) || span.end.is_some_and(|end| seconds > end);
    if is_paused(sandbox.state) || is_outside {
        return Ok(Json(Vec::new()));
    }
    let samples = gateway.nodes.stats(&principal.owner(), Some(id)).await?;
    let shown = samples.iter().map(|sample| metric(&gateway, &sandbox, sample, now));
    Ok(Json(shown.collect()))
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
    its.retain(|sandbox| ids.contains(&sandbox.id.as_str()) && !is_for_build(sandbox));
    let now = time_text::now_ns();
    let samples = match its.is_empty() {
        true => Vec::new(),
        false => gateway.nodes.stats(&owner, None).await?,
    };
    let sample = |sandbox: &Sandbox| samples.iter().find(|sample| sample.id == sandbox.id);
    let shown = its
        .iter()
        .filter_map(|sandbox| Some((sandbox.id.clone(), metric(&gateway, sandbox, sample(sandbox)?, now))));
    Ok(Json(Metrics {
        sandboxes: shown.collect(),
    }))
}
