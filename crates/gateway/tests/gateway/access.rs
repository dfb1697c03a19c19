//! Who may ask, how often, and what is not there.

use control::Keys;
use serde_json::{Value, json};

use crate::support::{Bed, request};

#[tokio::test]
async fn nothing_is_done_without_a_key() {
    let bed = Bed::new();
    let good = bed.key.clone();
    let mut wrong = good.clone();
    wrong.replace_range(10..11, if &good[10..11] == "0" { "1" } else { "0" });
    for key in [None, Some(""), Some("e2b_0"), Some(wrong.as_str())] {
        for (method, path) in [
            ("GET", "/v2/sandboxes"),
            ("POST", "/sandboxes"),
            ("GET", "/secrets"),
            ("DELETE", "/templates/base"),
        ] {
            let refused = bed
                .send(request(method, path, key, json!({"templateID": "base"})))
                .await
                .is(401);
            assert!(refused["message"].as_str().unwrap().contains("X-API-Key"));
        }
    }
    assert_eq!(bed.node.asked("run"), 0);
    let mut bearer = request("GET", "/v2/sandboxes", None, Value::Null);
    bearer
        .headers_mut()
        .insert("authorization", format!("Bearer {good}").parse().unwrap());
    bed.send(bearer).await.is(200);
    let key = bed.store.keys(Some("one")).unwrap().remove(0);
    assert!(key.last_used.is_some());
    bed.store.revoke_key(&key.id, 1).unwrap();
    bed.get("/v2/sandboxes").await.is(401);
}

#[tokio::test]
async fn a_key_may_ask_so_often() {
    let bed = Bed::with_burst(2);
    bed.get("/v2/sandboxes").await.is(200);
    bed.get("/v2/sandboxes").await.is(200);
    let refused = bed.get("/v2/sandboxes").await;
    assert_eq!(refused.header("retry-after"), Some("1"));
    refused.is(429);
    bed.send(request("GET", "/v2/sandboxes", Some(&bed.other_key), Value::Null))
        .await
        .is(200);
    assert_eq!(bed.send(request("GET", "/health", None, Value::Null)).await.status, 200);
}

#[tokio::test]
async fn what_is_not_served_is_named() {
    let bed = Bed::new();
    for (method, path, what) in [
        ("GET", "/secrets", "secrets"),
        ("POST", "/secrets/x", "secret"),
        ("GET", "/teams", "teams"),
        ("GET", "/default-templates", "default templates"),
        ("POST", "/v2/templates", "build of a template by a Dockerfile"),
        ("POST", "/templates/x/builds/y", "build of a template by a Dockerfile"),
    ] {
        let told = bed.ask(method, path, json!({})).await.is(501);
        let message = told["message"].as_str().unwrap();
        assert!(
            message.contains(what) && message.contains("is not served by this version of Basalt"),
            "{method} {path}: {message}"
        );
    }
    bed.get("/nothing").await.is(404);
    bed.ask("PUT", "/v2/sandboxes", json!({})).await.is(405);
}

#[tokio::test]
async fn the_document_has_every_endpoint_that_is_served() {
    let bed = Bed::new();
    let document = bed
        .send(request("GET", "/openapi.json", None, Value::Null))
        .await
        .is(200);
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.values().flat_map(|methods| methods.as_object().unwrap().values());
    let served = operations.filter(|operation| is_served(operation)).count();
    assert_eq!(served, 54, "{:?}", paths.keys().collect::<Vec<_>>());
    let create = &paths["/v2/sandboxes"]["post"];
    let schema = &create["requestBody"]["content"]["application/json"]["schema"]["$ref"];
    assert_eq!(schema, "#/components/schemas/NewSandbox");
    for status in ["201", "400", "401", "429", "503"] {
        assert!(create["responses"].get(status).is_some(), "{status}");
    }
    let required = &document["components"]["schemas"]["ListedSandbox"]["required"];
    for field in [
        "templateID",
        "sandboxID",
        "clientID",
        "startedAt",
        "endAt",
        "cpuCount",
        "memoryMB",
        "diskSizeMB",
        "state",
        "envdVersion",
    ] {
        assert!(required.as_array().unwrap().contains(&json!(field)), "{field}");
    }
    // Each of them is a route: with a key it is known, and served where the document says so.
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            let path = path.replace("{sandboxID}", "0123456789ab");
            let words = path
                .split('/')
                .map(|word| if word.starts_with('{') { "x" } else { word });
            let path = words.collect::<Vec<_>>().join("/");
            let status = bed.ask(&method.to_uppercase(), &path, json!({})).await.status.as_u16();
            assert_ne!(status, 405, "{method} {path}");
            assert_eq!(status != 501, is_served(operation), "{method} {path}: {status}");
        }
    }
}

fn is_served(operation: &Value) -> bool {
    let answers = operation["responses"].as_object().unwrap();
    answers.keys().any(|status| status.starts_with('2'))
}
