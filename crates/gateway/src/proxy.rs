//! Requests passed on to a server in a sandbox, by HTTP/1.1 over a connection that leads there; what it answers comes back as it comes,
//! and a protocol that both agree on to change to (websockets) is passed as bytes. Neither side is trusted: heads are bounded, and so is
//! how long the first line of an answer may take. Knows no sandbox.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header};
use hyper::body::Frame;
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;

use crate::limits::Seat;
use crate::places::Place;

/// How long a server may take to begin an answer.
const FIRST_LINE: Duration = Duration::from_secs(600);

/// The largest head of an answer, and the most fields in it.
const MAX_HEAD: usize = 64 << 10;
const MAX_FIELDS: usize = 128;

/// Fields that are about one connection, and not about the request (RFC 9110, 7.6.1).
const OF_CONNECTION: [HeaderName; 6] = [
    CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    HeaderName::from_static("keep-alive"),
];

/// Why a request could not be passed on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProxyError {
    /// What listens there does not speak HTTP, or broke off.
    #[error("what listens there did not answer by HTTP")]
    Http(#[from] hyper::Error),
    /// It took too long.
    #[error("no answer has begun in {} s", FIRST_LINE.as_secs())]
    Late,
}

impl ProxyError {
    /// What whoever asked is told.
    pub(crate) fn public(&self) -> &'static str {
        match self {
            Self::Http(_) => "The sandbox is running but what listens at the port did not answer by HTTP",
            Self::Late => "The sandbox did not answer in time",
        }
    }

    /// With this status.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Http(_) => StatusCode::BAD_GATEWAY,
            Self::Late => StatusCode::GATEWAY_TIMEOUT,
        }
    }
}

/// Passes a request on over a connection to the server that it is for.
pub(crate) async fn pass(
    stream: UnixStream,
    mut request: Request<Body>,
    seat: Seat,
) -> Result<Response<Body>, ProxyError> {
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_FIELDS)
        .handshake::<_, Body>(TokioIo::new(stream))
        .await?;
    // It ends with the answer's body, or when that is dropped, or goes on as another protocol.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            log::debug!("a connection into a sandbox ended: {error}");
        }
    });
    let wanted = upgrade_of(request.headers());
    let client = wanted.is_some().then(|| hyper::upgrade::on(&mut request));
    let place = request.extensions().get::<Place>().cloned();
    prepare(&mut request, wanted.as_ref());
    let sent = tokio::time::timeout(FIRST_LINE, sender.send_request(request)).await;
    let mut response = sent.map_err(|_| ProxyError::Late)??;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(client) = client
    {
        let server = hyper::upgrade::on(&mut response);
        let agreed = response.headers().get(UPGRADE).cloned();
        tokio::spawn(splice(client, server, (seat, place)));
        strip(response.headers_mut());
        switch(response.headers_mut(), agreed);
        return Ok(response.map(|_| Body::empty()));
    }
    strip(response.headers_mut());
    Ok(hold(response.map(Body::new), seat))
}

/// The protocol that a request wants to change to.
fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let says = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let is_wanted = says
        .flat_map(|value| value.split(','))
        .any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| is_wanted).cloned()
}

/// The request as the next one is to see it: the path alone, as to a server, and nothing of the connection that it came by.
fn prepare(request: &mut Request<Body>, upgrade: Option<&HeaderValue>) {
    // A request by an absolute address has its host there.
    if let Some(host) = request
        .uri()
        .authority()
        .and_then(|host| HeaderValue::from_str(host.as_str()).ok())
    {
        request.headers_mut().insert(header::HOST, host);
    }
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = path.map_or_else(|| Uri::from_static("/"), Uri::from);
    *request.version_mut() = Version::HTTP_11;
    strip(request.headers_mut());
    switch(request.headers_mut(), upgrade.cloned());
}

fn switch(headers: &mut HeaderMap, protocol: Option<HeaderValue>) {
    if let Some(protocol) = protocol {
        headers.insert(UPGRADE, protocol);
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
}

/// Removes what is about a connection: the known fields, and those that `Connection` names.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|word| word.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&OF_CONNECTION).chain([&UPGRADE]) {
        // The length is hyper's to know, and a body without one would be cut.
        if *name != header::TRANSFER_ENCODING && *name != header::CONTENT_LENGTH {
            headers.remove(name);
        }
    }
}

/// Joins two connections that have changed their protocol, until both have ended: so long they have the sandbox's seat and the client's place.
async fn splice(client: OnUpgrade, server: OnUpgrade, held: (Seat, Option<Place>)) {
    let joined = async {
        let (client, server) = tokio::try_join!(client, server)?;
        let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
        // One that breaks off has ended, too.
        drop(copy_bidirectional(&mut client, &mut server).await);
        Ok::<_, hyper::Error>(())
    };
    if let Err(error) = joined.await {
        log::debug!("a connection did not change its protocol: {error}");
    }
    drop(held);
}

/// A response whose sandbox's seat is taken until its body has ended.
pub(crate) fn hold(response: Response<Body>, seat: Seat) -> Response<Body> {
    response.map(|body| Body::new(Held { body, _seat: seat }))
}

struct Held {
    body: Body,
    _seat: Seat,
}

impl hyper::body::Body for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()));
        pairs.collect()
    }

    #[test]
    fn what_is_about_a_connection_goes_no_further() {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = Uri::from_static("http://3000-a.example/x?y=z");
        *request.headers_mut() = headers(&[
            ("connection", "close, X-Own, upgrade, content-length"),
            ("x-own", "1"),
            ("keep-alive", "1"),
            ("te", "trailers"),
            ("proxy-authorization", "x"),
            ("upgrade", "websocket"),
            ("content-length", "0"),
            ("host", "other"),
            ("accept", "*/*"),
        ]);
        let wanted = upgrade_of(request.headers());
        prepare(&mut request, wanted.as_ref());
        assert_eq!(request.uri(), "/x?y=z");
        let expected = [
            ("accept", "*/*"),
            ("connection", "upgrade"),
            ("content-length", "0"),
            ("host", "3000-a.example"),
            ("upgrade", "websocket"),
        ];
        assert_eq!(*request.headers(), headers(&expected));
    }

    #[test]
    fn a_protocol_is_changed_only_if_the_connection_says_so() {
        assert!(upgrade_of(&headers(&[("upgrade", "websocket")])).is_none());
        assert!(upgrade_of(&headers(&[("connection", "upgrade")])).is_none());
        let both = headers(&[("upgrade", "websocket"), ("connection", "keep-alive, Upgrade")]);
        assert_eq!(upgrade_of(&both).unwrap(), "websocket");
    }
}
