//! Where a request goes: to the API, or to a port of a sandbox. The host's name comes first, as it is what a browser cannot be made to lie
//! about; then headers, by which the SDKs reach sandboxes without names of their own. Asks nobody.
//!
//! ```text
//!  Host: <port>-<id>.<domain>                    ─▶ that port
//!  Host: api.<domain>                            ─▶ API
//!  E2b-Sandbox-Id, E2b-Sandbox-Port (49983)      ─▶ that port
//!  anything else                                 ─▶ API
//! ```

use http::{HeaderMap, Uri, header};

use crate::api::sandbox_id;
use crate::domain_name::Domain;

/// The headers.
pub(crate) const SANDBOX_ID: &str = "e2b-sandbox-id";
pub(crate) const SANDBOX_PORT: &str = "e2b-sandbox-port";

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// To the API.
    Api,
    /// To a sandbox's port.
    Port {
        /// Which sandbox.
        id: String,
        /// Which port.
        port: u16,
    },
    /// To a sandbox that cannot be, with what was written.
    NoSandbox(String),
}

/// Where this one goes.
pub(crate) fn target(domain: Option<&Domain>, uri: &Uri, headers: &HeaderMap) -> Target {
    let host = host(uri, headers).unwrap_or_default();
    if let Some(label) = domain.and_then(|domain| label_of(&host, domain.name())) {
        match label {
            "api" => return Target::Api,
            label => {
                if let Some(target) = of_label(label) {
                    return target;
                }
            }
        }
    }
    let Some(id) = headers.get(SANDBOX_ID) else {
        return Target::Api;
    };
    let id = String::from_utf8_lossy(id.as_bytes());
    let port = match headers.get(SANDBOX_PORT) {
        Some(port) => port.to_str().ok().and_then(|port| port.parse().ok()),
        None => Some(envd::PORT),
    };
    port_of(&id, port)
}

fn port_of(id: &str, port: Option<u16>) -> Target {
    match (sandbox_id(id), port.filter(|port| *port != 0)) {
        (Some(id), Some(port)) => Target::Port {
            id: id.to_owned(),
            port,
        },
        _ => Target::NoSandbox(id.chars().take(64).collect()),
    }
}

/// The host that is asked for, in lower case and without a port.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let text = match uri.host() {
        Some(host) => host,
        None => headers.get(header::HOST)?.to_str().ok()?,
    };
    let host = match text.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => text,
    };
    Some(host.to_ascii_lowercase())
}

/// What stands before the domain's name.
fn label_of<'a>(host: &'a str, domain: &str) -> Option<&'a str> {
    let label = host.strip_suffix(domain)?.strip_suffix('.')?;
    (!label.is_empty() && !label.contains('.')).then_some(label)
}

/// A label that names a port: `<port>-<id>`. Others are none of a sandbox's.
fn of_label(label: &str) -> Option<Target> {
    let (port, id) = label.split_once('-')?;
    let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| port_of(id, port.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789ab";

    fn of(host: &str, headers: &[(&'static str, &str)]) -> Target {
        let mut all: HeaderMap = headers
            .iter()
            .map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        all.insert(header::HOST, host.parse().unwrap());
        target(Some(&"sb.example:8443".parse().unwrap()), &Uri::from_static("/x"), &all)
    }

    fn port(port: u16) -> Target {
        Target::Port { id: ID.into(), port }
    }

    #[test]
    fn names_and_headers_lead_to_ports() {
        assert_eq!(of("3000-0123456789ab.sb.example", &[]), port(3000));
        assert_eq!(of("3000-0123456789AB.SB.example:8443", &[]), port(3000));
        assert_eq!(of("3000-0123456789ab-basalt.sb.example", &[]), port(3000));
        assert_eq!(of("127.0.0.1:3000", &[(SANDBOX_ID, ID)]), port(49983));
        assert_eq!(
            of("[::1]:3000", &[(SANDBOX_ID, ID), (SANDBOX_PORT, "49999")]),
            port(49999)
        );
        assert_eq!(of("sandbox.sb.example", &[(SANDBOX_ID, ID)]), port(49983));
    }

    #[test]
    fn a_name_counts_before_a_header() {
        let other = [(SANDBOX_ID, "ba9876543210")];
        assert_eq!(of("3000-0123456789ab.sb.example", &other), port(3000));
        assert_eq!(of("api.sb.example", &other), Target::Api);
    }

    #[test]
    fn all_else_is_the_api() {
        for host in [
            "127.0.0.1:3000",
            "localhost",
            "api.sb.example",
            "sb.example",
            "example",
            "www.sb.example",
            "3000-0123456789ab.other.example",
            "3000-0123456789ab.x.sb.example",
            "",
        ] {
            assert_eq!(of(host, &[]), Target::Api, "{host}");
        }
    }

    #[test]
    fn what_cannot_be_a_sandbox_is_none() {
        let none = |target| matches!(target, Target::NoSandbox(_));
        assert!(none(of("3000-x.sb.example", &[])));
        assert!(none(of("70000-0123456789ab.sb.example", &[])));
        assert!(none(of("a", &[(SANDBOX_ID, "../x")])));
        assert!(none(of("a", &[(SANDBOX_ID, ID), (SANDBOX_PORT, "0")])));
        assert!(none(of("a", &[(SANDBOX_ID, ID), (SANDBOX_PORT, "http")])));
    }
}
