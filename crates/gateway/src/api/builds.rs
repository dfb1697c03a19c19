//! Endpoints of the tag `templates` by which a tenant builds one: asked for, started, looked at.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State as Shared};
use axum::response::{IntoResponse, Response};
use control::{Build, BuildState, LogLevel, LogLine, Settings, Template};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Object;
use super::extract::{Body, Query};
use super::failures::Failures;
use super::logs::{Choice, Direction, Level, choose};
use crate::Error;
use crate::auth::Principal;
use crate::builds::{Plan, StartBuild, wanted};
use crate::gateway::Gateway;
use crate::{time_text, uuid};

/// The most lines of an answer.
const MOST_LINES: usize = 100;

/// The most lines that are told with why a build has failed.
const LAST_LINES: usize = 20;

/// How large a machine may be.
const CPUS: std::ops::RangeInclusive<u32> = 1..=64;
const MEMORY: std::ops::RangeInclusive<u64> = 64..=1 << 20;

/// A build that is asked for.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default)]
#[schema(as = TemplateBuildRequestV3)]
pub(crate) struct NewBuild {
    /// What the template is called; a tag may follow after a colon.
    name: Option<String>,
    /// The same; older clients write it here.
    alias: Option<String>,
    /// More tags.
    tags: Option<Vec<String>>,
    /// Virtual CPUs.
    cpu_count: Option<u32>,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
}

/// A build that waits for what is to be done.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateRequestResponseV3)]
pub(crate) struct Requested {
    /// The template's id.
    #[serde(rename = "templateID")]
    template_id: String,
    /// The build's.
    #[serde(rename = "buildID")]
    build_id: String,
    /// Nobody else can use it.
    public: bool,
    /// What it is called.
    names: Vec<String>,
    /// The tags that it is to have.
    tags: Vec<String>,
    /// What it is called.
    aliases: Vec<String>,
}

/// A line of a build's log.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct BuildLogEntry {
    /// When it was written.
    #[schema(format = DateTime)]
    timestamp: String,
    /// The line.
    message: String,
    /// How important it is.
    level: Level,
    /// Of which step: its number from 1 on, `base` or `finalize`.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
}

/// Why a build has failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct BuildStatusReason {
    /// A sentence, with what the step has said last.
    message: String,
    /// Which step.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
    /// The last lines of that step.
    log_entries: Vec<BuildLogEntry>,
}

/// How far a build is.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateBuildInfo)]
pub(crate) struct BuildInfo {
    /// The template's id.
    #[serde(rename = "templateID")]
    template_id: String,
    /// The build's.
    #[serde(rename = "buildID")]
    build_id: String,
    /// `waiting`, `building`, `ready` or `error`.
    status: &'static str,
    /// Always empty.
    logs: Vec<String>,
    /// Its log from `logsOffset` on.
    log_entries: Vec<BuildLogEntry>,
    /// Why it has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<BuildStatusReason>,
}

/// A part of a log.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = TemplateBuildLogsResponse)]
pub(crate) struct BuildLogs {
    /// The lines.
    logs: Vec<BuildLogEntry>,
}

/// Which lines.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub(crate) struct StatusQuery {
    /// So many lines have been told before.
    logs_offset: usize,
    /// How many, 100 at most.
    limit: Option<usize>,
    /// Only those of this importance or more.
    #[param(inline)]
    level: Option<Level>,
}

/// Which lines.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct BuildLogsQuery {
    /// From this moment on in the direction, in milliseconds since 1970.
    cursor: Option<u64>,
    /// How many, 100 at most.
    limit: Option<usize>,
    /// From the oldest on, or from the newest.
    #[param(inline)]
    direction: Direction,
    /// Only those of this importance or more.
    #[param(inline)]
    level: Option<Level>,
}

fn level(of: LogLevel) -> Level {
    match of {
        LogLevel::Debug => Level::Debug,
        LogLevel::Info => Level::Info,
        LogLevel::Warn => Level::Warn,
        LogLevel::Error => Level::Error,
    }
}

impl From<LogLine> for BuildLogEntry {
    fn from(line: LogLine) -> Self {
        Self {
            timestamp: time_text::text(line.time_ns),
            message: line.message,
            level: level(line.level),
            step: line.step,
        }
    }
}

/// A state as clients know it.
pub(super) fn status_word(state: BuildState) -> &'static str {
    match state {
        BuildState::Waiting => "waiting",
        BuildState::Building => "building",
        BuildState::Ready => "ready",
        BuildState::Failed => "error",
    }
}

/// Ask for a build of a template, which is new or has this name.
#[utoipa::path(post, path = "/v3/templates", tag = "templates", request_body = NewBuild,
    responses((status = 202, body = Requested), Failures))]
