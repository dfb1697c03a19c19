//! What sandboxes use and have used, what they have written, and what their start was made of.

use serde_json::{Value, json};

use crate::support::Bed;

#[tokio::test]
async fn metrics_and_logs_are_those_of_the_host() {
    let bed = Bed::new();
    let (runs, sleeps) = (bed.make(Value::Null).await, bed.make(Value::Null).await);
    bed.post(&format!("/sandboxes/{sleeps}/pause"), Value::Null)
        .await
        .is(204);
    let one = bed.get(&format!("/sandboxes/{runs}/metrics")).await.is(200);
    assert_eq!(one.as_array().unwrap().len(), 1);
    for (field, value) in [
        ("cpuCount", 2_u64),
        ("memUsed", 64 << 20),
        ("memTotal", 512 << 20),
        ("diskUsed", 8 << 20),
        ("memCache", 0),
    ] {
        assert_eq!(one[0][field], json!(value), "{field}");
    }
    assert!(one[0]["cpuUsedPct"].as_f64().unwrap() >= 0.0 && one[0]["timestampUnix"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(
        bed.get(&format!("/sandboxes/{sleeps}/metrics")).await.is(200),
        json!([])
    );
    assert_eq!(
        bed.get(&format!("/sandboxes/{runs}/metrics?end=5")).await.is(200),
        json!([])
    );
    bed.get(&format!("/sandboxes/{runs}/metrics?start=9&end=5"))
        .await
        .is(400);
    let both = bed
        .get(&format!("/sandboxes/metrics?sandbox_ids={runs},{sleeps}"))
        .await
        .is(200);
    let ids: Vec<&String> = both["sandboxes"].as_object().unwrap().keys().collect();
    assert_eq!(ids, [&runs]);
    bed.get("/sandboxes/metrics?sandbox_ids=").await.is(400);
    let logs = bed.get(&format!("/sandboxes/{runs}/logs")).await.is(200);
    assert_eq!(logs["logs"][0]["timestamp"], json!("2025-11-21T07:38:47.000Z"));
    // The line itself is JSON for E2B's command line.
    let line: serde_json::Value = serde_json::from_str(logs["logs"][0]["line"].as_str().unwrap()).unwrap();
    let expected = json!({"level": "info", "logger": "command", "message": "hello", "stream": "stdout"});
    assert_eq!(line, expected);
    assert_eq!(logs["logEntries"][0]["message"], json!("hello"));
    assert_eq!(logs["logEntries"][1]["level"], json!("error"));
    let logs = bed
        .get(&format!("/v2/sandboxes/{runs}/logs?direction=backward&limit=1"))
        .await
        .is(200);
    assert_eq!(logs["logs"][0]["message"], json!("oops"));
    assert_eq!(logs["logs"][0]["fields"], json!({"stream": "stderr"}));
}

#[tokio::test]
async fn a_log_may_have_anything_in_it() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    bed.node
        .set_log(b"1763710727.500000000 o F <img src=x onerror=alert(1)>\n");
    let logs = bed.get(&format!("/v2/sandboxes/{id}/logs")).await.is(200);
    assert_eq!(logs["logs"][0]["message"], json!("<img src=x onerror=alert(1)>"));
}

#[tokio::test]
async fn a_history_is_kept_as_long_as_its_sandbox_is_there() {
    let bed = Bed::new();
    let (first, second) = (bed.make(Value::Null).await, bed.make(Value::Null).await);
    gateway::sample(&bed.gateway).await.unwrap();
    assert_eq!(bed.node.asked("usage"), 1);
    let series = async |id: &str, query: &str| {
        let all = bed.get(&format!("/sandboxes/{id}/metrics{query}")).await.is(200);
        all.as_array().unwrap().clone()
    };
    // Nobody is asked again for what is known.
    let one = series(&first, "").await;
    assert_eq!((one.len(), &one[0]["memUsed"]), (1, &json!(64 << 20)));
    let newest = bed
        .get(&format!("/sandboxes/metrics?sandbox_ids={first},{second}"))
        .await;
    assert_eq!(newest.is(200)["sandboxes"][&second]["diskUsed"], json!(8 << 20));
    assert_eq!((bed.node.asked("usage"), bed.node.asked("stats")), (1, 0));
    let now = one[0]["timestampUnix"].as_u64().unwrap();
    assert_eq!(series(&first, &format!("?start={now}&end={now}")).await.len(), 1);
    assert_eq!(
        series(&first, &format!("?start={}", now + 100)).await,
        Vec::<Value>::new()
    );
    // One that is paused has its history still; nothing is added to it.
    bed.post(&format!("/sandboxes/{first}/pause"), Value::Null)
        .await
        .is(204);
    gateway::sample(&bed.gateway).await.unwrap();
    assert_eq!(series(&first, "").await.len(), 1);
    let newest = bed.get(&format!("/sandboxes/metrics?sandbox_ids={first}")).await;
    assert_eq!(newest.is(200)["sandboxes"], json!({}));
    // A node that cannot be asked leaves what is known.
    bed.node.refuse("usage", Some(node_api::ErrorKind::Host));
    gateway::sample(&bed.gateway).await.unwrap_err();
    assert_eq!(series(&second, "").await.len(), 1);
}

#[tokio::test]
async fn one_that_is_not_in_the_history_yet_is_asked_for() {
    let bed = Bed::new();
    let first = bed.make(Value::Null).await;
    gateway::sample(&bed.gateway).await.unwrap();
    let second = bed.make(Value::Null).await;
    let both = bed
        .get(&format!("/sandboxes/metrics?sandbox_ids={first},{second}"))
        .await
        .is(200);
    assert_eq!(both["sandboxes"].as_object().unwrap().len(), 2);
    assert_eq!(bed.node.asked("usage"), 2);
}

#[tokio::test]
async fn a_start_is_told_by_its_parts() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let told = bed.get(&format!("/sandboxes/{id}/trace")).await.is(200);
    let spans = told["spans"].as_array().unwrap();
    assert_eq!(
        spans[0],
        json!({"name": "create and start", "service": "basaltd", "startUs": 0, "durationUs": 67_000, "depth": 0})
    );
    assert_eq!(spans[1]["name"], "directory and record");
    assert!(spans[1..].iter().all(|span| span["depth"] == 1), "{spans:?}");
    bed.get("/sandboxes/0123456789ab/trace").await.is(404);
}
