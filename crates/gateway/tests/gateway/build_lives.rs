//! How builds live and end: their turns, their time and what they take; gateways that end under them.

use std::time::Duration;

use control::{Files, Quota, StoredFile, Tenants};
use gateway::{LimitsConfig, Listeners};
use node_api::ErrorKind;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;

use crate::builds::{built, ended, fails, lines, path, run, start, status};
use crate::support::{Bed, request, until};
use crate::uploads::requested;

#[tokio::test]
async fn a_build_takes_of_the_quota_and_its_sandbox_is_not_seen() {
    let bed = Bed::new();
    let (template, build) = requested(&bed, json!({"name": "web"})).await;
    let body = json!({"fromImage": "python:3", "steps": [run("sleep 100")]});
    start(&bed, &template, &build, body.clone()).await;
    until("its sandbox", async || !bed.node.sandboxes().is_empty()).await;
    let id = bed.node.sandboxes()[0].id.clone();
    assert_eq!(bed.get("/v2/sandboxes").await.is(200), json!([]));
    assert_eq!(bed.get("/sandboxes").await.is(200), json!([]));
    assert_eq!(
        bed.get(&format!("/sandboxes/metrics?sandbox_ids={id}")).await.is(200),
        json!({"sandboxes": {}})
    );
    bed.get(&format!("/sandboxes/{id}")).await.is(404);
    bed.ask("DELETE", &format!("/sandboxes/{id}"), Value::Null)
        .await
        .is(404);
    assert_eq!(status(&bed, &template, &build).await["status"], "building");
    let path = format!("/v2/templates/{template}/builds/{build}");
    bed.post(&path, body.clone()).await.is(409);
    bed.send(request("POST", &path, Some(&bed.other_key), body.clone()))
        .await
        .is(404);
    let quota = Quota {
        sandboxes: Some(1),
        ..Quota::default()
    };
    bed.store.set_quota("one", quota).unwrap();
    bed.post("/v2/sandboxes", json!({"templateID": "base"})).await.is(429);
    let (_, _, end) = built(&bed, json!({"name": "more"}), body).await;
    assert!(
        end["reason"]["message"].as_str().unwrap().contains("quota is 1"),
        "{end:#}"
    );
    // Deleted while it is built: it ends, and nothing is left.
    bed.ask("DELETE", "/templates/web", Value::Null).await.is(204);
    until("the end of its sandbox", async || bed.node.sandboxes().is_empty()).await;
    assert!(bed.node.snapshots().is_empty());
}

#[tokio::test]
async fn a_build_that_takes_too_long_is_ended() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| {
        (builds.limit, builds.ready) = (Duration::from_secs(3), Duration::from_millis(700));
    });
    let body = json!({"fromImage": "python:3", "steps": [run("sleep 100")]});
    let (step, why) = fails(&bed, body).await;
    assert!(step == "1" && why.contains("may take 3 s"), "{why}");
    let (step, why) = fails(&bed, json!({"fromImage": "python:3", "readyCmd": "exit 5"})).await;
    assert!(
        step == "finalize" && why.contains("not ready") && why.contains("code 5"),
        "{why}"
    );
}

/// A build whose only step waits until it may go on.
struct Held {
    place: tempfile::TempDir,
}

impl Held {
    /// It is at work.
    async fn start(bed: &Bed, (template, build): (&str, &str)) -> Self {
        let place = tempfile::tempdir().unwrap();
        let go_on = path(place.path(), GO_ON);
        let waits = run(&format!("while [ ! -e {go_on} ]; do sleep 0.05; done"));
        start(bed, template, build, json!({"fromImage": "python:3", "steps": [waits]})).await;
        until("its sandbox", async || !bed.node.sandboxes().is_empty()).await;
        Self { place }
    }

    fn go_on(&self) {
        std::fs::write(path(self.place.path(), GO_ON), "").unwrap();
    }
}

const GO_ON: &str = "go-on";

#[tokio::test]
async fn builds_wait_for_their_turn() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| builds.per_tenant = 1);
    let (template, first) = requested(&bed, json!({"name": "web"})).await;
    let (_, second) = requested(&bed, json!({"name": "web"})).await;
    let work = Held::start(&bed, (&template, &first)).await;
    start(&bed, &template, &second, json!({"fromImage": "python:3"})).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(lines(&status(&bed, &template, &second).await), ["waiting for a turn"]);
    assert_eq!(bed.node.sandboxes().len(), 1);
    work.go_on();
    for build in [first, second] {
        assert_eq!(ended(&bed, &template, &build).await["status"], "ready");
    }
}

