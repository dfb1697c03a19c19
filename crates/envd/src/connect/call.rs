//! A call's frame: what its headers say, a unary call's body, and the answer to it. Knows no service.

use std::io::Read;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use flate2::read::MultiGzDecoder;
use http::header::{ALLOW, CONTENT_ENCODING, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::envelope::{self, MAX_MESSAGE};
use super::json;
use crate::error::Error;
use crate::memory::{Held, Share};

const UNARY: &str = "application/json";
const STREAM: &str = "application/connect+json";
const VERSION: HeaderName = HeaderName::from_static("connect-protocol-version");
const TIMEOUT: HeaderName = HeaderName::from_static("connect-timeout-ms");
const STREAM_ENCODING: HeaderName = HeaderName::from_static("connect-content-encoding");
const PING_INTERVAL: HeaderName = HeaderName::from_static("keepalive-ping-interval");

/// How long a unary call may take whose client has set no limit.
const UNARY_LIMIT: Duration = Duration::from_secs(600);

/// How often a stream says that it is there, unless its client says how often it wants that.
const PING_DEFAULT: u64 = 90;

/// What a call's headers say.
pub(super) struct Call {
    headers: HeaderMap,
    /// When it must be over, and how long that was from its beginning.
    pub(super) deadline: Option<(Instant, Duration)>,
}

impl Call {
    /// Reads the headers of a call.
    fn new(headers: HeaderMap) -> Result<Self, Error> {
        if let Some(version) = headers.get(VERSION)
            && version != "1"
        {
            return Err(Error::Invalid(
                "Connect-Protocol-Version must be 1, the only version there is".to_owned(),
            ));
        }
        let deadline = match headers.get(TIMEOUT) {
            None => None,
            Some(text) => {
                let limit = timeout(text.as_bytes())?;
                // None at all, as envd takes it.
                Some((Instant::now() + limit, limit)).filter(|_| !limit.is_zero())
            }
        };
        Ok(Self { headers, deadline })
    }

    /// How often a stream is to say that it is there.
    pub(super) fn ping_interval(&self) -> Duration {
        let asked = self
            .headers
            .get(PING_INTERVAL)
            .and_then(|text| text.to_str().ok()?.parse().ok());
        Duration::from_secs(asked.unwrap_or(PING_DEFAULT).clamp(1, 3600))
    }

    /// Does `work` before the deadline.
    pub(super) async fn within<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        match self.deadline {
            None => work.await,
            Some((end, limit)) => tokio::time::timeout_at(end, work)
                .await
                .unwrap_or(Err(Error::Deadline(limit))),
        }
    }
}

/// At most ten digits, by the specification.
fn timeout(text: &[u8]) -> Result<Duration, Error> {
    let digits = std::str::from_utf8(text)
        .ok()
        .filter(|text| text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit()));
    match digits.and_then(|digits| digits.parse().ok()) {
        Some(ms) => Ok(Duration::from_millis(ms)),
        None => Err(Error::Invalid(
            "Connect-Timeout-Ms must be a number of milliseconds with at most ten digits".to_owned(),
        )),
    }
}

/// Splits a request of the kind that is wanted.
fn split(request: Request<Body>, media: &'static str) -> Result<(Call, Body), Error> {
    let (head, body) = request.into_parts();
    if head.method != Method::POST {
        return Err(Error::Method("POST"));
    }
    let sent = head.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = sent.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case(media) {
        return Err(Error::MediaType(format!(
            "this is asked for with Content-Type {media}; {essence:?} is not understood"
        )));
    }
    Ok((Call::new(head.headers)?, body))
}

/// Answers a unary call by `work`. The messages are of `memory`.
pub(crate) async fn unary<I, O, F>(memory: &Share, request: Request<Body>, work: impl FnOnce(I) -> F) -> Response<Body>
where
    I: DeserializeOwned + Default,
    O: Serialize,
    F: Future<Output = Result<O, Error>>,
{
    match answer(memory, request, work).await {
        Ok((json, held)) => response(StatusCode::OK, UNARY, holding(json, held)),
        Err(error) => refuse(&error),
    }
}

async fn answer<I, O, F>(
    memory: &Share,
    request: Request<Body>,
    work: impl FnOnce(I) -> F,
) -> Result<(Vec<u8>, Held), Error>
where
    I: DeserializeOwned + Default,
    O: Serialize,
    F: Future<Output = Result<O, Error>>,
{
    let (call, body) = split(request, UNARY)?;
    let (end, limit) = call.deadline.unwrap_or((Instant::now() + UNARY_LIMIT, UNARY_LIMIT));
    let whole = async {
        let (bytes, _held) = message(memory, &call.headers, body).await?;
        let message = json::read(&bytes)?;
        drop(bytes);
        let json = json::write(&work(message).await?)?;
        // What was asked for is done: that is told, and not that it should be asked for again.
        let held = memory.hold_anyway(json.len());
        Ok((json, held))
    };
    tokio::time::timeout_at(end, whole)
        .await
        .unwrap_or(Err(Error::Deadline(limit)))
}

