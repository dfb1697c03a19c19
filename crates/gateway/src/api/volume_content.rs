//! Endpoints about the files of volumes. They want no key but the volume's token, which whoever made the volume was told.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body as RawBody;
use axum::extract::{Request, State as Shared};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use control::AuditEntry;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use node_api::tenant_volume::{FileAttributes, FileEntry, FileKind, FileRequest};
use serde::{Deserialize, Serialize};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use utoipa::{IntoParams, ToSchema};

use super::extract::{Body, Name, Query};
use super::failures::Failures;
use super::guard::MAX_OBJECT;
use crate::Error;
use crate::auth::bearer;
use crate::gateway::Gateway;
use crate::limits::Seat;
use crate::time_text;
use crate::volumes::{Reached, reached};

/// A body of which nothing comes for so long is given up.
const SILENCE: Duration = Duration::from_secs(120);

/// How long a body may take. The SDKs give theirs as long.
const TAKES: Duration = Duration::from_secs(3600);

/// Bytes that are read at once.
const PIECE: usize = 64 << 10;

/// A file of a volume.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct VolumeEntryStat {
    /// The last part of its path.
    name: String,
    /// `file`, `directory`, `symlink` or `unknown`.
    r#type: &'static str,
    /// Its path in the volume.
    path: String,
    /// Bytes.
    size: u64,
    /// Who may do what with it, as chmod(2) has it.
    mode: u32,
    /// Its user's number.
    uid: u32,
    /// Its group's number.
    gid: u32,
    /// When it was last read.
    #[schema(format = DateTime)]
    atime: String,
    /// When it was last written.
    #[schema(format = DateTime)]
    mtime: String,
    /// When anything about it was last changed.
    #[schema(format = DateTime)]
    ctime: String,
    /// Where a symbolic link leads.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

/// A place in a volume.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct PathQuery {
    /// From the volume's root on.
    path: String,
}

/// A directory in a volume.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// From the volume's root on.
    path: String,
    /// How many directories below each other are gone through.
    #[serde(default = "one")]
    #[param(default = 1, minimum = 1, maximum = 64)]
    depth: u32,
}

fn one() -> u32 {
    1
}

/// What is to be made in a volume.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct MakeQuery {
    /// From the volume's root on.
    path: String,
    /// Its user's number; 0 when not given.
    uid: Option<u32>,
    /// Its group's number; 0 when not given.
    gid: Option<u32>,
    /// Who may do what with it; 0755 of a directory and 0644 of a file when not given.
    mode: Option<u32>,
    /// Missing directories above it are made, and it is fine if it is there: a file is written anew.
    #[serde(default)]
    force: bool,
}

impl MakeQuery {
    fn attributes(&self) -> FileAttributes {
        let &Self { uid, gid, mode, .. } = self;
        FileAttributes { uid, gid, mode }
    }
}

/// What is to be changed of a file.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct PathUpdate {
    /// Its user's number.
    uid: Option<u32>,
    /// Its group's number.
    gid: Option<u32>,
    /// Who may do what with it.
    mode: Option<u32>,
}

fn show(entry: FileEntry) -> VolumeEntryStat {
    VolumeEntryStat {
        name: entry.name,
        r#type: match entry.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            FileKind::Other => "unknown",
        },
        path: entry.path,
        size: entry.size,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        atime: time_text::text(entry.accessed_ns),
        mtime: time_text::text(entry.modified_ns),
        ctime: time_text::text(entry.changed_ns),
        target: entry.target,
    }
}

/// Lets somebody in who shows the token of a volume; requests of one tenant are bounded as those with a key are.
fn enter(gateway: &Gateway, headers: &HeaderMap, name: &str) -> Result<(Reached, Seat), Error> {
    let volume = bearer(headers).and_then(|token| reached(&gateway.tokens, name, token));
    let volume = volume.ok_or(Error::NoVolumeToken)?;
    let seat = gateway
        .limits
        .request(&format!("volumes of {}", volume.tenant).into())?;
    Ok((volume, seat))
}

