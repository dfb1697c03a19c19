//! Freeze and Re-identify without a VM: what a snapshot's commands do, what hooks may, and what is refused. The machine's own
//! steps are stand-ins here; each test has its own hierarchy of cgroups.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use agent::{Cgroups, Clones, Error as AgentError, Reidentified, Server, ServerConfig};
use agent_api::{Connection, Error, Event, ExecRequest, Kept, Reidentify, Which};
use common::{connect_to, gone, reaper, sh, text};

const PATIENCE: Duration = Duration::from_secs(90);

/// The same for a hook that ends.
const HOOK_MS: u32 = 90_000;

/// A server whose machine can be cloned, and everything around it.
struct Machine {
    server: Server,
    /// A directory for hooks and for what commands write.
    dir: PathBuf,
    mount: PathBuf,
    shed: Arc<AtomicUsize>,
    settled: Arc<AtomicUsize>,
    fail: Arc<AtomicBool>,
    reidentifications: Arc<Mutex<Vec<Reidentify>>>,
    clock: Arc<AtomicU64>,
}

impl Machine {
    fn new(name: &str) -> Self {
        // Made by the way: the place where this machine has cgroups.
        drop(common::cgroups().expect("this machine needs cgroup2 for these tests"));
        let mount = common::corner().join(name);
        fs::create_dir(&mount).unwrap();
        let dir = std::env::temp_dir().join(format!("basalt-agent-{name}-{}", std::process::id()));
        fs::create_dir_all(dir.join("hooks")).unwrap();
        let (settled, fail) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let reidentifications = Arc::new(Mutex::new(Vec::new()));
        let (count, failing, kept) = (Arc::clone(&settled), Arc::clone(&fail), Arc::clone(&reidentifications));
        let shed = Arc::new(AtomicUsize::new(0));
        let sheds = Arc::clone(&shed);
        let clock = Arc::<AtomicU64>::default();
        let set = Arc::clone(&clock);
        let clones = Clones {
            shed: Box::new(move || {
                sheds.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }),
            settle: Box::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
                match failing.load(Ordering::SeqCst) {
                    true => Err(AgentError::Refused("the disk is broken".to_owned())),
                    false => Ok(()),
                }
            }),
            reidentify: Box::new(move |request| {
                kept.lock().unwrap().push(request.clone());
                Ok(Reidentified {
                    boot_id: "a-boot".to_owned(),
                    machine_id: request.identity.as_ref().map(|identity| identity.machine_id.clone()),
                })
            }),
            set_clock: Box::new(move |clock_ns| {
                set.store(clock_ns, Ordering::SeqCst);
                Ok(())
            }),
            hooks: dir.join("hooks"),
        };
        let config = ServerConfig {
            cgroups: Some(Cgroups::at(&mount).unwrap()),
            clones: Some(clones),
            ..ServerConfig::in_place()
        };
        Self {
            server: Server::new(config, reaper()),
            dir,
            mount,
            shed,
            settled,
            fail,
            reidentifications,
            clock,
        }
    }

    fn connect(&self) -> Connection<UnixStream> {
        connect_to(&self.server)
    }

    fn hook(&self, name: &str, script: &str) {
        common::write_program(&self.dir.join("hooks").join(name), &format!("#!/bin/sh\n{script}"));
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Starts something that counts in a file.
    fn count(&self, name: &str) -> (u32, Counter) {
        let path = self.file(name);
        let script = format!("while :; do echo >> {}; sleep 0.02; done", path.display());
        let pid = self.connect().exec_detached(&sh(&script)).unwrap();
        let counter = Counter(path);
        counter.goes_on();
        (pid, counter)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Everything ends, frozen or not, and then there is nothing left of the hierarchy.
        fs::write(self.mount.join("cgroup.kill"), "1").unwrap();
        let end = Instant::now() + PATIENCE;
        while self.mount.exists() && Instant::now() < end {
            sweep(&self.mount);
            thread::sleep(Duration::from_millis(20));
        }
        fs::remove_dir_all(&self.dir).unwrap();
    }
}

fn sweep(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            sweep(&entry.path());
        }
    }
    drop(fs::remove_dir(dir));
}

/// A file that grows while somebody counts.
struct Counter(PathBuf);

impl Counter {
    fn value(&self) -> u64 {
        fs::metadata(&self.0).map_or(0, |data| data.len())
    }

