//! A device that waits costs nothing; a test binary of its own, as it measures the process's threads.

mod message;
mod shared;

use fuse::abi::op;
use message::request;
use shared::{config, make};
use virtio::conformance::driver::Driver;
use virtio::conformance::process::rests;

#[test]
fn waiting_is_free() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(make(&config(), directory.path()).unwrap());
    driver.start();
    for queue in [0, 1] {
        driver.push(queue, &[&request(op::STATFS, 1, &[])], &[96]);
        driver.kick(queue);
        driver.wait_used(queue).unwrap();
    }
    rests("fs-q0", "nothing happens").unwrap();
    rests("fs-q1", "nothing happens").unwrap();
}
