//! How long sandboxes run, pause, resume, connect and fork.

use std::time::Duration;

use node_api::{ErrorKind, OnTimeout, State};
use serde_json::{Value, json};

use crate::support::Bed;

#[tokio::test]
async fn a_timeout_shortens_and_a_refresh_does_not() {
    let bed = Bed::new();
    let id = bed.make(json!({"timeout": 100})).await;
    let path = format!("/sandboxes/{id}/timeout");
    bed.post(&path, json!({"timeout": 50})).await.is(204);
    assert_eq!(bed.left(&id), 50);
    let refresh = format!("/sandboxes/{id}/refreshes");
    bed.post(&refresh, json!({"duration": 20})).await.is(204);
    assert_eq!(bed.left(&id), 50);
    bed.post(&refresh, json!({"duration": 70})).await.is(204);
    assert_eq!(bed.left(&id), 70);
    bed.post(&refresh, Value::Null).await.is(204);
    assert_eq!(bed.left(&id), 70);
    for body in [
        json!({}),
        json!({"timeout": -1}),
        json!({"timeout": "1"}),
        json!({"timeout": 10_000_000}),
    ] {
        bed.post(&path, body).await.is(400);
    }
    bed.post("/sandboxes/0123456789ab/timeout", json!({"timeout": 1}))
        .await
        .is(404);
    bed.post(&path, json!({"timeout": 0})).await.is(204);
    crate::support::until("its end", async || bed.node.sandbox(&id).is_none()).await;
}

#[tokio::test]
async fn a_sandbox_is_paused_once_and_goes_on_by_connect() {
    let bed = Bed::new();
    let id = bed.make(json!({"timeout": 100})).await;
    let pause = format!("/sandboxes/{id}/pause");
    bed.post(&pause, json!({"memory": false})).await.is(400);
    assert_eq!(bed.state(&id).await, "running");
    bed.post(&pause, json!({"memory": true, "requireHealthyGuest": true}))
        .await
        .is(204);
    assert_eq!(bed.node.sandbox(&id).unwrap().state, State::Suspended);
    let told = bed.get(&format!("/sandboxes/{id}")).await.is(200);
    assert_eq!((&told["state"], &told["pauseMode"]), (&json!("paused"), &json!("full")));
    bed.post(&pause, Value::Null).await.is(409);
    for path in ["/sandboxes", "/v2/sandboxes"] {
        let connect = format!("{path}/{id}/connect");
        bed.post(&connect, json!({"timeout": 60, "memory": false}))
            .await
            .is(400);
        let made = bed.post(&connect, json!({"timeout": 60})).await.is(201);
        assert_eq!(made["sandboxID"], json!(id));
        assert!(made["envdAccessToken"].is_string());
        assert_eq!(bed.left(&id), 60);
        // It never has less for it, and of one that runs no memory is given up.
        bed.post(&connect, json!({"timeout": 10, "memory": false}))
            .await
            .is(200);
        assert_eq!(bed.left(&id), 60);
        bed.post(&connect, json!({"timeout": 90})).await.is(200);
        assert_eq!(bed.left(&id), 90);
        bed.post(&pause, Value::Null).await.is(204);
    }
    let made = bed
        .post(
            &format!("/sandboxes/{id}/resume"),
            json!({"timeout": 30, "autoPause": true}),
        )
        .await
        .is(201);
    assert_eq!(made["sandboxID"], json!(id));
    let kept = bed.node.sandbox(&id).unwrap();
    assert_eq!(kept.config.time_limit.unwrap().then, OnTimeout::Suspend);
    assert_eq!(bed.left(&id), 30);
    bed.post(&format!("/sandboxes/{id}/resume"), Value::Null).await.is(409);
    bed.post("/sandboxes/0123456789ab/connect", json!({"timeout": 1}))
        .await
        .is(404);
}

#[tokio::test]
async fn a_pause_that_the_guest_does_not_follow_leaves_it_running() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    bed.node.refuse("suspend", Some(ErrorKind::Guest));
    bed.post(&format!("/sandboxes/{id}/pause"), json!({"requireHealthyGuest": true}))
        .await
        .is(500);
    assert_eq!(bed.state(&id).await, "running");
}

