//! Files of a machine that never ran: what is written is read, and what does not fit is refused.

use super::*;
use base::ByteSize;
use engine::{CpuModel, CpuidEntry, VcpuState};
use machine::Shape;
use state::Saved;
use virtio::{DeviceState, TransportState};
use vm_memory::{Bytes, GuestAddress};

const SIZE: ByteSize = ByteSize::mib(32);

fn fingerprint() -> Fingerprint {
    Fingerprint {
        cpuid: 1,
        capabilities: 2,
        kernel: "6.1".into(),
        vmm: "0.1".into(),
    }
}

/// CPUID.7:EBX, AVX2.
const AVX2: u32 = 1 << 5;

/// A processor of one leaf.
fn leaves(features: u32) -> Vec<CpuidEntry> {
    vec![CpuidEntry {
        function: 7,
        registers: [0, features, 0, 0],
        ..CpuidEntry::default()
    }]
}

fn here() -> HostTraits {
    HostTraits {
        fingerprint: fingerprint(),
        cpuid: leaves(AVX2),
        former_cpuid: 77,
        asked_by_vcpus: 0,
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
            hotplug_memory: 0,
            hotplug_region: 0,
            devices: vec!["rng".into(), "root".into()],
            cpu: CpuModel::Host,
        },
        vcpus: (0..2)
            .map(|id| VcpuState {
                id,
                tsc_khz: 7,
                cpuid: leaves(AVX2),
                ..VcpuState::default()
            })
            .collect(),
        devices: vec![device(), device()],
        ..MachineState::default()
    }
}

/// The two files of a machine with something in its memory.
fn files() -> (File, File) {
    files_of(&machine())
}

fn files_of(saved: &MachineState) -> (File, File) {
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let ram = Ram::allocate(SIZE).unwrap();
    ram.guest().write_obj(0x1234_u64, GuestAddress(0x7000)).unwrap();
    let image = ram.write_image(&memory, None).unwrap();
    let layers = Layers::single(Arc::new(memory.try_clone().unwrap()), image);
    store(saved, &MemoryFiles::new(SIZE, &layers), fingerprint(), &state).unwrap();
    (state, memory)
}

fn error(state: &File, memory: File, here: &HostTraits) -> String {
    read(state, vec![memory], here, Ram::from_layers)
        .map(drop)
        .unwrap_err()
        .to_string()
}

#[test]
fn what_was_written_is_read() {
    let (state, memory) = files();
    let (read, ram) = read(&state, vec![memory], &here(), Ram::from_layers).unwrap();
    assert_eq!(read, machine());
    assert_eq!(ram.guest().read_obj::<u64>(GuestAddress(0x7000)).unwrap(), 0x1234);
}

#[test]
fn another_host_is_refused() {
    let (state, memory) = files();
    let mut elsewhere = here();
    elsewhere.fingerprint.kernel = "5.10".into();
    let other = error(&state, memory.try_clone().unwrap(), &elsewhere);
    assert!(other.contains("another host kernel (6.1; here 5.10)"), "{other}");
    let mut elsewhere = here();
    elsewhere.fingerprint.cpuid = 2;
    let same = error(&state, memory.try_clone().unwrap(), &elsewhere);
    assert!(same.contains("another set of CPU features"), "{same}");
    // One that a former version has taken on this host.
    elsewhere.former_cpuid = fingerprint().cpuid;
    read(&state, vec![memory.try_clone().unwrap()], &elsewhere, Ram::from_layers).unwrap();
    elsewhere.former_cpuid = 77;
    elsewhere.cpuid = leaves(0);
    let less = error(&state, memory, &elsewhere);
    assert!(less.starts_with("this host's CPU lacks avx2, which"), "{less}");
}

