//! Where guest memory lies in this process. Alone in its program: other tests' mappings would come in between.

use base::ByteSize;
use memory::{HUGE_PAGE, Ram};

#[test]
fn guest_memory_begins_where_a_huge_page_does() {
    let mut kept = Vec::new();
    // The last has two regions.
    for mib in [32, 65, 128, 128, 2048, 5 << 10] {
        let ram = Ram::allocate(ByteSize::mib(mib)).unwrap();
        for region in ram.regions() {
            assert_eq!(region.as_ptr().addr() % HUGE_PAGE, 0, "{mib} MiB");
        }
        kept.push(ram);
    }
}
