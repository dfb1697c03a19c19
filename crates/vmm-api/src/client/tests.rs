//! What a VMM can say to its driver, in and out of turn.

use std::fs::File;
use std::time::Duration;

use super::*;
use crate::{ErrorKind, ExitReason};

fn answer(socket: &PacketSocket, result: Result<Reply, ApiError>) -> Request {
    let (bytes, _) = socket.receive().unwrap();
    let Packet::Request { id, version, request } = serde_json::from_slice(&bytes).unwrap() else {
        panic!()
    };
    assert_eq!(version, VERSION);
    let event = Packet::Event(Event::Ended(ExitReason::PowerOff));
    socket.send(&serde_json::to_vec(&event).unwrap(), &[]).unwrap();
    socket
        .send(&serde_json::to_vec(&Packet::Reply { id, result }).unwrap(), &[])
        .unwrap();
    request
}

#[test]
fn events_without_end_are_not_listened_to() {
    let (near, far) = PacketSocket::pair().unwrap();
    let vmm = std::thread::spawn(move || {
        let event = serde_json::to_vec(&Packet::Event(Event::Ended(ExitReason::PowerOff))).unwrap();
        while far.send(&event, &[]).is_ok() {}
    });
    let mut client = VmmClient::new(near);
    assert!(matches!(client.start(), Err(ClientError::Malformed(_))));
    drop(client);
    vmm.join().unwrap();
}

#[test]
fn who_says_something_else_now_and_then_is_waited_for_no_longer() {
    let (near, far) = PacketSocket::pair().unwrap();
    let vmm = std::thread::spawn(move || {
        let event = serde_json::to_vec(&Packet::Event(Event::Ended(ExitReason::PowerOff))).unwrap();
        while far.send(&event, &[]).is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let mut client = VmmClient::new(near);
    let error = client
        .metrics_by(Instant::now() + Duration::from_millis(300))
        .unwrap_err();
    assert!(matches!(error, ClientError::Packet(PacketError::Late)), "{error}");
    drop(client);
    vmm.join().unwrap();
    // One that reads nothing.
    let (near, _far) = PacketSocket::pair().unwrap();
    let mut client = VmmClient::new(near);
    for _ in 0..10_000 {
        let error = client.metrics_by(Instant::now()).unwrap_err();
        assert!(matches!(error, ClientError::Packet(PacketError::Late)), "{error}");
    }
}

#[test]
fn an_answer_that_comes_too_late_is_not_taken_for_the_next_one() {
    let (near, far) = PacketSocket::pair().unwrap();
    let mut client = VmmClient::new(near);
    for (id, metrics) in [(client.next_id, 1), (client.next_id + 1, 2)] {
        let samples = vec![
            MetricSample {
                name: "x".into(),
                labels: Vec::new(),
                value: 1
            };
            metrics
        ];
        let packet = Packet::Reply {
            id,
            result: Ok(Reply::Metrics(samples)),
        };
        far.send(&serde_json::to_vec(&packet).unwrap(), &[]).unwrap();
    }
    client.next_id += 1;
    assert_eq!(client.metrics().unwrap().len(), 2);
}

#[test]
fn stops_are_told_once_the_last_one_and_the_end_stays() {
    let (near, far) = PacketSocket::pair().unwrap();
    let mut client = VmmClient::new(near);
    assert_eq!(client.take_stop().unwrap(), None, "nobody waits for one");
    let stopped = |disk: &str| StopReason::NoSpace {
        disks: vec![disk.to_owned()],
    };
    let tell = |event| {
        far.send(&serde_json::to_vec(&Packet::Event(event)).unwrap(), &[])
            .unwrap()
    };
    (0..MAX_EVENTS + 3).for_each(|_| tell(Event::Stopped(stopped("old"))));
    (0..2).for_each(|_| drop(client.take_stop().unwrap()));
    tell(Event::Stopped(stopped("data")));
    tell(Event::Stopped(stopped("root")));
    tell(Event::Ended(ExitReason::PowerOff));
    drop(far);
    assert_eq!(client.take_stop().unwrap(), Some(stopped("root")));
    assert_eq!(client.take_stop().unwrap(), None);
    assert_eq!(client.wait_event().unwrap(), Event::Ended(ExitReason::PowerOff));
    assert!(client.take_stop().unwrap_err().is_gone());
}

#[test]
fn a_frozen_server_comes_as_one_descriptor_and_nothing_else_is_taken_for_it() {
    let cases = [
        (Reply::Freezing, 0, Some(false)),
        (Reply::Frozen, 1, Some(true)),
        (Reply::Frozen, 0, None),
        (Reply::Frozen, 2, None),
        (Reply::Freezing, 1, None),
        (Reply::Done, 0, None),
    ];
    for (reply, count, expected) in cases {
        let (near, far) = PacketSocket::pair().unwrap();
        let answered = reply.clone();
        let vmm = std::thread::spawn(move || {
            let (bytes, _) = far.receive().unwrap();
            let packet: Packet = serde_json::from_slice(&bytes).unwrap();
            let null = File::open("/dev/null").unwrap();
            let answer = Packet::Reply {
                id: 1,
                result: Ok(answered),
            };
            far.send(&serde_json::to_vec(&answer).unwrap(), &vec![null.as_fd(); count])
                .unwrap();
            packet
        });
        let result = VmmClient::new(near).freeze(5000);
        match (&result, expected) {
            (Ok(server), Some(frozen)) => assert_eq!(server.is_some(), frozen, "{reply:?}"),
            (Err(ClientError::Malformed(_)), None) => (),
            other => panic!("{reply:?} with {count}: {other:?}"),
        }
        let Packet::Request { request, .. } = vmm.join().unwrap() else {
            panic!("no request")
        };
        assert_eq!(request, Request::Freeze(FreezeConfig { budget_us: 5000 }));
    }
}

#[test]
fn zeroed_memory_is_as_many_files_as_come_along() {
    let (near, far) = PacketSocket::pair().unwrap();
    let vmm = std::thread::spawn(move || {
        let (bytes, files) = far.receive().unwrap();
        let packet: Packet = serde_json::from_slice(&bytes).unwrap();
        let result = Ok(Reply::Done);
        far.send(&serde_json::to_vec(&Packet::Reply { id: 1, result }).unwrap(), &[])
            .unwrap();
        (packet, files.len())
    });
    let file = File::open("/dev/null").unwrap();
    VmmClient::new(near)
        .add_zeroed_memory(&[file.as_fd(), file.as_fd(), file.as_fd()])
        .unwrap();
    let (packet, files) = vmm.join().unwrap();
    let Packet::Request { request, .. } = packet else {
        panic!("{packet:?}")
    };
    assert_eq!(request, Request::AddZeroedMemory(vec![FdRef(0), FdRef(1), FdRef(2)]));
    assert_eq!(files, 3);
}

#[test]
fn a_refusal_and_an_event_in_between_are_told_apart() {
    let (near, far) = PacketSocket::pair().unwrap();
    let refusal = ApiError {
        kind: ErrorKind::WrongState,
        message: "the VM is empty: create it first".into(),
    };
    let vmm = std::thread::spawn(move || answer(&far, Err(refusal)));
    let mut client = VmmClient::new(near);
    let error = client.start().unwrap_err();
    assert!(matches!(&error, ClientError::Refused(e) if e.kind == ErrorKind::WrongState));
    assert_eq!(vmm.join().unwrap(), Request::Start);
    assert_eq!(client.wait_event().unwrap(), Event::Ended(ExitReason::PowerOff));
    assert!(client.wait_event().unwrap_err().is_gone());
}
