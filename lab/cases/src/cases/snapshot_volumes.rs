//! A sandbox with volumes is kept, cloned and put back while it uses them: what it has open goes on, several times in a row, and files
//! that have become others by then are not taken for what they were. `BASALT_ROUNDS` says how often. The guest's half is
//! `snapshot_volumes.py` beside this file.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::basalt::expect_refusal;
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "snapshot-volumes",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// Each sandbox is kept, and goes on as the next one.
const ROUNDS: usize = 2;

/// So many lines are what a sandbox is waited for that is at work.
const LINES: u64 = 8;

struct Stage<'h> {
    daemon: Daemon<'h>,
    image: &'h str,
    /// A directory of the host that all have.
    shared: PathBuf,
}

fn host(host: &Host) -> Result<()> {
    let shared = host.scratch.join("shared");
    fs::create_dir_all(shared.join("many"))?;
    (0..50).try_for_each(|number| fs::write(shared.join("many").join(number.to_string()), ""))?;
    fs::write(shared.join("held"), "held")?;
    fs::write(shared.join("guest.py"), include_str!("snapshot_volumes.py"))?;
    let stage = Stage {
        daemon: Daemon::new(host)?,
        image: &host.digest,
        shared,
    };
    stage.in_a_row()?;
    stage.side_by_side()?;
    stage.put_back()?;
    stage.others_in_their_places()?;
    stage.stays_here()?;
    stage.daemon.end()
}

