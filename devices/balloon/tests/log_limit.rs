//! What a guest can make the device say; a test binary of its own, as it counts the process's log lines.

use device::{BalloonModule, DeviceContext, GuestPages};
use memory::Pins;
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process::broken_rings_fill_no_log;
use vmm_api::DeviceSpec;
use vmm_api::devices::BalloonConfig;

#[test]
fn a_guest_that_breaks_its_rings_again_and_again_fills_no_log() {
    let context = DeviceContext {
        id: "loud",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let spec = DeviceSpec::new("loud", &BalloonConfig::default()).unwrap();
    let pages = GuestPages {
        pins: Pins::default(),
        pluggable: None,
        ballooned: None,
    };
    let made = balloon::MODULE.create(&spec, &context, Box::new(pages)).unwrap();
    broken_rings_fill_no_log(&mut Driver::new(made.device), 2).unwrap();
}
