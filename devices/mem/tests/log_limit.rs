//! What a guest can make the device say; a test binary of its own, as it counts the process's log lines.

use base::ByteSize;
use device::{DeviceContext, HotplugRegion, MemoryModule, PluggableDma};
use memory::layout::MemorySize;
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process::broken_rings_fill_no_log;
use vmm_api::DeviceSpec;

#[test]
fn a_guest_that_breaks_its_rings_again_and_again_fills_no_log() {
    let spec = DeviceSpec {
        id: "loud".into(),
        kind: "mem".into(),
        config: serde_json::json!({"region_size": 128 << 20}),
    };
    let context = DeviceContext {
        id: "loud",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let size = MemorySize::from(ByteSize::mib(64)).with_hotplug(ByteSize::mib(128));
    let region = HotplugRegion::of(size).unwrap();
    let blocks = Box::new(PluggableDma::new(region.memory));
    let made = virtio_mem::MODULE.create(&spec, &context, region, blocks);
    broken_rings_fill_no_log(&mut Driver::new(made.unwrap().device), 0).unwrap();
}