#[tokio::test]
async fn its_time_ends_a_sandbox_or_pauses_it() {
    let bed = Bed::new();
    let (killed, paused) = (
        bed.make(json!({"timeout": 0})).await,
        bed.make(json!({"timeout": 0, "autoPause": true})).await,
    );
    crate::support::until("a pause", async || bed.state(&paused).await == "paused").await;
    bed.get(&format!("/sandboxes/{killed}")).await.is(404);
}

#[tokio::test]
async fn who_asks_at_once_lets_a_sandbox_go_on_once() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    bed.post(&format!("/sandboxes/{id}/pause"), Value::Null).await.is(204);
    let path = format!("/v2/sandboxes/{id}/connect");
    let all = futures_util::future::join_all((0..20).map(|_| bed.post(&path, Value::Null))).await;
    let resumed = all.iter().filter(|got| got.status == 201).count();
    assert!(all.iter().all(|got| got.status.is_success()));
    assert_eq!((resumed, bed.node.asked("resume")), (1, 1));
}

/// As of a gateway that was killed before it could remove it.
#[tokio::test]
async fn the_snapshot_of_a_fork_that_was_left_goes_later() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    bed.node.refuse("remove-snapshot", Some(ErrorKind::Host));
    bed.post(&format!("/sandboxes/{id}/fork"), Value::Null).await.is(201);
    let kept = bed
        .post(&format!("/sandboxes/{id}/snapshots"), Value::Null)
        .await
        .is(201);
    assert_eq!(bed.node.snapshots().len(), 2);
    assert_eq!(bed.gateway.remove_leftovers(Duration::ZERO).await.unwrap(), 0);
    bed.node.refuse("remove-snapshot", None);
    // It may be in use yet.
    assert_eq!(bed.gateway.remove_leftovers(Duration::from_secs(60)).await.unwrap(), 0);
    assert_eq!(bed.gateway.remove_leftovers(Duration::ZERO).await.unwrap(), 1);
    assert_eq!(bed.node.snapshots(), [kept["snapshotID"].as_str().unwrap()]);
}

#[tokio::test]
async fn a_fork_makes_copies_and_leaves_no_snapshot() {
    let bed = Bed::new();
    let id = bed
        .make(json!({"metadata": {"a": "b"}, "timeout": 500, "autoPause": true}))
        .await;
    let path = format!("/sandboxes/{id}/fork");
    let made = bed.post(&path, json!({"count": 3, "timeout": 40})).await.is(201);
    let made = made.as_array().unwrap();
    assert_eq!(made.len(), 3);
    for one in made {
        let its = one["sandbox"]["sandboxID"].as_str().unwrap();
        assert!(its != id && one.get("error").is_none());
        assert_ne!(one["sandbox"]["envdAccessToken"], Value::Null);
        assert_eq!(bed.left(its), 40);
        let told = bed.get(&format!("/sandboxes/{its}")).await.is(200);
        assert_eq!(
            (&told["metadata"], &told["lifecycle"]["onTimeout"]),
            (&json!({"a": "b"}), &json!("pause"))
        );
    }
    assert_eq!((bed.left(&id), bed.node.asked("snapshot")), (500, 1));
    assert_eq!(bed.node.snapshots(), Vec::<String>::new());
    bed.node.refuse("clone", Some(ErrorKind::Host));
    let failed = bed.post(&path, Value::Null).await.is(201);
    assert_eq!(
        (&failed[0]["error"]["code"], failed[0].get("sandbox")),
        (&json!(503), None)
    );
    assert_eq!(bed.node.snapshots(), Vec::<String>::new());
    for count in [0, 101] {
        bed.post(&path, json!({"count": count})).await.is(400);
    }
    bed.post(&format!("/sandboxes/{id}/pause"), Value::Null).await.is(204);
    bed.post(&path, Value::Null).await.is(409);
}
