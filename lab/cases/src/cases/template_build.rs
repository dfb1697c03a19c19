//! A template that is built by commands: what they have made and what they have left running is in each clone, which is a machine of
//! its own all the same. A build that fails leaves nothing, and a machine that has settled takes less room than one that has not.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::basalt::expect_code;
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "template-build",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// The first command: files, and a hook that each clone runs before anything goes on in it.
const FILES: &str = "mkdir -p /srv /etc/basalt/on-clone.d && echo $WORD > /srv/word && \
                     printf '#!/bin/sh\\necho $BASALT_CLONE_ID > /srv/hooked\\n' > /etc/basalt/on-clone.d/50-note && \
                     chmod +x /etc/basalt/on-clone.d/50-note";

/// The second one: a server, which does not end.
const SERVER: &str = "cd /srv && echo $$ > pid && exec python3 -m http.server 8000 --bind 127.0.0.1";

/// What it answers.
const ASK: &str = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/8000 && printf \"GET /word HTTP/1.0\\r\\n\\r\\n\" >&3 && tail -n 1 <&3 | grep .'";

/// What must differ from one machine to the other, a line each, and what must not: since when the server runs, by its kernel's
/// clock.
const IDENTITY: &str = "cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; \
                        head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; echo; \
                        cat /srv/hooked; cut -d' ' -f22 /proc/$(cat /srv/pid)/stat";

/// Leaves 25 MB of no use in the memory of whoever runs it, as many in its caches and on its disk, and some more in its caches.
const WASTE: &str = "python3 -c 'open(\"/var/waste\", \"wb\").write(b\"w\" * 25000000)'; sync; \
                     cat /var/waste > /dev/null; rm /var/waste; cat /usr/lib/python3*/*.py > /dev/null";

/// How many are cloned.
const CLONES: [&str; 2] = ["one", "two"];

fn host(host: &Host) -> Result<()> {
    let node = Node {
        daemon: Daemon::new(host)?,
        image: &host.digest,
    };
    node.clones_go_on()?;
    node.asked_for()?;
    node.in_another_size()?;
    node.failures()?;
    node.sizes_go_with_it()?;
    node.settled()?;
    node.daemon.ok(&["template", "prune", "--all"])?;
    node.daemon.end()
}

struct Node<'h> {
    daemon: Daemon<'h>,
    image: &'h str,
}

