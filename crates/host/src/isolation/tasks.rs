//! Threads of the root cgroup, which no cpuset holds: the kernel's own, and whatever nobody has put elsewhere.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use base::CpuSet;
use rustix::process::Pid;
use rustix::thread::{sched_getaffinity, sched_setaffinity};

use super::Error;
use super::journal::Bound;

/// Whoever may run on which CPUs.
#[derive(Debug)]
pub(super) struct Masks<'s> {
    pub(super) possible: &'s CpuSet,
    pub(super) online: &'s CpuSet,
    /// Kept free until now, by all or by some.
    pub(super) before: &'s [CpuSet],
    /// And from now on.
    pub(super) isolated: &'s CpuSet,
}

impl Masks<'_> {
    /// Where a thread that is allowed these is to be allowed from now on; `None` leaves it alone.
    fn next(&self, now: &CpuSet, saved: Option<&CpuSet>) -> Option<Next> {
        let mut free = self.before.iter().map(|before| self.online.minus(before));
        let free = now == self.online || free.any(|free| *now == free);
        let (whole, bound) = match saved {
            Some(saved) => (saved.clone(), false),
            None if free => (self.possible.clone(), false),
            None => (now.clone(), true),
        };
        let next = whole.minus(self.isolated);
        // One of a CPU's own.
        let stays = next.is_empty() || next.and(self.online) == *now;
        (!stays).then_some(Next {
            cpus: next,
            was: bound.then_some(whole),
        })
    }
}

/// Where a thread goes, and where it may go again later, if not everywhere.
#[derive(Debug, PartialEq, Eq)]
struct Next {
    cpus: CpuSet,
    was: Option<CpuSet>,
}

/// Moves them; those that others begin inherit it.
pub(super) fn keep_away(
    top: &Path,
    proc: &Path,
    masks: &Masks<'_>,
    saved: &mut BTreeMap<u32, Bound>,
) -> Result<(), Error> {
    let path = top.join("cgroup.threads");
    let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    for number in text.lines().filter_map(|line| line.parse::<u32>().ok()) {
        let Some(pid) = i32::try_from(number).ok().and_then(Pid::from_raw) else {
            continue;
        };
        // Gone meanwhile.
        let (Ok(now), Some(start)) = (sched_getaffinity(Some(pid)), started(proc, number)) else {
            continue;
        };
        let own = saved.get(&number).filter(|bound| bound.start == start);
        if let Some(next) = masks.next(&from_kernel(&now), own.map(|bound| &bound.cpus)) {
            // Threads of the kernel that belong to a CPU refuse.
            if sched_setaffinity(Some(pid), &for_kernel(&next.cpus)).is_ok()
                && let Some(cpus) = next.was
            {
                saved.insert(number, Bound { start, cpus });
            }
        }
    }
    if masks.isolated.is_empty() {
        saved.clear();
    }
    Ok(())
}

/// When a thread began (proc(5), /proc/pid/stat, field 22).
fn started(proc: &Path, number: u32) -> Option<u64> {
    let stat = fs::read_to_string(proc.join(format!("{number}/stat"))).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

fn from_kernel(cpus: &rustix::thread::CpuSet) -> CpuSet {
    let all = 0..rustix::thread::CpuSet::MAX_CPU;
    let set = all.filter(|cpu| cpus.is_set(*cpu));
    set.filter_map(|cpu| u32::try_from(cpu).ok()).collect()
}

fn for_kernel(cpus: &CpuSet) -> rustix::thread::CpuSet {
    let mut set = rustix::thread::CpuSet::new();
    let all = cpus.iter().filter_map(|cpu| usize::try_from(cpu).ok());
    all.filter(|cpu| *cpu < rustix::thread::CpuSet::MAX_CPU)
        .for_each(|cpu| set.set(cpu));
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn next(now: &str, saved: Option<&str>, before: &str, isolated: &str) -> Option<(String, Option<String>)> {
        let masks = Masks {
            possible: &set("0-7"),
            online: &set("0-3"),
            before: &[set(before)],
            isolated: &set(isolated),
        };
        let next = masks.next(&set(now), saved.map(set).as_ref())?;
        Some((next.cpus.to_string(), next.was.map(|was| was.to_string())))
    }

    #[test]
    fn whoever_may_run_everywhere_is_kept_off_and_let_back() {
        assert_eq!(next("0-3", None, "", "3"), Some(("0-2,4-7".into(), None)));
        assert_eq!(next("0-2", None, "3", "2-3"), Some(("0-1,4-7".into(), None)));
        assert_eq!(next("0-1", None, "2-3", ""), Some(("0-7".into(), None)));
        assert_eq!(next("0-2", None, "3", "3"), None);
    }

    #[test]
    fn whoever_is_bound_keeps_what_is_left_and_gets_the_rest_back() {
        assert_eq!(next("2-3", None, "", "3"), Some(("2".into(), Some("2-3".into()))));
        assert_eq!(next("2", Some("2-3"), "3", ""), Some(("2-3".into(), None)));
        assert_eq!(next("3", None, "", "3"), None, "it belongs to that CPU");
        assert_eq!(next("1", None, "", "3"), None);
    }
}
