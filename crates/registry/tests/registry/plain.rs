//! Without authentication, on this machine: there and back again, by tag and by digest, again, and from mirrors.

use std::fs;
use std::sync::Mutex;

use image::{Prune, Store};
use registry::{BlobState, Options, Peer, Progress};

use crate::kit::{Place, last_states, location, options, pull, push};
use crate::server::Registry;

const MIB: usize = 1 << 20;

#[test]
fn what_is_pushed_is_pulled_with_the_same_digest_and_the_same_bytes() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (ours, image) = place.with_image("ours", &[(1, MIB), (2, 3 * MIB), (3, 100)]);
    let name = format!("{}/team/x:1", registry.host());
    let pushed = push(&ours, &name, &options()).unwrap();
    assert_eq!((pushed.digest, pushed.sent), (format!("sha256:{}", image.digest), 4));
    assert_eq!(push(&ours, &name, &options()).unwrap().sent, 0, "it has all of it");

    let theirs = place.store("theirs");
    let steps = Mutex::new(Vec::new());
    let report = |step| steps.lock().unwrap().push(step);
    let pulled = registry::pull(&theirs, &location(&name), &options(), &report).unwrap();
    assert!(!pulled.known);
    assert_eq!((pulled.from, &pulled.image.digest), (registry.host(), &image.digest));
    assert_eq!(pulled.image.names, std::slice::from_ref(&name));
    assert_eq!(fs::read(&pulled.image.path).unwrap(), fs::read(&image.path).unwrap());
    let steps = steps.into_inner().unwrap();
    let last = last_states(&steps);
    assert_eq!(last.len(), 4);
    assert!(
        last.values()
            .all(|(state, done, total)| *state == BlobState::Done && done == total)
    );
    assert!(matches!(steps.last(), Some(Progress::Converting(step)) if step.done == step.total));

    // Again, by tag and by digest: nothing but the manifest comes.
    for digest in last.keys() {
        assert_eq!(registry.gets(digest.trim_start_matches("sha256:"), &["200"], 1), 1);
    }
    let log = registry.log();
    assert!(pull(&theirs, &name, &options()).unwrap().known);
    let by_digest = format!("{}/team/x@sha256:{}", registry.host(), image.digest);
    let again = pull(&theirs, &by_digest, &options()).unwrap();
    assert!(again.known);
    assert_eq!(again.image.names, [name]);
    assert!(!registry.log()[log.len()..].contains("\"GET /v2/team/x/blobs/"));
    let fresh = place.store("fresh");
    assert_eq!(
        pull(&fresh, &by_digest, &options()).unwrap().image.names,
        Vec::<String>::new()
    );

    // Which can be sent on, to this registry and as a file.
    let copy = format!("{}/copy:1", registry.host());
    let sent = registry::push(&theirs, "team/x:1", &location(&copy), &options(), &|_| {}).unwrap();
    assert_eq!((sent.digest, sent.sent), (format!("sha256:{}", image.digest), 4));
    let saved = place.path("saved.tar");
    theirs
        .save(&image.digest, &mut fs::File::create(&saved).unwrap(), &saved)
        .unwrap();
    let imported = place.store("imported").import(&saved, None, &mut |_| {}).unwrap();
    assert_eq!(imported.digest, image.digest);
}

