//! Waiting costs no processor time, whatever is waited for. One test, as it measures the threads of its process.

use std::io::{Write, pipe};

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process;
use vmm_api::{DeviceSpec, FdRef, devices::ConsoleConfig};

#[track_caller]
fn rests(what: &str) {
    process::rests("console", what).unwrap();
}

#[test]
fn waiting_is_free() {
    let (input, mut keyboard) = pipe().unwrap();
    let (screen, output) = pipe().unwrap();
    let config = ConsoleConfig {
        input: Some(FdRef(0)),
        output: Some(FdRef(1)),
        keep: None,
    };
    let spec = DeviceSpec {
        id: "console0".into(),
        kind: "console".into(),
        config: serde_json::to_value(config).unwrap(),
    };
    let metrics = Registry::new();
    let context = DeviceContext {
        id: "console0",
        metrics: &metrics,
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let mut fds = FdTable::new(vec![input.into(), output.into()]);
    let mut driver = Driver::new(console::MODULE.create(&spec, &mut fds, &context).unwrap());
    driver.start();
    rests("nothing to do");
    keyboard.write_all(b"typed ahead").unwrap();
    rests("input without buffers");
    driver.push(0, &[], &[4]);
    driver.kick_if_wanted(0);
    assert!(driver.wait_used(0).is_some());
    rests("more input than buffers");
    driver.push(1, &[&[b'x'; 100_000]], &[]);
    driver.kick_if_wanted(1);
    rests("output that nobody reads");
    assert!(driver.wait_used(1).is_some());
    rests("output that is dropped");
    drop(screen);
    rests("a reader that has gone");
    drop(keyboard);
    rests("an end behind input without buffers");
    for _ in 0..4 {
        driver.push(0, &[], &[4]);
        driver.kick_if_wanted(0);
    }
    assert!(driver.wait_used(0).is_some());
    assert!(driver.wait_used(0).is_some());
    rests("the end of input, and buffers");
}