/// One that waits for its turn needs none to be ended.
#[tokio::test]
async fn a_build_that_waits_is_ended_with_its_template() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| builds.per_tenant = 1);
    let (template, first) = requested(&bed, json!({"name": "web"})).await;
    let work = Held::start(&bed, (&template, &first)).await;
    let (second, its) = requested(&bed, json!({"name": "next"})).await;
    let (third, others) = requested(&bed, json!({"name": "last"})).await;
    for (template, build) in [(&second, &its), (&third, &others)] {
        start(&bed, template, build, json!({"fromImage": "python:3"})).await;
    }
    until("both wait", async || {
        let [one, other] = [status(&bed, &second, &its).await, status(&bed, &third, &others).await];
        [one, other].iter().all(|told| lines(told) == ["waiting for a turn"])
    })
    .await;
    bed.ask("DELETE", "/templates/next", Value::Null).await.is(204);
    work.go_on();
    for (template, build) in [(&template, &first), (&third, &others)] {
        let end = ended(&bed, template, build).await;
        assert_eq!(end["status"], "ready", "{end:#}");
    }
    assert_eq!(bed.node.asked("run"), 2, "the one in between was begun");
    // A gateway that ends waits for no turn either. It serves when it has looked for what an earlier one has left.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let serves = tokio::spawn(gateway::serve(bed.gateway.clone(), Listeners::plain(listener), stopped));
    let mut asks = tokio::net::TcpStream::connect(address).await.unwrap();
    let question = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n";
    asks.write_all(question).await.unwrap();
    asks.read_to_end(&mut Vec::new()).await.unwrap();
    let (fourth, last) = requested(&bed, json!({"name": "fourth"})).await;
    let (fifth, behind) = requested(&bed, json!({"name": "fifth"})).await;
    let body = json!({"fromImage": "python:3", "steps": [run("sleep 1000")]});
    start(&bed, &fourth, &last, body.clone()).await;
    until("its sandbox", async || !bed.node.sandboxes().is_empty()).await;
    start(&bed, &fifth, &behind, body).await;
    stop.send_replace(true);
    let ended = tokio::time::timeout(Duration::from_secs(20), serves).await;
    ended.unwrap().unwrap().unwrap();
    let told = status(&bed, &fifth, &behind).await;
    assert_eq!(
        (told["status"].as_str(), bed.node.asked("run")),
        (Some("error"), 3),
        "{told:#}"
    );
}

