//! What moves a program with the E2B SDKs to a gateway: environment variables, for a shell or as JSON. Knows no store.
//!
//! By names, where the gateway has a domain, as that is the way that all versions of the SDKs have, and by which addresses of ports and files
//! work. Python's `ssl`, httpx and pyqwest (by rustls) take the certificates of `SSL_CERT_FILE` in place of the machine's,
//! requests those of `REQUESTS_CA_BUNDLE`, curl those of `CURL_CA_BUNDLE` before the first; Node adds those of `NODE_EXTRA_CA_CERTS` to its own.

use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use gateway::{CERTIFICATE, Domain, Trusted};

use crate::serving::Serving;

/// How long a gateway on this machine may take to be connected to.
const SOON: Duration = Duration::from_secs(2);

/// Variables by name; those without a value are not to be set.
pub(crate) type Variables = Vec<(&'static str, Option<String>)>;

/// Where root puts what programs of all users are to trust.
const OF_ROOT: &str = "/var/cache/basalt-env";

/// Writes what programs are to trust into the caller's own directory, or that which is named; where that is, and what is to be said of it.
pub(crate) fn trust(certificate: &str, domain: &Domain, named: Option<&Path>) -> Result<(PathBuf, Vec<String>)> {
    let trusted = Trusted::check(certificate, domain)?;
    let directory = match named {
        Some(named) => named.to_owned(),
        None => own_directory()?.join(domain.name()),
    };
    let written = trusted.write(&directory)?;
    let mut said = Vec::new();
    if written.is_new {
        said.push(format!(
            "programs with these variables trust the authority {} for {} and all names below it, from now on",
            trusted.fingerprint(),
            domain.name()
        ));
    }
    if !written.has_system {
        said.push(format!(
            "no certificates were found that this machine trusts, so {} has this gateway's alone, and programs with these variables take no \
             other site's: install ca-certificates, and say it again",
            directory.join(Trusted::BUNDLE).display()
        ));
    }
    Ok((directory, said))
}

/// Root's is of use to all users' programs, as root may do this for them.
fn own_directory() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(OF_ROOT.into());
    }
    let given = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let cache = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
    let cache = cache.context("HOME is not set: say by --ca-dir where certificates are put for programs")?;
    Ok(cache.join("basalt-env"))
}

/// The variables of a gateway for who has this key, and trusts what is in this directory.
pub(crate) fn variables(serving: &Serving, key: &str, trusted: Option<&Path>) -> Variables {
    let mut all = vec![("E2B_API_KEY", Some(key.to_owned())), ("E2B_DEBUG", None)];
    let Some(domain) = &serving.domain else {
        let url = format!("http://{}", serving.plain);
        all.extend([
            ("E2B_API_URL", Some(url.clone())),
            ("E2B_SANDBOX_URL", Some(url.clone())),
            ("E2B_VOLUME_API_URL", Some(url)),
            ("E2B_DOMAIN", None),
        ]);
        return all;
    };
    all.extend([
        ("E2B_DOMAIN", Some(domain.to_string())),
        // These would count before the domain.
        ("E2B_API_URL", None),
        ("E2B_SANDBOX_URL", None),
        ("E2B_VOLUME_API_URL", None),
    ]);
    if let Some(directory) = trusted {
        let file = |name: &str| Some(directory.join(name).to_string_lossy().into_owned());
        all.extend([
            ("SSL_CERT_FILE", file(Trusted::BUNDLE)),
            ("REQUESTS_CA_BUNDLE", file(Trusted::BUNDLE)),
            ("CURL_CA_BUNDLE", file(Trusted::BUNDLE)),
            ("NODE_EXTRA_CA_CERTS", file(CERTIFICATE)),
        ]);
    }
    all
}

/// As lines of a shell, or as an object.
pub(crate) fn text(variables: &Variables, as_json: bool) -> Result<String> {
    if as_json {
        let object: serde_json::Map<String, serde_json::Value> = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone().into()))
            .collect();
        return Ok(format!("{}\n", serde_json::to_string(&object)?));
    }
    let line = |(name, value): &(&str, Option<String>)| match value {
        Some(value) => format!("export {name}='{}'\n", value.replace('\'', r"'\''")),
        None => format!("unset {name}\n"),
    };
    Ok(variables.iter().map(line).collect())
}

