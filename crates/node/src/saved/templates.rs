//! Templates: machines that have booted an image and run nothing yet. Sandboxes of the same shape are cloned of them instead
//! of being booted.
//!
//! ```text
//!  run ─► is there one of its shape? ─ yes ─► disk ─► VM restored ─► re-identified ──────────┬─► command
//!                                    └ no ──► disk ─► VM boots ─► root ─► kept, if new ┘
//! ```
//! One is kept of the first sandbox of its shape, and named by what it was made of: a changed VMM, kernel or agent
//! makes another. Whatever goes wrong with one, the sandbox is booted. Knows nothing of how a VM is restored. Those
//! that somebody has built (`operations/build_template.rs`) are among them, and are neither found nor removed by what
//! is done here without being asked for; what is true of their names is in `template_names`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use node_api::recovery::Subject;
use node_api::{Programs, Template};
use observe::span::span;

use crate::Error;
use crate::node::Node;
use crate::resources::volume_shares;
use crate::resources::volumes::UNFINISHED;
use crate::sandbox::entry::Entry;
use crate::saved::checks::Checks;
use crate::saved::memory_files::{self, Counted};
use crate::saved::snapshots::{self, Begun, Place};
use crate::saved::template_record::{Record, Shape, last_used, touch};
use crate::store::database::Stored;
use crate::vmm::programs::Files;
use crate::vmm::vm::Vm;

/// So many are kept that nobody has asked for; the one that was not used for the longest time goes first.
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
}

#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) records: Vec<Record>,
    /// Of these one is being made, or could not be: nobody else is to try.
    taken: Vec<Shape>,
    /// Of these a sandbox could not be cloned once.
    failed: Vec<Shape>,
    /// How many clones of a template in a row have failed by what the host lacked, by its id.
    in_a_row: BTreeMap<String, u32>,
}

/// So often may the host be to blame for a clone that failed before the template is: its files may be on a disk that reads them no
/// more, or its registers such as this KVM does not take.
const FAILURES_OF_THE_HOST: u32 = 8;

/// What there is for a sandbox.
#[derive(Debug)]
pub(crate) enum Found {
    /// It can be cloned of this one.
    Ready { id: String, place: Place },
    /// There is none, and one can be made of it.
    Missing(Lease),
    /// It is booted.
    Nothing,
}

/// The right to make the one template of a shape.
#[derive(Debug)]
pub(crate) struct Lease {
    node: Arc<Node>,
    shape: Shape,
    /// It cannot be made: nobody is to try again before somebody prunes templates, or the daemon is started anew.
    hopeless: bool,
}

