//! What it takes to have another machine like one that is there: clones of a template and of a snapshot, going back in place,
//! and going on after a pause, all by requests to the daemon, from the request to its answer, which comes after the agent's.
//! Beside them, in turn, QEMU that is started with `-incoming` and a file that it has written of an equal guest.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use node_api::{Client, CloneConfig, Reply, Request, RollbackConfig};
use serde_json::json;

use crate::class::sum;
use crate::figures::{Bench, COUNTED_RUNS, MARKER, tell};
use crate::kept::{KEPT, keep};
use crate::machine::{MICROVM, Machine, QEMU, check_alive, end_with_us, now_ns, qemu_arguments};
use crate::monitor::{Monitor, PATIENCE};
use crate::reasons::Histograms;
use crate::report::Figure;
use crate::run::Node;
use crate::stats::Target;
use crate::trace::{Trace, exec_to_run, milliseconds};

const TEMPLATE: &str = "Basalt, a clone of a template";
const BOOTED: &str = "Basalt, booted";
const SNAPSHOT: &str = "Basalt, a clone of a snapshot";
const ROLLBACK: &str = "Basalt, rollback in place";
const RESUME: &str = "Basalt, resume of a paused clone";
const INCOMING: &str = "QEMU microvm, -incoming";

/// Of a clone of a snapshot.
const VMM: &str = "basalt-vmm";
/// The daemon executes it by a descriptor of its own.
const VMM_PROGRAM: &str = "/dev/fd/";

const CLONE: &str = Node::CLONE;

/// Reasons of exits: any, and that memory is not in the second stage of translation (`reasons`).
const EXITS: &str = "all exits";
const MEMORY: &str = "memory";

/// A guest of QEMU's as a file.
struct Peer {
    arguments: Vec<String>,
    state: PathBuf,
    monitor: PathBuf,
}

impl Peer {
    fn new(bench: &mut Bench<'_>) -> Result<Self> {
        let world = bench.world;
        let (state, monitor) = (world.scratch.join("qemu-state"), world.scratch.join("qmp"));
        let socket = format!("unix:{},server=on,wait=off", monitor.display());
        let arguments = qemu_arguments(&world.agent(&world.kernel), MICROVM, &["-qmp", &socket]);
        let peer = Self {
            arguments,
            state,
            monitor,
        };
        let mut machine = Machine::qemu(&peer.arguments)?;
        machine.wait_for(MARKER)?;
        let mut monitor = Monitor::connect(peer.monitor.clone(), || machine.check_alive())?;
        // It is written as it runs: one that was stopped would not run when it comes back.
        let to = format!("exec:cat > {}", peer.state.display());
        monitor.say(&json!({ "execute": "migrate", "arguments": { "uri": to } }))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = monitor.say(&json!({ "execute": "query-migrate" }))?;
            match status["status"].as_str() {
                Some("completed") => break,
                Some("failed") => bail!("QEMU cannot write its guest: {status}"),
                other => ensure!(Instant::now() < deadline, "QEMU writes its guest for ever: {other:?}"),
            }
            thread::sleep(Duration::from_millis(10));
        }
        bench.fact(
            &format!("{INCOMING}: its file"),
            &format!("{} bytes", std::fs::metadata(&peer.state)?.len()),
        );
        Ok(peer)
    }

    /// Milliseconds from QEMU's start to a guest that runs.
    fn restored(&self) -> Result<f64> {
        self.restored_until(|| Ok(()))
    }

    /// The same; it ends when `seen` has been done, not before.
    fn restored_until(&self, seen: impl FnOnce() -> Result<()>) -> Result<f64> {
        let from = format!("exec:cat {}", self.state.display());
        let mut command = Command::new(QEMU);
        command.args(&self.arguments).args(["-incoming", &from]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        end_with_us(&mut command);
        let started_ns = now_ns();
        let mut child = Ends(command.spawn().context("QEMU cannot be started")?);
        let mut monitor = Monitor::connect(self.monitor.clone(), || child.check_alive())?;
        monitor.wait_until_it_runs()?;
        let ended_ns = now_ns();
        seen()?;
        drop(child);
        Ok(milliseconds(ended_ns - started_ns))
    }
}

/// A process that ends with this.
struct Ends(Child);

