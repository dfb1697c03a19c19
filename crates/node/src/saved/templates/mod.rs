//! Templates: machines that have booted an image and run nothing yet. Sandboxes of the same shape are cloned of them
//! instead of being booted.
//!
//! ```text
//!  run ─► is there one of its shape? ─ yes ─► disk ─► VM restored ─► re-identified ──────────┬─► command
//!                                    └ no ──► disk ─► VM boots ─► root ─► saved, if new ─────┘
//! ```
//! One is saved of the first sandbox of its shape (`operations/save_template.rs`), and named by what it was made of: a
//! changed VMM, kernel or agent makes another. Whatever goes wrong with one, the sandbox is booted. Knows nothing of
//! how a VM is restored. Those that somebody has built (`operations/build_template.rs`) are among them, and are neither
//! found nor removed by what is done here without being asked for; what is true of their names is in `names`.

pub(crate) mod names;
pub(crate) mod record;
mod sizes;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use image::Store;
use node_api::recovery::Subject;
use node_api::{HostTraits, Programs, Template};

use crate::Error;
use crate::config::Config;
use crate::saved::checks::Checks;
use crate::saved::memory_files::{self, Cached, Counted};
use crate::saved::programs::{Files, Hashes};
use crate::saved::snapshots::{self, Begun, Place};
use crate::saved::templates::record::{Record, Shape, last_used, touch};
use crate::store::StateStore;
use crate::store::unfinished::UNFINISHED;

/// So many stay that nobody has asked for; the one that was not used for the longest time goes first.
const MOST: usize = 32;

/// The templates of a node.
#[derive(Debug)]
pub(crate) struct Templates {
    directory: PathBuf,
    known: Mutex<Known>,
    /// Held by whoever gives or takes names, or writes records again. It comes before the other.
    naming: Mutex<()>,
    /// What of them, and of snapshots, is verified in the background.
    pub(crate) checks: Checks,
    /// What of them, and of snapshots, is in the page cache.
    pub(crate) cached: Cached,
}

#[derive(Debug, Default)]
struct Known {
    records: Vec<Record>,
    /// Of these one is being made, or could not be: nobody else is to try.
    taken: Vec<Shape>,
    /// Of these a sandbox could not be cloned once.
    failed: Vec<Shape>,
    /// How many clones of a template in a row have failed by what the host lacked, by its id.
    in_a_row: BTreeMap<String, u32>,
}

/// So often may the host be to blame for a clone that failed before the template is: its files may be on a disk that
/// reads them no more, or its registers such as this KVM does not take.
const FAILURES_OF_THE_HOST: u32 = 8;

/// What tells whether a template is of use now, borrowed from whoever has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TemplateContext<'a> {
    /// It has the programs that a VM is made with.
    pub(crate) config: &'a Config,
    pub(crate) hashes: &'a Hashes,
    pub(crate) images: &'a Store,
    /// What this host is. It does not become another while its daemon runs.
    pub(crate) host: &'a HostTraits,
}

impl TemplateContext<'_> {
    /// Sandboxes of one that nobody has built may be cloned of it here.
    fn have_use_for(self, record: &Record) -> bool {
        self.images.get(&record.template.digest).is_ok() && record.other_host(self.host).is_none()
    }
}

/// What there is for a sandbox.
#[derive(Debug)]
pub(crate) enum Found {
    /// It can be cloned of this one.
    Ready { id: String, place: Place },
    /// There is none, and one can be made of it.
    Missing(Box<Lease>),
    /// It is booted.
    Nothing,
}

/// The right to make the one template of a shape.
#[derive(Debug)]
pub(crate) struct Lease {
    templates: Arc<Templates>,
    shape: Shape,
    /// It cannot be made: nobody is to try again before somebody prunes templates, or the daemon is started anew.
    hopeless: bool,
}

impl Lease {
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(crate) fn give_up(&mut self) {
        self.hopeless = true;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.hopeless {
            self.templates.lock().taken.retain(|shape| *shape != self.shape);
        }
    }
}