impl Node<'_> {
    fn build(&self, words: &[&str]) -> Result<Output> {
        let fixed = ["template", "build", "--memory", "192m", "--from", self.image];
        self.daemon.run(&[&fixed, words].concat())
    }

    fn clones_go_on(&self) -> Result<()> {
        let begun = Instant::now();
        let words = ["--name", "server", "-e", "WORD=served", "--run", FILES, "--run", SERVER];
        let built = self.build(&[words.as_slice(), &["--ready", ASK]].concat())?;
        expect_code(&built, 0)?;
        let said = String::from_utf8_lossy(&built.stderr);
        ensure!(
            said.contains("ready after"),
            "it was not asked whether it is ready: {said}"
        );
        log::info!("built in {:?}", begun.elapsed());
        self.daemon.expect_no_strangers(&[])?;
        let mut said = Vec::new();
        for name in CLONES {
            let begun = Instant::now();
            let run = [
                "--json",
                "run",
                "-d",
                "--name",
                name,
                "--template",
                "server",
                "--",
                "sleep",
                "10000",
            ];
            self.daemon.ok(&run)?;
            log::info!("cloned in {:?}", begun.elapsed());
            let answer = self.daemon.ok(&["exec", name, "sh", "-c", ASK])?;
            ensure!(answer == "served\n", "the server of {name} says {answer:?}");
            said.push(self.daemon.ok(&["exec", "--user", "0", name, "sh", "-c", IDENTITY])?);
        }
        are_machines_of_their_own(&said)?;
        // Whose command ends goes with all that was left running in it.
        let (said, booted) = self.daemon.traced(&["--template", "server", "--", "sh", "-c", ASK])?;
        ensure!(
            !booted && said == "served\n",
            "it says {said:?}, and has booted: {booted}"
        );
        Ok(())
    }

    /// What is asked for counts, and the template's size.
    fn asked_for(&self) -> Result<()> {
        let options = [
            "-e",
            "A=1",
            "-w",
            "/tmp",
            "-u",
            "65534",
            "--hostname",
            "other",
            "--pids-limit",
            "33",
        ];
        let script = "echo $A$WORD; pwd; id -u; hostname; cat /sys/fs/cgroup/basalt/pids.max; exit 7";
        let run = [
            &["run", "--template", "server"],
            options.as_slice(),
            &["--", "sh", "-c", script],
        ]
        .concat();
        let output = self.daemon.run(&run)?;
        expect_code(&output, 7)?;
        let out = String::from_utf8(output.stdout)?;
        ensure!(out == "1\n/tmp\n65534\nother\n33\n", "it says {out:?}");
        let refused = self.daemon.run(&["rmi", self.image])?;
        expect_code(&refused, 1)
    }

    /// It is built for that size once, and cloned from then on.
    fn in_another_size(&self) -> Result<()> {
        let before = self.daemon.templates()?;
        let script = format!("nproc; {ASK}");
        for builds in [true, false] {
            let size = ["--template", "server", "--cpus", "2", "--memory", "256m"];
            let output = self
                .daemon
                .run(&[&["run", "--trace"], &size[..], &["--", "sh", "-c", &script]].concat())?;
            expect_code(&output, 0)?;
            let (out, told) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
            ensure!(out == "2\nserved\n", "in another size it says {out:?}");
            let built = told.contains("the template server is built for 2 CPUs, 256 MiB of memory");
            ensure!(built == builds, "it was built, {builds} expected: {told}");
        }
        let after = self.daemon.templates()?;
        ensure!(
            after.len() == before.len() + 1,
            "there were {before:?}, and now there are {after:?}"
        );
        // As large as it is it is still the same one.
        let found = self.daemon.ok(&["--json", "template", "inspect", "server"])?;
        let found: Vec<Value> = serde_json::from_str(&found)?;
        ensure!(
            found[0]["resources"]["cpus"] == 1,
            "its name went to another: {found:?}"
        );
        Ok(())
    }

    fn sizes_go_with_it(&self) -> Result<()> {
        let before = self.daemon.templates()?;
        self.daemon.ok(&["template", "rm", "server"])?;
        let after = self.daemon.templates()?;
        ensure!(
            after.len() + 2 == before.len(),
            "of {before:?} there are still {after:?}"
        );
        Ok(())
    }

    fn failures(&self) -> Result<()> {
        let before = self.daemon.templates()?;
        for (words, why) in [
            (
                &["--run", "true", "--run", "echo broken >&2; exit 3"][..],
                "ended with code 3",
            ),
            (&["--run", "exit 4", "--ready", "false"], "ended with code 4"),
            (
                &["--ready", "exit 5", "--timeout", "2s"],
                "ended with code 5 the last time",
            ),
        ] {
            let output = self.build(words)?;
            expect_code(&output, 1)?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(said.contains(why), "{words:?}: it says {said}");
        }
        ensure!(
            self.daemon.templates()? == before,
            "there are other templates than before"
        );
        let places = fs::read_dir(self.daemon.state.join("templates"))?.count();
        ensure!(places == before.len(), "{places} places, {} templates", before.len());
        for name in CLONES {
            self.daemon.ok(&["rm", "--force", name])?;
        }
        self.daemon.expect_no_strangers(&[])
    }

    /// The same is done in a sandbox, of which a snapshot is taken.
    fn settled(&self) -> Result<()> {
        let sandbox = ["run", "-d", "--boot", "--memory", "192m", "--name", "wasteful"];
        let command = [self.image, "--", "sh", "-c", "sleep 10000"];
        self.daemon.ok(&[sandbox.as_slice(), &command].concat())?;
        self.daemon
            .ok(&["exec", "--user", "0", "wasteful", "sh", "-c", WASTE])?;
        self.daemon.ok(&["snapshot", "create", "wasteful", "waste"])?;
        self.daemon.ok(&["rm", "--force", "wasteful"])?;
        let unsettled = Taken::by(&self.daemon.state.join("snapshots/waste"))?;
        self.daemon.ok(&["snapshot", "rm", "waste"])?;
        let built = self.build(&["--name", "frugal", "--run", WASTE])?;
        expect_code(&built, 0)?;
        let inspected: Vec<Value> =
            serde_json::from_str(&self.daemon.ok(&["--json", "template", "inspect", "frugal"])?)?;
        let id = inspected[0]["id"].as_str().context("a template without id")?;
        let settled = Taken::by(&self.daemon.state.join("templates").join(id))?;
        let both = format!("settled it takes {settled:?} MiB, otherwise {unsettled:?} MiB");
        log::info!("{both}");
        ensure!(settled.memory + 25 < unsettled.memory, "{both}");
        ensure!(settled.disk + 20 < unsettled.disk, "{both}");
        let output = self
            .daemon
            .run(&["run", "--template", "frugal", "--", "echo", "runs"])?;
        expect_code(&output, 0)
    }
}

/// What a machine takes on the disk, in MiB.
#[derive(Debug)]
struct Taken {
    memory: u64,
    disk: u64,
}

impl Taken {
    fn by(place: &Path) -> Result<Self> {
        const BLOCKS_PER_MIB: u64 = (1 << 20) / 512;
        let mib = |name: &str| -> Result<u64> { Ok(fs::metadata(place.join(name))?.blocks() / BLOCKS_PER_MIB) };
        Ok(Self {
            memory: mib("memory")?,
            disk: mib("disk")?,
        })
    }
}

/// Nothing that names a machine is said twice, but the server's start, which is the template's. The hook knew whose machine it is.
fn are_machines_of_their_own(said: &[String]) -> Result<()> {
    let said: Vec<Vec<&str>> = said.iter().map(|said| said.lines().collect()).collect();
    let mut own = BTreeSet::new();
    let mut starts = BTreeSet::new();
    for lines in &said {
        let &[boot_id, machine_id, hostname, random, hooked, start] = lines.as_slice() else {
            anyhow::bail!("a clone says {lines:?}");
        };
        ensure!(
            hooked == machine_id,
            "its hook was told {hooked}, but it is {machine_id}"
        );
        own.extend([boot_id, machine_id, hostname, random]);
        starts.insert(start);
    }
    ensure!(own.len() == 4 * said.len(), "something is said twice: {said:?}");
    ensure!(starts.len() == 1, "not all servers are the template's: {said:?}");
    Ok(())
}
