//! Names below `localhost` lead to this machine (RFC 6761, 6.3), whatever its resolver knows of them; others it is asked for. Knows no HTTP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// The machine's resolver, and `localhost`.
#[derive(Debug, Default)]
pub(crate) struct Names(DefaultResolver);

impl Resolver for Names {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        if !uri.host().is_some_and(is_below_localhost) {
            return self.0.resolve(uri, config, timeout);
        }
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        let port = uri.port_u16().unwrap_or(default);
        let mut found = self.empty();
        for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            found.push(SocketAddr::new(address, port));
        }
        Ok(found)
    }
}

/// `localhost` itself may be something else in the hosts file.
fn is_below_localhost(host: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    host.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_localhost_are_told_from_others() {
        for host in ["api.sb.localhost", "X.LOCALHOST", "a.localhost."] {
            assert!(is_below_localhost(host), "{host}");
        }
        for host in ["localhost", "localhost.example", "notlocalhost", "127.0.0.1"] {
            assert!(!is_below_localhost(host), "{host}");
        }
    }
}