/// Takes the call of a stream apart.
pub(super) fn stream(request: Request<Body>) -> Result<(Call, Body), Error> {
    let (call, body) = split(request, STREAM)?;
    match encoding(&call.headers, STREAM_ENCODING)? {
        Encoding::Identity => Ok((call, body)),
        Encoding::Gzip => Err(Error::Unimplemented(
            "messages of a stream must not be compressed; Connect-Content-Encoding must be identity".to_owned(),
        )),
    }
}

enum Encoding {
    Identity,
    Gzip,
}

fn encoding(headers: &HeaderMap, name: HeaderName) -> Result<Encoding, Error> {
    match headers.get(&name).map(|value| value.as_bytes()) {
        None | Some(b"" | b"identity") => Ok(Encoding::Identity),
        Some(b"gzip") => Ok(Encoding::Gzip),
        Some(other) => Err(Error::Unimplemented(format!(
            "{name} {:?} is not understood; identity and gzip are",
            String::from_utf8_lossy(other)
        ))),
    }
}

/// A unary call's message, decompressed.
async fn message(memory: &Share, headers: &HeaderMap, body: Body) -> Result<(Bytes, Held), Error> {
    let encoding = encoding(headers, CONTENT_ENCODING)?;
    let (sent, mut held) = collect(memory, body).await?;
    match encoding {
        Encoding::Identity => Ok((sent, held)),
        Encoding::Gzip => {
            // How much that is is known only when it is there.
            held.grow_to(held.bytes() + MAX_MESSAGE)?;
            Ok((gunzip(&sent)?.into(), held))
        }
    }
}

/// The whole of a short body, which is of `memory`.
pub(crate) async fn collect(memory: &Share, mut body: Body) -> Result<(Bytes, Held), Error> {
    let mut whole = BytesMut::new();
    let mut held = memory.nothing();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Error::Body(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > MAX_MESSAGE {
            return Err(too_long());
        }
        // The message that is made of it takes as much.
        held.grow_to(2 * (whole.len() + data.len()))?;
        whole.extend_from_slice(&data);
    }
    Ok((whole.freeze(), held))
}

/// A body that is held until it is sent.
fn holding(json: Vec<u8>, held: Held) -> Body {
    let body = Full::new(Bytes::from(json)).map_frame(move |frame| {
        // Its end is the end of the body.
        let _until_then = &held;
        frame
    });
    Body::new(body)
}

fn gunzip(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let mut message = Vec::new();
    let limit = u64::try_from(MAX_MESSAGE).unwrap_or(u64::MAX);
    let mut source = MultiGzDecoder::new(bytes).take(limit + 1);
    source
        .read_to_end(&mut message)
        .map_err(|error| Error::Body(format!("it is no gzip stream: {error}")))?;
    if message.len() > MAX_MESSAGE {
        return Err(too_long());
    }
    Ok(message)
}

fn too_long() -> Error {
    Error::TooMuch(format!("a message must not have more than {MAX_MESSAGE} bytes"))
}

/// What is said of an error.
#[derive(Serialize)]
pub(super) struct Description {
    code: &'static str,
    message: String,
}

pub(super) fn description(error: &Error) -> Description {
    Description {
        code: error.code().name(),
        message: error.to_string(),
    }
}

/// The answer to a unary call that failed.
fn refuse(error: &Error) -> Response<Body> {
    let status = match error {
        Error::Method(_) | Error::MediaType(_) => error.status(),
        error => error.code().status(),
    };
    let text = serde_json::to_string(&description(error)).unwrap_or_default();
    let mut answer = response(status, UNARY, Body::from(text));
    if matches!(error, Error::Method(_)) {
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
    }
    mark(answer, error)
}

/// Whoever knows the sandbox's id makes another answer of one that says that there is no sandbox.
fn mark(mut answer: Response<Body>, error: &Error) -> Response<Body> {
    if matches!(error, Error::NotRunning) {
        answer.extensions_mut().insert(NotRunning);
    }
    answer
}

/// Marks an answer: the sandbox does not run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotRunning;

/// The answer to a stream that failed before it began. What is not understood at all is answered as a unary call's.
pub(super) fn refuse_stream(error: &Error) -> Response<Body> {
    match error {
        Error::Method(_) | Error::MediaType(_) => refuse(error),
        error => mark(streaming(Body::from(envelope::end(Some(error)))), error),
    }
}

/// The answer that is a stream.
pub(super) fn streaming(body: Body) -> Response<Body> {
    response(StatusCode::OK, STREAM, body)
}

fn response(status: StatusCode, media: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(media));
    response
}