    fn goes_on(&self) {
        let (before, end) = (self.value(), Instant::now() + PATIENCE);
        while self.value() < before + 3 {
            assert!(Instant::now() < end, "it stands still at {before}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn stands_still(&self) {
        let before = self.value();
        thread::sleep(Duration::from_millis(300));
        assert_eq!(self.value(), before, "it goes on");
    }
}

fn reidentify(hook_ms: u32) -> Reidentify {
    Reidentify {
        clock_ns: 1,
        entropy: vec![1; 32],
        identity: Some(agent_api::Identity {
            hostname: "clone".to_owned(),
            machine_id: "00112233445566778899aabbccddeeff".to_owned(),
        }),
        hook_ms,
        thaw: true,
        ..Reidentify::default()
    }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Refused(message)) => message,
        other => panic!("{other:?} is no refusal"),
    }
}

#[test]
fn the_time_of_day_is_what_the_host_says() {
    let machine = Machine::new("clock");
    machine.connect().set_clock(1_763_710_727_000_000_042).unwrap();
    assert_eq!(machine.clock.load(Ordering::SeqCst), 1_763_710_727_000_000_042);
}

#[test]
fn commands_run_on_while_the_machine_settles() {
    let machine = Machine::new("settles");
    let (_, counter) = machine.count("counter");
    let mut connection = machine.connect();
    connection.settle().unwrap();
    assert_eq!(machine.shed.load(Ordering::SeqCst), 1);
    assert_eq!(machine.settled.load(Ordering::SeqCst), 0, "it was frozen");
    counter.goes_on();
    machine.connect().exec_detached(&sh("true")).unwrap();
    // Nobody settles for what stands still already, but it does no harm.
    connection.freeze().unwrap();
    connection.settle().unwrap();
    counter.stands_still();
}

#[test]
fn commands_stand_still_until_the_reidentification() {
    let machine = Machine::new("still");
    let (pid, counter) = machine.count("counter");
    // One that went elsewhere, and one within it that somebody froze.
    let (beside, counter_beside) = machine.count("beside");
    let inner = machine.mount.join("own/inner");
    fs::create_dir_all(&inner).unwrap();
    fs::write(machine.mount.join("own/cgroup.procs"), beside.to_string()).unwrap();
    // What it waits for was started there, too.
    counter_beside.goes_on();
    // And one beside it that somebody froze.
    let asleep = machine.mount.join("asleep");
    fs::create_dir(&asleep).unwrap();
    for path in [&inner, &asleep] {
        fs::write(path.join("cgroup.freeze"), "1").unwrap();
    }
    let mut connection = machine.connect();
    for round in 1..=2 {
        connection.freeze().unwrap();
        assert_eq!(machine.settled.load(Ordering::SeqCst), round);
        counter.stands_still();
        counter_beside.stands_still();
    }
    let mut other = machine.connect();
    for message in [
        refusal(other.exec(&sh("true")).map(drop)),
        refusal(other.exec_detached(&sh("true"))),
    ] {
        assert!(message.contains("is frozen for a snapshot"), "{message}");
    }
    let upload = agent_api::Upload {
        path: machine.file("upload").to_str().unwrap().into(),
        mode: 0o600,
        size: 1,
    };
    assert!(refusal(other.upload(&upload, &mut &b"x"[..])).contains("is frozen"));
    other.ping().unwrap();

    // Not asked to let them go on.
    let request = Reidentify {
        thaw: false,
        ..reidentify(0)
    };
    assert_eq!(other.reidentify(&request).unwrap(), "a-boot");
    counter.stands_still();
    assert_eq!(other.reidentify(&reidentify(0)).unwrap(), "a-boot");
    counter.goes_on();
    counter_beside.goes_on();
    for path in [inner, asleep] {
        let frozen = fs::read_to_string(path.join("cgroup.freeze")).unwrap();
        assert_eq!(frozen, "1\n", "{} was frozen before and goes on", path.display());
    }
    assert_eq!(*machine.reidentifications.lock().unwrap(), [request, reidentify(0)]);
    // Another round, and one without a freeze before.
    connection.freeze().unwrap();
    counter.stands_still();
    connection.reidentify(&reidentify(0)).unwrap();
    connection.reidentify(&reidentify(0)).unwrap();
    counter.goes_on();
    assert!(
        connection
            .exec(&sh("exit 3"))
            .unwrap()
            .collect()
            .unwrap()
            .status
            .exit_code()
            == 3
    );
    assert!(!gone(pid, Duration::ZERO));
}

