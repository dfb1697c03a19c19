//! Sandboxes made, listed, looked at and killed; what cannot be honoured is refused; each tenant has its own.

use control::{AuditLog, Quota, Tenants};
use node_api::{ErrorKind, OnTimeout, State};
use serde_json::{Value, json};

use crate::fake::BASE;
use crate::support::{Bed, request};

#[tokio::test]
async fn a_sandbox_is_what_was_asked_for() {
    let bed = Bed::new();
    let asked = json!({
        "templateID": "base", "timeout": 60, "autoPause": true, "autoResume": {"enabled": true}, "metadata": {"user": "a b"},
        "envVars": {"A": "b"}, "network": {"allowPublicTraffic": false}, "unknown": {"x": 1},
    });
    let made = bed.post("/v2/sandboxes", asked).await.is(201);
    let id = made["sandboxID"].as_str().unwrap();
    assert_eq!((&made["templateID"], &made["alias"]), (&json!(BASE), &json!("base")));
    assert_eq!(
        (&made["envdVersion"], &made["domain"]),
        (&json!("0.6.4"), &json!("sb.example"))
    );
    assert!(made["clientID"].is_string());
    let token = |name: &str| made[name].as_str().unwrap().to_owned();
    assert_ne!(token("envdAccessToken"), token("trafficAccessToken"));
    let kept = bed.node.sandbox(id).unwrap();
    let config = &kept.config;
    assert!(config.detach && config.remove);
    assert_eq!(config.process.env, ["FROM=template", "A=b"]);
    assert_eq!(config.process.user.as_deref(), Some("user"));
    assert_eq!(config.time_limit.unwrap().then, OnTimeout::Suspend);
    assert_eq!(config.template.as_deref(), Some(BASE));
    assert_eq!(bed.left(id), 60);
    let told = bed.get(&format!("/sandboxes/{id}")).await.is(200);
    assert_eq!(told["metadata"], json!({"user": "a b"}));
    assert_eq!(told["lifecycle"], json!({"autoResume": true, "onTimeout": "pause"}));
    assert_eq!(told["network"], json!({"allowPublicTraffic": false}));
    assert_eq!(told["envdAccessToken"], made["envdAccessToken"]);
    assert_eq!(told["allowInternetAccess"], Value::Null);
    assert_eq!(
        (
            &told["cpuCount"],
            &told["memoryMB"],
            &told["diskSizeMB"],
            &told["state"]
        ),
        (&json!(2), &json!(512), &json!(1024), &json!("running"))
    );
    assert!(told["startedAt"].as_str().unwrap() < told["endAt"].as_str().unwrap());
}

#[tokio::test]
async fn the_two_generations_differ_in_how_long_a_sandbox_runs() {
    let bed = Bed::new();
    for (path, seconds) in [("/sandboxes", 15), ("/v2/sandboxes", 300)] {
        let made = bed.post(path, json!({"templateID": BASE})).await.is(201);
        let id = made["sandboxID"].as_str().unwrap();
        assert_eq!(bed.left(id), seconds, "{path}");
        assert_eq!(made.get("alias"), None, "an id is no name");
        assert_eq!(made.get("trafficAccessToken"), None, "its ports are public");
        assert_eq!(
            bed.node.sandbox(id).unwrap().config.time_limit.unwrap().then,
            OnTimeout::Stop
        );
    }
}

#[tokio::test]
async fn what_cannot_be_is_refused() {
    let bed = Bed::new();
    for body in [
        json!({}),
        json!([]),
        json!({"templateID": 7}),
        json!({"templateID": "base", "timeout": -1}),
        json!({"templateID": "base", "mcp": {"a": {}}}),
        json!({"templateID": "base", "metadata": {"a": 1}}),
    ] {
        bed.post("/v2/sandboxes", body).await.is(400);
    }
    for template in ["nothing", "base:v2", "", "a/b", "../base", &"a".repeat(1000)] {
        bed.post("/v2/sandboxes", json!({"templateID": template})).await.is(404);
    }
    let mut large = request("POST", "/v2/sandboxes", Some(&bed.key), Value::Null);
    *large.body_mut() = axum::body::Body::from(vec![b' '; (1 << 20) + 1]);
    let refused = bed.send(large).await.is(400);
    assert!(refused["message"].as_str().unwrap().contains("1048576"), "{refused}");
    for id in ["nothing", "0123456789ab", "fake-1", "0123456789abc"] {
        bed.get(&format!("/sandboxes/{id}")).await.is(404);
        bed.ask("DELETE", &format!("/sandboxes/{id}"), Value::Null)
            .await
            .is(404);
    }
    assert_eq!(bed.node.asked("run"), 0);
}

