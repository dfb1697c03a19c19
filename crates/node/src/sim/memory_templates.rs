//! Sandboxes whose memory is plugged go on from a template that has what they boot with, and nothing plugged, whatever they are to have.

use base::ByteSize;
use node_api::{DeviceStart, DeviceState, SandboxConfig};

use super::devices::{Case, NVME, address, bind, every_place, state};
use super::faults::Fault;
use super::{World, device_start, soon};
use crate::operations::detach_for::OnDevices;

const BOOT: ByteSize = ByteSize::mib(256);

/// What boots with that, is to have so much, and at most so much.
fn config(name: &str, memory: u64, most: Option<u64>) -> SandboxConfig {
    let mut config = SandboxConfig {
        boot: false,
        ports: Vec::new(),
        ..World::config(name)
    };
    (config.resources.memory, config.resources.boot_memory) = (ByteSize::mib(memory), Some(BOOT));
    config.resources.max_memory = most.map(ByteSize::mib);
    config
}

fn with_device(name: &str, start: DeviceStart) -> SandboxConfig {
    SandboxConfig {
        devices: vec![address(NVME)],
        device_start: Some(start),
        ..config(name, 768, None)
    }
}

/// The memory of its machine is all there; what has come about in it.
fn history(world: &World, name: &str) -> Vec<&'static str> {
    soon(|| device_start::look(world)).unwrap();
    let id = world.entry(name).id.clone();
    let alive = world.machines.alive();
    let machine = alive.iter().find(|machine| machine.sandbox == id).unwrap();
    let shown = machine.lock();
    let resources = world.entry(name).stored().sandbox.config.resources;
    let memory = shown.memory.unwrap();
    assert_eq!(memory.plugged, resources.plugged().bytes(), "{name}");
    assert_eq!(Some(memory.region), resources.region().map(ByteSize::bytes), "{name}");
    shown.history.clone()
}

/// It was restored without mapping what no file has content for.
fn has_anonymous_holes(world: &World, name: &str) -> bool {
    let id = world.entry(name).id.clone();
    let alive = world.machines.alive();
    let machine = alive.iter().find(|machine| machine.sandbox == id).unwrap();
    machine.lock().anonymous_holes
}

fn template_of(world: &World, name: &str) -> Option<String> {
    world.entry(name).stored().sandbox.template
}

/// There is a template, which the first sandbox has made.
fn world() -> World {
    let world = World::new();
    world.run(config("first", 768, None)).unwrap();
    assert_eq!(history(&world, "first"), ["started", "command", "plugged"]);
    world.has_template().unwrap();
    let templates = world.node().list_templates();
    assert_eq!(templates[0].resources.memory, BOOT);
    assert_eq!(
        (template_of(&world, "first"), templates[0].outdated.as_ref()),
        (None, None)
    );
    world
}

#[test]
fn one_template_serves_all_sizes_of_what_is_plugged() {
    let world = world();
    let template = Some(world.node().list_templates()[0].id.clone());
    for (name, memory, most) in [
        ("same", 768, None),
        ("more", 2 << 10, None),
        ("grows", 256, Some(1 << 10)),
        ("large", 512, Some(8 << 10)),
    ] {
        world.run(config(name, memory, most)).unwrap();
        assert_eq!(template_of(&world, name), template, "{name}");
        let history = history(&world, name);
        assert_eq!(history.first(), Some(&"command"), "{name} has booted");
        assert_eq!(history.contains(&"plugged"), memory > 256, "{name}");
        assert!(!has_anonymous_holes(&world, name), "nothing reaches all of its memory");
    }
    // It is resized as any other, and its snapshots have what it has plugged.
    world
        .node()
        .update_memory(&world.entry("more"), ByteSize::gib(1))
        .unwrap();
    world
        .node()
        .make_snapshot(&world.entry("more"), Some("more"), OnDevices::Refuse)
        .unwrap();
    let asked = node_api::CloneConfig {
        snapshot: "more".to_owned(),
        name: Some("twin".to_owned()),
        ..node_api::CloneConfig::default()
    };
    world.node().clone_of(asked).unwrap();
    history(&world, "twin");
    world.is_at_rest().unwrap();
    assert_eq!(world.node().list_templates().len(), 1);
    world.ends_empty().unwrap();
}

#[test]
fn the_first_one_makes_the_template_with_a_device_as_well() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    world.run(with_device("first", DeviceStart::Async)).unwrap();
    history(&world, "first");
    soon(|| super::same("state", &state(&world, NVME), &DeviceState::Claimed)).unwrap();
    world.has_template().unwrap();
    let id = world.node().list_templates()[0].id.clone();
    world.run(config("second", 768, None)).unwrap();
    assert_eq!(template_of(&world, "second"), Some(id));
    world.is_at_rest().unwrap();
}

#[test]
fn what_boots_with_as_much_and_can_plug_nothing_is_another_machine() {
    let world = world();
    let mut fixed = config("fixed", 256, None);
    world.run(fixed.clone()).unwrap();
    assert_eq!(template_of(&world, "fixed"), None);
    soon(|| super::same("templates", &world.node().list_templates().len(), &2)).unwrap();
    (fixed.name, fixed.resources.boot_memory) = (Some("again".into()), None);
    world.run(fixed).unwrap();
    let of_fixed = template_of(&world, "again").unwrap();
    world.run(config("grown", 768, None)).unwrap();
    assert_ne!(template_of(&world, "grown").unwrap(), of_fixed);
    // Nor is it found by its id for such a one.
    let mut chosen = config("chosen", 256, None);
    (chosen.resources.boot_memory, chosen.template) = (None, template_of(&world, "grown"));
    let refused = world.run(chosen).unwrap_err();
    assert!(matches!(refused, crate::Error::TemplateSize(_)), "{refused}");
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn with_a_device_it_is_the_same_template_and_the_same_order() {
    let world = world();
    bind(&world, NVME).unwrap();
    world.run(with_device("web", DeviceStart::Async)).unwrap();
    assert_eq!(history(&world, "web"), ["mapped", "shown", "command", "plugged"]);
    assert!(template_of(&world, "web").is_some());
    assert!(has_anonymous_holes(&world, "web"));
    world.node().remove(&world.entry("web"), true).unwrap();
    world.is_at_rest().unwrap();
    // One whose memory waits for no mapping plugs it while it boots.
    world.run(with_device("late", DeviceStart::Late)).unwrap();
    assert_eq!(template_of(&world, "late"), None);
    assert!(history(&world, "late").contains(&"started"));
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

const CASES: &[Case] = &[Case {
    name: "run, async, of a template",
    prepare: |world| {
        bind(world, NVME).unwrap();
        world.run(config("first", 512, None)).unwrap();
        world.has_template().unwrap();
        world.node().remove(&world.entry("first"), true).unwrap();
        world.is_at_rest().unwrap();
    },
    act: |world| {
        world.run(with_device("web", DeviceStart::Async))?;
        let waited = soon(|| match world.faults.has_fired() {
            true => Ok(()),
            false => device_start::look(world),
        });
        waited.unwrap();
        Ok(())
    },
    undone: &[DeviceState::Ready, DeviceState::Quarantined],
    done: DeviceState::Claimed,
}];

#[test]
fn whatever_fails_on_the_way_a_device_is_the_sandboxs_or_ready() {
    for fault in [Fault::Refused, Fault::Crash] {
        CASES.iter().for_each(|case| every_place(case, fault));
    }
    let world = World::new();
    (CASES[0].prepare)(&world);
    (CASES[0].act)(&world).unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    assert!(template_of(&world, "web").is_some());
}
