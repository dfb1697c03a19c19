//! Speaking with one registry about one repository: over TLS or, where that is allowed, without; requests with
//! whatever the registry's challenges ask for; and what its statuses and a connection's faults mean.
//!
//! Knows no blob and no manifest: callers say which path, and which statuses they understand.

use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use ureq::config::AutoHeaderValue;
use ureq::http::header::{AUTHORIZATION, RETRY_AFTER, WWW_AUTHENTICATE};
use ureq::http::{HeaderValue, Method, Request, Response, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, SendBody, Timeout};

use crate::certificates::authorities;
use crate::challenge::{Challenge, Scheme};
use crate::job::{CONNECT, Failure, Job, Peer};
use crate::location::is_loopback;
use crate::{Credentials, Error};

/// A token server's answer and a registry's complaint are no longer.
const ANSWER: u64 = 1 << 20;
/// Who we say that we are to a token server that wants to know.
const CLIENT: &str = "basalt";

/// One registry, one repository in it.
pub(crate) struct Session<'a> {
    pub(crate) job: &'a Job<'a>,
    /// For messages.
    pub(crate) host: String,
    pub(crate) repository: String,
    /// `pull`, or `pull,push`.
    actions: &'static str,
    /// `https://HOST`.
    base: String,
    /// HTTP without TLS is allowed: this machine itself, or it was said so.
    plain: bool,
    /// It was said so.
    insecure: bool,
    agent: Agent,
    credentials: Option<Credentials>,
    /// The header that the last challenge was answered with.
    authorization: Mutex<Option<HeaderValue>>,
}

/// A request.
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    /// Below the repository, or a whole URL.
    pub(crate) path: &'a str,
    pub(crate) headers: &'a [(&'a str, &'a str)],
    /// Statuses that the caller understands, besides those of success.
    pub(crate) understood: &'a [u16],
    /// For messages.
    pub(crate) what: &'a str,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

#[derive(Deserialize)]
struct Complaints {
    errors: Vec<Complaint>,
}

#[derive(Deserialize)]
struct Complaint {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl<'a> Session<'a> {
    /// Finds out how the registry at `host` (`HOST[:PORT][/PREFIX]`) is spoken to.
    pub(crate) fn open(
        job: &'a Job<'a>,
        host: &str,
        peer: &Peer,
        repository: &str,
        actions: &'static str,
    ) -> Result<Self, Error> {
        let (host, prefix) = host.split_once('/').unwrap_or((host, ""));
        let prefix = prefix.trim_matches('/');
        let repository = if prefix.is_empty() {
            repository.to_owned()
        } else {
            format!("{prefix}/{repository}")
        };
        let schemes: &[&str] = if peer.insecure || is_loopback(host) {
            &["https", "http"]
        } else {
            &["https"]
        };
        let agent = agent(job, host, peer.insecure, schemes.len() == 1)?;
        job.watch_over(&agent);
        let mut session = Self {
            job,
            host: host.to_owned(),
            repository,
            actions,
            base: String::new(),
            plain: schemes.len() > 1,
            insecure: peer.insecure,
            agent,
            credentials: peer.credentials.clone(),
            authorization: Mutex::new(peer.credentials.as_ref().and_then(Credentials::bearer)),
        };
        let base = job.retry(|_| session.probe(schemes), |_, error| error)?;
        session.base = base;
        Ok(session)
    }

    /// The first scheme by which there is an answer. Without TLS is tried only where it is allowed, and not where there is
    /// TLS with a certificate that cannot be trusted.
    fn probe(&self, schemes: &[&str]) -> Result<String, Failure> {
        let mut failed = None;
        for scheme in schemes {
            let base = format!("{scheme}://{}", self.host);
            let ask = Ask {
                method: Method::GET,
                path: &format!("{base}/v2/"),
                headers: &[],
                understood: &[401, 403],
                what: "its API",
            };
            let failure = match self.send(&ask, None).and_then(|response| self.judge(&ask, response)) {
                Ok(_) => return Ok(base),
                Err(failure) => failure,
            };
            let untrusted = matches!(failure, Failure::Final(Error::Untrusted { .. }));
            failed = Some(failure);
            if untrusted {
                break;
            }
        }
        Err(match failed {
            Some(Failure::Final(Error::Status {
                status: 404,
                host,
                what,
                ..
            })) => Failure::Final(Error::BadAnswer {
                host,
                what,
                problem: "it does not have one".to_owned(),
            }),
            Some(failure) => failure,
            None => Failure::Final(self.unreachable("there is no way to it".to_owned())),
        })
    }

