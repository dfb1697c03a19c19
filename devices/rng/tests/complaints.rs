//! What a guest can make the device say: a few lines a second, however often it breaks a ring and resets the device.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use device::{DeviceContext, DeviceModule, FdTable};
use log::{LevelFilter, Log, Metadata, Record};
use observe::Registry;
use virtio::conformance::driver::Driver;
use vmm_api::DeviceSpec;

struct Count(AtomicU32);

impl Log for Count {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn log(&self, _: &Record<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn flush(&self) {}
}

static LINES: Count = Count(AtomicU32::new(0));

#[test]
fn a_guest_that_breaks_its_rings_again_and_again_fills_no_log() {
    log::set_logger(&LINES).unwrap();
    log::set_max_level(LevelFilter::Warn);
    let metrics = Registry::new();
    let spec = DeviceSpec {
        id: "loud".into(),
        kind: "rng".into(),
        config: serde_json::json!({}),
    };
    let context = DeviceContext {
        id: "loud",
        metrics: &metrics,
    };
    let mut fds = FdTable::new(Vec::new());
    let mut driver = Driver::new(rng::MODULE.create(&spec, &mut fds, &context).unwrap());
    let began = Instant::now();
    for _ in 0..100 {
        driver.start();
        driver.jump(0, 0x7000);
        driver.kick(0);
        std::thread::sleep(Duration::from_millis(3));
        driver.reset();
    }
    let most = 3 * (began.elapsed().as_secs() + 2);
    let lines = u64::from(LINES.0.load(Ordering::SeqCst));
    assert!((1..=most).contains(&lines), "{lines} lines instead of {most} at most");
}
