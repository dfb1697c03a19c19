//! Who we are to a registry: what podman and docker have stored for it, in files or in helper programs.
//!
//! Finds credentials and stores none. What is secret is a [`Secret`], which prints redacted, and is in no message.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use serde::Deserialize;
use ureq::http::HeaderValue;

use crate::job::TICK;
use crate::{Error, session};

/// A helper may ask a person to unlock something, but not for ever.
const HELPER: Duration = Duration::from_secs(60);
/// A helper's answer is no longer.
const ANSWER: u64 = 64 << 10;
/// The name with which docker's helpers mark an identity token.
const TOKEN_NAME: &str = "<token>";

/// Something that must not be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes charge of it.
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// For the one place that it goes to.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

/// What proves who we are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credentials {
    /// Name and password, for the registry or its token server.
    Basic {
        /// The name.
        username: String,
        /// The password.
        password: Secret,
    },
    /// What a token server takes in place of them (OAuth2's refresh token).
    IdentityToken(Secret),
    /// A token for the registry itself.
    RegistryToken(Secret),
}

impl Credentials {
    /// Name and password.
    pub fn basic_of(username: &str, password: &str) -> Self {
        Self::Basic {
            username: username.to_owned(),
            password: Secret::new(password.to_owned()),
        }
    }

    pub(crate) fn basic(&self) -> Option<HeaderValue> {
        match self {
            Self::Basic { username, password } => session::basic(username, password.expose()),
            _ => None,
        }
    }

    pub(crate) fn bearer(&self) -> Option<HeaderValue> {
        match self {
            Self::RegistryToken(token) => session::bearer(token.expose()),
            _ => None,
        }
    }

    pub(crate) fn identity_token(&self) -> Option<&Secret> {
        match self {
            Self::IdentityToken(token) => Some(token),
            _ => None,
        }
    }
}

/// The files that [`find`] looks into, the first first: those that the environment names, podman's, docker's.
pub fn files() -> Vec<PathBuf> {
    files_of(&|name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    })
}

