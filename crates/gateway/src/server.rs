//! The listeners: connections accepted, bounded in number at each, and served by HTTP/1.1 until the gateway is to end; then those that are
//! being served have some time. Knows no endpoint, and no certificate.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, Request, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;
use tower::ServiceExt;

use crate::api;
use crate::gateway::Gateway;
use crate::leftovers;
use crate::places::{Place, Places, counted_as};
use crate::ports;
use crate::router::{Target, target};
use crate::sampler;
use crate::tls::Tls;

/// How long the head of a request may take to come, from the end of the request before on. Clients keep connections for later requests, up
/// to 90 s (reqwest, in the SDK for Python): a connection that ends here before it ends there may end just when it is used again, and the
/// client's request with it.
const HEAD: Duration = Duration::from_secs(120);

/// The largest head of a request, and the most fields in it.
const MAX_HEAD: usize = 64 << 10;
const MAX_FIELDS: usize = 128;

/// How long those have that are being served when the gateway is to end.
const DRAIN: Duration = Duration::from_secs(30);

/// Between two attempts to accept somebody when the host has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Marks a request that has come by TLS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByTls;

/// What answers, wherever requests come from.
#[derive(Clone)]
pub struct Service {
    gateway: Arc<Gateway>,
    api: Router,
    by_tls: bool,
}

impl Service {
    /// Of this gateway.
    pub fn new(gateway: Arc<Gateway>) -> Self {
        let api = api::router(&gateway);
        Self {
            gateway,
            api,
            by_tls: false,
        }
    }

    /// The same for requests that come by TLS.
    fn by_tls(self) -> Self {
        Self { by_tls: true, ..self }
    }

    /// Answers a request.
    pub async fn answer(&self, mut request: Request<Body>) -> Response {
        if self.by_tls {
            request.extensions_mut().insert(ByTls);
        }
        let target = target(self.gateway.domain.as_ref(), request.uri(), request.headers());
        let asked = log::log_enabled!(log::Level::Debug).then(|| Asked::of(&target, &request));
        let response = match target {
            Target::Port { id, port } => ports::serve(&self.gateway, &id, port, request).await,
            Target::NoSandbox(text) => ports::not_found(&text),
            Target::Api => match self.api.clone().oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
        };
        if let Some(asked) = asked {
            asked.log(response.status());
        }
        response
    }
}

/// The longest agent of a client in the log.
const MAX_AGENT: usize = 256;

/// A request as the log has it: without its query, which may be signed, and without a path where that is an application's.
struct Asked {
    text: String,
    agent: String,
    began: Instant,
}

impl Asked {
    fn of(target: &Target, request: &Request<Body>) -> Self {
        let (method, path) = (request.method(), request.uri().path());
        let text = match target {
            Target::Api => format!("api {method} {path}"),
            Target::Port { id, port: envd::PORT } => format!("envd {id} {method} {path}"),
            Target::Port { id, port } => format!("port {id} {method} {port}"),
            Target::NoSandbox(_) => format!("none {method}"),
        };
        let agent = request.headers().get(header::USER_AGENT);
        let agent = String::from_utf8_lossy(agent.map(HeaderValue::as_bytes).unwrap_or_default());
        Self {
            text,
            agent: agent.chars().take(MAX_AGENT).collect(),
            began: Instant::now(),
        }
    }

    /// When the answer's head is there; its body may be a stream.
    fn log(&self, status: StatusCode) {
        let (text, micros) = (&self.text, self.began.elapsed().as_micros());
        log::debug!("request {text} {} {micros} us {:?}", status.as_u16(), self.agent);
    }
}

/// Where requests come from.
pub struct Listeners {
    /// By HTTP as it is.
    pub plain: TcpListener,
    /// By TLS.
    pub tls: Option<(TcpListener, Arc<Tls>)>,
}

impl Listeners {
    /// Without TLS.
    pub fn plain(plain: TcpListener) -> Self {
        Self { plain, tls: None }
    }
}

