//! What sandboxes may reach: asked for when they are made, and later.

use node_api::ErrorKind;
use serde_json::{Value, json};

use crate::support::{Bed, request};

/// What the node keeps of a sandbox's rules.
fn kept(bed: &Bed, id: &str) -> Value {
    serde_json::to_value(&bed.node.sandbox(id).unwrap().config.egress).unwrap()
}

/// What the API tells of them: `network`, and `allowInternetAccess`.
async fn told(bed: &Bed, id: &str) -> (Value, Value) {
    let detail = bed.get(&format!("/sandboxes/{id}")).await.is(200);
    (detail["network"].clone(), detail["allowInternetAccess"].clone())
}

#[tokio::test]
async fn rules_are_kept_by_the_node_and_shown() {
    let bed = Bed::new();
    let open = bed.make(Value::Null).await;
    assert_eq!(kept(&bed, &open), json!({}));
    assert_eq!(
        told(&bed, &open).await,
        (json!({"allowPublicTraffic": true}), Value::Null)
    );
    for template in ["base", "offline"] {
        let id = bed
            .make(json!({"templateID": template, "allow_internet_access": false}))
            .await;
        assert_eq!(kept(&bed, &id), json!({"deny": ["0.0.0.0/0"]}));
        let network = json!({"allowPublicTraffic": true, "denyOut": ["0.0.0.0/0"]});
        assert_eq!(told(&bed, &id).await, (network, json!(false)));
    }
    let rules = json!({"allowOut": ["1.1.1.1", "10.0.0.0/8"], "denyOut": ["0.0.0.0/0"]});
    let id = bed.make(json!({"network": rules, "allow_internet_access": true})).await;
    assert_eq!(
        kept(&bed, &id),
        json!({"allow": ["1.1.1.1", "10.0.0.0/8"], "deny": ["0.0.0.0/0"]})
    );
    let network = json!({"allowPublicTraffic": true, "allowOut": ["1.1.1.1", "10.0.0.0/8"], "denyOut": ["0.0.0.0/0"]});
    assert_eq!(told(&bed, &id).await, (network, json!(true)));
    for path in ["/sandboxes", "/v2/sandboxes"] {
        let asked = json!({"templateID": "base", "network": {"allowOut": ["example.com"], "denyOut": ["0.0.0.0/0"]}});
        let refused = bed.post(path, asked).await.is(400);
        assert!(
            refused["message"].as_str().unwrap().contains("name of hosts"),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn an_update_takes_the_place_of_all_rules() {
    let bed = Bed::new();
    let id = bed.make(json!({"allow_internet_access": false})).await;
    let path = format!("/sandboxes/{id}/network");
    let put = async |body: Value| bed.ask("PUT", &path, body).await;
    put(json!({"allowOut": ["192.0.2.1"], "denyOut": ["0.0.0.0/0"]}))
        .await
        .is(204);
    assert_eq!(kept(&bed, &id), json!({"allow": ["192.0.2.1"], "deny": ["0.0.0.0/0"]}));
    assert_eq!(told(&bed, &id).await.1, Value::Null, "it reaches something");
    put(json!({"allow_internet_access": false})).await.is(204);
    assert_eq!(kept(&bed, &id), json!({"deny": ["0.0.0.0/0"]}));
    put(json!({})).await.is(204);
    assert_eq!(kept(&bed, &id), json!({}));
    assert_eq!(
        told(&bed, &id).await,
        (json!({"allowPublicTraffic": true}), Value::Null)
    );
    // Of one that is paused, for when it goes on.
    bed.post(&format!("/sandboxes/{id}/pause"), Value::Null).await.is(204);
    put(json!({"denyOut": ["10.0.0.0/8"]})).await.is(204);
    assert_eq!(kept(&bed, &id), json!({"deny": ["10.0.0.0/8"]}));
    for wrong in [
        json!({"denyOut": ["x"]}),
        json!({"denyOut": "0.0.0.0/0"}),
        json!({"denyOut": vec!["1.1.1.1"; 10_000]}),
        json!({"dnsServers": ["1.1.1.1"]}),
        json!([]),
    ] {
        put(wrong).await.is(400);
    }
    assert_eq!(kept(&bed, &id), json!({"deny": ["10.0.0.0/8"]}));
    bed.node.refuse("network", Some(ErrorKind::WrongState));
    put(json!({})).await.is(409);
    bed.node.refuse("network", Some(ErrorKind::NotFound));
    put(json!({})).await.is(404);
    bed.ask("PUT", "/sandboxes/0123456789ab/network", json!({}))
        .await
        .is(404);
}

#[tokio::test]
async fn another_tenants_sandbox_is_not_there() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let path = format!("/sandboxes/{id}/network");
    let theirs = request("PUT", &path, Some(&bed.other_key), json!({"denyOut": ["0.0.0.0/0"]}));
    bed.send(theirs).await.is(404);
    assert_eq!(kept(&bed, &id), json!({}));
}

#[tokio::test]
async fn copies_have_the_rules_of_their_origin_unless_others_are_asked_for() {
    let bed = Bed::new();
    let id = bed.make(json!({"network": {"denyOut": ["10.0.0.0/8"]}})).await;
    let forked = bed.post(&format!("/sandboxes/{id}/fork"), Value::Null).await.is(201);
    let copy = forked[0]["sandbox"]["sandboxID"].as_str().unwrap();
    assert_eq!(kept(&bed, copy), json!({"deny": ["10.0.0.0/8"]}));
    let made = bed.post(&format!("/sandboxes/{id}/snapshots"), json!({})).await.is(201);
    let snapshot = made["snapshotID"].as_str().unwrap();
    for (asked, rules) in [
        (json!({}), json!({"deny": ["10.0.0.0/8"]})),
        (json!({"allow_internet_access": false}), json!({"deny": ["0.0.0.0/0"]})),
        (json!({"allow_internet_access": true}), json!({"deny": ["10.0.0.0/8"]})),
        (
            json!({"network": {"denyOut": ["1.1.1.1"]}}),
            json!({"deny": ["1.1.1.1"]}),
        ),
    ] {
        let mut asked = asked;
        asked["templateID"] = json!(snapshot);
        let made = bed.make(asked).await;
        assert_eq!(kept(&bed, &made), rules);
    }
}
