//! The device against the conformance kit, and what a driver sees of a directory.

mod message;
mod shared;

use fuse::abi::op;
use message::request;
use shared::{config, make};
use virtio::conformance::driver::Driver;
use virtio::conformance::{Request, Subject, run};
use vmm_api::devices::{FsConfig, FsDirectory, FsSource};

#[test]
fn it_conforms() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    // STATFS: 16 bytes of header, 80 of numbers.
    let request = Request {
        queue: 1,
        readable: request(op::STATFS, 1, &[]),
        writable: 96,
    };
    run(&Subject::new(move || make(&config(), &path).unwrap(), request)).unwrap();
}

/// Without a directory.
fn dormant() -> FsConfig {
    FsConfig {
        source: None,
        ..config()
    }
}

#[test]
fn without_a_directory_it_conforms_too() {
    let request = Request {
        queue: 1,
        readable: request(op::STATFS, 1, &[]),
        writable: 96,
    };
    run(&Subject::new(move || make(&dormant(), "/".as_ref()).unwrap(), request)).unwrap();
}

#[test]
fn without_a_directory_every_request_is_refused() {
    let mut driver = Driver::new(make(&dormant(), "/".as_ref()).unwrap());
    driver.start();
    let pushed = driver.push(1, &[&request(op::STATFS, 1, &[])], &[96]);
    driver.kick(1);
    assert_eq!(driver.wait_used(1).unwrap().written, 16);
    let reply = driver.bytes(pushed.writable[0]);
    assert_eq!(word(&reply, 4).cast_signed(), -rustix::io::Errno::NODEV.raw_os_error());
}

#[test]
fn one_that_nobody_has_asked_anything_goes_on_with_another_directory() {
    let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(new.path().join("file"), "content").unwrap();
    for before in [dormant(), config()] {
        let mut driver = Driver::new(make(&before, old.path()).unwrap());
        driver.start();
        driver.migrate(make(&config(), new.path()).unwrap()).unwrap();
        driver.push(1, &[&request(op::LOOKUP, 1, b"file\0")], &[144]);
        driver.kick(1);
        assert_eq!(driver.wait_used(1).unwrap().written, 144);
    }
    let other = FsConfig {
        tag: "another".into(),
        ..dormant()
    };
    let mut driver = Driver::new(make(&other, old.path()).unwrap());
    driver.start();
    let refused = driver.migrate(make(&config(), new.path()).unwrap()).unwrap_err();
    assert!(refused.to_string().contains("properties"), "{refused}");
}

/// The size of a file that the driver knows by this number (`GETATTR`), or the error.
fn size(driver: &mut Driver, node: u64) -> Result<u32, i32> {
    let pushed = driver.push(1, &[&request(op::GETATTR, node, &[0; 16])], &[120]);
    driver.kick(1);
    driver.wait_used(1).unwrap();
    let reply = driver.bytes(pushed.writable[0]);
    match word(&reply, 4).cast_signed() {
        0 => Ok(word(&reply, 16 + 16 + 8)),
        error => Err(-error),
    }
}

#[test]
fn what_the_guest_knows_of_it_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "content").unwrap();
    let mut driver = Driver::new(make(&config(), directory.path()).unwrap());
    driver.start();
    let pushed = driver.push(1, &[&request(op::LOOKUP, 1, b"file\0")], &[144]);
    driver.kick(1);
    driver.wait_used(1).unwrap();
    let reply = driver.bytes(pushed.writable[0]);
    let node = u64::from_le_bytes(reply[16..24].try_into().unwrap());
    assert_eq!(size(&mut driver, node), Ok(7));
    // It goes on itself, and as another.
    driver.device().pause();
    driver.device().save().unwrap();
    driver.device().resume().unwrap();
    assert_eq!(size(&mut driver, node), Ok(7));
    driver.migrate(make(&config(), directory.path()).unwrap()).unwrap();
    assert_eq!(size(&mut driver, node), Ok(7));
    assert_eq!(
        size(&mut driver, node + 1),
        Err(rustix::io::Errno::STALE.raw_os_error())
    );
}

