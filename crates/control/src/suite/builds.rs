//! What every store has to do with templates, their builds and tags, and with uploaded files.

use crate::builds::{Build, BuildState, Failure, Settings, StoredFile, Template};
use crate::{ControlStore, Error};

/// A template and a build of it, as somebody asks for them.
pub(crate) fn a_build(tenant: &str, name: &str, number: u64) -> (Template, Build) {
    let template = Template {
        id: format!("{tenant}-{name}-{number}"),
        tenant: tenant.into(),
        name: name.into(),
        created_ns: 100 + number,
    };
    let build = Build {
        id: format!("build-{tenant}-{name}-{number}"),
        template: template.id.clone(),
        tenant: tenant.into(),
        state: BuildState::Waiting,
        created_ns: 100 + number,
        finished_ns: None,
        cpus: Some(2),
        memory_mib: None,
        disk_mib: None,
        wanted: vec!["default".into()],
        kept: false,
        settings: Settings::default(),
        failure: None,
    };
    (template, build)
}

/// One that is ready, with these tags.
fn ready(store: &impl ControlStore, name: &str, number: u64, tags: &[&str]) -> Build {
    let (template, mut build) = a_build("a", name, number);
    build.wanted = tags.iter().map(|tag| (*tag).to_owned()).collect();
    build.template = store.add_build(&template, &build).unwrap().id;
    assert!(store.begin_build(&build.id).unwrap());
    (build.state, build.kept) = (BuildState::Ready, true);
    (build.finished_ns, build.memory_mib) = (Some(200 + number), Some(512));
    build.settings.env = vec!["A=b".into()];
    assert!(store.finish_build(&build, &[]).unwrap());
    build
}

fn tags(store: &impl ControlStore, template: &str) -> Vec<(String, String)> {
    let all = store.tags(template).unwrap();
    all.into_iter().map(|tag| (tag.tag, tag.build)).collect()
}

fn ids(builds: &[Build]) -> Vec<&str> {
    builds.iter().map(|build| build.id.as_str()).collect()
}

pub(crate) fn templates_are_each_tenants_own(store: &impl ControlStore) {
    let (wanted, one) = a_build("a", "web", 1);
    assert!(matches!(store.add_build(&wanted, &one), Err(Error::NoTenant(_))));
    for name in ["a", "b"] {
        store.make_tenant(name, 1).unwrap();
    }
    let made = store.add_build(&wanted, &one).unwrap();
    assert_eq!(made, wanted);
    let (other, second) = a_build("a", "web", 2);
    assert_eq!(store.add_build(&other, &second).unwrap(), made, "the name has it");
    let (theirs, third) = a_build("b", "web", 3);
    assert_eq!(store.add_build(&theirs, &third).unwrap(), theirs);
    for wanted in [&made.name, &made.id] {
        assert_eq!(store.template("a", wanted).unwrap().as_ref(), Some(&made));
    }
    assert_eq!(store.template("b", &made.id).unwrap(), None);
    assert_eq!(store.templates("a").unwrap(), std::slice::from_ref(&made));
    assert_eq!(ids(&store.builds(&made.id).unwrap()), [&second.id, &one.id]);
    let (another, fourth) = a_build("a", "api", 4);
    store.add_build(&another, &fourth).unwrap();
    assert_eq!(ids(&store.all_builds("a").unwrap()), [&fourth.id, &second.id, &one.id]);
    assert_eq!(ids(&store.all_builds("b").unwrap()), [&third.id]);
    assert!(store.all_builds("c").unwrap().is_empty());
    store.remove_template(&another.id).unwrap();
    assert_eq!(store.build("b", &one.id).unwrap(), None);
    assert_eq!(store.build("a", &one.id).unwrap(), Some(one.clone()));
    assert!(store.remove_template(&made.id).unwrap().is_empty());
    assert_eq!(store.template("a", "web").unwrap(), None);
    assert_eq!(store.build("a", &one.id).unwrap(), None);
    assert!(!store.finish_build(&one, &[]).unwrap(), "it is gone");
    assert!(store.template("b", "web").unwrap().is_some());
}

