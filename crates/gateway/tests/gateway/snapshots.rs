//! Snapshots and templates: made, named, listed, used, removed.

use serde_json::{Value, json};

use crate::fake::BASE;
use crate::support::{Bed, request};

/// What is ready is told by names that its tenant knows, and of nothing else.
#[tokio::test]
async fn pools_have_what_a_tenant_can_make_sandboxes_of() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let path = format!("/sandboxes/{id}/snapshots");
    let named = bed.post(&path, json!({"name": "warm:v2"})).await.is(201);
    let unnamed = bed.post(&path, Value::Null).await.is(201);
    let steps = json!({"fromTemplate": "base", "steps": [crate::builds::run("true")]});
    crate::builds::ready(&bed, json!({"name": "web", "tags": ["v1"]}), steps).await;
    let told = bed.get("/pools").await.is(200);
    assert_eq!(told["interfaces"], json!({"ready": 5, "size": 8}));
    let all = told["memory"].as_array().unwrap();
    let mut names: Vec<(&str, &str)> = all
        .iter()
        .map(|one| (one["kind"].as_str().unwrap(), one["name"].as_str().unwrap()))
        .collect();
    names.sort_unstable();
    let unnamed = unnamed["snapshotID"].as_str().unwrap();
    let mut wanted = [
        ("snapshot", unnamed),
        ("snapshot", "warm:v2"),
        ("template", "base"),
        ("template", "offline"),
        ("template", "web:v1"),
    ];
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    assert_eq!(
        all[0],
        json!({"kind": "template", "name": "base", "size": 100 << 20, "cached": 75 << 20})
    );
    assert!(named["snapshotID"].is_string() && all.last().unwrap()["cached"].is_null());
    let other = bed
        .send(request("GET", "/pools", Some(&bed.other_key), Value::Null))
        .await
        .is(200);
    assert_eq!(other["memory"].as_array().unwrap().len(), 2, "{other}");
    assert_eq!(bed.send(request("GET", "/pools", None, Value::Null)).await.status, 401);
}