/// Refuses a call that was not read at all, as its kind wants it.
pub(crate) fn refuse_call(headers: &HeaderMap, error: &Error) -> Response<Body> {
    let media = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if media.is_some_and(|media| media.starts_with(STREAM)) {
        refuse_stream(error)
    } else {
        refuse(error)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::memory::Memory;

    #[derive(Default, serde::Deserialize)]
    #[serde(default)]
    struct Echo {
        text: String,
    }

    fn share() -> Share {
        Memory::default().share()
    }

    async fn ask(headers: &[(&str, &str)], body: impl Into<Body>) -> (u16, String) {
        let mut request = Request::post("/x.Y/Z").body(body.into()).unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_str(value).unwrap(),
            );
        }
        let response = unary(&share(), request, async |echo: Echo| Ok(echo.text)).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    const JSON: (&str, &str) = ("content-type", "application/json; charset=utf-8");

    #[tokio::test]
    async fn a_call_is_answered_or_refused_as_the_protocol_has_it() {
        let sent = r#"{"text":"a","later":{}}"#;
        assert_eq!(ask(&[JSON], sent).await, (200, r#""a""#.to_owned()));
        assert_eq!(ask(&[JSON, ("connect-protocol-version", "1")], sent).await.0, 200);
        for (headers, status, code) in [
            (vec![JSON, ("connect-protocol-version", "2")], 400, "invalid_argument"),
            (vec![JSON, ("connect-timeout-ms", "-1")], 400, "invalid_argument"),
            (
                vec![JSON, ("connect-timeout-ms", "12345678901")],
                400,
                "invalid_argument",
            ),
            (vec![JSON, ("content-encoding", "br")], 501, "unimplemented"),
            (vec![("content-type", "application/proto")], 415, "unimplemented"),
            (vec![], 415, "unimplemented"),
        ] {
            let (got, text) = ask(&headers, sent).await;
            assert_eq!(got, status, "{headers:?}");
            assert!(text.starts_with(&format!(r#"{{"code":"{code}","message":""#)), "{text}");
        }
        assert_eq!(ask(&[JSON], "[").await.0, 400);
    }

    #[tokio::test]
    async fn a_compressed_message_is_read_and_bounded() {
        let gzip = |text: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        };
        let header = [JSON, ("content-encoding", "gzip")];
        assert_eq!(ask(&header, gzip(br#"{"text":"b"}"#)).await, (200, r#""b""#.to_owned()));
        // A kilobyte that would be megabytes.
        let bomb = gzip(&vec![b' '; MAX_MESSAGE + 1]);
        assert!(bomb.len() < MAX_MESSAGE / 100);
        assert_eq!(ask(&header, bomb).await.0, 429);
        assert_eq!(ask(&header, "{}").await.0, 400);
        assert_eq!(ask(&[JSON], vec![b' '; MAX_MESSAGE + 1]).await.0, 429);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_ends_a_call() {
        let mut request = Request::post("/").body(Body::from("{}")).unwrap();
        request
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static(UNARY));
        request.headers_mut().insert(TIMEOUT, HeaderValue::from_static("20"));
        let response = unary(&share(), request, async |_: Echo| {
            std::future::pending::<Result<(), Error>>().await
        })
        .await;
        assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
    }

    /// Both messages are counted, the answer until it is sent. It is told also where there is no memory left: what it tells is done.
    #[tokio::test]
    async fn messages_are_of_the_tenants_memory() {
        const KIB: usize = 1024;
        let share = Memory::new(64 * KIB).share();
        let ask = async |body: usize, answer: usize| {
            let text = format!(r#"{{"text":"{}"}}"#, "x".repeat(body));
            let mut request = Request::post("/").body(Body::from(text)).unwrap();
            let media = HeaderValue::from_static(UNARY);
            request.headers_mut().insert(CONTENT_TYPE, media);
            unary(&share, request, async |_: Echo| Ok("y".repeat(answer))).await
        };
        let response = ask(20 * KIB, 100 * KIB).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(!share.has(1), "the answer is on its way");
        assert_eq!(ask(1, 1).await.status(), StatusCode::TOO_MANY_REQUESTS);
        response.into_body().collect().await.unwrap();
        assert!(share.has(64 * KIB));
        assert_eq!(ask(40 * KIB, 1).await.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(share.has(64 * KIB));
    }

    #[tokio::test]
    async fn only_posts_are_calls() {
        let response = unary(
            &share(),
            Request::get("/").body(Body::empty()).unwrap(),
            async |_: Echo| Ok(()),
        )
        .await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.headers().get(ALLOW).unwrap(), "POST");
    }

    #[test]
    fn an_interval_is_bounded() {
        let interval = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(PING_INTERVAL, HeaderValue::from_str(text).unwrap());
            Call::new(headers).unwrap().ping_interval().as_secs()
        };
        let all = ["50", "0", "99999999", "x", "-1"].map(interval);
        assert_eq!(all, [50, 1, 3600, PING_DEFAULT, PING_DEFAULT]);
    }
}