impl Templates {
    /// Those in `directory`, none of which is known yet.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            known: Mutex::default(),
            naming: Mutex::default(),
            checks: Checks::default(),
            cached: Cached::default(),
        }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn place(&self, record: &Record) -> Place {
        Place::new(&self.directory, &record.template.id)
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn naming(&self) -> MutexGuard<'_, ()> {
        self.naming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody has asked for the one of this id.
    pub(crate) fn is_wanted(&self, id: &str) -> bool {
        let known = self.lock();
        let mut of_id = known.records.iter().filter(|record| record.template.id == id);
        of_id.any(Record::is_wanted)
    }

    pub(crate) fn records(&self) -> Vec<Record> {
        self.lock().records.clone()
    }

    /// Finds the templates that are there. Those that were made without being asked for and are of no use are removed;
    /// what is no template is set aside.
    pub(crate) fn find_all(&self, context: TemplateContext<'_>, store: &StateStore) -> Result<(), Error> {
        let directory = &self.directory;
        snapshots::clean(directory).map_err(Error::file("clean", directory))?;
        let mut all_are_known = true;
        for entry in fs::read_dir(directory).map_err(Error::file("read", directory))? {
            let entry = entry.map_err(Error::file("read", directory))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            match Place::new(directory, &name).read::<Record>() {
                Ok(Some(record))
                    if record.template.id == name && (record.is_wanted() || context.have_use_for(&record)) =>
                {
                    self.lock().records.push(record);
                    continue;
                }
                // Nobody has built it, and the next sandbox of its shape makes it again.
                Ok(Some(record)) if record.template.id == name => {
                    log::info!("the template {name} is of no image that is here, or of another host, and is removed");
                }
                // What is left of one that was removed and could not be: `clean` has told of it.
                _ if name.starts_with(UNFINISHED) => continue,
                other => {
                    let why = match other {
                        Ok(Some(_)) => "its record.json is of another template".to_owned(),
                        Ok(None) => "it has no record.json".to_owned(),
                        Err(error) => error.to_string(),
                    };
                    store.set_aside(Subject::Template, &entry.path(), &why);
                    all_are_known = false;
                    continue;
                }
            }
            if let Err(error) = snapshots::remove(directory, &name, || ()) {
                log::warn!("a template stays, and is of no use: {error}");
            }
        }
        self.settle_names();
        match all_are_known {
            true => self.remove_sizes_of_none(),
            // They may be sizes of one that was set aside.
            false => Ok(()),
        }
    }

    /// What there is for a sandbox of this shape that is about to be made.
    pub(crate) fn of_shape(self: &Arc<Self>, shape: Shape, context: TemplateContext<'_>) -> Found {
        let now = Now::of(context, self, |record| record.shape == shape);
        let mut known = self.lock();
        let mut of_shape = known
            .records
            .iter_mut()
            .filter(|record| record.shape == shape && !record.is_built());
        if let Some(record) = of_shape.find_map(|record| now.fits(record).then_some(record))
            // Somebody may have removed it just now.
            && let Ok(place) = self.place(record).hold()
        {
            let id = record.template.id.clone();
            drop(known);
            touch(&place);
            return Found::Ready { id, place };
        }
        if known.taken.contains(&shape) {
            return Found::Nothing;
        }
        known.taken.push(shape.clone());
        Found::Missing(Box::new(Lease {
            templates: Arc::clone(self),
            shape,
            hopeless: false,
        }))
    }

    /// Has one reach the disk with all that is to be known of it, and gives it its name there; false if there is
    /// another one.
    pub(crate) fn save(&self, begun: Begun, record: &Record) -> Result<bool, Error> {
        begun.describe(record)?;
        begun.sum()?;
        begun.sync()?;
        memory_files::read_in_huge_pages(begun.place.directory());
        let id = &record.template.id;
        let is_known = self.lock().records.iter().any(|known| known.template.id == *id);
        if !is_known {
            // One that nobody finds could not be removed when it was given up.
            snapshots::remove(&self.directory, id, || ())?;
        }
        begun.save_as(id)
    }

    /// Others find one that is saved from here on, in place of those of its shape that were made before, which go; and
    /// so do those that were used longest ago.
    pub(crate) fn add(&self, record: Record) -> Result<(), Error> {
        let (id, shape) = (record.template.id.clone(), record.shape.clone());
        let mut known = self.lock();
        known.records.retain(|known| known.template.id != id);
        known.records.push(record);
        let replaced: Vec<String> = known
            .records
            .iter()
            .filter(|known| known.shape == shape && known.template.id != id && !known.is_built())
            .map(|known| known.template.id.clone())
            .collect();
        drop(known);
        replaced.iter().try_for_each(|id| self.remove(id).map(drop))?;
        // One that gets a name just now is not to go.
        let _naming = self.naming();
        self.evict()
    }

    /// All of them, the oldest first, with what `outdated` says of each.
    pub(crate) fn list(&self, outdated: impl Fn(&Record) -> Option<String>) -> Vec<Template> {
        let describe = |record: Record| {
            let outdated = outdated(&record);
            self.describe(record, outdated)
        };
        let mut all: Vec<Template> = self.records().into_iter().map(describe).collect();
        all.sort_by(|a, b| (a.created_ns, &a.id).cmp(&(b.created_ns, &b.id)));
        all
    }

    /// Removes those that no sandbox can be cloned of any more and nobody has built, or all; the ids.
    pub(crate) fn prune(&self, all: bool, context: TemplateContext<'_>) -> Result<Vec<String>, Error> {
        // One that takes another's place just now is not to lose its files.
        let _naming = self.naming();
        let now = Now::of(context, self, |_| true);
        let useless: Vec<String> = {
            let mut known = self.lock();
            known.failed.clear();
            // Whoever makes one just now would not be alone; that is harmless.
            known.taken.clear();
            let records = known.records.iter_mut();
            let useless = records.filter_map(|record| {
                let used = record.is_wanted() || now.fits(record) && context.have_use_for(record);
                (all || !used).then(|| record.template.id.clone())
            });
            useless.collect()
        };
        for id in &useless {
            self.remove(id)?;
        }
        Ok(useless)
    }

    /// As everybody may know it.
    pub(crate) fn describe(&self, record: Record, outdated: Option<String>) -> Template {
        let place = self.place(&record);
        Template {
            outdated,
            bytes: Counted::default().bytes(place.directory()),
            used_ns: last_used(&record, &place),
            ..record.template
        }
    }

    /// Their files, as counted already: one that a snapshot has, too, counts for the template.
    pub(crate) fn counted(&self) -> Counted {
        let mut counted = Counted::default();
        for record in self.records() {
            counted.bytes(self.place(&record).directory());
        }
        counted
    }

    /// Removes those that were used longest ago, where there are too many; nobody gives names meanwhile.
    pub(crate) fn evict(&self) -> Result<(), Error> {
        let records = self.records().into_iter().filter(|record| !record.is_wanted());
        let mut all: Vec<_> = records
            .map(|record| (last_used(&record, &self.place(&record)), record.template.id))
            .collect();
        all.sort();
        let too_many = all.len().saturating_sub(MOST);
        all.iter()
            .take(too_many)
            .try_for_each(|(_, id)| self.remove(id).map(drop))
    }

    /// No sandbox could be cloned of it: it goes. Another is made, but if that is of no use either none is before
    /// somebody prunes them, or the daemon is started anew.
    pub(crate) fn give_up(&self, id: &str) {
        let mut known = self.lock();
        let shape = known.records.iter().find(|record| record.template.id == id);
        if let Some(shape) = shape.map(|record| record.shape.clone()) {
            match known.failed.contains(&shape) {
                true => known.taken.push(shape),
                false => known.failed.push(shape),
            }
        }
        drop(known);
        match self.remove(id) {
            Ok(true) => log::warn!("the template {id} is removed"),
            Ok(false) => (),
            Err(error) => log::warn!("the template {id} is used no more, and stays behind: {error}"),
        }
    }

    /// A clone of it goes on.
    pub(crate) fn note_success(&self, id: &str) {
        self.lock().in_a_row.remove(id);
    }

    /// The host could not clone it: it goes only if that comes again and again.
    pub(crate) fn note_failure_of_host(&self, id: &str) {
        let mut known = self.lock();
        let count = known.in_a_row.entry(id.to_owned()).or_default();
        *count += 1;
        if *count >= FAILURES_OF_THE_HOST {
            known.in_a_row.remove(id);
            drop(known);
            self.give_up(id);
        }
    }

    /// Nobody finds it from here on; false if nobody did before. Clones of it keep its memory's file for as long as
    /// they run.
    pub(crate) fn remove(&self, id: &str) -> Result<bool, Error> {
        self.lock().records.retain(|record| record.template.id != id);
        snapshots::remove(&self.directory, id, || ())
    }
}

/// The programs that a VM would be made with now.
struct Now {
    files: Files,
    /// Read only where a template was made with other files, and by nobody who holds the lock.
    programs: Option<Programs>,
}

impl Now {
    fn of(context: TemplateContext<'_>, templates: &Templates, concerned: impl Fn(&Record) -> bool) -> Self {
        let files = Files::of(context.config);
        let known = templates.lock();
        let others = known
            .records
            .iter()
            .any(|record| concerned(record) && record.files != files);
        drop(known);
        Self {
            programs: others.then(|| context.hashes.now(context.config)),
            files,
        }
    }

    /// Sandboxes can be cloned of this one: it was made with these programs.
    fn fits(&self, record: &mut Record) -> bool {
        let fits = record.files == self.files || self.programs.as_ref() == Some(&record.template.programs);
        if fits {
            // Maybe the same programs in other files. The record is not worth being written again.
            record.files = self.files.clone();
        }
        fits
    }
}
