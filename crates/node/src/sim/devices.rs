//! The host's devices under a node that dies or is refused at every place: whatever happens, a device is either a sandbox's to have or as
//! it was before anybody asked.

use std::sync::Arc;

use base::PciAddress;
use node_api::{BindTerms, Device, DeviceState, SandboxConfig};
use vfio::host::simulated::Kernel;

use super::faults::{Fault, Faults};
use super::{Attempt, World, same};
use crate::Error;

pub(super) const NVME: &str = "0000:01:00.0";
const NIC: &str = "0000:02:00.0";

/// Two that the IOMMU cannot tell apart.
const SHARED: [&str; 2] = ["0000:00:1f.2", "0000:00:1f.3"];

/// More places than anything here has.
const MOST: usize = 60;

/// The host's kernel, whose sysfs can refuse.
pub(super) fn kernel(faults: &Faults) -> Kernel {
    let (kernel, faults) = (Kernel::typical(), faults.clone());
    kernel.on_write(Arc::new(move |_, _| faults.call_host("sysfs")));
    kernel
}

/// Every device is what the node says, and of what it does not know nothing is left in sysfs.
pub(super) fn look(world: &World) -> Result<(), String> {
    let untouched = Kernel::typical();
    for device in list(world) {
        let address = device.address;
        let is_bound = matches!(
            device.state,
            DeviceState::Ready | DeviceState::Claimed | DeviceState::Quarantined
        );
        let wanted = match (is_bound, device.state) {
            (true, _) => (Some("vfio-pci".to_owned()), Some("vfio-pci".to_owned())),
            (false, DeviceState::Host | DeviceState::Waiting) => {
                (untouched.driver(address), untouched.driver_override(address))
            }
            (false, state) => return Err(format!("the device {address} is {state}")),
        };
        let found = (world.kernel.driver(address), world.kernel.driver_override(address));
        same(&format!("driver of {address}"), &found, &wanted)?;
        if let Some(sandbox) = device.sandbox {
            let entry = world.node().find(&sandbox).map_err(|error| error.to_string())?;
            same("a machine that has devices", &entry.state().has_vm(), &true)?;
        }
    }
    for machine in world.machines.alive() {
        let its = world.node().devices.of(&machine.sandbox);
        let its: Vec<String> = its.iter().map(PciAddress::to_string).collect();
        let mut has = machine.lock().functions.clone();
        has.sort();
        same("functions of a VMM", &has, &its)?;
    }
    Ok(())
}

fn list(world: &World) -> Vec<Device> {
    world.node().devices.list(&world.node().sandboxes).unwrap()
}

pub(super) fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

pub(super) fn state(world: &World, text: &str) -> DeviceState {
    let all = list(world);
    all.iter().find(|device| device.address == address(text)).unwrap().state
}

pub(super) fn bind(world: &World, text: &str) -> Result<(), Error> {
    world.node().devices.bind(address(text), BindTerms::default())
}

fn forced() -> BindTerms {
    BindTerms {
        force: true,
        allow_no_reset: true,
        persist: false,
    }
}

/// Binds both of the shared group.
fn bind_shared(world: &World) {
    for text in SHARED {
        world.node().devices.bind(address(text), forced()).unwrap();
    }
}

/// Something that is done with devices, what there is before, and the states of the NVMe disk that may come of it: where it was not done, where
/// it was, and where nobody was told.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) prepare: fn(&World),
    pub(super) act: fn(&World) -> Result<(), Error>,
    pub(super) undone: &'static [DeviceState],
    pub(super) done: DeviceState,
}

