//! Two made-up hosts: what is shown of each, and what of one the other lacks.

use super::*;

fn leaf(function: u32, index: u32, registers: [u32; 4]) -> CpuidEntry {
    CpuidEntry {
        function,
        index,
        indexed: index > 0,
        registers,
    }
}

/// A processor that has every feature bit there is, with caches and sizes.
fn full(vendor: [u8; 12], widths: u32) -> Vec<CpuidEntry> {
    let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
    let all = u32::MAX;
    let text = u32::from_le_bytes(*b"Fast");
    vec![
        leaf(0, 0, [0x20, word(0), word(8), word(4)]),
        leaf(1, 0, [0x00a0_0f11, 0x0510_0800, all, all]),
        leaf(4, 0, [0x21, 1, 2, 3]),
        leaf(6, 0, [all; 4]),
        leaf(7, 0, [2, all, all, all]),
        leaf(7, 1, [all; 4]),
        leaf(0xa, 0, [8; 4]),
        leaf(0xd, 0, [0x2ff, 2696, 2696, 0]),
        leaf(0xd, 1, [0x1f, 0, 0x1800, 0]),
        leaf(0xd, 2, [256, 576, 0, 0]),
        leaf(0xd, 5, [64, 1088, 0, 0]),
        leaf(0xd, 6, [512, 1152, 0, 0]),
        leaf(0xd, 7, [1024, 1664, 0, 0]),
        leaf(0xd, 9, [8, 2688, 0, 0]),
        leaf(0x1f, 0, [1; 4]),
        leaf(0x4000_0001, 0, [0x0100_7efb, 0, 0, 0]),
        leaf(0x8000_0000, 0, [0x8000_0028, 0, 0, 0]),
        leaf(0x8000_0001, 0, [0x00a0_0f11, 7, all, all]),
        leaf(0x8000_0002, 0, [text; 4]),
        leaf(0x8000_0003, 0, [text; 4]),
        leaf(0x8000_0004, 0, [text; 4]),
        leaf(0x8000_0007, 0, [all; 4]),
        leaf(0x8000_0008, 0, [widths, all, 0, 0]),
        leaf(0x8000_000a, 0, [all; 4]),
        leaf(0x8000_0021, 0, [all; 4]),
    ]
}

fn amd() -> Vec<CpuidEntry> {
    full(*b"AuthenticAMD", 0x0030_3934)
}

/// Takes bits away.
fn without(mut leaves: Vec<CpuidEntry>, function: u32, index: u32, register: usize, bits: u32) -> Vec<CpuidEntry> {
    let place = leaves
        .iter()
        .position(|leaf| (leaf.function, leaf.index) == (function, index));
    leaves[place.unwrap()].registers[register] &= !bits;
    leaves
}

/// An older one of the same vendor: other name and family, no AVX-512 and none of what only the other has.
fn older() -> Vec<CpuidEntry> {
    let mut leaves = without(amd(), 7, 0, EBX, 0xd003_0000);
    leaves = without(leaves, 7, 0, ECX, u32::MAX);
    leaves = without(leaves, 0xd, 0, EAX, 0x2e0);
    leaves = without(leaves, 0x8000_0002, 0, EAX, u32::MAX);
    leaves = without(leaves, 1, 0, EAX, 0xff);
    leaves.retain(|leaf| leaf.function != 0xd || leaf.index < 5);
    leaves
}

const AVX2: u32 = 1 << 5;

#[test]
fn names_there_and_back() {
    for model in CpuModel::ALL {
        assert_eq!(model.name().parse(), Ok(model));
        let text = serde_json::to_string(&model).unwrap();
        assert_eq!(text, format!("\"{model}\""));
        assert_eq!(serde_json::from_str::<CpuModel>(&text).unwrap(), model);
    }
    let error = "x86-64-v5".parse::<CpuModel>().unwrap_err().to_string();
    assert!(error.contains("give host, common, x86-64-v2"), "{error}");
}

#[test]
fn the_hash_tells_offers_apart() {
    assert_eq!(hash(&amd()), hash(&amd()));
    assert_ne!(hash(&amd()), hash(&without(amd(), 1, 0, EDX, 1)));
}

#[test]
fn host_is_what_the_host_offers() {
    assert_eq!(present(CpuModel::Host, &amd()).unwrap(), amd());
}

#[test]
fn two_hosts_of_a_vendor_show_a_model_alike() {
    for model in [CpuModel::V2, CpuModel::V3] {
        let [new, old] = [amd(), older()].map(|host| present(model, &host).unwrap());
        assert_eq!(new, old, "{model}");
        for (shown, host) in [(&new, older()), (&old, amd())] {
            assert_eq!(missing(shown, &host), None, "{model}");
        }
    }
    let lacks = missing(&present(CpuModel::V4, &amd()).unwrap(), &older()).unwrap();
    assert!(
        lacks.starts_with("avx512f, avx512dq, avx512cd, avx512bw, avx512vl"),
        "{lacks}"
    );
    assert!(lacks.contains("the state 5 of XCR0"), "{lacks}");
    assert!(missing(&amd(), &older()).is_some());
    assert_eq!(missing(&older(), &amd()), None);
}

