//! Templates that somebody builds: what was done in them is their recipe, and they have names.
//!
//! ```text
//!  asked ─┬─► there is the same ──────────────────────────────────────────────────────────────────────┬─► named
//!         └─► a sandbox, tied to its asker, who runs the commands ─► settled ─► saved ─► ended ─► written ┘
//! ```
//! Until it is named nobody finds anything of it. Knows nothing of how commands are run, nor when somebody is content
//! with them, and not how a name goes from one template to the other (`saved/templates/names.rs`).

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use base::points;
use node_api::{BuildConfig, NetworkMode, SandboxConfig, Template};
use observe::span::span;

use crate::node::Node;
use crate::operations::stages::Started;
use crate::operations::verify::is_damaged;
use crate::resources::volume_shares;
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::host_traits;
use crate::saved::memory_files;
use crate::saved::programs::Files;
use crate::saved::snapshots::{Begun, Place};
use crate::saved::templates::names::with_names;
use crate::saved::templates::record::{Record, Shape, id, touch};
use crate::store::database::Stored;
use crate::vmm::process::readable;
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

    /// Saves what has become of it. The sandbox is of no use afterwards, whatever the outcome is.
    pub(crate) fn save_build(&self, build: &Build, cancel: BorrowedFd<'_>) -> Result<Template, Error> {
        let entry = &build.entry;
        let _operation = entry.operate();
        let stored = entry.stored();
        let vm = entry.vm_for(Verb::Keep)?;
        self.settle_memory(&vm, &stored)?;
        self.points.at(points::BUILD_SETTLED);
        let begun = Begun::new(self.templates.directory())?;
        self.save_all(&vm, &stored, &begun.place)?;
        let mut record = self.describe_build(&build.config, &stored)?;
        // Its memory is the host's again while the files are written.
        self.end_for_another(entry, &vm)?;
        begun.sum()?;
        {
            let _span = span("memory reaches the disk");
            memory_files::read_in_huge_pages(begun.place.directory());
        }
        let naming = self.templates.naming();
        let names = self.templates.names_of(&record.template.id);
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
        self.templates.take_names(record, build.config.replaces.as_deref())?;
        if build.config.sized {
            self.templates.remove_older_sizes(&id)?;
            self.templates.evict()?;
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
        self.templates.describe_anew(&record)?;
        self.templates.take_names(record, config.replaces.as_deref())?;
        drop(naming);
        Ok(Some(self.find_template(id)?))
    }

    /// One of them, by a name, an id or the beginning of one.
    pub(crate) fn find_template(&self, wanted: &str) -> Result<Template, Error> {
        let record = self.templates.find(wanted)?;
        let outdated = self.why_outdated(&record, true)?;
        Ok(self.templates.describe(record, outdated))
    }

    /// All of them, the oldest first.
    pub(crate) fn list_templates(&self) -> Vec<Template> {
        // For somebody who only looks no network is set up.
        let outdated = |record: &Record| {
            let outdated = self.why_outdated(record, false);
            outdated.unwrap_or_else(|error| Some(error.to_string()))
        };
        self.templates.list(outdated)
    }

    /// What has changed since it was made, or which of its files is missing; `None` if sandboxes can be cloned of it. What guests are
    /// told of the network is known where that is set up, or may be for this.
    pub(crate) fn why_outdated(&self, record: &Record, sets_network_up: bool) -> Result<Option<String>, Error> {
        let template = &record.template;
        let because = |why: &str| Ok(Some(why.to_owned()));
        let place = self.templates.place(record);
        if !place.is_whole(&template.resources) {
            return because("its files are damaged");
        }
        if is_damaged(&place) {
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
        let other_host = record.other_host(host_traits::here());
        Ok(other_host.map(|host| format!("it was made on {host}")))
    }

    /// What a sandbox is cloned of that is to be of a template, and what it gets of it.
    pub(crate) fn choose(&self, wanted: &str, config: &mut SandboxConfig) -> Result<Chosen, Error> {
        let _span = span("template");
        let record = self.templates.find(wanted)?;
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
        let place = self.templates.place(&record).hold()?;
        touch(&place);
        config.image.clone_from(&template.digest);
        Ok(Chosen {
            id: template.id.clone(),
            networked: template.networked,
            share_slots: record.shape.share_slots,
            place,
        })
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

pub(crate) fn outdated(name: &str, why: &str) -> Error {
    Error::TemplateOutdated(name.to_owned(), why.to_owned())
}
