//! Cases of the daemon: sandboxes that live by themselves, and daemons that die, come back and are replaced.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::cases::kill;
use crate::world::{World, text, wait_for};

/// A detached sandbox; its id.
pub(crate) fn detached(world: &World, name: &str, script: &str) -> String {
    let output = world.verb(&[
        "run", "-d", "--disk", "0", "--name", name, "tiny", "--", "sh", "-c", script,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

/// Asks until the sandbox is there in this state.
pub(crate) fn wait_for_state(world: &World, name: &str, state: &str) {
    wait_for(state, || {
        let output = world.verb(&["--json", "inspect", name]);
        let sandboxes: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        (sandboxes[0]["state"] == state).then_some(())
    });
}

pub(crate) fn a_detached_one_has_logs_commands_and_an_end() {
    let world = World::new("");
    let id = detached(
        &world,
        "web",
        "trap 'echo bye; exit 4' TERM; echo hello; while :; do sleep 0.02; done",
    );
    wait_for("its first words", || {
        (world.verb(&["logs", "web"]).stdout == b"hello\n").then_some(())
    });
    let listed = text(&world.verb(&["ps"]).stdout);
    assert!(
        listed.contains(&id) && listed.contains("web") && listed.contains("running"),
        "{listed}"
    );
    let output = world.verb(&["exec", &id[..4], "--", "sh", "-c", "echo $A; exit 6"]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(6), "1\n".into()));
    assert_eq!(world.verb(&["exec", "web", "/no/such"]).status.code(), Some(127));
    let again = world.verb(&["run", "-d", "--name", "web", "tiny"]);
    assert!(
        text(&again.stderr).contains("`web` is taken"),
        "{}",
        text(&again.stderr)
    );
    let stopped = world.verb(&["stop", "--time", "90s", "web"]);
    assert_eq!(stopped.status.code(), Some(0), "{}", text(&stopped.stderr));
    assert_eq!(text(&world.verb(&["logs", "web"]).stdout), "hello\nbye\n");
    assert_eq!(text(&world.verb(&["logs", "-n", "1", "web"]).stdout), "bye\n");
    assert_eq!(text(&world.verb(&["wait", "web"]).stdout), "4\n");
    let refused = world.verb(&["exec", "web", "true"]);
    assert_eq!(refused.status.code(), Some(125));
    assert!(
        text(&refused.stderr).contains("web is exited: start it again"),
        "{}",
        text(&refused.stderr)
    );
    assert_eq!(world.verb(&["start", "web"]).status.code(), Some(0));
    wait_for_state(&world, "web", "running");
    let refused = world.verb(&["rm", "web"]);
    assert!(
        text(&refused.stderr).contains("web is running: stop it first"),
        "{}",
        text(&refused.stderr)
    );
    assert_eq!(world.verb(&["rm", "-f", "web"]).status.code(), Some(0));
    assert!(world.verb(&["ps", "-aq"]).stdout.is_empty());
    let unknown = world.verb(&["rm", "-f", "web"]);
    assert!(
        text(&unknown.stderr).contains("there is no sandbox `web`"),
        "{}",
        text(&unknown.stderr)
    );
}

pub(crate) fn the_log_of_one_that_floods_has_an_end() {
    let world = World::new("");
    detached(&world, "flood", "exec yes flood");
    wait_for("a flood", || {
        let output = world.verb(&["logs", "flood"]).stdout;
        let expected = b"flood\n".iter().cycle();
        assert!(output.iter().zip(expected).all(|(one, other)| one == other));
        (output.len() > 100_000).then_some(())
    });
    let tail = world.verb(&["logs", "--tail", "3", "flood"]).stdout;
    // The agent may have read one of them in two pieces.
    assert!((8..=18).contains(&tail.len()), "{}", text(&tail));
    assert_eq!(world.verb(&["rm", "-f", "flood"]).status.code(), Some(0));
}

pub(crate) fn a_log_is_followed_until_its_sandbox_ends() {
    let world = World::new("");
    let script = "trap 'echo two' USR1; trap 'echo three; exit 0' TERM; echo one; while :; do sleep 0.02; done";
    detached(&world, "web", script);
    wait_for("its first words", || {
        (world.verb(&["logs", "web"]).stdout == b"one\n").then_some(())
    });
    let mut command = world.command(&["logs", "-f", "web"]);
    let mut following = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let mut next = || lines.next().map(Result::unwrap);
    assert_eq!(next().as_deref(), Some("one"));
    // While it runs, and not only when it has ended.
    assert_eq!(world.verb(&["kill", "-s", "USR1", "web"]).status.code(), Some(0));
    assert_eq!(next().as_deref(), Some("two"));
    assert!(following.try_wait().unwrap().is_none(), "it does not follow any more");
    assert_eq!(world.verb(&["stop", "--time", "90s", "web"]).status.code(), Some(0));
    assert_eq!((next().as_deref(), next()), (Some("three"), None));
    assert_eq!(following.wait().unwrap().code(), Some(0));
}

pub(crate) fn a_vmm_that_is_busy_holds_up_no_statistics() {
    let world = World::new("");
    detached(&world, "web", "sleep 1000");
    let vmm = rustix::process::Pid::from_raw(i32::try_from(world.vmm()).unwrap()).unwrap();
    rustix::process::kill_process(vmm, rustix::process::Signal::STOP).unwrap();
    // As a snapshot does, this waits for the VMM's answer, for 10 s.
    let mut pausing = world.command(&["pause", "web"]).spawn().unwrap();
    for _ in 0..3 {
        let begun = std::time::Instant::now();
        let samples = crate::world::json(&world, &["stats", "--no-stream", "web"]);
        assert_eq!(samples[0]["usage"]["vmm_busy"], true, "{samples}");
        assert!(
            begun.elapsed() < std::time::Duration::from_secs(9),
            "{:?}",
            begun.elapsed()
        );
    }
    let shown = text(&world.verb(&["stats", "--no-stream", "web"]).stdout);
    let row: Vec<&str> = shown.lines().nth(1).unwrap().split_whitespace().collect();
    // Four of them, and the share of a processor, which needs two looks.
    assert!(row.iter().filter(|&&word| word == "-").count() >= 5, "{shown}");
    rustix::process::kill_process(vmm, rustix::process::Signal::CONT).unwrap();
    pausing.wait().unwrap();
}

pub(crate) fn sockets_that_somebody_deletes_are_made_again() {
    let world = World::new("");
    assert_eq!(world.verb(&["ps"]).status.code(), Some(0));
    let daemon = world.daemon();
    for _ in 0..2 {
        let sockets = [node_api::SOCKET, node_api::METRICS_SOCKET].map(|name| world.path("state").join(name));
        for socket in &sockets {
            std::fs::remove_file(socket).unwrap();
        }
        for socket in &sockets {
            wait_for("the socket", || socket.exists().then_some(()));
        }
        assert!(text(&world.verb(&["daemon"]).stdout).contains(" runs; "));
        assert!(text(&world.verb(&["daemon", "metrics"]).stdout).contains("basalt_"));
        assert_eq!(world.daemon(), daemon);
    }
    std::fs::remove_file(world.path("state").join(node_api::SOCKET)).unwrap();
    // Whoever asks just now is answered once it is there.
    assert_eq!(world.verb(&["ps"]).status.code(), Some(0));
    assert_eq!(world.daemon(), daemon);
}

pub(crate) fn a_killed_daemon_is_followed_by_one_that_knows_everything() {
    let world = World::new("");
    let id = detached(&world, "on", "while :; do sleep 0.02; done");
    let go = world.path("go");
    let script = format!("until [ -e {} ]; do sleep 0.02; done; exit 9", go.display());
    detached(&world, "over", &script);
    detached(&world, "dead", "exec sleep 1000");
    let victim = world.vmm();
    kill(world.daemon().unwrap());
    world.wait_for_no_daemon();
    // One of the VMMs dies meanwhile, and one sandbox ends.
    kill(victim);
    std::fs::write(go, "").unwrap();
    wait_for("two VMMs to be gone", || (world.vmms().len() == 1).then_some(()));
    let states: Vec<(String, String)> = {
        let output = world.verb(&["--json", "ps", "-a"]);
        let sandboxes: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let field = |sandbox: &serde_json::Value, name: &str| sandbox[name].as_str().unwrap().to_owned();
        let all = sandboxes.as_array().unwrap().iter();
        all.map(|sandbox| (field(sandbox, "name"), field(sandbox, "state")))
            .collect()
    };
    let running = states.iter().filter(|(_, state)| state == "running").count();
    assert_eq!((states.len(), running), (3, 1), "{states:?}");
    assert_eq!(text(&world.verb(&["wait", "over"]).stdout), "9\n");
    for (name, state) in &states {
        let code = world.verb(&["exec", name, "true"]).status.code();
        assert_eq!(
            code,
            Some(if state == "running" { 0 } else { 125 }),
            "{name} is {state}"
        );
        assert_eq!(world.verb(&["rm", "-f", name]).status.code(), Some(0));
    }
    assert!(!world.path("state/sandboxes").join(id).exists());
    assert_eq!(std::fs::read_dir(world.path("state/run")).unwrap().count(), 0);
}

pub(crate) fn a_hundred_come_and_go_four_at_a_time() {
    let world = World::new("");
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let world = &world;
            scope.spawn(move || {
                for number in (worker..100).step_by(4) {
                    let output = world.run(&["tiny", "--", "sh", "-c", &format!("echo {number}")]);
                    let (code, stdout) = (output.status.code(), text(&output.stdout));
                    assert_eq!(
                        (code, stdout),
                        (Some(0), format!("{number}\n")),
                        "{}",
                        text(&output.stderr)
                    );
                }
            });
        }
    });
    assert!(world.verb(&["ps", "-aq"]).stdout.is_empty());
    for directory in ["state/sandboxes", "state/run"] {
        assert_eq!(
            std::fs::read_dir(world.path(directory)).unwrap().count(),
            0,
            "{directory}"
        );
    }
}

