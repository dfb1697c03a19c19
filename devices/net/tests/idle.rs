//! A device that waits costs nothing; a test binary of its own, as it measures the process's threads.

mod tap;

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::conformance::driver::Driver;
use virtio::conformance::process::rests;
use vmm_api::devices::{MacAddress, NetConfig, NetLimits, RateLimit};
use vmm_api::{DeviceSpec, FdRef};

#[test]
fn waiting_is_free() {
    let (taps, far) = tap::tap(2).unwrap();
    let slow = RateLimit {
        bytes_per_second: None,
        packets_per_second: Some(1),
    };
    let config = NetConfig {
        taps: vec![FdRef(0), FdRef(1)],
        mac: MacAddress([2, 0, 0, 0, 0, 2]),
        mtu: 1500,
        limits: NetLimits {
            transmit: slow,
            ..NetLimits::default()
        },
    };
    let spec = DeviceSpec::new("calm", &config).unwrap();
    let context = DeviceContext {
        id: "calm",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let device = net::MODULE.create(&spec, &mut FdTable::new(taps), &context).unwrap();
    let mut driver = Driver::new(device);
    driver.start();
    // Both threads have run once that is done.
    for queue in [1, 3] {
        driver.push(queue, &[&[0; 12], &[0xff; 64]], &[]);
        driver.kick(queue);
        driver.wait_used(queue).unwrap();
    }
    rests("net-q0", "nothing happens").unwrap();
    rests("net-q1", "its pair is not in use").unwrap();
    // No receive buffer was ever offered.
    for _ in 0..20 {
        far.send(&[0xff; 64]).unwrap();
    }
    rests("net-q0", "packets wait for buffers").unwrap();
    for _ in 0..8 {
        driver.push(1, &[&[0; 12], &[0xff; 64]], &[]);
    }
    driver.kick(1);
    rests("net-q0", "packets wait for the rate limit").unwrap();
}
