//! Commands that are kept, with real processes: they go on without their connection, are found, and their output and their end go to
//! all who are attached. `kept_input.rs` is about what they get.

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use agent_api::message::{MAX_KEPT, kind};
use agent_api::{
    Connection, Error, Event, ExitStatus, FailureKind, Kept, KeptCommand, OutputStream, PROTOCOL, RequestFailureKind,
    Which,
};
use common::kept::{Machine, PATIENCE, expect, kept, stands_still, tag, wait_until};
use common::{gone, sh, text};

fn is_not_found<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::RequestFailed(failure)) if failure.kind == RequestFailureKind::NotFound)
}

fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Refused(message)) => message,
        Err(other) => panic!("{other:?} is no refusal"),
        Ok(_) => panic!("it was not refused"),
    }
}

#[test]
fn a_command_runs_on_without_its_connection_and_can_be_found() {
    let machine = Machine::new("on");
    let mut connection = machine.connect();
    let mut request = kept("one", "echo $$ $A; pwd; id -u; read line; echo got $line; exit 7");
    request.env = vec!["A=b".into()];
    request.cwd = "/usr".into();
    request.user = Some("nobody".into());
    let note = "{\"anything\": \"grüß dich\\n\"}".to_owned();
    request.kept.as_mut().unwrap().note = note.clone();
    let mut running = connection.exec(&request).unwrap();
    let pid = running.pid;
    expect(&mut running, &format!("{pid} b\n/usr\n65534\n"));
    drop(running);
    drop(connection);

    let command = KeptCommand {
        pid,
        kept: Kept {
            tag: Some("one".to_owned()),
            note,
            ..Kept::default()
        },
    };
    assert_eq!(machine.list(), [command]);
    let mut connection = machine.connect();
    let running = connection.attach(&Which::Pid(pid), true).unwrap();
    assert_eq!(running.pid, pid);
    running.input.write(b"word\n").unwrap();
    let result = running.collect().unwrap();
    // Nothing of what it wrote before.
    assert_eq!(
        (result.status, text(&result.stdout)),
        (ExitStatus::Code(7), "got word\n")
    );

    // Who has heard of the end does not find it any more, by whatever connection.
    assert!(is_not_found(machine.connect().attach(&tag("one"), true).map(drop)));
    assert!(is_not_found(connection.attach(&Which::Pid(pid), false).map(drop)));
    assert!(machine.list().is_empty());
    connection.ping().unwrap();
}

#[test]
fn a_tag_is_the_one_that_was_started_last() {
    let machine = Machine::new("tags");
    let mut pids = Vec::new();
    for name in ["a", "twice", "twice", "b"] {
        let mut connection = machine.connect();
        let running = connection.exec(&kept(name, "read line; exit 1")).unwrap();
        pids.push(running.pid);
        running.detach().unwrap();
    }
    let listed: Vec<_> = machine.list().into_iter().map(|command| command.pid).collect();
    assert_eq!(listed, pids);
    for expected in [pids[2], pids[1]] {
        let mut connection = machine.connect();
        let running = connection.attach(&tag("twice"), true).unwrap();
        assert_eq!(running.pid, expected);
        running.input.write(b"\n").unwrap();
        assert_eq!(running.collect().unwrap().status, ExitStatus::Code(1));
    }
    assert!(is_not_found(machine.connect().attach(&tag("twice"), true).map(drop)));
    let listed: Vec<_> = machine.list().into_iter().map(|command| command.pid).collect();
    assert_eq!(listed, [pids[0], pids[3]]);
}

