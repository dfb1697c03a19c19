//! The client against an agent that answers from a script: what it makes of answers that are wrong, late or missing. The
//! real agent's tests are beside the agent.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use agent_api::message::{STDIN_WINDOW, kind};
use agent_api::{
    Connection, Error, ExecRequest, FailureKind, Kept, KeptCommand, PROTOCOL, PowerAction, RequestFailure,
    RequestFailureKind, Shutdown, Upload, Which, WinSize,
};
use wire::{FrameReader, FrameWriter};

/// An agent that reads one frame for each answer it gives, and then closes; returns what it has read.
fn scripted(answers: &'static [(u16, &'static str)]) -> (Connection<UnixStream>, JoinHandle<Vec<String>>) {
    let (near, mut far) = UnixStream::pair().unwrap();
    let agent = thread::spawn(move || {
        wire::accept(&mut far, PROTOCOL, None).unwrap();
        let writer = FrameWriter::new(far.try_clone().unwrap());
        let mut reader = FrameReader::new(far);
        let mut heard = Vec::new();
        for (kind, answer) in answers {
            let frame = reader.read().unwrap().unwrap();
            heard.push(String::from_utf8_lossy(frame.payload).into_owned());
            writer.send(*kind, 0, answer.as_bytes()).unwrap();
        }
        heard
    });
    (Connection::new(near, None).unwrap(), agent)
}

#[test]
fn an_agent_that_is_gone_is_told_as_such() {
    let (mut connection, agent) = scripted(&[]);
    agent.join().unwrap();
    // The request may fail to be sent or the answer to come; both name the connection.
    assert!(matches!(connection.ping(), Err(Error::Closed(_) | Error::Wire(_))));
}

