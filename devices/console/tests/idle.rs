//! Waiting costs no processor time, whatever is waited for. One test, as it measures the threads of its process.

use std::io::{Write, pipe};
use std::time::Duration;

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::conformance::driver::Driver;
use vmm_api::{DeviceSpec, FdRef, devices::ConsoleConfig};

/// Nanoseconds that threads called `console` have run.
fn running_time() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    threads
        .map(|thread| thread.unwrap().path())
        .filter(|path| std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "console"))
        .map(|path| std::fs::read_to_string(path.join("schedstat")).unwrap())
        .map(|times| times.split(' ').next().unwrap().parse::<u64>().unwrap())
        .sum()
}

/// A thread that spins does so in every window; one that was late with its work on a busy machine does not.
#[track_caller]
fn rests(what: &str) {
    let mut used = Duration::ZERO;
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(30));
        let before = running_time();
        assert!(before > 0, "there is a thread");
        std::thread::sleep(Duration::from_millis(200));
        used = Duration::from_nanos(running_time() - before);
        if used < Duration::from_millis(10) {
            return;
        }
    }
    panic!("{what}: the thread ran for {used:?}");
}

#[test]
fn waiting_is_free() {
    let (input, mut keyboard) = pipe().unwrap();
    let (screen, output) = pipe().unwrap();
    let config = ConsoleConfig {
        input: Some(FdRef(0)),
        output: Some(FdRef(1)),
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
