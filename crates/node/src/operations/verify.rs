//! Verifying snapshots and templates against their checksums: for somebody who asks, before one leaves this node, and in the background
//! after the first clone of one since the daemon started.
//!
//! ```text
//!  asked ──────────────────────────────────────► as fast as it goes ──┬─► whole: what was known of damage is forgotten
//!  first clone, rollback ─► queue ─► one thread, ─► 128 MiB a second ─┤
//!  new snapshot's disk ───► queue ─► nice 19      └► checksums made   └─► damaged: noted, logged; no clone of it from here on
//! ```
//! A template that `run` has made by itself goes when it is damaged: the next sandbox of its shape makes another. Nothing else is
//! removed. Knows nothing of how checksums are made.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use base::points;
use node_api::transfer::Kind;
use node_api::verify::{MOST_DAMAGE, VerifyProgress};
use node_api::{Damage, Problem, Snapshot, Verified};
use rustix::time::{ClockId, clock_gettime};

use crate::Error;
use crate::node::Node;
use crate::saved::checks::{Job, Subject};
use crate::saved::checksums::{self, Step, in_short, known_damage};
use crate::saved::memory_files;
use crate::saved::snapshots::Place;

/// What is read in the background at most, in bytes a second: a sandbox that starts meanwhile is not to notice it.
const RATE: f64 = (128 << 20) as f64;

/// How long the background waits before it begins: whoever has just cloned something uses the machine.
const SETTLE: Duration = Duration::from_secs(1);

/// The least of all priorities. The kernel takes that of a thread's reading from it, too (ioprio_set(2)).
const NICE: i32 = 19;

/// How often somebody who waits is told how far it is.
const TOLD_EVERY: Duration = Duration::from_millis(200);

/// A snapshot's files.
fn of_snapshot(place: Place, snapshot: &Snapshot) -> Subject {
    Subject {
        kind: Kind::Snapshot,
        name: snapshot.name.clone(),
        has_disk: snapshot.config.resources.disk.is_some(),
        by_itself: false,
        place,
    }
}

impl Node {
    /// What to do about damage.
    fn advice(&self, subject: &Subject, damage: &[Damage]) -> String {
        let name = &subject.name;
        match subject.kind {
            Kind::Template if subject.by_itself => {
                "`basalt run` had made it by itself: it is removed, and the next sandbox like it makes another"
                    .to_owned()
            }
            Kind::Template => format!(
                "build it again with `basalt template build --force`, or run a sandbox of it with `basalt run --template {}`, which \
                 builds it again",
                name.get(..12).unwrap_or(name)
            ),
            Kind::Snapshot => {
                // Without checksums nobody knows, nor behind damage that is not told.
                let checked = subject.has_disk && checksums::beside(&subject.place.disk()).exists();
                let directory = self.snapshots.directory().join(name);
                advice_for_snapshot(name, &directory, damage, checked && damage.len() < MOST_DAMAGE)
            }
        }
    }
}

fn advice_for_snapshot(name: &str, directory: &Path, damage: &[Damage], disk_was_checked: bool) -> String {
    let files: BTreeSet<&str> = damage.iter().map(|damage| damage.file.as_str()).collect();
    let list: Vec<&str> = files.iter().copied().collect();
    let (list, directory) = (list.join(", "), directory.display());
    let only_sums = damage
        .iter()
        .all(|damage| matches!(damage.problem, Problem::Checksums { .. }));
    if only_sums {
        return format!(
            "the data may be whole: put the checksums (NAME.sums in {directory}) of {list} back from a backup, or remove them if you \
             trust the data, and run `basalt snapshot verify {name}`, which makes them anew"
        );
    }
    let whole = match disk_was_checked && !files.contains("disk") {
        true => format!("; the disk, {directory}/disk, is whole"),
        false => String::new(),
    };
    format!(
        "put {list} in {directory} back from a backup and run `basalt snapshot verify {name}`, or load the snapshot under another name \
         from a file or a registry where it was saved (`basalt snapshot load`, `basalt snapshot pull`){whole}"
    )
}

impl Node {
    /// A snapshot or a template that somebody names.
    pub(crate) fn subject(&self, kind: Kind, name: &str) -> Result<Subject, Error> {
        match kind {
            Kind::Snapshot => {
                let (place, record) = self.snapshots.get(name)?;
                Ok(of_snapshot(place, &record.snapshot))
            }
            Kind::Template => {
                let record = self.templates.find(name)?;
                Ok(Subject {
                    kind,
                    place: self.templates.place(&record).hold()?,
                    has_disk: record.template.resources.disk.is_some(),
                    by_itself: record.template.recipe.is_none(),
                    name: record.template.id,
                })
            }
        }
    }

    /// Compares one with its checksums, and makes those that it has not. `tell` is told how far it is, and ends it by an error.
    pub(crate) fn verify(
        self: &Arc<Self>,
        kind: Kind,
        name: &str,
        tell: &mut dyn FnMut(VerifyProgress) -> Result<(), Error>,
    ) -> Result<Verified, Error> {
        let subject = self.subject(kind, name)?;
        let total = checksums::total(&subject.place);
        let (mut done, mut told) = (0, Instant::now());
        self.verify_subject(&subject, &mut |bytes| {
            done += bytes;
            if told.elapsed() < TOLD_EVERY {
                return Ok(());
            }
            told = Instant::now();
            // Whoever asked has gone.
            tell(VerifyProgress { done, total }).map_err(|_| io::ErrorKind::BrokenPipe.into())
        })
    }