const CASES: &[Case] = &[
    Case {
        name: "bind",
        prepare: |_| (),
        act: |world| bind(world, NVME),
        undone: &[DeviceState::Host],
        done: DeviceState::Ready,
    },
    Case {
        name: "unbind",
        prepare: |world| bind(world, NVME).unwrap(),
        act: |world| world.node().devices.unbind(address(NVME)),
        // What was begun is finished by the next daemon.
        undone: &[DeviceState::Ready, DeviceState::Host],
        done: DeviceState::Host,
    },
    Case {
        name: "claim and release",
        prepare: |world| {
            bind(world, NVME).unwrap();
            world.run(World::config("web")).unwrap();
        },
        act: |world| {
            let id = &world.entry("web").id;
            world.node().devices.claim(id, &[address(NVME)])?;
            world.node().devices.release(id)
        },
        // A reset that fails.
        undone: &[DeviceState::Ready, DeviceState::Claimed, DeviceState::Quarantined],
        done: DeviceState::Ready,
    },
    Case {
        name: "attach",
        prepare: |world| {
            bind(world, NVME).unwrap();
            world.run(World::config("web")).unwrap();
        },
        act: |world| {
            world
                .node()
                .attach_devices(&world.entry("web"), &[address(NVME)])
                .map(drop)
        },
        // A machine that died takes it along.
        undone: &[DeviceState::Ready, DeviceState::Quarantined],
        done: DeviceState::Claimed,
    },
    Case {
        name: "detach",
        prepare: |world| {
            bind(world, NVME).unwrap();
            world.run(World::config("web")).unwrap();
            let given = world
                .node()
                .attach_devices(&world.entry("web"), &[address(NVME)])
                .unwrap();
            assert_eq!(
                (given[0].guest.as_str(), given[0].names.as_slice()),
                ("0000:00:05.0", ["nvme0n1".to_owned()].as_slice())
            );
        },
        act: |world| {
            world
                .node()
                .detach_devices(&world.entry("web"), &[address(NVME), address(NVME)], false)
        },
        undone: &[DeviceState::Claimed, DeviceState::Quarantined],
        done: DeviceState::Ready,
    },
    Case {
        name: "run with a device",
        prepare: |world| bind(world, NVME).unwrap(),
        act: |world| {
            let devices = vec![address(NVME)];
            world
                .run(SandboxConfig {
                    devices,
                    ..World::config("web")
                })
                .map(drop)
        },
        undone: &[DeviceState::Ready, DeviceState::Quarantined],
        done: DeviceState::Claimed,
    },
    Case {
        name: "virtual functions",
        prepare: |_| (),
        act: |world| world.node().devices.make_vfs(address(NIC), 2).map(drop),
        undone: &[DeviceState::Host],
        done: DeviceState::Host,
    },
];

/// Each place of a case, by number, in a world of its own.
pub(super) fn every_place(case: &Case, fault: Fault) {
    for number in 0..MOST {
        let mut world = World::new();
        (case.prepare)(&world);
        world.faults.arm(&[(number, fault)]);
        let attempt = world.attempt(case.act);
        let fired = world.faults.disarm();
        let said = format!("{}, {fault:?} at {fired:?}", case.name);
        if fired.is_empty() {
            assert!(number > 0, "{said}: it passes no place");
            assert!(matches!(attempt, Attempt::Done), "{said}: {attempt:?}");
            assert_eq!(state(&world, NVME), case.done, "{said}");
            world.ends_empty().unwrap();
            return;
        }
        world.restart();
        let checked = world.is_at_rest().and_then(|()| autoprobe_is_as_before(&world));
        checked.unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
        let found = state(&world, NVME);
        let may_be = match attempt {
            Attempt::Done => found == case.done || case.undone.contains(&DeviceState::Quarantined),
            Attempt::Failed(_) | Attempt::Crashed => case.undone.contains(&found) || found == case.done,
        };
        assert!(may_be, "{said}: {attempt:?}, and then it is {found}");
        world.ends_empty().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
        // Nothing keeps it from being done now.
        let needs_sandbox = matches!(case.name, "claim and release" | "attach" | "detach");
        if found != DeviceState::Quarantined && !needs_sandbox {
            (case.act)(&world).unwrap_or_else(|error| panic!("{said}: {error}"));
            assert_eq!(state(&world, NVME), case.done, "{said}");
            world.ends_empty().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
        }
    }
    panic!("{}: more than {MOST} places", case.name);
}