/// Changes something for somebody who was let in: to its end and written down, whether somebody still waits for it or not.
async fn change<F>(
    gateway: Arc<Gateway>,
    (volume, seat): (Reached, Seat),
    (action, path): (&'static str, String),
    work: impl FnOnce(Arc<Gateway>, Reached) -> F,
) -> Result<Response, Error>
where
    F: Future<Output = Result<Response, Error>> + Send + 'static,
{
    let change = gateway.limits.change();
    let object = format!("{} {path}", volume.name);
    let (tenant, work) = (volume.tenant.to_string(), work(Arc::clone(&gateway), volume));
    let carried_out = tokio::spawn(async move {
        let done = work.await;
        let entry = AuditEntry {
            time_ns: time_text::now_ns(),
            tenant,
            // Whoever has the token was given it for a key, which is not told.
            key: String::new(),
            action: format!("{action} of /volumecontent/{{volume}}"),
            object: object.chars().take(MAX_OBJECT).collect(),
            outcome: done.as_ref().map_or_else(Error::status, Response::status).as_u16(),
        };
        let written = gateway.store.with(move |store| store.audit(&entry)).await;
        drop((seat, change));
        written.and(done)
    });
    carried_out.await.map_err(|error| Error::Task(error.to_string()))?
}

fn answer(status: StatusCode, entry: FileEntry) -> Response {
    (status, Json(show(entry))).into_response()
}

/// Look at a file.
#[utoipa::path(get, path = "/volumecontent/{volumeID}/path", tag = "volumes", security(("VolumeToken" = [])),
    params(("volumeID" = String, Path), PathQuery), responses((status = 200, body = VolumeEntryStat), Failures))]
pub(crate) async fn stat(
    Shared(gateway): Shared<Arc<Gateway>>,
    Name(name): Name,
    Query(query): Query<PathQuery>,
    headers: HeaderMap,
) -> Result<Json<VolumeEntryStat>, Error> {
    let (volume, _seat) = enter(&gateway, &headers, &name)?;
    let (entry, _) = gateway
        .volume_file(&volume, FileRequest::Stat { path: query.path })
        .await?;
    Ok(Json(show(entry)))
}

/// Change whose a file is.
#[utoipa::path(patch, path = "/volumecontent/{volumeID}/path", tag = "volumes", security(("VolumeToken" = [])),
    params(("volumeID" = String, Path), PathQuery), request_body = PathUpdate,
    responses((status = 200, body = VolumeEntryStat), Failures))]
pub(crate) async fn update(
    Shared(gateway): Shared<Arc<Gateway>>,
    Name(name): Name,
    Query(query): Query<PathQuery>,
    headers: HeaderMap,
    Body(asked): Body<PathUpdate>,
) -> Result<Response, Error> {
    let entered = enter(&gateway, &headers, &name)?;
    let PathUpdate { uid, gid, mode } = asked;
    let request = FileRequest::Update {
        path: query.path.clone(),
        attributes: FileAttributes { uid, gid, mode },
    };
    change(gateway, entered, ("PATCH", query.path), |gateway, volume| async move {
        let (entry, _) = gateway.volume_file(&volume, request).await?;
        Ok(answer(StatusCode::OK, entry))
    })
    .await
}

/// Remove a file, or a directory with all that is in it.
#[utoipa::path(delete, path = "/volumecontent/{volumeID}/path", tag = "volumes", security(("VolumeToken" = [])),
    params(("volumeID" = String, Path), PathQuery), responses((status = 204, description = "It is gone"), Failures))]
pub(crate) async fn remove(
    Shared(gateway): Shared<Arc<Gateway>>,
    Name(name): Name,
    Query(query): Query<PathQuery>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let entered = enter(&gateway, &headers, &name)?;
    let request = FileRequest::Remove {
        path: query.path.clone(),
    };
    change(gateway, entered, ("DELETE", query.path), |gateway, volume| async move {
        gateway.change_files(&volume, request).await?;
        Ok(StatusCode::NO_CONTENT.into_response())
    })
    .await
}

/// List a directory, by name.
#[utoipa::path(get, path = "/volumecontent/{volumeID}/dir", tag = "volumes", security(("VolumeToken" = [])),
    params(("volumeID" = String, Path), ListQuery), responses((status = 200, body = [VolumeEntryStat]), Failures))]
pub(crate) async fn list(
    Shared(gateway): Shared<Arc<Gateway>>,
    Name(name): Name,
    Query(query): Query<ListQuery>,
    headers: HeaderMap,
) -> Result<Json<Vec<VolumeEntryStat>>, Error> {
    let (volume, _seat) = enter(&gateway, &headers, &name)?;
    let ListQuery { path, depth } = query;
    let all = gateway.list_files(&volume, FileRequest::List { path, depth }).await?;
    Ok(Json(all.into_iter().map(show).collect()))
}

/// Make a directory.
#[utoipa::path(post, path = "/volumecontent/{volumeID}/dir", tag = "volumes", security(("VolumeToken" = [])),
    params(("volumeID" = String, Path), MakeQuery), responses((status = 201, body = VolumeEntryStat), Failures))]
