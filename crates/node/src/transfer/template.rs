//! Built templates that leave this node, and that come to it. One that comes is named by what it was made of, as all are: it is taken
//! only where the same programs, network and kernel options would make the same machine, and its id is reckoned anew. Its names are
//! given as those of a build are, but taken from no other without being asked for. Knows no files.

use base::points;
use node_api::transfer::Kind;
use node_api::{LoadedTemplate, NetworkMode, Resources, check_template_name};

use super::{Loading, record};
use crate::node::Node;
use crate::operations::build_template::outdated;
use crate::saved::host_traits;
use crate::saved::programs::Files;
use crate::saved::snapshots::Place;
use crate::saved::templates::names::with_names;
use crate::saved::templates::record::{Record, id};
use crate::{Error, clock};

impl Node {
    /// One that somebody has built; what `run` makes by itself is made anew by the first sandbox wherever it is wanted.
    pub(super) fn template_to_send(&self, name: &str) -> Result<(Place, Resources), Error> {
        let found = self.templates.find(name)?;
        // Somebody may replace it meanwhile.
        let place = self.templates.place(&found).hold()?;
        let Some(record) = place.read::<Record>()? else {
            return Err(outdated(name, "its files are damaged"));
        };
        match record.template.recipe {
            Some(_) => Ok((place, record.template.resources)),
            None => Err(Error::Invalid(format!(
                "the template `{name}` was made by `basalt run`, which makes another wherever it is wanted: only those of \
                 `basalt template build` are saved and pushed"
            ))),
        }
    }

    /// Nobody has this name here, or may have it.
    pub(super) fn check_template_name(&self, name: &str, force: bool) -> Result<(), Error> {
        check_template_name(name)?;
        let known = self.templates.records();
        let is_taken = known
            .iter()
            .any(|record| record.template.names.iter().any(|own| own == name));
        match is_taken && !force {
            true => Err(Error::TemplateNameTaken(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Gives it its names, if it is what it should be and can be used here. From here on all is as with one that is built.
    pub(super) fn save_loaded_template(&self, loading: Loading) -> Result<LoadedTemplate, Error> {
        let Loading { begun, name, force, .. } = loading;
        let mut record: Record = record::checked(&begun.place, |record: &mut Record| {
            if let Some(name) = name {
                record.template.names = vec![name];
            }
        })?;
        self.make_ours(&mut record)?;
        begun.reaches_disk()?;
        let id = record.template.id.clone();
        let naming = self.templates.naming();
        let known = self.templates.records();
        if let Some(same) = known.iter().find(|known| known.template.id == id && !force) {
            return Err(Error::TemplateThere(same.template.name().to_owned()));
        }
        for name in &record.template.names {
            self.check_template_name(name, force)?;
        }
        let record = with_names(record, &self.templates.names_of(&id), &[]);
        begun.describe_loaded(&record)?;
        self.points.at(points::BUILD_WRITTEN);
        begun.save_over(&id)?;
        self.points.at(points::BUILD_KEPT);
        let taken = self.templates.take_names(record, None)?;
        drop(naming);
        self.points.at(points::BUILD_NAMED);
        Ok(LoadedTemplate {
            template: self.find_template(&id)?,
            taken,
        })
    }

    /// Refuses what would be another template if it was built here, and forgets what was true elsewhere only.
    fn make_ours(&self, record: &mut Record) -> Result<(), Error> {
        let refuse = |why: &str| Err(Error::TemplateOfAnother(why.to_owned()));
        // Files first: one that is replaced meanwhile is another one then.
        let files = Files::of(&self.config);
        let here = self.hashes.now(&self.config);
        let template = &record.template;
        let known = [&here.vmm, &here.kernel, &here.initramfs]
            .iter()
            .all(|hash| hash.is_some());
        if !known || template.programs != here {
            return refuse("with another VMM, kernel or agent than there is now");
        }
        let networked = template.networked;
        let slots = record.shape.share_slots;
        let shape = match self.shape_of(&template.digest, &template.resources, networked, slots) {
            Err(Error::NoNetwork) => return refuse("with a network, and this node has none"),
            shape => shape?,
        };
        if !shape.has_network_of(&record.shape) {
            return refuse("with another guest network than this node's");
        }
        if shape != record.shape {
            return refuse("with other options of the kernel, or another shape than its record says");
        }
        if id(&shape, &here, template.recipe.as_ref()) != template.id {
            let why = "its id is not that of what it was made of";
            return Err(Error::NotToBeLoaded(Kind::Template, why.into()));
        }
        if let Some(host) = record.other_host(host_traits::here()) {
            return refuse(&format!("on {host}"));
        }
        if let Some(recipe) = &mut record.template.recipe {
            // Built again it has the network that it has now, and no other.
            recipe.network = match networked {
                true => NetworkMode::Node,
                false => NetworkMode::None,
            };
        }
        record.files = files;
        record.template.brought = true;
        record.template.sized = false;
        record.template.outdated = None;
        record.named_ns = clock::now_ns();
        Ok(())
    }
}