fn autoprobe_is_as_before(world: &World) -> Result<(), String> {
    let path = "/sys/bus/pci/devices/0000:02:00.0/sriov_drivers_autoprobe";
    same("autoprobe", &world.kernel.text(path), &Some("1".to_owned()))
}

#[test]
fn whatever_sysfs_refuses_a_device_is_ready_or_as_it_was() {
    CASES.iter().for_each(|case| every_place(case, Fault::Refused));
}

#[test]
fn wherever_the_daemon_dies_a_device_is_ready_or_as_it_was() {
    CASES.iter().for_each(|case| every_place(case, Fault::Crash));
}

#[test]
fn where_the_undo_fails_too_asking_again_goes_on_with_how_it_was() {
    for goes_on_by in ["bind", "unbind", "restart"] {
        let mut world = World::new();
        // Taken from its driver, and named to no other.
        world.faults.arm(&[(1, Fault::Refused), (0, Fault::Refused)]);
        let failed = bind(&world, NVME).unwrap_err();
        assert_eq!(world.faults.disarm().len(), 2);
        assert!(matches!(failed, Error::NotTakenBack { .. }), "{failed:?}");
        assert_eq!(state(&world, NVME), DeviceState::Binding);
        match goes_on_by {
            "bind" => {
                bind(&world, NVME).unwrap();
                world.is_at_rest().unwrap();
                world.node().devices.unbind(address(NVME)).unwrap();
            }
            "unbind" => world.node().devices.unbind(address(NVME)).unwrap(),
            _ => world.restart(),
        }
        world.is_at_rest().unwrap();
        assert_eq!(
            world.kernel.driver(address(NVME)).as_deref(),
            Some("nvme"),
            "{goes_on_by}"
        );
    }
}

#[test]
fn a_claim_lives_as_long_as_the_machine_and_the_device_is_reset_after_it() {
    let mut world = World::new();
    bind(&world, NVME).unwrap();
    for name in ["web", "other"] {
        let ports = Vec::new();
        world
            .run(SandboxConfig {
                ports,
                ..World::config(name)
            })
            .unwrap();
    }
    let (web, other) = (world.entry("web").id.clone(), world.entry("other").id.clone());
    let claim = |addresses: &[PciAddress]| world.node().devices.claim(&web, addresses).unwrap();
    let claimed = claim(&[address(NVME), address(NVME)]);
    assert_eq!((claimed.functions, claimed.groups), (vec![address(NVME)], [1].into()));
    world.node().devices.release(&web).unwrap();
    let given = |world: &World| world.node().attach_devices(&world.entry("web"), &[address(NVME)]);
    given(&world).unwrap();
    let refused = given(&world).unwrap_err().to_string();
    assert!(refused.contains("web has the device 0000:01:00.0 already"), "{refused}");
    // It is that one's alone, also for the next daemon.
    for restarted in [false, true] {
        let refused = world
            .node()
            .devices
            .claim(&other, &[address(NVME)])
            .unwrap_err()
            .to_string();
        assert!(refused.contains(&web), "{restarted}: {refused}");
        world.node().devices.unbind(address(NVME)).unwrap_err();
        assert_eq!(world.node().devices.of(&web), [address(NVME)]);
        world.is_at_rest().unwrap();
        world.restart();
    }
    // That was before anybody had it.
    assert_eq!(world.kernel.resets(address(NVME)), 1);
    world
        .node()
        .stop(&world.entry("web"), std::time::Duration::ZERO)
        .unwrap();
    assert_eq!(world.kernel.resets(address(NVME)), 2);
    assert_eq!(state(&world, NVME), DeviceState::Ready);
    world.node().devices.claim(&other, &[address(NVME)]).unwrap();
    world.ends_empty().unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Ready);
}