fn files_of(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    const PODMAN: &str = "containers/auth.json";
    let home = variable("HOME");
    let config = variable("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
    let docker = variable("DOCKER_CONFIG").or_else(|| home.map(|home| home.join(".docker")));
    let all = [
        variable("REGISTRY_AUTH_FILE"),
        variable("XDG_RUNTIME_DIR").map(|directory| directory.join(PODMAN)),
        config.map(|directory| directory.join(PODMAN)),
        docker.map(|directory| directory.join("config.json")),
    ];
    all.into_iter().flatten().collect()
}

/// What the first of `files` that knows the registry has for it. A key may also be that of a part of the registry
/// (`HOST/team`), as podman has them: the longest that `repository` is in counts.
///
/// # Errors
///
/// A file cannot be understood, or a helper program fails.
pub fn find(host: &str, repository: &str, files: &[PathBuf]) -> Result<Option<Credentials>, Error> {
    for path in files {
        let text = match fs::read(path) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            read => read.map_err(|error| unusable(path, &error.to_string()))?,
        };
        // serde's message could have a secret in it.
        let config: Config = serde_json::from_slice(&text)
            .map_err(|error| unusable(path, &format!("line {}, column {}", error.line(), error.column())))?;
        if let Some(found) = config.credentials(host, repository, path)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn unusable(path: &Path, problem: &str) -> Error {
    Error::BadCredentials {
        path: path.to_owned(),
        problem: problem.to_owned(),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Config {
    auths: BTreeMap<String, Entry>,
    creds_store: String,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

impl Config {
    fn credentials(&self, host: &str, repository: &str, path: &Path) -> Result<Option<Credentials>, Error> {
        let helper = self.cred_helpers.get(host).unwrap_or(&self.creds_store);
        if !helper.is_empty()
            && let Some(found) = helper_get(helper, host, path)?
        {
            return Ok(Some(found));
        }
        let whole = format!("{host}/{repository}");
        let covers = |key: &str| {
            whole
                .strip_prefix(key)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let keys = self.auths.keys().filter(|key| covers(key) || is_host(key, host));
        let Some(key) = keys.max_by_key(|key| if covers(key) { key.len() } else { 0 }) else {
            return Ok(None);
        };
        self.auths[key]
            .credentials()
            .map_err(|problem| unusable(path, &format!("{key}: {problem}")))
    }
}

/// Docker of old had whole URLs as keys: `https://HOST/v1/`.
fn is_host(key: &str, host: &str) -> bool {
    let rest = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"));
    rest.is_some_and(|rest| rest.split('/').next() == Some(host))
}

impl Entry {
    fn credentials(&self) -> Result<Option<Credentials>, &'static str> {
        if !self.identitytoken.is_empty() {
            return Ok(Some(Credentials::IdentityToken(Secret::new(
                self.identitytoken.clone(),
            ))));
        }
        if !self.registrytoken.is_empty() {
            return Ok(Some(Credentials::RegistryToken(Secret::new(
                self.registrytoken.clone(),
            ))));
        }
        if !self.username.is_empty() {
            return Ok(Some(Credentials::basic_of(&self.username, &self.password)));
        }
        if self.auth.is_empty() {
            return Ok(None);
        }
        let decoded = STANDARD
            .decode(&self.auth)
            .or_else(|_| STANDARD_NO_PAD.decode(&self.auth));
        let decoded = decoded.map_err(|_| "its auth is not base64")?;
        let text = String::from_utf8(decoded).map_err(|_| "its auth is not text")?;
        let (username, password) = text.split_once(':').ok_or("its auth has no colon in it")?;
        // Docker pads with NULs.
        Ok(Some(Credentials::basic_of(username, password.trim_end_matches('\0'))))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// `docker-credential-NAME get`: the host goes in, JSON comes out; a failure that says that there is nothing is nothing.
fn helper_get(name: &str, host: &str, path: &Path) -> Result<Option<Credentials>, Error> {
    let program = format!("docker-credential-{name}");
    let failed = |problem: String| Error::Helper {
        program: program.clone(),
        problem,
        path: path.to_owned(),
    };
    if !name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    {
        return Err(failed(
            "its name has other than letters, digits, `-`, `_` and `.`".to_owned(),
        ));
    }
    let child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let child = child.map_err(|error| failed(error.to_string()))?;
    let (succeeded, output) = answer(child, host).map_err(failed)?;
    if succeeded {
        let answer: Answer =
            serde_json::from_slice(&output).map_err(|_| failed("its answer is not what it should be".to_owned()))?;
        let secret = Secret::new(answer.secret);
        return Ok(Some(if answer.username == TOKEN_NAME {
            Credentials::IdentityToken(secret)
        } else {
            Credentials::Basic {
                username: answer.username,
                password: secret,
            }
        }));
    }
    // Helpers write their errors to standard output; this is the one for "there are none".
    if String::from_utf8_lossy(&output).contains("credentials not found") {
        return Ok(None);
    }
    Err(failed("it ended with an error".to_owned()))
}

/// Whether the helper succeeded, and what it wrote.
fn answer(mut child: Child, host: &str) -> Result<(bool, Vec<u8>), String> {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let reading = thread::spawn(move || {
        let mut output = Vec::new();
        let read = stdout.map(|stdout| stdout.take(ANSWER).read_to_end(&mut output));
        read.transpose().map(|_| output)
    });
    // One that needs no input may have ended already.
    let written = stdin.map(|mut stdin| stdin.write_all(host.as_bytes()));
    if let Some(Err(error)) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        log::warn!("a credential helper takes no input: {error}");
    }
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if begun.elapsed() < HELPER => thread::sleep(TICK),
            ended => {
                child
                    .kill()
                    .and_then(|()| child.wait())
                    .map_err(|error| error.to_string())?;
                return Err(match ended {
                    Err(error) => error.to_string(),
                    Ok(_) => format!("no answer within {HELPER:?}"),
                });
            }
        }
    };
    // Something that it left running may hold the pipe: it is not waited for.
    while !reading.is_finished() && begun.elapsed() < HELPER {
        thread::sleep(Duration::from_millis(2));
    }
    if !reading.is_finished() {
        return Err(format!("its output did not end within {HELPER:?}"));
    }
    let output = reading.join().map_err(|_| "its output cannot be read".to_owned())?;
    Ok((status.success(), output.map_err(|error| error.to_string())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(config: &str, host: &str, repository: &str) -> Result<Option<Credentials>, Error> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        fs::write(&path, config).unwrap();
        find(host, repository, &[directory.path().join("missing"), path])
    }

    fn basic(username: &str, password: &str) -> Option<Credentials> {
        Some(Credentials::basic_of(username, password))
    }

    #[test]
    fn every_kind_of_entry_is_understood() {
        let config = r#"{"auths": {
            "r.test": {"auth": "YTpiOmM="}, "r.test/team": {"username": "t", "password": "p"},
            "https://old.test/v1/": {"auth": "YTpiAAA="}, "id.test": {"auth": "YTpi", "identitytoken": "x"},
            "tok.test:5000": {"registrytoken": "y"}, "empty.test": {}, "nopad.test": {"auth": "YTpiYg"}},
            "HttpHeaders": {"a": "b"}}"#;
        let of = |host: &str, repository: &str| found(config, host, repository).unwrap();
        assert_eq!(of("r.test", "x"), basic("a", "b:c"));
        assert_eq!(of("r.test", "team/x"), basic("t", "p"));
        assert_eq!(of("r.test", "teamx"), basic("a", "b:c"));
        assert_eq!(of("old.test", "x"), basic("a", "b"));
        assert_eq!(of("nopad.test", "x"), basic("a", "bb"));
        assert_eq!(
            of("id.test", "x"),
            Some(Credentials::IdentityToken(Secret::new("x".to_owned())))
        );
        assert_eq!(
            of("tok.test:5000", "x"),
            Some(Credentials::RegistryToken(Secret::new("y".to_owned())))
        );
        for host in ["empty.test", "tok.test", "other.test", "test"] {
            assert_eq!(of(host, "x"), None, "{host}");
        }
    }

    #[test]
    fn what_is_damaged_is_said_without_the_secret() {
        for config in [
            r#"{"auths": {"r.test": {"auth": "c2VjcmV0"}}}"#,
            r#"{"auths": {"r.test": {"auth": "s3cret!"}}}"#,
            r#"{"auths": {"r.test": "s3cret!"}}"#,
            "s3cret!",
        ] {
            let error = found(config, "r.test", "x").unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(matches!(error, Error::BadCredentials { .. }), "{text}");
            assert!(!text.contains("s3cret!") && !text.contains("secret"), "{text}");
        }
        let helper = found(r#"{"credsStore": "../../bin/sh"}"#, "r.test", "x").unwrap_err();
        assert!(matches!(helper, Error::Helper { .. }), "{helper}");
    }

    #[test]
    fn secrets_print_redacted() {
        let all = [
            Credentials::basic_of("name", "s3cret"),
            Credentials::IdentityToken(Secret::new("s3cret".to_owned())),
            Credentials::RegistryToken(Secret::new("s3cret".to_owned())),
        ];
        for credentials in all {
            let text = format!("{credentials:?} {:?} {:?}", credentials.basic(), credentials.bearer());
            assert!(!text.contains("s3cret") && !text.contains("bmFtZ"), "{text}");
        }
    }

    #[test]
    fn files_are_looked_for_where_podman_and_docker_have_them() {
        let set = |name: &str| match name {
            "HOME" => Some(PathBuf::from("/h")),
            "XDG_RUNTIME_DIR" => Some(PathBuf::from("/run/u")),
            _ => None,
        };
        let expected = [
            "/run/u/containers/auth.json",
            "/h/.config/containers/auth.json",
            "/h/.docker/config.json",
        ];
        assert_eq!(files_of(&set), expected.map(PathBuf::from));
        let docker = |name: &str| (name == "DOCKER_CONFIG").then(|| PathBuf::from("/d"));
        assert_eq!(files_of(&docker), [PathBuf::from("/d/config.json")]);
    }
}
