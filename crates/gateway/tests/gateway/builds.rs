//! Templates that tenants build, over a node without machines but with the real agent, which runs on this host: what steps do here is harmless.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use axum::body::Body;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::support::{Bed, SOON, request, until};
use crate::uploads::{HASH, link, put, requested};

/// An archive as the SDKs make it.
pub(crate) fn archive(files: &[(&str, &str)], gzip: bool) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        // As somebody writes it who is up to no good.
        let field = &mut header.as_gnu_mut().unwrap().name;
        field[..name.len()].copy_from_slice(name.as_bytes());
        let is_directory = name.ends_with('/');
        header.set_entry_type(if is_directory {
            tar::EntryType::Directory
        } else {
            tar::EntryType::Regular
        });
        header.set_mode(if is_directory { 0o755 } else { 0o640 });
        header.set_uid(4242);
        header.set_gid(4242);
        header.set_size(text.len() as u64);
        header.set_cksum();
        tar.append(&header, text.as_bytes()).unwrap();
    }
    let plain = tar.into_inner().unwrap();
    if !gzip {
        return plain;
    }
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(&plain).unwrap();
    gz.finish().unwrap()
}

pub(crate) async fn upload(bed: &Bed, template: &str, hash: &str, bytes: Vec<u8>) {
    let (_, path) = link(bed, template, hash).await;
    put(bed, &path, Some(bytes.len()), Body::from(bytes)).await.is(200);
}

pub(crate) fn run(command: &str) -> Value {
    json!({"type": "RUN", "args": [command], "force": false})
}

pub(crate) async fn start(bed: &Bed, template: &str, build: &str, body: Value) {
    let path = format!("/v2/templates/{template}/builds/{build}");
    bed.post(&path, body).await.is(202);
}

pub(crate) async fn status(bed: &Bed, template: &str, build: &str) -> Value {
    bed.get(&format!("/templates/{template}/builds/{build}/status"))
        .await
        .is(200)
}