    /// Refuses what is damaged before it leaves this node: elsewhere nobody would know.
    pub(crate) fn verify_before_sending(self: &Arc<Self>, kind: Kind, name: &str) -> Result<(), Error> {
        let subject = self.subject(kind, name)?;
        let found = checksums::verify(&subject.place, subject.has_disk, &mut checksums::at_once)?;
        self.note(&subject, &found.damage)?;
        self.refuse(&subject, &found.damage)
    }

    /// Refuses to make anything of a snapshot that is known to be damaged.
    pub(crate) fn refuse_damaged(&self, place: &Place, snapshot: &Snapshot) -> Result<(), Error> {
        let known = known_damage(place);
        self.refuse(&of_snapshot(place.clone(), snapshot), &known)
    }

    fn refuse(&self, subject: &Subject, damage: &[Damage]) -> Result<(), Error> {
        let Some(short) = in_short(damage) else { return Ok(()) };
        let Subject { kind, name, .. } = subject;
        Err(Error::SnapshotDamaged(format!(
            "the {kind} `{name}` is damaged ({short}), and nothing was done with it: {}",
            self.advice(subject, damage)
        )))
    }

    fn verify_subject(self: &Arc<Self>, subject: &Subject, step: Step<'_>) -> Result<Verified, Error> {
        let (began, cpu) = (Instant::now(), cpu_time());
        let mut bytes = 0;
        let mut step = |read| {
            bytes += read;
            step(read)
        };
        let place = &subject.place;
        let found = checksums::verify(place, subject.has_disk, &mut step)?;
        self.points.at(points::VERIFY_COMPARED);
        let summed = match found.damage.is_empty() {
            true => checksums::make_missing(place, &mut step)?,
            // What is beside damaged files is not known to be whole.
            false => Vec::new(),
        };
        self.points.at(points::VERIFY_SUMMED);
        let verified = Verified {
            kind: subject.kind,
            name: subject.name.clone(),
            bytes,
            ms: milliseconds(began.elapsed()),
            cpu_ms: milliseconds(cpu_time().saturating_sub(cpu)),
            summed,
            advice: (!found.damage.is_empty()).then(|| self.advice(subject, &found.damage)),
            damage: found.damage,
            more: found.more,
        };
        for file in &verified.summed {
            log::info!(
                "{file} of the {} {} had no checksums, and has some now",
                subject.kind,
                subject.name
            );
        }
        self.note(subject, &verified.damage)?;
        Ok(verified)
    }