pub(crate) fn a_build_begins_once_and_has_its_tags_when_it_is_ready(store: &impl ControlStore) {
    store.make_tenant("a", 1).unwrap();
    let (wanted, one) = a_build("a", "web", 1);
    store.add_build(&wanted, &one).unwrap();
    assert!(store.begin_build(&one.id).unwrap());
    assert!(!store.begin_build(&one.id).unwrap());
    assert!(!store.begin_build("none").unwrap());
    assert!(tags(store, &wanted.id).is_empty());
    let second = ready(store, "web", 2, &["default", "v2"]);
    let found = store.build("a", &second.id).unwrap();
    assert_eq!(found, Some(second.clone()));
    let failed = Build {
        state: BuildState::Failed,
        template: wanted.id.clone(),
        ..one
    };
    assert!(store.finish_build(&failed, &[]).unwrap());
    let both = ["default", "v2"].map(|tag| (tag.to_owned(), second.id.clone()));
    assert_eq!(tags(store, &wanted.id), both, "what failed takes nothing");
}

pub(crate) fn a_tag_stays_with_the_build_that_was_asked_for_last(store: &impl ControlStore) {
    store.make_tenant("a", 1).unwrap();
    let later = ready(store, "web", 2, &["default"]);
    let older = ready(store, "web", 1, &["default", "old"]);
    let both = [("default", &later.id), ("old", &older.id)];
    let both = both.map(|(tag, build)| (tag.to_owned(), build.clone()));
    assert_eq!(tags(store, &later.template), both);
    let named = store.build_names("a").unwrap();
    let named: Vec<_> = named
        .iter()
        .map(|one| (&*one.template, &*one.tag, &one.build))
        .collect();
    assert_eq!(named, [("web", "default", &later.id), ("web", "old", &older.id)]);
    assert!(store.build_names("b").unwrap().is_empty());
}

pub(crate) fn a_build_that_would_have_too_many_tags_is_refused(store: &impl ControlStore) {
    store.make_tenant("a", 1).unwrap();
    let one = ready(store, "web", 1, &["t0"]);
    let many: Vec<String> = (0..100).map(|number| format!("t{number}")).collect();
    store.assign_tags(&one.template, &one.id, &many, 300).unwrap();
    let (wanted, mut next) = a_build("a", "web", 2);
    next.wanted = vec!["t7".into(), "more".into()];
    let refused = store.add_build(&wanted, &next);
    assert!(matches!(refused, Err(Error::TooMany { most: 100, .. })));
    next.wanted = vec!["t7".into()];
    store.add_build(&wanted, &next).unwrap();
}

pub(crate) fn a_build_without_a_tag_is_of_no_use(store: &impl ControlStore) {
    store.make_tenant("a", 1).unwrap();
    let one = ready(store, "web", 1, &["default", "v1"]);
    let two = ready(store, "web", 2, &["default"]);
    assert!(store.useless().unwrap().is_empty());
    let words = |words: &[&str]| -> Vec<String> { words.iter().map(|word| (*word).to_owned()).collect() };
    store
        .assign_tags(&two.template, &two.id, &words(&["v1", "prod"]), 300)
        .unwrap();
    let assigned = store.tags(&two.template).unwrap();
    assert!(assigned.iter().all(|tag| tag.build == two.id));
    assert_eq!(assigned[1].assigned_ns, 300);
    assert_eq!(ids(&store.useless().unwrap()), [&one.id]);
    assert!(!store.retire(&two.id).unwrap(), "a tag leads to it");
    assert!(store.retire(&one.id).unwrap());
    assert!(
        !store
            .assign_tags(&one.template, &one.id, &words(&["late"]), 301)
            .unwrap()
    );
    assert_eq!(ids(&store.useless().unwrap()), [&one.id], "until it is gone");
    store.forget(&one.id).unwrap();
    assert!(store.useless().unwrap().is_empty());
    store.remove_tags(&two.template, Some(&words(&["v1", "none"]))).unwrap();
    assert_eq!(tags(store, &two.template).len(), 2);
    store.remove_tags(&two.template, None).unwrap();
    assert_eq!(ids(&store.useless().unwrap()), [&two.id]);
    let other = ready(store, "kept", 3, &["default"]);
    let removed = store.remove_template(&other.template).unwrap();
    assert_eq!(ids(&removed), [&other.id]);
    let many: Vec<String> = (0..101).map(|number| format!("t{number}")).collect();
    let refused = store.assign_tags(&two.template, &two.id, &many, 1);
    assert!(matches!(refused, Err(Error::TooMany { most: 100, .. })));
    assert!(tags(store, &two.template).is_empty(), "all or none");
}

