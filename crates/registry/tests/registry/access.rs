//! Who may: basic and bearer authentication, tokens, certificates; and that nothing secret is ever logged.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use registry::{Credentials, Error, Secret, credentials};
use serde_json::json;

use crate::kit::{Place, logged, options, pull, push, refused, with_credentials};
use crate::server::{PASSWORD, Registry, Setup, USER, certificate};
use crate::wire::{Answer, Asked, Fake};

/// A refresh token that the tests' token server takes.
const REFRESH: &str = "r3fresh-token";

fn assert_nothing_secret_logged() {
    let log = logged();
    assert!(log.len() > 1000, "something is logged: {}", log.len());
    let basic = STANDARD.encode(format!("{USER}:{PASSWORD}"));
    for secret in [PASSWORD, &basic, REFRESH, "eyJhbGciOi"] {
        let line = log.lines().find(|line| line.contains(secret));
        assert!(line.is_none(), "{line:?}");
    }
}

#[test]
fn a_password_is_wanted_checked_and_not_logged() {
    let place = Place::new();
    let registry = Registry::with_passwords(&place);
    let (ours, image) = place.with_image("ours", &[(1, 1000)]);
    let name = format!("{}/team/x", registry.host());
    assert!(matches!(
        push(&ours, &name, &options()),
        Err(Error::NeedsCredentials { .. })
    ));
    let wrong = push(&ours, &name, &with_credentials(USER, "wr0ng"));
    assert!(matches!(wrong, Err(Error::WrongCredentials { .. })), "{wrong:?}");
    push(&ours, &name, &with_credentials(USER, PASSWORD)).unwrap();
    assert!(matches!(
        refused(&place, &name, &options()),
        Error::NeedsCredentials { .. }
    ));
    let error = refused(&place, &name, &with_credentials("nobody", PASSWORD));
    assert!(matches!(error, Error::WrongCredentials { .. }), "{error}");

    // As podman stores them.
    let file = place.path("auth.json");
    let auth = STANDARD.encode(format!("{USER}:{PASSWORD}"));
    fs::write(&file, json!({"auths": {registry.host(): {"auth": auth}}}).to_string()).unwrap();
    let mut options = options();
    options.registry.credentials = credentials::find(&registry.host(), "team/x", &[file]).unwrap();
    let pulled = pull(&place.store("theirs"), &name, &options).unwrap();
    assert_eq!(pulled.image.digest, image.digest);
    assert_nothing_secret_logged();
}

#[test]
fn a_certificate_must_be_from_somebody_we_know() {
    let place = Place::new();
    let (key, certificate) = certificate(&place);
    let tls = format!(
        "  tls:\n    certificate: {}\n    key: {}\n",
        certificate.display(),
        key.display()
    );
    let registry = Registry::start_with(
        &place,
        &Setup {
            tls,
            ..Setup::default()
        },
    );
    let (ours, image) = place.with_image("ours", &[(1, 100_000)]);
    let name = format!("{}/x", registry.host());
    let error = push(&ours, &name, &options()).unwrap_err();
    assert!(matches!(error, Error::Untrusted { .. }), "{error}");

    let mut known = options();
    known.certificates = vec![place.path("missing"), place.path("certs.d")];
    let directory = place.path("certs.d").join(registry.host());
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("ca.crt"), "no certificate").unwrap();
    let error = push(&ours, &name, &known).unwrap_err();
    assert!(matches!(error, Error::BadCertificates { .. }), "{error}");
    fs::copy(&certificate, directory.join("ca.crt")).unwrap();
    push(&ours, &name, &known).unwrap();
    assert_eq!(
        pull(&place.store("theirs"), &name, &known).unwrap().image.digest,
        image.digest
    );

    let mut given = options();
    given.authorities = vec![directory.clone()];
    pull(&place.store("given"), &name, &given).unwrap();

    let mut insecure = options();
    insecure.registry.insecure = true;
    pull(&place.store("others"), &name, &insecure).unwrap();
    // The certificate is for 127.0.0.1, whoever it is from.
    let elsewhere = format!("0.0.0.0:{}/x", registry.port);
    let other = place.path("certs.d").join(format!("0.0.0.0:{}", registry.port));
    fs::rename(directory, other).unwrap();
    let error = pull(&place.store("refused"), &elsewhere, &known).unwrap_err();
    assert!(matches!(error, Error::Untrusted { .. }), "{error}");
}

/// A token server: its key's certificate is what the registry trusts.
fn token_server(place: &Place) -> (Fake, std::path::PathBuf) {
    let (key, certificate) = certificate(place);
    let chain = fs::read_to_string(&certificate).unwrap();
    let der: String = chain.lines().filter(|line| !line.starts_with("-----")).collect();
    let fake = Fake::start(move |asked| token(asked, &key, &der));
    (fake, certificate)
}