#[tokio::test]
async fn a_nodes_refusal_is_told_without_the_hosts_own_affairs() {
    let bed = Bed::new();
    bed.node.refuse("run", Some(ErrorKind::Host));
    let refused = bed.post("/v2/sandboxes", json!({"templateID": "base"})).await.is(503);
    let message = refused["message"].as_str().unwrap();
    assert!(
        !message.contains("/var/lib") && message.contains("incident"),
        "{message}"
    );
    assert_eq!(refused["error_code"], json!("sandbox_capacity_unavailable"));
    bed.node.refuse("run", None);
    bed.make(Value::Null).await;
}

#[tokio::test]
async fn lists_have_pages_filters_and_an_order() {
    let bed = Bed::new();
    let mut ids = Vec::new();
    for n in 0..5 {
        ids.push(bed.make(json!({"metadata": {"n": n.to_string(), "all": "x y"}})).await);
    }
    bed.post(&format!("/sandboxes/{}/pause", ids[4]), Value::Null)
        .await
        .is(204);
    let told = |json: &Value| -> Vec<String> {
        let all = json.as_array().unwrap();
        all.iter()
            .map(|one| one["sandboxID"].as_str().unwrap().to_owned())
            .collect()
    };
    let of = async |query: &str| told(&bed.get(&format!("/v2/sandboxes{query}")).await.is(200));
    let newest: Vec<String> = ids.iter().rev().cloned().collect();
    assert_eq!(of("").await, newest);
    assert_eq!(of("?order=asc").await, ids);
    assert_eq!(of("?state=paused").await, newest[..1]);
    assert_eq!(of("?state=running").await, newest[1..]);
    assert_eq!(of("?metadata=n%3D2").await, [ids[2].clone()]);
    assert_eq!(of("?metadata=all%3Dx%252520y%26n%3D3").await, [ids[3].clone()]);
    assert_eq!(of("?template=base").await.len(), 5);
    assert_eq!(of("?template=nothing").await.len(), 0);
    assert_eq!(
        told(&bed.get("/sandboxes").await.is(200)),
        newest[1..],
        "the older list has those that run"
    );
    for order in ["asc", "desc"] {
        let mut seen = Vec::new();
        let mut token = String::new();
        loop {
            let page = bed
                .get(&format!("/v2/sandboxes?limit=2&order={order}&nextToken={token}"))
                .await;
            token = page.header("x-next-token").unwrap_or_default().to_owned();
            seen.extend(told(&page.is(200)));
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(seen, if order == "asc" { ids.clone() } else { newest.clone() });
    }
    for query in [
        "?limit=0",
        "?limit=101",
        "?limit=x",
        "?order=up",
        "?state=exited",
        "?nextToken=x",
        "?startedAfter=now",
    ] {
        bed.get(&format!("/v2/sandboxes{query}")).await.is(400);
    }
}

#[tokio::test]
async fn lists_begin_at_a_moment() {
    let bed = Bed::new();
    let mut ids = Vec::new();
    for n in 0..3_u64 {
        let id = bed.make(Value::Null).await;
        bed.node.change(&id, |one| {
            one.created_ns = 1_763_710_727_000_000_000 + n * 1_000_000_000
        });
        ids.push(id);
    }
    for (order, expected) in [("asc", [&ids[1], &ids[2]]), ("desc", [&ids[2], &ids[1]])] {
        let query = format!("/v2/sandboxes?startedAfter=2025-11-21T07:38:48%2B00:00&limit=1&order={order}");
        let first = bed.get(&query).await;
        let token = first.header("x-next-token").unwrap().to_owned();
        assert_eq!(first.is(200)[0]["sandboxID"], **expected[0]);
        let second = bed.get(&format!("{query}&nextToken={token}")).await;
        let last = second.header("x-next-token").map(str::to_owned);
        assert_eq!(second.is(200)[0]["sandboxID"], **expected[1]);
        // Behind it there is one that is too old, which makes no page.
        if let Some(token) = last {
            let third = bed.get(&format!("{query}&nextToken={token}")).await;
            assert_eq!(third.header("x-next-token"), None);
            assert_eq!(third.is(200), json!([]));
        }
    }
}

#[tokio::test]
async fn a_sandbox_is_killed_once() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let path = format!("/sandboxes/{id}");
    bed.ask("DELETE", &path, Value::Null).await.is(204);
    assert!(bed.node.sandbox(&id).is_none());
    bed.ask("DELETE", &path, Value::Null).await.is(404);
    bed.get(&path).await.is(404);
    let ended = bed.make(Value::Null).await;
    bed.node.change(&ended, |one| one.state = State::Exited);
    bed.get(&format!("/sandboxes/{ended}")).await.is(404);
}