/// Waits for the end of a build; what is told of it then.
pub(crate) async fn ended(bed: &Bed, template: &str, build: &str) -> Value {
    let end = std::time::Instant::now() + SOON;
    loop {
        let last = status(bed, template, build).await;
        if last["status"] != "building" {
            return last;
        }
        assert!(std::time::Instant::now() < end, "it does not end: {last:#}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Builds one; its template, its build, and what is told of it at the end.
pub(crate) async fn built(bed: &Bed, asked: Value, body: Value) -> (String, String, Value) {
    let (template, build) = requested(bed, asked).await;
    start(bed, &template, &build, body).await;
    let end = ended(bed, &template, &build).await;
    (template, build, end)
}

pub(crate) fn lines(status: &Value) -> Vec<String> {
    let all = status["logEntries"].as_array().unwrap().iter();
    all.map(|line| line["message"].as_str().unwrap().to_owned()).collect()
}

pub(crate) async fn ready(bed: &Bed, asked: Value, body: Value) -> (String, String) {
    let (template, build, end) = built(bed, asked, body).await;
    assert_eq!(end["status"], "ready", "{end:#}");
    (template, build)
}

/// Why one fails, and in which step; nothing is left of it.
pub(crate) async fn fails(bed: &Bed, body: Value) -> (String, String) {
    let before = bed.node.snapshots();
    let (_, _, end) = built(bed, json!({"name": "failing"}), body).await;
    assert_eq!(end["status"], "error", "{end:#}");
    assert!(bed.node.sandboxes().is_empty(), "a sandbox is left");
    assert_eq!(bed.node.snapshots(), before);
    let reason = &end["reason"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    assert!(
        reason["logEntries"].as_array().is_some_and(|lines| !lines.is_empty()),
        "{end:#}"
    );
    (text(&reason["step"]), text(&reason["message"]))
}

pub(crate) fn path(directory: &Path, name: &str) -> String {
    directory.join(name).to_str().unwrap().to_owned()
}

/// A build that was found may be gone when a sandbox is to be made of it.
#[tokio::test]
async fn a_sandbox_is_made_of_what_its_name_leads_to_when_it_is_made() {
    let bed = Bed::new();
    let of = |value: &str| json!({"fromImage": "python:3", "steps": [{"type": "ENV", "args": ["WHICH", value]}]});
    ready(&bed, json!({"name": "web"}), of("old")).await;
    let old = bed.node.snapshots();
    let go_on = bed.node.hold("clone");
    let makes = bed.post("/v2/sandboxes", json!({"templateID": "web"}));
    let replaces = async {
        until("the clone", async || bed.node.asked("clone") == 1).await;
        ready(&bed, json!({"name": "web"}), of("new")).await;
        until("the old one to go", async || {
            bed.node.snapshots().len() == 1 && bed.node.snapshots() != old
        })
        .await;
        go_on.send(()).unwrap();
    };
    let made = tokio::join!(makes, replaces).0.is(201);
    let sandbox = bed.node.sandbox(made["sandboxID"].as_str().unwrap()).unwrap();
    assert!(sandbox.config.process.env.contains(&"WHICH=new".to_owned()));
    // One that is deleted meanwhile is a template that there is not.
    let go_on = bed.node.hold("clone");
    let makes = bed.post("/v2/sandboxes", json!({"templateID": "web"}));
    let removes = async {
        until("the clone", async || bed.node.asked("clone") == 3).await;
        bed.ask("DELETE", "/templates/web", Value::Null).await.is(204);
        go_on.send(()).unwrap();
    };
    let told = tokio::join!(makes, removes).0.is(404);
    assert_eq!(told["message"], "template `web` was not found");
}

#[tokio::test]
async fn a_template_is_built_and_sandboxes_of_it_have_all_of_it() {
    let bed = Bed::new();
    let place = tempfile::tempdir().unwrap();
    let asked = json!({"name": "web:v1", "tags": ["prod"], "cpuCount": 2, "memoryMB": 256});
    let (template, build) = requested(&bed, asked).await;
    assert_eq!(status(&bed, &template, &build).await["status"], "waiting");
    let files = [("app/", ""), ("app/a.txt", "hello"), ("app/sub/b.txt", "deep")];
    upload(&bed, &template, HASH, archive(&files, true)).await;
    std::fs::create_dir_all(place.path().join("to/sub")).unwrap();
    std::fs::write(place.path().join("to/old.txt"), "old").unwrap();
    let made = path(place.path(), "made");
    let steps = json!([
        {"type": "COPY", "args": ["app", path(place.path(), "to"), "", "0700"], "filesHash": HASH, "force": false},
        {"type": "COPY", "args": ["app", path(place.path(), "new"), "nobody", ""], "filesHash": HASH},
        {"type": "ENV", "args": ["A", "1", "B", "$A-${A}"]},
        {"type": "WORKDIR", "args": [made]},
        run("echo $B > from-run; pwd; echo oops >&2"),
        {"type": "USER", "args": ["nobody"]},
        {"type": "RUN", "args": ["id -un", "root"]},
    ]);
    start(
        &bed,
        &template,
        &build,
        json!({"fromImage": "python:3", "steps": steps, "force": false}),
    )
    .await;
    let end = ended(&bed, &template, &build).await;
    assert_eq!(end["status"], "ready", "{end:#}");
    let said = lines(&end);
    for line in [
        "[1/7] COPY app",
        "[3/7] ENV A B",
        &made,
        "oops",
        "root",
        "the template is ready",
    ] {
        assert!(said.iter().any(|one| one.contains(line)), "{line}: {said:#?}");
    }
    assert!(end["reason"].is_null() && end["logs"] == json!([]));
    let read = |name: &str| std::fs::read_to_string(place.path().join(name)).unwrap();
    assert_eq!(
        (read("to/a.txt"), read("to/sub/b.txt"), read("to/old.txt")),
        ("hello".into(), "deep".into(), "old".into())
    );
    assert_eq!(read("made/from-run"), "1-1\n");
    {
        use std::os::unix::fs::MetadataExt;
        let meta = std::fs::metadata(place.path().join("to/a.txt")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o700, 0));
        // One that was there stays as it is; one that is made is its owner's.
        let owner = |name: &str| std::fs::metadata(place.path().join(name)).unwrap().uid();
        let nobody = owner("new/sub/b.txt");
        assert!(nobody != 0 && owner("new") == nobody && owner("to") == 0);
    }
    assert!(bed.node.sandboxes().is_empty(), "the build's sandbox is gone");
    for name in ["web:v1", "web:prod", &format!("{template}:v1")] {
        let id = bed.make(json!({"templateID": name, "envVars": {"C": "3"}})).await;
        let sandbox = bed.node.sandbox(&id).unwrap();
        let process = sandbox.config.process;
        assert_eq!(process.env, ["A=1", "B=1-1", "C=3"]);
        assert_eq!(
            (process.workdir, process.user.as_deref()),
            (Some(made.clone()), Some("nobody"))
        );
        assert_eq!(
            (
                sandbox.config.resources.cpus,
                sandbox.config.resources.memory.bytes() >> 20
            ),
            (2, 256)
        );
        let told = bed.get(&format!("/sandboxes/{id}")).await.is(200);
        assert_eq!(told["templateID"], template);
        assert_eq!(told["alias"].is_null(), name.starts_with(&template), "{told}");
        bed.ask("DELETE", &format!("/sandboxes/{id}"), Value::Null)
            .await
            .is(204);
    }
    let body = json!({"templateID": "web"});
    bed.post("/v2/sandboxes", body).await.is(404);
}

#[tokio::test]
async fn templates_are_told_and_changed_by_their_tenant_alone() {
    let bed = Bed::new();
    let (template, build) = ready(&bed, json!({"name": "web"}), json!({"fromImage": "python:3"})).await;
    let told = bed.get("/templates/aliases/web").await.is(200);
    assert_eq!(told, json!({"templateID": template, "public": false}));
    let told = bed.get(&format!("/templates/{template}")).await.is(200);
    assert_eq!(
        (&told["buildStatus"], &told["names"], &told["public"]),
        (&json!("ready"), &json!(["web"]), &json!(false))
    );
    assert_eq!(told["builds"][0]["buildID"], build);
    let names = |list: Value| -> Vec<String> {
        let all = list.as_array().unwrap().iter();
        all.map(|one| one["names"][0].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(bed.get("/templates").await.is(200)), ["web", "base", "offline"]);
    let page = bed.get("/v2/templates?limit=1").await;
    let next = page.header("x-next-token").unwrap().to_owned();
    assert_eq!(names(page.is(200)), ["web"]);
    assert_eq!(
        names(bed.get(&format!("/v2/templates?nextToken={next}")).await.is(200)),
        ["base", "offline"]
    );
    let none = bed.get("/snapshots").await.is(200);
    assert_eq!(none, json!([]), "those of builds are no snapshots");
    for path in [
        "/templates/aliases/web",
        &format!("/templates/{template}"),
        "/templates/web/tags",
    ] {
        bed.send(request("GET", path, Some(&bed.other_key), Value::Null))
            .await
            .is(404);
    }
    let patch = |name: &str, body: Value| request("PATCH", &format!("/v2/templates/{name}"), Some(&bed.key), body);
    let same = bed.send(patch("web", json!({"public": false}))).await.is(200);
    assert_eq!(same, json!({"names": ["web"]}));
    bed.send(patch("web", json!({"public": true}))).await.is(400);
    bed.send(patch("base", json!({"public": false}))).await.is(403);
    let remove = |key: &str| request("DELETE", &format!("/templates/{template}"), Some(key), Value::Null);
    bed.send(remove(&bed.other_key)).await.is(404);
    assert_eq!(bed.node.snapshots().len(), 1);
    bed.send(remove(&bed.key)).await.is(204);
    assert!(bed.node.snapshots().is_empty());
    bed.get("/templates/aliases/web").await.is(404);
    bed.get(&format!("/templates/{template}/builds/{build}/status"))
        .await
        .is(404);
}

#[tokio::test]
async fn tags_lead_to_builds_and_a_build_without_one_goes() {
    let bed = Bed::new();
    let image = || json!({"fromImage": "python:3"});
    let (template, first) = ready(&bed, json!({"name": "web", "tags": ["default", "v1"]}), image()).await;
    let id = bed.make(json!({"templateID": "web"})).await;
    let (again, second) = ready(&bed, json!({"name": "web"}), image()).await;
    assert_eq!(template, again, "a name is one template");
    assert_eq!(bed.node.snapshots().len(), 2);
    let tags = bed.get("/templates/web/tags").await.is(200);
    let pairs: Vec<_> = tags
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["tag"].clone(), one["buildID"].clone()))
        .collect();
    assert_eq!(pairs, [(json!("default"), json!(second)), (json!("v1"), json!(first))]);
    let assigned = bed
        .post("/templates/tags", json!({"target": "web:v1", "tags": ["old"]}))
        .await
        .is(201);
    assert_eq!(assigned, json!({"tags": ["old"], "buildID": first}));
    bed.post("/templates/tags", json!({"target": "web:none", "tags": ["x"]}))
        .await
        .is(404);
    bed.post("/templates/tags", json!({"target": "base", "tags": ["x"]}))
        .await
        .is(404);
    assert_eq!(bed.get("/templates/web/tags/count").await.is(200), json!({"total": 3}));
    let exists = bed.get("/templates/web/tags/exists?tag=old").await.is(200);
    assert_eq!(exists, json!({"exists": true, "normalizedTag": "old"}));
    assert_eq!(
        bed.get("/templates/web/tags/exists?tag=new").await.is(200)["exists"],
        false
    );
    let groups = bed
        .get("/templates/web/tags/groups?sort=name_desc&search=l")
        .await
        .is(200);
    assert_eq!(
        (&groups["tags"][0]["tag"], &groups["tags"][1]["tag"]),
        (&json!("old"), &json!("default"))
    );
    let of_tag = bed.get("/templates/web/tags/old/assignments").await.is(200);
    assert_eq!(of_tag["data"][0]["buildId"], first);
    let remove = |tags: Value| bed.ask("DELETE", "/templates/tags", json!({"name": "web", "tags": tags}));
    remove(json!(["none"])).await.is(404);
    remove(json!(["v1"])).await.is(204);
    assert_eq!(bed.node.snapshots().len(), 2);
    remove(json!(["old"])).await.is(204);
    assert_eq!(bed.node.snapshots().len(), 1, "nothing leads to the first any more");
    bed.post("/v2/sandboxes", json!({"templateID": "web:v1"})).await.is(404);
    assert_eq!(bed.state(&id).await, "running", "what was made of it runs on");
}

#[tokio::test]
async fn what_fails_says_where_and_why_and_leaves_nothing() {
    let bed = Bed::new();
    let of = |steps: Value| json!({"fromImage": "python:3", "steps": steps});
    let (step, why) = fails(&bed, of(json!([run("true"), run("echo no such thing >&2; exit 3")]))).await;
    assert_eq!(step, "2");
    assert!(
        why.contains("step 2 (RUN echo") && why.contains("code 3") && why.ends_with("no such thing"),
        "{why}"
    );
    let (step, why) = fails(&bed, json!({"fromImage": "nobody/has:this"})).await;
    assert!(
        step == "base" && why.contains("no image `nobody/has:this`") && why.contains("basalt pull"),
        "{why}"
    );
    let (step, why) = fails(&bed, json!({"fromTemplate": "none"})).await;
    assert!(step == "base" && why.contains("`none` was not found"), "{why}");
    let (step, why) = fails(
        &bed,
        json!({"fromImage": "python:3", "startCmd": "exit 7", "readyCmd": "false"}),
    )
    .await;
    assert!(step == "finalize" && why.contains("code 7"), "{why}");
    // Each is twice as long as the one before.
    let doubled = vec![json!({"type": "ENV", "args": ["A", "$A$A-"]}); 40];
    let (_, why) = fails(&bed, of(json!(doubled))).await;
    assert!(why.contains("32768 bytes"), "{why}");
    let (step, why) = fails(&bed, of(json!([{"type": "WORKDIR", "args": ["/proc/nothing"]}]))).await;
    assert!(step == "1" && why.contains("WORKDIR"), "{why}");
    bed.node.refuse("snapshot", Some(node_api::ErrorKind::Host));
    let (step, why) = fails(&bed, of(json!([]))).await;
    assert!(
        step == "finalize" && why.contains("incident") && !why.contains("/var/lib"),
        "{why}"
    );
    bed.node.refuse("snapshot", None);
    // A name has the build that failed last, and none that sandboxes can be made of.
    assert_eq!(bed.get("/templates/failing").await.is(200)["buildStatus"], "error");
    bed.post("/v2/sandboxes", json!({"templateID": "failing"}))
        .await
        .is(404);
}

#[tokio::test]
async fn an_archive_that_is_up_to_no_good_fails_its_build() {
    let bed = Bed::new();
    let place = tempfile::tempdir().unwrap();
    let (template, _) = requested(&bed, json!({"name": "failing"})).await;
    let copy = |from: &str| {
        let steps = json!([{"type": "COPY", "args": [from, path(place.path(), "to/")], "filesHash": HASH}]);
        json!({"fromImage": "python:3", "steps": steps})
    };
    let name = format!("basalt-traversal-{}", std::process::id());
    upload(&bed, &template, HASH, archive(&[(&format!("../{name}"), "x")], true)).await;
    let (step, why) = fails(&bed, copy(".")).await;
    assert!(step == "1" && why.contains("COPY"), "{why}");
    for base in ["/var/tmp", "/tmp", "/"] {
        assert!(!Path::new(base).join(&name).exists());
    }
    for bytes in [b"no archive at all".to_vec(), vec![0x1f, 0x8b, 0, 1, 2, 3]] {
        upload(&bed, &template, HASH, bytes).await;
        assert_eq!(fails(&bed, copy(".")).await.0, "1");
    }
    upload(&bed, &template, HASH, archive(&[("a", "x")], true)).await;
    let (_, why) = fails(&bed, copy("b")).await;
    assert!(why.contains("there is no b in what was uploaded"), "{why}");
    assert!(!place.path().join("to").exists());
    // A file, not compressed, to a directory.
    upload(&bed, &template, HASH, archive(&[("a", "x")], false)).await;
    ready(&bed, json!({"name": "good"}), copy("a")).await;
    assert_eq!(std::fs::read_to_string(place.path().join("to/a")).unwrap(), "x");
}

#[tokio::test]
async fn what_is_started_runs_on_and_is_waited_for() {
    let bed = Bed::new();
    let place = tempfile::tempdir().unwrap();
    let file = path(place.path(), "ready");
    let pid = path(place.path(), "pid");
    let body = json!({
        "fromImage": "python:3", "startCmd": format!("echo started; echo $$ > {pid}; sleep 0.7; touch {file}; exec sleep 1000"),
        "readyCmd": format!("[ -e {file} ]"),
    });
    let (_, _, end) = built(&bed, json!({"name": "served"}), body).await;
    assert_eq!(end["status"], "ready", "{end:#}");
    assert!(lines(&end).iter().any(|line| line == "started"), "{end:#}");
    let pid: i32 = std::fs::read_to_string(pid).unwrap().trim().parse().unwrap();
    // What is ended takes a moment for it.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(Path::new(&format!("/proc/{pid}")).exists(), "it was ended");
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_build_on_a_template_begins_with_what_that_has() {
    let bed = Bed::new();
    let first = json!({"fromImage": "python:3", "steps": [{"type": "ENV", "args": ["A", "1"]}, {"type": "WORKDIR", "args": ["/tmp"]}]});
    ready(&bed, json!({"name": "one", "memoryMB": 300}), first).await;
    let second =
        json!({"fromTemplate": "one", "steps": [run("pwd; echo A is $A"), {"type": "ENV", "args": ["B", "$A"]}]});
    let (_, _, end) = built(&bed, json!({"name": "two"}), second.clone()).await;
    assert_eq!(end["status"], "ready", "{end:#}");
    let said = lines(&end);
    assert!(
        said.contains(&"/tmp".to_owned()) && said.contains(&"A is 1".to_owned()),
        "{said:#?}"
    );
    let id = bed.make(json!({"templateID": "two"})).await;
    let process = bed.node.sandbox(&id).unwrap().config.process;
    assert_eq!(process.workdir.as_deref(), Some("/tmp"));
    assert!(
        process.env.ends_with(&["A=1".to_owned(), "B=1".to_owned()]),
        "{:?}",
        process.env
    );
    bed.ask("DELETE", &format!("/sandboxes/{id}"), Value::Null)
        .await
        .is(204);
    let (_, _, end) = built(&bed, json!({"name": "three", "memoryMB": 999}), second).await;
    let why = end["reason"]["message"].as_str().unwrap();
    assert!(
        why.contains("300 MiB") && why.contains("leave cpuCount and memoryMB out"),
        "{why}"
    );
    // What the SDKs build on where they are told nothing is the template `base` of the node.
    let on_base = json!({"fromImage": "e2bdev/base", "steps": [{"type": "WORKDIR", "args": ["/tmp"]}]});
    ready(&bed, json!({"name": "four"}), on_base).await;
    let id = bed.make(json!({"templateID": "four"})).await;
    let sandbox = bed.node.sandbox(&id).unwrap();
    assert_eq!(sandbox.config.process.env, ["FROM=template"]);
    assert_eq!(sandbox.config.resources, crate::fake::resources());
}

#[tokio::test]
async fn a_log_is_told_by_pieces() {
    let bed = Bed::new();
    let body = json!({"fromImage": "python:3", "steps": [run("seq 1 250; echo bad >&2")]});
    let (template, build, _) = built(&bed, json!({"name": "web"}), body).await;
    let mut all = Vec::new();
    loop {
        let path = format!("/templates/{template}/builds/{build}/status?logsOffset={}", all.len());
        let part = lines(&bed.get(&path).await.is(200));
        assert!(part.len() <= 100);
        if part.is_empty() {
            break;
        }
        all.extend(part);
    }
    assert!((1..=250).all(|number| all.contains(&number.to_string())));
    let path = |query: &str| format!("/templates/{template}/builds/{build}/logs?{query}");
    let messages = |told: Value| -> Vec<String> {
        let all = told["logs"].as_array().unwrap().iter();
        all.map(|line| line["message"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(messages(bed.get(&path("level=warn")).await.is(200)), ["bad"]);
    let back = messages(bed.get(&path("direction=backward&limit=1")).await.is(200));
    assert_eq!(back, ["the template is ready"]);
    let none = messages(bed.get(&path("cursor=99999999999999")).await.is(200));
    assert!(none.is_empty());
    let from = bed.get(&path("limit=3")).await.is(200);
    assert_eq!(from["logs"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn what_cannot_be_asked_for_is_refused() {
    let bed = Bed::new();
    for body in [
        json!({}),
        json!({"name": ""}),
        json!({"name": "a/b"}),
        json!({"name": "0123456789abcdef"}),
        json!({"name": "web:"}),
        json!({"name": "web", "tags": ["a b"]}),
        json!({"name": "web", "cpuCount": 0}),
        json!({"name": "web", "memoryMB": 1}),
        json!({"name": "web", "memoryMB": -1}),
    ] {
        bed.post("/v3/templates", body).await.is(400);
    }
    let sandbox = bed.make(Value::Null).await;
    bed.post(&format!("/sandboxes/{sandbox}/snapshots"), json!({"name": "kept"}))
        .await
        .is(201);
    bed.post("/v3/templates", json!({"name": "kept"})).await.is(409);
    let (template, build) = requested(&bed, json!({"alias": "web"})).await;
    bed.post(&format!("/sandboxes/{sandbox}/snapshots"), json!({"name": "web"}))
        .await
        .is(409);
    let path = format!("/v2/templates/{template}/builds/{build}");
    let many = vec![run("true"); 10_000];
    for body in [
        json!({}),
        json!({"fromImage": "python:3", "steps": many}),
        json!({"fromImage": "python:3", "fromImageRegistry": {"type": "registry", "username": "a", "password": "b"}}),
        json!({"fromImage": "python:3", "steps": [{"type": "COPY", "args": ["a", "b"], "filesHash": HASH}]}),
    ] {
        bed.post(&path, body).await.is(400);
    }
    assert_eq!(status(&bed, &template, &build).await["status"], "waiting");
    for other in [
        format!("/v2/templates/none/builds/{build}"),
        format!("/v2/templates/{template}/builds/none"),
    ] {
        bed.post(&other, json!({"fromImage": "python:3"})).await.is(404);
    }
    for _ in 1..100 {
        requested(&bed, json!({"name": "web"})).await;
    }
    let refused = bed.post("/v3/templates", json!({"name": "web"})).await;
    assert_eq!(refused.header("should-retry"), Some("false"));
    refused.is(429);
}
