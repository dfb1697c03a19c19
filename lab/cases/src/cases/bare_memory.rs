//! Memory of guests that own their CPUs, in huge pages that the host has set aside: as many as there are, given back when the guest goes,
//! however it goes. In a lab that has pages of 1 GiB (`basalt-lab up --kernel-args 'hugepagesz=1G hugepages=1'`) also in those.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::bare::{Module, in_lab, online, wait_online};
use super::dedicated::{kill_vmm, vmm_of};
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "class-bare-memory",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// Pages of 2 MiB that the host sets aside: fewer than the guest has.
const PAGES: u64 = 100;

/// Has a program keep much of the guest's memory, and count what is in it.
const FILL: &str = "yes | head -c 90000000 | tail -c 90000000 | wc -c";

/// The pages of one size that the host has set aside.
struct Pool {
    directory: PathBuf,
    page: u64,
}

impl Pool {
    fn of(page: u64) -> Self {
        Self {
            directory: format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page >> 10).into(),
            page,
        }
    }

    /// What the kernel says of them; nothing of a size that this processor has not.
    fn number(&self, name: &str) -> Result<u64> {
        let path = self.directory.join(name);
        if !self.directory.exists() {
            return Ok(0);
        }
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        text.trim().parse().with_context(|| path.display().to_string())
    }

    fn free(&self) -> Result<u64> {
        self.number("free_hugepages")
    }

    /// How many whole ones there are for a memory.
    fn fitting(&self, bytes: u64) -> Result<u64> {
        Ok(self.free()?.min(bytes / self.page))
    }
}

/// Pages that are set aside as long as this lives.
struct Reserved(Pool, u64);

impl Reserved {
    fn more(pool: Pool, pages: u64) -> Result<Self> {
        let before = pool.number("nr_hugepages")?;
        let reserved = Self(pool, before);
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        fs::write("/proc/sys/vm/compact_memory", "1")?;
        reserved.set(before + pages)?;
        let now = reserved.0.number("nr_hugepages")?;
        ensure!(
            now == before + pages,
            "the host could set aside {} of {pages} huge pages",
            now - before
        );
        Ok(reserved)
    }

    fn set(&self, pages: u64) -> Result<()> {
        Ok(fs::write(self.0.directory.join("nr_hugepages"), pages.to_string())?)
    }

    fn give_back(self) -> Result<()> {
        self.set(self.1)?;
        let now = self.0.number("nr_hugepages")?;
        ensure!(now == self.1, "{now} huge pages are set aside, not {}", self.1);
        // Not twice.
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Reserved {
    /// After a failure, whose words are worth more than ours.
    fn drop(&mut self) {
        drop(self.set(self.1));
    }
}

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let digest = host.digest.as_str();
    let daemon = Daemon::new(host)?;
    let module = Module::load(host)?;
    let small = Reserved::more(Pool::of(2 << 20), PAGES)?;
    ensure!(small.0.free()? >= PAGES, "somebody has taken huge pages");
    // A template is made of no guest of this class; nobody else takes such pages.
    mixed(digest, &daemon, &small.0, 256 << 20)?;
    if Pool::of(1 << 30).free()? > 0 {
        mixed(digest, &daemon, &small.0, (1 << 30) + (256 << 20))?;
    }
    small.give_back()?;
    // Without any it has what every guest has.
    mixed(digest, &daemon, &Pool::of(2 << 20), 256 << 20)?;
    daemon.end()?;
    module.unload()
}

/// A sandbox in what huge pages there are: its VMM says so, the host has none left, it uses all of its memory, is kept, and gives them
/// back when it is stopped and when its VMM is killed.
fn mixed(digest: &str, daemon: &Daemon<'_>, small: &Pool, memory: u64) -> Result<()> {
    let large = Pool::of(1 << 30);
    let all = online()?;
    let before = (large.free()?, small.free()?);
    let in_large = large.fitting(memory)?;
    let in_small = small.fitting(memory - in_large * large.page)?;
    let size = memory.to_string();
    let options = ["run", "-d", "--name", "large", "--class", "bare", "--memory", &size];
    let command = [digest, "--", "sleep", "1000"];
    let id = daemon.ok(&[options.as_slice(), &command].concat())?;
    let id = id.trim();
    let told = daemon.ok(&["daemon", "metrics"])?;
    for (size, pages, pool) in [("1g", in_large, &large), ("2m", in_small, small)] {
        let bytes = pages * pool.page;
        let expected = format!("basalt_vmm_memory_huge_bytes{{sandbox=\"{id}\",size=\"{size}\"}} {bytes}\n");
        let lines = told.lines().filter(|line| line.contains("memory_huge_bytes"));
        let lines: Vec<_> = lines.collect();
        ensure!(told.contains(&expected), "not {expected}: {lines:?}");
    }
    let during = (large.free()?, small.free()?);
    ensure!(
        during == (before.0 - in_large, before.1 - in_small),
        "of {before:?} free huge pages {during:?} are left; {in_large} and {in_small} are a guest's"
    );
    let counted = daemon.ok(&["exec", "large", "--", "sh", "-c", FILL])?;
    ensure!(counted.trim() == "90000000", "the guest counts {counted}");
    daemon.ok(&["snapshot", "create", "large", "kept"])?;
    daemon.ok(&["exec", "large", "--", "true"])?;
    daemon.ok(&["snapshot", "rm", "kept"])?;
    let free_again = |how: &str| -> Result<()> {
        wait_online(&all)?;
        let what = format!("huge pages of a guest that was {how}");
        wait_for(&what, || Ok((large.free()?, small.free()?) == before))
    };
    daemon.ok(&["stop", "large"])?;
    free_again("stopped")?;
    daemon.ok(&["start", "large"])?;
    ensure!((large.free()?, small.free()?) == during, "a second start has others");
    kill_vmm(vmm_of(daemon, "large")?)?;
    free_again("killed")?;
    daemon.ok(&["rm", "--force", "large"])?;
    Ok(())
}
