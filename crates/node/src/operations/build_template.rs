//! Templates that somebody builds: what was done in them is their recipe, and they have names.
//!
//! ```text
//!  asked ─┬─► there is the same ──────────────────────────────────────────────────────────────────────┬─► named
//!         └─► a sandbox, tied to its asker, who runs the commands ─► settled ─► kept ─► ended ─► written ─┘
//! ```
//! Until it is named nobody finds anything of it, and a name goes from one template to the other at once. Knows nothing of how
//! commands are run, nor when somebody is content with them.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use base::points;
use node_api::{BuildConfig, NetworkMode, SandboxConfig, TakenName, Template};
use observe::span::span;

use crate::node::Node;
use crate::operations::stages::Started;
use crate::operations::verify::is_damaged;
use crate::resources::volume_shares;
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::host_traits;
use crate::saved::memory_files;
use crate::saved::snapshots::{Begun, Place};
use crate::saved::templates::{Record, Shape, id, touch};
use crate::store::database::Stored;
use crate::vmm::process::readable;
use crate::vmm::programs::Files;
use crate::vmm::vm::Vm;
use crate::{Error, clock};

/// A template that is being built in a sandbox.
#[derive(Debug)]
pub(crate) struct Build {
    pub(crate) entry: Arc<Entry>,
    config: BuildConfig,
}

/// What becomes of the wish for one.
#[derive(Debug)]
pub(crate) enum Wanted {
    /// There is the same one.
    There(Box<Template>),
    /// Its asker has a sandbox for it.
    Begun(Box<Build>, Box<Started>),
}

/// What a sandbox is cloned of because it was asked for.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) id: String,
    pub(crate) place: Place,
    pub(crate) networked: bool,
    pub(crate) share_slots: usize,
}

impl Node {
    /// Begins to build one; `cancel` hangs up when nobody wants it any more.
    pub(crate) fn begin_build(
        self: &Arc<Self>,
        mut config: BuildConfig,
        cancel: BorrowedFd<'_>,
    ) -> Result<Wanted, Error> {
        config.validate()?;
        // The name may mean another image when it is done.
        config.image = self.images.get(&config.image)?.digest;
        config.resources.cpu_model.get_or_insert(self.config.cpu_model);
        let sandbox = config.sandbox();
        if !config.force {
            let networked = self.wants_network(&sandbox)?;
            let shape = self.shape_of(&config.image, &config.resources, networked, volume_shares::SLOTS)?;
            let wanted = id(&shape, &self.hashes.now(&self.config), Some(&config.recipe));
            if let Some(template) = self.name_if_there(&wanted, &config)? {
                return Ok(Wanted::There(Box::new(template)));
            }
        }
        let (entry, started) = self.metrics.started(self.run_for(sandbox, true, cancel))?;
        let started = Started {
            command: started.command.map(|(stream, mut command)| {
                (command.argv, command.main) = (Vec::new(), false);
                (stream, command)
            }),
            ..started
        };
        Ok(Wanted::Begun(Box::new(Build { entry, config }), Box::new(started)))
    }

    /// Keeps what has become of it. The sandbox is of no use afterwards, whatever the outcome is.
    pub(crate) fn keep_build(&self, build: &Build, cancel: BorrowedFd<'_>) -> Result<Template, Error> {
        let entry = &build.entry;
        let _operation = entry.operate();
        let stored = entry.stored();
        let vm = entry.vm_for(Verb::Keep)?;
        self.settle_memory(&vm, &stored)?;
        self.points.at(points::BUILD_SETTLED);
        let begun = Begun::new(&self.paths.templates())?;
        self.keep_all(&vm, &stored, &begun.place)?;
        let mut record = self.describe_build(&build.config, &stored)?;
        // Its memory is the host's again while the files are written.
        self.end_for_another(entry, &vm)?;
        begun.sum()?;
        {
            let _span = span("memory reaches the disk");
            memory_files::read_in_huge_pages(begun.place.directory());
        }
        let naming = self.templates.naming();
        let names = self.names_of(&record.template.id);
        // In the place of one that somebody wants it is wanted, too.
        record.template.sized = build.config.sized && !self.templates.is_wanted(&record.template.id);
        let record = with_names(record, &names, &build.config.names);
        begun.describe(&record)?;
        {
            let _span = span("template reaches the disk");
            begun.sync()?;
        }
        self.points.at(points::BUILD_WRITTEN);
        if readable(cancel, Duration::ZERO) {
            return Err(Error::Cancelled);
        }
        begun.save_over(&record.template.id)?;
        self.points.at(points::BUILD_KEPT);
        let id = record.template.id.clone();
        self.take_names(record, build.config.replaces.as_deref())?;
        if build.config.sized {
            self.drop_older_sizes(&id)?;
            self.keep_few()?;
        }
        drop(naming);
        self.points.at(points::BUILD_NAMED);
        self.find_template(&id)
    }

