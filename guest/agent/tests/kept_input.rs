//! What kept commands get from all who are attached: input, its end, keys and sizes of a terminal. `kept.rs` is about what they give.

mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use agent_api::message::{DATA_CHUNK, STDIN_WINDOW};
use agent_api::{Error, Event, ExecRequest, ExitStatus, OutputStream, Tty, WinSize};
use common::kept::{Machine, PATIENCE, expect, kept, stands_still, tag, wait_until};
use common::text;

#[test]
fn input_comes_from_whoever_is_attached() {
    let machine = Machine::new("input");
    let mut connection = machine.connect();
    let mut running = connection.exec(&kept("cat", "cat")).unwrap();
    running.input.write(b"from its own\n").unwrap();
    expect(&mut running, "from its own\n");
    machine.send(&tag("cat"), b"from another\n");
    expect(&mut running, "from another\n");
    running.input.write(b"again\n").unwrap();
    expect(&mut running, "again\n");
    // The end of input is for all.
    let mut other = machine.connect();
    let ending = other.attach(&tag("cat"), false).unwrap();
    assert!(matches!(
        machine.connect().attach(&tag("cat"), false).unwrap().output.next(),
        Err(Error::NoOutput)
    ));
    ending.input.close().unwrap();
    ending.detach().unwrap();
    let input = running.input.clone();
    assert_eq!(running.collect().unwrap().status, ExitStatus::Code(0));
    assert!(matches!(input.write(b"late"), Err(Error::Ended)));
}

/// Each has its own window, whatever others send.
#[test]
fn two_who_send_much_do_not_take_one_anothers_window() {
    let machine = Machine::new("windows");
    // It ends when it has all: what is lost would be waited for.
    let script = format!("head -c {} | wc -c", 6 << 20);
    let mut connection = machine.connect();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let running = connection.exec(&kept("wc", &script)).unwrap();
    let mut second = machine.connect();
    let attached = second.attach(&tag("wc"), true).unwrap();
    let feeders: Vec<_> = [running.input.clone(), attached.input.clone()]
        .into_iter()
        .map(|input| thread::spawn(move || input.write(&vec![7; 3 << 20])))
        .collect();
    thread::scope(|scope| {
        let both = [scope.spawn(|| running.collect()), scope.spawn(|| attached.collect())];
        for collector in both {
            assert_eq!(text(&collector.join().unwrap().unwrap().stdout), "6291456\n");
        }
    });
    for feeder in feeders {
        feeder.join().unwrap().unwrap();
    }
}

#[test]
fn a_mebibyte_goes_in_without_output() {
    let machine = Machine::new("mebibyte");
    let file = machine.path("file");
    let mut connection = machine.connect();
    let script = format!("cat >{file}; echo >{file}.end");
    connection.exec(&kept("file", &script)).unwrap().detach().unwrap();
    let data: Vec<u8> = (0..=250_u8).cycle().take(1 << 20).collect();
    let running = connection.attach(&tag("file"), false).unwrap();
    running.input.write(&data).unwrap();
    running.input.close().unwrap();
    running.detach().unwrap();
    connection.ping().unwrap();
    wait_until("the end of input arrives", || {
        fs::exists(format!("{file}.end")).unwrap()
    });
    assert!(fs::read(&file).unwrap() == data, "other bytes arrived");
    wait_until("it is forgotten", || machine.list().is_empty());
}