pub(crate) async fn request(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Body(asked): Body<NewBuild>,
) -> Result<Response, Error> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let text = given(&asked.name).or_else(|| given(&asked.alias));
    let text = text.ok_or_else(|| Error::invalid("`name` is missing: what the template is to be called"))?;
    let (name, tags) = wanted(&text, &asked.tags.unwrap_or_default())?;
    if asked.cpu_count.is_some_and(|count| !CPUS.contains(&count)) {
        return Err(Error::invalid("`cpuCount` is 1 to 64"));
    }
    if asked.memory_mb.is_some_and(|memory| !MEMORY.contains(&memory)) {
        return Err(Error::invalid("`memoryMB` is 64 to 1048576"));
    }
    let (tenant, now) = (principal.tenant.to_string(), time_text::now_ns());
    let template = Template {
        id: control::random_hex::<10>()?,
        tenant: tenant.clone(),
        name,
        created_ns: now,
    };
    let build = Build {
        id: uuid::random()?,
        template: template.id.clone(),
        tenant,
        state: BuildState::Waiting,
        created_ns: now,
        finished_ns: None,
        cpus: asked.cpu_count,
        memory_mib: asked.memory_mb,
        disk_mib: None,
        wanted: tags.clone(),
        kept: false,
        settings: Settings::default(),
        failure: None,
    };
    let build_id = build.id.clone();
    let template = gateway
        .store
        .with(move |store| {
            // What the name stands for already stays what it is.
            let all = store.aliases(&template.tenant)?;
            match all.iter().any(|alias| alias.name == template.name) {
                true => Ok(None),
                false => store.add_build(&template, &build).map(Some),
            }
        })
        .await?;
    let template = template.ok_or_else(|| {
        Error::Conflict(format!(
            "`{text}` is the name of a snapshot: give the template another one, or delete the snapshot"
        ))
    })?;
    let requested = Requested {
        template_id: template.id.clone(),
        build_id,
        public: false,
        names: vec![template.name.clone()],
        tags,
        aliases: vec![template.name],
    };
    let mut response = (StatusCode::ACCEPTED, Json(requested)).into_response();
    response.extensions_mut().insert(Object(template.id));
    Ok(response)
}

/// A tenant's build of its template.
async fn find(
    gateway: &Gateway,
    principal: &Principal,
    template: &str,
    build: &str,
) -> Result<(Template, Build), Error> {
    let found = gateway.need_template(&principal.tenant, template).await?;
    let (tenant, id) = (principal.tenant.to_string(), build.to_owned());
    let its = gateway.store.with(move |store| store.build(&tenant, &id)).await?;
    match its.filter(|one| one.template == found.id) {
        Some(one) => Ok((found, one)),
        None => Err(Error::NotFound {
            what: "build",
            name: build.chars().take(64).collect(),
        }),
    }
}

/// Have a build begin. It goes on by itself.
#[utoipa::path(post, path = "/v2/templates/{templateID}/builds/{buildID}", tag = "templates", request_body = StartBuild,
    params(("templateID" = String, Path), ("buildID" = String, Path)), responses((status = 202, description = "It has begun"), Failures))]
pub(crate) async fn start(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Path((template, build)): Path<(String, String)>,
    Body(asked): Body<StartBuild>,
) -> Result<StatusCode, Error> {
    let (template, build) = find(&gateway, &principal, &template, &build).await?;
    let plan = Plan::of(asked)?;
    gateway.start_build(&principal, template, build, plan).await?;
    Ok(StatusCode::ACCEPTED)
}

/// A build's log until now.
async fn log_of(gateway: &Gateway, build: &Build) -> Result<Vec<LogLine>, Error> {
    if let Some(job) = gateway.builds.job(&build.id) {
        return Ok(job.log.lines());
    }
    let id = build.id.clone();
    gateway.store.with(move |store| store.build_log(&id)).await
}

/// How far a build is, and what it has said.
#[utoipa::path(get, path = "/templates/{templateID}/builds/{buildID}/status", tag = "templates",
    params(("templateID" = String, Path), ("buildID" = String, Path), StatusQuery), responses((status = 200, body = BuildInfo), Failures))]
pub(crate) async fn status(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Path((template, build)): Path<(String, String)>,
    Query(query): Query<StatusQuery>,
) -> Result<Json<BuildInfo>, Error> {
    let (template, build) = find(&gateway, &principal, &template, &build).await?;
    let log = log_of(&gateway, &build).await?;
    let is_asked = |line: &&LogLine| query.level.is_none_or(|least| level(line.level) >= least);
    let limit = query.limit.unwrap_or(MOST_LINES).min(MOST_LINES);
    let lines = log.iter().filter(is_asked).skip(query.logs_offset).take(limit);
    let reason = build.failure.map(|failure| {
        let of_step: Vec<&LogLine> = log.iter().filter(|line| line.step == failure.step).collect();
        let last = of_step
            .get(of_step.len().saturating_sub(LAST_LINES)..)
            .unwrap_or_default();
        BuildStatusReason {
            message: failure.message,
            step: failure.step,
            log_entries: last.iter().map(|&line| line.clone().into()).collect(),
        }
    });
    Ok(Json(BuildInfo {
        template_id: template.id,
        build_id: build.id,
        status: status_word(build.state),
        logs: Vec::new(),
        log_entries: lines.cloned().map(BuildLogEntry::from).collect(),
        reason,
    }))
}

/// What a build has said.
#[utoipa::path(get, path = "/templates/{templateID}/builds/{buildID}/logs", tag = "templates",
    params(("templateID" = String, Path), ("buildID" = String, Path), BuildLogsQuery), responses((status = 200, body = BuildLogs), Failures))]
pub(crate) async fn logs(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Path((template, build)): Path<(String, String)>,
    Query(query): Query<BuildLogsQuery>,
) -> Result<Json<BuildLogs>, Error> {
    let (_, build) = find(&gateway, &principal, &template, &build).await?;
    let choice = Choice {
        cursor: query.cursor,
        direction: query.direction,
        level: query.level,
        limit: query.limit.unwrap_or(MOST_LINES).min(MOST_LINES),
    };
    let lines = choose(log_of(&gateway, &build).await?, choice, |line| {
        (line.time_ns / 1_000_000, level(line.level))
    });
    Ok(Json(BuildLogs {
        logs: lines.into_iter().map(BuildLogEntry::from).collect(),
    }))
}
