//! What the device is over time: resized, reset, paused, saved and restored.

use state::Saved;

use super::*;

/// How many interrupts for changes of the configuration there were.
fn told(guest: &Guest) -> u64 {
    guest.driver.vm().interrupt(0).unwrap().delivered()
}

#[test]
fn the_configuration_space_is_the_specifications() {
    let config = serde_json::json!({
        "region_size": REGION, "requested_size": 8 * MIB, "block_size": 4 * MIB, "node_id": 3
    });
    let made = created(config, Host::default(), &Registry::new());
    let mut bytes = [0; 64];
    made.device.read_config(0, &mut bytes);
    let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let fields = [0, 8, 16, 24, 32, 40, 48, 56].map(field);
    assert_eq!(fields, [4 * MIB, 3, START, REGION, 264 * MIB, 0, 8 * MIB, 0]);
    assert_eq!(made.device.device_type(), 24);
    assert_eq!(made.device.features(), 0b11);
    let config = serde_json::json!({"region_size": REGION});
    let made = created(config, Host::default(), &Registry::new());
    assert_eq!(made.device.features(), 0b10, "no node is given");
    let mut usable = [1; 8];
    made.device.read_config(32, &mut usable);
    assert_eq!(usable, [0; 8], "nothing is requested");
}

#[test]
fn another_size_is_told_and_what_is_no_size_refused() {
    let mut guest = Guest::new(0);
    assert_eq!(guest.ask(PLUG, 0, 1), ERROR, "nothing is usable");
    assert_eq!(told(&guest), 0);
    guest.resize.request(64 * MIB).unwrap();
    assert_eq!(told(&guest), 1);
    assert_eq!(guest.sizes(), [320, 0, 64]);
    for bytes in [MIB, 64 * MIB + 4096, REGION + BLOCK, u64::MAX] {
        let error = guest.resize.request(bytes).unwrap_err().to_string();
        assert!(error.contains("give a multiple of 2097152, up to 536870912"), "{error}");
    }
    assert_eq!((told(&guest), guest.sizes()), (1, [320, 0, 64]));
    assert_eq!(guest.ask(PLUG, 0, 32), ACK);
    let sizes = PluggableSizes {
        region: REGION,
        block: BLOCK,
        requested: 64 * MIB,
        plugged: 64 * MIB,
    };
    assert_eq!(guest.resize.sizes(), sizes);
    // It has to be given back block by block: what is usable does not shrink under a driver.
    guest.resize.request(0).unwrap();
    assert_eq!((told(&guest), guest.sizes()), (2, [320, 64, 0]));
    assert_eq!(guest.ask(UNPLUG_ALL, 0, 0), ACK);
    assert_eq!((told(&guest), guest.sizes()), (2, [0, 0, 0]));
    guest.resize.request(REGION).unwrap();
    assert_eq!(guest.sizes(), [512, 0, 512]);
}

#[test]
fn what_is_asked_of_a_device_that_sleeps_is_told_when_it_goes_on() {
    let mut guest = Guest::idle(0);
    guest.resize.request(4 * MIB).unwrap();
    guest.driver.start();
    assert_eq!(told(&guest), 1);
    guest.driver.device().pause();
    guest.resize.request(8 * MIB).unwrap();
    guest.resize.request(16 * MIB).unwrap();
    assert_eq!(told(&guest), 1);
    guest.driver.device().resume().unwrap();
    assert_eq!((told(&guest), guest.sizes()[2]), (2, 16));
    guest.driver.device().pause();
    guest.driver.device().resume().unwrap();
    assert_eq!(told(&guest), 2, "nothing has changed");
}

#[test]
fn a_reset_leaves_every_block_as_it_is() {
    let mut guest = Guest::new(64 * MIB);
    assert_eq!(guest.ask(PLUG, 3, 5), ACK);
    guest.driver.reset();
    guest.driver.start();
    assert_eq!((guest.state(3, 5), guest.state(0, 3)), (0, 1));
    assert_eq!(guest.sizes(), [320, 10, 64]);
    assert_eq!(guest.host.calls(), [call("plug", 3, 5, 0)]);
}

#[test]
fn it_goes_on_where_it_was_saved_with_what_its_guest_owns() {
    let mut guest = Guest::new(64 * MIB);
    assert_eq!((guest.ask(PLUG, 3, 5), guest.ask(PLUG, 100, 1)), (ACK, ACK));
    guest.resize.request(32 * MIB).unwrap();
    let (host, registry) = (Host::default(), Registry::new());
    // What it is configured with counts for one that begins.
    let config = serde_json::json!({"region_size": REGION, "requested_size": REGION});
    let other = created(config, host.clone(), &registry);
    guest.driver.migrate(other.device).unwrap();
    (guest.host, guest.resize, guest.registry) = (host, other.resize, registry);
    assert_eq!(
        guest.host.calls(),
        [call("restored", 3, 5, 0), call("restored", 100, 1, 0)]
    );
    assert_eq!(guest.sizes(), [320, 12, 32]);
    assert_eq!((guest.state(3, 5), guest.state(100, 1), guest.state(4, 97)), (0, 0, 2));
    assert_eq!((guest.ask(PLUG, 0, 3), guest.ask(UNPLUG, 100, 1)), (ACK, ACK));
    assert_eq!(guest.resize.sizes().plugged, 16 * MIB);
}

