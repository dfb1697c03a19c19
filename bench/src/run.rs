//! `basalt run`, from its start to the first byte of its command's output, with everything that belongs to it: the daemon,
//! the jail, network, disk. Beside it, in turn, the start of such a VM alone, to its agent's first instruction.
//!
//! Uses the command line as anybody would, on a state directory of its own with an image of one program: this one.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use node_api::{Sandbox, SandboxConfig};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::figures::{BASALT_SANDBOX, Bench, boot_once, scrub, tell};
use crate::guard::Kept;
use crate::kept::KEPT;
use crate::machine::now_ns;
use crate::net;
use crate::report::Figure;
use crate::stats::Target;
use crate::trace::milliseconds;
use crate::world::World;

/// The word that has this program print a line, as the sandbox's command.
pub(crate) const SAY: &str = "say-it-runs";
const SAID: &str = "it runs\n";
/// The word that has it do nothing for ever.
pub(crate) const IDLE: &str = "say-nothing";

/// The word that has it change so many MiB of memory as the next word says.
pub(crate) const DIRTY: &str = "say-dirty";

/// How long a template may take to be there.
const PATIENCE: Duration = Duration::from_secs(120);

/// The one that boots, of which the template is made.
const FIRST: &str = "first";

const RUN: &str = "basalt run";
const BOOT: &str = "basalt run --boot";
pub(crate) const IMAGE: &str = "bench";
/// The same as of every other guest here.
const MEMORY: &str = "128m";

/// Runs that print their phases; they ask questions that the others do not.
const TRACED_RUNS: usize = 3;

/// The command in the sandbox.
pub(crate) fn say() -> Result<()> {
    Ok(std::io::stdout().write_all(SAID.as_bytes())?)
}

/// The command of a sandbox that does nothing.
pub(crate) fn idle() -> ! {
    loop {
        thread::sleep(PATIENCE);
    }
}

/// Changes memory, and gives it back.
pub(crate) fn dirty() -> Result<()> {
    let mebibytes: usize = std::env::args().nth(2).context("how many MiB?")?.parse()?;
    let mut bytes = vec![0_u8; mebibytes << 20];
    for (page, place) in bytes.chunks_mut(4096).enumerate() {
        place.fill(u8::try_from(page % 255)? + 1);
    }
    std::hint::black_box(&bytes);
    Ok(())
}

/// A node of the benchmark's own; its daemon ends with this.
pub(crate) struct Node {
    program: PathBuf,
    state: PathBuf,
    /// Another kernel and initramfs than those beside the program.
    assets: Option<PathBuf>,
}

impl Node {
    /// A sandbox that stays.
    pub(crate) const ORIGIN: &str = "origin";
    /// One that is made and removed, over and over; there still where a round failed.
    pub(crate) const CLONE: &str = "clone";

    pub(crate) fn new(world: &World) -> Result<Self> {
        Self::with_assets(world, None)
    }

    /// One whose guests have another kernel.
    pub(crate) fn with_assets(world: &World, assets: Option<PathBuf>) -> Result<Self> {
        let node = Self {
            program: world.binaries.join("basalt"),
            state: world.scratch.join("state"),
            assets,
        };
        node.kept().tell(true);
        let layout = world.scratch.join("layout");
        write_layout(&layout)?;
        node.ok(&["import", "--name", IMAGE, &layout.display().to_string()])?;
        Ok(node)
    }

    /// One with the images of another, which it only reads.
    pub(crate) fn with_images(world: &World, images: &Path) -> Result<Self> {
        let node = Self {
            program: world.binaries.join("basalt"),
            state: world.scratch.join("state"),
            assets: None,
        };
        node.kept().tell(true);
        fs::create_dir_all(&node.state)?;
        std::os::unix::fs::symlink(images, node.state.join("images"))?;
        Ok(node)
    }

    fn kept(&self) -> Kept {
        Kept::node(&self.program, &self.state, self.assets.as_deref())
    }

    /// The digest of the newest image that begins with this entrypoint: in the lab images have no names.
    pub(crate) fn image(&self, name: &str, entrypoint: &str) -> Result<String> {
        let images: Value = serde_json::from_str(&self.said(&["--json", "images"])?)?;
        let begins = |image: &&Value| {
            let first = image.pointer("/config/entrypoint/0");
            first.and_then(Value::as_str) == Some(entrypoint)
        };
        let created = |image: &&Value| image["created"].as_str().map(str::to_owned);
        let found = images
            .as_array()
            .into_iter()
            .flatten()
            .filter(begins)
            .max_by_key(created);
        let digest = found.and_then(|image| image["digest"].as_str());
        digest
            .map(str::to_owned)
            .with_context(|| format!("no image {name} in the lab: `basalt run --rm {name} -- true` takes it there"))
    }

