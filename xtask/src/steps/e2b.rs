//! The step `e2b`: the SDKs of E2B, unmodified, against the gateway and the daemon of a lab. Serves the gateway there, leads ports of this
//! machine to it, builds the template `base`, and runs what is in tests/e2b: by addresses, and by names alone ([`names`]). Knows no endpoint.

pub(super) mod interpreter;
mod names;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::e2b_api;
use super::node_tests;
use super::sandbox::{self, Lab, basalt, lab_command_in, only_with_a_lab};
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::task::{cpu_seconds, end_group};
use crate::runner::{Counts, Step, Task};

/// The clients.
pub(crate) const CLIENTS: Recipe = Recipe {
    name: "e2b-clients",
    dir: "tests/e2b/clients",
};

/// Where the gateway is.
const LAB: Lab = Lab::Sdks;
/// The gateway's ports of the lab, without TLS and with it, and its directory there.
const PORT: u16 = 3000;
const TLS_PORT: u16 = 3443;
const STATE: &str = "/var/lib/basalt-gateway";
/// Its node's socket for it.
const NODE: &str = "/var/lib/basalt/gateway.sock";

/// What is run of them; those of the code interpreter are a step of their own ([`interpreter`]).
const TESTS: [&str; 11] = [
    "test_sandbox.py",
    "test_commands.py",
    "test_files.py",
    "test_network.py",
    "test_async.py",
    "test_operations.py",
    "test_bad_input.py",
    "test_how_to.py",
    "test_templates.py",
    "test_volumes.py",
    "test_host.py",
];
const JAVASCRIPT_TESTS: [&str; 5] = [
    "flows.test.mjs",
    "bad_input.test.mjs",
    "templates.test.mjs",
    "volumes.test.mjs",
    "cli.test.mjs",
];
/// What has every test of theirs leave its marks in the gateway's log.
const MARKS: &str = "api/marks.mjs";

/// The gateway's log, among those of the steps.
pub(crate) const LOG: &str = "e2b-gateway.log";

/// What sandboxes may reach or not, in the lab: two addresses behind its host, at which port 7000 echoes. What an earlier one has left goes
/// first; what this one leaves goes with the lab.
const WORLD: [&str; 2] = ["198.51.100.2", "198.51.100.3"];
const WORLD_SCRIPT: &str = "
ip link delete e2b0 2>/dev/null
ip netns delete e2b-world 2>/dev/null
set -e
ip netns add e2b-world
ip link add e2b0 type veth peer name eth0 netns e2b-world
ip address add 198.51.100.1/24 dev e2b0
ip link set e2b0 up
ip -n e2b-world link set lo up
for address in \"$@\"; do ip -n e2b-world address add $address/24 dev eth0; done
ip -n e2b-world link set eth0 up
echo ready
exec ip netns exec e2b-world socat TCP-LISTEN:7000,fork,reuseaddr EXEC:cat";

/// One command in the lab, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// A boot, and the image's upload before.
const BUILD_LIMIT: Duration = Duration::from_secs(300);
/// All tests of one language.
const TESTS_LIMIT: Duration = Duration::from_secs(25 * 60);
/// For a server to listen.
const SOON: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(100);

/// The step.
pub(crate) fn e2b() -> Step {
    Step::new("e2b", |context, task| {
        let counts = in_lab(context, task, |task| {
            build_base(context, task)?;
            let gateway = Gateway::start(context, task)?;
            let before = descriptors(context, task)?;
            let counts = gateway.tests(context, task)?;
            settle(context, task, before)?;
            e2b_api::check_table(context, task, &gateway.log)?;
            Ok(counts)
        })?;
        Ok(counts.into())
    })
    .plan(only_with_a_lab)
    .check()
    .hint("`cargo xtask test --only e2b` repeats it; the log has what the gateway says")
}

/// Does something in the lab of the SDKs, which is there for as long as that takes; its emulator's processor time counts as the step's.
fn in_lab<T>(context: &Context, task: &mut Task, what: impl FnOnce(&mut Task) -> Result<T>) -> Result<T> {
    sandbox::another_host(context, task, LAB)?;
    let emulator = sandbox::emulator(context, task, LAB)?;
    let done = what(task);
    task.add_cpu(cpu_seconds(emulator).unwrap_or_default());
    let down = sandbox::take_down(context, task, LAB);
    done.and_then(|done| down.map(|()| done))
}

/// A command of the lab's program, for that lab.
fn lab_command(context: &Context, words: &[&str]) -> Command {
    lab_command_in(context, LAB, words)
}

/// The template that the SDKs ask for, and the name of its image, which tenants build on: images come to the lab without theirs.
fn build_base(context: &Context, task: &mut Task) -> Result<()> {
    let words = [
        "template", "build", "--json", "--name", "base", "--memory", "160m", "--disk", "2g", "--from", "base",
    ];
    let made = task
        .run_within(&mut LAB.of(context, basalt(context, &words)), BUILD_LIMIT)?
        .out
        .join("\n");
    let made: Value = serde_json::from_str(&made).with_context(|| format!("no template in `{made}`"))?;
    let digest = made["digest"].as_str().context("the template has no image")?;
    let image = format!("sha256:{digest}");
    let words = ["exec", "--no-stdin", "--", "basalt", "tag", &image, "base"];
    task.run_within(&mut lab_command(context, &words), LIMIT)?;
    Ok(())
}