/// Counted from its start, whoever is attached, and with all that it has started.
#[test]
fn a_command_is_killed_when_its_time_is_over() {
    let machine = Machine::new("limit");
    let script = format!("sleep 1000 & echo $! >{}; wait", machine.path("child"));
    let limited = |tag| {
        let mut request = kept(tag, &script);
        request.kept.as_mut().unwrap().limit_ms = Some(700);
        request
    };
    let begun = Instant::now();
    let mut connection = machine.connect();
    let result = connection.exec(&limited("heard")).unwrap().collect().unwrap();
    assert_eq!(result.status, ExitStatus::Signal(9));
    assert!(begun.elapsed() >= Duration::from_millis(700), "{:?}", begun.elapsed());
    let child = fs::read_to_string(machine.path("child"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert!(gone(child, PATIENCE));

    // Nobody listens; and one without a limit runs on beside it.
    let mut connection = machine.connect();
    connection.exec(&kept("free", "sleep 1000")).unwrap().detach().unwrap();
    let running = connection.exec(&limited("left")).unwrap();
    let pid = running.pid;
    running.detach().unwrap();
    assert!(gone(pid, PATIENCE));
    wait_until("only the other one is listed", || {
        let tags = machine.list().into_iter().map(|command| command.kept.tag);
        tags.eq([Some("free".to_owned())])
    });
}

/// With `detached` nobody is attached at first, and what nobody reads does not hold it back.
#[test]
fn what_nobody_reads_is_thrown_away() {
    let machine = Machine::new("nobody");
    let mut connection = machine.connect();
    let script = format!(
        "head -c 10000000 /dev/zero; echo >{}; read line; echo end",
        machine.path("done")
    );
    let pid = connection.exec_detached(&kept("alone", &script)).unwrap();
    connection.ping().unwrap();
    wait_until("it writes without a reader", || {
        fs::exists(machine.path("done")).unwrap()
    });
    let running = connection.attach(&Which::Pid(pid), true).unwrap();
    running.input.write(b"\n").unwrap();
    let stdout = running.collect().unwrap().stdout;
    // But for what the pipe may still hold.
    assert!(
        stdout.len() <= 65_540 && stdout.ends_with(b"end\n"),
        "{} bytes",
        stdout.len()
    );
}

#[test]
fn all_who_are_attached_get_the_same_bytes_and_the_end() {
    let machine = Machine::new("same");
    let mut connection = machine.connect();
    let running = connection
        .exec(&kept("many", "read go; seq 1 300000; seq 1 1000 >&2; exit 5"))
        .unwrap();
    let mut threads: Vec<_> = (0..3).map(|_| machine.collector(tag("many"))).collect();
    machine.send(&tag("many"), b"go\n");
    let first = running.collect().unwrap();
    assert_eq!(first.status, ExitStatus::Code(5));
    assert!(
        first.stdout.ends_with(b"\n299999\n300000\n"),
        "{} bytes",
        first.stdout.len()
    );
    assert_eq!((first.stdout.len(), first.stderr.len()), (1_988_895, 3893));
    for thread in threads.drain(..) {
        assert!(thread.join().unwrap() == first, "another one got something else");
    }
    connection.ping().unwrap();
}

#[test]
fn a_reader_that_is_lost_takes_nothing_from_the_others() {
    let machine = Machine::new("lost");
    let mut connection = machine.connect();
    let running = connection
        .exec(&kept("lost", "read go; head -c 20000000 /dev/zero; exit 2"))
        .unwrap();
    let other = machine.collector(tag("lost"));
    let mut leaving = machine.connect();
    let mut gone = leaving.attach(&tag("lost"), true).unwrap();
    gone.input.write(b"\n").unwrap();
    for _ in 0..3 {
        assert!(matches!(gone.output.next().unwrap(), Event::Stdout(_)));
    }
    // In the midst, with output under way.
    drop(gone);
    drop(leaving);
    // The one that has started it, too.
    drop(running);
    drop(connection);
    let result = other.join().unwrap();
    assert_eq!((result.status, result.stdout.len()), (ExitStatus::Code(2), 20_000_000));
}

#[test]
fn a_reader_that_does_not_read_holds_the_command_back_until_it_is_gone() {
    let machine = Machine::new("back");
    let count = machine.path("count");
    let script =
        format!("read go; for i in $(seq 1 400); do head -c 65536 /dev/zero; echo >>{count}; done; echo end >&2");
    let mut starter = machine.connect();
    starter.exec(&kept("back", &script)).unwrap().detach().unwrap();
    let reader = machine.collector(tag("back"));
    let mut lazy = machine.connect();
    let stuck = lazy.attach(&tag("back"), true).unwrap();
    machine.send(&tag("back"), b"\n");
    let written = || fs::metadata(&count).map_or(0, |data| data.len());
    let before = stands_still(written);
    assert!(
        before < 100,
        "{before} of 400 blocks were written although somebody does not read"
    );
    // Meanwhile others come and go, and it is listed.
    assert_eq!(machine.list().len(), 1);
    machine.signal(&tag("back"), libc::SIGCONT);
    assert!(!reader.is_finished());
    drop(stuck);
    drop(lazy);
    let result = reader.join().unwrap();
    assert_eq!((result.stdout.len(), text(&result.stderr)), (400 * 65536, "end\n"));
}

#[test]
fn detached_connections_are_idle_and_attach_again() {
    let machine = Machine::new("detach");
    let mut connection = machine.connect();
    let running = connection.exec(&kept("again", "cat")).unwrap();
    let old = running.input.clone();
    running.detach().unwrap();
    // What somebody sends who has not heard of it has no effect.
    assert!(matches!(old.write(b"lost"), Err(Error::Ended)));
    old.signal(libc::SIGKILL).unwrap();
    connection.ping().unwrap();
    assert_eq!(
        connection.exec(&sh("echo x")).unwrap().collect().unwrap().stdout,
        b"x\n"
    );
    for word in ["one\n", "two\n"] {
        let mut running = connection.attach(&tag("again"), true).unwrap();
        running.input.write(word.as_bytes()).unwrap();
        expect(&mut running, word);
        running.detach().unwrap();
    }
    // Where nothing is attached it is done; a command that is not kept is not left.
    let message = refusal(connection.exec(&sh("sleep 1000")).unwrap().detach());
    assert!(message.contains("is running"), "{message}");
    let mut stream = machine.connect().into_stream();
    let detach = [&wire::Header::encode(8, kind::CONTROL, 0).unwrap()[..], b"\"detach\""].concat();
    stream.write_all(&detach).unwrap();
    let mut reader = wire::FrameReader::new(stream);
    assert_eq!(reader.read().unwrap().unwrap().payload, b"\"done\"");
}

#[test]
fn detaching_under_a_stream_of_output_leaves_the_connection_whole() {
    let machine = Machine::new("stream");
    let mut connection = machine.connect();
    connection.exec(&kept("yes", "yes")).unwrap().detach().unwrap();
    for round in 0..50 {
        let mut running = connection.attach(&tag("yes"), true).unwrap();
        if round % 2 == 0 {
            assert!(matches!(running.output.next().unwrap(), Event::Stdout(_)));
        }
        running.detach().unwrap();
        connection.ping().unwrap();
    }
}

#[test]
fn a_stream_that_one_does_not_want_still_goes_to_others() {
    let machine = Machine::new("unwanted");
    let mut connection = machine.connect();
    let running = connection
        .exec(&kept("both", "read go; head -c 3000000 /dev/zero; echo $? >&2"))
        .unwrap();
    running.input.close_output(OutputStream::Stdout).unwrap();
    let other = machine.collector(tag("both"));
    // After the request above, on the same connection.
    running.input.write(b"\n").unwrap();
    let first = running.collect().unwrap();
    assert_eq!((first.stdout.len(), text(&first.stderr)), (0, "0\n"));
    let other = other.join().unwrap();
    assert_eq!((other.stdout.len(), text(&other.stderr)), (3_000_000, "0\n"));
}

#[test]
fn signals_come_from_anybody_and_the_end_goes_to_all() {
    let machine = Machine::new("signals");
    let mut connection = machine.connect();
    let running = connection.exec(&kept("sleep", "exec sleep 1000")).unwrap();
    let others = [machine.collector(tag("sleep")), machine.collector(tag("sleep"))];
    machine.signal(&tag("sleep"), libc::SIGTERM);
    assert_eq!(running.collect().unwrap().status, ExitStatus::Signal(15));
    for other in others {
        assert_eq!(other.join().unwrap().status, ExitStatus::Signal(15));
    }
}

#[test]
fn other_requests_wait_while_a_connection_is_attached() {
    let machine = Machine::new("attached");
    let mut connection = machine.connect();
    connection.exec(&kept("cat", "cat")).unwrap().detach().unwrap();
    for request in [
        "\"ping\"",
        "\"list_kept\"",
        "{\"attach\":{\"command\":{\"tag\":\"cat\"},\"output\":true}}",
    ] {
        let mut stream = connection.stream().try_clone().unwrap();
        let mut running = connection.attach(&tag("cat"), true).unwrap();
        let header = wire::Header::encode(request.len(), kind::CONTROL, 0).unwrap();
        stream.write_all(&[&header[..], request.as_bytes()].concat()).unwrap();
        match running.output.next() {
            Err(Error::Unexpected(reply)) => assert!(format!("{reply:?}").contains("is running"), "{reply:?}"),
            other => panic!("{other:?}"),
        }
        running.detach().unwrap();
    }
}

#[test]
fn what_cannot_be_kept_is_refused_and_leaves_nothing() {
    let machine = Machine::new("refused");
    let mut connection = machine.connect();
    let mut request = kept("t", "exit 0");
    request.kept.as_mut().unwrap().note = "n".repeat(Kept::MAX_NOTE + 1);
    let message = refusal(connection.exec(&request).map(drop));
    assert!(message.contains("note has 65537 bytes, the most is 65536"), "{message}");
    request.kept.as_mut().unwrap().note = "n".repeat(Kept::MAX_NOTE);
    request.main = true;
    let message = refusal(connection.exec(&request).map(drop));
    assert!(message.contains("cannot be kept"), "{message}");
    request.main = false;
    request.argv = vec!["no-such-program".into()];
    // More often than there may be of them.
    for _ in 0..MAX_KEPT / 16 {
        match connection.exec(&request) {
            Err(Error::Exec(failure)) => assert_eq!(failure.kind, FailureKind::NotFound),
            other => panic!("{:?}", other.map(|running| running.pid)),
        }
    }
    assert!(machine.list().is_empty());
    assert!(is_not_found(connection.attach(&Which::Pid(1), true).map(drop)));
    connection.ping().unwrap();
}

/// More than a frame holds.
#[test]
fn a_long_list_comes_in_parts() {
    let machine = Machine::new("long");
    let mut connection = machine.connect();
    let mut expected = Vec::new();
    for number in 0..20_u8 {
        let mut request = kept("long", "exec sleep 1000");
        request.kept.as_mut().unwrap().note = "\u{1}".repeat(Kept::MAX_NOTE - usize::from(number));
        let pid = connection.exec_detached(&request).unwrap();
        let kept = request.kept.unwrap();
        expected.push(KeptCommand { pid, kept });
    }
    assert!(connection.list_kept().unwrap() == expected, "another list came");
}

#[test]
fn older_and_newer_clients_are_understood() {
    let machine = Machine::new("versions");
    for (oldest, version, agreed) in [(2, 2, 2), (3, 3, 3), (2, 3, 3), (1, 9, 3)] {
        let (mut near, far) = UnixStream::pair().unwrap();
        machine.server.serve_in_thread(far);
        let protocol = wire::Protocol {
            oldest,
            version,
            ..PROTOCOL
        };
        assert_eq!(wire::offer(&mut near, protocol, None).unwrap(), agreed);
        Connection::resume(near).unwrap().ping().unwrap();
    }
}
