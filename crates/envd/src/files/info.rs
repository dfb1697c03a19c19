//! `GET /metrics` and `GET /envs`: what a sandbox uses, as far as its agent knows, and the environment of its processes. Knows no file.

use std::collections::BTreeMap;

use agent_api::message::{Reply, Request};
use agent_api::{AgentInfo, OsText};
use axum::body::Body;
use http::header::CACHE_CONTROL;
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

use crate::agent::unexpected;
use crate::error::Error;
use crate::sandbox::json;
use crate::state::State;

/// The names are envd's. Of its figures the processors' use is missing: the agent does not measure it, and whoever runs the sandbox does.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Metrics {
    ts: i64,
    cpu_count: u32,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_total: u64,
    disk_used: u64,
}

impl Metrics {
    fn new(info: &AgentInfo, ts: i64) -> Self {
        let bytes = |kib: u64| kib.saturating_mul(1024);
        let used = info.mem_total_kib.saturating_sub(info.mem_available_kib);
        Self {
            ts,
            cpu_count: info.cpus,
            mem_total: bytes(info.mem_total_kib),
            mem_used: bytes(used),
            mem_cache: bytes(info.mem_cached_kib),
            mem_total_mib: info.mem_total_kib / 1024,
            mem_used_mib: used / 1024,
            disk_total: info.disk_total_bytes,
            disk_used: info.disk_used_bytes,
        }
    }
}

/// Answers `/metrics`.
pub(super) async fn metrics(state: &State) -> Result<Response<Body>, Error> {
    let (mut channel, _) = state.open().await?;
    match channel.ask(&Request::Hello).await? {
        Reply::Hello(info) => Ok(json(StatusCode::OK, &Metrics::new(&info, super::now()))),
        other => Err(unexpected(&other)),
    }
}

/// Answers `/envs`.
pub(super) async fn variables(state: &State) -> Result<Response<Body>, Error> {
    let (_, command) = state.open().await?;
    let mut response = json(StatusCode::OK, &named(&command.env));
    response
        .headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn named(env: &[OsText]) -> BTreeMap<String, String> {
    let pairs = env.iter().map(ToString::to_string);
    let pairs = pairs.filter_map(|pair| {
        pair.split_once('=')
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_what_the_agent_says() {
        let info = AgentInfo {
            mem_total_kib: 4096,
            mem_available_kib: 3072,
            mem_cached_kib: 512,
            cpus: 2,
            disk_total_bytes: 100,
            disk_used_bytes: 40,
            ..AgentInfo::default()
        };
        let metrics = serde_json::to_string(&Metrics::new(&info, 7)).unwrap();
        assert_eq!(
            metrics,
            r#"{"ts":7,"cpu_count":2,"mem_total":4194304,"mem_used":1048576,"mem_cache":524288,"mem_total_mib":4,"mem_used_mib":1,"disk_total":100,"disk_used":40}"#
        );
        // An agent that makes no sense is no overflow.
        let odd = AgentInfo {
            mem_available_kib: u64::MAX,
            mem_cached_kib: u64::MAX,
            ..AgentInfo::default()
        };
        assert_eq!(Metrics::new(&odd, 0).mem_used, 0);
    }

    #[test]
    fn variables_have_names() {
        let env = ["A=b=c", "EMPTY=", "none"].map(OsText::from);
        let expected = [("A", "b=c"), ("EMPTY", "")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(named(&env), expected.into());
    }
}