    /// Has its agent leave nothing in its memory that nobody needs. It may take as long as writing that memory does.
    fn settle_memory(&self, vm: &Vm, stored: &Stored) -> Result<(), Error> {
        let _span = span("memory settled");
        let mut agent = vm.agent()?;
        let settled = agent
            .set_read_timeout(Some(self.snapshot_limit(stored)))
            .and_then(|()| agent.settle());
        settled.map_err(|error| vm.diagnose("its memory was cleared for a template", error))
    }

    /// Everything that is to be known of what is built in this sandbox, but for its names.
    fn describe_build(&self, config: &BuildConfig, stored: &Stored) -> Result<Record, Error> {
        let sandbox = &stored.sandbox;
        let (files, programs) = (Files::of(&self.config), self.hashes.of(&self.config, sandbox));
        if programs != self.hashes.now(&self.config) {
            return Err(Error::ProgramsReplaced);
        }
        let shape = self.shape_of(
            &sandbox.digest,
            &sandbox.config.resources,
            stored.networked,
            stored.share_slots,
        )?;
        Ok(Record::of(stored, shape, files, programs, Some(config.recipe.clone())))
    }

    /// Names the one of this id as asked, if there is one that was built here and it is of use. That another one is what its recipe
    /// makes nobody here has seen.
    fn name_if_there(&self, id: &str, config: &BuildConfig) -> Result<Option<Template>, Error> {
        let naming = self.templates.naming();
        let known = self.templates.records();
        let Some(record) = known.into_iter().find(|record| record.template.id == id) else {
            return Ok(None);
        };
        if record.template.brought || self.why_outdated(&record, true)?.is_some() {
            return Ok(None);
        }
        let has_all = config.names.iter().all(|name| record.template.names.contains(name));
        if has_all && config.replaces.is_none() && record.template.sized <= config.sized {
            drop(naming);
            return Ok(Some(self.find_template(id)?));
        }
        let mut record = with_names(record, &BTreeSet::new(), &config.names);
        // Whoever builds it by its own wants it.
        record.template.sized &= config.sized;
        record.named_ns = clock::now_ns();
        record.place(self).describe_anew(&record)?;
        self.take_names(record, config.replaces.as_deref())?;
        drop(naming);
        Ok(Some(self.find_template(id)?))
    }

    pub(crate) fn names_of(&self, id: &str) -> BTreeSet<String> {
        let known = self.templates.records();
        let same = known.into_iter().filter(|record| record.template.id == id);
        same.flat_map(|record| record.template.names).collect()
    }

    /// This one is the newest of its names: from here on others find it by them, and only then those that had them lose them on
    /// the disk. One that has no name left goes. What was taken from whom.
    pub(crate) fn take_names(&self, record: Record, replaced: Option<&str>) -> Result<Vec<TakenName>, Error> {
        let id = record.template.id.clone();
        let (taken, losers) = {
            let mut known = self.templates.lock();
            known.records.retain(|known| known.template.id != id);
            let taken = to_be_taken(&known.records, &record.template.names);
            let losers = lose(&mut known.records, &record.template.names);
            known.records.push(record);
            (taken, losers)
        };
        self.write_losers(losers)?;
        if let Some(replaced) = replaced.filter(|replaced| *replaced != id) {
            self.drop_template(replaced)?;
        }
        self.drop_sizes_of_none()?;
        Ok(taken)
    }