impl Lease {
    pub(crate) fn give_up(&mut self) {
        self.hopeless = true;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.hopeless {
            self.node.templates.lock().taken.retain(|shape| *shape != self.shape);
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
        }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn place(&self, record: &Record) -> Place {
        Place::new(&self.directory, &record.template.id)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Known> {
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

    /// What they take on the disk: a file that a snapshot has, too, counts for the template.
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
    fn of(node: &Node, concerned: impl Fn(&Record) -> bool) -> Self {
        let files = Files::of(&node.config);
        let known = node.templates.lock();
        let others = known
            .records
            .iter()
            .any(|record| concerned(record) && record.files != files);
        drop(known);
        Self {
            programs: others.then(|| node.hashes.now(&node.config)),
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

impl Node {
    /// Finds the templates that are there. Those that were made without being asked for and are of no use are removed; what is no
    /// template is set aside.
    pub(crate) fn find_templates(&self) -> Result<(), Error> {
        let directory = self.templates.directory();
        snapshots::clean(directory).map_err(Error::file("clean", directory))?;
        let mut all_are_known = true;
        for entry in fs::read_dir(directory).map_err(Error::file("read", directory))? {
            let entry = entry.map_err(Error::file("read", directory))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            match Place::new(directory, &name).read::<Record>() {
                Ok(Some(record)) if record.template.id == name && (record.is_wanted() || self.is_of_use(&record)) => {
                    self.templates.lock().records.push(record);
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
                    self.store.set_aside(Subject::Template, &entry.path(), &why);
                    all_are_known = false;
                    continue;
                }
            }
            if let Err(error) = snapshots::remove(directory, &name, || ()) {
                log::warn!("a template stays, and is of no use: {error}");
            }
        }
        self.templates.settle_names();
        match all_are_known {
            true => self.templates.remove_sizes_of_none(),
            // They may be sizes of one that was set aside.
            false => Ok(()),
        }
    }

    /// Sandboxes of one that nobody has built may be cloned of it here. A host does not become another while its daemon runs.
    fn is_of_use(&self, record: &Record) -> bool {
        self.images.get(&record.template.digest).is_ok() && self.other_host(&record.template).is_none()
    }

    /// What there is for a sandbox that is about to be made.
    pub(crate) fn template(self: &Arc<Self>, stored: &Stored) -> Result<Found, Error> {
        let config = &stored.sandbox.config;
        if config.boot || config.resources.boots() || config.volumes.len() > volume_shares::SLOTS {
            return Ok(Found::Nothing);
        }
        let shape = self.shape_of(
            &stored.sandbox.digest,
            &config.resources,
            stored.networked,
            stored.share_slots,
        )?;
        let now = Now::of(self, |record| record.shape == shape);
        let mut known = self.templates.lock();
        let mut of_shape = known
            .records
            .iter_mut()
            .filter(|record| record.shape == shape && !record.is_built());
        if let Some(record) = of_shape.find_map(|record| now.fits(record).then_some(record))
            // Somebody may have removed it just now.
            && let Ok(place) = self.templates.place(record).hold()
        {
            let id = record.template.id.clone();
            drop(known);
            touch(&place);
            return Ok(Found::Ready { id, place });
        }
        if known.taken.contains(&shape) {
            return Ok(Found::Nothing);
        }
        known.taken.push(shape.clone());
        Ok(Found::Missing(Lease {
            node: Arc::clone(self),
            shape,
            hopeless: false,
        }))
    }

    /// Keeps a machine that has its root and runs nothing yet; it goes on. That it cannot be kept is no failure of it.
    pub(crate) fn keep_template(&self, entry: &Entry, vm: &Vm, mut lease: Lease) -> Result<(), Error> {
        let stored = entry.stored();
        let _span = span("template kept");
        let name = stored.sandbox.name.clone();
        let mut give_up = |error| {
            log::warn!("no template can be made of sandbox {name}: {error}");
            lease.give_up();
        };
        let begun = match Begun::new(self.templates.directory()) {
            Ok(begun) => begun,
            Err(error) => {
                give_up(error);
                return Ok(());
            }
        };
        let line = vm.line()?;
        let kept = self.keep_all(vm, &stored, &begun.place);
        let gone_on = self.go_on_after(kept.as_ref().err(), vm, line);
        if let Err(error) = kept {
            give_up(error);
            return gone_on;
        }
        if let Err(error) = gone_on {
            lease.give_up();
            return Err(error);
        }
        // The command does not wait for the rest.
        let node = Arc::clone(&lease.node);
        let work = move || {
            if let Err(error) = node.name_template(&stored, begun, &mut lease) {
                log::warn!("there is no template of sandbox {name}: {error}");
                lease.give_up();
            }
        };
        if let Err(error) = crate::thread::spawn("template", work) {
            log::warn!("a template is given up: {error}");
        }
        Ok(())
    }

    /// Everything from files to a template that others find.
    fn name_template(&self, stored: &Stored, begun: Begun, lease: &mut Lease) -> Result<(), Error> {
        let sandbox = &stored.sandbox;
        let (files, programs) = (Files::of(&self.config), self.hashes.of(&self.config, sandbox));
        let known = programs.vmm.is_some() && programs.kernel.is_some() && programs.initramfs.is_some();
        if !known || programs != self.hashes.now(&self.config) {
            // A program was replaced meanwhile, or its VM is gone already: the next sandbox is another try.
            return Ok(());
        }
        let record = Record::of(stored, lease.shape.clone(), files, programs, None);
        begun.describe(&record)?;
        begun.sum()?;
        begun.sync()?;
        memory_files::read_in_huge_pages(begun.place.directory());
        let is_known = |known: &Known| {
            known
                .records
                .iter()
                .any(|known| known.template.id == record.template.id)
        };
        if !is_known(&self.templates.lock()) {
            // One that nobody finds could not be removed when it was given up.
            snapshots::remove(self.templates.directory(), &record.template.id, || ())?;
        }
        if begun.save_as(&record.template.id)? {
            log::info!("sandboxes like {} are cloned from now on", sandbox.name);
            let id = record.template.id.clone();
            let mut known = self.templates.lock();
            known.records.retain(|known| known.template.id != id);
            known.records.push(record);
            let replaced: Vec<String> = known
                .records
                .iter()
                .filter(|known| known.shape == lease.shape && known.template.id != id && !known.is_built())
                .map(|known| known.template.id.clone())
                .collect();
            drop(known);
            replaced.iter().try_for_each(|id| self.templates.remove(id).map(drop))?;
            // One that gets a name just now is not to go.
            let _naming = self.templates.naming();
            self.templates.evict()?;
        }
        Ok(())
    }

    /// All of them, the oldest first.
    pub(crate) fn templates(&self) -> Vec<Template> {
        // For somebody who only looks no network is set up.
        let describe = |record: Record| {
            let outdated = self.why_outdated(&record, false);
            self.templates
                .describe(record, outdated.unwrap_or_else(|error| Some(error.to_string())))
        };
        let mut all: Vec<Template> = self.templates.records().into_iter().map(describe).collect();
        all.sort_by(|a, b| (a.created_ns, &a.id).cmp(&(b.created_ns, &b.id)));
        all
    }

    /// Removes those that no sandbox can be cloned of any more and nobody has built, or all; the ids.
    pub(crate) fn prune_templates(&self, all: bool) -> Result<Vec<String>, Error> {
        // One that takes another's place just now is not to lose its files.
        let _naming = self.templates.naming();
        let now = Now::of(self, |_| true);
        let useless: Vec<String> = {
            let mut known = self.templates.lock();
            known.failed.clear();
            // Whoever makes one just now would not be alone; that is harmless.
            known.taken.clear();
            let records = known.records.iter_mut();
            let useless = records.filter_map(|record| {
                let used = record.is_wanted() || now.fits(record) && self.is_of_use(record);
                (all || !used).then(|| record.template.id.clone())
            });
            useless.collect()
        };
        for id in &useless {
            self.templates.remove(id)?;
        }
        Ok(useless)
    }
}
