//! `POST /files`: files are written as their bytes come, from a form or as the whole body. Knows no download.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use agent_api::message::{DATA_CHUNK, Reply, kind};
use agent_api::{Entry, FsRequest};
use axum::body::Body;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Request, Response, StatusCode};
use multer::Multipart;
use serde::Serialize;

use super::body::{Ahead, Pieces};
use super::{Address, metadata};
use crate::agent::{ANSWER_LIMIT, Channel, Frame, WRITE_LIMIT, failed, unexpected};
use crate::error::Error;
use crate::filesystem::{ask_on, base_name};
use crate::sandbox::json;
use crate::state::State;

/// How many files one request may write.
const MAX_FILES: usize = 10_000;

/// How much of a body is thrown away so that its sender hears why it is not wanted, and for how long.
const MAX_DRAINED: usize = 16 * 1024 * 1024;
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// What is said of a file that was written.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Written {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl From<Entry> for Written {
    fn from(entry: Entry) -> Self {
        let path = entry.path.to_string();
        Self {
            name: base_name(&path).to_owned(),
            path,
            kind: "file",
            metadata: entry.metadata,
        }
    }
}

/// Answers the request.
pub(super) async fn serve(state: &State, address: &Address, request: Request<Body>) -> Result<Response<Body>, Error> {
    let (head, body) = request.into_parts();
    let metadata = metadata::of(&head.headers)?;
    let user = address.user()?;
    let media = head.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let media = media.unwrap_or_default();
    let essence = media.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let form = match essence.as_str() {
        "application/octet-stream" => None,
        "multipart/form-data" => Some(boundary(media)?),
        other => {
            return Err(Error::Invalid(format!(
                "unsupported content type: {other:?}, expected multipart/form-data or application/octet-stream"
            )));
        }
    };
    let pieces = Pieces::new(&head.headers, body)?;
    let (channel, command) = state.open().await?;
    let mut writer = Writer {
        channel,
        user: user.or(command.user),
        metadata,
        path: address.path.clone().filter(|path| !path.is_empty()),
        paths: BTreeSet::new(),
        written: Vec::new(),
    };
    match form {
        None => writer.whole(pieces).await?,
        Some(boundary) => {
            let ahead = Ahead::default();
            let form = Multipart::new(pieces.into_stream(ahead.clone()), boundary);
            writer.form(form, &ahead).await?;
        }
    }
    Ok(json(StatusCode::OK, &writer.written))
}

fn boundary(media: &str) -> Result<String, Error> {
    multer::parse_boundary(media).map_err(|error| Error::Invalid(format!("Content-Type cannot be read: {error}")))
}

/// Where files' bytes come from.
trait Source {
    /// The next of them; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Error>;
}

impl Source for Pieces {
    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        Self::next(self).await
    }
}

/// A field of a form.
struct Field<'f> {
    field: multer::Field<'f>,
    ahead: Ahead,
}

impl Source for Field<'_> {
    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let chunk = self.field.chunk().await.map_err(form_error)?;
        self.ahead.given();
        Ok(chunk)
    }
}

/// What is wrong with a form; what came of the body itself is told as it is.
fn form_error(error: multer::Error) -> Error {
    if let multer::Error::StreamReadFailed(source) = error {
        return match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Body(source.to_string()),
        };
    }
    Error::Body(format!("the form cannot be read: {error}"))
}

/// Writes the files of one request.
struct Writer {
    channel: Channel,
    user: Option<String>,
    metadata: BTreeMap<String, String>,
    /// The one path, if the address says one.
    path: Option<String>,
    /// Which paths were written already.
    paths: BTreeSet<String>,
    written: Vec<Written>,
}

impl Writer {
    /// The body is one file.
    async fn whole(&mut self, mut pieces: Pieces) -> Result<(), Error> {
        let Some(path) = self.path.clone() else {
            return Err(Error::Invalid(
                "path query parameter is required for raw body upload".to_owned(),
            ));
        };
        let result = self.file(path, &mut pieces).await;
        drained(result, &mut pieces).await
    }