    fn write_losers(&self, losers: Vec<Record>) -> Result<(), Error> {
        for loser in losers {
            let place = loser.place(self);
            if loser.template.names.is_empty() {
                self.drop_template(&loser.template.id)?;
            } else if let Err(error) = place.describe_anew(&loser)
                // Somebody may have removed it meanwhile.
                && place.record().exists()
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// After a crash two may have the same name: the one that got it last keeps it.
    pub(crate) fn settle_names(&self) {
        let losers = lose_to_later(&mut self.templates.lock().records);
        if let Err(error) = self.write_losers(losers) {
            // The next daemon finds the same, and does the same.
            log::warn!("cannot record that a template has lost its name: {error}");
        }
    }

    /// One of them, by a name, an id or the beginning of one.
    pub(crate) fn find_template(&self, wanted: &str) -> Result<Template, Error> {
        let record = self.find_record(wanted)?;
        let outdated = self.why_outdated(&record, true)?;
        Ok(self.told(record, outdated))
    }

    pub(crate) fn find_record(&self, wanted: &str) -> Result<Record, Error> {
        let known = self.templates.records();
        if let Some(named) = known
            .iter()
            .find(|record| record.template.names.iter().any(|name| name == wanted))
        {
            return Ok(named.clone());
        }
        let mut found = known
            .into_iter()
            .filter(|record| record.template.id.starts_with(wanted));
        match (found.next(), found.next()) {
            (Some(record), None) if !wanted.is_empty() => Ok(record),
            (Some(_), Some(_)) if !wanted.is_empty() => Err(Error::AmbiguousTemplate(wanted.to_owned())),
            _ => Err(Error::NoTemplate(wanted.to_owned())),
        }
    }

    /// What has changed since it was made, or which of its files is missing; `None` if sandboxes can be cloned of it. What guests are
    /// told of the network is known where that is set up, or may be for this.
    pub(crate) fn why_outdated(&self, record: &Record, sets_network_up: bool) -> Result<Option<String>, Error> {
        let template = &record.template;
        let because = |why: &str| Ok(Some(why.to_owned()));
        if !record.place(self).is_whole(&template.resources) {
            return because("its files are damaged");
        }
        if is_damaged(&record.place(self)) {
            return because("its files are damaged");
        }
        if self.images.get(&template.digest).is_err() {
            return because("its image is gone");
        }
        if record.files != Files::of(&self.config) && template.programs != self.hashes.now(&self.config) {
            return because("it was made with another VMM, kernel or agent");
        }
        if !template.networked || sets_network_up || self.network.if_set_up().is_some() {
            let (digest, resources) = (&template.digest, &template.resources);
            let shape = self.shape_of(digest, resources, template.networked, record.shape.share_slots)?;
            if shape != record.shape {
                return because("it was made with another guest network or other options of the kernel");
            }
        }
        Ok(self.other_host(template).map(|host| format!("it was made on {host}")))
    }

    /// What host it is of, where that is not like this one.
    pub(crate) fn other_host(&self, template: &Template) -> Option<String> {
        let model = template.resources.cpu_model.unwrap_or_default();
        let made_on = template.host.as_ref()?;
        host_traits::difference(made_on, host_traits::here(), model)
    }

    /// What a sandbox is cloned of that is to be of a template, and what it gets of it.
    pub(crate) fn choose(&self, wanted: &str, config: &mut SandboxConfig) -> Result<Chosen, Error> {
        let _span = span("template");
        let record = self.find_record(wanted)?;
        let template = &record.template;
        if config.resources.of_machine() != template.resources {
            return Err(Error::TemplateSize(Box::new(template.clone())));
        }
        match config.network {
            NetworkMode::None if template.networked => return Err(Error::TemplateNetwork(template.name().to_owned())),
            NetworkMode::Node if !template.networked => {
                return Err(Error::TemplateWithoutNetwork(template.name().to_owned()));
            }
            _ if !template.networked && !config.ports.is_empty() => {
                return Err(Error::TemplateWithoutNetwork(template.name().to_owned()));
            }
            _ => (),
        }
        if self.images.get(&template.digest).is_err() {
            return Err(Error::TemplateImage {
                name: template.name().to_owned(),
                digest: template.digest.clone(),
            });
        }
        if let Some(why) = self.why_outdated(&record, true)? {
            // One that nobody has built is as good as gone.
            return Err(match &template.recipe {
                Some(_) => outdated(template.name(), &why),
                None => Error::NoTemplate(wanted.to_owned()),
            });
        }
        if config.volumes.len() > record.shape.share_slots {
            return Err(Error::TemplateVolumes(
                template.name().to_owned(),
                record.shape.share_slots,
            ));
        }
        // Somebody may have replaced it just now: then it is the one that was there.
        let place = record.place(self).hold()?;
        touch(&place);
        config.image.clone_from(&template.digest);
        Ok(Chosen {
            id: template.id.clone(),
            networked: template.networked,
            share_slots: record.shape.share_slots,
            place,
        })
    }

    /// Takes a name away, or removes the template.
    pub(crate) fn remove_template(&self, wanted: &str) -> Result<(), Error> {
        let _naming = self.templates.naming();
        let record = self.find_record(wanted)?;
        let named = record.template.names.iter().any(|name| name == wanted);
        if !named || record.template.names.len() == 1 {
            self.drop_template(&record.template.id)?;
            return self.drop_sizes_of_none();
        }
        let losers = lose(&mut self.templates.lock().records, &[wanted.to_owned()]);
        self.write_losers(losers)
    }

    /// What a machine is, of which nothing more is known than this.
    pub(crate) fn shape_of(
        &self,
        digest: &str,
        resources: &node_api::Resources,
        networked: bool,
        share_slots: usize,
    ) -> Result<Shape, Error> {
        let network = match networked {
            true => Some(self.network.get()?.attachment().guest),
            false => None,
        };
        Ok(Shape::new(
            digest,
            resources,
            network,
            crate::command_line(self.config.log_level),
            share_slots,
        ))
    }
}

impl Place {
    /// Writes what is to be known of it once more: whoever reads it gets the one or the other.
    fn describe_anew(&self, record: &Record) -> Result<(), Error> {
        let path = self.record();
        let beside = path.with_extension("new");
        let text = serde_json::to_vec_pretty(record).map_err(|error| Error::Invalid(error.to_string()))?;
        let write = || {
            // What a crash has left goes.
            fs::write(&beside, &text)?;
            fs::File::open(&beside)?.sync_all()?;
            fs::rename(&beside, &path)?;
            fs::File::open(self.directory())?.sync_all()
        };
        write().map_err(Error::file("write", &path))
    }
}

pub(crate) fn outdated(name: &str, why: &str) -> Error {
    Error::TemplateOutdated(name.to_owned(), why.to_owned())
}

pub(crate) fn with_names(mut record: Record, kept: &BTreeSet<String>, asked: &[String]) -> Record {
    let all: BTreeSet<String> = record.template.names.iter().chain(kept).chain(asked).cloned().collect();
    record.template.names = all.into_iter().collect();
    record
}

/// Which of these names have an owner, who is about to lose them.
fn to_be_taken(records: &[Record], names: &[String]) -> Vec<TakenName> {
    let of_one = |record: &Record| {
        let own = &record.template.names;
        let (from, gone) = (record.template.id.clone(), own.iter().all(|name| names.contains(name)));
        let lost: Vec<String> = own.iter().filter(|name| names.contains(name)).cloned().collect();
        lost.into_iter().map(move |name| TakenName {
            name,
            from: from.clone(),
            gone,
        })
    };
    records.iter().flat_map(of_one).collect()
}

/// These names are somebody else's from now on; those that have lost one.
fn lose(records: &mut [Record], names: &[String]) -> Vec<Record> {
    let mut losers = Vec::new();
    for record in records {
        let own = &mut record.template.names;
        let before = own.len();
        own.retain(|name| !names.contains(name));
        if own.len() < before {
            losers.push(record.clone());
        }
    }
    losers
}

/// Each name is the last one's that got it; those that have lost one.
fn lose_to_later(records: &mut [Record]) -> Vec<Record> {
    records.sort_by_key(|record| record.named_ns);
    let mut ids = BTreeSet::new();
    for at in 0..records.len() {
        let (before, rest) = records.split_at_mut(at);
        let names = rest.first().map(|record| record.template.names.clone());
        let losers = lose(before, &names.unwrap_or_default());
        ids.extend(losers.into_iter().map(|loser| loser.template.id));
    }
    let lost = records.iter().filter(|record| ids.contains(&record.template.id));
    lost.cloned().collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use base::ByteSize;
    use node_api::{Programs, Recipe, Resources};

    use super::*;

    pub(crate) fn record(id: &str, names: &[&str], named_ns: u64) -> Record {
        let resources = Resources {
            cpus: 1,
            memory: ByteSize::mib(128),
            disk: None,
            cpu_model: None,
            class: node_api::Class::Standard,
            idle: node_api::Idle::Halt,
            memory_mode: node_api::MemoryMode::Translated,
        };
        Record {
            shape: Shape::new("00", &resources, None, String::new(), 0),
            files: Files::default(),
            named_ns,
            template: Template {
                id: id.into(),
                names: names.iter().map(|&name| name.to_owned()).collect(),
                created_ns: 1,
                used_ns: 1,
                digest: "00".into(),
                resources,
                networked: false,
                programs: Programs::default(),
                bytes: 0,
                recipe: Some(Recipe::default()),
                sized: false,
                host: None,
                brought: false,
                outdated: None,
            },
        }
    }

    fn told(records: &[Record]) -> Vec<String> {
        let of = |record: &Record| format!("{} {}", record.template.id, record.template.names.join(","));
        records.iter().map(of).collect()
    }

    #[test]
    fn a_name_is_of_one_and_goes_to_whoever_is_built_last() {
        let mut records = [record("a", &["web"], 1), record("b", &["db", "web2"], 2)];
        assert!(lose(&mut records, &["other".into()]).is_empty());
        let names = ["web".into(), "db".into(), "nobodys".into()];
        let taken = to_be_taken(&records, &names);
        let taken: Vec<_> = taken
            .iter()
            .map(|taken| (&taken.name[..], &taken.from[..], taken.gone))
            .collect();
        assert_eq!(taken, [("web", "a", true), ("db", "b", false)]);
        let losers = lose(&mut records, &names);
        assert_eq!(told(&losers), ["a ", "b web2"]);
        assert_eq!(to_be_taken(&records, &names), []);
        assert_eq!(told(&records), told(&losers));
        assert!(lose(&mut records, &["web".into()]).is_empty(), "it has lost it already");
    }

    #[test]
    fn after_a_crash_the_last_one_keeps_the_name() {
        let mut records = [
            record("new", &["web"], 9),
            record("old", &["web", "kept"], 1),
            record("middle", &["web"], 5),
            record("other", &["db"], 7),
        ];
        let losers = lose_to_later(&mut records);
        assert_eq!(told(&losers), ["old kept", "middle "]);
        assert_eq!(told(&records), ["old kept", "middle ", "other db", "new web"]);
        assert!(lose_to_later(&mut records).is_empty());
    }

    #[test]
    fn what_is_done_in_it_makes_another_and_names_do_not() {
        let one = record("a", &["web"], 1);
        let programs = Programs::default();
        let with = |commands: &[&str]| Recipe {
            commands: commands.iter().map(|&command| command.to_owned()).collect(),
            ..Recipe::default()
        };
        let ids: BTreeSet<String> = [None, Some(with(&[])), Some(with(&["a", "b"])), Some(with(&["a b"]))]
            .iter()
            .map(|recipe| id(&one.shape, &programs, recipe.as_ref()))
            .collect();
        assert_eq!(ids.len(), 4);
        let patient = Recipe {
            ready_ms: 5,
            ..with(&["a b"])
        };
        assert!(ids.contains(&id(&one.shape, &programs, Some(&patient))));
    }

    #[test]
    fn a_record_is_written_again_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let place = Place::new(directory.path(), "");
        fs::write(place.record(), "older").unwrap();
        fs::write(
            place.record().with_extension("new"),
            "what a crash has left, and is longer",
        )
        .unwrap();
        place.describe_anew(&record("a", &["web"], 1)).unwrap();
        let found: Record = place.read().unwrap().unwrap();
        assert_eq!(found.template.names, ["web"]);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
