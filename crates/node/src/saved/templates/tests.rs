//! What templates do without a node.

use std::fs::File;
use std::time::{Duration, SystemTime};

use node_api::CpuModel;

use super::*;
use crate::saved::host_traits;
use crate::saved::templates::record::{id, tests::record};
use crate::store::paths::Paths;
use crate::testing;

/// A host with programs, an image and no templates.
struct Host {
    paths: Paths,
    config: Config,
    hashes: Hashes,
    images: Store,
    image: String,
    templates: Arc<Templates>,
    _directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path().to_owned());
        fs::create_dir_all(paths.sandboxes()).unwrap();
        let config = testing::config(directory.path());
        for program in [&config.programs.vmm, &config.kernel, &config.initramfs] {
            fs::write(program, "first").unwrap();
        }
        let layout = directory.path().join("layout");
        testing::support::write_layout(&layout, &serde_json::json!({ "Cmd": ["true"] }));
        let images = Store::open(&paths.images()).unwrap();
        let image = images.import(&layout, Some("tiny"), &mut |_| ()).unwrap().digest;
        snapshots::clean(&paths.templates()).unwrap();
        Self {
            templates: Arc::new(Templates::new(paths.templates())),
            hashes: Hashes::default(),
            paths,
            config,
            images,
            image,
            _directory: directory,
        }
    }

    fn context(&self) -> TemplateContext<'_> {
        TemplateContext {
            config: &self.config,
            hashes: &self.hashes,
            images: &self.images,
            host: host_traits::here(),
        }
    }

    /// Those with other numbers are other ones.
    fn shape(&self, number: usize) -> Shape {
        let resources = record("", &[], 0).template.resources;
        Shape::new(&self.image, &resources, None, String::new(), number)
    }

    /// A template of this shape that `run` would make now.
    fn made(&self, number: usize) -> Record {
        let shape = self.shape(number);
        let programs = self.hashes.now(&self.config);
        let mut record = record(&id(&shape, &programs, None), &[], 1);
        record.template.digest.clone_from(&self.image);
        record.template.host = Some(host_traits::here().clone());
        record.template.resources.cpu_model = Some(CpuModel::Host);
        (record.template.recipe, record.template.programs) = (None, programs);
        (record.shape, record.files) = (shape, Files::of(&self.config));
        record
    }

    fn save(&self, record: &Record) {
        let begun = Begun::new(self.templates.directory()).unwrap();
        assert!(self.templates.save(begun, record).unwrap());
        self.templates.add(record.clone()).unwrap();
    }

    /// It is only on the disk.
    fn write(&self, record: &Record) {
        let place = self.templates.place(record);
        fs::create_dir(place.directory()).unwrap();
        fs::write(place.record(), serde_json::to_vec(record).unwrap()).unwrap();
    }

    fn look(&self, number: usize) -> Found {
        self.templates.of_shape(self.shape(number), self.context())
    }

    /// The one that a sandbox of this shape is cloned of.
    fn ready(&self, number: usize) -> Option<String> {
        match self.look(number) {
            Found::Ready { id, place } => {
                assert!(place.record().exists());
                Some(id)
            }
            _ => None,
        }
    }

    fn lease(&self, number: usize) -> Option<Lease> {
        match self.look(number) {
            Found::Missing(lease) => Some(*lease),
            _ => None,
        }
    }

    fn prune(&self) -> Vec<String> {
        self.templates.prune(false, self.context()).unwrap()
    }

    /// What is on the disk, in order.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.templates.directory()).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[test]
fn one_alone_may_make_the_template_of_a_shape() {
    let host = Host::new();
    let lease = host.lease(0).unwrap();
    assert_eq!(*lease.shape(), host.shape(0));
    assert!(matches!(host.look(0), Found::Nothing), "somebody makes it");
    assert!(host.lease(1).is_some(), "it is another one");
    drop(lease);
    let mut lease = host.lease(0).unwrap();
    lease.give_up();
    drop(lease);
    assert!(matches!(host.look(0), Found::Nothing), "it cannot be made");
    assert!(host.prune().is_empty());
    assert!(host.lease(0).is_some());
}

