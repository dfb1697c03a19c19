//! Devices by names of the Container Device Interface, whose specifications are files beside the simulated node.

use std::fs;

use base::CdiName;
use node_api::{DeviceState, ErrorKind, SandboxConfig};

use super::World;
use super::devices::{NVME, address, bind, state};
use crate::Error;
use crate::operations::detach_for::OnDevices;
use crate::sandbox::entry::Entry;

/// With devices that stand for one function, for a group, and for what no sandbox can have.
const SPEC: &str = r#"cdiVersion: "1.1.0"
kind: vendor.com/disk
devices:
- name: fast
  containerEdits:
    env: ["DISK=fast", "LEVEL=3"]
    deviceNodes: [{path: /dev/vfio/1}]
- name: both
  containerEdits:
    deviceNodes: [{path: /dev/vfio/1}, {path: /dev/vfio/6, permissions: rw}]
- name: cdev
  containerEdits:
    deviceNodes: [{path: /dev/vfio/card, hostPath: /dev/vfio/devices/vfio0}]
- name: elsewhere
  containerEdits:
    deviceNodes: [{path: /dev/vfio/77}]
- name: container
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0}]
    mounts: [{hostPath: /usr/lib/card.so, containerPath: /usr/lib/card.so}]
    hooks: [{hookName: createContainer, path: /usr/bin/card}]
    netDevices: [{hostInterfaceName: eth1, name: eth0}]
- name: variables
  containerEdits:
    env: [A=b]
containerEdits:
  deviceNodes: [{path: /dev/vfio/vfio}]
"#;

fn world() -> World {
    let world = World::new();
    write(&world, "etc-cdi/vendor.yaml", SPEC);
    world
}

