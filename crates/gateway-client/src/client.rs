//! Requests to a server, each by a connection of a pool: who is asked, with which key, how long is waited, and what statuses mean. Knows no
//! endpoint.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::config::AutoHeaderValue;
use ureq::http::header::RETRY_AFTER;
use ureq::http::{HeaderValue, Method, Request, Response, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, Body, SendBody};

use crate::Error;
use crate::error::plain;
use crate::resolve::Names;

/// For a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// For an answer to begin, or to go on: suspending a large sandbox takes a while.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);
/// The longest answer that is no file and no stream.
const MAX_ANSWER: u64 = 16 << 20;
/// The longest description of an error.
const MAX_COMPLAINT: u64 = 64 << 10;
/// The most pages of a list; of a hundred each.
const MAX_PAGES: usize = 1000;
/// What answers for a sandbox.
const PORT: &str = "49983";

/// A server of the API, and who asks it.
pub struct Client {
    base: String,
    pub(crate) server: Server,
    key: HeaderValue,
    agent: Agent,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

/// Whom is asked, for messages.
#[derive(Clone, Debug)]
pub(crate) struct Server(String);

impl Server {
    /// A break of an answer that had begun.
    pub(crate) fn broken(&self, error: &dyn std::fmt::Display) -> Error {
        Error::Broken {
            server: self.0.clone(),
            problem: plain(&error.to_string()),
        }
    }

    pub(crate) fn no_gateway(&self, problem: impl Into<String>) -> Error {
        Error::NoGateway {
            server: self.0.clone(),
            problem: problem.into(),
        }
    }
}

/// How one sandbox is reached at port 49983.
#[derive(Clone)]
pub struct Access {
    base: String,
    id: String,
    token: Option<String>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access")
            .field("base", &self.base)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Access {
    /// Which sandbox.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }
}

/// What an error's body says: by the REST API and at port 49983.
#[derive(Deserialize)]
struct Complaint {
    message: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Reached {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(default)]
    envd_access_token: Option<String>,
    #[serde(default)]
    domain: Option<String>,
}

/// Part of a path or of a query.
pub(crate) fn escape(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// What a server calls its domain can be one, with or without a port.
fn is_domain(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b':');
    !text.is_empty() && text.bytes().all(is_part)
}

/// `SCHEME://HOST[:PORT]` of what was given.
fn base_of(url: &str) -> Result<(String, bool), Error> {
    let bad = |problem| Error::BadUrl {
        url: plain(url),
        problem,
    };
    let uri: Uri = url.parse().map_err(|_| bad("it is no URL"))?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(bad("it begins with neither https:// nor http://"));
    };
    if authority.as_str().contains('@') {
        return Err(bad("a user or a password in it is not for it"));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(bad("there is a path behind the host"));
    }
    let host = authority.host();
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    let is_here =
        host == "localhost" || host.ends_with(".localhost") || address.is_ok_and(|address| address.is_loopback());
    match scheme {
        "https" => {}
        "http" if is_here => {}
        "http" => {
            return Err(bad(
                "without TLS everybody on the way could read the key, so http:// is for addresses of this machine alone",
            ));
        }
        _ => return Err(bad("it begins with neither https:// nor http://")),
    }
    Ok((format!("{scheme}://{authority}"), is_here))
}

impl Client {
    /// A client of the server at `url`; whose certificate is of one of `authorities` is trusted.
    ///
    /// # Errors
    /// The URL or the key cannot be one.
    pub fn new(url: &str, key: &str, authorities: Vec<Certificate<'static>>) -> Result<Self, Error> {
        let (base, is_here) = base_of(url)?;
        let mut header = HeaderValue::from_str(key).map_err(|_| Error::BadKey)?;
        header.set_sensitive(true);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(provider)
            .root_certs(RootCerts::Specific(Arc::new(authorities)))
            .build();
        let mut config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .max_redirects(0)
            // Files and streams must come as they are.
            .accept_encoding(AutoHeaderValue::None)
            .user_agent(concat!("basalt/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(PATIENCE))
            .timeout_per_write(Some(PATIENCE));
        if is_here {
            config = config.proxy(None);
        }
        Ok(Self {
            server: Server(base.clone()),
            base,
            key: header,
            agent: Agent::with_parts(config.build(), DefaultConnector::default(), Names::default()),
        })
    }

    /// Whom is asked, for messages.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server.0
    }

    /// Sends a request; what comes is an answer of success. `silence` is how long nothing may go either way.
    pub(crate) fn send(
        &self,
        request: Request<SendBody<'_>>,
        silence: Option<Duration>,
    ) -> Result<Response<Body>, Error> {
        let limited = self.agent.configure_request(request);
        let limited = limited.timeout_per_read(silence).timeout_per_write(silence).build();
        let response = self.agent.run(limited).map_err(|error| self.failure(error))?;
        self.judge(response)
    }

    fn judge(&self, mut response: Response<Body>) -> Result<Response<Body>, Error> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let after = response.headers().get(RETRY_AFTER);
        let after = after
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .map(Duration::from_secs);
        let text = response.body_mut().with_config().limit(MAX_COMPLAINT).read_to_string();
        let text = text.unwrap_or_default();
        let server = self.server.0.clone();
        let message = match serde_json::from_str::<Complaint>(&text) {
            Ok(complaint) => plain(&complaint.message),
            Err(_) if status.is_redirection() || status.as_u16() == 404 || status.as_u16() == 405 => {
                let problem = format!("status {}", status.as_u16());
                return Err(Error::NoGateway { server, problem });
            }
            Err(_) => format!("{server} gives no reason"),
        };
        Err(match status.as_u16() {
            401 => Error::Unauthorized { server, message },
            429 => Error::TooMany { message, after },
            status => Error::Refused { status, message },
        })
    }