impl Stage<'_> {
    /// One that is at work.
    fn run(&self, name: &str, company: &str) -> Result<()> {
        let volume = format!("{}:/x", self.shared.display());
        let options = [
            "run",
            "-d",
            "--name",
            name,
            "--memory",
            "128m",
            "-v",
            &volume,
            "-v",
            "kept:/data",
        ];
        let command = [self.image, "--", "python3", "/x/guest.py", company];
        self.daemon.ok(&[&options[..], &command[..]].concat())?;
        self.goes_on(name, (0, 0))
    }

    /// What each host name has counted to, in the order in which it was written.
    fn counted(&self) -> Result<BTreeMap<String, Vec<u64>>> {
        let text = match fs::read_to_string(self.daemon.state.join("volumes/kept/_data/log")) {
            // Nobody has begun yet.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            other => other?,
        };
        let mut all: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        // The last line may be about to be written.
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let (who, number) = line
                .trim_end()
                .split_once(' ')
                .with_context(|| format!("the log has {line:?}"))?;
            all.entry(who.to_owned()).or_default().push(number.parse()?);
        }
        Ok(all)
    }

    fn last(&self, who: &str) -> Result<u64> {
        let all = self.counted()?;
        Ok(all
            .get(who)
            .and_then(|numbers| numbers.last().copied())
            .unwrap_or_default())
    }

    fn name(&self, sandbox: &str) -> Result<String> {
        Ok(self.daemon.ok(&["exec", sandbox, "hostname"])?.trim().to_owned())
    }

    /// It counts, without a gap, on from what was kept, and has found nothing wrong.
    fn goes_on(&self, sandbox: &str, (least, most): (u64, u64)) -> Result<()> {
        let who = self.name(sandbox)?;
        let begun = self.last(&who)?;
        let waited = wait_for("what it has open to be used", || Ok(self.last(&who)? >= begun + LINES));
        let errors = self
            .daemon
            .ok(&["exec", sandbox, "sh", "-c", "cat /errors 2>/dev/null; true"])?;
        ensure!(errors.is_empty(), "{sandbox} has found: {errors}");
        waited?;
        let numbers = self.counted()?.remove(&who).unwrap_or_default();
        let first = numbers.first().copied().unwrap_or_default();
        ensure!(
            first > least && first <= most + 1,
            "{sandbox} counts on from {first}, and was kept between {least} and {most}"
        );
        let whole = numbers.windows(2).all(|pair| pair[1] == pair[0] + 1);
        ensure!(whole, "{sandbox} has counted {numbers:?}");
        Ok(())
    }

    /// Keeps one that is at work; between which of its numbers.
    fn keep(&self, sandbox: &str, name: &str) -> Result<(u64, u64)> {
        let who = self.name(sandbox)?;
        let before = self.last(&who)?;
        self.daemon.ok(&["snapshot", "create", sandbox, name])?;
        Ok((before, self.last(&who)?))
    }

    /// Each is cloned of the one before, which has gone on meanwhile.
    fn in_a_row(&self) -> Result<()> {
        let rounds = std::env::var("BASALT_ROUNDS").ok();
        let rounds = rounds.map_or(Ok(ROUNDS), |text| text.parse().context("BASALT_ROUNDS"))?;
        self.run("origin", "alone")?;
        let mut last = "origin".to_owned();
        for round in 0..rounds {
            let kept = format!("kept-{round}");
            let between = self.keep(&last, &kept)?;
            self.daemon.ok(&["rm", "--force", &last])?;
            last = format!("clone-{round}");
            self.daemon.ok(&["clone", "--name", &last, &kept])?;
            self.goes_on(&last, between).with_context(|| format!("round {round}"))?;
            self.daemon.ok(&["snapshot", "rm", &kept])?;
        }
        self.daemon.ok(&["rm", "--force", &last]).map(drop)
    }

    /// Two of one, beside it.
    fn side_by_side(&self) -> Result<()> {
        let daemon = &self.daemon;
        self.run("one", "beside others")?;
        let between = self.keep("one", "kept")?;
        for name in ["two", "three"] {
            daemon.ok(&["clone", "--name", name, "kept"])?;
            self.goes_on(name, between)?;
        }
        self.goes_on("one", (0, 0))?;
        // A file without a name is there as long as who has made it.
        for (name, wanted) in [("one", "mine"), ("two", "Stale file handle")] {
            daemon.ok(&["exec", name, "touch", "/try"])?;
            wait_for("what has no name to be read", || {
                Ok(daemon.ok(&["exec", name, "sh", "-c", "test -e /try || echo done"])? == "done\n")
            })?;
            let said = daemon.ok(&["exec", name, "cat", "/tried"])?;
            ensure!(said == wanted, "a file without a name is {said:?} in {name}");
        }
        // Its clones boot like any other, with what they had.
        daemon.ok(&["kill", "two"])?;
        daemon.ok(&["start", "two"])?;
        ensure!(
            daemon.ok(&["exec", "two", "cat", "/x/held"])? == "held",
            "started again it has no volume"
        );
        daemon.ok(&["rm", "--force", "two", "three"]).map(drop)
    }

    fn put_back(&self) -> Result<()> {
        let who = self.name("one")?;
        for ended in [false, true] {
            let counted = self.counted()?.get(&who).map_or(0, Vec::len).saturating_sub(1);
            if ended {
                self.daemon.ok(&["kill", "one"])?;
            }
            self.daemon.ok(&["rollback", "one", "kept"])?;
            // Somewhere behind what there was it counts less than before.
            wait_for("it to count on from what was kept", || {
                let numbers = self.counted()?.remove(&who).unwrap_or_default();
                Ok(numbers
                    .get(counted..)
                    .unwrap_or_default()
                    .windows(2)
                    .any(|pair| pair[1] < pair[0]))
            })?;
            let last = self.last(&who)?;
            wait_for("it to go on", || Ok(self.last(&who)? > last + LINES))?;
            let errors = self
                .daemon
                .ok(&["exec", "one", "sh", "-c", "cat /errors 2>/dev/null; true"])?;
            ensure!(errors.is_empty(), "put back it has found: {errors}");
        }
        Ok(())
    }

    /// What has taken a file's place meanwhile is found by its name, and not by what was open.
    fn others_in_their_places(&self) -> Result<()> {
        fs::write(self.shared.join("new"), "another")?;
        fs::rename(self.shared.join("new"), self.shared.join("held"))?;
        self.daemon.ok(&["clone", "--name", "late", "kept"])?;
        ensure!(
            self.daemon.ok(&["exec", "late", "cat", "/x/held"])? == "another",
            "by its name it is another file"
        );
        let mut errors = String::new();
        wait_for("what is gone to be noticed", || {
            errors = self
                .daemon
                .ok(&["exec", "late", "sh", "-c", "cat /errors 2>/dev/null; true"])?;
            Ok(!errors.is_empty())
        })?;
        let refused = errors.lines().all(|line| line.ends_with("Stale file handle"));
        ensure!(refused, "a file that is another one: {errors}");
        self.daemon.ok(&["rm", "--force", "late"]).map(drop)
    }

    /// Its volumes are this host's.
    fn stays_here(&self) -> Result<()> {
        let daemon = &self.daemon;
        let file = self.shared.join("file").display().to_string();
        let saved = daemon.run(&["snapshot", "save", "kept", "--output", &file])?;
        expect_refusal(&saved, 1, &["`kept`", "stays on this host", "volume at /x"])?;
        ensure!(!fs::exists(&file)?, "something was saved all the same");
        fs::rename(&self.shared, self.shared.with_extension("away"))?;
        let cloned = daemon.run(&["clone", "kept"])?;
        expect_refusal(&cloned, 1, &["is not there: make it first"])?;
        let rolled = daemon.run(&["rollback", "one", "kept"])?;
        expect_refusal(&rolled, 1, &["is not there: make it first"])?;
        // And it goes on as it was.
        daemon.ok(&["exec", "one", "true"])?;
        daemon.ok(&["rm", "--force", "one"])?;
        daemon.ok(&["snapshot", "rm", "kept"])?;
        daemon.ok(&["volume", "rm", "kept"]).map(drop)
    }
}