/// A device with the same addresses, of which so much can be plugged.
fn with_max(max: u64) -> PluggableMemory {
    let config = serde_json::json!({"region_size": REGION, "max_size": max});
    created(config, Host::default(), &Registry::new())
}

#[test]
fn one_with_nothing_plugged_goes_on_with_as_much_as_another_can_plug() {
    let PluggableMemory { device, resize } = with_max(0);
    let mut driver = Driver::new(device);
    driver.start();
    let region = driver.config(24, 4);
    assert_eq!((region, resize.sizes().region), (REGION, 0), "the guest reads it once");
    assert!(resize.request(BLOCK).is_err(), "there is none of it");
    for max in [128 * MIB, REGION] {
        let saved = with_max(max).device.save().unwrap();
        for next in [0, 128 * MIB, REGION] {
            with_max(next).device.restore(&saved).unwrap();
        }
    }
    let (host, registry) = (Host::default(), Registry::new());
    let config = serde_json::json!({"region_size": REGION, "max_size": 128 * MIB});
    let more = created(config, host.clone(), &registry);
    driver.migrate(more.device).unwrap();
    let mut guest = Guest {
        driver,
        resize: more.resize,
        host,
        registry,
    };
    assert_eq!(
        (guest.sizes(), guest.ask(PLUG, 0, 1)),
        ([0, 0, 0], ERROR),
        "nothing is usable"
    );
    let before = told(&guest);
    guest.resize.request(128 * MIB).unwrap();
    assert_eq!(
        (guest.sizes(), told(&guest)),
        ([128, 0, 128], before + 1),
        "no more than there is"
    );
    assert_eq!((guest.ask(PLUG, 0, 64), guest.ask(PLUG, 64, 1)), (ACK, ERROR));
    assert_eq!(guest.resize.sizes().plugged, 128 * MIB);
    guest.driver.device().pause();
    let saved = guest.driver.device().save().unwrap();
    for (max, fits) in [(0, false), (128 * MIB, true), (REGION, false)] {
        assert_eq!(with_max(max).device.restore(&saved.own).is_ok(), fits, "{max}");
    }
}

fn good() -> MemState {
    MemState {
        addr: START,
        region_size: REGION,
        block_size: BLOCK,
        node_id: None,
        usable_region_size: 320 * MIB,
        requested_size: 64 * MIB,
        plugged: vec![0b110, 0, 1 << 31, 0],
    }
}

fn restored(saved: &MemState, host: &Host) -> Result<(), String> {
    let config = serde_json::json!({"region_size": REGION});
    let mut device = created(config, host.clone(), &Registry::new()).device;
    let saved = Saved::of(saved).unwrap();
    device.restore(&saved).map_err(|error| error.to_string())?;
    assert_eq!(device.save().unwrap(), saved);
    Ok(())
}

#[test]
fn a_state_that_contradicts_itself_or_the_device_asks_nothing_of_the_host() {
    let host = Host::default();
    restored(&good(), &host).unwrap();
    assert_eq!(host.calls(), [call("restored", 1, 2, 0), call("restored", 159, 1, 0)]);
    let wrong: [fn(&mut MemState); 11] = [
        |state| state.addr += BLOCK,
        |state| state.region_size *= 2,
        |state| state.block_size *= 2,
        |state| state.node_id = Some(0),
        |state| state.usable_region_size = REGION + BLOCK,
        |state| state.usable_region_size = 318 * MIB,
        |state| state.usable_region_size += 1,
        |state| state.requested_size = 322 * MIB,
        |state| state.requested_size = MIB,
        |state| state.plugged.push(0),
        |state| state.plugged[3] = 1,
    ];
    for (number, change) in wrong.into_iter().enumerate() {
        let mut state = good();
        change(&mut state);
        let error = restored(&state, &host).unwrap_err();
        let words = if number < 4 {
            "restore with the configuration"
        } else {
            "is damaged"
        };
        assert!(error.contains(words), "change {number}: {error}");
    }
    assert_eq!(host.calls(), []);
    host.refuse_after(0);
    assert!(restored(&good(), &host).is_err(), "the host cannot make it ready");
}

#[test]
fn a_configuration_that_makes_no_sense_is_refused() {
    let context = DeviceContext {
        id: "memory",
        metrics: &Registry::new(),
        no_space: &::device::SpaceAlarm::new().unwrap(),
    };
    let refused = |config, start| {
        let made = MODULE.create(
            &spec(config),
            &context,
            region(start, REGION, REGION),
            Box::new(Host::default()),
        );
        made.err().unwrap().to_string()
    };
    let odd = refused(serde_json::json!({"region_size": 5}), START);
    assert!(odd.contains("give a multiple of 128 MiB"), "{odd}");
    let named = refused(serde_json::json!({"region_size": REGION, "speed": 1}), START);
    assert!(named.contains("speed"), "{named}");
    let other = refused(serde_json::json!({"region_size": 2 * REGION}), START);
    assert!(
        other.contains("at most 1 GiB of memory are to be plugged, and the machine has 512 MiB"),
        "{other}"
    );
    for start in [MIB, u64::MAX - BLOCK + 1] {
        let misplaced = refused(serde_json::json!({"region_size": REGION}), start);
        assert!(misplaced.contains("cannot begin at"), "{misplaced}");
    }
}