#[test]
fn files_are_looked_at_and_not_changed_while_everything_stands_still() {
    let machine = Machine::new("files");
    let path = machine.file("file").to_str().unwrap().to_owned();
    fs::write(&path, "text").unwrap();
    let mut connection = machine.connect();
    connection.freeze().unwrap();
    assert_eq!(connection.fs_stat(None, path.as_str()).unwrap().size, 4);
    connection
        .fs_read(None, path.as_str(), 0, None)
        .unwrap()
        .finish()
        .unwrap();
    connection.fs_watch(None, "/", false).unwrap().end().unwrap();
    let metadata = std::collections::BTreeMap::new();
    for message in [
        refusal(connection.fs_remove(None, path.as_str())),
        refusal(connection.fs_rename(None, path.as_str(), "/tmp/x")),
        refusal(connection.fs_write(None, path.as_str(), None, metadata, &mut &b"x"[..])),
    ] {
        assert!(message.contains("is frozen for a snapshot"), "{message}");
    }
    connection.reidentify(&reidentify(0)).unwrap();
    connection.fs_remove(None, path.as_str()).unwrap();
}

#[test]
fn a_freeze_that_fails_is_undone() {
    let machine = Machine::new("undone");
    let (_, counter) = machine.count("counter");
    let mut connection = machine.connect();
    machine.fail.store(true, Ordering::SeqCst);
    assert!(refusal(connection.freeze()).contains("the disk is broken"));
    counter.goes_on();
    connection.exec(&sh("true")).unwrap().collect().unwrap();
    // Once it stands still, a second one that fails leaves it so.
    machine.fail.store(false, Ordering::SeqCst);
    connection.freeze().unwrap();
    machine.fail.store(true, Ordering::SeqCst);
    refusal(connection.freeze());
    counter.stands_still();
    assert!(refusal(connection.exec(&sh("true")).map(drop)).contains("is frozen"));
    connection.reidentify(&reidentify(0)).unwrap();
    counter.goes_on();
}

#[test]
fn hooks_run_in_order_while_everything_stands_still() {
    let machine = Machine::new("hooks");
    let (_, counter) = machine.count("counter");
    let out = machine.file("out");
    let say = |what: &str| format!("echo {what} >> {}", out.display());
    machine.hook("20-second", &say("second $BASALT_CLONE_ID $(id -u)"));
    machine.hook("10-first", &say(&format!("first $(wc -c < {})", counter.0.display())));
    machine.hook(".hidden", &say("hidden"));
    machine.hook("30-plain", &say("plain"));
    let plain = machine.dir.join("hooks/30-plain");
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
    // What it leaves running is a command like others, and stands still with them.
    let left = machine.file("left");
    let script = format!("(while :; do echo >> {}; sleep 0.02; done) &", left.display());
    machine.hook("40-leaves", &script);
    let mut connection = machine.connect();
    connection.freeze().unwrap();
    counter.stands_still();
    let count = counter.value();
    connection.reidentify(&reidentify(HOOK_MS)).unwrap();
    let expected = format!("first {count}\nsecond 00112233445566778899aabbccddeeff 0\n");
    assert_eq!(fs::read_to_string(&out).unwrap(), expected);
    counter.goes_on();
    let left = Counter(left);
    left.goes_on();
    connection.freeze().unwrap();
    left.stands_still();
    // None are asked for.
    connection.reidentify(&reidentify(0)).unwrap();
    assert_eq!(fs::read_to_string(&out).unwrap(), expected);
}

