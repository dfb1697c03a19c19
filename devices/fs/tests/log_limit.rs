//! What a guest can make the device say; a test binary of its own, as it counts the process's log lines.

mod shared;

use shared::{config, make};
use virtio::conformance::driver::Driver;
use virtio::conformance::process::broken_rings_fill_no_log;

#[test]
fn a_guest_that_breaks_its_rings_again_and_again_fills_no_log() {
    let directory = tempfile::tempdir().unwrap();
    let device = make(&config(), directory.path()).unwrap();
    broken_rings_fill_no_log(&mut Driver::new(device), 1).unwrap();
}