/// Also when the image that had it is removed while it is needed no more.
#[test]
fn a_layer_that_is_here_is_not_fetched_again() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (one, _) = place.with_image("one", &[(1, MIB), (2, 1000)]);
    let (two, _) = place.with_image("two", &[(1, MIB), (3, 1000)]);
    let names = ["a", "b"].map(|name| format!("{}/{name}", registry.host()));
    push(&one, &names[0], &options()).unwrap();
    push(&two, &names[1], &options()).unwrap();
    let base = &one.export("x").unwrap().layers[0];

    let theirs = place.store("theirs");
    for name in &names {
        pull(&theirs, name, &options()).unwrap();
    }
    assert_eq!(registry.gets(base.hex(), &["200"], 1), 1);
    assert_eq!(theirs.usage().unwrap().0[1].shared, base.descriptor.size);
    theirs.remove(&names[0]).unwrap();
    theirs.export(&names[1]).unwrap();
    theirs.remove(&names[1]).unwrap();
    pull(&theirs, &names[0], &options()).unwrap();
    assert_eq!(registry.gets(base.hex(), &["200"], 2), 2);
    assert_eq!(theirs.prune(&[].into(), Prune::Unused).unwrap().images.len(), 1);
}

#[test]
fn mirrors_are_asked_first_and_the_registry_when_they_cannot() {
    let place = Place::new();
    let (origin, mirror, empty) = (
        Registry::start(&place),
        Registry::start(&place),
        Registry::start(&place),
    );
    let (ours, image) = place.with_image("ours", &[(1, 1000)]);
    push(&ours, &format!("{}/x", origin.host()), &options()).unwrap();
    push(&ours, &format!("{}/proxy/x", mirror.host()), &options()).unwrap();
    let peer = |host: &str| Peer {
        host: host.to_owned(),
        ..Peer::default()
    };
    let with = |mirrors: &[&str]| Options {
        mirrors: mirrors.iter().map(|host| peer(host)).collect(),
        ..options()
    };
    let name = format!("{}/x", origin.host());
    let prefixed = format!("{}/proxy", mirror.host());
    let from = |store: &str, mirrors: &[&str]| {
        let pulled = pull(&place.store(store), &name, &with(mirrors)).unwrap();
        assert_eq!(pulled.image.digest, image.digest);
        assert_eq!(
            pulled.image.names,
            [format!("{name}:latest")],
            "the name is the origin's"
        );
        pulled.from
    };
    // Nobody listens there; it has nothing; it has it.
    assert_eq!(from("a", &["127.0.0.1:1", &empty.host(), &prefixed]), mirror.host());
    assert!(!origin.log().contains("\"GET /v2/x/"));
    assert_eq!(from("b", &["127.0.0.1:1", &empty.host()]), origin.host());
}

/// Plain HTTP to another machine must be asked for. 0.0.0.0 is not this machine's own name, but leads to it.
#[test]
fn plain_http_is_for_this_machine_unless_it_is_allowed() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (ours, _) = place.with_image("ours", &[(1, 1000)]);
    let name = format!("0.0.0.0:{}/x", registry.port);
    let error = push(&ours, &name, &options()).unwrap_err();
    assert!(matches!(error, registry::Error::Unreachable { .. }), "{error}");
    assert!(
        !registry.log().contains("HTTP/1.1\" 200"),
        "nothing was asked in the clear"
    );
    let mut insecure = options();
    insecure.registry.insecure = true;
    push(&ours, &name, &insecure).unwrap();
    pull(&place.store("theirs"), &name, &insecure).unwrap();
}

/// Pulls what `skopeo` has pushed, and the other way round.
#[test]
fn others_can_pull_what_is_pushed_and_push_what_is_pulled() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (ours, image) = place.with_image("ours", &[(1, 1000), (2, MIB)]);
    push(&ours, &format!("{}/x", registry.host()), &options()).unwrap();
    let output = std::process::Command::new("skopeo")
        .args([
            "--insecure-policy",
            "copy",
            "--preserve-digests",
            "--src-tls-verify=false",
            "--dest-tls-verify=false",
        ])
        .args(["x", "y"].map(|name| format!("docker://{}/{name}", registry.host())))
        .output()
        .expect("skopeo cannot be run: install Debian's package skopeo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let theirs: Store = place.store("theirs");
    assert_eq!(
        pull(&theirs, &format!("{}/y", registry.host()), &options())
            .unwrap()
            .image
            .digest,
        image.digest
    );
}