fn write(world: &World, path: &str, text: &str) {
    let path = world.directory.path().join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn names(texts: &[&str]) -> Vec<CdiName> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn a_name_of_an_accelerator_needs_no_file_and_is_no_device() {
    let world = World::new();
    let config = run(&world, &["basalt/accel=opencl"]).unwrap();
    assert_eq!(config.accelerator, Some("opencl".parse().unwrap()));
    assert!(config.cdi_devices.is_empty() && config.devices.is_empty());
    let entry = world.entry("web");
    assert_eq!(world.machines.accelerators.served(), [entry.id.as_str()]);
    let error = world
        .node()
        .devices
        .resolve(&names(&["basalt/accel=opencl"]))
        .unwrap_err();
    assert!(error.to_string().contains("from its start on"), "{error}");
    world.ends_empty().unwrap();
}

fn run(world: &World, texts: &[&str]) -> Result<SandboxConfig, Error> {
    let mut config = SandboxConfig {
        cdi_devices: names(texts),
        ..World::config("web")
    };
    config.process.env = vec!["LEVEL=9".to_owned()];
    let (entry, _) = world.run(config)?;
    Ok(entry.stored().sandbox.config)
}

#[test]
fn a_name_is_the_function_behind_it_each_time_and_its_variables_are_the_commands() {
    let mut world = world();
    let refused = run(&world, &["vendor.com/disk=fast"]).unwrap_err().to_string();
    assert!(
        refused.contains("basalt device bind") && refused.contains(NVME),
        "{refused}"
    );
    bind(&world, NVME).unwrap();
    let config = run(&world, &["vendor.com/disk=fast", "vendor.com/disk=fast"]).unwrap();
    assert_eq!(config.devices, [address(NVME)]);
    assert_eq!(config.process.env, ["DISK=fast", "LEVEL=3", "LEVEL=9"]);
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    // What a name stands for is looked up once.
    fs::remove_file(world.directory.path().join("etc-cdi/vendor.yaml")).unwrap();
    world.restart();
    let entry = world.entry("web");
    world.node().stop(&entry, std::time::Duration::ZERO).unwrap();
    world.node().start(&entry).unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

/// It has no device, and so nothing that its specification gives for one.
#[test]
fn a_clone_has_the_variables_of_its_asker_and_none_of_devices() {
    let world = world();
    bind(&world, NVME).unwrap();
    let config = run(&world, &["vendor.com/disk=fast"]).unwrap();
    assert_eq!(config.process.env, ["DISK=fast", "LEVEL=3", "LEVEL=9"]);
    let web = world.entry("web");
    let node = world.node();
    node.make_snapshot(&web, Some("ready"), OnDevices::Detach).unwrap();
    let asked = node_api::CloneConfig {
        snapshot: "ready".to_owned(),
        name: Some("twin".to_owned()),
        ports: vec!["81:80".to_owned()],
        ..node_api::CloneConfig::default()
    };
    node.clone_of(asked).unwrap();
    let twin = world.entry("twin").stored();
    assert_eq!(twin.sandbox.config.process.env, ["LEVEL=9"]);
    let of_command = |entry: &Entry| {
        let command = entry.stored().command;
        let env = command
            .env
            .iter()
            .map(|variable| variable.as_os_str().to_string_lossy().into_owned());
        env.filter(|variable| !variable.starts_with("PATH="))
            .collect::<Vec<_>>()
    };
    assert_eq!(of_command(&world.entry("twin")), ["LEVEL=9"]);
    // What it is a clone of has its device again, and all of them.
    assert_eq!(of_command(&web), ["DISK=fast", "LEVEL=9"]);
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn a_group_is_all_that_vfio_pci_has_of_it_and_a_listing_tells_the_names() {
    let world = world();
    world
        .kernel
        .link("sys/class/vfio-dev/vfio0/device", "sys/devices/pci0000:00/0000:01:00.0");
    let terms = node_api::BindTerms {
        force: true,
        allow_no_reset: true,
        persist: false,
    };
    for text in [NVME, "0000:00:1f.2", "0000:00:1f.3"] {
        world.node().devices.bind(address(text), terms).unwrap();
    }
    let resolve = |text: &str| world.node().devices.resolve(&names(&[text])).unwrap();
    let all: Vec<_> = resolve("vendor.com/disk=both").functions;
    assert_eq!(all, [NVME, "0000:00:1f.2", "0000:00:1f.3"].map(address));
    assert_eq!(resolve("vendor.com/disk=cdev").functions, [address(NVME)]);
    let listed = world.node().list_devices().unwrap();
    let called = |text: &str| {
        let device = listed.iter().find(|device| device.address == address(text)).unwrap();
        device.cdi.clone()
    };
    let wanted = ["vendor.com/disk=both", "vendor.com/disk=cdev", "vendor.com/disk=fast"];
    assert_eq!(called(NVME), names(&wanted));
    assert_eq!(called("0000:00:1f.3"), names(&wanted[..1]));
    assert_eq!(called("0000:02:00.0"), []);
}

#[test]
fn what_stands_for_nothing_a_sandbox_can_have_is_refused_and_nothing_is_made() {
    let world = world();
    bind(&world, NVME).unwrap();
    for (name, kind, wanted) in [
        (
            "vendor.com/disk=slow",
            ErrorKind::NotFound,
            &["both, cdev, container"][..],
        ),
        ("vendor.com/gpu=0", ErrorKind::NotFound, &["classes disk"]),
        ("other.com/gpu=0", ErrorKind::NotFound, &["devices of vendor.com"]),
        (
            "vendor.com/disk=elsewhere",
            ErrorKind::Invalid,
            &["/dev/vfio/77", "vendor.yaml"],
        ),
        (
            "vendor.com/disk=variables",
            ErrorKind::Invalid,
            &["names no file of VFIO's"],
        ),
        (
            "vendor.com/disk=container",
            ErrorKind::Invalid,
            &[
                "/dev/nvidia0",
                "mount of /usr/lib/card.so",
                "hook createContainer (/usr/bin/card)",
                "interface eth1",
                "basalt device cdi",
            ],
        ),
    ] {
        let refused = run(&world, &[name]).unwrap_err().for_api();
        assert_eq!(refused.kind, kind, "{refused}");
        for part in wanted.iter().chain(&[name]) {
            assert!(refused.message.contains(part), "{part}: {refused}");
        }
        world.node().find("web").unwrap_err();
    }
    // A file that is wrong is told where a name is missing.
    write(&world, "run-cdi/wrong.json", "{\n  \"cdiVersion\": 1\n}");
    let refused = run(&world, &["other.com/gpu=0"]).unwrap_err().to_string();
    assert!(refused.contains("wrong.json cannot be used: line 2"), "{refused}");
    assert_eq!(state(&world, NVME), DeviceState::Ready);
    // Two of one directory, and one of a directory that counts more.
    write(&world, "etc-cdi/again.yaml", SPEC);
    let refused = run(&world, &["vendor.com/disk=fast"]).unwrap_err().for_api();
    assert_eq!(refused.kind, ErrorKind::Conflict, "{refused}");
    write(&world, "run-cdi/last.yaml", SPEC);
    run(&world, &["vendor.com/disk=fast"]).unwrap();
    world.ends_empty().unwrap();
}
