//! Clones that are given a device while they run: what they shared with their template becomes their own, and is promised as that before it
//! does, whatever becomes of the device, and of the daemon.

use base::ByteSize;
use node_api::{BindTerms, DeviceStart, DeviceState, Resource, SandboxConfig};

use super::World;
use super::devices::{NVME, address, bind, state};

const NIC: &str = "0000:02:00.0";

/// Two of these are all that the host's memory has room for; beside them as many as share it.
const MEMORY: ByteSize = ByteSize::gib(200);

fn promised(world: &World) -> u64 {
    let all = world.node().budget.promised();
    all.iter()
        .find(|one| one.resource == Resource::Memory)
        .unwrap()
        .promised
}

fn clone(world: &World, name: &str, port: &str, device_start: Option<DeviceStart>) {
    let mut config = SandboxConfig {
        device_start,
        ..World::config(name)
    };
    (config.resources.memory, config.boot) = (MEMORY, false);
    config.ports = vec![port.to_owned()];
    world.run(config).unwrap();
    assert_eq!(world.entry(name).stored().sandbox.template.is_some(), name != "first");
}

fn attach(world: &World, name: &str, device: &str) -> Result<(), crate::Error> {
    let attached = world.node().attach_devices(&world.entry(name), &[address(device)]);
    attached.map(drop)
}

fn detach(world: &World, name: &str, device: &str) {
    let detached = world
        .node()
        .detach_devices(&world.entry(name), &[address(device)], false);
    detached.unwrap();
}

/// Three clones of a template, and two devices.
fn clones() -> World {
    clones_with(None)
}

fn clones_with(device_start: Option<DeviceStart>) -> World {
    let world = World::new();
    clone(&world, "first", "80:80", device_start);
    world.has_template().unwrap();
    world.node().remove(&world.entry("first"), true).unwrap();
    for (name, port) in [("web", "80:80"), ("db", "81:80"), ("mail", "82:80")] {
        clone(&world, name, port, device_start);
    }
    bind(&world, NVME).unwrap();
    world.node().devices.bind(address(NIC), BindTerms::default()).unwrap();
    world
}

#[test]
fn a_clone_that_gets_a_device_shares_nothing_any_more_and_counts_whole() {
    let mut world = clones();
    let shared = promised(&world);
    assert!(shared < 2 * MEMORY.bytes(), "{shared}");
    attach(&world, "web", NVME).unwrap();
    let counted = promised(&world);
    assert!(counted > 2 * MEMORY.bytes(), "{counted}");
    // For a second one there is no room, and nothing is done.
    let said = attach(&world, "db", NIC).unwrap_err().to_string();
    assert!(
        said.starts_with("cannot attach a device to 'db': it needs ") && said.contains("of memory"),
        "{said}"
    );
    assert_eq!(state(&world, NIC), DeviceState::Ready);
    assert_eq!(promised(&world), counted);
    // What has become its own stays so, with a second device and without any.
    attach(&world, "web", NIC).unwrap();
    assert_eq!(promised(&world), counted);
    detach(&world, "web", NVME);
    detach(&world, "web", NIC);
    assert_eq!(promised(&world), counted);
    world.restart();
    world.is_at_rest().unwrap();
    assert_eq!(promised(&world), counted);
    // With its machine it goes.
    world.node().remove(&world.entry("web"), true).unwrap();
    attach(&world, "db", NIC).unwrap();
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn what_is_refused_before_anything_is_mapped_counts_as_before() {
    let world = clones();
    let shared = promised(&world);
    attach(&world, "web", "0000:00:02.0").unwrap_err();
    assert_eq!(promised(&world), shared);
    attach(&world, "web", NVME).unwrap();
    let counted = promised(&world);
    world.node().remove(&world.entry("mail"), true).unwrap();
    let with_two = promised(&world);
    // It is another's.
    attach(&world, "db", NVME).unwrap_err();
    assert_eq!(promised(&world), with_two);
    assert!(with_two < counted);
    world.ends_empty().unwrap();
}

#[test]
fn one_that_boots_or_is_started_with_devices_counts_whole_anyhow() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    let mut config = World::config("web");
    config.resources.memory = MEMORY;
    world.run(SandboxConfig { ..config }).unwrap();
    let counted = promised(&world);
    attach(&world, "web", NVME).unwrap();
    assert_eq!(promised(&world), counted);
    world.ends_empty().unwrap();
}

/// What its guest maps is all that a device makes its own.
#[test]
fn a_clone_with_an_iommu_of_its_own_goes_on_sharing() {
    let mut world = clones_with(Some(DeviceStart::Lazy));
    let shared = promised(&world);
    attach(&world, "web", NVME).unwrap();
    attach(&world, "db", NIC).unwrap();
    assert_eq!(promised(&world), shared);
    world.restart();
    world.is_at_rest().unwrap();
    assert_eq!(promised(&world), shared);
    world.ends_empty().unwrap();
}

/// Its record says nothing of it.
#[test]
fn a_clone_that_an_earlier_daemon_gave_a_device_counts_whole_from_the_next_one_on() {
    let mut world = clones();
    attach(&world, "web", NVME).unwrap();
    let counted = promised(&world);
    let entry = world.entry("web");
    world
        .node()
        .note_change(&entry, |stored| stored.memory_is_private = false)
        .unwrap();
    drop(entry);
    world.restart();
    assert_eq!(promised(&world), counted);
    detach(&world, "web", NVME);
    world.restart();
    assert_eq!(promised(&world), counted);
    world.ends_empty().unwrap();
}
