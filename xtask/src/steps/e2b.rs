//! The step `e2b`: the SDKs of E2B, unmodified, against the gateway and the daemon of the lab. Serves the gateway there, leads a port of this
//! machine to it, builds the template `base`, and runs what is in tests/e2b. Knows no endpoint.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use super::e2b_api;
use super::sandbox::{basalt, lab_command, only_with_a_lab};
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Counts, Report, Step, Task};

/// The clients.
pub(crate) const CLIENTS: Recipe = Recipe {
    name: "e2b-clients",
    dir: "tests/e2b/clients",
};

/// The gateway's port of the lab, and its directory there.
const PORT: u16 = 3000;
const STATE: &str = "/var/lib/basalt-gateway";
/// Its node's socket for it.
const NODE: &str = "/var/lib/basalt/gateway.sock";

/// What is run of them; those of the code interpreter need its image, which nothing here makes (docs/how-to/code-interpreter.md).
const TESTS: [&str; 7] = [
    "test_sandbox.py",
    "test_commands.py",
    "test_files.py",
    "test_async.py",
    "test_operations.py",
    "test_bad_input.py",
    "test_how_to.py",
];
const JAVASCRIPT_TESTS: [&str; 2] = ["flows.test.mjs", "bad_input.test.mjs"];
/// What has every test of theirs leave its marks in the gateway's log.
const MARKS: &str = "api/marks.mjs";

/// The gateway's log, among those of the steps.
pub(crate) const LOG: &str = "e2b-gateway.log";

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
        let template = [
            "template", "build", "--name", "base", "--memory", "160m", "--disk", "2g", "--from", "base",
        ];
        task.run_within(&mut basalt(context, &template), BUILD_LIMIT)?;
        let gateway = Gateway::start(context, task)?;
        let before = descriptors(context, task)?;
        let counts = gateway.tests(context, task)?;
        settle(context, task, before)?;
        e2b_api::check_table(context, task, &gateway.log)?;
        Ok(Report {
            detail: counts.to_string(),
            counts,
            ..Report::default()
        })
    })
    .plan(only_with_a_lab)
    .check()
    .hint("`cargo xtask test --only e2b` repeats it; the log has what the gateway says")
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
        // It may be gone already; then there is nothing to wait for.
        let _gone = kill_process_group(Pid::from_child(&self.0), Signal::TERM);
        drop(self.0.wait());
    }
}

/// The gateway in the lab, and the way to it.
struct Gateway {
    _serves: Server,
    _leads: Server,
    url: String,
    key: String,
    log: PathBuf,
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
        let listen = format!("127.0.0.1:{PORT}");
        let words = [
            "exec",
            "--no-stdin",
            "--",
            "basalt-gateway",
            "--listen",
            &listen,
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
        let mut lead = lab_command(context, &["tunnel", &format!("0:{PORT}"), "--json"]);
        let mut leads = Server::start(lead.stdout(Stdio::piped()).stderr(Stdio::null()))?;
        let mut line = String::new();
        let said = leads.0.stdout.take().context("the tunnel says nothing")?;
        BufReader::new(said).read_line(&mut line)?;
        let port: Value = serde_json::from_str(&line).with_context(|| format!("no port in `{line}`"))?;
        let url = format!(
            "http://127.0.0.1:{}",
            port["port"].as_u64().context("the tunnel has no port")?
        );
        wait_for(&url, &mut serves).with_context(|| format!("{} says why", log.display()))?;
        Ok(Self {
            _serves: serves,
            _leads: leads,
            url,
            key,
            log,
        })
    }

    fn tests(&self, context: &Context, task: &mut Task) -> Result<Counts> {
        let clients = CLIENTS.path(context)?;
        let (python, javascript) = (
            self.python(context, task, &clients),
            self.javascript(context, task, &clients),
        );
        task.say(&format!("{} has what the gateway said", self.log.display()))?;
        let (python, javascript) = (python?, javascript?);
        Ok(Counts {
            passed: python.passed + javascript.passed,
            failed: python.failed + javascript.failed,
            skipped: python.skipped + javascript.skipped,
        })
    }

    /// As a user's program has it.
    fn of(&self, mut command: Command) -> Command {
        command
            .env("E2B_API_URL", &self.url)
            .env("E2B_SANDBOX_URL", &self.url)
            .env("E2B_API_KEY", &self.key)
            .env_remove("E2B_DOMAIN");
        command
    }

    fn python(&self, context: &Context, task: &mut Task, clients: &Path) -> Result<Counts> {
        let mut command = self.of(Command::new(clients.join("python/bin/python")));
        command
            .args(["-m", "pytest", "-p", "no:cacheprovider", "-q"])
            .args(TESTS)
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

    /// Modules are looked for beside the file.
    fn javascript(&self, context: &Context, task: &mut Task, clients: &Path) -> Result<Counts> {
        let directory = context.target().join("e2b");
        std::fs::create_dir_all(&directory)?;
        let modules = directory.join("node_modules");
        match std::fs::remove_file(&modules) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => symlink(clients.join("node_modules"), &modules)?,
        }
        for name in JAVASCRIPT_TESTS {
            std::fs::copy(context.root.join("tests/e2b").join(name), directory.join(name))?;
        }
        let mut command = self.of(Command::new(clients.join("node")));
        command
            .arg("--import")
            .arg(context.root.join("tests/e2b").join(MARKS))
            .args([
                "--test",
                "--test-reporter=tap",
                "--test-timeout=240000",
                "--test-concurrency=1",
            ])
            .args(JAVASCRIPT_TESTS)
            .current_dir(directory);
        let finished = task.finish_within(&mut command, TESTS_LIMIT)?;
        let number = |what: &str| {
            let line = finished.out.iter().rev().find_map(|line| line.strip_prefix(what));
            line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let counts = Counts {
            passed: number("# pass "),
            failed: number("# fail "),
            skipped: number("# skipped "),
        };
        ensure!(
            finished.status.success() && counts.passed > 0,
            "the JavaScript SDK's tests: {} failed",
            counts.failed
        );
        Ok(counts)
    }
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
    write!(
        stream,
        "GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut head = [0; 12];
    Ok(stream.read_exact(&mut head).is_ok() && head.starts_with(b"HTTP/1.1 2"))
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