#[test]
fn the_claim_of_a_sandbox_that_nobody_knows_is_given_back_by_the_next_daemon() {
    let mut world = World::new();
    bind(&world, NVME).unwrap();
    world.node().devices.claim("ffffffffffff", &[address(NVME)]).unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    world.restart();
    assert_eq!(state(&world, NVME), DeviceState::Ready);
    assert_eq!(world.kernel.resets(address(NVME)), 1);
}

#[test]
fn a_group_goes_to_one_sandbox_as_a_whole() {
    let world = World::new();
    let devices = &world.node().devices;
    devices.bind(address(SHARED[0]), forced()).unwrap();
    let refused = devices
        .claim("aaaaaaaaaaaa", &[address(SHARED[0])])
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains(SHARED[1]) && refused.contains("i801_smbus"),
        "{refused}"
    );
    bind_shared(&world);
    devices.claim("aaaaaaaaaaaa", &[address(SHARED[0])]).unwrap();
    assert_eq!(state(&world, SHARED[1]), DeviceState::Claimed);
    assert_eq!(devices.of("aaaaaaaaaaaa"), [address(SHARED[0])]);
    let refused = devices
        .claim("bbbbbbbbbbbb", &[address(SHARED[1])])
        .unwrap_err()
        .to_string();
    assert!(refused.contains("aaaaaaaaaaaa"), "{refused}");
    // The same one can have the rest, and gives back a group only as a whole.
    devices.claim("aaaaaaaaaaaa", &[address(SHARED[1])]).unwrap();
    devices.release_some("aaaaaaaaaaaa", &[address(SHARED[0])]).unwrap();
    assert_eq!(state(&world, SHARED[0]), DeviceState::Claimed);
    assert_eq!(devices.of("aaaaaaaaaaaa"), [address(SHARED[1])]);
    devices.release_some("aaaaaaaaaaaa", &[address(SHARED[1])]).unwrap();
    for text in SHARED {
        assert_eq!(state(&world, text), DeviceState::Ready, "{text}");
    }
}

#[test]
fn a_claim_is_of_all_or_of_none() {
    let world = World::new();
    let devices = &world.node().devices;
    bind(&world, NVME).unwrap();
    let refused = devices
        .claim("aaaaaaaaaaaa", &[address(NVME), address(NIC)])
        .unwrap_err();
    assert!(
        refused.to_string().contains(&format!("basalt device bind {NIC}")),
        "{refused}"
    );
    assert_eq!(state(&world, NVME), DeviceState::Ready);
    let refused = devices.claim("aaaaaaaaaaaa", &[address("0000:7f:00.0")]).unwrap_err();
    assert_eq!(refused.for_api().kind, node_api::ErrorKind::NotFound);
}

#[test]
fn what_cannot_be_reset_is_nobodys_until_it_was_the_hosts_again() {
    let mut world = World::new();
    bind(&world, NVME).unwrap();
    world.node().devices.claim("aaaaaaaaaaaa", &[address(NVME)]).unwrap();
    world.faults.arm(&[(0, Fault::Refused)]);
    world.node().devices.release("aaaaaaaaaaaa").unwrap();
    assert_eq!(world.faults.disarm(), ["sysfs"]);
    for _ in 0..2 {
        assert_eq!(state(&world, NVME), DeviceState::Quarantined);
        let refused = world
            .node()
            .devices
            .claim("bbbbbbbbbbbb", &[address(NVME)])
            .unwrap_err();
        assert!(refused.to_string().contains("quarantine"), "{refused}");
        bind(&world, NVME).unwrap_err();
        world.restart();
    }
    world.node().devices.unbind(address(NVME)).unwrap();
    bind(&world, NVME).unwrap();
    // One without a way to be reset is given to the next only where somebody has said so.
    for (terms, wanted) in [
        (forced(), DeviceState::Ready),
        (BindTerms::default(), DeviceState::Quarantined),
    ] {
        world
            .kernel
            .set("sys/bus/pci/devices/0000:01:00.0/reset_method", "flr\n");
        world.node().devices.bind(address(NVME), terms).unwrap();
        world.node().devices.claim("aaaaaaaaaaaa", &[address(NVME)]).unwrap();
        world.kernel.set("sys/bus/pci/devices/0000:01:00.0/reset_method", "\n");
        world.node().devices.release("aaaaaaaaaaaa").unwrap();
        assert_eq!(state(&world, NVME), wanted);
    }
}

