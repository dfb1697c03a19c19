//! What a guest can make the device say; a test binary of its own, as it counts the process's log lines.

mod tap;

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process::broken_rings_fill_no_log;
use vmm_api::devices::{MacAddress, NetConfig, NetLimits};
use vmm_api::{DeviceSpec, FdRef};

#[test]
fn a_guest_that_breaks_its_rings_again_and_again_fills_no_log() {
    let (taps, _far) = tap::tap(1).unwrap();
    let config = NetConfig {
        taps: vec![FdRef(0)],
        mac: MacAddress([2, 0, 0, 0, 0, 2]),
        mtu: 1500,
        limits: NetLimits::default(),
    };
    let spec = DeviceSpec::new("loud", &config).unwrap();
    let context = DeviceContext {
        id: "loud",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let device = net::MODULE.create(&spec, &mut FdTable::new(taps), &context).unwrap();
    broken_rings_fill_no_log(&mut Driver::new(device), 1).unwrap();
}