#[test]
fn answers_that_make_no_sense_are_errors() {
    let ping = |answers| scripted(answers).0.ping().unwrap_err();
    assert!(matches!(ping(&[(kind::CONTROL, "{")]), Error::Malformed(_)));
    assert!(matches!(
        ping(&[(kind::CONTROL, r#"{"started":{"pid":1}}"#)]),
        Error::Unexpected(_)
    ));
    assert!(matches!(
        ping(&[(kind::STDOUT, "x")]),
        Error::UnexpectedFrame(kind::STDOUT)
    ));
    assert!(matches!(
        ping(&[(kind::CONTROL, r#"{"refused":{"message":"no"}}"#)]),
        Error::Refused(_)
    ));
}

#[test]
fn a_failure_to_start_carries_its_exit_code() {
    let answer = &[(
        kind::CONTROL,
        r#"{"failed":{"kind":"not_found","message":"there is no x"}}"#,
    )];
    let (mut connection, _agent) = scripted(answer);
    let error = connection.exec(&ExecRequest::default()).unwrap_err();
    assert_eq!((error.exit_code(), error.to_string().as_str()), (127, "there is no x"));
    assert!(matches!(error, Error::Exec(failure) if failure.kind == FailureKind::NotFound));
}

#[test]
fn silence_ends_when_the_caller_says() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let agent = thread::spawn(move || {
        wire::accept(&mut far, PROTOCOL, None).unwrap();
        far
    });
    let mut connection = Connection::new(near, None).unwrap();
    let _open = agent.join().unwrap();
    connection.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let begin = Instant::now();
    assert!(matches!(connection.ping(), Err(Error::TimedOut)));
    assert!(begin.elapsed() < Duration::from_secs(90));
}

#[test]
fn a_shutdown_may_end_the_connection_or_be_answered() {
    let off = Shutdown {
        how: PowerAction::PowerOff,
        grace_ms: 7,
    };
    let (mut connection, agent) = scripted(&[(kind::CONTROL, "\"done\"")]);
    connection.shutdown(off).unwrap();
    assert_eq!(
        agent.join().unwrap(),
        [r#"{"shutdown":{"how":"power_off","grace_ms":7}}"#]
    );

    let (near, mut far) = UnixStream::pair().unwrap();
    let agent = thread::spawn(move || {
        wire::accept(&mut far, PROTOCOL, None).unwrap();
        // Half a frame, then the machine is off.
        FrameReader::new(far.try_clone().unwrap()).read().unwrap().unwrap();
        far.write_all(&[1, 2, 3]).unwrap();
    });
    Connection::new(near, None).unwrap().shutdown(off).unwrap();
    agent.join().unwrap();

    let (mut connection, _agent) = scripted(&[(kind::CONTROL, r#"{"refused":{"message":"no"}}"#)]);
    assert!(matches!(connection.shutdown(off), Err(Error::Refused(_))));
}

#[test]
fn requests_of_a_command_are_what_the_agent_hears() {
    let (mut connection, agent) = scripted(&[
        (kind::CONTROL, r#"{"started":{"pid":5}}"#),
        (kind::STDOUT, "a"),
        (kind::STDERR, "b"),
        (kind::CONTROL, r#"{"stdin_taken":{"bytes":3}}"#),
        (kind::CONTROL, r#"{"output_closed":{"stream":"stderr"}}"#),
        (kind::CONTROL, r#"{"exited":{"code":4}}"#),
    ]);
    let running = connection
        .exec(&ExecRequest {
            stdin: true,
            ..ExecRequest::default()
        })
        .unwrap();
    let input = running.input.clone();
    assert_eq!(running.pid, 5);
    input.resize(WinSize { rows: 1, cols: 2 }).unwrap();
    input.signal(15).unwrap();
    input.write(b"abc").unwrap();
    input.close_output(agent_api::OutputStream::Stdout).unwrap();
    input.close().unwrap();
    let result = running.collect().unwrap();
    assert_eq!(
        (result.status.exit_code(), &result.stdout[..], &result.stderr[..]),
        (4, &b"a"[..], &b"b"[..])
    );
    assert!(matches!(input.write(b"more"), Err(Error::Ended)));
    let heard = agent.join().unwrap();
    assert_eq!(
        heard[1..],
        [
            r#"{"resize":{"rows":1,"cols":2}}"#,
            r#"{"signal":{"number":15}}"#,
            "abc",
            r#"{"close_output":{"stream":"stdout"}}"#,
            "\"close_stdin\""
        ]
    );
}

#[test]
fn a_list_of_kept_commands_comes_in_parts_and_ends() {
    let parts = &[
        (
            kind::CONTROL,
            r#"{"kept":{"commands":[{"pid":1,"kept":{"tag":"a","note":"n"}}],"more":true}}"#,
        ),
        (
            kind::CONTROL,
            r#"{"kept":{"commands":[{"pid":2,"kept":{}}],"more":false}}"#,
        ),
    ];
    // The agent of this script answers what it hears: the second request stands for the other part.
    let (mut connection, agent) = scripted(parts);
    connection
        .stream()
        .write_all(&wire::Header::encode(0, kind::CONTROL, 0).unwrap())
        .unwrap();
    let listed = connection.list_kept().unwrap();
    let expected = [(1, Some("a"), "n"), (2, None, "")].map(|(pid, tag, note)| KeptCommand {
        pid,
        kept: Kept {
            tag: tag.map(str::to_owned),
            note: note.to_owned(),
            ..Kept::default()
        },
    });
    assert_eq!(listed, expected);
    assert_eq!(agent.join().unwrap(), ["", "\"list_kept\""]);
    // A guest that has much to say, or never comes to the end.
    let (mut connection, _agent) = scripted(&[(kind::CONTROL, r#"{"kept":{"commands":[],"more":true}}"#)]);
    assert!(matches!(connection.list_kept(), Err(Error::Unexpected(_))));
    let (near, mut far) = UnixStream::pair().unwrap();
    let agent = thread::spawn(move || {
        wire::accept(&mut far, PROTOCOL, None).unwrap();
        let note = "n".repeat(Kept::MAX_NOTE);
        let part = format!(r#"{{"kept":{{"commands":[{{"pid":1,"kept":{{"note":"{note}"}}}}],"more":true}}}}"#);
        let writer = FrameWriter::new(far);
        let mut sent = 0;
        while writer.send(kind::CONTROL, 0, part.as_bytes()).is_ok() {
            sent += 1;
        }
        sent
    });
    let mut connection = Connection::new(near, None).unwrap();
    let error = connection.list_kept().unwrap_err();
    assert!(
        matches!(error, Error::TooManyKept { count: 257, text } if text == 257 * Kept::MAX_NOTE),
        "{error}"
    );
    drop(connection);
    assert!(agent.join().unwrap() >= 257);
}

#[test]
fn detaching_reads_over_what_was_under_way() {
    let (mut connection, agent) = scripted(&[
        (kind::CONTROL, r#"{"started":{"pid":5}}"#),
        (kind::STDOUT, "late"),
        (kind::CONTROL, "\"done\""),
        (kind::CONTROL, "\"done\""),
    ]);
    let running = connection.attach(&Which::Tag("t".to_owned()), true).unwrap();
    let input = running.input.clone();
    input.signal(15).unwrap();
    running.detach().unwrap();
    assert!(matches!(input.write(b"x"), Err(Error::Ended)));
    connection.ping().unwrap();
    assert_eq!(
        agent.join().unwrap(),
        [
            r#"{"attach":{"command":{"tag":"t"},"output":true}}"#,
            r#"{"signal":{"number":15}}"#,
            "\"detach\"",
            "\"ping\""
        ]
    );
}

#[test]
fn without_output_nothing_is_waited_for() {
    let (mut connection, agent) = scripted(&[
        (kind::CONTROL, r#"{"started":{"pid":5}}"#),
        (kind::CONTROL, r#"{"stdin_taken":{"bytes":1}}"#),
        (kind::CONTROL, r#"{"stdin_taken":{"bytes":1}}"#),
        (kind::CONTROL, r#"{"stdin_taken":{"bytes":1}}"#),
        (kind::CONTROL, "\"done\""),
    ]);
    let mut running = connection.attach(&Which::Pid(5), false).unwrap();
    assert!(matches!(running.output.next(), Err(Error::NoOutput)));
    // More than a window: it would be waited for. (Each frame has an answer in a script.)
    running.input.write(&[7; STDIN_WINDOW + 1]).unwrap();
    running.detach().unwrap();
    let heard = agent.join().unwrap();
    assert_eq!(heard[0], r#"{"attach":{"command":{"pid":5},"output":false}}"#);
    assert_eq!(heard[1..4].iter().map(String::len).sum::<usize>(), STDIN_WINDOW + 1);

    let (mut connection, _agent) = scripted(&[(
        kind::CONTROL,
        r#"{"request_failed":{"kind":"not_found","message":"no such command"}}"#,
    )]);
    let error = connection.attach(&Which::Pid(5), true).map(drop).unwrap_err();
    assert!(
        matches!(
            error,
            Error::RequestFailed(RequestFailure {
                kind: RequestFailureKind::NotFound,
                ..
            })
        ),
        "{error}"
    );
}

#[test]
fn the_window_bounds_what_is_under_way() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let agent = thread::spawn(move || {
        wire::accept(&mut far, PROTOCOL, None).unwrap();
        let writer = FrameWriter::new(far.try_clone().unwrap());
        let mut reader = FrameReader::new(far);
        reader.read().unwrap();
        writer.send(kind::CONTROL, 0, br#"{"started":{"pid":5}}"#).unwrap();
        let mut got = 0;
        // Nothing is taken: exactly a window comes.
        while got < agent_api::message::STDIN_WINDOW {
            got += reader.read().unwrap().unwrap().payload.len();
        }
        reader
            .get_ref()
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        let silent = reader.read().is_err();
        reader.get_ref().set_read_timeout(None).unwrap();
        writer
            .send(kind::CONTROL, 0, br#"{"stdin_taken":{"bytes":10}}"#)
            .unwrap();
        let more = reader.read().unwrap().unwrap().payload.len();
        writer.send(kind::CONTROL, 0, br#"{"exited":{"code":0}}"#).unwrap();
        (got, silent, more)
    });
    let mut connection = Connection::new(near, None).unwrap();
    let running = connection
        .exec(&ExecRequest {
            stdin: true,
            ..ExecRequest::default()
        })
        .unwrap();
    let input = running.input.clone();
    let feeder = thread::spawn(move || input.write(&vec![0; 1 << 20]));
    running.collect().unwrap();
    assert!(matches!(feeder.join().unwrap(), Err(Error::Ended)));
    assert_eq!(agent.join().unwrap(), (agent_api::message::STDIN_WINDOW, true, 10));
}

#[test]
fn an_upload_that_is_refused_sends_no_data() {
    let (mut connection, agent) = scripted(&[(kind::CONTROL, r#"{"refused":{"message":"no space"}}"#)]);
    let upload = Upload {
        path: "/x".into(),
        mode: 0o644,
        size: 3,
    };
    assert!(matches!(
        connection.upload(&upload, &mut &b"abc"[..]),
        Err(Error::Refused(_))
    ));
    assert_eq!(agent.join().unwrap().len(), 1);
}

/// An agent of the last release, as snapshots have them: it is not asked what it would hang up at.
#[test]
fn an_older_agent_is_not_asked_what_it_does_not_know() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let old = wire::Protocol {
        version: PROTOCOL.oldest,
        ..PROTOCOL
    };
    let server = thread::spawn(move || {
        assert_eq!(wire::accept(&mut far, old, None).unwrap(), 2);
        let mut reader = FrameReader::new(far);
        assert!(reader.read().unwrap().is_none(), "something was asked");
    });
    let mut connection = Connection::new(near, None).unwrap();
    assert_eq!(connection.version(), 2);
    let kept = ExecRequest {
        kept: Some(agent_api::Kept::default()),
        ..ExecRequest::default()
    };
    connection.tell_environment(&["A=b".into()]).unwrap();
    let refusals = [
        connection.list_kept().unwrap_err(),
        connection.exec(&kept).unwrap_err(),
        connection.attach(&agent_api::Which::Pid(1), true).unwrap_err(),
        connection.fs_stat(None, "/").unwrap_err(),
        connection.connect_port(80).unwrap_err(),
    ];
    for refusal in refusals {
        assert!(matches!(refusal, Error::TooOld { spoken: 2, version: 3 }), "{refusal}");
    }
    server.join().unwrap();
}