/// A program that is ended with its group when it is dropped.
struct Server(Child);

impl Server {
    fn start(command: &mut Command) -> Result<Self> {
        let started = command.stdin(Stdio::null()).process_group(0).spawn();
        Ok(Self(started.with_context(|| format!("cannot start {command:?}"))?))
    }

    fn has_ended(&mut self) -> Result<()> {
        match self.0.try_wait()? {
            Some(status) => bail!("it ended with {status}"),
            None => Ok(()),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that cannot be waited for is nobody's child.
        drop(end_group(&mut self.0));
    }
}

/// The gateway in the lab, and the ways to it.
struct Gateway {
    _serves: Server,
    _leads: Server,
    _leads_to_tls: Server,
    _world: Server,
    url: String,
    /// Names below it lead to this machine, at the port behind the colon, and from there to the gateway.
    domain: String,
    key: String,
    log: PathBuf,
}

/// A way from a port of this machine, 0 for any, to one of the lab; and the port.
fn tunnel(context: &Context, here: u16, there: u16) -> Result<(Server, u16)> {
    let mut lead = lab_command(context, &["tunnel", &format!("{here}:{there}"), "--json"]);
    let mut leads = Server::start(lead.stdout(Stdio::piped()).stderr(Stdio::null()))?;
    let mut line = String::new();
    let said = leads.0.stdout.take().context("the tunnel says nothing")?;
    BufReader::new(said).read_line(&mut line)?;
    let port: Value = serde_json::from_str(&line).with_context(|| format!("no port in `{line}`"))?;
    let port = port["port"].as_u64().and_then(|port| u16::try_from(port).ok());
    Ok((leads, port.context("the tunnel has no port")?))
}

impl Gateway {
    fn start(context: &Context, task: &mut Task) -> Result<Self> {
        let words = [
            "exec",
            "--no-stdin",
            "--",
            "basalt-gateway",
            "keys",
            "create",
            "--state",
            STATE,
            "--tenant",
            "xtask",
            "--json",
        ];
        let made = task
            .run_within(&mut lab_command(context, &words), LIMIT)?
            .out
            .join("\n");
        let made: Value = serde_json::from_str(&made).with_context(|| format!("no key in `{made}`"))?;
        let key = made["key"].as_str().context("no key was printed")?.to_owned();
        // One that a run has left that was killed has the ports.
        let words = ["exec", "--no-stdin", "--", "sh", "-c", "pkill -x basalt-gateway; true"];
        task.run_within(&mut lab_command(context, &words), LIMIT)?;
        let listen = format!("127.0.0.1:{PORT}");
        // The domain has the port of this machine, which is therefore known first.
        let (leads_to_tls, port) = tunnel(context, 0, TLS_PORT)?;
        let (domain, tls) = (format!("{}:{port}", names::DOMAIN), format!("127.0.0.1:{TLS_PORT}"));
        let words = [
            "exec",
            "--no-stdin",
            "--",
            "basalt-gateway",
            "--listen",
            &listen,
            "--domain",
            &domain,
            "--tls",
            &tls,
            "--node-socket",
            NODE,
            "--state",
            STATE,
            "--log-level",
            "debug",
        ];
        let log = context.logs().join(LOG);
        let file = std::fs::File::create(&log)?;
        let mut serve = lab_command(context, &words);
        let mut serves = Server::start(serve.stdout(file.try_clone()?).stderr(file))?;
        let (leads, port) = tunnel(context, 0, PORT)?;
        let url = format!("http://127.0.0.1:{port}");
        let world = world(context)?;
        wait_for(&url, &mut serves).with_context(|| format!("{} says why", log.display()))?;
        Ok(Self {
            _serves: serves,
            _leads: leads,
            _leads_to_tls: leads_to_tls,
            _world: world,
            url,
            domain,
            key,
            log,
        })
    }

    fn tests(&self, context: &Context, task: &mut Task) -> Result<Counts> {
        let clients = CLIENTS.path(context)?;
        let directory = node_tests::directory(context, "e2b", &clients)?;
        let all = [
            self.python(context, task, &clients),
            self.javascript(context, task, (&clients, &directory)),
            names::tests(self, context, task, (&clients, &directory)),
        ];
        task.say(&format!("{} has what the gateway said", self.log.display()))?;
        all.into_iter()
            .try_fold(Counts::default(), |sum, counts| Ok(add(sum, counts?)))
    }

    /// As a user's program has it.
    fn of(&self, mut command: Command) -> Command {
        command
            .env("E2B_API_URL", &self.url)
            .env("E2B_SANDBOX_URL", &self.url)
            .env("E2B_VOLUME_API_URL", &self.url)
            .env("E2B_API_KEY", &self.key)
            .env_remove("E2B_DOMAIN");
        command
    }