impl Ends {
    fn check_alive(&mut self) -> Result<()> {
        check_alive(&mut self.0)
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Milliseconds from a request to its answer.
pub(crate) fn asked(client: &mut Client, request: Request) -> Result<(f64, Reply)> {
    let started_ns = now_ns();
    let (reply, _) = client.ask(request)?;
    Ok((milliseconds(now_ns() - started_ns), reply))
}

pub(crate) fn remove(client: &mut Client, name: &str) -> Result<()> {
    let request = Request::Remove {
        sandbox: name.into(),
        force: true,
    };
    Ok(client.ask(request).map(drop)?)
}

pub(crate) fn clone_of(snapshot: &str, name: &str) -> Request {
    Request::Clone(CloneConfig {
        snapshot: snapshot.into(),
        name: Some(name.into()),
        ..CloneConfig::default()
    })
}

/// One of each that is the daemon's, and nothing stays.
fn round(node: &Node, client: &mut Client) -> Result<[(&'static str, f64); 5]> {
    // What an attempt that failed has left; usually there is none.
    drop(remove(client, CLONE));
    let run = |boot: bool| -> Result<Request> { Ok(Request::Run(Box::new(node.config(CLONE, boot)?))) };
    let (booted, _) = asked(client, run(true)?)?;
    remove(client, CLONE)?;
    let (template, reply) = asked(client, run(false)?)?;
    ensure!(
        matches!(&reply, Reply::Started { sandbox, .. } if sandbox.template.is_some()),
        "it was no clone: {reply:?}"
    );
    remove(client, CLONE)?;
    let (snapshot, _) = asked(client, clone_of(KEPT, CLONE))?;
    client.ask(Request::Pause { sandbox: CLONE.into() })?;
    let (resume, _) = asked(client, Request::Resume { sandbox: CLONE.into() })?;
    remove(client, CLONE)?;
    let back = Request::Rollback(RollbackConfig {
        sandbox: Node::ORIGIN.into(),
        snapshot: KEPT.into(),
        ..RollbackConfig::default()
    });
    let (rollback, _) = asked(client, back)?;
    Ok([
        (BOOTED, booted),
        (TEMPLATE, template),
        (SNAPSHOT, snapshot),
        (RESUME, resume),
        (ROLLBACK, rollback),
    ])
}

impl Bench<'_> {
    /// Clones, beside QEMU's restore.
    pub(crate) fn clone(&mut self) -> Result<()> {
        let node = Node::new(self.world)?;
        node.originate()?;
        let mut client = Client::connect(&node.socket())?;
        keep(&mut client, Node::ORIGIN)?;
        let peer = Peer::new(self)?;
        let mut figure = Figure::new("A clone, from the request to a sandbox that runs", "ms");
        let mut samples: Vec<(&str, Vec<f64>)> = [BOOTED, TEMPLATE, SNAPSHOT, RESUME, ROLLBACK, INCOMING]
            .map(|who| (who, Vec::new()))
            .to_vec();
        for number in 0..self.runs {
            let mut values = self.again("clone", TEMPLATE, || round(&node, &mut client))?.to_vec();
            values.push((INCOMING, self.again("clone", INCOMING, || peer.restored())?));
            for (who, value) in values {
                tell("clone", number, who, value, "ms");
                let of = samples.iter_mut().find(|(other, _)| *other == who);
                of.context("nobody's sample")?.1.push(value);
            }
        }
        for (who, samples) in samples {
            figure.add(who, samples);
        }
        figure.ratio(TEMPLATE, INCOMING, Target::AtMost(0.15));
        figure.ratio(SNAPSHOT, INCOMING, Target::AtMost(0.12));
        figure.ratio(ROLLBACK, SNAPSHOT, Target::AtMost(0.5));
        figure.ratio(RESUME, SNAPSHOT, Target::AtMost(0.1));
        self.report.figures.push(figure);
        self.restored_vmm(&mut client, &peer)
    }

    /// What of a clone is the VMM's, beside the same of QEMU.
    fn restored_vmm(&mut self, client: &mut Client, peer: &Peer) -> Result<()> {
        let mut figure = Figure::new("A restored VMM, from its exec to its vCPU's first KVM_RUN", "ms");
        // Nobody else's vCPU may be entered meanwhile.
        let origin = || Node::ORIGIN.to_owned();
        client.ask(Request::Pause { sandbox: origin() })?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for number in 0..self.runs {
            let value = self.again("clone", VMM, || {
                // What an attempt that failed has left; usually there is none.
                drop(remove(client, CLONE));
                let value = traced(VMM_PROGRAM, |_| asked(client, clone_of(KEPT, CLONE)).map(drop))?;
                remove(client, CLONE)?;
                Ok(value)
            })?;
            tell("clone", number, VMM, value, "ms");
            ours.push(value);
            let value = self.again("clone", INCOMING, || {
                traced(QEMU, |entered| peer.restored_until(entered).map(drop))
            })?;
            tell("clone", number, INCOMING, value, "ms");
            theirs.push(value);
        }
        figure.add(VMM, ours);
        figure.add(INCOMING, theirs);
        figure.ratio(VMM, INCOMING, Target::AtMost(0.1));
        self.report.figures.push(figure);
        self.exits_of_a_clone(client)
    }

    /// How often a clone leaves its guest until its agent has answered, and how often of that for memory that is not mapped for it.
    fn exits_of_a_clone(&mut self, client: &mut Client) -> Result<()> {
        let mut figure = Figure::new(
            "Exits of a clone of a snapshot, from the request to its answer",
            "exits",
        );
        let (mut memory, mut all) = (Vec::new(), Vec::new());
        for number in 0..self.runs.min(COUNTED_RUNS) {
            let exits = self.again("clone", EXITS, || {
                // What an attempt that failed has left; usually there is none.
                drop(remove(client, CLONE));
                let histograms = Histograms::start()?;
                client.ask(clone_of(KEPT, CLONE))?;
                let exits = histograms.exits()?;
                remove(client, CLONE)?;
                Ok(exits)
            })?;
            let [of_memory, of_all] = [exits.get(MEMORY).copied().unwrap_or_default(), sum(&exits)].map(as_sample);
            tell("clone", number, EXITS, of_all, "exits");
            memory.push(of_memory);
            all.push(of_all);
        }
        figure.add("for memory", memory);
        figure.add(EXITS, all);
        self.report.figures.push(figure);
        Ok(())
    }
}

#[allow(clippy::cast_precision_loss, reason = "far below 2^53 of anything")]
fn as_sample(count: u64) -> f64 {
    count as f64
}

/// From the exec of `program`, which `work` brings about, to the first entry of a vCPU. What `work` is given waits for that.
fn traced(program: &str, work: impl FnOnce(&dyn Fn() -> Result<()>) -> Result<()>) -> Result<f64> {
    let trace = Trace::start_for_all(&["sched/sched_process_exec", "kvm/kvm_entry"], 1024)?;
    work(&|| {
        let deadline = Instant::now() + PATIENCE;
        while !trace.has_seen("kvm_entry:")? {
            ensure!(Instant::now() < deadline, "no vCPU was entered");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    })?;
    exec_to_run(&trace.stop()?, program)
}