    /// Sends a request, and again with what its challenge asks for. `body` makes the body anew each time.
    pub(crate) fn ask(
        &self,
        ask: &Ask<'_>,
        body: Option<&dyn Fn() -> Box<dyn Read>>,
    ) -> Result<Response<Body>, Failure> {
        let response = self.send(ask, body)?;
        if response.status() != 401 {
            return self.judge(ask, response);
        }
        let header = self.answer(&response)?;
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(header);
        drop(response);
        let response = self.send(ask, body)?;
        if response.status() == 401 {
            return Err(self.unauthorized().into());
        }
        self.judge(ask, response)
    }

    fn send(&self, ask: &Ask<'_>, body: Option<&dyn Fn() -> Box<dyn Read>>) -> Result<Response<Body>, Failure> {
        self.job.stopped()?;
        let own = ask.path.starts_with('/');
        let url = if own {
            format!("{}/v2/{}{}", self.base, self.repository, ask.path)
        } else {
            ask.path.to_owned()
        };
        let mut request = Request::builder().method(ask.method.clone()).uri(&url);
        for (name, value) in ask.headers {
            request = request.header(*name, *value);
        }
        // What a registry sends us on to does not learn who we are.
        if own || same_origin(&url, &self.base) {
            let header = self
                .authorization
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            if let Some(header) = header {
                request = request.header(AUTHORIZATION, header);
            }
        }
        let payload = body.map_or_else(SendBody::none, |body| SendBody::from_owned_reader(body()));
        let request = request.body(payload).map_err(|error| self.bad(ask.what, &error))?;
        self.run(request).map_err(|error| self.failure(&error, ask.what))
    }

    fn run(&self, request: Request<SendBody<'static>>) -> Result<Response<Body>, ureq::Error> {
        let limited = self
            .agent
            .configure_request(request)
            .timeout_global(Some(self.job.left()))
            .build();
        self.agent.run(limited)
    }

    /// Passes on what the caller understands; everything else is an error.
    fn judge(&self, ask: &Ask<'_>, mut response: Response<Body>) -> Result<Response<Body>, Failure> {
        let status = response.status().as_u16();
        if response.status().is_success() || ask.understood.contains(&status) {
            return Ok(response);
        }
        let after = retry_after(&response);
        let detail = complaint(&mut response);
        let error = match status {
            401 => self.unauthorized(),
            403 => Error::Denied {
                host: self.host.clone(),
                repository: self.repository.clone(),
                detail,
            },
            _ => Error::Status {
                host: self.host.clone(),
                what: ask.what.to_owned(),
                status,
                detail,
            },
        };
        Err(match status {
            408 | 429 | 500 | 502..=504 => Failure::Transient(error, after),
            _ => Failure::Final(error),
        })
    }

    /// The header that answers the challenges in `response`.
    fn answer(&self, response: &Response<Body>) -> Result<HeaderValue, Failure> {
        let headers = response.headers().get_all(WWW_AUTHENTICATE);
        let challenges: Vec<_> = headers
            .iter()
            .filter_map(|header| header.to_str().ok())
            .flat_map(Challenge::parse)
            .collect();
        let with = |scheme| challenges.iter().find(|challenge| challenge.scheme == scheme);
        if let Some(challenge) = with(Scheme::Bearer) {
            let given = self.credentials.as_ref().and_then(Credentials::bearer);
            return match given {
                Some(_) => Err(self.unauthorized().into()),
                None => self.token(challenge),
            };
        }
        let basic = self.credentials.as_ref().and_then(Credentials::basic);
        match (with(Scheme::Basic), basic) {
            (Some(_), Some(header)) => Ok(header),
            (Some(_), None) => Err(self.unauthorized().into()),
            (None, _) => Err(self
                .bad("its challenge", &"it wants neither basic nor bearer authentication")
                .into()),
        }
    }