#[test]
fn one_is_found_as_long_as_it_is_of_the_programs_that_are_there() {
    let host = Host::new();
    let first = host.made(0);
    host.save(&first);
    assert_eq!(host.ready(0).as_ref(), Some(&first.template.id));
    assert!(host.ready(1).is_none());
    // The same program in another file.
    let beside = host.config.kernel.with_extension("new");
    fs::write(&beside, "first").unwrap();
    fs::rename(&beside, &host.config.kernel).unwrap();
    assert_eq!(host.ready(0).as_ref(), Some(&first.template.id));
    assert!(host.prune().is_empty());
    fs::write(&host.config.kernel, "the second").unwrap();
    assert!(host.lease(0).is_some());
    // The next one takes its place, whether or not somebody prunes them.
    let second = host.made(0);
    host.save(&second);
    assert_eq!(host.names(), std::slice::from_ref(&second.template.id));
    assert_eq!(host.ready(0).as_ref(), Some(&second.template.id));
    let begun = Begun::new(host.templates.directory()).unwrap();
    assert!(!host.templates.save(begun, &second).unwrap(), "it is there already");
    fs::write(&host.config.kernel, "yet another").unwrap();
    assert_eq!(host.prune(), [second.template.id]);
    assert!(host.names().is_empty());
}

#[test]
fn what_cannot_be_cloned_goes_and_is_made_once_more() {
    let host = Host::new();
    let made = host.made(0);
    let id = &made.template.id;
    host.save(&made);
    host.templates.give_up(id);
    assert!(host.names().is_empty() && host.lease(0).is_some());
    host.save(&made);
    host.templates.give_up(id);
    assert!(matches!(host.look(0), Found::Nothing), "the second one was no better");
    host.prune();
    // The host may fail in between.
    host.save(&made);
    for _ in 0..2 {
        (1..FAILURES_OF_THE_HOST).for_each(|_| host.templates.note_failure_of_host(id));
        assert!(host.ready(0).is_some());
        host.templates.note_success(id);
    }
    (0..FAILURES_OF_THE_HOST).for_each(|_| host.templates.note_failure_of_host(id));
    assert!(host.ready(0).is_none());
}

#[test]
fn those_that_were_used_longest_ago_go_unless_somebody_wants_them() {
    let host = Host::new();
    let known = |record: Record, used: usize| {
        host.write(&record);
        let file = File::open(host.templates.place(&record).record()).unwrap();
        let used = SystemTime::UNIX_EPOCH + Duration::from_secs(used as u64);
        file.set_modified(used).unwrap();
        host.templates.lock().records.push(record);
    };
    known(record("wanted", &["web"], 1), 1);
    // The oldest one is in the middle.
    let all: Vec<Record> = (0..=MOST).map(|number| host.made(number)).collect();
    for (number, record) in all.iter().enumerate() {
        known(record.clone(), 1000 + (number + MOST / 2) % (MOST + 1));
    }
    host.templates.evict().unwrap();
    let oldest = &all[MOST / 2 + 1].template.id;
    let names = host.names();
    assert!(names.len() == MOST + 1 && !names.contains(oldest), "{names:?}");
    host.templates.evict().unwrap();
    assert_eq!(host.names(), names);
}

#[test]
fn what_is_of_no_use_is_removed_at_the_start_and_what_is_no_template_set_aside() {
    let host = Host::new();
    let [good, mut of_no_image, mut of_another_host] = [0, 1, 2].map(|number| host.made(number));
    of_no_image.template.digest = "00".into();
    if let Some(made_on) = &mut of_another_host.template.host {
        made_on.kernel = "another".into();
    }
    let mut sized = record("sized", &[], 1);
    sized.template.sized = true;
    // Of an image that is here: it goes because there is none whose other size it is.
    sized.template.digest.clone_from(&good.template.digest);
    // Somebody has built it.
    let built = record("built", &["web"], 1);
    for record in [&good, &of_no_image, &of_another_host, &sized, &built] {
        host.write(record);
    }
    fs::create_dir(host.templates.directory().join(".half")).unwrap();
    let (store, _) = StateStore::open(&host.paths, |_| false, &|id, _| id.to_owned()).unwrap();
    let find = || {
        let templates = Templates::new(host.paths.templates());
        templates.find_all(host.context(), &store).unwrap();
        let mut ids: Vec<_> = templates
            .records()
            .into_iter()
            .map(|record| record.template.id)
            .collect();
        ids.sort();
        ids
    };
    let mut left = vec![good.template.id.clone(), "built".to_owned()];
    left.sort();
    assert_eq!(find(), left);
    assert_eq!(host.names(), left);
    // What is another size of one that was set aside is of use when that is put back.
    host.write(&sized);
    fs::create_dir(host.templates.directory().join("orphan")).unwrap();
    fs::rename(
        host.templates.directory().join("built"),
        host.templates.directory().join("other"),
    )
    .unwrap();
    let found = find();
    assert!(!found.contains(&"other".to_owned()), "{found:?}");
    assert!(found.contains(&"sized".to_owned()), "{found:?}");
    let aside = store.quarantine().unwrap();
    assert_eq!(aside.len(), 2, "{aside:?}");
    assert_eq!(host.names().len(), found.len());
}