pub(crate) async fn make_directory(
    Shared(gateway): Shared<Arc<Gateway>>,
    Name(name): Name,
    Query(query): Query<MakeQuery>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let entered = enter(&gateway, &headers, &name)?;
    let request = FileRequest::MakeDirectory {
        path: query.path.clone(),
        attributes: query.attributes(),
        force: query.force,
    };
    change(gateway, entered, ("POST", query.path), |gateway, volume| async move {
        let (entry, _) = gateway.volume_file(&volume, request).await?;
        Ok(answer(StatusCode::CREATED, entry))
    })
    .await
}

/// Read a file.
#[utoipa::path(get, path = "/volumecontent/{volumeID}/file", tag = "volumes", security(("VolumeToken" = [])),
    params(("volumeID" = String, Path), PathQuery),
    responses((status = 200, content_type = "application/octet-stream", body = Vec<u8>), Failures))]
pub(crate) async fn read(
    Shared(gateway): Shared<Arc<Gateway>>,
    Name(name): Name,
    Query(query): Query<PathQuery>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let (volume, seat) = enter(&gateway, &headers, &name)?;
    let (entry, fd) = gateway
        .volume_file(&volume, FileRequest::Read { path: query.path })
        .await?;
    let file = file_of(fd)?;
    let body = RawBody::from_stream(pieces(file, entry.size, seat));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(entry.size));
    Ok(response)
}

/// Write a file. One that is there is written over only with `force`; one whose body breaks off has what has come by then.
#[utoipa::path(put, path = "/volumecontent/{volumeID}/file", tag = "volumes", security(("VolumeToken" = [])),
    params(("volumeID" = String, Path), MakeQuery), request_body(content_type = "application/octet-stream", content = Vec<u8>),
    responses((status = 201, body = VolumeEntryStat), (status = 507, body = crate::error::ErrorBody), Failures))]
pub(crate) async fn write(
    Shared(gateway): Shared<Arc<Gateway>>,
    Name(name): Name,
    Query(query): Query<MakeQuery>,
    request: Request,
) -> Result<Response, Error> {
    let entered = enter(&gateway, request.headers(), &name)?;
    let body = request.into_body();
    let path = query.path.clone();
    change(gateway, entered, ("PUT", path), |gateway, volume| async move {
        let written = tokio::time::timeout(TAKES, write_body(&gateway, &volume, query, body)).await;
        let entry =
            written.map_err(|_| Error::invalid(format!("a file may take {} s: try again", TAKES.as_secs())))??;
        Ok(answer(StatusCode::CREATED, entry))
    })
    .await
}

async fn write_body(gateway: &Gateway, volume: &Reached, query: MakeQuery, body: RawBody) -> Result<FileEntry, Error> {
    let request = FileRequest::Write {
        path: query.path.clone(),
        attributes: query.attributes(),
        force: query.force,
    };
    let (_, fd) = gateway.volume_file(volume, request).await?;
    let mut file = file_of(fd)?;
    let mut stream = body.into_data_stream();
    loop {
        let bytes = match tokio::time::timeout(SILENCE, stream.next()).await {
            Err(_) => return Err(Error::invalid("nothing came of the file for too long: try again")),
            Ok(None) => break,
            Ok(Some(bytes)) => bytes.map_err(|error| Error::invalid(format!("the file broke off: {error}")))?,
        };
        file.write_all(&bytes).await.map_err(unwritten)?;
    }
    file.flush().await.map_err(unwritten)?;
    let stat = FileRequest::Stat { path: query.path };
    Ok(gateway.volume_file(volume, stat).await?.0)
}

fn unwritten(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull => {
            Error::NoSpace("the volume is full, and has what fitted of the file: remove something in it".into())
        }
        _ => Error::host("write a file of a volume")(error),
    }
}

fn file_of(fd: Option<OwnedFd>) -> Result<File, Error> {
    let fd = fd.ok_or(Error::Unexpected("a file's descriptor"))?;
    Ok(File::from_std(fd.into()))
}

/// So many bytes of a file, as somebody reads them, whose seat is taken until then.
fn pieces(file: File, bytes: u64, seat: Seat) -> impl futures_util::Stream<Item = io::Result<Bytes>> {
    stream::try_unfold((file, bytes, seat), |(mut file, left, seat)| async move {
        let room = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
        let mut piece = BytesMut::with_capacity(room);
        // What is behind the end that was told stays.
        let got = (&mut file).take(room as u64).read_buf(&mut piece).await?;
        Ok((got > 0).then(|| (piece.freeze(), (file, left - got as u64, seat))))
    })
}