    /// A token from the server that the challenge names: by GET as distribution's token specification has it, or by POST
    /// (OAuth2) where there is a refresh token.
    fn token(&self, challenge: &Challenge) -> Result<HeaderValue, Failure> {
        const WHAT: &str = "a token";
        let parameter = |name: &str| challenge.parameters.get(name).map(String::as_str);
        let realm = parameter("realm").unwrap_or_default();
        let uri: Uri = realm.parse().map_err(|_| self.bad(WHAT, &"its realm is no URL"))?;
        // A password in the clear goes no further than this machine, unless all of it was said to be insecure.
        let near = self.plain && uri.host().is_some_and(is_loopback);
        let plain = uri.scheme_str() == Some("http") && (self.insecure || near);
        if uri.host().is_none() || (uri.scheme_str() != Some("https") && !plain) {
            return Err(self.bad(WHAT, &"its realm is no https URL").into());
        }
        let mut scopes = vec![format!("repository:{}:{}", self.repository, self.actions)];
        scopes.extend(
            parameter("scope")
                .map(str::to_owned)
                .filter(|scope| *scope != scopes[0]),
        );
        let service = parameter("service").map(|service| ("service", service.to_owned()));
        let refresh = self.credentials.as_ref().and_then(Credentials::identity_token);
        let sent = if let Some(refresh) = refresh {
            let mut form = vec![
                ("grant_type", "refresh_token".to_owned()),
                ("client_id", CLIENT.to_owned()),
                ("refresh_token", refresh.expose().to_owned()),
                ("scope", scopes.join(" ")),
            ];
            form.extend(service);
            let request = self
                .agent
                .post(realm)
                .config()
                .timeout_global(Some(self.job.left()))
                .build();
            request.send_form(form)
        } else {
            let query = service
                .into_iter()
                .chain(scopes.into_iter().map(|scope| ("scope", scope)));
            let mut request = self.agent.get(realm).query_pairs(query);
            if let Some(header) = self.credentials.as_ref().and_then(Credentials::basic) {
                request = request.header(AUTHORIZATION, header);
            }
            request.config().timeout_global(Some(self.job.left())).build().call()
        };
        let response = sent.map_err(|error| self.failure(&error, WHAT))?;
        let ask = Ask {
            method: Method::GET,
            path: realm,
            headers: &[],
            understood: &[],
            what: WHAT,
        };
        // A refresh token that has expired is a bad request to OAuth2.
        if refresh.is_some() && response.status() == 400 {
            return Err(self.unauthorized().into());
        }
        let text = self.text(self.judge(&ask, response)?, WHAT, ANSWER)?;
        token_in(&text).map_err(|problem| self.bad(WHAT, &problem).into())
    }

    /// The URL that a `Location` means.
    pub(crate) fn place(&self, location: &str) -> Option<String> {
        if location.starts_with('/') {
            return Some(format!("{}{location}", self.base));
        }
        let whole = location.starts_with("https://") || (self.plain && location.starts_with("http://"));
        whole.then(|| location.to_owned())
    }

    /// The whole of a small answer.
    pub(crate) fn text(&self, response: Response<Body>, what: &str, limit: u64) -> Result<Vec<u8>, Failure> {
        let read = response.into_body().into_with_config().limit(limit).read_to_vec();
        read.map_err(|error| match error {
            ureq::Error::BodyExceedsLimit(_) => self.bad(what, &format!("more than {limit} bytes")).into(),
            error => self.failure(&error, what),
        })
    }

    /// What a fault below HTTP means.
    pub(crate) fn failure(&self, error: &ureq::Error, what: &str) -> Failure {
        if let Some(rustls) = inner_tls(error) {
            let problem = rustls.to_string();
            let host = self.host.clone();
            return match rustls {
                rustls::Error::InvalidCertificate(_) => Failure::Final(Error::Untrusted { host, problem }),
                rustls::Error::InvalidMessage(_) => Failure::Connect(Error::Unreachable {
                    host,
                    problem:
                        "it does not speak TLS, which is all that is spoken with it unless it is said to be insecure"
                            .to_owned(),
                }),
                _ => Failure::Connect(Error::Unreachable { host, problem }),
            };
        }
        let stall = self.job.options.stall.as_secs();
        match error {
            ureq::Error::Timeout(Timeout::Global) => {
                let seconds = self.job.options.deadline.as_secs();
                Failure::Final(Error::Deadline { seconds })
            }
            ureq::Error::Timeout(Timeout::PerRead | Timeout::PerWrite) => {
                Failure::Transient(self.unreachable(format!("no answer for {what} within {stall} s")), None)
            }
            ureq::Error::Timeout(_) => Failure::Connect(self.unreachable(format!("no connection within {CONNECT:?}"))),
            ureq::Error::HostNotFound => Failure::Connect(self.unreachable("there is no such host".to_owned())),
            ureq::Error::ConnectionFailed => Failure::Connect(self.unreachable("no connection".to_owned())),
            ureq::Error::Io(io) if io.kind() == std::io::ErrorKind::ConnectionRefused => {
                Failure::Connect(self.unreachable(io.to_string()))
            }
            ureq::Error::Io(io) => Failure::Transient(self.unreachable(io.to_string()), None),
            ureq::Error::Protocol(_) => Failure::Transient(self.bad(what, error), None),
            _ => Failure::Final(self.bad(what, error)),
        }
    }

