//! Files of a sandbox: what is at a path (`filesystem.Filesystem`), and their bytes (`/files`).

use std::io::Read;

use serde::Deserialize;
use serde_json::json;
use ureq::SendBody;
use ureq::http::Method;

use crate::client::{Own, PATIENCE, escape};
use crate::error::plain;
use crate::{Access, Client, Error};

/// What is at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// A link is followed.
    pub kind: FileKind,
    /// Permissions.
    pub mode: u32,
    /// Bytes.
    pub size: u64,
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// Something else.
    Other,
}

#[derive(Deserialize)]
struct Found {
    entry: Told,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Told {
    #[serde(rename = "type")]
    kind: String,
    mode: u32,
    /// A long number is a text.
    size: serde_json::Value,
}

impl Client {
    /// What is at a path of a sandbox; `None` if nothing is.
    ///
    /// # Errors
    /// It cannot be asked for.
    pub fn stat(&self, to: &Access, path: &str, user: Option<&str>) -> Result<Option<Entry>, Error> {
        let told = match self.call(to, "filesystem.Filesystem/Stat", user, &json!({ "path": path })) {
            Ok(told) => told,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error),
        };
        let found = Found::deserialize(told).map_err(|error| self.server.no_gateway(plain(&error.to_string())))?;
        let Told { kind, mode, size } = found.entry;
        Ok(Some(Entry {
            kind: match kind.as_str() {
                "FILE_TYPE_FILE" => FileKind::File,
                "FILE_TYPE_DIRECTORY" => FileKind::Directory,
                _ => FileKind::Other,
            },
            mode: mode & 0o7777,
            size: size.as_u64().or_else(|| size.as_str()?.parse().ok()).unwrap_or(0),
        }))
    }

    /// The bytes of a file of a sandbox.
    ///
    /// # Errors
    /// They cannot be asked for.
    pub fn read_file(&self, to: &Access, path: &str, user: Option<&str>) -> Result<impl Read + use<>, Error> {
        let request = self.to_sandbox(to, Method::GET, &format!("/files?path={}", escape(path)), user);
        let request = request
            .body(SendBody::none())
            .map_err(|_| self.server.no_gateway("a token that is none"))?;
        let body = self.send(request, Some(PATIENCE))?.into_body();
        Ok(body.into_with_config().limit(u64::MAX).reader())
    }

    /// Writes a file of a sandbox, in place of one that is there.
    ///
    /// # Errors
    /// It was not written, or not whole.
    pub fn write_file(&self, to: &Access, path: &str, user: Option<&str>, bytes: impl Read) -> Result<(), Error> {
        let mut own = Own(bytes);
        let request = self
            .to_sandbox(to, Method::POST, &format!("/files?path={}", escape(path)), user)
            .header("Content-Type", "application/octet-stream")
            .body(SendBody::from_reader(&mut own));
        let request = request.map_err(|_| self.server.no_gateway("a token that is none"))?;
        self.send(request, Some(PATIENCE)).map(drop)
    }
}
