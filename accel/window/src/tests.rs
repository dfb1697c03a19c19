//! What windows are to be, whatever is in the memory, and servers that end by `kill -9`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use base::Mapping;
use wire::ring::{Record, Region};

use super::*;

fn geometry() -> Geometry {
    Geometry::new(3, 8, 64 << 10).unwrap()
}

/// A window and a second mapping of it, as another process has it.
fn made() -> (Window, Region) {
    let (file, window) = Window::create(geometry()).unwrap();
    (window, map(&file).unwrap())
}

#[test]
fn both_sides_see_the_same_rings_and_bytes() {
    let (server, region) = made();
    let (client, version) = Window::open(region, 0..=7).unwrap();
    assert_eq!((client.geometry(), version), (geometry(), 1));
    for pair in 0..3 {
        let (mut near, mut far) = (client.client_pair(pair).unwrap(), server.server_pair(pair).unwrap());
        let record = Record::from_words([u64::from(pair); 8]);
        assert_eq!(near.submissions.push(&record).unwrap(), Some(0));
        let _bell = near.submissions.publish();
        let asked = far.submissions.pop().unwrap().unwrap();
        assert_eq!(asked, record.with_sequence(0));
        far.completions.push(&record.with_sequence(77)).unwrap();
        let _bell = far.completions.publish();
        assert_eq!(near.completions.pop().unwrap().unwrap().sequence(), 77);
        for side in [Side::Client, Side::Server] {
            client.bell(pair, side).unwrap().store(9 + pair, Ordering::Relaxed);
            assert_eq!(server.bell(pair, side).unwrap().load(Ordering::Relaxed), 9 + pair);
        }
        client.client_cpu(pair).unwrap().store(5, Ordering::Relaxed);
        assert_eq!(server.client_cpu(pair).unwrap().load(Ordering::Relaxed), 5);
    }
    client.slice(60 << 10, 4096).unwrap().write(4090, b"at end").unwrap();
    let mut bytes = [0; 6];
    server.slice(65_530, 6).unwrap().read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"at end");
    assert!(matches!(client.client_pair(3), Err(Error::Pair { pair: 3, pairs: 3 })));
    assert!(client.bell(u32::MAX, Side::Client).is_err());
}

#[test]
fn slices_are_within_the_arena_however_large_the_numbers_are() {
    let (window, _) = made();
    let size = geometry().arena();
    for (offset, length) in [
        (size, 1),
        (0, size + 1),
        (u64::MAX, 1),
        (1, u64::MAX),
        (u64::MAX, u64::MAX),
        (size - 1, 2),
    ] {
        let error = window.slice(offset, length).unwrap_err();
        assert!(
            matches!(error, Error::Ring(wire::ring::Error::Bounds { available, .. }) if available == size),
            "{error}"
        );
    }
    assert_eq!(window.slice(size, 0).unwrap().length(), 0);
    assert_eq!(window.slice(0, size).unwrap().length(), size);
}

#[test]
fn parts_of_a_window_are_apart() {
    for (pairs, records) in [(1, 2), (3, 8), (5, 256), (1024, 4)] {
        let geometry = Geometry::new(pairs, records, 4096).unwrap();
        assert!(geometry.stride() >= Geometry::PAIR_HEADER + 2 * geometry.ring());
        assert_eq!(geometry.pair_at(0), 4096);
        assert!(geometry.arena_at().is_multiple_of(4096));
        assert_eq!(geometry.length(), 4096 + u64::from(pairs) * geometry.stride() + 4096);
    }
    for (pairs, records, arena) in [
        (0, 8, 0),
        (1025, 8, 0),
        (1, 7, 0),
        (1, 1, 0),
        (1, 8, 100),
        (1, 8, (1 << 40) + 4096),
        (1, 8, u64::MAX),
    ] {
        assert!(matches!(
            Geometry::new(pairs, records, arena),
            Err(Error::Geometry { .. })
        ));
    }
}

#[test]
fn what_is_no_window_is_refused() {
    let (server, region) = made();
    let refused = |region: &Region| Window::open(region.clone(), VERSIONS).unwrap_err();
    assert!(matches!(refused(&region.part(0, 100).unwrap()), Error::TooSmall { .. }));
    let short = geometry().length() - 4096;
    assert!(
        matches!(refused(&region.part(0, short).unwrap()), Error::TooSmall { needed, available } if needed == available + 4096)
    );
    let theirs = Window::open(region.clone(), 2..=3).unwrap_err();
    assert!(
        matches!(theirs, Error::Version { .. }) && theirs.to_string().contains("1..=1"),
        "{theirs}"
    );
    for (at, value) in [(8, 9), (12, 0), (16, u32::MAX), (20, 7), (24, 4095), (28, u32::MAX)] {
        let mut before = [0; 4];
        region.read(at, &mut before).unwrap();
        region.write(at, &u32::to_le_bytes(value)).unwrap();
        let error = refused(&region);
        assert!(
            matches!(error, Error::Version { .. } | Error::Geometry { .. }),
            "{at}: {error}"
        );
        region.write(at, &before).unwrap();
    }
    Window::open(region.clone(), VERSIONS).unwrap();
    region.write(0, b"B").unwrap();
    region.write(1, b"s").unwrap();
    assert!(matches!(refused(&region), Error::NoWindow([b'B', b's', b'L', ..])));
    drop(server);
}

