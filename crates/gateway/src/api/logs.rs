//! Endpoints of the tag `logs`: what a sandbox's own command has written. The file is the node's, opened by it; what is in it was written by
//! a guest, and is bounded and passed over where it is no record.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use agent_api::OutputStream;
use agent_api::log::{What, read};
use axum::Json;
use axum::extract::State as Shared;
use node_api::Request;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::{Id, Query};
use super::failures::Failures;
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::time_text;

/// So much of a log's end is looked at.
const MOST_BYTES: u64 = 4 << 20;

/// The most lines of an answer.
const MOST_LINES: usize = 1000;

/// Who has written all lines.
const LOGGER: &str = "command";

/// The longest line that is told.
const MAX_LINE: usize = 16 << 10;

/// A line as clients of before take it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Log {
    /// When it was written.
    #[schema(format = DateTime)]
    timestamp: String,
    /// A JSON object as text: `level`, `logger`, `message`, and `stream`. `e2b sandbox logs` reads it so.
    line: String,
}

impl Log {
    fn new(entry: &LogEntry) -> Self {
        let mut line = serde_json::json!({ "level": entry.level, "logger": LOGGER, "message": entry.message });
        for (name, value) in &entry.fields {
            line[*name] = serde_json::json!(value);
        }
        Self {
            timestamp: entry.timestamp.clone(),
            line: line.to_string(),
        }
    }
}

/// A line with what is known of it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct LogEntry {
    /// When it was written.
    #[schema(format = DateTime)]
    timestamp: String,
    /// The line.
    message: String,
    /// `info` of standard output, `error` of standard error.
    level: Level,
    /// `stream`: `stdout` or `stderr`.
    fields: BTreeMap<&'static str, &'static str>,
}

/// How important a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// Least.
    Debug,
    /// Standard output.
    Info,
    /// More.
    Warn,
    /// Standard error.
    Error,
}

/// Which end of the log comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    /// The oldest line.
    #[default]
    Forward,
    /// The newest line.
    Backward,
}

/// Lines.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Logs {
    /// They as clients of before take them.
    logs: Vec<Log>,
    /// The same with what is known of them.
    log_entries: Vec<LogEntry>,
}

/// Lines with what is known of them.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct LogsV2 {
    /// The lines.
    logs: Vec<LogEntry>,
}

/// Which lines.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogsQuery {
    /// Of this moment and later, in milliseconds since 1970.
    start: Option<u64>,
    /// How many, 1000 at most.
    limit: Option<usize>,
}

/// Which lines.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogsQueryV2 {
    /// From this moment on in the direction, in milliseconds since 1970.
    cursor: Option<u64>,
    /// How many, 1000 at most.
    limit: Option<usize>,
    /// From the oldest on, or from the newest.
    #[param(inline)]
    direction: Direction,
    /// Only those of this importance or more.
    #[param(inline)]
    level: Option<Level>,
    /// Only those with this in them.
    search: Option<String>,
}

/// A line, as it was written.
struct Line {
    time_ns: u64,
    level: Level,
    text: String,
}

impl Line {
    fn ms(&self) -> u64 {
        self.time_ns / 1_000_000
    }

    fn entry(self) -> LogEntry {
        let stream = match self.level {
            Level::Error => "stderr",
            _ => "stdout",
        };
        LogEntry {
            timestamp: time_text::text(self.time_ns),
            message: self.text,
            level: self.level,
            fields: BTreeMap::from([("stream", stream)]),
        }
    }
}

/// The lines of a log's end, the oldest first.
fn lines(bytes: &[u8]) -> Vec<Line> {
    let line = |line: &[u8]| {
        let record = read(line)?;
        let What::Output { stream, bytes, .. } = record.what else {
            return None;
        };
        let bytes = bytes.get(..MAX_LINE).unwrap_or(bytes);
        Some(Line {
            time_ns: record.time_ns,
            level: match stream {
                OutputStream::Stdout => Level::Info,
                OutputStream::Stderr => Level::Error,
            },
            text: String::from_utf8_lossy(bytes).into_owned(),
        })
    };
    // What a bounded log has lost at its beginning are zeroes.
    bytes.split(|byte| matches!(byte, b'\n' | 0)).filter_map(line).collect()
}

fn read_end(file: &File) -> std::io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    let from = length.saturating_sub(MOST_BYTES);
    let mut bytes = vec![0; usize::try_from(length - from).unwrap_or(0)];
    file.read_exact_at(&mut bytes, from)?;
    Ok(bytes)
}

