//! What sandboxes have used: of the last hour every few seconds, of the last day every minute, in bounded memory. Knows no node and no clock.
//!
//! ```text
//!  add(now, what all use) ─▶ Series of each ─┬─▶ fine:   a point a sample, an hour of them
//!                                            └─▶ coarse: a point a minute, a day of them
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use node_api::{BriefUsage, Used};

/// How often all sandboxes are looked at.
pub(crate) const INTERVAL: Duration = Duration::from_secs(5);

/// Seconds that fine points and coarse ones reach back, and that a coarse one stands for.
const HOUR: u32 = 3600;
const DAY: u32 = 86_400;
const MINUTE: u32 = 60;

/// The most points of a sandbox.
const FINE: usize = 720;
const COARSE: usize = 1440;

/// The most points of all sandboxes, of 16 bytes each: 64 MiB. Where there are so many sandboxes that this is not enough, each has a
/// shorter history.
const MOST: usize = 4 << 20;

const NANOS: u64 = 1_000_000_000;

/// What a sandbox used at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    /// Seconds since 1970.
    pub(crate) at: u32,
    /// Thousandths of a processor, since the point before.
    pub(crate) cpu: u32,
    /// KiB.
    memory: u32,
    /// KiB.
    disk: u32,
}

impl Point {
    fn new(at: u32, cpu: u32, used: &Used) -> Self {
        let kib = |bytes: u64| u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
        Self {
            at,
            cpu,
            memory: kib(used.memory),
            disk: kib(used.disk),
        }
    }

    /// What one uses of which nothing is known but what it has used since it was started.
    pub(crate) fn since_start(now_ns: u64, used: &Used) -> Self {
        Self::new(seconds(now_ns), rate(used, now_ns, None), used)
    }

    /// Bytes of memory.
    pub(crate) fn memory(self) -> u64 {
        u64::from(self.memory) << 10
    }

    /// Bytes of the disk.
    pub(crate) fn disk(self) -> u64 {
        u64::from(self.disk) << 10
    }
}

/// What all sandboxes have used.
#[derive(Debug)]
pub(crate) struct History {
    kept: Mutex<HashMap<Box<str>, Series>>,
    /// The most points of all.
    most: usize,
}

impl Default for History {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            most: MOST,
        }
    }
}

/// What one has used.
#[derive(Debug, Default)]
struct Series {
    fine: VecDeque<Point>,
    coarse: VecDeque<Point>,
    /// CPU time when it was last looked at.
    seen: Option<Seen>,
    /// The minute that is not over.
    minute: Option<Minute>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at_ns: u64,
    cpu_usec: u64,
}

/// Sums of a minute.
#[derive(Clone, Copy, Debug)]
struct Minute {
    number: u32,
    cpu: u64,
    count: u64,
    last: Point,
}

impl History {
    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, Series>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This is all that there is now: what is not in it is forgotten.
    pub(crate) fn add(&self, now_ns: u64, all: &[BriefUsage]) {
        let mut kept = self.lock();
        let there: HashSet<&str> = all.iter().map(|one| one.id.as_str()).collect();
        kept.retain(|id, _| there.contains(&**id));
        let share = self.most / all.len().max(1);
        let most = (FINE.min(share / 3), COARSE.min(share / 3 * 2));
        for BriefUsage { id, used } in all {
            let Some(used) = used else {
                // It keeps what it had, if there is room for that among all.
                if let Some(series) = kept.get_mut(id.as_str()) {
                    series.shorten(most);
                }
                continue;
            };
            if !kept.contains_key(id.as_str()) {
                kept.insert(id.as_str().into(), Series::default());
            }
            if let Some(series) = kept.get_mut(id.as_str()) {
                series.add(now_ns, used, most);
            }
        }
    }

    /// A sandbox is gone.
    pub(crate) fn forget(&self, id: &str) {
        self.lock().remove(id);
    }

    /// What it used from one moment to another, in seconds since 1970; the oldest comes first.
    pub(crate) fn between(&self, id: &str, start: u64, end: u64) -> Vec<Point> {
        let kept = self.lock();
        let Some(series) = kept.get(id) else {
            return Vec::new();
        };
        let first = series.fine.front().map_or(u32::MAX, |point| point.at);
        let coarse = series.coarse.iter().filter(|point| point.at < first);
        let wanted = |point: &&Point| (start..=end).contains(&u64::from(point.at));
        coarse.chain(&series.fine).filter(wanted).copied().collect()
    }

    /// What it used last, if that is no longer ago than two looks.
    pub(crate) fn newest(&self, id: &str, now_ns: u64) -> Option<Point> {
        let newest = self.lock().get(id)?.fine.back().copied()?;
        let oldest = (now_ns / NANOS).saturating_sub(2 * INTERVAL.as_secs());
        (u64::from(newest.at) >= oldest).then_some(newest)
    }
}