#[tokio::test]
async fn tenants_see_nothing_of_each_other() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let other =
        |method: &'static str, path: String| bed.send(request(method, &path, Some(&bed.other_key), Value::Null));
    other("GET", format!("/sandboxes/{id}")).await.is(404);
    other("DELETE", format!("/sandboxes/{id}")).await.is(404);
    for verb in ["pause", "resume", "connect", "fork", "snapshots", "refreshes"] {
        other("POST", format!("/sandboxes/{id}/{verb}")).await.is(404);
    }
    for what in ["metrics", "logs", "trace"] {
        other("GET", format!("/sandboxes/{id}/{what}")).await.is(404);
    }
    assert_eq!(other("GET", "/v2/sandboxes".into()).await.is(200), json!([]));
    assert_eq!(
        other("GET", format!("/sandboxes/metrics?sandbox_ids={id}"))
            .await
            .is(200),
        json!({"sandboxes": {}})
    );
    // What the operator makes on the node is nobody's.
    bed.node.change(&id, |one| one.config.owner = None);
    bed.get(&format!("/sandboxes/{id}")).await.is(404);
    assert!(bed.node.sandbox(&id).is_some());
}

#[tokio::test]
async fn a_request_that_is_sent_twice_makes_one_sandbox() {
    let bed = Bed::new();
    let ask = |key: &str, timeout: u64| {
        let body = json!({"templateID": "base", "timeout": timeout});
        let mut request = request("POST", "/v2/sandboxes", Some(&bed.key), body);
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
        bed.send(request)
    };
    let first = ask("a", 60).await.is(201);
    let again = ask("a", 60).await.is(201);
    assert_eq!(first["sandboxID"], again["sandboxID"]);
    assert_eq!(bed.node.asked("run"), 1);
    let other = ask("a", 61).await.is(422);
    assert_eq!(other["error_code"], json!("idempotency_request_mismatch"));
    assert_ne!(ask("b", 60).await.is(201)["sandboxID"], first["sandboxID"]);
    bed.node.refuse("run", Some(ErrorKind::Host));
    ask("c", 60).await.is(503);
    bed.node.refuse("run", None);
    ask("c", 60).await.is(201);
}

#[tokio::test]
async fn a_quota_holds_for_all_ways_to_a_sandbox() {
    let bed = Bed::new();
    let quota = Quota {
        sandboxes: Some(3),
        vcpus: Some(4),
        memory: None,
        ..Quota::default()
    };
    bed.store.set_quota("one", quota).unwrap();
    let (first, second) = (bed.make(Value::Null).await, bed.make(Value::Null).await);
    let refused = bed.post("/v2/sandboxes", json!({"templateID": "base"})).await;
    assert_eq!(refused.header("should-retry"), Some("false"));
    assert!(refused.is(429)["message"].as_str().unwrap().contains("6 vCPUs"));
    let forked = bed.post(&format!("/sandboxes/{first}/fork"), Value::Null).await.is(201);
    assert_eq!(forked[0]["error"]["code"], json!(429), "{forked}");
    // One that is paused has no CPUs, until it goes on.
    bed.post(&format!("/sandboxes/{first}/pause"), Value::Null)
        .await
        .is(204);
    let third = bed.make(Value::Null).await;
    bed.post(&format!("/sandboxes/{first}/connect"), Value::Null)
        .await
        .is(429);
    assert_eq!(bed.state(&first).await, "paused");
    bed.ask("DELETE", &format!("/sandboxes/{third}"), Value::Null)
        .await
        .is(204);
    bed.post(&format!("/sandboxes/{first}/connect"), Value::Null)
        .await
        .is(201);
    assert_eq!(bed.state(&second).await, "running");
    // Others have their own.
    let body = json!({"templateID": "base"});
    bed.send(request("POST", "/v2/sandboxes", Some(&bed.other_key), body))
        .await
        .is(201);
}

#[tokio::test]
async fn what_is_changed_is_written_down() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    bed.get("/v2/sandboxes").await.is(200);
    bed.post(&format!("/sandboxes/{id}/timeout"), json!({"timeout": 9}))
        .await
        .is(204);
    bed.ask("DELETE", "/sandboxes/0123456789ab", Value::Null).await.is(404);
    let rows = bed.store.audited(Some("one"), 10).unwrap();
    let told: Vec<(&str, &str, u16)> = rows
        .iter()
        .map(|row| (row.action.as_str(), row.object.as_str(), row.outcome))
        .collect();
    assert_eq!(
        told,
        [
            ("DELETE /sandboxes/{id}", "0123456789ab", 404),
            ("POST /sandboxes/{id}/timeout", id.as_str(), 204),
            ("POST /v2/sandboxes", id.as_str(), 201),
        ]
    );
    assert!(rows.iter().all(|row| row.key.len() == 16 && row.time_ns > 0));
}
