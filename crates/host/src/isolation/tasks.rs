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
    /// Kept free until now, by all or by some; nothing where nothing was.
    pub(super) before: &'s [CpuSet],
    /// Those that were reserved when threads were moved: the kernel takes only those into a mask that are online.
    pub(super) missed: &'s CpuSet,
    /// Kept free from now on.
    pub(super) isolated: &'s CpuSet,
}

/// What becomes of a thread.
#[derive(Debug, Default, PartialEq, Eq)]
struct Verdict {
    /// Where it may run from now on, if that is something else.
    next: Option<CpuSet>,
    /// Where it might run before, if that has to be known later.
    was: Option<CpuSet>,
}

impl Masks<'_> {
    /// It may run everywhere but where it was kept off.
    fn is_free(&self, now: &CpuSet) -> bool {
        let all = |whole: CpuSet| now.minus(&whole).is_empty() && whole.minus(now).minus(self.missed).is_empty();
        all(self.online.clone()) || self.before.iter().any(|before| all(self.online.minus(before)))
    }

    fn verdict(&self, now: &CpuSet, saved: Option<&CpuSet>) -> Verdict {
        let whole = match saved {
            Some(saved) => saved.clone(),
            None if self.is_free(now) => self.possible.clone(),
            None => now.clone(),
        };
        let left = whole.minus(self.isolated);
        // One that belongs to a CPU of these refuses to go.
        let next = match left.is_empty() {
            true => self.possible.minus(self.isolated),
            false => left,
        };
        Verdict {
            next: (next.and(self.online) != *now).then_some(next),
            was: (saved.is_none() && !self.is_free(now)).then(|| now.clone()),
        }
    }
}

/// Where threads are to go; which of them are bound is in `saved` then, and has to be kept before they go.
pub(super) fn plan(
    top: &Path,
    proc: &Path,
    masks: &Masks<'_>,
    saved: &mut BTreeMap<u32, Bound>,
) -> Result<Vec<(Pid, CpuSet)>, Error> {
    let path = top.join("cgroup.threads");
    let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    let mut moves = Vec::new();
    for number in text.lines().filter_map(|line| line.parse::<u32>().ok()) {
        let Some(pid) = i32::try_from(number).ok().and_then(Pid::from_raw) else {
            continue;
        };
        // Gone meanwhile.
        let (Ok(now), Some(start)) = (sched_getaffinity(Some(pid)), started(proc, number)) else {
            continue;
        };
        let own = saved.get(&number).filter(|bound| bound.start == start);
        let verdict = masks.verdict(&from_kernel(&now), own.map(|bound| &bound.cpus));
        if let Some(cpus) = verdict.was {
            saved.insert(number, Bound { start, cpus });
        }
        moves.extend(verdict.next.map(|cpus| (pid, cpus)));
    }
    Ok(moves)
}

/// Moves them; those that others begin inherit it. Threads of the kernel that belong to a CPU refuse, and some are gone.
pub(super) fn carry_out(moves: &[(Pid, CpuSet)]) {
    for (pid, cpus) in moves {
        if let Err(error) = sched_setaffinity(Some(*pid), &for_kernel(cpus)) {
            log::trace!("thread {} stays where it may be: {error}", pid.as_raw_nonzero());
        }
    }
}

/// When a thread began (proc(5), /proc/pid/stat, field 22).
pub(super) fn started(proc: &Path, number: u32) -> Option<u64> {
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

    fn verdict(now: &str, saved: Option<&str>, before: &[&str], isolated: &str) -> (Option<String>, Option<String>) {
        let before: Vec<CpuSet> = before.iter().map(|before| set(before)).collect();
        let masks = Masks {
            possible: &set("0-7"),
            online: &set("0-3"),
            before: &before,
            missed: &CpuSet::default(),
            isolated: &set(isolated),
        };
        let verdict = masks.verdict(&set(now), saved.map(set).as_ref());
        (
            verdict.next.map(|next| next.to_string()),
            verdict.was.map(|was| was.to_string()),
        )
    }

    fn goes(to: &str) -> (Option<String>, Option<String>) {
        (Some(to.to_owned()), None)
    }

    #[test]
    fn whoever_may_run_everywhere_is_kept_off_and_let_back() {
        assert_eq!(verdict("0-3", None, &[], "3"), goes("0-2,4-7"));
        assert_eq!(verdict("0-2", None, &["3"], "2-3"), goes("0-1,4-7"));
        assert_eq!(verdict("0-1", None, &["2-3"], ""), goes("0-7"));
        assert_eq!(verdict("0-2", None, &["3"], "3"), (None, None));
    }

    #[test]
    fn a_change_that_came_to_no_end_is_known() {
        // From 3 to 2 and 3 it was on its way; some have come there.
        for now in ["0-2", "0-1"] {
            assert_eq!(verdict(now, None, &["3", "2-3"], ""), goes("0-7"), "{now}");
        }
    }

    #[test]
    fn whoever_is_bound_keeps_what_is_left_and_gets_the_rest_back() {
        let bound = |to: Option<&str>, was: &str| (to.map(str::to_owned), Some(was.to_owned()));
        assert_eq!(verdict("2-3", None, &[], "3"), bound(Some("2"), "2-3"));
        assert_eq!(verdict("2", Some("2-3"), &["3"], ""), goes("2-3"));
        assert_eq!(verdict("1", None, &[], "3"), bound(None, "1"));
        // Bound to what happens to be left: known as such from the first time on.
        assert_eq!(verdict("0-2", None, &[], "3"), bound(None, "0-2"));
        assert_eq!(verdict("0-2", Some("0-2"), &["3"], ""), (None, None));
        assert_eq!(verdict("3", None, &[], "3"), bound(Some("0-2,4-7"), "3"));
        assert_eq!(verdict("0-2,4-7", Some("3"), &["3"], ""), goes("3"));
    }

    #[test]
    fn a_reserved_cpu_that_has_come_back_is_nobodys_reason_to_stay_away() {
        let masks = Masks {
            possible: &set("0-3"),
            online: &set("0-3"),
            before: &[set("3")],
            missed: &set("2"),
            isolated: &CpuSet::default(),
        };
        assert_eq!(masks.verdict(&set("0-1"), None).next, Some(set("0-3")));
        assert_eq!(masks.verdict(&set("0"), None).next, None);
    }
}
