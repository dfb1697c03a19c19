//! Guest memory in huge pages of the host, as many as there are: none, on most machines that tests run on. Alone in its program, which
//! reads of itself what the kernel has given it.

use std::fs;

use base::ByteSize;
use memory::{HugeBytes, Ram};
use vm_memory::{Bytes, GuestAddress, GuestMemoryRegion};

/// Bytes of this process in huge pages that the host had set aside.
fn in_use() -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let lines = smaps.lines().filter_map(|line| line.strip_prefix("Private_Hugetlb:"));
    let kib = lines.map(|line| line.trim().trim_end_matches(" kB").parse::<u64>().unwrap());
    kib.sum::<u64>() * 1024
}

fn check(size: ByteSize) {
    let ram = Ram::allocate_pinned(size).unwrap();
    assert_eq!(ram.size(), size);
    for region in ram.regions() {
        let alignment = if region.len() < 1 << 30 { 2 << 20 } else { 1 << 30 };
        assert_eq!(region.as_ptr().addr() % alignment, 0, "of {size}");
    }
    let huge = ram.huge();
    assert_eq!(huge.in_1g + huge.in_2m, in_use(), "of {size}");
    // At both ends, and across a piece's.
    for place in [0, (32 << 20) - 4, size.bytes() / 2, size.bytes() - 8] {
        assert_eq!(ram.guest().read_obj::<u64>(GuestAddress(place)).unwrap(), 0);
        ram.guest().write_obj(place | 1, GuestAddress(place)).unwrap();
        assert_eq!(ram.guest().read_obj::<u64>(GuestAddress(place)).unwrap(), place | 1);
    }
    drop(ram);
    assert_eq!(in_use(), 0, "some of {size} stayed");
}

#[test]
fn guest_memory_takes_what_huge_pages_there_are_and_does_without() {
    for mib in [64, 65, 1024, 1536] {
        check(ByteSize::mib(mib));
    }
    assert_eq!(Ram::allocate(ByteSize::mib(64)).unwrap().huge(), HugeBytes::default());
}
