//! The first sandbox of a kind boots a kernel, the next ones are cloned of it: they run what they are asked to, as whom, where
//! and within which limits they are asked to, and no two of them are the same machine.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::network::{WORLD4, World};
use crate::basalt::expect_code;
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "templates",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// What must differ from one machine to the other: a line each.
const IDENTITY: &str = "cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; \
                        head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; echo; \
                        cat /proc/sys/kernel/random/uuid";

/// Goes out to the world.
const OUTWARDS: &str = "exec 3<>/dev/tcp/$0/7000 && echo connected";

/// Twice, seven seconds apart, longer than a journal waits: how many transactions the disk's journal has had, and how often the thread
/// that compacts memory has run.
const QUIET: &str = "look() { head -n1 /proc/fs/jbd2/*/info; \
                     grep -h ctxt $(grep -l 'Name:.*kcompactd' /proc/[0-9]*/status); }; look; sleep 7; look";

/// The limit of all commands' processes.
const PIDS_MAX: &str = "/sys/fs/cgroup/basalt/pids.max";

/// How many are cloned one after the other.
const CLONES: usize = 3;

fn host(host: &Host) -> Result<()> {
    let world = World::new()?;
    let _server = world.serve(&["[::]:7000"])?;
    let node = Node {
        daemon: Daemon::new(host)?,
        image: &host.digest,
    };
    let template = node.first_and_clones()?;
    node.asked_for(&template)?;
    node.its_own()?;
    node.clones_of_clones_and_damage(&template)?;
    for name in ["first", "asked", "second", "third", "booted"] {
        node.daemon.ok(&["exec", name, "true"])?;
        node.daemon.ok(&["rm", "--force", name])?;
    }
    node.daemon.end()
}

struct Node<'h> {
    daemon: Daemon<'h>,
    image: &'h str,
}

