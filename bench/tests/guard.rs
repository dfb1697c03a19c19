//! A run that is killed leaves no process of its own: the guard beside it ends them.

use std::io::Write;
use std::process::{Child, Command, Stdio};

const RUN: &str = "BASALT_BENCH_RUN";

fn sleeper(run: &str) -> Child {
    Command::new("sleep").arg("1000").env(RUN, run).spawn().unwrap()
}

#[test]
fn the_guard_ends_what_a_killed_run_has_started_and_nothing_else() {
    let run = format!("test-{}", std::process::id());
    let other = format!("{run}-other");
    let (mut own, mut others) = (sleeper(&run), sleeper(&other));
    let mut guard = Command::new(env!("CARGO_BIN_EXE_basalt-bench"))
        .args(["guard", &run])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(
        own.try_wait().unwrap().is_none() && guard.try_wait().unwrap().is_none(),
        "the run goes on"
    );
    let scratch = std::env::temp_dir().join(format!("bench-guard-{}", std::process::id()));
    std::fs::create_dir_all(scratch.join("root")).unwrap();
    // As when the run is killed.
    let mut pipe = guard.stdin.take().unwrap();
    writeln!(pipe, "+\tscratch\t{}", scratch.display()).unwrap();
    drop(pipe);
    assert!(!own.wait().unwrap().success());
    assert!(guard.wait().unwrap().success());
    assert!(!scratch.exists(), "its directory");
    assert!(others.try_wait().unwrap().is_none(), "another run's");
    others.kill().unwrap();
    others.wait().unwrap();
}
