//! A daemon of a case's own: with its own state directory, found by the kernel's view of it, killed and looked after.
//! Knows the `basalt` program and `/proc`, and nothing of how a daemon works.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::Host;
use crate::basalt::{command, expect_code};

/// Where all cgroups are.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Those of the daemon itself, and of memory that it zeroes ahead.
const OWN_CGROUPS: [&str; 2] = ["daemon", "zeroed-memory"];

/// How long anything may take that is waited for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than what a daemon waits for a guest's boot on an emulated host, so that it is the daemon who tells of it.
const START: Duration = Duration::from_secs(150);

/// When this case's first daemon was made.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A state directory with the lab's images, and whatever daemon runs on it.
pub(crate) struct Daemon<'h> {
    host: &'h Host,
    pub(crate) state: PathBuf,
    /// Where points are asked for (`base::points`).
    pub(crate) points: PathBuf,
    leaves_templates: bool,
}

/// Templates that daemons of cases have made and left when they ended: most cases are not about them, and are spared a guest's boot.
pub(crate) const TEMPLATES: &str = "/var/lib/basalt/templates-of-cases";

impl<'h> Daemon<'h> {
    /// Makes the state directory; the first command starts the daemon. It has no templates.
    pub(crate) fn new(host: &'h Host) -> Result<Self> {
        let daemon = Self::at(host, &host.scratch.join("state"))?;
        symlink("/var/lib/basalt/images", daemon.state.join("images"))?;
        Ok(daemon)
    }

    /// The same with templates that others have left, and whose own others get.
    pub(crate) fn with_templates(host: &'h Host) -> Result<Self> {
        let daemon = Self {
            leaves_templates: true,
            ..Self::new(host)?
        };
        copy_templates(Path::new(TEMPLATES), &daemon.state.join("templates"))?;
        Ok(daemon)
    }

    /// The same elsewhere, without images.
    pub(crate) fn at(host: &'h Host, state: &Path) -> Result<Self> {
        let daemon = Self {
            host,
            state: state.to_owned(),
            points: state.join("points"),
            leaves_templates: false,
        };
        LazyLock::force(&BEGAN);
        fs::create_dir_all(&daemon.points)?;
        Ok(daemon)
    }