impl Node<'_> {
    fn run(&self, options: &[&str], command: &[&str]) -> Result<Output> {
        let words = [&["run", "--memory", "128m"], options, &[self.image, "--"], command].concat();
        self.daemon.run(&words)
    }

    /// One that does nothing.
    fn idle(&self, name: &str, options: &[&str]) -> Result<()> {
        let output = self.run(&[&["-d", "--name", name], options].concat(), &["sleep", "10000"])?;
        expect_code(&output, 0)
    }

    /// The template that it was cloned of.
    fn template_of(&self, name: &str) -> Result<Option<String>> {
        let mut found: Vec<Value> = serde_json::from_str(&self.daemon.ok(&["--json", "inspect", name])?)?;
        let found = found.pop().context("nothing is known of it")?;
        Ok(found["template"].as_str().map(str::to_owned))
    }

    /// The code of a clone's kernel, at least, is mapped by huge pages of its template's memory file.
    fn maps_huge_pages(&self) -> Result<()> {
        self.idle("mapped", &[])?;
        let found = self.daemon.find("mapped")?.context("it is gone")?;
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", found["vmm"]["pid"]))?;
        let sizes = smaps.lines().filter_map(|line| line.strip_prefix("FilePmdMapped:"));
        let sizes = sizes.filter_map(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let kib: u64 = sizes.sum();
        ensure!(kib >= 4096, "{kib} KiB of its memory file are mapped by huge pages");
        self.daemon.ok(&["rm", "--force", "mapped"]).map(drop)
    }

    /// The journal of an idle clone's disk has nothing to write, and its kernel compacts memory for nobody.
    fn is_quiet(&self) -> Result<()> {
        let output = self.run(&[], &["sh", "-c", QUIET])?;
        expect_code(&output, 0)?;
        let said = String::from_utf8(output.stdout)?;
        let lines: Vec<_> = said.lines().collect();
        ensure!(
            lines.len() == 6 && lines[0].contains("transactions"),
            "it said {said:?}"
        );
        ensure!(
            lines[..3] == lines[3..],
            "within seven seconds it became other: {said:?}"
        );
        Ok(())
    }

    /// The first one boots, and the next ones are other machines.
    fn first_and_clones(&self) -> Result<String> {
        // The first one has a limit, which nobody inherits.
        self.idle("first", &["--pids-limit", "50"])?;
        let template = self.daemon.wait_for_templates(1)?.remove(0);
        let of = self.template_of("first")?;
        ensure!(of.is_none(), "the first sandbox was cloned of {of:?}");
        let limit = self.daemon.ok(&["exec", "first", "cat", PIDS_MAX])?;
        ensure!(limit == "50\n", "the first one's limit is {limit:?}");
        let mut said = vec![self.daemon.ok(&["exec", "first", "sh", "-c", IDENTITY])?];
        for _ in 0..CLONES {
            let words = ["--memory", "128m", self.image, "--", "sh", "-c", IDENTITY];
            let (identity, booted) = self.daemon.traced(&words)?;
            ensure!(!booted, "it was no clone");
            said.push(identity);
        }
        differ(&said)?;
        let set = self
            .daemon
            .state
            .join("templates")
            .join(&template)
            .join("write-set.json");
        let set: Vec<(u64, u64)> = serde_json::from_slice(&std::fs::read(set)?)?;
        let pages: u64 = set.iter().map(|(_, pages)| pages).sum();
        ensure!(
            (50..2048).contains(&pages),
            "the first clone wrote {pages} pages: {set:?}"
        );
        self.maps_huge_pages()?;
        self.is_quiet()?;
        let limit = self.run(&[], &["sh", "-c", &format!("cat {PIDS_MAX} || echo max")])?;
        ensure!(limit.stdout == b"max\n", "a clone inherits a limit: {limit:?}");
        Ok(template)
    }

    /// What is asked for counts, not what the first one was asked for.
    fn asked_for(&self, template: &str) -> Result<()> {
        let options = [
            "--env",
            "A=1",
            "--workdir",
            "/tmp",
            "--user",
            "65534",
            "--pids-limit",
            "33",
            "--hostname",
            "other",
        ];
        let published = ["-p", "18099:80"];
        self.idle("asked", &[options.as_slice(), &published].concat())?;
        let of = self.template_of("asked")?;
        ensure!(of.as_deref() == Some(template), "it was cloned of {of:?}");
        let pids = ["exec", "--user", "0", "asked", "cat", PIDS_MAX];
        let limit = self.daemon.ok(&pids)?;
        ensure!(limit == "33\n", "its processes' limit is {limit:?}");
        let script = "echo $A; pwd; id -u; hostname; echo err >&2; exit 7";
        let output = self.run(&options, &["sh", "-c", script])?;
        expect_code(&output, 7)?;
        let (out, err) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(out == "1\n/tmp\n65534\nother\n", "it says {out:?}");
        ensure!(err == "err\n", "it complains {err:?}");
        expect_code(&self.run(&[], &["no-such-program"])?, 127)?;
        // What would have failed without it, too, is not the template's fault.
        expect_code(&self.run(&["-p", "18099:80"], &["true"])?, 125)?;
        let left = self.daemon.templates()?;
        ensure!(left == [template], "afterwards there are {left:?}");
        Ok(())
    }

    /// Disk and network; and started again it boots, with what it has written and who it was.
    fn its_own(&self) -> Result<()> {
        let daemon = &self.daemon;
        let write = "echo mine > /etc/mine && sync";
        daemon.ok(&["exec", "--user", "0", "asked", "sh", "-c", write])?;
        let seen = daemon.run(&["exec", "first", "test", "-e", "/etc/mine"])?;
        ensure!(seen.status.code() == Some(1), "another sandbox has its file");
        let connected = daemon.ok(&["exec", "asked", "bash", "-c", OUTWARDS, WORLD4])?;
        ensure!(connected == "connected\n", "it reaches the world as {connected:?}");
        let id = daemon.ok(&["exec", "asked", "cat", "/etc/machine-id"])?;
        daemon.ok(&["kill", "asked"])?;
        daemon.ok(&["start", "asked"])?;
        let after = daemon.ok(&["exec", "asked", "cat", "/etc/machine-id", "/etc/mine"])?;
        ensure!(
            after == format!("{id}mine\n"),
            "after a restart it says {after:?}, before {id:?}"
        );
        let of = self.template_of("asked")?;
        ensure!(of.is_none(), "after a restart it is a clone of {of:?}");
        Ok(())
    }

    /// A clone can be kept and cloned; what was cut short is no use to anybody.
    fn clones_of_clones_and_damage(&self, template: &str) -> Result<()> {
        self.idle("second", &[])?;
        self.daemon.ok(&["snapshot", "create", "second", "kept"])?;
        self.daemon.ok(&["clone", "--name", "third", "kept"])?;
        let state = self.daemon.state.join("templates").join(template).join("state");
        OpenOptions::new().write(true).open(&state)?.set_len(100)?;
        self.idle("booted", &[])?;
        let of = self.template_of("booted")?;
        ensure!(of.is_none(), "it was cloned of a damaged template, {of:?}");
        self.daemon.wait_for_templates(1).map(drop)
    }
}

/// No line is said twice.
fn differ(said: &[String]) -> Result<()> {
    let all: Vec<&str> = said.iter().flat_map(|said| said.lines()).collect();
    ensure!(all.len() == 5 * said.len(), "not everybody says five lines: {said:?}");
    let different: BTreeSet<_> = all.iter().collect();
    ensure!(all.len() == different.len(), "something is said twice: {said:?}");
    Ok(())
}