    fn failure(&self, error: ureq::Error) -> Error {
        let server = self.server.0.clone();
        if let Some(problem) = untrusted(&error) {
            return Error::Untrusted { server, problem };
        }
        match error {
            ureq::Error::Io(error) if error.get_ref().is_some_and(|inner| inner.is::<OfInput>()) => Error::Local(error),
            ureq::Error::Timeout(which @ (ureq::Timeout::PerRead | ureq::Timeout::PerWrite)) => Error::Broken {
                server,
                problem: format!("nothing has come: {which}"),
            },
            ureq::Error::Protocol(problem) => Error::NoGateway {
                server,
                problem: plain(&problem.to_string()),
            },
            error => Error::Unreachable {
                server,
                problem: plain(&error.to_string()),
            },
        }
    }

    pub(crate) fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Response<Body>, Error> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("X-API-Key", self.key.clone());
        let payload = match body {
            Some(body) => {
                request = request.header("Content-Type", "application/json");
                SendBody::from_owned_reader(io::Cursor::new(body.to_string().into_bytes()))
            }
            None => SendBody::none(),
        };
        let request = request.body(payload).map_err(|_| Error::BadKey)?;
        self.send(request, Some(PATIENCE))
    }

    pub(crate) fn read<T: DeserializeOwned>(&self, mut response: Response<Body>) -> Result<T, Error> {
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = body.map_err(|error| self.server.broken(&error))?;
        serde_json::from_slice(&body).map_err(|error| self.server.no_gateway(plain(&error.to_string())))
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        self.read(self.ask(Method::GET, path, None)?)
    }

    pub(crate) fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Error> {
        self.read(self.ask(Method::POST, path, Some(body))?)
    }

    /// All pages of a list.
    pub(crate) fn pages<T: DeserializeOwned>(&self, path: &str, query: &str) -> Result<Vec<T>, Error> {
        let (mut all, mut token) = (Vec::new(), String::new());
        for _ in 0..MAX_PAGES {
            let next = if token.is_empty() {
                String::new()
            } else {
                format!("&nextToken={}", escape(&token))
            };
            let response = self.ask(Method::GET, &format!("{path}?limit=100{query}{next}"), None)?;
            let more = response
                .headers()
                .get("x-next-token")
                .and_then(|value| value.to_str().ok());
            let more = more.map(str::to_owned).filter(|more| !more.is_empty());
            all.append(&mut self.read::<Vec<T>>(response)?);
            match more {
                Some(more) if more != token => token = more,
                _ => return Ok(all),
            }
        }
        Err(self.server.no_gateway(format!("a list of more than {MAX_PAGES} pages")))
    }