#[test]
fn input_that_does_not_fit_waits_and_goes_with_its_connection() {
    let machine = Machine::new("waits");
    let mut starter = machine.connect();
    let script = "trap go=1 USR1; echo ready; while [ -z \"$go\" ]; do sleep 0.02; done; exec cat";
    let mut running = starter.exec(&kept("slow", script)).unwrap();
    expect(&mut running, "ready\n");
    let mut greedy = machine.connect();
    let stream = greedy.stream().try_clone().unwrap();
    let sent = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&sent);
    let feeder = thread::spawn(move || {
        let attached = greedy.attach(&tag("slow"), false).unwrap();
        loop {
            attached.input.write(&[b'a'; DATA_CHUNK])?;
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let frames = stands_still(|| sent.load(Ordering::SeqCst));
    assert!(frames < 64, "{frames} frames were taken although nobody reads them");
    let mut polite = machine.connect();
    let second = thread::spawn(move || {
        let attached = polite.attach(&tag("slow"), false).unwrap();
        attached.input.write(&[b'b'; STDIN_WINDOW]).unwrap();
        attached.input.write(b"the end").unwrap();
        attached.detach().unwrap();
    });
    thread::sleep(Duration::from_millis(200));
    assert!(!second.is_finished(), "more was queued than fits");
    // Signals of others come through, and who leaves the line lets others in.
    stream.shutdown(std::net::Shutdown::Both).unwrap();
    let ended: Result<(), Error> = feeder.join().unwrap();
    assert!(ended.is_err());
    machine.signal(&tag("slow"), libc::SIGUSR1);
    second.join().unwrap();
    running.input.close().unwrap();
    let stdout = running.collect().unwrap().stdout;
    assert!(stdout.ends_with(b"the end"));
    let count = |letter| stdout.iter().filter(|byte| **byte == letter).count();
    assert_eq!(count(b'b'), STDIN_WINDOW);
    // Whole frames or nothing, and no more than was queued or in the pipe.
    let first = count(b'a');
    assert!(first % DATA_CHUNK == 0 && first <= STDIN_WINDOW + (1 << 16), "{first}");
}

#[test]
fn who_waits_with_input_goes_on_when_the_command_ends() {
    let machine = Machine::new("ends");
    let mut starter = machine.connect();
    starter
        .exec(&kept("deaf", "exec sleep 1000"))
        .unwrap()
        .detach()
        .unwrap();
    let mut connection = machine.connect();
    let feeder = thread::spawn(move || {
        let attached = connection.attach(&tag("deaf"), false).unwrap();
        attached.input.write(&vec![0; 8 << 20]).unwrap();
        attached.detach().unwrap();
        connection.ping().unwrap();
    });
    thread::sleep(Duration::from_millis(200));
    assert!(!feeder.is_finished(), "it was taken by nobody");
    machine.signal(&tag("deaf"), libc::SIGKILL);
    feeder.join().unwrap();
    wait_until("it is forgotten", || machine.list().is_empty());
}

#[test]
fn who_comes_late_is_told_what_is_closed() {
    let machine = Machine::new("late");
    let mut connection = machine.connect();
    let script = format!(
        "exec 2>&-; read line; echo $line; exec <&-; while [ ! -e {} ]; do sleep 0.02; done",
        machine.path("go")
    );
    let mut running = connection.exec(&kept("late", &script)).unwrap();
    assert_eq!(running.output.next().unwrap(), Event::Closed(OutputStream::Stderr));
    running.input.write(b"x\n").unwrap();
    expect(&mut running, "x\n");
    running.input.close().unwrap();
    running.detach().unwrap();
    let mut late = connection.attach(&tag("late"), true).unwrap();
    assert_eq!(late.output.next().unwrap(), Event::Closed(OutputStream::Stderr));
    fs::write(machine.path("go"), "").unwrap();
    let input = late.input.clone();
    assert_eq!(late.collect().unwrap().status, ExitStatus::Code(0));
    assert!(matches!(input.write(b"x"), Err(Error::Ended)));
}

#[test]
fn a_terminal_is_shared() {
    let machine = Machine::new("terminal");
    let (mut connection, mut other) = (machine.connect(), machine.connect());
    let script = "trap 'stty size' WINCH; stty size; while :; do read line || continue; echo got $line; done";
    let request = ExecRequest {
        tty: Some(Tty {
            size: WinSize { rows: 31, cols: 97 },
            term: None,
        }),
        ..kept("shell", script)
    };
    let mut running = connection.exec(&request).unwrap();
    expect(&mut running, "31 97\r\n");
    let mut attached = other.attach(&tag("shell"), true).unwrap();
    attached.input.resize(WinSize { rows: 12, cols: 34 }).unwrap();
    // A signal that comes just before the shell reads is dealt with after what it reads then.
    attached.input.write(b"\r").unwrap();
    let mut seen = [String::new(), String::new()];
    for (seen, running) in seen.iter_mut().zip([&mut running, &mut attached]) {
        while !seen.contains("12 34\r\n") {
            match running.output.next().unwrap() {
                Event::Stdout(bytes) => seen.push_str(text(bytes)),
                other => panic!("{other:?} after {seen:?}"),
            }
        }
    }
    machine.send(&tag("shell"), b"\x03");
    assert_eq!(running.collect().unwrap().status, ExitStatus::Signal(2));
    assert_eq!(attached.collect().unwrap().status, ExitStatus::Signal(2));
}
