//! The device with the conformance kit's driver, and what it is made of.

use std::os::fd::OwnedFd;

use super::*;
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::{Request, Subject, run};
use vm_memory::{Bytes, MemoryRegionAddress};
use vmm_api::FdRef;

const START: u64 = 512 << 30;

fn created(file: File, config: &PmemConfig) -> Result<PersistentMemory, CreateError> {
    created_of(vec![OwnedFd::from(file)], config)
}

fn created_of(fds: Vec<OwnedFd>, config: &PmemConfig) -> Result<PersistentMemory, CreateError> {
    let spec = DeviceSpec::new("window", config).unwrap();
    let context = DeviceContext {
        id: "window",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    MODULE.create(&spec, &mut FdTable::new(fds), &context, START)
}

fn config(private: bool) -> PmemConfig {
    PmemConfig {
        file: FdRef(0),
        private,
        parts: Vec::new(),
    }
}

fn file() -> File {
    base::memfd::sized("window", 2 << 20).unwrap()
}

fn make() -> Box<dyn VirtioDevice> {
    created(file(), &config(false)).unwrap().device
}

#[test]
fn it_conforms() {
    let request = Request {
        queue: 0,
        readable: vec![0; 4],
        writable: 4,
    };
    run(&Subject::new(make, request)).unwrap();
}

#[test]
fn the_driver_is_told_where_the_memory_is() {
    let PersistentMemory { device, region } = created(file(), &config(true)).unwrap();
    let mut bytes = [0xff; 20];
    device.read_config(0, &mut bytes);
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), START);
    assert_eq!(u64::from_le_bytes(bytes[8..16].try_into().unwrap()), 2 << 20);
    assert_eq!(bytes[16..], [0xff; 4], "there are no more fields");
    device.read_config(usize::MAX, &mut bytes);
    assert_eq!((region.start_addr().raw_value(), region.len()), (START, 2 << 20));
}

/// The answer to a request of these bytes.
fn answered(private: bool, request: &[u8], room: usize) -> Vec<u8> {
    let mut driver = Driver::new(created(file(), &config(private)).unwrap().device);
    driver.start();
    let pushed = driver.push(0, &[request], &[room]);
    driver.kick(0);
    let written = driver.wait_used(0).unwrap().written as usize;
    driver.bytes(pushed.writable[0])[..written].to_vec()
}

#[test]
fn a_flush_is_answered_and_nothing_else_is_one() {
    for private in [false, true] {
        assert_eq!(answered(private, &[0; 4], 4), [0; 4]);
        assert_eq!(answered(private, &[1, 0, 0, 0], 4), [1, 0, 0, 0], "another request");
        assert_eq!(answered(private, &[0; 2], 4), [1, 0, 0, 0], "half a request");
        assert_eq!(answered(private, &[0; 4], 2), [0; 0], "no room for the answer");
    }
}

#[test]
fn what_is_no_file_of_memory_is_refused() {
    let small = base::memfd::sized("window", 4096).unwrap();
    let told = created(small, &config(false)).err().unwrap().to_string();
    assert!(told.contains("2 MiB"), "{told}");
    let missing = PmemConfig {
        file: FdRef(1),
        private: false,
        parts: Vec::new(),
    };
    assert!(matches!(created(file(), &missing), Err(CreateError::MissingFd(1))));
    let read_only = File::open("/proc/self/exe").unwrap();
    assert!(created(read_only, &config(false)).is_err());
}

#[test]
fn a_file_that_all_see_is_where_it_was_and_a_private_one_is_in_no_snapshot() {
    let saved = make().save().unwrap();
    make().restore(&saved).unwrap();
    let longer = base::memfd::sized("window", 4 << 20).unwrap();
    let refused = created(longer, &config(false)).unwrap().device.restore(&saved);
    let told = refused.unwrap_err().to_string();
    assert!(told.contains("2097152 bytes") && told.contains("4194304"), "{told}");
    let private = created(file(), &config(true)).unwrap().device;
    assert!(matches!(private.save(), Err(DeviceError::NotSaved)));
}

#[test]
fn a_part_is_what_another_machine_has_and_is_in_no_snapshot() {
    let window = file();
    let parts = |count: usize| {
        let part = |number: usize| PmemPartConfig {
            file: FdRef(u32::try_from(number).unwrap() + 1),
            offset: 0,
            at: 4096 * number as u64,
            length: 4096,
        };
        (0..count).map(part).collect::<Vec<_>>()
    };
    let fds = |count: usize| {
        let files = [file()]
            .into_iter()
            .chain((0..count).map(|_| window.try_clone().unwrap()));
        files.map(OwnedFd::from).collect::<Vec<_>>()
    };
    let shared = PmemConfig {
        parts: parts(1),
        ..config(false)
    };
    let theirs = created(window.try_clone().unwrap(), &config(false)).unwrap().region;
    let PersistentMemory { device, region } = created_of(fds(1), &shared).unwrap();
    theirs.write_obj(0x1234_u16, MemoryRegionAddress(100)).unwrap();
    assert_eq!(region.read_obj::<u16>(MemoryRegionAddress(100)).unwrap(), 0x1234);
    assert!(matches!(device.save(), Err(DeviceError::NotSaved)));
    // Wrong ones.
    assert!(matches!(created_of(fds(0), &shared), Err(CreateError::MissingFd(1))));
    let private = PmemConfig {
        private: true,
        ..shared.clone()
    };
    let many = PmemConfig {
        parts: parts(MAX_PMEM_PARTS + 1),
        ..config(false)
    };
    for (config, count) in [(private, 1), (many, MAX_PMEM_PARTS + 1)] {
        let told = created_of(fds(count), &config).err().unwrap().to_string();
        assert!(told.contains("at most 16"), "{told}");
    }
    let most = PmemConfig {
        parts: parts(MAX_PMEM_PARTS),
        ..config(false)
    };
    assert!(created_of(fds(MAX_PMEM_PARTS), &most).is_ok());
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    let state = PmemState {
        start: START,
        size: 2 << 20,
    };
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &state);
}
