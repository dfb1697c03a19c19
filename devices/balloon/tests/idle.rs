//! Waiting costs no processor time. One test, as it measures the threads of its process.

use device::{BalloonModule, DeviceContext, GuestPages};
use memory::Pins;
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process;
use vmm_api::DeviceSpec;
use vmm_api::devices::BalloonConfig;

#[test]
fn waiting_is_free() {
    let context = DeviceContext {
        id: "balloon",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let spec = DeviceSpec::new("balloon", &BalloonConfig::default()).unwrap();
    let pages = GuestPages {
        pins: Pins::default(),
        pluggable: None,
        ballooned: None,
    };
    let made = balloon::MODULE.create(&spec, &context, Box::new(pages)).unwrap();
    let mut driver = Driver::new(made.device);
    driver.start();
    process::rests("balloon", "nothing to do").unwrap();
    made.resize.request(64 << 20).unwrap();
    process::rests("balloon", "a size that the driver does not follow").unwrap();
}
