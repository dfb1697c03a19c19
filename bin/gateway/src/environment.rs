//! What moves a program with the E2B SDKs to a gateway: environment variables, for a shell or as JSON. Knows no store.
//!
//! By names, where the gateway has a domain, as that is the way that all versions of the SDKs have, and by which addresses of ports and files
//! work. Python's `ssl`, httpx and pyqwest (by rustls) take the certificates of `SSL_CERT_FILE` in place of the machine's,
//! requests those of `REQUESTS_CA_BUNDLE`, curl those of `CURL_CA_BUNDLE` before the first; Node adds those of `NODE_EXTRA_CA_CERTS` to its own.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::Result;
use gateway::{BUNDLE, CERTIFICATE};

use crate::serving::Serving;

/// How long a gateway on this machine may take to be connected to.
const SOON: Duration = Duration::from_secs(2);

/// Variables by name; those without a value are not to be set.
pub(crate) type Variables = Vec<(&'static str, Option<String>)>;

/// The variables of a gateway for who has this key.
pub(crate) fn variables(serving: &Serving, key: &str) -> Variables {
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
        ("E2B_DOMAIN", Some(domain.clone())),
        // These would count before the domain.
        ("E2B_API_URL", None),
        ("E2B_SANDBOX_URL", None),
        ("E2B_VOLUME_API_URL", None),
    ]);
    if let Some(directory) = &serving.ca {
        let file = |name: &str| Some(directory.join(name).to_string_lossy().into_owned());
        all.extend([
            ("SSL_CERT_FILE", file(BUNDLE)),
            ("REQUESTS_CA_BUNDLE", file(BUNDLE)),
            ("CURL_CA_BUNDLE", file(BUNDLE)),
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
    let (name, port) = domain.split_once(':').unwrap_or((domain, "443"));
    let host = format!("api.{name}:{port}");
    if let Err(error) = host.to_socket_addrs() {
        let how = match serving.dns {
            Some(address) => format!("have it ask {address} for them"),
            None => "start the gateway with --dns, and have it ask there".to_owned(),
        };
        all.push(format!(
            "this machine does not know names below {name} ({error}): {how}, as docs/gateway.md says"
        ));
    }
    if let Some(path) = serving.ca.as_ref().map(|directory| directory.join(BUNDLE))
        && let Err(error) = std::fs::File::open(&path)
    {
        all.push(format!(
            "{} cannot be read ({error}): give the gateway --ca-dir with a directory that programs can read",
            path.display()
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serving(domain: Option<&str>, ca: Option<&str>) -> Serving {
        Serving {
            plain: "127.0.0.1:3000".parse().unwrap(),
            domain: domain.map(str::to_owned),
            ca: ca.map(Into::into),
            dns: None,
        }
    }

    fn value(variables: &Variables, name: &str) -> Option<Option<String>> {
        let found = variables.iter().find(|(its, _)| *its == name);
        found.map(|(_, value)| value.clone())
    }

    #[test]
    fn a_domain_is_all_that_a_program_is_told() {
        let all = variables(&serving(Some("sb.localhost:3443"), Some("/a b")), "e2b_00");
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
        let given = variables(&serving(Some("sb.example"), None), "e2b_00");
        assert_eq!(value(&given, "SSL_CERT_FILE"), None);
    }

    #[test]
    fn without_a_domain_there_are_addresses() {
        let all = variables(&serving(None, None), "e2b_00");
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
            domain: Some("sb.invalid".into()),
            ca: Some("/nowhere".into()),
            dns: Some("127.0.0.55:53".parse().unwrap()),
        };
        let said = warnings(&serving);
        assert_eq!(said.len(), 3, "{said:?}");
        assert!(
            said[0].contains(&gone.to_string()) && said[2].contains("/nowhere/ca-bundle.pem"),
            "{said:?}"
        );
        assert!(
            said[1].contains("sb.invalid") && said[1].contains("127.0.0.55:53"),
            "{said:?}"
        );
    }
}