impl Series {
    /// Has no more than so many points.
    fn shorten(&mut self, (fine, coarse): (usize, usize)) {
        for (points, most) in [(&mut self.fine, fine), (&mut self.coarse, coarse)] {
            drain(points, most);
        }
    }

    fn add(&mut self, now_ns: u64, used: &Used, (fine, coarse): (usize, usize)) {
        let at = seconds(now_ns);
        // A clock that was set back, or two looks within a second.
        if self.fine.back().is_some_and(|last| last.at >= at) {
            self.fine.retain(|point| point.at < at);
        }
        let point = Point::new(at, rate(used, now_ns, self.seen), used);
        self.seen = Some(Seen {
            at_ns: now_ns,
            cpu_usec: used.cpu_usec,
        });
        push(&mut self.fine, point, fine, at.saturating_sub(HOUR));
        if let Some(minute) = self.minute.filter(|minute| minute.number != at / MINUTE) {
            self.coarse.retain(|point| point.at < minute.last.at);
            push(&mut self.coarse, minute.point(), coarse, at.saturating_sub(DAY));
            self.minute = None;
        }
        let minute = self.minute.get_or_insert(Minute {
            number: at / MINUTE,
            cpu: 0,
            count: 0,
            last: point,
        });
        minute.add(point);
    }
}

impl Minute {
    fn add(&mut self, point: Point) {
        (self.cpu, self.count) = (self.cpu + u64::from(point.cpu), self.count + 1);
        self.last = Point {
            memory: point.memory.max(self.last.memory),
            ..point
        };
    }

    /// Its processors on average, the most memory, and what was last of the rest.
    fn point(self) -> Point {
        Point {
            cpu: u32::try_from(self.cpu / self.count.max(1)).unwrap_or(u32::MAX),
            ..self.last
        }
    }
}

/// Adds one; those that are too old or too many go. Room is made for a few more, not for twice as many.
fn push(points: &mut VecDeque<Point>, point: Point, most: usize, oldest: u32) {
    drain(points, most.max(1) - 1);
    while points.front().is_some_and(|first| first.at < oldest) {
        points.pop_front();
    }
    if points.len() == points.capacity() {
        points.reserve_exact((points.len() / 4).max(12));
    }
    points.push_back(point);
}

/// So many are left at most, and room for not many more.
fn drain(points: &mut VecDeque<Point>, most: usize) {
    points.drain(..points.len().saturating_sub(most));
    if points.capacity() > most + most / 2 + 1 {
        points.shrink_to(most);
    }
}

/// Thousandths of a processor since it was last seen, or since it was started.
fn rate(used: &Used, now_ns: u64, seen: Option<Seen>) -> u32 {
    // What was counted before it was started anew is not counted here.
    let seen =
        seen.filter(|seen| seen.at_ns >= used.started_ns && seen.cpu_usec <= used.cpu_usec && seen.at_ns < now_ns);
    let from = seen.unwrap_or(Seen {
        at_ns: used.started_ns,
        cpu_usec: 0,
    });
    let passed_usec = now_ns.saturating_sub(from.at_ns) / 1000;
    let cpu_usec = used.cpu_usec.saturating_sub(from.cpu_usec);
    let thousandths = cpu_usec.saturating_mul(1000).checked_div(passed_usec).unwrap_or(0);
    u32::try_from(thousandths).unwrap_or(u32::MAX)
}

