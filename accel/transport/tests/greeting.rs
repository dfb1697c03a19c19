//! How two sides meet, and what comes of one that lies: in the greeting, about the memory, or in the rings.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use accel_transport::{
    Agreement, ClientConnection, Error, Offer, Protocol, ServerConnection, Settings, Transport, accept, connect,
};
use accel_window::{Geometry, Window};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::packet::PacketSocket;
use wire::ring::{Index, Memory as _, Record, RingMemory, SEQUENCE_LIMIT};

const MOST: Duration = Duration::from_secs(20);

fn settings() -> Settings {
    Settings {
        transports: vec![Transport::Bell, Transport::SameCpu, Transport::Stream],
        pairs: 40,
        records: 8,
        arena: 1 << 16,
        patience: Duration::from_millis(200),
        busy_poll: None,
    }
}

fn offer(transports: &[Transport], pairs: u32) -> Offer {
    Offer {
        transports: transports.to_vec(),
        pairs,
        patience: MOST,
    }
}

/// Both halves in this process.
fn meet(
    offer: &Offer,
) -> (
    Result<ServerConnection, Error>,
    Result<accel_transport::ClientConnection, Error>,
) {
    let (near, far) = PacketSocket::pair().unwrap();
    let offer = offer.clone();
    let client = std::thread::spawn(move || connect(near, &offer));
    (accept(far, &settings()), client.join().unwrap())
}

#[test]
fn the_first_wish_that_can_be_is_taken_with_as_many_pairs_as_there_are() {
    let (server, client) = meet(&offer(&[Transport::Spin, Transport::SameCpu, Transport::Bell], 100));
    let (server, client) = (server.unwrap(), client.unwrap());
    assert_eq!(
        (server.transport, client.transport),
        (Transport::SameCpu, Transport::SameCpu)
    );
    assert_eq!((server.ends.len(), client.ends.len()), (40, 40));
    assert_eq!(
        server.window.as_ref().unwrap().geometry(),
        client.window.as_ref().unwrap().0.geometry()
    );
    // More descriptors than one packet carries.
    for transport in [Transport::Bell, Transport::Stream] {
        let (server, client) = meet(&offer(&[transport], 37));
        let (mut server, mut client) = (server.unwrap(), client.unwrap());
        assert_eq!((server.ends.len(), client.ends.len()), (37, 37));
        let (mut near, mut far) = (client.ends.pop().unwrap(), server.ends.pop().unwrap());
        let serving = std::thread::spawn(move || {
            let request = far.receive(Some(MOST)).unwrap();
            far.finish(&request, Some(&request), MOST).unwrap();
            far.flush(MOST).unwrap();
        });
        near.call(&Record::default(), MOST).unwrap();
        serving.join().unwrap();
    }
}

/// Whoever goes on from a position finds the record there that was taken and not finished.
#[test]
fn what_is_worked_on_stays_in_its_ring() {
    let (server, client) = meet(&offer(&[Transport::Bell], 1));
    let (mut served, mut connected) = (server.unwrap(), client.unwrap());
    let (mut server, mut client) = (served.ends.remove(0), connected.ends.remove(0));
    let sent = std::thread::spawn(move || {
        for number in 0..100 {
            client.send(&Record::from_words([number; 8]), MOST).unwrap();
        }
        client.flush(MOST).unwrap();
        client
    });
    for number in 0..100 {
        server.receive(Some(MOST)).unwrap();
        let at = server.position().unwrap().incoming;
        assert_eq!(at.taken, number + 1);
        assert!(
            at.released <= number,
            "the slot of record {number} is its sender's already"
        );
    }
    drop(sent.join().unwrap());
}

