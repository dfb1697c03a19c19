//! Processes, as the SDKs ask for them, in the real agent.

mod common;

use std::time::Duration;

use common::{call_with, coded, envelope, fails, ok, request, sandbox, stream, whole};
use envd::Sandbox;
use serde_json::{Value, json};

const START: &str = "process.Process/Start";
const CONNECT: &str = "process.Process/Connect";
const LIST: &str = "process.Process/List";
const SEND_INPUT: &str = "process.Process/SendInput";
const CLOSE_STDIN: &str = "process.Process/CloseStdin";
const SEND_SIGNAL: &str = "process.Process/SendSignal";
const UPDATE: &str = "process.Process/Update";

fn sh(script: &str) -> Value {
    json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false})
}

async fn run(sandbox: &Sandbox, start: Value) -> common::Ended {
    stream(sandbox, START, &[], start).await.ended().await
}

async fn error(sandbox: &Sandbox, headers: &[(&str, &str)], start: Value) -> (String, String) {
    let end = stream(sandbox, START, headers, start).await.end().await;
    let text = |name: &str| end["error"][name].as_str().unwrap().to_owned();
    (text("code"), text("message"))
}

async fn kill(sandbox: &Sandbox, pid: u64) {
    let kill = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
    ok(sandbox, SEND_SIGNAL, kill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_writes_and_ends() {
    let sandbox = sandbox();
    let ended = run(&sandbox, sh("echo out; echo err >&2")).await;
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("out\n", "err\n"));
    assert!(ended.pid > 1);
    assert_eq!(ended.end, json!({"exited": true, "status": "exit status 0"}));

    let ended = run(&sandbox, sh("exit 3")).await;
    let expected = json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"});
    assert_eq!(ended.end, expected);

    let ended = run(&sandbox, sh("kill -9 $$")).await;
    assert_eq!(
        ended.end,
        json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn much_output_comes_whole() {
    let ended = run(&sandbox(), sh("head -c 3000000 /dev/zero | tr '\\0' x")).await;
    assert_eq!(ended.stdout.len(), 3_000_000);
    assert!(ended.stdout.bytes().all(|byte| byte == b'x'));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_has_the_sandboxs_environment_and_its_own() {
    let start = json!({
        "process": {"cmd": "sh", "args": ["-c", "echo $FROM $OWN $HOME $USER $LOGNAME; pwd"], "envs": {"OWN": "own"}},
        "stdin": false,
    });
    let ended = run(&sandbox(), start).await;
    // Nobody says where: in the home of the default user, who is root.
    assert_eq!(ended.stdout, "sandbox own /root root root\n/root\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_begins_where_it_is_asked_to() {
    let sandbox = sandbox();
    let directory = tempfile::Builder::new().prefix("envd-").tempdir_in("/root").unwrap();
    let name = directory.path().file_name().unwrap().to_str().unwrap();
    for cwd in [directory.path().to_str().unwrap(), name, &format!("~/{name}")] {
        let start = json!({"process": {"cmd": "/bin/pwd", "cwd": cwd}, "stdin": false});
        let ended = run(&sandbox, start).await;
        assert_eq!(ended.stdout.trim_end(), directory.path().to_str().unwrap(), "{cwd}");
    }
    for cwd in ["/no/such/directory", "no-such-directory", "/etc/passwd"] {
        let start = json!({"process": {"cmd": "/bin/pwd", "cwd": cwd}});
        assert_eq!(error(&sandbox, &[], start).await.0, "invalid_argument", "{cwd}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_start_says_why() {
    let sandbox = sandbox();
    let (code, message) = error(&sandbox, &[], json!({"process": {"cmd": "no-such-program"}})).await;
    assert_eq!(code, "not_found");
    assert!(message.contains("no-such-program"), "{message}");
    let (code, _) = error(&sandbox, &[], json!({"process": {"cmd": "/etc/passwd"}})).await;
    assert_eq!(code, "invalid_argument");
    assert_eq!(error(&sandbox, &[], json!({})).await.0, "invalid_argument");
    // `no-such-user:`
    let nobody = [("authorization", "Basic bm8tc3VjaC11c2VyOg==")];
    assert_eq!(error(&sandbox, &nobody, sh("true")).await.0, "unauthenticated");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_runs_as_who_is_asked_for() {
    // `nobody:`
    let user = [("authorization", "Basic bm9ib2R5Og==")];
    let start = sh("id -un; echo $USER $LOGNAME");
    let ended = stream(&sandbox(), START, &user, start).await.ended().await;
    assert_eq!(ended.stdout, "nobody\nnobody nobody\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn input_goes_to_a_process_that_has_it() {
    let sandbox = sandbox();
    let start = json!({"process": {"cmd": "/bin/cat"}, "stdin": true});
    let mut cat = stream(&sandbox, START, &[], start).await;
    let pid = cat.pid().await;
    for text in ["one\n", "two\n"] {
        let input = json!({"process": {"pid": pid}, "input": {"stdin": coded(text)}});
        ok(&sandbox, SEND_INPUT, input).await;
        let message = cat.message().await;
        assert_eq!(common::decoded(&message["event"]["data"]["stdout"]), text);
    }
    let pty = json!({"process": {"pid": pid}, "input": {"pty": coded("x")}});
    assert_eq!(fails(&sandbox, SEND_INPUT, pty).await.0, "failed_precondition");
    ok(&sandbox, CLOSE_STDIN, json!({"process": {"pid": pid}})).await;
    let message = cat.message().await;
    assert_eq!(message["event"]["end"]["status"], "exit status 0");
    assert_eq!(cat.end().await, json!({}));
    let input = json!({"process": {"pid": pid}, "input": {"stdin": coded("x")}});
    assert_eq!(fails(&sandbox, SEND_INPUT, input).await.0, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn more_input_than_fits_waits_for_the_process() {
    let sandbox = sandbox();
    let start = json!({"process": {"cmd": "/bin/sh", "args": ["-c", "sleep 0.2; wc -c"]}, "stdin": true});
    let mut count = stream(&sandbox, START, &[], start).await;
    let pid = count.pid().await;
    let part = "x".repeat(100_000);
    let mut body = envelope(&json!({"start": {"process": {"pid": pid}}}));
    body.extend(envelope(&json!({"keepalive": {}})));
    for _ in 0..10 {
        body.extend(envelope(&json!({"data": {"input": {"stdin": coded(&part)}}})));
    }
    let headers = [("content-type", "application/connect+json")];
    let sent = sandbox
        .handle(request("POST", "/process.Process/StreamInput", &headers, body))
        .await;
    let (status, _, bytes) = whole(sent).await;
    assert_eq!((status, &bytes[..]), (200, &b"\0\0\0\0\x02{}\x02\0\0\0\x02{}"[..]));
    ok(&sandbox, CLOSE_STDIN, json!({"process": {"pid": pid}})).await;
    let message = count.message().await;
    assert_eq!(common::decoded(&message["event"]["data"]["stdout"]).trim(), "1000000");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_without_input_says_so() {
    let sandbox = sandbox();
    let mut process = stream(&sandbox, START, &[], sh("sleep 1000")).await;
    let pid = process.pid().await;
    let input = json!({"process": {"pid": pid}, "input": {"stdin": coded("x")}});
    assert_eq!(fails(&sandbox, SEND_INPUT, input).await.0, "failed_precondition");
    kill(&sandbox, pid).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_listed_found_again_and_killed() {
    let sandbox = sandbox();
    let tag = format!("tag-{}", std::process::id());
    let start = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "cat; echo done"], "envs": {"A": "b"}, "cwd": "/tmp"},
        "tag": tag,
    });
    let mut first = stream(&sandbox, START, &[], start.clone()).await;
    let pid = first.pid().await;
    // Whoever started it leaves.
    drop(first);

    let listed = ok(&sandbox, LIST, json!({})).await;
    let found = listed["processes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|process| process["pid"] == pid);
    assert_eq!(
        found.unwrap(),
        &json!({"config": start["process"], "pid": pid, "tag": tag})
    );

    let mut second = stream(&sandbox, CONNECT, &[], json!({"process": {"tag": tag}})).await;
    assert_eq!(second.pid().await, pid);
    let mut third = stream(&sandbox, CONNECT, &[], json!({"process": {"pid": pid}})).await;
    assert_eq!(third.pid().await, pid);
    let input = json!({"process": {"tag": tag}, "input": {"stdin": coded("hi\n")}});
    ok(&sandbox, SEND_INPUT, input).await;
    for reader in [&mut second, &mut third] {
        let message = reader.message().await;
        assert_eq!(common::decoded(&message["event"]["data"]["stdout"]), "hi\n");
    }
    kill(&sandbox, pid).await;
    for mut reader in [second, third] {
        assert_eq!(reader.message().await["event"]["end"]["status"], "signal: killed");
        assert_eq!(reader.end().await, json!({}));
    }
    let listed = ok(&sandbox, LIST, json!({})).await;
    assert!(!listed.to_string().contains(&tag), "{listed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_not_found() {
    let sandbox = sandbox();
    for which in [json!({"pid": 4_000_000}), json!({"tag": "no such tag"})] {
        for (method, message) in [
            (SEND_INPUT, json!({"process": which, "input": {"stdin": ""}})),
            (SEND_SIGNAL, json!({"process": which, "signal": 9})),
            (CLOSE_STDIN, json!({"process": which})),
            (UPDATE, json!({"process": which})),
        ] {
            assert_eq!(fails(&sandbox, method, message).await.0, "not_found", "{method}");
        }
        let end = stream(&sandbox, CONNECT, &[], json!({"process": which}))
            .await
            .end()
            .await;
        assert_eq!(end["error"]["code"], "not_found");
    }
    assert_eq!(fails(&sandbox, CLOSE_STDIN, json!({})).await.0, "invalid_argument");
    assert_eq!(
        fails(&sandbox, "process.Process/Fly", json!({})).await.0,
        "unimplemented"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_is_one() {
    let sandbox = sandbox();
    let start = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "tty; stty size; read line; stty size; echo got $line"]},
        "pty": {"size": {"cols": 100, "rows": 30}},
    });
    let mut terminal = stream(&sandbox, START, &[], start).await;
    let pid = terminal.pid().await;
    let mut shown = String::new();
    while !shown.contains("30 100") {
        let message = terminal.message().await;
        shown.push_str(&common::decoded(&message["event"]["data"]["pty"]));
    }
    assert!(shown.starts_with("/dev/pts/"), "{shown}");
    let size = json!({"process": {"pid": pid}, "pty": {"size": {"cols": 50, "rows": 10}}});
    ok(&sandbox, UPDATE, size).await;
    let stdin = json!({"process": {"pid": pid}, "input": {"stdin": coded("x")}});
    assert_eq!(fails(&sandbox, SEND_INPUT, stdin).await.0, "failed_precondition");
    assert_eq!(
        fails(&sandbox, CLOSE_STDIN, json!({"process": {"pid": pid}})).await.0,
        "failed_precondition"
    );
    let keys = json!({"process": {"pid": pid}, "input": {"pty": coded("hi\n")}});
    ok(&sandbox, SEND_INPUT, keys).await;
    while !shown.contains("got hi") {
        let message = terminal.message().await;
        shown.push_str(&common::decoded(&message["event"]["data"]["pty"]));
    }
    assert!(shown.contains("10 50"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_of_a_start_ends_the_process_and_that_of_a_connect_only_its_stream() {
    let sandbox = sandbox();
    let limit = [("connect-timeout-ms", "1000")];
    let mut process = stream(&sandbox, START, &limit, sh("sleep 1000")).await;
    let pid = process.pid().await;
    assert_eq!(process.end().await["error"]["code"], "deadline_exceeded");
    until_gone(&sandbox, pid).await;

    // A client that leaves earlier takes nothing of it back.
    let mut process = stream(&sandbox, START, &limit, sh("sleep 1000")).await;
    let pid = process.pid().await;
    drop(process);
    assert!(is_listed(&sandbox, pid).await);
    until_gone(&sandbox, pid).await;

    let mut process = stream(&sandbox, START, &[], sh("sleep 1000")).await;
    let pid = process.pid().await;
    let chosen = json!({"process": {"pid": pid}});
    let mut other = stream(&sandbox, CONNECT, &[("connect-timeout-ms", "300")], chosen).await;
    assert_eq!(other.pid().await, pid);
    assert_eq!(other.end().await["error"]["code"], "deadline_exceeded");
    assert!(is_listed(&sandbox, pid).await);
    kill(&sandbox, pid).await;
}

async fn is_listed(sandbox: &Sandbox, pid: u64) -> bool {
    let listed = ok(sandbox, LIST, json!({})).await;
    // Of an empty list nothing is said.
    let mut processes = listed["processes"].as_array().into_iter().flatten();
    processes.any(|process| process["pid"] == pid)
}

async fn until_gone(sandbox: &Sandbox, pid: u64) {
    let gone = async {
        while is_listed(sandbox, pid).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_process_is_known_to_run() {
    let sandbox = sandbox();
    let interval = [("keepalive-ping-interval", "1")];
    let mut process = stream(&sandbox, START, &interval, sh("sleep 1000")).await;
    let pid = process.pid().await;
    let begun = tokio::time::Instant::now();
    assert_eq!(process.message().await, json!({"event": {"keepalive": {}}}));
    assert!(begun.elapsed() >= Duration::from_millis(900));
    kill(&sandbox, pid).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_that_cannot_be_is_refused_before_all_else() {
    let headers = [("authorization", "Basic !")];
    let (status, answer) = call_with(&sandbox(), LIST, &headers, json!({})).await;
    assert_eq!((status, &answer["code"]), (401, &json!("unauthenticated")));
}