fn seconds(ns: u64) -> u32 {
    u32::try_from(ns / NANOS).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = NANOS;
    /// The beginning of a minute.
    const T: u64 = 1_763_710_680;

    fn usage(id: &str, started: u64, cpu_ms: u64) -> BriefUsage {
        BriefUsage {
            id: id.to_owned(),
            used: Some(Used {
                started_ns: started * S,
                cpu_usec: cpu_ms * 1000,
                memory: 64 << 20,
                disk: 8 << 20,
            }),
        }
    }

    fn rates(history: &History, id: &str) -> Vec<u32> {
        let all = history.between(id, 0, u64::MAX);
        all.into_iter().map(|point| point.cpu).collect()
    }

    #[test]
    fn use_is_counted_from_one_look_to_the_next() {
        let history = History::default();
        history.add((T + 10) * S, &[usage("a", T, 10_000), usage("b", T, 0)]);
        history.add((T + 20) * S, &[usage("a", T, 11_000), usage("b", T, 0)]);
        // They were started again, and their clocks are others.
        history.add((T + 30) * S, &[usage("a", T + 28, 500), usage("b", T + 28, 1000)]);
        history.add((T + 40) * S, &[usage("a", T + 28, 40_500), usage("b", T + 28, 1000)]);
        assert_eq!(rates(&history, "a"), [1000, 100, 250, 4000]);
        assert_eq!(rates(&history, "b"), [0, 0, 500, 0]);
        let at = history.between("a", T + 20, T + 30);
        assert_eq!(
            at.iter().map(|point| u64::from(point.at) - T).collect::<Vec<_>>(),
            [20, 30]
        );
        assert_eq!((at[0].memory(), at[0].disk()), (64 << 20, 8 << 20));
    }

    #[test]
    fn an_hour_is_kept_as_it_was_and_a_day_by_minutes() {
        let history = History::default();
        let day = 86_400;
        for n in 0..day / 5 + 1000 {
            // All of a processor in the first half of each minute, none of it in the other.
            let cpu = 30 * (n / 12) + 5 * (n % 12).min(6);
            history.add((T + 5 * n) * S, &[usage("a", T - 60, cpu * 1000)]);
        }
        let end = T + 5 * (day / 5 + 999);
        let all = history.between("a", 0, u64::MAX);
        let fine = all.iter().filter(|point| u64::from(point.at) > end - 3600).count();
        assert_eq!(fine, FINE);
        assert!(
            all.len() <= FINE + COARSE && all.len() > FINE + COARSE - 65,
            "{}",
            all.len()
        );
        assert!(all.is_sorted_by_key(|point| point.at));
        assert!(u64::from(all[0].at) >= end - day);
        // Each minute's average is the half.
        assert!(all[1..1000].iter().all(|point| point.cpu == 500), "{:?}", &all[..3]);
        assert!(all[all.len() - 24..].iter().any(|point| point.cpu == 1000));
    }

    #[test]
    fn what_is_gone_is_forgotten_and_what_is_paused_is_not() {
        let history = History::default();
        history.add(T * S, &[usage("a", T - 9, 1), usage("b", T - 9, 1)]);
        let paused = BriefUsage {
            id: "a".into(),
            used: None,
        };
        history.add((T + 60) * S, std::slice::from_ref(&paused));
        assert_eq!((rates(&history, "a").len(), rates(&history, "b").len()), (1, 0));
        assert!(history.newest("a", (T + 9) * S).is_some());
        assert!(history.newest("a", (T + 60) * S).is_none());
        history.forget("a");
        assert!(rates(&history, "a").is_empty());
    }

    #[test]
    fn memory_is_bounded_however_many_there_are() {
        let most = 30_000;
        let history = History {
            most,
            ..History::default()
        };
        let many = most / 300;
        let all: Vec<BriefUsage> = (0..many).map(|n| usage(&format!("{n:012x}"), T, 0)).collect();
        for n in 0..200 {
            history.add((T + 60 * n) * S, &all);
        }
        let kept = history.lock();
        let room: usize = kept
            .values()
            .map(|one| one.fine.capacity() + one.coarse.capacity())
            .sum();
        assert!(kept.len() == many && room <= most + most / 2, "{room}");
        drop(kept);
        // Each has as much as others when most of them are gone.
        for n in 200..1000 {
            history.add((T + 60 * n) * S, &all[..1]);
        }
        assert!(rates(&history, &all[0].id).len() > 600);
        assert_eq!(history.lock().len(), 1);
    }

    #[test]
    fn memory_is_bounded_when_those_that_had_much_are_paused() {
        let most = 30_000;
        let history = History {
            most,
            ..History::default()
        };
        let few: Vec<BriefUsage> = (0..10).map(|n| usage(&format!("a{n}"), T, 0)).collect();
        for n in 0..1500 {
            history.add((T + 60 * n) * S, &few);
        }
        let room = || -> usize {
            let kept = history.lock();
            let room = |one: &Series| one.fine.capacity() + one.coarse.capacity();
            kept.values().map(room).sum()
        };
        let before = room();
        assert!(before > most / 2, "{before}");
        let paused = few.into_iter().map(|one| BriefUsage { used: None, ..one });
        let mut all: Vec<BriefUsage> = paused.collect();
        all.extend((0..90).map(|n| usage(&format!("b{n}"), T, 0)));
        for n in 1500..2000 {
            history.add((T + 60 * n) * S, &all);
        }
        assert!(room() <= most + most / 2, "{}", room());
        assert!(!rates(&history, "a0").is_empty());
    }

    #[test]
    fn a_clock_that_is_set_back_makes_no_disorder() {
        let history = History::default();
        for at in [T + 100, T + 105, T + 50, T + 55, T + 55] {
            history.add(at * S, &[usage("a", T, 0)]);
        }
        let all = history.between("a", 0, u64::MAX);
        assert_eq!(
            all.iter().map(|point| u64::from(point.at) - T).collect::<Vec<_>>(),
            [50, 55]
        );
    }
}
