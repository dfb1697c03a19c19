//! What the device is over time: resized, reset, paused, saved and restored.

use ::device::BalloonInfo;
use state::Saved;

use super::*;

const MIB: u64 = 1 << 20;

/// How many interrupts for changes of the configuration there were.
fn told(guest: &Guest) -> u64 {
    guest.driver.vm().interrupt(0).unwrap().delivered()
}

#[test]
fn what_is_offered_and_configured_is_the_specifications() {
    let made = |config| created(config, Host::new(), &Registry::new()).device;
    let device = made(serde_json::json!({"target": 8 * MIB}));
    assert_eq!(
        (device.device_type(), device.features(), device.queue_sizes().len()),
        (5, 0x24, 3)
    );
    let mut bytes = [7; 12];
    device.read_config(0, &mut bytes);
    assert_eq!(bytes, [0, 8, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7]);
    let mut half = [0; 2];
    device.read_config(1, &mut half);
    assert_eq!(half, [8, 0]);
    let device = made(serde_json::json!({"free_page_reporting": false, "deflate_on_oom": false}));
    assert_eq!((device.features(), device.queue_sizes().len()), (0, 2));
}

#[test]
fn a_driver_that_reports_nothing_is_served() {
    let host = Host::new();
    let mut guest = Guest::idle(host.clone());
    guest.driver.start_with(!(1 << 5));
    guest.name(INFLATE, &[9000]);
    assert_eq!(host.given(), [(9000, 1)]);
}

#[test]
fn another_size_is_told_and_what_is_no_size_refused() {
    let guest = Guest::new(Host::new());
    guest.resize.request(64 * MIB).unwrap();
    assert_eq!((told(&guest), guest.driver.config(0, 4)), (1, 64 * 256));
    for bytes in [1, 4097, (u64::from(u32::MAX) + 1) * PAGE, u64::MAX] {
        let error = guest.resize.request(bytes).unwrap_err().to_string();
        assert!(
            error.contains("give a multiple of 4096, up to 17592186040320"),
            "{error}"
        );
    }
    assert_eq!((told(&guest), guest.driver.config(0, 4)), (1, 64 * 256));
    // The driver says how far it has come, at any width, and can change nothing else.
    guest.driver.write(0x2004, 4, 0x1234);
    guest.driver.write(0x2005, 1, 0x50);
    guest.driver.write(0x2000, 4, 99);
    guest.driver.write(0x2008, 4, 99);
    let info = BalloonInfo {
        target: 64 * MIB,
        inflated: 0x5034 * PAGE,
        reported: 0,
        discarded: 0,
    };
    assert_eq!(guest.resize.info(), info);
    assert_eq!(
        (guest.driver.config(0, 4), guest.driver.config(4, 4)),
        (64 * 256, 0x5034)
    );
}

#[test]
fn what_is_asked_of_a_device_that_sleeps_is_told_when_it_goes_on() {
    let mut guest = Guest::idle(Host::new());
    guest.resize.request(4 * MIB).unwrap();
    guest.driver.start();
    assert_eq!(told(&guest), 1);
    guest.driver.device().pause();
    guest.resize.request(8 * MIB).unwrap();
    guest.resize.request(16 * MIB).unwrap();
    assert_eq!(told(&guest), 1);
    guest.driver.device().resume().unwrap();
    assert_eq!((told(&guest), guest.driver.config(0, 4)), (2, 16 * 256));
    guest.driver.device().pause();
    guest.driver.device().resume().unwrap();
    assert_eq!(told(&guest), 2, "nothing has changed");
}

#[test]
fn it_goes_on_where_it_was_saved() {
    let mut guest = Guest::new(Host::new());
    guest.resize.request(64 * MIB).unwrap();
    guest.driver.write(0x2004, 4, 9000);
    guest.name(INFLATE, &[9000]);
    let (host, registry) = (Host::new(), Registry::new());
    // What it is configured with counts for one that begins.
    let other = created(serde_json::json!({"target": 4 * MIB}), host.clone(), &registry);
    guest.driver.migrate(other.device).unwrap();
    (guest.resize, guest.registry) = (other.resize, registry);
    let info = guest.resize.info();
    assert_eq!((info.target, info.inflated, info.discarded), (64 * MIB, 9000 * PAGE, 0));
    guest.report(&[(40 << 20, 2 << 20)]);
    assert_eq!(host.given(), [(40 * 256, 512)]);
}

#[test]
fn a_state_of_a_device_with_other_features_is_refused() {
    let saved = created(serde_json::json!({}), Host::new(), &Registry::new())
        .device
        .save()
        .unwrap();
    let config = serde_json::json!({"free_page_reporting": false});
    let mut other = created(config, Host::new(), &Registry::new()).device;
    let error = other.restore(&saved).unwrap_err().to_string();
    assert!(
        error.contains("0x24") && error.contains("restore with the configuration"),
        "{error}"
    );
    let strange = Saved { version: 9, ..saved };
    let mut same = created(serde_json::json!({}), Host::new(), &Registry::new()).device;
    assert!(same.restore(&strange).is_err());
}

#[test]
fn a_configuration_that_makes_no_sense_is_refused() {
    let context = DeviceContext {
        id: "balloon",
        metrics: &Registry::new(),
        no_space: &::device::SpaceAlarm::new().unwrap(),
    };
    let refused = |config| {
        let made = MODULE.create(&spec(config), &context, Box::new(Host::new()));
        made.err().unwrap().to_string()
    };
    let odd = refused(serde_json::json!({"target": 5}));
    assert!(odd.contains("give a multiple of 4096"), "{odd}");
    let named = refused(serde_json::json!({"speed": 1}));
    assert!(named.contains("speed"), "{named}");
}