#[test]
fn a_cpu_model_is_restored_where_its_features_are() {
    let mut portable = machine();
    portable.shape.cpu = CpuModel::V3;
    let elsewhere = |features| {
        let fingerprint = Fingerprint {
            cpuid: 2,
            capabilities: 3,
            kernel: "5.10".into(),
            ..fingerprint()
        };
        let cpuid = leaves(features);
        HostTraits {
            fingerprint,
            cpuid,
            former_cpuid: 77,
            asked_by_vcpus: 0,
        }
    };
    let (state, memory) = files_of(&portable);
    let (found, _) = read(
        &state,
        vec![memory.try_clone().unwrap()],
        &elsewhere(AVX2 | 1),
        Ram::from_layers,
    )
    .unwrap();
    assert_eq!(found, portable);
    let refused = |here| error(&state, memory.try_clone().unwrap(), &here);
    let less = refused(elsewhere(1));
    assert!(less.starts_with("this host's CPU lacks avx2, which"), "{less}");
    let mut other = elsewhere(AVX2);
    other.fingerprint.capabilities = 1;
    let less = refused(other);
    assert!(less.contains("KVM lacks capabilities (0x2)"), "{less}");
    let mut other = elsewhere(AVX2 | 1);
    (other.fingerprint.capabilities, other.asked_by_vcpus) = (1, 2);
    let (found, _) = read(&state, vec![memory.try_clone().unwrap()], &other, Ram::from_layers).unwrap();
    assert_eq!(found, portable, "its vCPUs ask for what they need of that");
    let mut other = elsewhere(AVX2);
    other.fingerprint.vmm = "9".into();
    let program = refused(other);
    assert!(program.contains("another VMM (0.1; here 9)"), "{program}");
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
fn memory_that_can_be_plugged_is_read_where_it_was_and_only_with_its_size() {
    let mut saved = machine();
    saved.shape.hotplug_memory = 128 << 20;
    let size = saved.shape.memory_size();
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let ram = Ram::allocate(size).unwrap();
    let region = ram.hotplug().unwrap();
    ram.guest()
        .write_obj(0x9abc_u64, GuestAddress(region.start + 0x5000))
        .unwrap();
    let image = ram.write_image(&memory, None).unwrap();
    let layers = Layers::single(Arc::new(memory.try_clone().unwrap()), image);
    let files = MemoryFiles::new(size.all(), &layers);
    store(&saved, &files, fingerprint(), &state).unwrap();
    let (found, ram) = read(&state, vec![memory.try_clone().unwrap()], &here(), Ram::from_layers).unwrap();
    assert_eq!((found, ram.hotplug()), (saved.clone(), Some(region)));
    let word = ram
        .guest()
        .read_obj::<u64>(GuestAddress(region.start + 0x5000))
        .unwrap();
    assert_eq!(word, 0x9abc);
    // A state of a machine that had less of it.
    saved.shape.hotplug_memory = 64 << 20;
    let state = tempfile::tempfile().unwrap();
    store(&saved, &files, fingerprint(), &state).unwrap();
    let other = error(&state, memory, &here());
    assert!(
        other.contains("96 MiB of memory were saved, there are 160 MiB"),
        "{other}"
    );
}

#[test]
fn one_that_had_addresses_for_memory_goes_on_with_as_much_as_is_asked_for() {
    let mut saved = machine();
    saved.shape.hotplug_region = 128 << 30;
    let size = saved.shape.memory_size();
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let image = Ram::allocate(size).unwrap().write_image(&memory, None).unwrap();
    let layers = Layers::single(Arc::new(memory.try_clone().unwrap()), image);
    store(&saved, &MemoryFiles::new(size.all(), &layers), fingerprint(), &state).unwrap();
    let paged = |layers, size: MemorySize| Ram::from_layers(layers, size)?.with_hotplug(ByteSize::gib(2));
    let (found, ram) = read(&state, vec![memory], &here(), paged).unwrap();
    assert_eq!((found, ram.sizes()), (saved, size.with_hotplug(ByteSize::gib(2))));
}

#[test]
fn memory_in_two_files_is_read_from_both() {
    let (state, memory) = files();
    let (saved, ram) = read(&state, vec![memory.try_clone().unwrap()], &here(), Ram::from_layers).unwrap();
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
    store(&saved, &MemoryFiles::new(SIZE, &layers), fingerprint(), &state).unwrap();
    let (_, again) = read(
        &state,
        vec![memory.try_clone().unwrap(), second],
        &here(),
        Ram::from_layers,
    )
    .unwrap();
    let word = |at| again.guest().read_obj::<u64>(GuestAddress(at)).unwrap();
    assert_eq!((word(0x7000), word(0x9000)), (0x1234, 0x5678));
    let error = error(&state, memory, &here());
    assert!(error.contains("is in 2 files, 1 were given"), "{error}");
}