    /// Keeps what was found, and says it where nobody asked.
    fn note(self: &Arc<Self>, subject: &Subject, damage: &[Damage]) -> Result<(), Error> {
        let Subject { kind, name, place, .. } = subject;
        for damage in damage {
            log::error!("the {kind} {name} is damaged: {damage}");
        }
        if !damage.is_empty() {
            let advice = self.advice(subject, damage);
            log::error!("the {kind} {name} is damaged, and nothing is cloned of it from here on: {advice}");
            if subject.by_itself {
                self.verify_sharing(damage, place);
                return self.templates.remove(name).map(drop);
            }
        }
        match checksums::note_damage(place, damage) {
            // It was removed meanwhile.
            Err(Error::File { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => (),
            noted => noted?,
        }
        // Theirs is found in others, too, and those would have this one looked at again if it was not noted yet.
        self.verify_sharing(damage, place);
        Ok(())
    }

    /// Others have the same memory files: they are looked at next.
    fn verify_sharing(self: &Arc<Self>, damage: &[Damage], place: &Place) {
        let identity = |directory: &Path, file: &str| memory_files::identity(&directory.join(file)).ok();
        let of_memory = damage.iter().filter(|damage| damage.file.starts_with("memory"));
        let damaged: BTreeSet<_> = of_memory
            .filter_map(|damage| identity(place.directory(), &damage.file))
            .collect();
        if damaged.is_empty() {
            return;
        }
        let snapshots = self.list_snapshots().unwrap_or_default().into_iter();
        let mut others: Vec<(Kind, String)> = snapshots.map(|snapshot| (Kind::Snapshot, snapshot.name)).collect();
        let templates = self.templates.records().into_iter();
        others.extend(templates.map(|record| (Kind::Template, record.template.id)));
        for (kind, name) in others {
            let Ok(other) = self.subject(kind, &name) else { continue };
            let mut files = memory_files::paths(other.place.directory()).into_iter();
            let shares = files.any(|file| memory_files::identity(&file).is_ok_and(|file| damaged.contains(&file)));
            if shares && known_damage(&other.place).is_empty() && !is_same(&other.place, place) {
                self.queue(Job {
                    subject: other,
                    only_sums: false,
                });
            }
        }
    }

    /// One was cloned or gone back to: if it is the first time since the daemon started, it is verified in the background.
    pub(crate) fn verify_later(self: &Arc<Self>, kind: Kind, name: &str, place: &Place) {
        let Ok(directory) = memory_files::identity(place.directory()) else {
            return;
        };
        if !self.templates.checks.lock().seen.insert(directory) {
            return;
        }
        match self.subject(kind, name) {
            Ok(subject) if is_same(&subject.place, place) => self.queue(Job {
                subject,
                only_sums: false,
            }),
            // Another one has its name now.
            Ok(_) | Err(_) => log::debug!("the {kind} {name} is gone, and is not verified"),
        }
    }

    /// Has the checksums made that a new snapshot has not: those of its disk, which may be large and not in memory.
    pub(crate) fn sum_later(self: &Arc<Self>, place: &Place, snapshot: &Snapshot) {
        match place.hold() {
            Ok(place) => self.queue(Job {
                subject: of_snapshot(place, snapshot),
                only_sums: true,
            }),
            Err(error) => log::warn!("the snapshot {} gets no checksums now: {error}", snapshot.name),
        }
    }

    fn queue(self: &Arc<Self>, job: Job) {
        let mut known = self.templates.checks.lock();
        known.queue.push_back(job);
        if std::mem::replace(&mut known.works, true) {
            return;
        }
        drop(known);
        let node = Arc::clone(self);
        if let Err(error) = crate::thread::spawn("verify", move || node.work_off()) {
            log::warn!("nothing is verified in the background: {error}");
            let mut known = self.templates.checks.lock();
            known.works = false;
            known.queue.clear();
        }
    }

    /// The thread in the background.
    fn work_off(self: &Arc<Self>) {
        // Of this thread alone: Linux has one for each (setpriority(2), "C library/kernel differences").
        if let Err(error) = rustix::process::setpriority_process(None, NICE) {
            log::info!("verification in the background has the priority of everything else: {error}");
        }
        sleep(SETTLE);
        while let Some(Job { subject, only_sums }) = self.templates.checks.next() {
            let Subject { kind, name, place, .. } = &subject;
            let mut step = paced();
            let done = match only_sums {
                true => checksums::make_missing(place, &mut step).map(drop),
                false => self.verify_subject(&subject, &mut step).map(drop),
            };
            match done {
                Ok(()) => log::debug!("the {kind} {name} was looked at"),
                // It was removed meanwhile.
                Err(error) if !place.record().exists() => log::debug!("the {kind} {name} is gone: {error}"),
                Err(error) => {
                    log::warn!("the {kind} {name} cannot be verified, until something is made of it again: {error}");
                    self.forget_verified(place);
                }
            }
        }
    }

    /// What is known of it may be less than what there is: the next clone has it verified again.
    fn forget_verified(&self, place: &Place) {
        if let Ok(directory) = memory_files::identity(place.directory()) {
            self.templates.checks.lock().seen.remove(&directory);
        }
    }
}

fn is_same(one: &Place, other: &Place) -> bool {
    let identity = |place: &Place| memory_files::identity(place.directory()).ok();
    identity(one).is_some_and(|one| Some(one) == identity(other))
}

/// A step that waits for as long as reading goes faster than [`RATE`].
fn paced() -> impl FnMut(u64) -> io::Result<()> {
    let (began, mut done) = (Instant::now(), 0_u64);
    move |bytes| {
        done += bytes;
        #[expect(clippy::cast_precision_loss, reason = "a time to wait need not be exact")]
        let due = Duration::from_secs_f64(done as f64 / RATE);
        sleep(due.saturating_sub(began.elapsed()));
        Ok(())
    }
}

/// What this thread has used of a processor.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Whether a place is known to be damaged: asked before each clone, so it reads nothing.
pub(crate) fn is_damaged(place: &Place) -> bool {
    fs::exists(checksums::damage_file(place)).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_keeps_what_can_be_kept() {
        let directory = Path::new("/state/snapshots/web");
        let advice = |file: &str| advice_for_snapshot("web", directory, &[Damage::changed(file, 0, 1)], true);
        let of_memory = advice("memory.1");
        assert!(
            of_memory.contains("put memory.1 in /state/snapshots/web back from a backup")
                && of_memory.contains("the disk, /state/snapshots/web/disk, is whole"),
            "{of_memory}"
        );
        assert!(!advice("disk").contains("is whole"), "{}", advice("disk"));
        let sums = Damage {
            file: "memory".into(),
            problem: Problem::Checksums { why: "x".into() },
        };
        let of_sums = advice_for_snapshot("web", directory, &[sums], true);
        assert!(of_sums.contains("the data may be whole"), "{of_sums}");
        for advice in [of_memory, of_sums, advice("disk")] {
            assert!(!advice.contains("snapshot rm"), "{advice}");
        }
    }

    #[test]
    fn the_background_keeps_to_its_rate() {
        let mut step = paced();
        let began = Instant::now();
        for _ in 0..16 {
            step(1 << 20).unwrap();
        }
        assert!(began.elapsed() >= Duration::from_millis(120), "{:?}", began.elapsed());
    }
}