/// Serves until `stop` says so, and then until nobody is being served, or the time for that is over.
///
/// # Errors
/// Nobody can be accepted.
pub async fn serve(gateway: Arc<Gateway>, listeners: Listeners, stop: watch::Receiver<bool>) -> io::Result<()> {
    let leftovers = tokio::spawn(leftovers::remove_always(Arc::clone(&gateway)));
    let sampler = tokio::spawn(sampler::run(Arc::clone(&gateway), stop.clone()));
    let left = gateway.recover_builds().await.map_err(io::Error::other)?;
    let keeps_house = tokio::spawn(Arc::clone(&gateway).keep_house(left));
    let entrance = Entrance {
        service: Service::new(Arc::clone(&gateway)),
        stop,
    };
    let (plain_places, tls_places) = (gateway.limits.plain.clone(), gateway.limits.tls.clone());
    let plain = entrance.clone().accept(listeners.plain, None, plain_places.clone());
    match listeners.tls {
        Some((listener, tls)) => {
            tokio::join!(plain, entrance.accept(listener, Some(tls), tls_places.clone()));
        }
        None => plain.await,
    }
    for task in [leftovers, sampler, keeps_house] {
        task.abort();
    }
    gateway.end_builds();
    let end = Instant::now() + DRAIN;
    let nobody = async { tokio::join!(plain_places.all_free(), tls_places.all_free()) };
    let all = tokio::time::timeout_at(end, nobody).await;
    // Those too whose client has left.
    if tokio::time::timeout_at(end, gateway.limits.no_changes()).await.is_err() {
        log::warn!(
            "changes are cut, as they were still being made after {} s",
            DRAIN.as_secs()
        );
    }
    if all.is_err() {
        let left = plain_places.taken().saturating_add(tls_places.taken());
        log::warn!(
            "{left} connections are cut, as they were still being served after {} s",
            DRAIN.as_secs()
        );
    }
    Ok(())
}

/// What all connections have in common.
#[derive(Clone)]
struct Entrance {
    service: Service,
    stop: watch::Receiver<bool>,
}

impl Entrance {
    /// Lets clients in until the gateway is to end. Handshakes are each connection's own affair: nobody waits here for another one's.
    async fn accept(mut self, listener: TcpListener, tls: Option<Arc<Tls>>, places: Places) {
        loop {
            // Whoever comes when all places are taken waits in the listener's queue.
            let free = tokio::select! {
                free = places.free() => free,
                () = told(&mut self.stop) => return,
            };
            let Some(free) = free else { return };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = told(&mut self.stop) => return,
            };
            match accepted {
                Ok((stream, peer)) => match places.take(free, peer.ip()) {
                    Some(place) => {
                        tokio::spawn(self.clone().admit((stream, peer), tls.clone(), place));
                    }
                    None => log::debug!("{} has as many connections as one address may have", peer.ip()),
                },
                Err(error) => {
                    log::warn!("nobody can be accepted now: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn admit(mut self, (stream, peer): (TcpStream, SocketAddr), tls: Option<Arc<Tls>>, place: Place) {
        // Answers are written at once; a failure here makes them slower at most.
        drop(stream.set_nodelay(true));
        let Some(tls) = tls else {
            return serve_one(self.service, stream, self.stop, place).await;
        };
        let client = counted_as(peer.ip());
        let shaken = tokio::select! {
            shaken = tls.accept(stream, &client) => shaken,
            () = told(&mut self.stop) => return,
        };
        match shaken {
            Ok(stream) => serve_one(self.service.by_tls(), stream, self.stop, place).await,
            Err(error) => log::debug!("a client's handshake failed: {error}"),
        }
    }
}

/// Waits until the gateway is to end, or nobody is left who could say so.
async fn told(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await);
}

async fn serve_one(
    service: Service,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    mut stop: watch::Receiver<bool>,
    place: Place,
) {
    let answer = service_fn(move |mut request: Request<Incoming>| {
        let service = service.clone();
        // It is for whoever takes the connection over.
        request.extensions_mut().insert(place.clone());
        async move { Ok::<_, Infallible>(service.answer(request.map(Body::new)).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_FIELDS)
        .serve_connection(TokioIo::new(stream), answer)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = told(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        log::debug!("a client's connection ended: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_has_neither_queries_nor_paths_of_applications() {
        let request = Request::get("/files?path=/a&signature=v1_secret")
            .header(header::USER_AGENT, "x".repeat(1000))
            .body(Body::empty())
            .unwrap();
        let port = |port| Target::Port {
            id: "0123456789ab".into(),
            port,
        };
        for (target, text) in [
            (Target::Api, "api GET /files"),
            (port(envd::PORT), "envd 0123456789ab GET /files"),
            (port(3000), "port 0123456789ab GET 3000"),
            (Target::NoSandbox("../x".into()), "none GET"),
        ] {
            let asked = Asked::of(&target, &request);
            assert_eq!((asked.text.as_str(), asked.agent.len()), (text, MAX_AGENT));
        }
    }
}
