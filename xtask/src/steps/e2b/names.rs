//! The SDKs of E2B by names alone, of both generations: a program that is told `E2B_DOMAIN`, a key and whom to trust. Names are answered by
//! the name server of a second gateway, on this machine, whose sandboxes nobody asks for; programs ask it by a `resolv.conf` that they alone
//! see. Changes nothing of this machine.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use super::{Gateway, LIMIT, PAUSE, SOON, STATE, Server, add, lab_command, node, pytest};
use crate::context::Context;
use crate::runner::{Counts, Task};

/// The domain; nobody else has names below `test` (RFC 6761).
pub(super) const DOMAIN: &str = "sb.basalt.test";

/// Where the name server listens: programs look for one at port 53 alone, and others may be at that of 127.0.0.1.
const ADDRESS: &str = "127.0.0.77";

/// Makes a file that of name servers for one program, and becomes the program.
const WITH_NAMES: &str = r#"mount --bind "$1" /etc/resolv.conf && shift && exec "$@""#;

/// What programs are told.
pub(super) struct Told {
    domain: String,
    key: String,
    /// Where tests leave marks in the gateway's log.
    url: String,
    authority: PathBuf,
    resolver: PathBuf,
    _names: Server,
}

/// All tests by names.
pub(super) fn tests(
    gateway: &Gateway,
    context: &Context,
    task: &mut Task,
    (clients, directory): (&Path, &Path),
) -> Result<Counts> {
    let told = Told::new(gateway, context, task, directory)?;
    let mut sum = Counts::default();
    for python in ["python", "python-1"] {
        let command = told.command(&clients.join(python).join("bin/python"));
        let counts = pytest(context, task, command, &["test_names.py"]);
        sum = add(sum, counts.with_context(|| format!("by names, {python}"))?);
    }
    for sdk in ["e2b", "e2b-1"] {
        let mut command = told.command(&clients.join("node"));
        command.env("SDK", sdk);
        let counts = node(context, task, (command, directory), &["names.test.mjs"]);
        sum = add(sum, counts.with_context(|| format!("by names, {sdk}"))?);
    }
    // E2B's command line by names.
    let counts = node(
        context,
        task,
        (told.command(&clients.join("node")), directory),
        &["cli.test.mjs"],
    );
    Ok(add(sum, counts.context("by names, the command line")?))
}

impl Told {
    pub(super) fn new(gateway: &Gateway, context: &Context, task: &mut Task, directory: &Path) -> Result<Self> {
        let words = ["exec", "--no-stdin", "--", "basalt-gateway", "ca", "--state", STATE];
        let certificate = task
            .run_within(&mut lab_command(context, &words), LIMIT)?
            .out
            .join("\n");
        let (authority, resolver) = (directory.join("ca.pem"), directory.join("resolv.conf"));
        std::fs::write(&authority, certificate + "\n")?;
        std::fs::write(&resolver, format!("nameserver {ADDRESS}\n"))?;
        let state = directory.join("names");
        let server = format!("{ADDRESS}:53");
        // It ends with this process, however that does, and leaves the port to the next run. setpriv(1) changes nothing else.
        let mut names = Command::new("setpriv");
        names
            .args(["--pdeathsig", "KILL", "--"])
            .arg(context.release().join("basalt-gateway"));
        names.args(["--listen", "127.0.0.1:0", "--domain", &gateway.domain, "--tls", "off"]);
        names
            .args(["--dns", &server, "--state"])
            .arg(&state)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut names = Server::start(&mut names)?;
        let told = Self {
            domain: gateway.domain.clone(),
            key: gateway.key.clone(),
            url: gateway.url.clone(),
            authority,
            resolver,
            _names: {
                wait_for_names(&server, &mut names)?;
                names
            },
        };
        Ok(told)
    }

    /// A program as a user's who has done `eval "$(basalt-gateway env)"`, and whose machine asks our name server.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", WITH_NAMES, "sh"]);
        command.arg(&self.resolver).arg(program);
        command.env("BASALT_MARKS_URL", &self.url);
        for (name, value) in [
            ("E2B_DOMAIN", self.domain.as_bytes()),
            ("E2B_API_KEY", self.key.as_bytes()),
            ("SSL_CERT_FILE", self.authority.as_os_str().as_bytes()),
            ("NODE_EXTRA_CA_CERTS", self.authority.as_os_str().as_bytes()),
        ] {
            command.env(name, std::ffi::OsStr::from_bytes(value));
        }
        for name in ["E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"] {
            command.env_remove(name);
        }
        command
    }
}

fn wait_for_names(address: &str, server: &mut Server) -> Result<()> {
    let end = Instant::now() + SOON;
    while std::net::TcpStream::connect(address).is_err() {
        server.has_ended().context("nobody answers for names")?;
        ensure!(Instant::now() < end, "nobody answers for names at {address}");
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
