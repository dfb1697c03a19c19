//! What every virtio device has to hold to, by the conformance kit, and what configuration is refused.

mod guest;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use device::FdTable;
use guest::{Packet, RST};
use observe::Registry;
use virtio::conformance::{Request, Subject, run};
use vmm_api::{FdRef, devices::VsockConfig};

#[test]
fn the_kit_finds_nothing() {
    // A RST for nobody is taken and not answered.
    let request = Request {
        queue: 1,
        readable: Packet::new(RST, 1, 2).bytes(),
        writable: 0,
    };
    let subject = Subject::new(|| guest::device(&Registry::new()).0, request);
    let count = run(&subject).unwrap();
    assert!(count > 10, "{count} checks");
}

#[test]
fn the_configuration_space_has_the_cid() {
    let (device, ..) = guest::device(&Registry::new());
    let mut bytes = [0xff; 8];
    device.read_config(0, &mut bytes);
    assert_eq!(bytes, 3_u64.to_le_bytes());
    let mut tail = [0; 4];
    device.read_config(6, &mut tail);
    assert_eq!(tail, [0; 4]);
}

#[test]
fn reserved_context_ids_and_wrong_sockets_are_refused() {
    let config = |cid, listener, acceptor| VsockConfig {
        cid,
        listener,
        acceptor,
        sinks: Vec::new(),
    };
    let metrics = Registry::new();
    for cid in [0, 1, 2, u32::MAX] {
        let error = guest::create(&config(cid, None, None), &mut FdTable::default(), &metrics)
            .err()
            .unwrap();
        assert!(error.to_string().contains("context id"), "{error}");
    }
    let some_socket = || FdTable::new(vec![OwnedFd::from(UnixStream::pair().unwrap().0)]);
    for config in [config(3, Some(FdRef(0)), None), config(3, None, Some(FdRef(0)))] {
        let error = guest::create(&config, &mut some_socket(), &metrics).err().unwrap();
        assert!(error.to_string().contains("is not a"), "{error}");
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(guest::create(&config, &mut FdTable::new(vec![file]), &metrics).is_err());
        assert!(guest::create(&config, &mut FdTable::default(), &metrics).is_err());
    }
    assert!(guest::create(&config(3, None, None), &mut FdTable::default(), &metrics).is_ok());
}