    /// The image of most cases.
    pub(crate) fn image(&self) -> &'h str {
        &self.host.digest
    }

    /// A command line of `basalt` that talks to this daemon.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = command(self.host, arguments);
        command
            .env("BASALT_STATE", &self.state)
            .env(base::points::VARIABLE, &self.points)
            .stdin(Stdio::null());
        command
    }

    /// Runs it to its end. Where a case's time goes is in its output.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<Output> {
        let began = Instant::now();
        let output = self.command(arguments).output()?;
        let words: String = arguments.join(" ").replace('\n', " ").chars().take(90).collect();
        let (since, took) = (BEGAN.elapsed().as_secs_f64(), began.elapsed().as_secs_f64());
        eprintln!("{since:6.2} s: after {took:5.2} s: basalt {words}");
        Ok(output)
    }

    /// Runs it to its end, which must be good; what it printed.
    pub(crate) fn ok(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments)?;
        expect_code(&output, 0).with_context(|| format!("basalt {}", arguments.join(" ")))?;
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Waits in the sandbox until a shell's command succeeds there; what that printed then. It is one command of ours: in an emulated
    /// host, asking again and again takes from the guest what it needs for what is waited for.
    pub(crate) fn wait_in(&self, sandbox: &str, what: &str, condition: &str) -> Result<String> {
        let seconds = PATIENCE.as_secs();
        let script = format!(
            "up() {{ read -r up rest < /proc/uptime; up=${{up%.*}}; }}; up; end=$((up+{seconds})); \
             until said=$({condition}); do up; [ $up -lt $end ] || {{ echo \"$said\"; exit 75; }}; sleep 0.2; done; \
             echo \"$said\""
        );
        let output = self.run(&["exec", sandbox, "sh", "-c", &script])?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.code() != Some(75),
            "{sandbox}: waited {seconds} s for {what}: {said}"
        );
        expect_code(&output, 0)?;
        Ok(said)
    }

    /// Starts it.
    pub(crate) fn start(&self, arguments: &[&str]) -> Result<Child> {
        let mut command = self.command(arguments);
        Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }

    /// Starts a detached sandbox that does nothing for long.
    pub(crate) fn idle(&self, name: &str) -> Result<String> {
        let arguments = Self::idle_arguments(name, &self.host.digest);
        Ok(self
            .ok(&arguments.iter().map(String::as_str).collect::<Vec<_>>())?
            .trim()
            .to_owned())
    }

    /// The words that start one.
    pub(crate) fn idle_arguments(name: &str, image: &str) -> Vec<String> {
        let words = [
            "run", "--detach", "--memory", "128m", "--name", name, image, "--", "sleep", "10000",
        ];
        words.map(str::to_owned).to_vec()
    }

    /// Runs a sandbox by these words of `basalt run`; what its command says, and whether a kernel has booted for it.
    pub(crate) fn traced(&self, words: &[&str]) -> Result<(String, bool)> {
        let output = self.run(&[&["run", "--trace"], words].concat())?;
        expect_code(&output, 0)?;
        let trace = String::from_utf8_lossy(&output.stderr);
        let booted = trace.contains("guest boots");
        ensure!(booted != trace.contains("VM restored"), "what became of it: {trace}");
        Ok((String::from_utf8(output.stdout)?, booted))
    }

    /// The ids of the templates.
    pub(crate) fn templates(&self) -> Result<Vec<String>> {
        let listed: Vec<Value> = serde_json::from_str(&self.ok(&["--json", "template", "ls"])?)?;
        let id = |template: &Value| template["id"].as_str().unwrap_or_default().to_owned();
        Ok(listed.iter().map(id).collect())
    }

    /// Waits until there are so many: the last step of making one is nobody's to wait for.
    pub(crate) fn wait_for_templates(&self, count: usize) -> Result<Vec<String>> {
        let mut found = Vec::new();
        wait_for("a template", || {
            found = self.templates()?;
            Ok(found.len() == count)
        })?;
        Ok(found)
    }

    /// All sandboxes, or one.
    pub(crate) fn list(&self) -> Result<Vec<Value>> {
        Ok(serde_json::from_str(&self.ok(&["--json", "ps", "--all"])?)?)
    }

    /// What is known of a sandbox, if there is one of this name.
    pub(crate) fn find(&self, name: &str) -> Result<Option<Value>> {
        Ok(self.list()?.into_iter().find(|sandbox| sandbox["name"] == name))
    }

    /// Processes that were started with this state directory, or live in its cgroups: the daemon and its VMMs.
    pub(crate) fn processes(&self, program: &str) -> Result<Vec<Pid>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let Some(pid) = entry.file_name().to_str().and_then(|text| text.parse().ok()) else {
                continue;
            };
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let ours = read("cmdline").contains(&self.state.display().to_string())
                || self
                    .cgroup()
                    .is_some_and(|root| read("cgroup").contains(&format!("/{root}/")));
            if ours && read("comm").trim_end() == program && !read("stat").contains(") Z ") {
                found.extend(Pid::from_raw(pid));
            }
        }
        Ok(found)
    }

    /// How many descriptors the daemon has open.
    pub(crate) fn descriptors(&self) -> Result<usize> {
        let daemons = self.processes("basaltd")?;
        let [daemon] = daemons.as_slice() else {
            bail!("there are {} daemons", daemons.len());
        };
        Ok(fs::read_dir(format!("/proc/{}/fd", daemon.as_raw_nonzero()))?.count())
    }

    /// The name of the cgroup above its sandboxes, once there is one.
    pub(crate) fn cgroup(&self) -> Option<String> {
        // The daemon is in it, beside its sandboxes; after its death the directory's name is what it was.
        let kept = self.state.join("cgroup-name");
        if let Ok(name) = fs::read_to_string(&kept) {
            return Some(name);
        }
        for entry in fs::read_dir("/proc").ok()?.flatten() {
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            if read("comm").trim_end() == "basaltd" && read("cmdline").contains(&self.state.display().to_string()) {
                let cgroup = read("cgroup");
                let name = cgroup
                    .trim_end()
                    .strip_prefix("0::/")?
                    .strip_suffix("/daemon")?
                    .to_owned();
                fs::write(kept, &name).ok()?;
                return Some(name);
            }
        }
        None
    }

    /// Kills the daemon and waits until it is gone.
    pub(crate) fn kill(&self) -> Result<()> {
        self.kill_all("basaltd")
    }

    /// Kills processes of a program and waits until they are gone.
    pub(crate) fn kill_all(&self, program: &str) -> Result<()> {
        for pid in self.processes(program)? {
            kill(pid)?;
        }
        Ok(())
    }

    /// Asks the next who comes to a point to wait there.
    pub(crate) fn hold(&self, point: &str) -> Result<()> {
        Ok(fs::write(self.points.join(point), "")?)
    }

    /// Waits until somebody on this client's behalf has come to the point. A client that ends before says why.
    pub(crate) fn reached(&self, client: &mut Child, point: &str) -> Result<()> {
        let file = self.points.join(format!("{point}.reached"));
        let end = Instant::now() + START;
        while !file.exists() {
            let ended = client.try_wait()?.is_some() && !file.exists();
            if ended || Instant::now() >= end {
                client.kill()?;
                let mut told = String::new();
                if let Some(stderr) = &mut client.stderr {
                    stderr.read_to_string(&mut told)?;
                }
                bail!("nobody came to the point {point}; the client said: {told}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(fs::remove_file(file)?)
    }

    /// Lets him go on.
    pub(crate) fn release(&self, point: &str) -> Result<()> {
        Ok(fs::remove_file(self.points.join(point))?)
    }

    /// What there is of sandboxes beyond those with these ids, by the kernel's view: cgroups, directories, sockets, VMMs.
    pub(crate) fn strangers(&self, known: &[&str]) -> Result<Vec<String>> {
        let mut found = BTreeSet::new();
        let root = self.cgroup().map(|name| Path::new(CGROUPS).join(name));
        let below = |name: &str| Some(self.state.join(name));
        // What was set aside was not understood, which nothing that a killed daemon leaves may be.
        let places = [below("sandboxes"), below("run"), below("quarantine"), root];
        for place in places.into_iter().flatten() {
            for entry in fs::read_dir(&place).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if entry.path().is_dir() && !OWN_CGROUPS.contains(&name.as_str()) && !known.contains(&name.as_str()) {
                    found.insert(format!("{}", entry.path().display()));
                }
            }
        }
        let state = self.state.display().to_string();
        for line in fs::read_to_string("/proc/net/unix")?.lines() {
            if line.contains(&format!("{state}/run/")) && !known.iter().any(|id| line.contains(id)) {
                found.insert(line.to_owned());
            }
        }
        let taps = self.open_taps()?;
        let vmms = self.processes("basalt-vmm")?.len();
        if vmms > known.len() {
            found.insert(format!("{vmms} VMMs for {} sandboxes", known.len()));
        }
        if taps > vmms {
            found.insert(format!("{taps} open TAPs for {vmms} VMMs"));
        }
        Ok(found.into_iter().collect())
    }

    /// How many TAPs of its network somebody has open, as the kernel says.
    fn open_taps(&self) -> Result<usize> {
        let Some(name) = self.cgroup() else { return Ok(0) };
        let namespace = Path::new("/run/netns").join(name);
        if !namespace.exists() {
            return Ok(0);
        }
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", namespace.display()))
            .args(["ip", "-o", "link"]);
        let output = command.output()?;
        ensure!(
            output.status.success(),
            "ip: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = String::from_utf8(output.stdout)?;
        Ok(text
            .lines()
            .filter(|line| line.contains(": tap") && line.contains("LOWER_UP"))
            .count())
    }

    /// Fails if anything is there beyond these; killed processes may take a moment.
    pub(crate) fn expect_no_strangers(&self, known: &[&str]) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let strangers = self.strangers(known)?;
            if strangers.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < end, "left behind: {}", strangers.join(", "));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Removes all sandboxes and ends the daemon; nothing of either is left.
    pub(crate) fn end(self) -> Result<()> {
        for sandbox in self.list()? {
            self.ok(&["rm", "--force", sandbox["id"].as_str().context("a sandbox without id")?])?;
        }
        self.expect_no_strangers(&[])?;
        self.ok(&["daemon", "--stop", "--clean"])?;
        if self.leaves_templates {
            copy_templates(&self.state.join("templates"), Path::new(TEMPLATES))?;
        }
        Ok(())
    }
}

/// Those that are not there yet. Their files share what is in them, where the file system has reflinks.
fn copy_templates(from: &Path, to: &Path) -> Result<()> {
    if !from.exists() {
        return Ok(());
    }
    let mut copy = Command::new("cp");
    copy.args(["--archive", "--no-clobber", "--reflink=auto"])
        .arg(from.join("."))
        .arg(to);
    let output = copy.output()?;
    ensure!(
        output.status.success(),
        "cp: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Kills a process and waits until it is gone.
pub(crate) fn kill(pid: Pid) -> Result<()> {
    match kill_process(pid, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => (),
        Err(error) => return Err(error.into()),
    }
    wait_for("a killed process to be gone", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
        Ok(stat.contains(") Z ") || test_kill_process(pid).is_err())
    })
}

/// Asks until it is so.
pub(crate) fn wait_for(what: &str, mut ask: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !ask()? {
        if Instant::now() >= end {
            bail!("waited {PATIENCE:?} for {what}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
