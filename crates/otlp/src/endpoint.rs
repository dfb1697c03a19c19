//! Where spans go, by OpenTelemetry's environment variables, and one request to there. Speaks as much HTTP/1.1 as a
//! collector needs: one POST a connection, and of the answer only its status.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::Error;

/// The variables of OpenTelemetry's specification ("OTLP Exporter Configuration").
const BASE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const DISABLED: &str = "OTEL_SDK_DISABLED";

/// OTLP/HTTP's port and path for traces.
const PORT: u16 = 4318;
const PATH: &str = "/v1/traces";

/// More of a status line is not read.
const MAX_STATUS: usize = 1024;

/// A collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
    path: String,
    headers: Vec<(String, String)>,
}

impl Endpoint {
    /// The one that the environment names, if any.
    ///
    /// # Errors
    /// What it says cannot be followed.
    pub fn from_environment() -> Result<Option<Self>, Error> {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// The same of any environment.
    ///
    /// # Errors
    /// As above.
    pub fn from_variables(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Error> {
        if lookup(DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let parse =
            |variable, value: String, tail| Self::parse(&value, tail).ok_or(Error::Endpoint { variable, value });
        let endpoint = match (lookup(TRACES), lookup(BASE)) {
            (Some(value), _) => parse(TRACES, value, "")?,
            (None, Some(value)) => parse(BASE, value, PATH)?,
            (None, None) => return Ok(None),
        };
        match lookup(PROTOCOL) {
            Some(protocol) if protocol != "http/json" => return Err(Error::Protocol(protocol)),
            _ => (),
        }
        let headers = lookup(HEADERS).map(|text| headers(&text)).transpose()?;
        Ok(Some(Self {
            headers: headers.unwrap_or_default(),
            ..endpoint
        }))
    }

    /// `http://HOST[:PORT][/PATH]`; `tail` is put behind the path.
    fn parse(text: &str, tail: &str) -> Option<Self> {
        let rest = text.strip_prefix("http://")?;
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        // IPv6 addresses stand in brackets.
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
            _ => (authority, PORT),
        };
        if host.is_empty() || host.contains('@') || !plain(host) || !plain(path) {
            return None;
        }
        Some(Self {
            host: host.to_owned(),
            port,
            path: format!("{}{tail}", path.trim_end_matches('/')),
            headers: Vec::new(),
        })
    }

    /// Posts `body`; it is taken, or an error before `limit` is over.
    pub(crate) fn post(&self, body: &[u8], limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        let mut stream = self.connect(deadline)?;
        let path = if self.path.is_empty() { "/" } else { &self.path };
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n",
            self.host,
            self.port,
            body.len()
        );
        for (name, value) in &self.headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str("\r\n");
        let mut bytes = request.into_bytes();
        bytes.extend_from_slice(body);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            stream.set_write_timeout(Some(left(deadline)?))?;
            let written = stream.write(rest)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            rest = rest.get(written..).unwrap_or_default();
        }
        let status = status(&mut stream, deadline)?;
        match status {
            200..=299 => Ok(()),
            _ => Err(io::Error::other(format!("it answered with status {status}"))),
        }
    }

    fn connect(&self, deadline: Instant) -> io::Result<TcpStream> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in (host, self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, left(deadline)?) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

/// The number in `HTTP/1.1 200 OK`.
fn status(stream: &mut TcpStream, deadline: Instant) -> io::Result<u16> {
    let mut line = Vec::new();
    let mut buffer = [0; 256];
    while !line.contains(&b'\n') && line.len() < MAX_STATUS {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut buffer)? {
            0 => break,
            count => line.extend_from_slice(buffer.get(..count).unwrap_or_default()),
        }
    }
    let text = String::from_utf8_lossy(&line);
    let number = text
        .strip_prefix("HTTP/1.")
        .and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
    number.ok_or_else(|| io::Error::other("its answer is no HTTP"))
}

/// `NAME=VALUE,NAME=VALUE`, each value percent-encoded (W3C Baggage, section 3.2.1; OpenTelemetry, "Specifying headers via
/// environment variables"); members without anything in them say nothing.
fn headers(text: &str) -> Result<Vec<(String, String)>, Error> {
    let one = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let (name, value) = (name.trim(), decoded(value.trim())?);
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let good =
            !name.is_empty() && name.bytes().all(token) && value.bytes().all(|byte| (0x20..0x7f).contains(&byte));
        good.then(|| (name.to_owned(), value))
    };
    text.split(',')
        .filter(|pair| !pair.trim().is_empty())
        .map(|pair| one(pair).ok_or_else(|| Error::Header(pair.to_owned())))
        .collect()
}

/// The text that is meant by one with `%41` for `A`; nothing if a `%` is followed by anything else.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Option<Endpoint>, Error> {
        let lookup = |name: &str| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Endpoint::from_variables(lookup)
    }

    fn place(variables: &[(&str, &str)]) -> String {
        let endpoint = from(variables).unwrap().unwrap();
        format!("{} {} {}", endpoint.host, endpoint.port, endpoint.path)
    }

    #[test]
    fn headers_are_percent_encoded() {
        let read = |text| headers(text).ok();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            read("Authorization=Basic%20YTpi%3D%3d,,x=a=b,"),
            Some(vec![pair("Authorization", "Basic YTpi=="), pair("x", "a=b")])
        );
        assert_eq!(read(""), Some(Vec::new()));
        for wrong in ["x=%", "x=%4", "x=%+1", "x=a%0d%0aHost:b", "x=%ff", "=1", "x"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_environment_says_where() {
        assert_eq!(place(&[(BASE, "http://127.0.0.1:4318")]), "127.0.0.1 4318 /v1/traces");
        assert_eq!(
            place(&[(BASE, "http://collector/otlp/")]),
            "collector 4318 /otlp/v1/traces"
        );
        assert_eq!(place(&[(BASE, "http://[::1]")]), "[::1] 4318 /v1/traces");
        assert_eq!(place(&[(BASE, "http://[::1]:99/")]), "[::1] 99 /v1/traces");
        assert_eq!(place(&[(TRACES, "http://a:1/x"), (BASE, "http://b")]), "a 1 /x");
        assert_eq!(from(&[]).unwrap(), None);
        assert_eq!(from(&[(BASE, "http://a"), (DISABLED, "TRUE")]).unwrap(), None);
        let headers = from(&[(BASE, "http://a"), (HEADERS, "x-key=abc, y = d e")])
            .unwrap()
            .unwrap()
            .headers;
        assert_eq!(headers, [("x-key".into(), "abc".into()), ("y".into(), "d e".into())]);
    }

    #[test]
    fn what_cannot_be_followed_is_said() {
        for bad in [
            "",
            "a:1",
            "https://a",
            "grpc://a",
            "http://",
            "http://a:x",
            "http://a b",
            "http://u@h",
            "http://a/\r\nX: y",
        ] {
            assert!(Endpoint::parse(bad, PATH).is_none(), "{bad}");
        }
        assert!(matches!(from(&[(BASE, "https://a")]), Err(Error::Endpoint { .. })));
        assert!(matches!(
            from(&[(BASE, "http://a"), (PROTOCOL, "grpc")]),
            Err(Error::Protocol(_))
        ));
        for bad in ["x", "=y", "a=b\r\nc: d", "a b=c"] {
            assert!(
                matches!(from(&[(BASE, "http://a"), (HEADERS, bad)]), Err(Error::Header(_))),
                "{bad}"
            );
        }
    }
}