#[test]
fn one_that_is_served_elsewhere_goes_on_only_before_it_was_asked() {
    let directory = tempfile::tempdir().unwrap();
    let elsewhere = || {
        let config = FsConfig {
            source: Some(FsSource::Stream(vmm_api::FdRef(0))),
            ..config()
        };
        make(&config, directory.path()).unwrap()
    };
    let mut driver = Driver::new(elsewhere());
    driver.start();
    driver.migrate(elsewhere()).unwrap();
    // The descriptor is no stream: whatever is asked fails.
    let pushed = driver.push(1, &[&request(op::STATFS, 1, &[])], &[96]);
    driver.kick(1);
    driver.wait_used(1).unwrap();
    let error = word(&driver.bytes(pushed.writable[0]), 4).cast_signed();
    assert_eq!(error, -rustix::io::Errno::IO.raw_os_error());
    driver.device().pause();
    let error = driver.device().save().unwrap_err().to_string();
    assert!(error.contains("served on another machine"), "{error}");
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

#[test]
fn requests_in_pieces_have_replies_in_pieces() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "content").unwrap();
    let mut driver = Driver::new(make(&config(), directory.path()).unwrap());
    driver.start();
    let whole = request(op::LOOKUP, 1, b"file\0");
    let pushed = driver.push(1, &[&whole[..10], &whole[10..41], &whole[41..]], &[16, 100, 28]);
    driver.kick(1);
    assert_eq!(driver.wait_used(1).unwrap().written, 144);
    let reply: Vec<u8> = pushed
        .writable
        .into_iter()
        .flat_map(|buffer| driver.bytes(buffer))
        .collect();
    assert_eq!((word(&reply, 0), word(&reply, 4)), (144, 0));
    // The file's size, in the attributes behind the entry.
    assert_eq!(word(&reply, 16 + 40 + 8), 7);
    // Both queues lead to the same directory: it is forgotten by the other one.
    let node = reply[16..24].to_vec();
    let node = u64::from_le_bytes(node.try_into().unwrap());
    driver.push(0, &[&request(op::FORGET, node, &1_u64.to_le_bytes())], &[]);
    driver.kick(0);
    assert_eq!(driver.wait_used(0).unwrap().written, 0);
    let pushed = driver.push(1, &[&request(op::GETATTR, node, &[0; 16])], &[120]);
    driver.kick(1);
    assert_eq!(driver.wait_used(1).unwrap().written, 16);
    let reply = driver.bytes(pushed.writable[0]);
    assert_eq!(word(&reply, 4).cast_signed(), -rustix::io::Errno::STALE.raw_os_error());
}

#[test]
fn garbage_has_no_reply_and_the_next_request_has() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(make(&config(), directory.path()).unwrap());
    driver.start();
    let long = vec![0xff; fuse::MAX_REQUEST + 1];
    for garbage in [&[][..], &[1; 39], &long] {
        driver.push(1, &[garbage], &[64]);
        driver.kick(1);
        assert_eq!(driver.wait_used(1).unwrap().written, 0, "{} bytes", garbage.len());
    }
    driver.push(1, &[&request(op::STATFS, 1, &[])], &[96]);
    driver.kick(1);
    assert_eq!(driver.wait_used(1).unwrap().written, 96);
}

#[test]
fn its_tag_and_its_one_request_queue_are_in_its_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let device = make(&config(), directory.path()).unwrap();
    let mut bytes = [0; 44];
    device.read_config(0, &mut bytes);
    assert_eq!(&bytes[..7], b"shared\0");
    assert_eq!(bytes[36..], [1, 0, 0, 0, 0, 0, 0, 0]);
    device.read_config(usize::MAX, &mut bytes);
}

fn directory_of(config: &mut FsConfig) -> &mut FsDirectory {
    match &mut config.source {
        Some(FsSource::Directory(directory)) => directory,
        _ => panic!("it is served elsewhere"),
    }
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let refused = |change: fn(&mut FsConfig)| {
        let mut config = config();
        change(&mut config);
        make(&config, directory.path()).err().unwrap().to_string()
    };
    assert!(refused(|c| c.tag = String::new()).contains("tag"));
    assert!(refused(|c| c.tag = "x".repeat(37)).contains("36"));
    assert!(refused(|c| c.tag = "a\0b".into()).contains("tag"));
    assert!(refused(|c| directory_of(c).max_files = 1).contains("16"));
    assert!(refused(|c| directory_of(c).directory = vmm_api::FdRef(9)).contains('9'));
    assert!(refused(|c| c.source = Some(FsSource::Stream(vmm_api::FdRef(9)))).contains('9'));
}
