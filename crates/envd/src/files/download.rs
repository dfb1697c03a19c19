//! `GET /files`: a file's bytes, or a part of them, as they come from the agent. Knows no upload.

use std::fmt::Write;
use std::time::Duration;

use agent_api::message::{Reply, kind};
use agent_api::{Entry, FsRequest};
use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderName, LAST_MODIFIED, RANGE,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderValue, Response, StatusCode};

use super::{Address, range};
use crate::agent::{Channel, Frame, failed, unexpected};
use crate::error::Error;
use crate::filesystem::{ask_on, base_name};
use crate::state::State;

/// How long the agent may take to read on.
const IDLE: Duration = Duration::from_secs(120);

/// Answers the request.
pub(super) async fn serve(state: &State, address: &Address, headers: &HeaderMap) -> Result<Response<Body>, Error> {
    let Some(path) = address.path.as_deref().filter(|path| !path.is_empty()) else {
        return Err(Error::Invalid("path query parameter is required".to_owned()));
    };
    let (channel, command) = state.open().await?;
    let mut file = File {
        channel,
        user: address.user()?.or(command.user),
        path,
    };
    // What a range means depends on how long the file is.
    let part = if headers.contains_key(RANGE) {
        let (entry, _) = file.read(0, Some(0)).await?;
        file.done().await?;
        range::of(headers, entry.size, http_date(entry.modified_ns).as_deref())?
    } else {
        None
    };
    let (entry, bytes) = match part {
        None => file.read(0, None).await?,
        Some(part) => file.read(part.offset, Some(part.length)).await?,
    };
    let mut response = Response::new(Body::from_stream(stream(file.channel, bytes)));
    describe(response.headers_mut(), &entry, base_name(path), bytes);
    if let Some(part) = part
        && bytes > 0
    {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let last = part.offset.saturating_add(bytes - 1);
        let size = entry.size.max(last.saturating_add(1));
        put(
            response.headers_mut(),
            CONTENT_RANGE,
            &format!("bytes {}-{last}/{size}", part.offset),
        );
    }
    Ok(response)
}

/// A file that is read.
struct File<'a> {
    channel: Channel,
    user: Option<String>,
    path: &'a str,
}

impl File<'_> {
    /// Begins to read; what it is, and how many bytes come.
    async fn read(&mut self, offset: u64, length: Option<u64>) -> Result<(Entry, u64), Error> {
        let request = FsRequest::Read {
            path: self.path.into(),
            offset,
            length,
        };
        match ask_on(&mut self.channel, self.user.as_deref(), request).await? {
            Reply::Reading { entry, bytes } => Ok((*entry, bytes)),
            other => Err(unexpected(&other)),
        }
    }

    async fn done(&mut self) -> Result<(), Error> {
        done(&self.channel.answer().await?)
    }
}

fn done(reply: &Reply) -> Result<(), Error> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(unexpected(other)),
    }
}

/// The bytes that come. One that is cut short ends by an error, and the client finds that bytes are missing.
fn stream(channel: Channel, bytes: u64) -> impl stream::Stream<Item = Result<Bytes, Error>> + Send + 'static {
    stream::unfold(Some((channel, bytes)), async |state| {
        let (mut channel, left) = state?;
        match piece(&mut channel, left).await {
            Ok(Some(bytes)) => {
                let left = left.saturating_sub(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                Some((Ok(bytes), Some((channel, left))))
            }
            Ok(None) => None,
            Err(error) => {
                log::debug!("a file could not be sent to its end: {error}");
                Some((Err(error), None))
            }
        }
    })
}

async fn piece(channel: &mut Channel, left: u64) -> Result<Option<Bytes>, Error> {
    if left == 0 {
        done(&channel.answer().await?)?;
        return Ok(None);
    }
    match channel.frame(IDLE).await? {
        Frame::Bytes(kind::FILE, bytes) if bytes.is_empty() => {
            // The reason follows.
            let reply = channel.answer().await?;
            Err(unexpected(&reply))
        }
        Frame::Bytes(kind::FILE, bytes) if u64::try_from(bytes.len()).is_ok_and(|length| length <= left) => {
            Ok(Some(bytes))
        }
        Frame::Bytes(..) => Err(Error::Agent("more of a file came than it announced".to_owned())),
        Frame::Reply(reply) => Err(unexpected(&failed(reply)?)),
    }
}