/// What a program will stumble over on this machine, in sentences.
pub(crate) fn warnings(serving: &Serving) -> Vec<String> {
    let mut all = Vec::new();
    if let Err(error) = TcpStream::connect_timeout(&serving.plain, SOON) {
        all.push(format!(
            "no gateway answers at {} now ({error}): start it",
            serving.plain
        ));
    }
    let Some(domain) = &serving.domain else {
        return all;
    };
    let name = domain.name();
    let host = format!("api.{name}:{}", domain.port());
    if let Err(error) = host.to_socket_addrs() {
        let how = match serving.dns {
            Some(address) => format!("have it ask {address} for them"),
            None => "start the gateway with --dns, and have it ask there".to_owned(),
        };
        all.push(format!(
            "this machine does not know names below {name} ({error}): {how}, as docs/gateway.md says"
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serving(domain: Option<&str>) -> Serving {
        Serving {
            plain: "127.0.0.1:3000".parse().unwrap(),
            domain: domain.map(|text| text.parse().unwrap()),
            ca: None,
            dns: None,
        }
    }

    fn value(variables: &Variables, name: &str) -> Option<Option<String>> {
        let found = variables.iter().find(|(its, _)| *its == name);
        found.map(|(_, value)| value.clone())
    }

    #[test]
    fn a_domain_is_all_that_a_program_is_told() {
        let all = variables(&serving(Some("sb.localhost:3443")), "e2b_00", Some("/a b".as_ref()));
        let is = |name, text: &str| assert_eq!(value(&all, name), Some(Some(text.to_owned())), "{name}");
        is("E2B_DOMAIN", "sb.localhost:3443");
        is("E2B_API_KEY", "e2b_00");
        is("SSL_CERT_FILE", "/a b/ca-bundle.pem");
        is("REQUESTS_CA_BUNDLE", "/a b/ca-bundle.pem");
        is("CURL_CA_BUNDLE", "/a b/ca-bundle.pem");
        is("NODE_EXTRA_CA_CERTS", "/a b/ca.pem");
        for name in ["E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL", "E2B_DEBUG"] {
            assert_eq!(value(&all, name), Some(None), "{name}");
        }
        let given = variables(&serving(Some("sb.example")), "e2b_00", None);
        assert_eq!(value(&given, "SSL_CERT_FILE"), None);
    }

    #[test]
    fn without_a_domain_there_are_addresses() {
        let all = variables(&serving(None), "e2b_00", None);
        let url = Some(Some("http://127.0.0.1:3000".to_owned()));
        assert_eq!(
            (value(&all, "E2B_API_URL"), value(&all, "E2B_SANDBOX_URL")),
            (url.clone(), url)
        );
        assert_eq!(value(&all, "E2B_DOMAIN"), Some(None));
    }

    #[test]
    fn a_shell_reads_what_was_meant() {
        let nasty = "a'b$(id) \"c\"".to_owned();
        let script = text(&vec![("X", Some(nasty.clone())), ("PATH_OF_NOBODY", None)], false).unwrap();
        let script = format!("{script}printf %s \"$X${{PATH_OF_NOBODY-gone}}\"");
        let mut shell = std::process::Command::new("/bin/sh");
        let said = shell.args(["-c", &script]).env("PATH_OF_NOBODY", "x").output().unwrap();
        assert_eq!(String::from_utf8(said.stdout).unwrap(), format!("{nasty}gone"));
        let json = text(&vec![("X", Some("y".into())), ("Z", None)], true).unwrap();
        assert_eq!(json, "{\"X\":\"y\",\"Z\":null}\n");
    }

    #[test]
    fn what_does_not_work_is_said() {
        let gone = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let serving = Serving {
            plain: gone,
            domain: Some("sb.invalid".parse().unwrap()),
            ca: None,
            dns: Some("127.0.0.55:53".parse().unwrap()),
        };
        let said = warnings(&serving);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains(&gone.to_string()), "{said:?}");
        assert!(
            said[1].contains("sb.invalid") && said[1].contains("127.0.0.55:53"),
            "{said:?}"
        );
    }

    /// A gateway that was taken over has written what is read here.
    #[test]
    fn what_could_vouch_for_other_sites_is_not_written() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        let source = |state: &Path| gateway::CertificateSource::Own {
            state: state.to_owned(),
            public: state.join("public"),
        };
        let domain: Domain = "sb.example".parse().unwrap();
        std::fs::create_dir(&state).unwrap();
        gateway::Tls::open(&source(&state), &domain).unwrap();
        let good = gateway::certificate_of(&state, &domain).unwrap().unwrap();
        let to = directory.path().join("user's");
        assert!(trust(&good, &"api.example".parse().unwrap(), Some(&to)).is_err() && !to.exists());
        let (found, said) = trust(&good, &domain, Some(&to)).unwrap();
        assert!(said[0].contains("sb.example") && found == to, "{said:?}");
        assert!(
            std::fs::read_to_string(to.join(Trusted::BUNDLE))
                .unwrap()
                .ends_with(&good)
        );
        let (_, said) = trust(&good, &domain, Some(&to)).unwrap();
        assert!(said.iter().all(|line| !line.contains("from now on")), "{said:?}");
    }
}