impl World {
    /// The host is started again, something is as it was not before, and then a daemon comes.
    fn reboot(&mut self, boot: &str, change: impl Fn(&Kernel)) {
        boot.clone_into(&mut self.boot);
        self.kernel.reboot();
        change(&self.kernel);
        self.restart();
    }
}

const PERSIST: BindTerms = BindTerms {
    persist: true,
    allow_no_reset: false,
    force: false,
};

#[test]
fn after_a_boot_only_what_is_to_persist_is_bound() {
    let mut world = World::new();
    bind(&world, NVME).unwrap();
    world.node().devices.bind(address(NIC), PERSIST).unwrap();
    world.node().devices.claim("aaaaaaaaaaaa", &[address(NIC)]).unwrap();
    world.reboot("second", |_| ());
    assert_eq!(
        (state(&world, NVME), state(&world, NIC)),
        (DeviceState::Host, DeviceState::Ready)
    );
    // The terms are those that were said last.
    world.node().devices.bind(address(NIC), BindTerms::default()).unwrap();
    bind(&world, NVME).unwrap();
    world.node().devices.bind(address(NVME), PERSIST).unwrap();
    world.reboot("third", |_| ());
    assert_eq!(
        (state(&world, NVME), state(&world, NIC)),
        (DeviceState::Ready, DeviceState::Host)
    );
    world.node().devices.unbind(address(NVME)).unwrap();
    world.reboot("fourth", |_| ());
    assert_eq!(state(&world, NVME), DeviceState::Host);
}

#[test]
fn what_is_in_the_way_after_a_boot_is_told_and_the_device_waits_for_its_end() {
    let flags = "sys/devices/pci0000:00/0000:02:00.0/net/eth0/flags";
    for ends in ["unbind", "bind", "restart"] {
        let mut world = World::new();
        world.node().devices.bind(address(NIC), PERSIST).unwrap();
        world.reboot("second", |kernel| {
            kernel.set(flags, "0x1003\n");
            kernel.link("sys/class/net/eth0", "sys/devices/pci0000:00/0000:02:00.0/net/eth0");
        });
        let all = list(&world);
        let nic = all.iter().find(|device| device.address == address(NIC)).unwrap();
        assert!(
            nic.state == DeviceState::Waiting && nic.why.as_ref().unwrap().contains("eth0 is up"),
            "{nic:?}"
        );
        let refused = world.node().devices.claim("aaaaaaaaaaaa", &[address(NIC)]).unwrap_err();
        assert!(refused.to_string().contains("eth0 is up"), "{refused}");
        world.is_at_rest().unwrap();
        // It is the host's until then, and stays with the driver that it has there.
        let wanted = match ends {
            "unbind" => {
                world.node().devices.unbind(address(NIC)).unwrap();
                assert_eq!(world.kernel.driver(address(NIC)).as_deref(), Some("igb"));
                world.restart();
                DeviceState::Host
            }
            "bind" => {
                bind(&world, NIC).unwrap_err();
                world.kernel.set(flags, "0x1002\n");
                bind(&world, NIC).unwrap();
                DeviceState::Ready
            }
            _ => {
                world.kernel.set(flags, "0x1002\n");
                world.restart();
                DeviceState::Ready
            }
        };
        assert_eq!(state(&world, NIC), wanted, "{ends}");
        world.is_at_rest().unwrap();
    }
}