    /// How port 49983 is reached of a sandbox that was told of. The names of a domain lead to sandboxes where the API is one of them; elsewhere
    /// headers do.
    pub(crate) fn access(&self, reached: Reached) -> Access {
        let of_domain = self.base.split_once("://").and_then(|(scheme, host)| {
            let domain = host.strip_prefix("api.")?;
            let domain = reached
                .domain
                .as_deref()
                .filter(|told| is_domain(told))
                .unwrap_or(domain);
            Some(format!("{scheme}://{PORT}-{}.{domain}", reached.sandbox_id))
        });
        Access {
            base: of_domain.unwrap_or_else(|| self.base.clone()),
            id: reached.sandbox_id,
            token: reached.envd_access_token,
        }
    }

    /// The beginning of a request to port 49983 of a sandbox, as one of its users.
    pub(crate) fn to_sandbox(
        &self,
        to: &Access,
        method: Method,
        path: &str,
        user: Option<&str>,
    ) -> ureq::http::request::Builder {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", to.base))
            .header("E2b-Sandbox-Id", &to.id)
            .header("E2b-Sandbox-Port", PORT);
        if let Some(token) = &to.token {
            request = request.header("X-Access-Token", token);
        }
        if let Some(user) = user {
            request = request.header(
                "Authorization",
                format!("Basic {}", STANDARD.encode(format!("{user}:"))),
            );
        }
        request
    }
}

/// What is read here to be sent has failed: marks an error among those of connections.
#[derive(Debug, Clone)]
pub(crate) struct OfInput(String);

impl std::fmt::Display for OfInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for OfInput {}

/// A reader of this side, whose errors are told from the connection's.
pub(crate) struct Own<R>(pub(crate) R);

impl<R: Read> Read for Own<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer);
        read.map_err(|error| io::Error::new(error.kind(), OfInput(error.to_string())))
    }
}

/// What is wrong with a certificate, if that is the error.
fn untrusted(error: &ureq::Error) -> Option<String> {
    let tls = match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref().and_then(|inner| inner.downcast_ref()),
        _ => None,
    };
    match tls? {
        rustls::Error::InvalidCertificate(problem) => Some(problem.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_servers_are_told_from_others() {
        let base = |url: &str| base_of(url).map(|(base, _)| base).map_err(|error| error.to_string());
        assert_eq!(base("https://api.example/").unwrap(), "https://api.example");
        assert_eq!(base("http://127.0.0.1:3000").unwrap(), "http://127.0.0.1:3000");
        assert_eq!(base("http://[::1]:3000").unwrap(), "http://[::1]:3000");
        assert!(
            base("http://192.0.2.1:3000")
                .unwrap_err()
                .contains("could read the key")
        );
        for (url, says) in [
            ("127.0.0.1:3000", "https://"),
            ("ftp://x", "neither"),
            ("https://u:p@x", "a user"),
            ("https://x/y", "a path"),
            ("https://x/?y", "a path"),
            ("", "no URL"),
        ] {
            assert!(base(url).unwrap_err().contains(says), "{url}");
        }
    }

    #[test]
    fn sandboxes_are_reached_by_names_where_the_api_is() {
        let access = |url: &str, domain: Option<&str>| {
            let client = Client::new(url, "k", Vec::new()).unwrap();
            let access = client.access(Reached {
                sandbox_id: "s1".to_owned(),
                envd_access_token: None,
                domain: domain.map(str::to_owned),
            });
            access.base
        };
        assert_eq!(
            access("http://127.0.0.1:3000", Some("sb.example")),
            "http://127.0.0.1:3000"
        );
        assert_eq!(
            access("https://api.sb.example:3443", Some("sb.example:3443")),
            "https://49983-s1.sb.example:3443"
        );
        assert_eq!(access("https://api.sb.example", None), "https://49983-s1.sb.example");
    }
}