#[tokio::test]
async fn a_snapshot_is_good_as_a_template() {
    let bed = Bed::new();
    let source = bed
        .make(json!({"metadata": {"old": "1", "both": "1"}, "timeout": 900, "autoPause": true}))
        .await;
    let path = format!("/sandboxes/{source}/snapshots");
    let made = bed.post(&path, json!({"name": "ready"})).await.is(201);
    assert_eq!(made["names"], json!(["ready"]));
    let id = made["snapshotID"].as_str().unwrap().to_owned();
    for asked in [id.as_str(), "ready", "ready:default"] {
        let body = json!({"templateID": asked, "timeout": 30, "metadata": {"both": "2", "new": "2"}});
        let sandbox = bed.post("/v2/sandboxes", body).await.is(201);
        assert_eq!(sandbox["templateID"], json!(id));
        let its = sandbox["sandboxID"].as_str().unwrap();
        let told = bed.get(&format!("/sandboxes/{its}")).await.is(200);
        assert_eq!(told["metadata"], json!({"both": "2", "new": "2"}), "{asked}");
        assert_eq!(told["lifecycle"]["onTimeout"], json!("kill"));
        assert_eq!(bed.left(its), 30);
        let kept = bed.node.sandbox(its).unwrap();
        assert!(kept.config.remove && kept.clone_of.as_deref() == Some(id.as_str()));
    }
    assert_eq!(
        bed.get("/v2/sandboxes?template=ready")
            .await
            .is(200)
            .as_array()
            .unwrap()
            .len(),
        3
    );
    assert_eq!(
        bed.get("/v2/sandboxes?metadata=old%3D1")
            .await
            .is(200)
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let body = json!({"templateID": id, "envVars": {"A": "b"}, "timeout": 77});
    let made = bed.post("/v2/sandboxes", body).await.is(201);
    let made = bed.node.sandbox(made["sandboxID"].as_str().unwrap()).unwrap();
    assert!(made.config.process.env.contains(&"A=b".to_owned()));
    assert_eq!(made.config.time_limit.unwrap().ms, 77_000);
}

#[tokio::test]
async fn a_name_goes_to_the_newest_snapshot() {
    let bed = Bed::new();
    let source = bed.make(Value::Null).await;
    let path = format!("/sandboxes/{source}/snapshots");
    let first = bed.post(&path, json!({"name": "ready"})).await.is(201);
    let second = bed.post(&path, json!({"name": "ready"})).await.is(201);
    let tagged = bed.post(&path, json!({"name": "ready:v2"})).await.is(201);
    let bare = bed.post(&path, Value::Null).await.is(201);
    assert_eq!(bare["names"], json!([]));
    let target = async |name: &str| bed.get(&format!("/templates/aliases/{name}")).await.is(200)["templateID"].clone();
    assert_eq!(target("ready").await, second["snapshotID"]);
    assert_eq!(target("ready%3Av2").await, tagged["snapshotID"]);
    assert_eq!(target("base").await, json!(BASE));
    bed.get("/templates/aliases/nothing").await.is(404);
    for body in [
        json!({"name": "a b"}),
        json!({"name": "a:b:c"}),
        json!({"memory": false}),
    ] {
        bed.post(&path, body).await.is(400);
    }
    let ids = |json: &Value| -> Vec<Value> {
        json.as_array()
            .unwrap()
            .iter()
            .map(|one| one["snapshotID"].clone())
            .collect()
    };
    let expected = [&bare, &tagged, &second, &first].map(|one| one["snapshotID"].clone());
    let mut seen = Vec::new();
    let mut token = String::new();
    loop {
        let page = bed.get(&format!("/snapshots?limit=3&nextToken={token}")).await;
        token = page.header("x-next-token").unwrap_or_default().to_owned();
        seen.extend(ids(&page.is(200)));
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, expected);
    assert_eq!(ids(&bed.get("/snapshots?name=ready").await.is(200)).len(), 2);
    assert_eq!(
        ids(&bed.get(&format!("/snapshots?sandboxID={source}")).await.is(200)).len(),
        4
    );
    assert_eq!(
        ids(&bed.get("/snapshots?sandboxID=0123456789ab").await.is(200)).len(),
        0
    );
}

#[tokio::test]
async fn a_snapshot_is_removed_with_its_names_and_only_by_its_tenant() {
    let bed = Bed::new();
    let source = bed.make(Value::Null).await;
    let made = bed
        .post(&format!("/sandboxes/{source}/snapshots"), json!({"name": "ready"}))
        .await
        .is(201);
    let id = made["snapshotID"].as_str().unwrap().to_owned();
    let other = |method: &'static str, path: String, body| bed.send(request(method, &path, Some(&bed.other_key), body));
    for name in [id.as_str(), "ready"] {
        other("DELETE", format!("/templates/{name}"), Value::Null).await.is(404);
        other("POST", "/v2/sandboxes".into(), json!({"templateID": name}))
            .await
            .is(404);
    }
    assert_eq!(other("GET", "/snapshots".into(), Value::Null).await.is(200), json!([]));
    bed.ask("DELETE", "/templates/ready", Value::Null).await.is(204);
    assert_eq!(bed.node.snapshots(), Vec::<String>::new());
    bed.ask("DELETE", &format!("/templates/{id}"), Value::Null)
        .await
        .is(404);
    bed.get("/templates/aliases/ready").await.is(404);
}

#[tokio::test]
async fn templates_are_listed_and_stay() {
    let bed = Bed::new();
    for path in ["/templates", "/templates?teamID=x", "/v2/templates"] {
        let all = bed.get(path).await.is(200);
        let base = all
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["templateID"] == json!(BASE))
            .unwrap();
        for field in [
            "buildID",
            "cpuCount",
            "memoryMB",
            "diskSizeMB",
            "public",
            "aliases",
            "names",
            "createdAt",
            "updatedAt",
            "createdBy",
            "lastSpawnedAt",
            "spawnCount",
            "buildCount",
            "envdVersion",
            "buildStatus",
        ] {
            assert!(base.get(field).is_some(), "{path} lacks {field}");
        }
        assert_eq!(
            (&base["names"], &base["buildStatus"]),
            (&json!(["base"]), &json!("ready"))
        );
    }
    let first = bed.get("/v2/templates?limit=1").await;
    let token = first.header("x-next-token").unwrap().to_owned();
    let second = bed.get(&format!("/v2/templates?limit=1&nextToken={token}")).await;
    assert_eq!(second.header("x-next-token"), None);
    assert_ne!(first.is(200)[0]["templateID"], second.is(200)[0]["templateID"]);
    let one = bed.get("/templates/base").await.is(200);
    assert_eq!(one["builds"][0]["buildID"], one["buildID"]);
    assert_eq!(one["buildID"].as_str().unwrap().len(), 36);
    bed.get("/templates/nothing").await.is(404);
    let refused = bed.ask("DELETE", "/templates/base", Value::Null).await.is(403);
    assert!(
        refused["message"].as_str().unwrap().contains("basalt template rm"),
        "{refused}"
    );
}
