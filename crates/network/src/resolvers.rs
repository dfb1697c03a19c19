//! The host's name servers: those that a guest's questions can be sent on to.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// Where they stand; the second one where the first names only a stub on the loopback (systemd-resolved(8)).
const FILES: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

/// What guests use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolvers {
    /// The first one that is reached by IPv4.
    pub v4: Option<Ipv4Addr>,
    /// The first one that is reached by IPv6.
    pub v6: Option<Ipv6Addr>,
    /// Domains that short names are looked up in.
    pub search: Vec<String>,
}

impl Resolvers {
    /// The host's. A host that has none, or only a stub that nothing but the host itself can ask, gives guests none.
    pub fn of_host() -> Self {
        Self::of_files(FILES.iter().map(Path::new))
    }

    fn of_files<'a>(files: impl Iterator<Item = &'a Path>) -> Self {
        for file in files {
            // A file that is missing names nobody.
            let text = fs::read_to_string(file).unwrap_or_default();
            let found = Self::parse(&text);
            if found.v4.is_some() || found.v6.is_some() {
                return found;
            }
        }
        Self::default()
    }

    /// Whether there is none at all.
    pub fn is_empty(&self) -> bool {
        self.v4.is_none() && self.v6.is_none()
    }

    /// Reads resolv.conf(5), leaving out what only the host itself can reach.
    fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => match words.next().and_then(|word| word.parse().ok()) {
                    Some(IpAddr::V4(ip)) if !ip.is_loopback() && !ip.is_link_local() => {
                        found.v4 = found.v4.or(Some(ip));
                    }
                    Some(IpAddr::V6(ip)) if !ip.is_loopback() && !ip.is_unicast_link_local() => {
                        found.v6 = found.v6.or(Some(ip));
                    }
                    _ => {}
                },
                // The last one counts.
                Some("search" | "domain") => {
                    found.search = words.filter(|word| is_domain(word)).map(str::to_owned).collect();
                }
                _ => {}
            }
        }
        found
    }
}

/// What may be written into a guest's file.
fn is_domain(word: &str) -> bool {
    word.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_sends_us_to_the_next_file() {
        let directory = tempfile::tempdir().unwrap();
        let (stub, real) = (directory.path().join("stub"), directory.path().join("real"));
        fs::write(&stub, "nameserver 127.0.0.53\nsearch stub\n").unwrap();
        fs::write(&real, "# x\nnameserver fe80::1%eth0\nnameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver 2001:db8::1\nsearch a.example b\n").unwrap();
        let found = Resolvers::of_files([stub.as_path(), real.as_path()].into_iter());
        assert_eq!(found.v4, Some(Ipv4Addr::new(192, 0, 2, 1)));
        assert_eq!(found.v6, Some("2001:db8::1".parse().unwrap()));
        assert_eq!(found.search, ["a.example", "b"]);
        assert!(Resolvers::of_files([stub.as_path(), Path::new("/none")].into_iter()).is_empty());
    }
}
