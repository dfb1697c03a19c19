//! What a program gets through the gateway beside what `basalt` gives by itself: a sandbox, a command, files, a pause. The gateway is asked
//! by the requests that E2B's SDKs send, over one connection that is kept, as theirs is; `basalt` is started each time, as a user does it.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::figures::{Bench, tell};
use crate::http::{Asked, Connection};
use crate::machine::{end_with_us, now_ns};
use crate::report::Figure;
use crate::run::{IMAGE, Node, SAY};
use crate::stats::Target;
use crate::trace::milliseconds;
use crate::world::World;

/// The template, the snapshot of one of its sandboxes, and the clone of that.
const TEMPLATE: &str = "bench-gateway";
const SNAPSHOT: &str = "bench-gateway";
const CLONE: &str = Node::CLONE;
const MEMORY: &str = "128m";

/// Each is measured on both sides.
const CREATE: [&str; 2] = ["POST /v2/sandboxes, a warm template", "basalt clone"];
const RUN: [&str; 2] = ["process.Process/Start to the command's end", "basalt exec"];
const UPLOAD: [&str; 2] = ["POST /files", "basalt cp, into the sandbox"];
const DOWNLOAD: [&str; 2] = ["GET /files", "basalt cp, out of the sandbox"];
const PAUSE: [&str; 2] = ["pause and connect", "basalt snapshot create and basalt clone"];

/// What is copied, in pieces.
const SIZE: u64 = 256 << 20;
const PIECE: usize = 1 << 20;
/// So often at most: each takes a minute here.
const COPIES: usize = 3;

/// For the gateway to serve.
const SOON: Duration = Duration::from_secs(30);