/// What cannot be removed is tried again, and meanwhile the rest goes.
#[tokio::test]
async fn housekeeping_goes_on_past_one_failure() {
    let bed = Bed::new();
    bed.node.refuse("remove-snapshot", Some(ErrorKind::Host));
    let image = json!({"fromImage": "python:3"});
    crate::builds::ready(&bed, json!({"name": "web"}), image.clone()).await;
    // The first is of no use any more, and could not be removed.
    crate::builds::ready(&bed, json!({"name": "web"}), image).await;
    assert_eq!(bed.node.snapshots().len(), 2);
    let (template, build) = requested(&bed, json!({"name": "long"})).await;
    let body = json!({"fromImage": "python:3", "steps": [run("sleep 7")]});
    start(&bed, &template, &build, body).await;
    until("its sandbox", async || !bed.node.sandboxes().is_empty()).await;
    bed.node.refuse("remove-snapshot", None);
    bed.node.refuse("remove", Some(ErrorKind::Host));
    let old = StoredFile {
        tenant: "one".into(),
        hash: "a".repeat(64),
        bytes: 1,
        used: 1,
    };
    Files::put_file(bed.store.as_ref(), &old).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (stop, stopped) = watch::channel(false);
    let serves = tokio::spawn(gateway::serve(bed.successor(), Listeners::plain(listener), stopped));
    until("what is of no use to go", async || {
        bed.node.snapshots().len() == 1 && Files::files(bed.store.as_ref(), None).unwrap().is_empty()
    })
    .await;
    assert_eq!(bed.node.sandboxes().len(), 1, "it could not be removed");
    bed.node.refuse("remove", None);
    until("its sandbox to go", async || bed.node.sandboxes().is_empty()).await;
    stop.send_replace(true);
    serves.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_gateway_that_is_started_again_fails_what_was_being_built() {
    let bed = Bed::new();
    let (template, build) = requested(&bed, json!({"name": "web"})).await;
    let body = json!({"fromImage": "python:3", "steps": [run("sleep 3")]});
    start(&bed, &template, &build, body).await;
    until("its sandbox", async || !bed.node.sandboxes().is_empty()).await;
    let other = bed.make(Value::Null).await;
    std::fs::create_dir_all(bed.directory.path().join("state/uploads/one")).unwrap();
    std::fs::write(bed.directory.path().join("state/uploads/one/.0.part"), "x").unwrap();
    // The first is as good as gone: nobody asks it any more.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (stop, stopped) = watch::channel(false);
    let serves = tokio::spawn(gateway::serve(bed.successor(), Listeners::plain(listener), stopped));
    until("what is left to go", async || {
        bed.node
            .sandboxes()
            .iter()
            .map(|one| one.id.as_str())
            .eq([other.as_str()])
    })
    .await;
    let told = control::Builds::build(bed.store.as_ref(), "one", &build)
        .unwrap()
        .unwrap();
    assert_eq!(told.state, control::BuildState::Failed);
    assert!(told.failure.unwrap().message.contains("build it again"));
    assert!(bed.uploads("one").is_empty());
    stop.send_replace(true);
    serves.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_gateway_that_ends_ends_its_builds() {
    let bed = Bed::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (stop, stopped) = watch::channel(false);
    let serves = tokio::spawn(gateway::serve(bed.gateway.clone(), Listeners::plain(listener), stopped));
    let (template, build) = requested(&bed, json!({"name": "web"})).await;
    let body = json!({"fromImage": "python:3", "steps": [run("sleep 1000")]});
    start(&bed, &template, &build, body).await;
    until("its sandbox", async || !bed.node.sandboxes().is_empty()).await;
    stop.send_replace(true);
    tokio::time::timeout(Duration::from_secs(20), serves)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(bed.node.sandboxes().is_empty());
    let told = status(&bed, &template, &build).await;
    assert_eq!(told["status"], "error");
    assert!(
        told["reason"]["message"].as_str().unwrap().contains("ended"),
        "{told:#}"
    );
}

#[tokio::test]
async fn a_build_that_cannot_have_its_tags_has_failed() {
    let bed = Bed::new();
    let (template, first) = crate::builds::ready(&bed, json!({"name": "web"}), json!({"fromImage": "python:3"})).await;
    let kept = bed.node.snapshots();
    let (_, second) = requested(&bed, json!({"name": "web", "tags": ["more"]})).await;
    let place = tempfile::tempdir().unwrap();
    let go_on = path(place.path(), "go-on");
    let waits = run(&format!("while [ ! -e {go_on} ]; do sleep 0.05; done"));
    let body = json!({"fromImage": "python:3", "steps": [waits]});
    start(&bed, &template, &second, body).await;
    let many: Vec<String> = (0..99).map(|number| format!("t{number}")).collect();
    control::Templates::assign_tags(bed.store.as_ref(), &template, &first, &many, 1).unwrap();
    std::fs::write(go_on, "").unwrap();
    let end = ended(&bed, &template, &second).await;
    assert_eq!(end["status"], "error", "{end:#}");
    assert!(end["reason"]["message"].as_str().unwrap().contains("tags"), "{end:#}");
    until("its snapshot to go", async || bed.node.snapshots() == kept).await;
    bed.post("/v3/templates", json!({"name": "web", "tags": ["more"]}))
        .await
        .is(429);
}

#[tokio::test]
async fn a_template_named_base_hides_the_nodes_only_once_it_is_ready() {
    let bed = Bed::new();
    let (template, build) = requested(&bed, json!({"name": "base"})).await;
    bed.make(Value::Null).await;
    let body = json!({"fromImage": "e2bdev/base", "steps": [{"type": "ENV", "args": ["OWN", "x"]}]});
    start(&bed, &template, &build, body).await;
    let end = ended(&bed, &template, &build).await;
    assert_eq!(end["status"], "ready", "{end:#}");
    let body = json!({"fromImage": "e2bdev/base", "steps": [run("test -z \"$OWN\"")]});
    crate::builds::ready(&bed, json!({"name": "web"}), body).await;
    let body = json!({"fromTemplate": "base", "steps": [run("test \"$OWN\" = x")]});
    crate::builds::ready(&bed, json!({"name": "next"}), body).await;
}

#[tokio::test]
async fn what_is_written_down_of_a_request_is_short() {
    let bed = Bed::new();
    crate::builds::ready(
        &bed,
        json!({"name": "web", "tags": ["v1"]}),
        json!({"fromImage": "python:3"}),
    )
    .await;
    let long = format!("web:{}", "x".repeat(10_000));
    bed.ask("DELETE", "/templates/tags", json!({"name": long, "tags": []}))
        .await
        .is(400);
    bed.ask("DELETE", "/templates/tags", json!({"name": long, "tags": ["v1"]}))
        .await
        .is(204);
    let all = control::AuditLog::audited(bed.store.as_ref(), Some("one"), 100).unwrap();
    assert!(all.iter().all(|entry| entry.object.len() <= 128));
    assert!(all[0].object.starts_with("web:x"), "{:?}", all[0]);
}