#[test]
fn who_has_nothing_in_common_is_told_why() {
    for (transports, pairs, reason) in [
        (vec![Transport::Spin], 1, "[Spin]"),
        (vec![], 1, "has none"),
        (vec![Transport::Bell], 0, "no pairs"),
    ] {
        let (server, client) = meet(&offer(&transports, pairs));
        let told = client.unwrap_err().to_string();
        assert!(told.contains(reason) && told.contains("refused"), "{told}");
        assert!(matches!(server.unwrap_err(), Error::Protocol(Protocol::Refused(_))));
    }
    let (near, far) = PacketSocket::pair().unwrap();
    near.send(br#"{"versions":[7,9],"transports":["bell"],"pairs":1}"#, &[])
        .unwrap();
    let error = accept(far, &settings()).unwrap_err().to_string();
    assert!(error.contains("versions 7 to 9"), "{error}");
}

#[test]
fn a_client_that_greets_unsoundly_gets_nothing() {
    let said = |bytes: &[u8]| {
        let (near, far) = PacketSocket::pair().unwrap();
        near.send(bytes, &[]).unwrap();
        accept(far, &settings()).unwrap_err()
    };
    for bytes in [
        &b"{"[..],
        b"\xff\xfe",
        br#"{"versions":[1,1],"transports":["magic"],"pairs":1}"#,
        br#"{"pairs":-1}"#,
    ] {
        assert!(matches!(
            said(bytes),
            Error::Protocol(Protocol::Greeting { packet: "hello", .. })
        ));
    }
    let (near, far) = PacketSocket::pair().unwrap();
    assert!(matches!(
        accept(far, &settings()),
        Err(Error::Deadline { what: "hello", .. })
    ));
    drop(near);
    let (near, far) = PacketSocket::pair().unwrap();
    drop(near);
    assert!(matches!(accept(far, &settings()), Err(Error::PeerGone)));
    let (near, far) = PacketSocket::pair().unwrap();
    near.send(br#"{"versions":[1,1],"transports":["bell"],"pairs":1}"#, &[far.as_fd()])
        .unwrap();
    assert!(matches!(
        accept(far, &settings()),
        Err(Error::Protocol(Protocol::Greeting { .. }))
    ));
}

#[test]
fn a_server_that_lies_is_found_out() {
    let unsealed = || -> OwnedFd {
        let file = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        file
    };
    let empty = || base::memfd::sized("empty", 1 << 20).unwrap().into();
    let small = || Window::create(Geometry::new(1, 8, 0).unwrap()).unwrap().0.into();
    let said = |welcome: &str, fds: Vec<OwnedFd>| {
        let (near, far) = PacketSocket::pair().unwrap();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        far.send(welcome.as_bytes(), &fds).unwrap();
        let short = Offer {
            patience: Duration::from_millis(100),
            ..offer(&[Transport::SameCpu], 2)
        };
        let error = connect(near, &short).unwrap_err();
        drop(far);
        error.to_string()
    };
    let two = r#"{"accepted":{"transport":"same-cpu","pairs":2,"wake":"words","memory":"memfd","busy_poll_us":0}}"#;
    for (welcome, fds, words) in [
        (two, vec![unsealed()], "not sealed"),
        (two, vec![empty()], "no window"),
        (two, vec![small()], "2 pairs in a window of 1"),
        (two, vec![empty(), empty()], "2 descriptors came, 1 were due"),
        (two, vec![], "welcome did not come"),
        (
            r#"{"accepted":{"transport":"bell","pairs":2,"wake":"sockets","memory":"memfd","busy_poll_us":0}}"#,
            vec![],
            "not asked for",
        ),
        (
            r#"{"accepted":{"transport":"same-cpu","pairs":3,"wake":"words","memory":"memfd","busy_poll_us":0}}"#,
            vec![],
            "not asked for",
        ),
        ("hello", vec![], "unsound"),
    ] {
        let error = said(welcome, fds);
        assert!(error.contains(words), "{error} / {words}");
    }
}

#[test]
fn rings_that_are_overwritten_end_the_connection_with_the_numbers() {
    let (server, client) = meet(&offer(&[Transport::SameCpu], 1));
    let (mut server, client) = (server.unwrap(), client.unwrap());
    let mut end = server.ends.remove(0);
    let (window, _) = client.window.as_ref().unwrap();
    // The window's first pair is behind its header, and its first ring behind the bells; what is hostile knows that, too.
    let memory = accel_memory(window);
    memory.store_stamp(0, SEQUENCE_LIMIT | 5, std::sync::atomic::Ordering::Release);
    let error = end.receive(Some(MOST)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Protocol(Protocol::Ring(wire::ring::Error::Sequence { expected: 0, got: 5 }))
        ),
        "{error}"
    );

    let (server, client) = meet(&offer(&[Transport::SameCpu], 1));
    let (server, mut client) = (server.unwrap(), client.unwrap());
    let memory = accel_memory(server.window.as_ref().unwrap());
    memory.store_index(Index::Head, 99, std::sync::atomic::Ordering::Release);
    let mut end = client.ends.remove(0);
    let error = (0..9).find_map(|_| end.send(&Record::default(), MOST).err()).unwrap();
    assert!(
        matches!(
            error,
            Error::Protocol(Protocol::Ring(wire::ring::Error::Head { head: 99, .. }))
        ),
        "{error}"
    );
}

/// The memory of the first pair's submissions, as a peer has it that does not go by its ends.
fn accel_memory(window: &Window) -> RingMemory {
    let geometry = window.geometry();
    let whole = window.region();
    RingMemory::new(
        &whole
            .part(4096 + 512, whole.length() - geometry.arena() - 4096 - 512)
            .unwrap(),
        geometry.records(),
    )
    .unwrap()
}

#[test]
fn answers_to_something_else_are_found_out() {
    let (server, client) = meet(&offer(&[Transport::Stream], 1));
    let (mut server, mut client) = (server.unwrap(), client.unwrap());
    let mut end = server.ends.remove(0);
    let serving = std::thread::spawn(move || {
        let request = end.receive(Some(MOST)).unwrap();
        let other = request.with_sequence(request.sequence() + 7);
        end.finish(&other, Some(&request), MOST).unwrap();
        end.flush(MOST).unwrap();
    });
    let error = client.ends[0].call(&Record::default(), MOST).unwrap_err();
    assert!(
        matches!(error, Error::Protocol(Protocol::Answer { expected: 0, got: 7 })),
        "{error}"
    );
    serving.join().unwrap();
}

/// Both halves with somebody between them who has the memory as a file and the sockets, as a guest's agent has; and what hangs up.
fn meet_by_an_agent(
    transport: Transport,
    pairs: u32,
) -> (ServerConnection, Result<ClientConnection, Error>, PacketSocket) {
    let (near, agent) = PacketSocket::pair().unwrap();
    let offer = offer(&[Transport::SameCpu, transport], pairs);
    let client = std::thread::spawn(move || connect(near, &offer));
    agent.wait_to_receive(std::time::Instant::now() + MOST).unwrap();
    let (hello, _) = agent.receive().unwrap();

    let settings = Settings {
        transports: vec![transport],
        ..settings()
    };
    let agreed = Agreement::on(&hello, &settings).unwrap();
    assert_eq!((agreed.transport, agreed.pairs), (transport, pairs));
    // Nothing is sealed in it.
    let file = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    let window = transport.has_rings().then(|| {
        let region = accel_window::map_file(&file).unwrap();
        agreed.make_window(region, &settings).unwrap()
    });
    let sockets = (0..pairs)
        .map(|_| rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap());
    let (own, theirs): (Vec<_>, Vec<_>) = sockets.unzip();
    let (told, hung_up) = PacketSocket::pair().unwrap();
    let server = agreed.serve(window, own, told).unwrap();
    let mut fds: Vec<_> = transport.has_rings().then(|| file.as_fd()).into_iter().collect();
    fds.extend(theirs.iter().map(AsFd::as_fd));
    agent.send(&agreed.welcome_in_guest().unwrap(), &fds).unwrap();
    let client = client.join().unwrap();
    // The agent keeps its end for as long as the connection lasts.
    std::mem::forget(agent);
    (server, client, hung_up)
}

#[test]
fn an_agent_can_be_between_them() {
    for transport in [Transport::Spin, Transport::Bell, Transport::Stream] {
        let (mut server, client, hung_up) = meet_by_an_agent(transport, 2);
        let mut client = client.unwrap();
        let mut far = server.ends.pop().unwrap();
        let serving = std::thread::spawn(move || {
            for round in 0..3 {
                let request = far.receive(Some(MOST)).unwrap();
                // Long enough for its client to sleep.
                std::thread::sleep(Duration::from_millis(20 * round));
                far.finish(&request, Some(&request), MOST).unwrap();
                far.flush(MOST).unwrap();
            }
            far.receive(Some(MOST))
        });
        let near = client.ends.last_mut().unwrap();
        for _ in 0..3 {
            near.call(&Record::default(), MOST).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some((window, _)) = &client.window {
            // The rest of the file is the arena, as far as there is to be one.
            assert_eq!(window.geometry().arena(), 1 << 16);
        }
        // A server's threads learn of the client's end by what the agent says.
        assert!(!server.is_over());
        drop(hung_up);
        assert!(matches!(serving.join().unwrap(), Err(Error::PeerGone)));
        assert!(server.is_over());
    }
}