    fn unreachable(&self, problem: String) -> Error {
        let host = self.host.clone();
        Error::Unreachable { host, problem }
    }

    pub(crate) fn bad(&self, what: &str, problem: &dyn std::fmt::Display) -> Error {
        bad_answer(&self.host, what, problem)
    }

    fn unauthorized(&self) -> Error {
        let (host, repository) = (self.host.clone(), self.repository.clone());
        match self.credentials {
            Some(_) => Error::WrongCredentials { host, repository },
            None => Error::NeedsCredentials { host, repository },
        }
    }
}

fn agent(job: &Job<'_>, host: &str, insecure: bool, https_only: bool) -> Result<Agent, Error> {
    let roots = if insecure {
        Vec::new()
    } else {
        authorities(host, &job.options.certificates, &job.options.authorities)?
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = TlsConfig::builder()
        .unversioned_rustls_crypto_provider(provider)
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .disable_verification(insecure)
        .build();
    let mut config = Agent::config_builder()
        .tls_config(tls)
        .http_status_as_error(false)
        .https_only(https_only)
        .max_redirects(5)
        // A blob must come as it is.
        .accept_encoding(AutoHeaderValue::None)
        .user_agent(concat!("basalt/", env!("CARGO_PKG_VERSION")))
        .timeout_resolve(Some(CONNECT))
        .timeout_connect(Some(CONNECT))
        .timeout_per_read(Some(job.options.stall))
        .timeout_per_write(Some(job.options.stall))
        .max_idle_connections_per_host(job.options.parallel.max(1));
    if is_loopback(host) {
        config = config.proxy(None);
    }
    Ok(config.build().new_agent())
}

/// An answer that is not what it should be.
pub(crate) fn bad_answer(host: &str, what: &str, problem: &dyn std::fmt::Display) -> Error {
    Error::BadAnswer {
        host: host.to_owned(),
        what: what.to_owned(),
        problem: problem.to_string(),
    }
}

/// `Authorization` with the token in a token server's answer, or what is wrong with that.
pub(crate) fn token_in(answer: &[u8]) -> Result<HeaderValue, &'static str> {
    let token: Token = serde_json::from_slice(answer).map_err(|_| "it is no JSON with a token")?;
    let token = token.token.or(token.access_token).unwrap_or_default();
    bearer(&token).ok_or("it is no token")
}

/// `Authorization` with a token, not shown by anything that prints it; `None` for what no header can have in it.
pub(crate) fn bearer(token: &str) -> Option<HeaderValue> {
    sensitive(format!("Bearer {token}")).filter(|_| !token.is_empty())
}

/// `Authorization` with name and password.
pub(crate) fn basic(username: &str, password: &str) -> Option<HeaderValue> {
    sensitive(format!("Basic {}", STANDARD.encode(format!("{username}:{password}"))))
}

fn sensitive(value: String) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(value).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn same_origin(url: &str, base: &str) -> bool {
    url.strip_prefix(base).is_some_and(|rest| rest.starts_with('/'))
}

/// TLS's own error, which a handshake wraps into one of I/O.
fn inner_tls(error: &ureq::Error) -> Option<&rustls::Error> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(io) => io.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// Seconds only: a date would have us trust two clocks.
fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let header = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    header.parse().ok().map(Duration::from_secs)
}

/// What the registry says of its own error, fit for a message.
fn complaint(response: &mut Response<Body>) -> String {
    let text = response.body_mut().with_config().limit(ANSWER).read_to_vec();
    complaint_in(&text.unwrap_or_default())
}

/// The first of the errors in the body of an answer.
pub(crate) fn complaint_in(body: &[u8]) -> String {
    let complaints = serde_json::from_slice::<Complaints>(body).ok();
    let Some(first) = complaints.and_then(|complaints| complaints.errors.into_iter().next()) else {
        return String::new();
    };
    let said = if first.message.is_empty() {
        first.code
    } else {
        first.message
    };
    let said: String = said.chars().filter(|char| !char.is_control()).take(200).collect();
    if said.is_empty() { said } else { format!(" ({said})") }
}