fn describe(headers: &mut HeaderMap, entry: &Entry, name: &str, bytes: u64) {
    put(headers, CONTENT_LENGTH, &bytes.to_string());
    put(headers, CONTENT_TYPE, media_type(name));
    put(headers, CONTENT_DISPOSITION, &disposition(name));
    put(headers, ACCEPT_RANGES, "bytes");
    put(headers, X_CONTENT_TYPE_OPTIONS, "nosniff");
    if let Some(date) = http_date(entry.modified_ns) {
        put(headers, LAST_MODIFIED, &date);
    }
}

fn put(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// What a browser is told that a file is. Nothing that it would run as a program of this origin: a sandbox's files are not ours.
fn media_type(name: &str) -> &'static str {
    let ending = name.rsplit_once('.').map(|(_, ending)| ending.to_ascii_lowercase());
    match ending.as_deref() {
        Some("txt" | "log" | "md") => "text/plain; charset=utf-8",
        Some("csv") => "text/csv; charset=utf-8",
        Some("json") => "application/json",
        Some("pdf") => "application/pdf",
        Some("png") => "image/png",
        Some("jpg" | "jpeg") => "image/jpeg",
        Some("gif") => "image/gif",
        Some("webp") => "image/webp",
        Some("mp3") => "audio/mpeg",
        Some("wav") => "audio/wav",
        Some("mp4") => "video/mp4",
        Some("webm") => "video/webm",
        Some("zip") => "application/zip",
        Some("gz") => "application/gzip",
        _ => "application/octet-stream",
    }
}

/// The name that it is kept under (RFC 6266).
fn disposition(name: &str) -> String {
    let plain: String = name
        .chars()
        .map(|char| match char {
            '"' | '\\' | '%' => '_',
            ' '..='~' => char,
            _ => '_',
        })
        .collect();
    let mut text = format!("inline; filename=\"{plain}\"");
    if plain != name {
        text.push_str("; filename*=UTF-8''");
        for byte in name.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                text.push(char::from(byte));
            } else {
                // Writing to a string does not fail.
                let _ = write!(text, "%{byte:02X}");
            }
        }
    }
    text
}

/// A time as HTTP writes it (RFC 9110, section 5.6.7).
fn http_date(ns: i64) -> Option<String> {
    const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let time = time::OffsetDateTime::from_unix_timestamp(ns.div_euclid(1_000_000_000)).ok()?;
    let day = DAYS.get(usize::from(time.weekday().number_days_from_monday()))?;
    let month = MONTHS.get(usize::from(u8::from(time.month())) - 1)?;
    let (hour, minute, second) = time.to_hms();
    Some(format!(
        "{day}, {:02} {month} {:04} {hour:02}:{minute:02}:{second:02} GMT",
        time.day(),
        time.year()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_http_has_them() {
        // RFC 9110's own example.
        assert_eq!(
            http_date(784_111_777_000_000_000).unwrap(),
            "Sun, 06 Nov 1994 08:49:37 GMT"
        );
        assert_eq!(http_date(-1).unwrap(), "Wed, 31 Dec 1969 23:59:59 GMT");
    }

    #[test]
    fn names_of_all_kinds_can_be_kept() {
        assert_eq!(disposition("a b.txt"), r#"inline; filename="a b.txt""#);
        assert_eq!(
            disposition("grü\"ß\r\n"),
            r#"inline; filename="gr______"; filename*=UTF-8''gr%C3%BC%22%C3%9F%0D%0A"#.replace("gr______", "gr_____")
        );
    }

    #[test]
    fn nothing_is_a_page_of_ours() {
        assert_eq!(media_type("A.PNG"), "image/png");
        for name in ["a.html", "a.svg", "a.xhtml", "a.js", "a.xml", "a", "a.", "png"] {
            assert_eq!(media_type(name), "application/octet-stream", "{name}");
        }
    }
}