    /// The body is a form, whose fields `file` are files.
    async fn form(&mut self, mut form: Multipart<'_>, ahead: &Ahead) -> Result<(), Error> {
        while let Some(field) = form.next_field().await.map_err(form_error)? {
            ahead.given();
            let is_file = field.name() == Some("file");
            let path = self.path.clone().or_else(|| field.file_name().map(str::to_owned));
            let mut field = Field {
                field,
                ahead: ahead.clone(),
            };
            if !is_file {
                while field.next().await?.is_some() {}
                continue;
            }
            let result = match path.filter(|path| !path.is_empty()) {
                Some(path) => self.file(path, &mut field).await,
                None => Err(Error::Invalid(
                    "a file has no path: neither the query says one nor the form a file name".to_owned(),
                )),
            };
            drained(result, &mut field).await?;
        }
        Ok(())
    }

    async fn file(&mut self, path: String, source: &mut impl Source) -> Result<(), Error> {
        if self.written.len() >= MAX_FILES {
            return Err(Error::TooMuch(format!(
                "one request may write {MAX_FILES} files and no more"
            )));
        }
        if !self.paths.insert(path.clone()) {
            return Err(Error::Invalid(format!(
                "you cannot upload multiple files to the same path '{path}' in one upload request; those before it were written"
            )));
        }
        let request = FsRequest::Write {
            path: path.into(),
            mode: None,
            metadata: self.metadata.clone(),
        };
        match ask_on(&mut self.channel, self.user.as_deref(), request).await? {
            Reply::Done => {}
            other => return Err(unexpected(&other)),
        }
        while let Some(bytes) = source.next().await? {
            for part in bytes.chunks(DATA_CHUNK) {
                self.channel.send_bytes(kind::FILE, part, WRITE_LIMIT).await?;
            }
            if let Some(frame) = self.channel.early()? {
                return Err(early(frame));
            }
        }
        self.channel.send_bytes(kind::FILE, &[], WRITE_LIMIT).await?;
        match self.channel.frame(ANSWER_LIMIT).await? {
            Frame::Reply(reply) => match failed(reply)? {
                Reply::Entry(entry) => self.written.push(Written::from(*entry)),
                other => return Err(unexpected(&other)),
            },
            frame => return Err(early(frame)),
        }
        Ok(())
    }
}

/// What the agent says in the midst of a file is that it does not want it.
fn early(frame: Frame) -> Error {
    match frame {
        Frame::Reply(reply) => failed(reply).map_or_else(|error| error, |reply| unexpected(&reply)),
        Frame::Bytes(kind, _) => Error::Agent(format!("a frame of kind {kind} came while a file was written")),
    }
}

/// Reads on for a while where a file was refused: whoever is still sending would not hear it.
async fn drained(result: Result<(), Error>, source: &mut impl Source) -> Result<(), Error> {
    if matches!(result, Ok(()) | Err(Error::Body(_) | Error::Stalled(_))) {
        return result;
    }
    let drain = async {
        let mut drained = 0;
        while let Ok(Some(bytes)) = source.next().await {
            drained += bytes.len();
            if drained > MAX_DRAINED {
                break;
            }
        }
    };
    // It matters to nobody whether it was all.
    let _ = tokio::time::timeout(DRAIN_LIMIT, drain).await;
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boundary_is_found() {
        assert_eq!(boundary("multipart/form-data; boundary=\"a b\"").unwrap(), "a b");
        assert_eq!(boundary("multipart/form-data").unwrap_err().status().as_u16(), 400);
    }

    #[test]
    fn what_is_told_of_a_file_is_what_the_sdks_read() {
        let written = Written {
            path: "/home/user/a".to_owned(),
            name: "a".to_owned(),
            kind: "file",
            metadata: BTreeMap::new(),
        };
        assert_eq!(
            serde_json::to_string(&[written]).unwrap(),
            r#"[{"path":"/home/user/a","name":"a","type":"file"}]"#
        );
    }
}