    fn python(&self, context: &Context, task: &mut Task, clients: &Path) -> Result<Counts> {
        let mut command = self.of(Command::new(clients.join("python/bin/python")));
        command
            .env("BASALT_E2B_WORLD", WORLD.join(","))
            .env("BASALT", context.release().join("basalt"));
        pytest(context, task, command, &TESTS)
    }

    fn javascript(&self, context: &Context, task: &mut Task, (clients, directory): (&Path, &Path)) -> Result<Counts> {
        let mut command = self.of(Command::new(clients.join("node")));
        command.arg("--import").arg(context.root.join("tests/e2b").join(MARKS));
        node(context, task, (command, directory), &JAVASCRIPT_TESTS)
    }
}

fn add(one: Counts, other: Counts) -> Counts {
    Counts {
        passed: one.passed + other.passed,
        failed: one.failed + other.failed,
        skipped: one.skipped + other.skipped,
    }
}

/// Runs files of tests by the Python that `command` begins with.
fn pytest(context: &Context, task: &mut Task, mut command: Command, tests: &[&str]) -> Result<Counts> {
    command
        .args(["-m", "pytest", "-p", "no:cacheprovider", "-q", "--durations", "15"])
        .args(tests)
        .current_dir(context.root.join("tests/e2b"))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let finished = task.finish_within(&mut command, TESTS_LIMIT)?;
    let last = finished.out.last().map(String::as_str).unwrap_or_default();
    let counts = Counts {
        passed: count_before(last, " passed"),
        failed: count_before(last, " failed") + count_before(last, " error"),
        skipped: count_before(last, " skipped"),
    };
    ensure!(
        finished.status.success() && counts.passed > 0,
        "the Python SDK's tests: {last}"
    );
    Ok(counts)
}

/// Runs files of tests by the Node that `command` begins with.
fn node(context: &Context, task: &mut Task, (command, directory): (Command, &Path), names: &[&str]) -> Result<Counts> {
    let places = (&*context.root.join("tests/e2b"), directory);
    node_tests::run(task, command, places, names, TESTS_LIMIT)
}

/// What is behind the lab's host; it ends with the server.
fn world(context: &Context) -> Result<Server> {
    let words = ["exec", "--no-stdin", "--", "sh", "-c", WORLD_SCRIPT, "sh"];
    let mut serve = lab_command(context, &[&words[..], &WORLD].concat());
    let mut serves = Server::start(serve.stdout(Stdio::piped()).stderr(Stdio::null()))?;
    let said = serves.0.stdout.take().context("the world says nothing")?;
    let mut line = String::new();
    BufReader::new(said).read_line(&mut line)?;
    ensure!(
        line == "ready\n",
        "there is nobody whom sandboxes could reach: `{line}`"
    );
    Ok(serves)
}

/// How many descriptors the gateway has.
fn descriptors(context: &Context, task: &mut Task) -> Result<usize> {
    let script = "ls /proc/$(pidof -s basalt-gateway)/fd | wc -l";
    let words = ["exec", "--no-stdin", "--", "sh", "-c", script];
    let said = task.run_within(&mut lab_command(context, &words), LIMIT)?.out.join("");
    let count = said.trim().parse().with_context(|| format!("no number: `{said}`"))?;
    ensure!(count > 0, "no gateway runs in the lab");
    Ok(count)
}

/// Clients have left, some of them in the midst of something: nothing of theirs may stay.
fn settle(context: &Context, task: &mut Task, before: usize) -> Result<()> {
    let end = Instant::now() + SOON;
    loop {
        let now = descriptors(context, task)?;
        if now <= before {
            return task.say(&format!("the gateway has {now} descriptors, and had {before} before"));
        }
        ensure!(
            Instant::now() < end,
            "the gateway had {before} descriptors before the tests, and has {now} when all clients have left"
        );
        std::thread::sleep(PAUSE);
    }
}

/// The number right before a word of pytest's last line.
fn count_before(line: &str, word: &str) -> u64 {
    let before = line
        .split(word)
        .next()
        .filter(|_| line.contains(word))
        .unwrap_or_default();
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

/// Until it answers.
fn wait_for(url: &str, server: &mut Server) -> Result<()> {
    let address = url.trim_start_matches("http://");
    let end = Instant::now() + SOON;
    loop {
        server.has_ended().context("the gateway does not serve")?;
        if answers(address)? {
            return Ok(());
        }
        ensure!(Instant::now() < end, "nothing answers at {url}");
        std::thread::sleep(PAUSE);
    }
}

/// The tunnel takes every connection, so that only an answer says that somebody listens.
fn answers(address: &str) -> Result<bool> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(SOON))?;
    let asked = format!("GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    let mut head = [0; 12];
    // Who leads there may close it as long as nobody serves.
    let answered = stream
        .write_all(asked.as_bytes())
        .and_then(|()| stream.read_exact(&mut head));
    Ok(answered.is_ok() && head.starts_with(b"HTTP/1.1 2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pytest_counts_are_read() {
        let line = "2 failed, 40 passed, 1 skipped in 61.20s (0:01:01)";
        let counts = [" passed", " failed", " skipped", " error"].map(|word| count_before(line, word));
        assert_eq!(counts, [40, 2, 1, 0]);
    }
}