#[test]
fn headers_of_any_bytes_are_refused_or_sound() {
    let (_, region) = made();
    let mut random = 3_u64;
    let (mut refused, mut sound) = (0, 0);
    for _ in 0..20_000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let at = 8 + (random >> 33) % 24;
        let [.., byte] = random
            .to_be_bytes()
            .map(|byte| byte & [0xff, 0x0f, 0x03][usize::from(byte % 3)]);
        region.write(at, &[byte]).unwrap();
        match Window::open(region.clone(), 0..=u32::MAX) {
            Ok((window, _)) => {
                assert!(window.geometry().length() <= region.length());
                window.client_pair(window.geometry().pairs() - 1).unwrap();
                sound += 1;
            }
            Err(_) => {
                refused += 1;
                // Back to a good one now and then.
                if random.is_multiple_of(5) {
                    Window::format(region.clone(), geometry()).unwrap();
                }
            }
        }
    }
    assert!(refused > 1000 && sound > 1000, "{refused} refused, {sound} sound");
}

#[test]
fn memory_that_could_shrink_is_not_mapped() {
    let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open, 1 << 20).unwrap();
    assert!(matches!(map(&open), Err(Error::Unsealed)));
    let (pipe, _writer) = std::io::pipe().unwrap();
    assert!(matches!(map(&pipe), Err(Error::Unsealed)));
}

#[test]
fn another_server_is_another_time() {
    let (window, region) = made();
    assert!(window.life().unwrap().is_over(), "nobody holds it");
    let holder = Holder::new(&window).unwrap();
    let (client, _) = Window::open(region.clone(), VERSIONS).unwrap();
    let life = client.life().unwrap();
    assert!(!life.is_over());
    drop(holder);
    assert!(life.is_over());
    let mut pair = client.client_pair(0).unwrap();
    pair.submissions.push(&Record::default()).unwrap();
    let _bell = pair.submissions.publish();
    let next = Window::format(region, geometry()).unwrap();
    let _holder = Holder::new(&next).unwrap();
    assert!(life.is_over(), "it is of another server");
    let later = client.life().unwrap();
    assert!(!later.is_over());
    assert_eq!(later.epoch(), life.epoch() + 1);
    assert_eq!(
        next.server_pair(0).unwrap().submissions.pop().unwrap(),
        None,
        "rings begin anew"
    );
}

/// In the test below the same program again, as a server that holds the window which it inherits as its standard input, until it is
/// killed.
const SERVER: &str = "BASALT_TEST_HOLDER";

#[test]
fn a_server_that_is_killed_is_over_at_once() {
    if std::env::var_os(SERVER).is_some() {
        let region = map(std::io::stdin()).unwrap();
        let window = Window::format(region, geometry()).unwrap();
        let _holder = Holder::new(&window).unwrap();
        loop {
            std::thread::park();
        }
    }
    let length = geometry().length();
    let file = base::memfd::sized("window", length).unwrap();
    let name = "tests::a_server_that_is_killed_is_over_at_once";
    for _ in 0..5 {
        let region = Region::new(Mapping::new(&file, usize::try_from(length).unwrap()).unwrap());
        let before = region.word(128).unwrap().load(Ordering::Relaxed);
        let mut server = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(SERVER, "1")
            .stdin(OwnedFd::from(file.try_clone().unwrap()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        let life = loop {
            assert!(begun.elapsed() < Duration::from_secs(60), "no server came up");
            std::thread::sleep(Duration::from_millis(1));
            if let Ok((window, _)) = Window::open(region.clone(), VERSIONS) {
                let life = window.life().unwrap();
                if life.epoch() > before && !life.is_over() {
                    break life;
                }
            }
        };
        server.kill().unwrap();
        server.wait().unwrap();
        // Whoever waits for the process hears of it after its threads have ended.
        assert!(
            life.is_over(),
            "{:#x}",
            region.word(132).unwrap().load(Ordering::Relaxed)
        );
        assert!(file.as_raw_fd() >= 0);
    }
}