async fn log_of(gateway: &Gateway, principal: &Principal, id: &str) -> Result<Vec<Line>, Error> {
    gateway.sandbox(principal, id).await?;
    let request = Request::Logs { sandbox: id.to_owned() };
    let answer = gateway.nodes.ask(&principal.owner(), request).await?;
    let file = File::from(answer.fds.into_iter().next().ok_or(Error::Unexpected("a log"))?);
    let read = tokio::task::spawn_blocking(move || read_end(&file).map(|bytes| lines(&bytes))).await;
    let read = read.map_err(|error| Error::Task(error.to_string()))?;
    read.map_err(Error::host("read a sandbox's log"))
}

fn limit(asked: Option<usize>) -> usize {
    asked.unwrap_or(MOST_LINES).min(MOST_LINES)
}

/// What a sandbox's command has written.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/logs", tag = "logs", params(("sandboxID" = String, Path), LogsQuery),
    responses((status = 200, body = Logs), Failures))]
pub(crate) async fn logs(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Query(query): Query<LogsQuery>,
) -> Result<Json<Logs>, Error> {
    let all = log_of(&gateway, &principal, &id).await?;
    let later = all
        .into_iter()
        .filter(|line| query.start.is_none_or(|start| line.ms() >= start));
    let log_entries: Vec<LogEntry> = later.take(limit(query.limit)).map(Line::entry).collect();
    Ok(Json(Logs {
        logs: log_entries.iter().map(Log::new).collect(),
        log_entries,
    }))
}

/// What a sandbox's command has written.
#[utoipa::path(get, path = "/v2/sandboxes/{sandboxID}/logs", tag = "logs", params(("sandboxID" = String, Path), LogsQueryV2),
    responses((status = 200, body = LogsV2), Failures))]
pub(crate) async fn logs_v2(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Query(query): Query<LogsQueryV2>,
) -> Result<Json<LogsV2>, Error> {
    let all = log_of(&gateway, &principal, &id).await?;
    let shown = chosen(all, &query);
    Ok(Json(LogsV2 {
        logs: shown.into_iter().map(Line::entry).collect(),
    }))
}

fn chosen(mut all: Vec<Line>, query: &LogsQueryV2) -> Vec<Line> {
    if let Some(text) = &query.search {
        all.retain(|line| line.text.contains(text.as_str()));
    }
    let choice = Choice {
        cursor: query.cursor,
        direction: query.direction,
        level: query.level,
        limit: limit(query.limit),
    };
    choose(all, choice, |line| (line.ms(), line.level))
}

/// Which lines of a log are told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    /// From this moment on in the direction, in milliseconds since 1970.
    pub(super) cursor: Option<u64>,
    /// Which end comes first.
    pub(super) direction: Direction,
    /// Only those of this importance or more.
    pub(super) level: Option<Level>,
    /// How many.
    pub(super) limit: usize,
}

/// These of all lines, which are there with the oldest first; `of` tells the milliseconds and the importance of one.
pub(super) fn choose<T>(mut all: Vec<T>, choice: Choice, of: impl Fn(&T) -> (u64, Level)) -> Vec<T> {
    let is_backward = choice.direction == Direction::Backward;
    all.retain(|line| {
        let (ms, level) = of(line);
        let is_behind = choice.cursor.is_none_or(|cursor| match is_backward {
            true => ms <= cursor,
            false => ms >= cursor,
        });
        is_behind && choice.level.is_none_or(|least| level >= least)
    });
    if is_backward {
        all.reverse();
    }
    all.truncate(choice.limit);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &[u8] =
        b"\0\0\0rest of a line\n1.000000000 o F one\n1.500000000 e F two\nnoise\n2.000000000 o P three\n3.0 x code 0\n";

    fn texts(query: &LogsQueryV2) -> Vec<String> {
        chosen(lines(LOG), query).into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn lines_are_chosen() {
        let all = LogsQueryV2::default();
        assert_eq!(texts(&all), ["one", "two", "three"]);
        let backward = LogsQueryV2 {
            direction: Direction::Backward,
            cursor: Some(1500),
            ..LogsQueryV2::default()
        };
        assert_eq!(texts(&backward), ["two", "one"]);
        let from = LogsQueryV2 {
            cursor: Some(1500),
            limit: Some(1),
            ..LogsQueryV2::default()
        };
        assert_eq!(texts(&from), ["two"]);
        let errors = LogsQueryV2 {
            level: Some(Level::Warn),
            ..LogsQueryV2::default()
        };
        assert_eq!(texts(&errors), ["two"]);
        let with = LogsQueryV2 {
            search: Some("hre".into()),
            ..LogsQueryV2::default()
        };
        assert_eq!(texts(&with), ["three"]);
    }

    #[test]
    fn a_line_is_bounded_and_any_bytes() {
        let mut log = b"1.000000000 o F \xff".to_vec();
        log.resize(log.len() + 2 * MAX_LINE, b'a');
        let found = lines(&log);
        assert!(found[0].text.len() <= MAX_LINE + 2 && found[0].text.starts_with('\u{fffd}'));
    }
}