pub(crate) fn a_lost_database_is_made_again_from_what_runs() {
    let world = World::new("");
    let id = detached(&world, "on", "while :; do sleep 0.02; done");
    kill(world.daemon().unwrap());
    world.wait_for_no_daemon();
    std::fs::write(
        world.path("state/node.db"),
        "this is no database, whatever its name says".repeat(200),
    )
    .unwrap();
    // With its log it would be whole again.
    std::fs::remove_file(world.path("state/node.db-wal")).unwrap();
    let output = world.verb(&["exec", "on", "true"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let listed = text(&world.verb(&["ps"]).stdout);
    assert!(listed.contains(&id), "{listed}");
    let kept = std::fs::read_dir(world.path("state")).unwrap().flatten();
    let damaged = kept.filter(|entry| entry.file_name().to_string_lossy().contains("node.db.damaged"));
    let databases = damaged.filter(|entry| !entry.file_name().to_string_lossy().ends_with("-shm"));
    assert_eq!(databases.count(), 1, "the damaged one is kept");
}

pub(crate) fn only_one_daemon_has_a_state_directory() {
    let world = World::new("");
    detached(&world, "on", "sleep 1000");
    let mut second = std::process::Command::new(world.path("basaltd"));
    second
        .arg("--state")
        .arg(world.path("state"))
        .arg("--assets")
        .arg(world.path("basalt-assets"));
    let output = second.args(["--kvm", "/dev/null"]).output().unwrap();
    assert!(
        text(&output.stderr).contains("another basaltd runs on"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(world.verb(&["exec", "on", "true"]).status.code(), Some(0));
}

pub(crate) fn a_new_program_takes_over_from_the_old_daemon() {
    let world = World::new("");
    let file = world.path("basaltd");
    // A file of its own, which can be replaced.
    std::fs::remove_file(&file).unwrap();
    std::fs::copy(std::env::current_exe().unwrap(), &file).unwrap();
    detached(&world, "on", "sleep 1000");
    let old = world.daemon().unwrap();
    std::fs::rename(&file, world.path("old")).unwrap();
    std::fs::copy(std::env::current_exe().unwrap(), &file).unwrap();
    let output = world.verb(&["exec", "on", "true"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let new = world.daemon().unwrap();
    assert_ne!(old, new);
    assert_eq!(world.verb(&["rm", "-f", "on"]).status.code(), Some(0));
}

pub(crate) fn all_are_ended_at_once_and_each_in_order() {
    let world = World::new("");
    // Each ends when all have been told to.
    let [one, two, three] = ["one", "two", "three"].map(|name| world.path(name).display().to_string());
    let all = format!("until [ -e {one} -a -e {two} -a -e {three} ]; do sleep 0.05; done");
    for (name, file) in [("one", &one), ("two", &two), ("three", &three)] {
        let script = format!("trap '>{file}; {all}; echo bye; exit 4' TERM; echo ready; while :; do sleep 0.05; done");
        detached(&world, name, &script);
        wait_for("a sandbox to be ready", || {
            (world.verb(&["logs", name]).stdout == b"ready\n").then_some(())
        });
    }
    assert_eq!(world.verb(&["daemon", "--stop"]).status.code(), Some(0));
    let mut end = std::process::Command::new(world.path("basaltd"));
    end.arg("--state").arg(world.path("state"));
    end.arg("--assets").arg(world.path("basalt-assets"));
    let output = end.args(["--kvm", "/dev/null", crate::daemon::END]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    for name in ["one", "two", "three"] {
        assert_eq!(
            world.verb(&["wait", name]).stdout,
            b"4\n",
            "{name} did not end in order"
        );
        assert_eq!(world.verb(&["logs", name]).stdout, b"ready\nbye\n");
    }
    assert_eq!(world.verb(&["start", "one"]).status.code(), Some(0));
}

pub(crate) fn a_daemon_that_ends_just_now_is_followed_by_another() {
    let world = World::new("");
    let state = world.path("state");
    std::fs::create_dir_all(&state).unwrap();
    // What one is whose process ends: its socket takes connections, which end at once, and is there no more afterwards.
    let flags = SocketFlags::CLOEXEC;
    let dying = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let address = SocketAddrUnix::new(state.join(node_api::SOCKET)).unwrap();
    rustix::net::bind(&dying, &address).unwrap();
    rustix::net::listen(&dying, 8).unwrap();
    let asked = std::thread::spawn(move || {
        for _ in 0..3 {
            drop(rustix::net::accept_with(&dying, SocketFlags::CLOEXEC).unwrap());
        }
    });
    let listed = world.verb(&["ps"]);
    assert_eq!(listed.status.code(), Some(0), "{}", text(&listed.stderr));
    asked.join().unwrap();
    assert!(world.daemon().is_some());
}