#[test]
fn a_model_shows_no_more_than_it_says() {
    let of = |model| {
        let shown = present(model, &amd()).unwrap();
        let names = REGISTER_NAMES.map(|(function, index, at)| register(&shown, function, index, at));
        (shown, names)
    };
    let (v2, [ecx, structured]) = of(CpuModel::V2);
    assert_eq!(ecx & (1 << 28 | 1 << 26 | 1 << 25), 0, "AVX, XSAVE, AES");
    assert_eq!(structured, 1 << 7 | 1 << 20, "SMEP and SMAP alone");
    assert!(v2.iter().all(|leaf| leaf.function != 0xd));
    assert_eq!(xfeatures(&v2), 3);
    let protections = [
        (7, EDX, 0x9c00_0400),
        (0x8000_0008, EBX, 0x0100_d000),
        (0x8000_0007, EDX, 0x100),
    ];
    for (function, at, bits) in protections {
        assert_eq!(register(&v2, function, 0, at), bits, "{function:#x}");
    }
    let (v3, [ecx, structured]) = of(CpuModel::V3);
    assert_ne!(ecx & (1 << 28), 0);
    assert_eq!(structured & (AVX2 | 1 << 16), AVX2);
    assert_eq!(register(&v3, 0xd, 0, ECX), 576 + 256);
    assert_eq!(register(&v3, 0xd, 1, EAX), 1, "XSAVEOPT alone");
    assert_eq!(xfeatures(&v3), 7);
    let (v4, _) = of(CpuModel::V4);
    assert_eq!(register(&v4, 0xd, 0, ECX), 1664 + 1024);
    for shown in [&v2, &v3, &v4] {
        let hidden = [0xa, 0x1f, 0x8000_000a, 0x8000_0021];
        assert!(shown.iter().all(|leaf| !hidden.contains(&leaf.function)));
        assert!(shown.iter().all(|leaf| (leaf.function, leaf.index) != (7, 1)));
        // ARCH_CAPABILITIES, whose bits say that a host has a fault not.
        assert_eq!(register(shown, 7, 0, EDX) & (1 << 29), 0);
        assert_eq!(register(shown, 0x8000_0001, 0, ECX) & (1 << 2), 0, "SVM");
        assert_eq!(register(shown, 0, 0, EAX), 0xd);
        assert_eq!(register(shown, 0x8000_0008, 0, EAX), 0x3034);
    }
    assert_eq!(register(&v2, 0x8000_0002, 0, EAX).to_le_bytes(), *b"Basa");
}

const REGISTER_NAMES: [(u32, u32, usize); 2] = [(1, 0, ECX), (7, 0, EBX)];

#[test]
fn a_host_that_has_less_than_the_model_is_told() {
    let host = without(amd(), 7, 0, EBX, AVX2);
    let error = present(CpuModel::V3, &host).unwrap_err().to_string();
    assert_eq!(
        error,
        "this host's CPU lacks avx2, which the CPU model x86-64-v3 has: choose x86-64-v2 or host"
    );
    assert!(present(CpuModel::V2, &host).is_ok());
    // What only protects is shown where it is.
    assert!(present(CpuModel::V3, &without(amd(), 7, 0, EBX, 1 << 20)).is_ok());
    assert!(present(CpuModel::V3, &without(amd(), 0xd, 0, EAX, 4)).is_err());
    assert_eq!(missing(&present(CpuModel::V2, &amd()).unwrap(), &host), None);
    assert_eq!(missing(&present(CpuModel::V3, &amd()).unwrap(), &host).unwrap(), "avx2");
}

#[test]
fn what_intel_has_earlier_is_asked_of_intel_alone() {
    let pcid = 1 << 17;
    let intel = full(*b"GenuineIntel", 0x2e);
    // The extended leaf repeats nothing there.
    let intel = without(intel, 0x8000_0001, 0, EDX, 0x0183_f3ff);
    assert!(present(CpuModel::V3, &intel).is_ok());
    assert!(present(CpuModel::V3, &without(intel.clone(), 1, 0, ECX, pcid)).is_err());
    assert!(present(CpuModel::V3, &without(amd(), 1, 0, ECX, pcid)).is_ok());
    let lacks = missing(&present(CpuModel::V2, &intel).unwrap(), &amd()).unwrap();
    assert_eq!(lacks, "the vendor GenuineIntel (it is of AuthenticAMD)");
}

#[test]
fn each_other_difference_that_matters_is_named() {
    let shown = present(CpuModel::V3, &amd()).unwrap();
    let lacks = |host: Vec<CpuidEntry>| missing(&shown, &host).unwrap();
    let fewer = without(amd(), 0x8000_0008, 0, EAX, 0x10);
    assert_eq!(lacks(fewer), "physical addresses of 52 bits (it has 36)");
    let moved = without(amd(), 0xd, 2, EBX, 0x40);
    assert_eq!(lacks(moved), "the same place for the XSAVE state 2");
    assert_eq!(lacks(without(amd(), 0x4000_0001, 0, EAX, 8)), "KVM's features 0x8");
    let host = without(amd(), 7, 0, ECX, 1 << 16);
    assert_eq!(missing(&amd(), &host).unwrap(), "CPUID.7H.0:ECX[16]");
    // What differs from vCPU to vCPU and from moment to moment does not count.
    let mut running = shown.clone();
    running[1].registers[ECX] |= 1 << 27;
    running[1].registers[EDX] |= 1 << 28;
    assert_eq!(missing(&running, &amd()), None);
}