#[test]
fn virtual_functions_are_bound_each_and_keep_their_number_while_they_are() {
    let world = World::new();
    let devices = &world.node().devices;
    let vfs = devices.make_vfs(address(NIC), 2).unwrap();
    assert_eq!(vfs.len(), 2);
    let refused = devices.bind(vfs[0], PERSIST).unwrap_err().to_string();
    assert!(refused.contains("--persist"), "{refused}");
    devices.bind(vfs[0], BindTerms::default()).unwrap();
    let refused = devices.make_vfs(address(NIC), 0).unwrap_err().to_string();
    assert!(refused.contains(&format!("unbind {}", vfs[0])), "{refused}");
    assert_eq!(devices.make_vfs(address(NIC), 2).unwrap(), vfs, "there are as many");
    let refused = devices
        .bind(address(NIC), BindTerms::default())
        .unwrap_err()
        .to_string();
    assert!(refused.contains("2 virtual functions"), "{refused}");
    devices.unbind(vfs[0]).unwrap();
    assert!(devices.make_vfs(address(NIC), 0).unwrap().is_empty());
}

#[test]
fn what_somebody_else_has_bound_or_taken_away_is_seen() {
    let mut world = World::new();
    bind(&world, NVME).unwrap();
    // Open elsewhere, the kernel would wait.
    world.kernel.claim("dev/vfio/1");
    let refused = world.node().devices.unbind(address(NVME)).unwrap_err().to_string();
    assert!(refused.contains("fuser -v /dev/vfio/1"), "{refused}");
    let own_file = "sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3/dev";
    world.kernel.set(own_file, "511:3\n");
    for path in ["dev/vfio/devices/vfio3", "proc/4711/fd/9"] {
        world.kernel.device(path, "511:3");
    }
    world.kernel.set("proc/4711/comm", "qemu\n");
    let refused = world.node().devices.unbind(address(NVME)).unwrap_err().to_string();
    let wanted = ["by /dev/vfio/devices/vfio3", "end qemu (process 4711)"];
    assert!(wanted.iter().all(|wanted| refused.contains(wanted)), "{refused}");
    world.kernel.remove("proc/4711");
    // Pulled out, there is nothing to be given back.
    world.kernel.remove("sys/bus/pci/devices/0000:01:00.0");
    let all = list(&world);
    let gone = all.iter().find(|device| device.address == address(NVME)).unwrap();
    assert!(gone.identity.is_none() && gone.why.is_some(), "{gone:?}");
    world.node().devices.unbind(address(NVME)).unwrap();
    assert!(!list(&world).iter().any(|device| device.address == address(NVME)));
    // Bound by hand, or by a daemon whose database is lost, it can be given back all the same; and twice.
    world
        .kernel
        .set("sys/bus/pci/devices/0000:02:00.0/driver_override", "vfio-pci\n");
    world.kernel.remove("sys/bus/pci/devices/0000:02:00.0/driver");
    world.restart();
    for _ in 0..2 {
        world.node().devices.unbind(address(NIC)).unwrap();
        assert_eq!(world.kernel.driver(address(NIC)).as_deref(), Some("igb"));
    }
    world.node().devices.unbind(address("0000:7f:00.0")).unwrap_err();
}

#[test]
fn a_disk_with_the_nodes_own_files_is_refused() {
    let world = World::new();
    let below = "sys/devices/pci0000:00/0000:00:1c.0/0000:01:00.0/nvme/nvme0/nvme0n1";
    world.kernel.set(&format!("{below}/dev"), "259:0\n");
    world.kernel.link("sys/class/block/nvme0n1", below);
    let state = world.node().paths.state().display().to_string();
    let line = format!("22 1 259:0 / {state} rw - ext4 /dev/nvme0n1 rw\n");
    world.kernel.set("proc/self/mountinfo", &line);
    let refused = world
        .node()
        .devices
        .bind(address(NVME), forced())
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("Basalt's own files") && refused.contains(&state),
        "{refused}"
    );
}