fn token(asked: &Asked, key: &Path, certificate: &str) -> Answer {
    let refused = || (401, Vec::new(), b"{}".to_vec());
    let basic = format!("Basic {}", STANDARD.encode(format!("{USER}:{PASSWORD}")));
    let query = match asked.line.strip_prefix("POST /token") {
        Some(_) => {
            let form = String::from_utf8(asked.body.clone()).unwrap();
            if !form.contains(&format!("refresh_token={REFRESH}")) || !form.contains("grant_type=refresh_token") {
                return (400, Vec::new(), br#"{"error":"invalid_grant"}"#.to_vec());
            }
            form
        }
        None => {
            match asked.header("authorization") {
                // Everybody may read what is public.
                None if !asked.line.contains("public") => return refused(),
                Some(header) if header != basic => return refused(),
                _ => {}
            }
            asked.line.split_once('?').unwrap().1.to_owned()
        }
    };
    let scope = query.split('&').find_map(|pair| pair.strip_prefix("scope=")).unwrap();
    let scope = scope
        .replace("%3A", ":")
        .replace("%2F", "/")
        .replace("%2C", ",")
        .replace('+', " ");
    let parts: Vec<_> = scope.split(' ').next().unwrap().split(':').collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let header = json!({"alg": "RS256", "typ": "JWT", "x5c": [certificate]});
    let claims = json!({"iss": "test", "sub": USER, "aud": "registry", "exp": now + 300, "nbf": now - 10, "iat": now,
        "jti": "1", "access": [{"type": parts[0], "name": parts[1], "actions": parts[2].split(',').collect::<Vec<_>>()}]});
    let signed = [header, claims]
        .map(|part| URL_SAFE_NO_PAD.encode(part.to_string()))
        .join(".");
    let signature = URL_SAFE_NO_PAD.encode(sign(signed.as_bytes(), key));
    (
        200,
        Vec::new(),
        json!({"token": format!("{signed}.{signature}")}).to_string().into(),
    )
}

fn sign(text: &[u8], key: &Path) -> Vec<u8> {
    let mut child = Command::new("openssl")
        .args(["dgst", "-sha256", "-sign"])
        .arg(key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text).unwrap();
    child.wait_with_output().unwrap().stdout
}

#[test]
fn tokens_are_fetched_where_the_registry_says() {
    let place = Place::new();
    let (server, certificate) = token_server(&place);
    let auth = format!(
        "auth:\n  token:\n    realm: http://{}/token\n    service: registry\n    issuer: test\n    rootcertbundle: {}\n",
        server.host(),
        certificate.display()
    );
    let registry = Registry::start_with(
        &place,
        &Setup {
            auth,
            ..Setup::default()
        },
    );
    let (ours, image) = place.with_image("ours", &[(1, 1000), (2, 1000), (3, 1000)]);
    let name = |path: &str| format!("{}/{path}", registry.host());
    assert!(matches!(
        push(&ours, &name("team/x"), &options()),
        Err(Error::NeedsCredentials { .. })
    ));
    let wrong = push(&ours, &name("team/x"), &with_credentials(USER, "wr0ng"));
    assert!(matches!(wrong, Err(Error::WrongCredentials { .. })), "{wrong:?}");
    for repository in ["team/x", "public/x"] {
        push(&ours, &name(repository), &with_credentials(USER, PASSWORD)).unwrap();
    }
    assert!(
        server.lines().iter().any(|line| line.contains("pull%2Cpush")),
        "{:?}",
        server.lines()
    );

    let asked = server.lines().len();
    let pulled = pull(&place.store("a"), &name("team/x"), &with_credentials(USER, PASSWORD)).unwrap();
    assert_eq!(pulled.image.digest, image.digest);
    assert_eq!(server.lines().len(), asked + 1, "one token is enough for all requests");
    pull(&place.store("b"), &name("public/x"), &options()).unwrap();
    assert!(matches!(
        refused(&place, &name("team/x"), &options()),
        Error::NeedsCredentials { .. }
    ));

    let mut with = options();
    with.registry.credentials = Some(Credentials::IdentityToken(Secret::new(REFRESH.to_owned())));
    pull(&place.store("c"), &name("team/x"), &with).unwrap();
    for wrong in [
        Credentials::IdentityToken(Secret::new("old".to_owned())),
        Credentials::RegistryToken(Secret::new("old".to_owned())),
    ] {
        with.registry.credentials = Some(wrong);
        let error = refused(&place, &name("team/x"), &with);
        assert!(matches!(error, Error::WrongCredentials { .. }), "{error}");
    }
    assert_nothing_secret_logged();
}

/// A registry that wants a password to be sent elsewhere in the clear, or to be told it without a reason.
#[test]
fn what_a_challenge_must_not_ask_is_refused() {
    let place = Place::new();
    let elsewhere = Fake::start(|_| (200, Vec::new(), br#"{"token":"x"}"#.to_vec()));
    // 0.0.0.0 is not this machine's own name, but leads to it.
    let clear = format!("Bearer realm=\"http://0.0.0.0:{}/token\"", elsewhere.port);
    for challenge in [
        &clear,
        "Bearer realm=\"ftp://127.0.0.1/token\"",
        "Bearer realm=\"/token\"",
        "Bearer",
        "Negotiate",
        "",
    ] {
        let challenge = challenge.to_owned();
        let registry = Fake::start(move |asked| {
            let headers = vec![("www-authenticate".to_owned(), challenge.clone())];
            if asked.line == "GET /v2/" {
                (200, Vec::new(), Vec::new())
            } else {
                (401, headers, Vec::new())
            }
        });
        let error = refused(
            &place,
            &format!("{}/x", registry.host()),
            &with_credentials(USER, PASSWORD),
        );
        assert!(matches!(error, Error::BadAnswer { .. }), "{error}");
    }
    assert_eq!(elsewhere.lines(), Vec::<String>::new(), "nobody was asked in the clear");
}

/// Credentials for a registry are not for where it redirects to.
#[test]
fn a_redirect_does_not_learn_who_we_are() {
    let place = Place::new();
    let elsewhere = Fake::start(|_| (404, Vec::new(), Vec::new()));
    let to = format!("http://localhost:{}/there", elsewhere.port);
    let registry = Fake::start(
        move |asked| match (asked.line.as_str(), asked.header("authorization")) {
            ("GET /v2/", _) => (200, Vec::new(), Vec::new()),
            (_, None) => (
                401,
                vec![("www-authenticate".to_owned(), "Basic realm=x".to_owned())],
                Vec::new(),
            ),
            _ => (307, vec![("location".to_owned(), to.clone())], Vec::new()),
        },
    );
    refused(
        &place,
        &format!("{}/x", registry.host()),
        &with_credentials(USER, PASSWORD),
    );
    let asked = elsewhere.asked.lock().unwrap();
    assert!(!asked.is_empty());
    assert!(
        asked.iter().all(|asked| asked.header("authorization").is_none()),
        "{asked:?}"
    );
}

/// `docker-credential-NAME` programs, found by PATH as docker finds them: in another process, whose PATH is the test's.
#[test]
fn helper_programs_are_asked() {
    // By another process: a descriptor of ours that is open for writing could be inherited by what another test starts
    // just then, and the program would be busy (ETXTBSY).
    const WRITE: &str = r#"printf '#!/bin/sh\n%s\n' "$1" > "$0"; chmod 755 "$0""#;
    let place = Place::new();
    let registry = Registry::with_passwords(&place);
    let (ours, _) = place.with_image("ours", &[(1, 1000)]);
    let name = format!("{}/x", registry.host());
    push(&ours, &name, &with_credentials(USER, PASSWORD)).unwrap();
    let helper = |name: &str, script: &str| {
        let path = place.path(&format!("docker-credential-{name}"));
        let written = Command::new("sh").arg("-c").arg(WRITE).arg(path).arg(script).status();
        assert!(written.unwrap().success());
    };
    let answer = json!({"ServerURL": registry.host(), "Username": USER, "Secret": PASSWORD});
    helper(
        "good",
        &format!(
            "test \"$1\" = get && test \"$(cat)\" = {} && echo '{answer}'",
            registry.host()
        ),
    );
    helper("none", "echo credentials not found in native keychain; exit 1");
    helper("bad", "echo locked; exit 1");
    let run = |config: serde_json::Value| {
        fs::write(place.path("config.json"), config.to_string()).unwrap();
        let output = Command::new(crate::shared::example())
            .arg(&name)
            .arg(place.path("theirs"))
            .env_clear()
            .env("DOCKER_CONFIG", place.path(""))
            .env("PATH", format!("{}:/usr/bin:/bin", place.path("").display()))
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let good = run(json!({"credHelpers": {registry.host(): "good"}, "credsStore": "bad"}));
    assert!(good.0, "{}", good.1);
    for (config, expected) in [
        (json!({"credsStore": "none"}), "wants credentials"),
        (json!({"credsStore": "bad"}), "docker-credential-bad failed"),
        (json!({"credsStore": "missing"}), "docker-credential-missing failed"),
    ] {
        let (succeeded, text) = run(config);
        assert!(!succeeded && text.contains(expected), "{text}");
    }
}