pub(crate) fn what_does_not_come_to_its_end_is_bounded_and_goes(store: &impl ControlStore) {
    store.make_tenant("a", 1).unwrap();
    let mut all = Vec::new();
    for number in 0..100 {
        let (wanted, one) = a_build("a", &format!("web{}", number / 10), number);
        store.add_build(&wanted, &one).unwrap();
        all.push(one);
    }
    let (wanted, more) = a_build("a", "more", 1);
    let refused = store.add_build(&wanted, &more);
    assert!(matches!(refused, Err(Error::TooMany { most: 100, .. })));
    assert!(store.begin_build(&all[3].id).unwrap());
    store.drop_waiting(150).unwrap();
    let left: Vec<String> = store.templates("a").unwrap().into_iter().map(|one| one.name).collect();
    assert_eq!(left, ["web9", "web8", "web7", "web6", "web5", "web0"]);
    store.add_build(&wanted, &more).unwrap();
    let failure = Failure {
        message: "it ended".into(),
        step: None,
    };
    assert_eq!(ids(&store.fail_unfinished(&failure, 500).unwrap()), [&all[3].id]);
    let failed = store.build("a", &all[3].id).unwrap().unwrap();
    assert_eq!(
        (failed.state, failed.finished_ns, failed.failure),
        (BuildState::Failed, Some(500), Some(failure.clone()))
    );
    assert!(store.fail_unfinished(&failure, 600).unwrap().is_empty());
    assert_eq!(
        ids(&store.useless().unwrap()),
        [&all[3].id],
        "there may be a machine of it"
    );
}

pub(crate) fn files_are_found_by_tenant_and_hash(store: &impl ControlStore) {
    let file = |tenant: &str, hash: &str, used| StoredFile {
        tenant: tenant.into(),
        hash: hash.into(),
        bytes: 10 * used,
        used,
    };
    assert!(matches!(store.put_file(&file("a", "1", 5)), Err(Error::NoTenant(_))));
    for name in ["a", "b"] {
        store.make_tenant(name, 1).unwrap();
    }
    for one in [
        file("a", "1", 5),
        file("b", "1", 4),
        file("a", "2", 6),
        file("a", "1", 7),
    ] {
        store.put_file(&one).unwrap();
    }
    let names = |tenant| -> Vec<String> {
        let all = store.files(tenant).unwrap();
        all.into_iter()
            .map(|one| format!("{}{}", one.tenant, one.hash))
            .collect()
    };
    assert_eq!(names(None), ["b1", "a2", "a1"]);
    assert_eq!(names(Some("a")), ["a2", "a1"]);
    assert_eq!(store.use_file("b", "2", 9).unwrap(), None);
    let used = store.use_file("a", "2", 9).unwrap().unwrap();
    assert_eq!((used.bytes, used.used), (60, 9));
    assert_eq!(
        store.use_file("a", "2", 8).unwrap().unwrap().used,
        9,
        "it is never used less"
    );
    assert_eq!(names(Some("a")), ["a1", "a2"]);
    for (tenant, but, total) in [("a", "3", (2, 130)), ("a", "1", (1, 60)), ("b", "1", (0, 0))] {
        assert_eq!(store.files_total(tenant, but).unwrap(), total, "{tenant} {but}");
    }
    store.remove_file("a", "1").unwrap();
    assert_eq!(names(None), ["b1", "a2"]);
}
