//! Files of a machine that never ran: what is written is read, and what does not fit is refused.

use super::*;
use engine::VcpuState;
use machine::Shape;
use state::Saved;
use virtio::{DeviceState, TransportState};
use vm_memory::{Bytes, GuestAddress};

const SIZE: ByteSize = ByteSize::mib(32);

fn here() -> Fingerprint {
    Fingerprint {
        cpuid: 1,
        capabilities: 2,
        kernel: "6.1".into(),
        vmm: "0.1".into(),
    }
}

fn machine() -> MachineState {
    let own = Saved {
        kind: "rng".into(),
        version: 1,
        payload: b"{}".to_vec(),
    };
    let device = || DeviceState {
        transport: TransportState::default(),
        own: own.clone(),
    };
    MachineState {
        shape: Shape {
            cpus: 2,
            memory: SIZE.bytes(),
            devices: vec!["rng".into(), "root".into()],
        },
        vcpus: (0..2)
            .map(|id| VcpuState {
                id,
                tsc_khz: 7,
                ..VcpuState::default()
            })
            .collect(),
        devices: vec![device(), device()],
        ..MachineState::default()
    }
}

/// The two files of a machine with something in its memory.
fn files() -> (File, File) {
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let ram = Ram::allocate(SIZE).unwrap();
    ram.guest().write_obj(0x1234_u64, GuestAddress(0x7000)).unwrap();
    let image = ram.write_image(&memory, None).unwrap();
    let layers = Layers::single(Arc::new(memory.try_clone().unwrap()), image);
    store(&machine(), &MemoryFiles::new(SIZE, &layers), here(), &state).unwrap();
    (state, memory)
}

fn error(state: &File, memory: File, here: &Fingerprint) -> String {
    read(state, vec![memory], here).map(drop).unwrap_err().to_string()
}

#[test]
fn what_was_written_is_read() {
    let (state, memory) = files();
    let (read, ram) = read(&state, vec![memory], &here()).unwrap();
    assert_eq!(read, machine());
    assert_eq!(ram.guest().read_obj::<u64>(GuestAddress(0x7000)).unwrap(), 0x1234);
}

#[test]
fn another_host_is_refused() {
    let (state, memory) = files();
    let elsewhere = Fingerprint {
        kernel: "5.10".into(),
        ..here()
    };
    let error = error(&state, memory, &elsewhere);
    assert!(error.contains("another host kernel (6.1; here 5.10)"), "{error}");
}

#[test]
fn damaged_files_and_files_of_two_snapshots_are_refused() {
    let (state, memory) = files();
    let length = state.metadata().unwrap().len();
    let change = |at: u64, byte: u8| state.write_all_at(&[byte], at).unwrap();
    change(length - 5, 0xff);
    let damaged = error(&state, memory.try_clone().unwrap(), &here());
    assert!(damaged.contains("is damaged"), "{damaged}");
    state.set_len(length - 100).unwrap();
    let short = error(&state, memory, &here());
    assert!(short.contains("cut short"), "{short}");

    let (state, memory) = files();
    memory.set_len(SIZE.bytes() - 4096).unwrap();
    let short = error(&state, memory, &here());
    assert!(short.contains("memory file has"), "{short}");

    let (state, _) = files();
    let (_, other) = files();
    other.write_all_at(&[9], 0x7000).unwrap();
    let differs = error(&state, other, &here());
    assert!(differs.contains("differs from what was saved in page 7"), "{differs}");
}

#[test]
fn missing_and_additional_sections_are_told() {
    let (state, _) = files();
    let mut bytes = vec![0; usize::try_from(state.metadata().unwrap().len()).unwrap()];
    state.read_exact_at(&mut bytes, 0).unwrap();
    let whole = Container::parse(&bytes).unwrap();

    let mut fewer = whole.clone();
    fewer.take_saved("device/root/own").unwrap();
    let error = parse_state(&fewer.to_bytes().unwrap()).unwrap_err().to_string();
    assert!(error.contains("no state of `device/root/own`"), "{error}");

    let mut more = whole;
    more.put("vcpu9", &VcpuState::default()).unwrap();
    let error = parse_state(&more.to_bytes().unwrap()).unwrap_err().to_string();
    assert!(error.contains("`vcpu9`, which this VM does not have"), "{error}");
}

#[test]
fn states_go_to_empty_files_only() {
    let (state, _) = files();
    assert!(matches!(empty(&state), Err(SnapshotError::NotEmpty(_))));
}

#[test]
fn memory_in_two_files_is_read_from_both() {
    let (state, memory) = files();
    let (saved, ram) = read(&state, vec![memory.try_clone().unwrap()], &here()).unwrap();
    ram.guest().write_obj(0x5678_u64, GuestAddress(0x9000)).unwrap();
    let layers = ram.layers().unwrap();
    assert!(same_files(layers, &[memory.try_clone().unwrap()]).unwrap());
    for others in [vec![], vec![state.try_clone().unwrap()]] {
        assert!(!same_files(layers, &others).unwrap());
    }
    let file = Arc::new(tempfile::tempfile().unwrap());
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let Written::Changes(image, runs) = ram.write_changes(&file, Some(&pagemap)).unwrap() else {
        panic!("all was written")
    };
    let second = file.try_clone().unwrap();
    let layers = layers.with(Layer { file, image }, &runs);
    let state = tempfile::tempfile().unwrap();
    store(&saved, &MemoryFiles::new(SIZE, &layers), here(), &state).unwrap();
    let (_, again) = read(&state, vec![memory.try_clone().unwrap(), second], &here()).unwrap();
    let word = |at| again.guest().read_obj::<u64>(GuestAddress(at)).unwrap();
    assert_eq!((word(0x7000), word(0x9000)), (0x1234, 0x5678));
    let error = error(&state, memory, &here());
    assert!(error.contains("is in 2 files, 1 were given"), "{error}");
}