    /// What a command line that ends well says on standard output.
    pub(crate) fn said(&self, arguments: &[&str]) -> Result<String> {
        Ok(String::from_utf8(self.output(arguments)?.stdout)?)
    }

    /// Where its daemon is asked, when it runs.
    pub(crate) fn socket(&self) -> PathBuf {
        self.state.join(node_api::SOCKET)
    }

    /// Where gateways ask it.
    pub(crate) fn gateway_socket(&self) -> PathBuf {
        self.state.join(node_api::GATEWAY_SOCKET)
    }

    /// The files of a snapshot.
    pub(crate) fn snapshot_files(&self, name: &str) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(self.state.join("snapshots").join(name))?;
        entries.map(|entry| Ok(entry?.path())).collect()
    }

    /// Starts the one that stays, a clone of a template as all but the first are.
    pub(crate) fn originate(&self) -> Result<()> {
        let run = |name| {
            let words = [
                "run",
                "--detach",
                "--name",
                name,
                "--network",
                "node",
                "--memory",
                MEMORY,
            ];
            self.ok(&[words.as_slice(), &[IMAGE, "--", "/say", IDLE]].concat())
        };
        run(FIRST)?;
        self.wait_for_templates(1)?;
        self.ok(&["rm", "--force", FIRST])?;
        run(Self::ORIGIN).map(drop)
    }

    /// The last step of making a template is nobody's to wait for.
    pub(crate) fn wait_for_templates(&self, count: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.command(&["--json", "template", "ls"]).output()?;
            let listed: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            if listed.as_array().is_some_and(|templates| templates.len() >= count) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "there are no {count} templates: {output:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Bytes on the disk of the memory file that was written for a snapshot.
    pub(crate) fn newest_memory(&self, snapshot: &str) -> Result<u64> {
        let place = self.state.join("snapshots").join(snapshot);
        let path = |number: usize| match number {
            0 => place.join("memory"),
            number => place.join(format!("memory.{number}")),
        };
        let newest = (0..).map(path).take_while(|path| path.exists()).last();
        let newest = newest.context("a snapshot without memory")?;
        Ok(fs::metadata(newest)?.blocks() * 512)
    }

    /// A sandbox like that one, which boots or is cloned.
    pub(crate) fn config(&self, name: &str, boot: bool) -> Result<SandboxConfig> {
        let inspected = self.command(&["--json", "inspect", Self::ORIGIN]).output()?;
        let sandboxes: Vec<Sandbox> = serde_json::from_slice(&inspected.stdout).context("nothing is known of it")?;
        let origin = sandboxes.into_iter().next().context("it is gone")?;
        Ok(SandboxConfig {
            name: Some(name.to_owned()),
            boot,
            ..origin.config
        })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("BASALT_STATE", &self.state)
            .env("BASALT_ENGINE", "kvm")
            .stdin(Stdio::null());
        if let Some(assets) = &self.assets {
            command.env("BASALT_ASSETS", assets);
        }
        command
    }

    /// What it says on standard error.
    pub(crate) fn ok(&self, arguments: &[&str]) -> Result<String> {
        Ok(String::from_utf8(self.output(arguments)?.stderr)?)
    }

    fn output(&self, arguments: &[&str]) -> Result<Output> {
        let output = self.command(arguments).output().context("basalt cannot be started")?;
        ensure!(
            output.status.success(),
            "basalt {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(output)
    }

    fn run_arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
        let words = ["run", "--rm", "--network", "node", "--memory", MEMORY];
        let command = [IMAGE, "--", "/say", SAY];
        [more, &words, &command].concat()
    }

    /// Milliseconds to the first byte, with these options.
    fn first_output(&self, options: &[&str]) -> Result<f64> {
        scrub();
        let mut arguments = Self::run_arguments(&[]);
        arguments.splice(1..1, options.iter().copied());
        let mut command = self.command(&arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let started_ns = now_ns();
        let mut child = command.spawn().context("basalt cannot be started")?;
        let mut stdout = child.stdout.take().context("there is no pipe")?;
        let mut said = vec![0; 1];
        let first = stdout.read_exact(&mut said);
        let ended_ns = now_ns();
        let rest = stdout.read_to_end(&mut said);
        let output = child.wait_with_output()?;
        ensure!(
            output.status.success() && first.and(rest).is_ok() && said == SAID.as_bytes(),
            "basalt run ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(milliseconds(ended_ns - started_ns))
    }

    /// Milliseconds of each phase, by `--trace`.
    fn phases(&self) -> Result<Vec<(String, f64)>> {
        scrub();
        let mut arguments = Self::run_arguments(&["--json"]);
        arguments.insert(2, "--trace");
        let report: Value = serde_json::from_str(&self.ok(&arguments)?)?;
        let phases = report["phases"].as_array().context("the trace has no phases")?;
        let phase = |phase: &Value| {
            let name = format!("{}: {}", phase["service"].as_str()?, phase["name"].as_str()?);
            Some((name, phase["own_ms"].as_f64()?))
        };
        phases
            .iter()
            .map(|value| phase(value).context("a phase lacks something"))
            .collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Refused where they were never there; one that stays is told of next.
        for name in [Self::ORIGIN, Self::CLONE] {
            drop(self.ok(&["rm", "--force", name]));
        }
        // The next node has this state directory, too.
        drop(self.ok(&["snapshot", "rm", KEPT]));
        if let Err(error) = self.ok(&["daemon", "--stop", "--clean"]) {
            eprintln!("run: the daemon stays behind: {error:#}");
            return;
        }
        self.kept().tell(false);
    }
}

impl Bench<'_> {
    /// `basalt run` to its command's first output.
    pub(crate) fn run(&mut self) -> Result<()> {
        let _tap = net::Tap::new()?;
        let alone = self.contender(BASALT_SANDBOX)?;
        let node = Node::new(self.world)?;
        // The first one starts the daemon, makes the network, the empty disk and the template.
        node.first_output(&[])?;
        node.wait_for_templates(1)?;
        let (mut alones, mut boots, mut runs) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..self.runs {
            let value = self.again("run", BASALT_SANDBOX, || boot_once(&alone))?.milliseconds;
            tell("run", round, BASALT_SANDBOX, value, "ms");
            alones.push(value);
            for (who, options, samples) in [(BOOT, ["--boot"].as_slice(), &mut boots), (RUN, &[], &mut runs)] {
                let value = self.again("run", who, || node.first_output(options))?;
                tell("run", round, who, value, "ms");
                samples.push(value);
            }
        }
        let alone = format!("VMM exec to agent, {BASALT_SANDBOX}");
        let mut figure = Figure::new("basalt run (image cached) to its command's first output", "ms");
        figure.add(&alone, alones);
        figure.add(BOOT, boots);
        figure.add(RUN, runs);
        figure.ratio(BOOT, &alone, Target::AtMost(1.25));
        figure.ratio(RUN, &alone, Target::AtMost(1.25));
        self.report.figures.push(figure);
        let mut phases: Vec<(String, Vec<f64>)> = Vec::new();
        for _ in 0..TRACED_RUNS.min(self.runs) {
            for (name, value) in self.again("run --trace", RUN, || node.phases())? {
                match phases.iter_mut().find(|(other, _)| *other == name) {
                    Some((_, samples)) => samples.push(value),
                    None => phases.push((name, vec![value])),
                }
            }
        }
        let mut figure = Figure::new("Where that goes, by `basalt run --trace`", "ms");
        for (name, samples) in phases {
            figure.add(&name, samples);
        }
        self.report.figures.push(figure);
        Ok(())
    }
}

/// An OCI layout with one layer, and in it this program as `/say`.
fn write_layout(layout: &Path) -> Result<()> {
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let blob = |media_type: &str, bytes: &[u8]| -> Result<Value> {
        let digest = hex::encode(Sha256::digest(bytes));
        fs::write(blobs.join(&digest), bytes)?;
        Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() }))
    };
    let program = fs::read("/proc/self/exe")?;
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(u64::try_from(program.len())?);
    header.set_mode(0o755);
    header.set_cksum();
    archive.append_data(&mut header, "say", program.as_slice())?;
    let layer = blob("application/vnd.oci.image.layer.v1.tar", &archive.into_inner()?)?;
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": { "Cmd": ["/say", SAY] },
        "rootfs": { "type": "layers", "diff_ids": [layer["digest"]] }
    });
    let config = blob(
        "application/vnd.oci.image.config.v1+json",
        config.to_string().as_bytes(),
    )?;
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({ "schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer] });
    let manifest = blob(kind, manifest.to_string().as_bytes())?;
    fs::write(
        layout.join("oci-layout"),
        json!({ "imageLayoutVersion": "1.0.0" }).to_string(),
    )?;
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(layout.join("index.json"), index.to_string())?;
    Ok(())
}
