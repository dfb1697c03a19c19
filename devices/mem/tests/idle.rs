//! Waiting costs no processor time. One test, as it measures the threads of its process.

use base::ByteSize;
use device::{DeviceContext, HotplugRegion, MemoryModule, PluggableDma};
use memory::layout::MemorySize;
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process;
use vmm_api::DeviceSpec;

#[test]
fn waiting_is_free() {
    let spec = DeviceSpec {
        id: "memory".into(),
        kind: "mem".into(),
        config: serde_json::json!({"region_size": 128 << 20}),
    };
    let context = DeviceContext {
        id: "memory",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let size = MemorySize::from(ByteSize::mib(64)).with_hotplug(ByteSize::mib(128));
    let region = HotplugRegion::of(size).unwrap();
    let blocks = Box::new(PluggableDma::new(region.memory));
    let made = virtio_mem::MODULE.create(&spec, &context, region, blocks).unwrap();
    let mut driver = Driver::new(made.device);
    driver.start();
    process::rests("mem", "nothing to do").unwrap();
    made.resize.request(64 << 20).unwrap();
    process::rests("mem", "a size that the driver does not follow").unwrap();
}
