//! What a guest can make the device say; a test binary of its own, as it counts the process's log lines.

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process::broken_rings_fill_no_log;
use vmm_api::DeviceSpec;

#[test]
fn a_guest_that_breaks_its_rings_again_and_again_fills_no_log() {
    let spec = DeviceSpec {
        id: "loud".into(),
        kind: "vsock".into(),
        config: serde_json::json!({"cid": 3, "listener": null, "acceptor": null}),
    };
    let context = DeviceContext {
        id: "loud",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let device = vsock::MODULE.create(&spec, &mut FdTable::default(), &context).unwrap();
    broken_rings_fill_no_log(&mut Driver::new(device), 1).unwrap();
}