/// A gateway of the benchmark's own node.
struct Gateway {
    child: Child,
    connection: Connection,
    key: String,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A sandbox that it made.
struct Made {
    id: String,
    token: String,
}

impl Gateway {
    fn start(world: &World, node: &Node) -> Result<Self> {
        let (program, state) = (world.binaries.join("basalt-gateway"), world.scratch.join("gateway"));
        let mut keys = Command::new(&program);
        let made = keys.args(["keys", "create", "--state"]).arg(&state).output()?;
        ensure!(
            made.status.success(),
            "no key: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        let key = String::from_utf8(made.stdout)?.trim().to_owned();
        let address: SocketAddr = "127.0.0.1:3987".parse()?;
        let mut command = Command::new(&program);
        command.args(["--listen", &address.to_string(), "--log-level", "warn", "--state"]);
        command.arg(&state).arg("--node-socket").arg(node.gateway_socket());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        end_with_us(&mut command);
        let mut child = command.spawn().context("basalt-gateway cannot be started")?;
        let deadline = Instant::now() + SOON;
        let connection = loop {
            match Connection::new(address) {
                Ok(connection) => break connection,
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => ensure!(child.try_wait()?.is_none(), "the gateway has ended"),
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        Ok(Self { child, connection, key })
    }

    fn api(&mut self, method: &str, path: &str, body: &Value) -> Result<Value> {
        // A body that nobody reads would end the connection.
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let asked = Asked {
            method,
            path,
            fields: &[("X-API-KEY", &self.key), ("Content-Type", "application/json")],
            length: u64::try_from(body.len())?,
        };
        let answer = self.connection.ask(&asked, body.as_bytes())?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    }

    fn create(&mut self) -> Result<Made> {
        let asked = json!({"templateID": TEMPLATE, "timeout": 3600, "autoPause": false, "metadata": {}, "envVars": {}});
        let made = self.api("POST", "/v2/sandboxes", &asked)?;
        let text = |name: &str| {
            made[name]
                .as_str()
                .map(str::to_owned)
                .with_context(|| format!("no {name}"))
        };
        Ok(Made {
            id: text("sandboxID")?,
            token: text("envdAccessToken")?,
        })
    }

    fn kill(&mut self, made: &Made) -> Result<()> {
        self.api("DELETE", &format!("/sandboxes/{}", made.id), &Value::Null)
            .map(drop)
    }

    fn pause_and_connect(&mut self, made: &Made) -> Result<()> {
        self.api("POST", &format!("/sandboxes/{}/pause", made.id), &json!({}))?;
        let connect = format!("/v2/sandboxes/{}/connect", made.id);
        self.api("POST", &connect, &json!({"timeout": 3600})).map(drop)
    }
}

/// A request to a sandbox's processes and files.
fn with_head<T>(made: &Made, kind: &str, ask: impl FnOnce(&[(&str, &str)]) -> Result<T>) -> Result<T> {
    ask(&[
        ("E2b-Sandbox-Id", &made.id),
        ("E2b-Sandbox-Port", "49983"),
        ("X-Access-Token", &made.token),
        ("Content-Type", kind),
        ("Connect-Protocol-Version", "1"),
    ])
}

impl Made {
    /// Runs a command to its end.
    fn run(&self, gateway: &mut Gateway) -> Result<()> {
        let message = json!({"process": {"cmd": "/say", "args": [SAY]}}).to_string();
        let messages = with_head(self, "application/connect+json", |fields| {
            let asked = Asked {
                method: "POST",
                path: "/process.Process/Start",
                fields,
                length: 0,
            };
            gateway.connection.call(&asked, message.as_bytes())
        })?;
        let said = messages.concat();
        let text = String::from_utf8_lossy(&said);
        ensure!(text.contains("\"exited\":true"), "the command did not end: {text}");
        Ok(())
    }

    fn upload(&self, gateway: &mut Gateway) -> Result<()> {
        let piece = piece();
        let pieces = (0..SIZE / PIECE as u64).map(|_| piece.as_slice());
        with_head(self, "application/octet-stream", |fields| {
            let asked = Asked {
                method: "POST",
                path: "/files?path=/uploaded",
                fields,
                length: SIZE,
            };
            gateway.connection.upload(&asked, pieces).map(drop)
        })
    }

    fn download(&self, gateway: &mut Gateway) -> Result<()> {
        with_head(self, "application/octet-stream", |fields| {
            let asked = Asked {
                method: "GET",
                path: "/files?path=/uploaded",
                fields,
                length: 0,
            };
            let length = gateway.connection.download(&asked)?;
            ensure!(length == SIZE, "{length} bytes came of {SIZE}");
            Ok(())
        })
    }
}

/// Bytes that no zero stands for.
fn piece() -> Vec<u8> {
    (0..PIECE).map(|at| u8::try_from(at % 251).unwrap_or(0) + 1).collect()
}

/// Milliseconds that it takes.
fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let started_ns = now_ns();
    work()?;
    Ok(milliseconds(now_ns() - started_ns))
}

/// What both sides have.
struct Both {
    node: Node,
    gateway: Gateway,
    /// The sandbox that commands run in and files go to.
    made: Made,
    /// A file of as many bytes.
    file: PathBuf,
}

impl Both {
    fn new(world: &World) -> Result<Self> {
        let node = Node::new(world)?;
        node.ok(&[
            "template", "build", "--name", TEMPLATE, "--memory", MEMORY, "--from", IMAGE,
        ])?;
        let mut gateway = Gateway::start(world, &node)?;
        let made = gateway.create()?;
        node.ok(&["snapshot", "create", &made.id, SNAPSHOT])?;
        let file = world.scratch.join("copied");
        let mut written = File::create(&file)?;
        let piece = piece();
        for _ in 0..SIZE / PIECE as u64 {
            written.write_all(&piece)?;
        }
        Ok(Self {
            node,
            gateway,
            made,
            file,
        })
    }

    /// Both, one after the other; what an attempt that failed has left goes first.
    fn create(&mut self) -> Result<[f64; 2]> {
        let mut made = None;
        let ours = timed(|| {
            made = Some(self.gateway.create()?);
            Ok(())
        })?;
        if let Some(made) = made {
            self.gateway.kill(&made)?;
        }
        Ok([ours, self.cloned()?])
    }

    fn cloned(&self) -> Result<f64> {
        drop(self.node.ok(&["rm", "--force", CLONE]));
        let theirs = timed(|| self.node.ok(&["clone", "--name", CLONE, SNAPSHOT]).map(drop))?;
        self.node.ok(&["rm", "--force", CLONE])?;
        Ok(theirs)
    }

    fn run(&mut self) -> Result<[f64; 2]> {
        let ours = timed(|| self.made.run(&mut self.gateway))?;
        let theirs = timed(|| self.node.ok(&["exec", &self.made.id, "--", "/say", SAY]).map(drop))?;
        Ok([ours, theirs])
    }

    fn upload(&mut self) -> Result<[f64; 2]> {
        let ours = timed(|| self.made.upload(&mut self.gateway))?;
        let (from, to) = (self.file.display().to_string(), format!("{}:/copied", self.made.id));
        Ok([ours, timed(|| self.node.ok(&["cp", &from, &to]).map(drop))?])
    }

    fn download(&mut self) -> Result<[f64; 2]> {
        let ours = timed(|| self.made.download(&mut self.gateway))?;
        let (from, to) = (format!("{}:/copied", self.made.id), self.file.display().to_string());
        Ok([ours, timed(|| self.node.ok(&["cp", &from, &to]).map(drop))?])
    }

    fn pause(&mut self) -> Result<[f64; 2]> {
        let ours = timed(|| self.gateway.pause_and_connect(&self.made))?;
        drop(self.node.ok(&["rm", "--force", CLONE]));
        drop(self.node.ok(&["snapshot", "rm", "beside"]));
        let theirs = timed(|| {
            self.node.ok(&["snapshot", "create", &self.made.id, "beside"])?;
            self.node.ok(&["clone", "--name", CLONE, "beside"]).map(drop)
        })?;
        self.node.ok(&["rm", "--force", CLONE])?;
        self.node.ok(&["snapshot", "rm", "beside"])?;
        Ok([ours, theirs])
    }
}

/// A figure: its name, the two sides, how often at most, what is asked of the ratio, and how it is measured.
struct Measured {
    name: &'static str,
    who: [&'static str; 2],
    most: usize,
    target: Target,
    once: fn(&mut Both) -> Result<[f64; 2]>,
}

/// A rate is as much better as its time is shorter: at least half of it is at most twice the time.
const MEASURED: [Measured; 5] = [
    Measured {
        name: "A sandbox through the gateway, from the request to its answer",
        who: CREATE,
        most: usize::MAX,
        target: Target::AtMost(1.15),
        once: Both::create,
    },
    Measured {
        name: "A command through the gateway, from the request to its end",
        who: RUN,
        most: usize::MAX,
        target: Target::AtMost(1.5),
        once: Both::run,
    },
    Measured {
        name: "A file of 256 MiB to a sandbox through the gateway",
        who: UPLOAD,
        most: COPIES,
        target: Target::AtMost(2.0),
        once: Both::upload,
    },
    Measured {
        name: "A file of 256 MiB from a sandbox through the gateway",
        who: DOWNLOAD,
        most: COPIES,
        target: Target::AtMost(2.0),
        once: Both::download,
    },
    Measured {
        name: "A sandbox that is paused and goes on through the gateway",
        who: PAUSE,
        most: usize::MAX,
        target: Target::AtMost(1.2),
        once: Both::pause,
    },
];

impl Bench<'_> {
    /// The gateway beside `basalt`, in turn.
    pub(crate) fn gateway(&mut self) -> Result<()> {
        let mut both = Both::new(self.world)?;
        for measured in MEASURED {
            let mut samples = [Vec::new(), Vec::new()];
            // The first of each fills caches of both, and is none.
            (measured.once)(&mut both)?;
            for round in 0..self.runs.min(measured.most) {
                let values = self.again("gateway", measured.name, || (measured.once)(&mut both))?;
                for ((who, value), samples) in measured.who.iter().zip(values).zip(&mut samples) {
                    tell("gateway", round, who, value, "ms");
                    samples.push(value);
                }
            }
            let mut figure = Figure::new(measured.name, "ms");
            for (who, samples) in measured.who.iter().zip(samples) {
                figure.add(who, samples);
            }
            figure.ratio(measured.who[0], measured.who[1], measured.target);
            self.report.figures.push(figure);
        }
        let made = &both.made;
        both.gateway.kill(made)?;
        both.node.ok(&["snapshot", "rm", SNAPSHOT]).map(drop)
    }
}