/// What asks for its environment as soon as it goes on, or as a hook, learns the new one.
#[test]
fn the_environment_is_told_before_anything_goes_on() {
    let machine = Machine::new("environment");
    let done = machine.file("done");
    machine.hook(
        "10-waits",
        &format!("until [ -e {} ]; do sleep 0.02; done", done.display()),
    );
    let mut connection = machine.connect();
    connection.freeze().unwrap();
    let request = Reidentify {
        environment: Some(agent_api::Environment(vec!["OF=the clone".into()])),
        ..reidentify(HOOK_MS)
    };
    let asks = thread::spawn(move || {
        let end = Instant::now() + PATIENCE;
        let mut reply = String::new();
        while !reply.contains("the clone") {
            assert!(Instant::now() < end, "{reply}");
            thread::sleep(Duration::from_millis(20));
            let Ok(mut stream) = std::net::TcpStream::connect("127.0.0.1:49983") else {
                continue;
            };
            reply.clear();
            stream.write_all(b"GET /envs HTTP/1.1\r\n\r\n").unwrap();
            stream.read_to_string(&mut reply).unwrap();
        }
        fs::write(done, "").unwrap();
        reply
    });
    connection.reidentify(&request).unwrap();
    assert!(asks.join().unwrap().ends_with(r#"{"OF":"the clone"}"#));
}

#[test]
fn a_hook_that_fails_or_hangs_is_named_and_nothing_goes_on() {
    let machine = Machine::new("failing");
    let (_, counter) = machine.count("counter");
    let mut connection = machine.connect();
    connection.freeze().unwrap();
    machine.hook("10-bad", "echo oops; exit 3");
    machine.hook("20-never", &format!("touch {}", machine.file("never").display()));
    let message = refusal(connection.reidentify(&reidentify(HOOK_MS)));
    assert!(
        message.contains("on the guest's console") && message.contains("10-bad ended with code 3"),
        "{message}"
    );
    assert!(
        !machine.file("never").exists(),
        "the hook after the one that failed has run"
    );
    counter.stands_still();

    let pid = machine.file("pid");
    machine.hook("10-bad", &format!("sleep 1000 & echo $! > {}; wait", pid.display()));
    let begun = Instant::now();
    // Time enough to write its file first.
    let message = refusal(connection.reidentify(&reidentify(10_000)));
    assert!(message.contains("10-bad did not end within 10s"), "{message}");
    assert!(
        begun.elapsed() < PATIENCE,
        "a limit of ten seconds took {:?}",
        begun.elapsed()
    );
    let pid = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    assert!(gone(pid, PATIENCE), "what the hook started lives");
    counter.stands_still();

    machine.hook("10-bad", "kill -9 $$");
    let message = refusal(connection.reidentify(&reidentify(HOOK_MS)));
    assert!(message.contains("was ended by signal 9"), "{message}");
    common::write_program(&machine.dir.join("hooks/10-bad"), "#!/no/such/interpreter");
    let message = refusal(connection.reidentify(&reidentify(HOOK_MS)));
    assert!(message.contains("10-bad cannot be started"), "{message}");
    counter.stands_still();
    // It can be mended.
    machine.hook("10-bad", "head -c 2000000 /dev/zero | tr '\\0' x");
    connection.reidentify(&reidentify(HOOK_MS)).unwrap();
    counter.goes_on();
    assert!(machine.file("never").exists());
}

#[test]
fn a_connection_that_the_restore_ends_leaves_its_command_alone() {
    let machine = Machine::new("spared");
    let path = machine.file("attached");
    let script = format!("echo up; while :; do echo >> {}; sleep 0.02; done", path.display());
    let mut attached = machine.connect();
    let mut running = attached.exec(&sh(&script)).unwrap();
    while !matches!(running.output.next().unwrap(), Event::Stdout(bytes) if text(bytes) == "up\n") {}
    let pid = running.pid;
    machine.connect().freeze().unwrap();
    drop(running);
    drop(attached);
    thread::sleep(Duration::from_millis(1500));
    let mut connection = machine.connect();
    connection.reidentify(&reidentify(0)).unwrap();
    let counter = Counter(path);
    counter.goes_on();
    // Past the second in which a command whose client is gone is killed.
    assert!(!gone(pid, Duration::from_millis(1500)), "it was killed");
    counter.goes_on();
}

/// Its input stays open, and who was attached before is none of its business.
#[test]
fn a_kept_command_is_found_after_a_restore() {
    let machine = Machine::new("kept");
    let request = ExecRequest {
        stdin: true,
        kept: Some(Kept {
            tag: Some("kept".to_owned()),
            note: "n".to_owned(),
            ..Kept::default()
        }),
        ..sh("echo up; cat")
    };
    let (mut starter, mut reader) = (machine.connect(), machine.connect());
    let mut running = starter.exec(&request).unwrap();
    assert_eq!(running.output.next().unwrap(), Event::Stdout(b"up\n"));
    let tag = Which::Tag("kept".to_owned());
    let attached = reader.attach(&tag, true).unwrap();
    let pid = running.pid;
    machine.connect().freeze().unwrap();
    drop((running, attached));
    drop((starter, reader));
    let mut connection = machine.connect();
    // While it stands still, too.
    let listed = connection.list_kept().unwrap();
    assert_eq!(listed.iter().map(|command| command.pid).collect::<Vec<_>>(), [pid]);
    assert!(refusal(connection.exec(&request).map(drop)).contains("is frozen"));
    let attached = connection.attach(&tag, true).unwrap();
    attached.input.write(b"sent while frozen\n").unwrap();
    attached.input.close().unwrap();
    machine.connect().reidentify(&reidentify(0)).unwrap();
    let result = attached.collect().unwrap();
    assert_eq!(
        (result.status.exit_code(), text(&result.stdout)),
        (0, "sent while frozen\n")
    );
    assert!(connection.list_kept().unwrap().is_empty());
}

#[test]
fn a_client_that_leaves_just_after_a_thaw_is_one_that_leaves() {
    let machine = Machine::new("left");
    machine.connect().freeze().unwrap();
    machine.connect().reidentify(&reidentify(0)).unwrap();
    // No restore can have ended this connection: the command was not there before.
    let mut attached = machine.connect();
    let mut running = attached.exec(&sh("echo up; while :; do sleep 1; done")).unwrap();
    while !matches!(running.output.next().unwrap(), Event::Stdout(bytes) if text(bytes) == "up\n") {}
    let pid = running.pid;
    drop(running);
    drop(attached);
    assert!(gone(pid, PATIENCE), "it runs on without its client");
}

/// A hook that tells when it has begun and when it has ended, and ends when it is told to.
fn hook_on_demand(machine: &Machine) -> [PathBuf; 3] {
    let files = ["begun", "go", "ended"].map(|name| machine.file(name));
    let [begun, go, ended] = files.each_ref().map(|path| path.display());
    let script = format!("touch {begun}; until [ -e {go} ]; do sleep 0.02; done; touch {ended}");
    machine.hook("10-on-demand", &script);
    files
}

fn wait_for(path: &Path) {
    let end = Instant::now() + PATIENCE;
    while !path.exists() {
        assert!(Instant::now() < end, "{} does not come", path.display());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn nothing_goes_on_that_could_not_be_acknowledged() {
    let machine = Machine::new("unheard");
    let (_, counter) = machine.count("counter");
    machine.connect().freeze().unwrap();
    let [begun, go, ended] = hook_on_demand(&machine);
    let (near, far) = UnixStream::pair().unwrap();
    machine.server.serve_in_thread(far);
    let line = near.try_clone().unwrap();
    let mut unheard = Connection::new(near, None).unwrap();
    let asked = thread::spawn(move || unheard.reidentify(&reidentify(HOOK_MS)));
    wait_for(&begun);
    line.shutdown(Shutdown::Both).unwrap();
    fs::write(go, "").unwrap();
    wait_for(&ended);
    assert!(asked.join().unwrap().is_err());
    // Waits until the re-identification is over, and finds that it did not let anything go on.
    assert!(refusal(machine.connect().exec(&sh("true")).map(drop)).contains("is frozen"));
    assert_eq!(machine.reidentifications.lock().unwrap().len(), 1);
    counter.stands_still();
    machine.connect().reidentify(&reidentify(0)).unwrap();
    counter.goes_on();
}

#[test]
fn what_comes_during_a_reidentification_waits_for_it() {
    let machine = Machine::new("during");
    let [begun, go, _] = hook_on_demand(&machine);
    machine.connect().freeze().unwrap();
    let mut connection = machine.connect();
    let reidentification = thread::spawn(move || connection.reidentify(&reidentify(HOOK_MS)));
    wait_for(&begun);
    let mut other = machine.connect();
    let command = thread::spawn(move || other.exec(&sh("exit 3")).unwrap().collect().unwrap().status);
    thread::sleep(Duration::from_millis(300));
    assert!(!command.is_finished(), "it did not wait");
    fs::write(go, "").unwrap();
    assert_eq!(command.join().unwrap().exit_code(), 3);
    reidentification.join().unwrap().unwrap();
    // Whoever has the answer in hand can start something, on whichever connection.
    let mut other = machine.connect();
    for _ in 0..20 {
        let mut connection = machine.connect();
        connection.freeze().unwrap();
        connection.reidentify(&reidentify(0)).unwrap();
        other.exec(&sh("true")).unwrap().collect().unwrap();
    }
}

#[test]
fn a_machine_that_is_never_cloned_says_so() {
    let mut connection = connect_to(&common::server(None));
    for message in [
        refusal(connection.freeze()),
        refusal(connection.reidentify(&reidentify(0))),
    ] {
        assert!(message.contains("never cloned"), "{message}");
    }
}
