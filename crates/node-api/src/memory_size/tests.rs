//! How memory is divided, and what cannot be. Knows no node.

use super::*;
use crate::class::Class;
use crate::config::tests::config;

const GIB: u64 = 1 << 30;

fn of(memory: u64, boot: Option<u64>, most: Option<u64>) -> SandboxConfig {
    let mut config = config();
    let mib = |size: u64| ByteSize::mib(size);
    (config.resources.memory, config.resources.boot_memory) = (mib(memory), boot.map(mib));
    config.resources.max_memory = most.map(mib);
    config
}

#[test]
fn what_is_not_booted_with_is_plugged_in_whole_sections() {
    let fixed = of(512, None, None).resources;
    assert_eq!((fixed.region(), fixed.plugged()), (None, ByteSize(0)));
    let divided = of(1026, Some(512), None).resources;
    assert_eq!(
        (divided.boots_with(), divided.plugged()),
        (ByteSize::mib(512), ByteSize::mib(514))
    );
    assert_eq!(divided.region(), Some(ByteSize::mib(640)), "rounded up");
    let grows = of(512, None, Some(1024)).resources;
    assert_eq!(
        (grows.plugged(), grows.region()),
        (ByteSize(0), Some(ByteSize::mib(512)))
    );
    assert!(!grows.boots() && !fixed.boots());
}

#[test]
fn one_machine_is_template_of_all_that_boot_with_as_much() {
    let of_machine = |memory, boot, most| of(memory, boot, most).resources.of_machine();
    let one = of_machine(1024, Some(256), None);
    for other in [
        of_machine(512, Some(256), Some(1024)),
        of_machine(256, None, Some(768)),
        of_machine(100 << 10, Some(256), None),
        one.of_machine(),
    ] {
        assert_eq!(one, other);
    }
    assert_eq!(
        (one.memory, one.region()),
        (ByteSize::mib(256), Some(HOTPLUG_ADDRESSES))
    );
    let fixed = of_machine(256, None, None);
    assert_ne!(one, fixed, "it has no device for it");
    assert_eq!(fixed, of_machine(256, Some(256), Some(256)), "nothing can be plugged");
    assert_ne!(one, of_machine(1024, Some(512), None));
    let large = of(256 << 10, Some(256), None).resources;
    assert!(large.boots() && large.hotplug_addresses() > Some(HOTPLUG_ADDRESSES));
}

#[test]
fn another_size_leaves_the_ends_where_they_are() {
    let resources = of(512, None, Some(1024)).resources;
    let more = resources.resized(ByteSize::mib(1024)).unwrap();
    let back = more.resized(ByteSize::mib(512)).unwrap();
    for other in [&more, &back] {
        assert_eq!(
            (other.region(), other.boots_with()),
            (resources.region(), ByteSize::mib(512))
        );
    }
    let told = |resources: &Resources, mib| resources.resized(mib).unwrap_err().to_string();
    for outside in [511, 1025] {
        assert!(told(&more, ByteSize::mib(outside)).contains("512 MiB to 1 GiB"));
    }
    assert!(told(&more, ByteSize::mib(513)).contains("2 MiB"));
    let fixed = of(512, None, None).resources;
    assert!(told(&fixed, ByteSize::mib(512)).contains("--max-memory"));
}

#[test]
fn what_cannot_be_divided_so_is_refused_with_what_can() {
    let told = |config: &SandboxConfig| config.validate().unwrap_err().to_string();
    assert!(told(&of(512, Some(514), None)).contains("no more with --boot-memory"));
    assert!(told(&of(512, None, Some(510))).contains("no less with --max-memory"));
    assert!(told(&of(513, Some(512), None)).contains("multiples of 2 MiB"));
    assert!(told(&of(512, None, Some(513))).contains("multiples of 2 MiB"));
    let mut bare = of(512, None, Some(1024));
    bare.resources.class = Class::Bare;
    assert!(told(&bare).contains("--class bare"));
    let mut cloned = of(512, Some(256), None);
    cloned.template = Some("web".into());
    assert!(told(&cloned).contains("--template"));
    let mut none = of(512, None, None);
    none.device_start = Some(DeviceStart::Late);
    assert!(told(&none).contains("--device ADDRESS"));
    let mut ready = of(512, None, None);
    ready.memory_ready = true;
    assert!(told(&ready).contains("--boot-memory SIZE"));
    ready.resources.boot_memory = Some(ByteSize::mib(256));
    assert_eq!(ready.validate(), Ok(()));
    ready.resources = ready.resources.resized(ByteSize::mib(256)).unwrap();
    assert_eq!(ready.validate(), Ok(()), "it has what it boots with, for now");
    let mut eager = of(512, Some(256), None);
    (eager.devices, eager.device_start) = (vec!["0000:01:00.0".parse().unwrap()], Some(DeviceStart::Eager));
    assert!(told(&eager).contains("--device-start async"));
}

#[test]
fn a_balloon_is_what_is_beyond_the_boot_memory() {
    let mut config = of(3 << 10, None, None);
    (config.devices, config.device_start) = (vec!["0000:01:00.0".parse().unwrap()], Some(DeviceStart::AsyncBalloon));
    let inflated = |boot: Option<u64>| {
        let mut config = config.clone();
        config.resources.boot_memory = boot.map(ByteSize::mib);
        assert_eq!(config.validate(), Ok(()));
        config.choose_boot_memory();
        assert_eq!((config.resources.boot_memory, config.resources.region()), (None, None));
        assert_eq!(config.validate(), Ok(()));
        config.resources.inflated
    };
    assert_eq!(inflated(None), Some(ByteSize::gib(2)));
    assert_eq!(inflated(Some(512)), Some(ByteSize::mib(2560)));
    assert_eq!(inflated(Some(3 << 10)), None);
    let told = |config: &SandboxConfig| config.validate().unwrap_err().to_string();
    let mut more = config.clone();
    more.resources.max_memory = Some(ByteSize::gib(4));
    assert!(told(&more).contains("leave --max-memory out"));
    let mut bare = config.clone();
    bare.resources.class = Class::Bare;
    assert!(told(&bare).contains("--device-start late"));
    config.template = Some("web".into());
    assert!(told(&config).contains("--device-start late"));
}

#[test]
fn a_guest_with_an_iommu_has_all_of_its_memory_from_the_boot_on() {
    let lazy = |change: fn(&mut SandboxConfig)| {
        let mut config = of(512, None, None);
        config.device_start = Some(DeviceStart::Lazy);
        change(&mut config);
        config.choose_boot_memory();
        config.choose_iommu();
        (config.validate().err().map(|error| error.to_string()), config)
    };
    // Without a device, too: one may come.
    let (refused, config) = lazy(|_| ());
    assert!(refused.is_none() && config.resources.guest_iommu);
    let (refused, config) = lazy(|c| {
        c.resources.memory = ByteSize::gib(3);
        c.devices = vec!["0000:01:00.0".parse().unwrap()];
    });
    assert!(refused.is_none() && config.resources.boot_memory.is_none());
    for (change, said) in [
        (
            (|c| c.resources.boot_memory = Some(ByteSize::mib(256))) as fn(&mut SandboxConfig),
            "--boot-memory",
        ),
        (|c| c.resources.max_memory = Some(ByteSize::gib(1)), "--max-memory"),
        (|c| c.resources.class = Class::Bare, "--class bare"),
        (|c| c.template = Some("web".into()), "--template"),
    ] {
        let told = lazy(change).0.unwrap();
        assert!(told.contains(said) && told.contains("lazy"), "{told}");
    }
    let other = of(512, None, None);
    assert!(!other.resources.guest_iommu);
    let with = Resources {
        guest_iommu: true,
        ..other.resources.clone()
    };
    assert_ne!(with.of_machine(), other.resources.of_machine(), "it is another machine");
}

#[test]
fn a_large_sandbox_with_devices_boots_with_a_gibibyte() {
    let chosen = |change: fn(&mut SandboxConfig)| {
        let mut config = of(3 << 10, None, None);
        config.devices = vec!["0000:01:00.0".parse().unwrap()];
        change(&mut config);
        config.choose_boot_memory();
        assert_eq!(config.check_memory(), Ok(()));
        config.resources.boot_memory.map(ByteSize::bytes)
    };
    assert_eq!(chosen(|_| ()), Some(GIB));
    assert_eq!(chosen(|c| c.device_start = Some(DeviceStart::Async)), Some(GIB));
    assert_eq!(
        chosen(|c| c.resources.memory = ByteSize(3 * GIB + 4096)),
        Some(GIB + 4096)
    );
    assert_eq!(
        chosen(|c| c.resources.boot_memory = Some(ByteSize::gib(2))),
        Some(2 * GIB)
    );
    assert_eq!(chosen(|c| c.resources.memory = USUAL_BOOT), None);
    assert_eq!(chosen(|c| c.devices.clear()), None);
    assert_eq!(chosen(|c| c.device_start = Some(DeviceStart::Late)), None);
    assert_eq!(chosen(|c| c.device_start = Some(DeviceStart::Eager)), None);
    assert_eq!(chosen(|c| c.template = Some("web".into())), None);
    assert_eq!(chosen(|c| c.resources.class = Class::Bare), None);
}

#[test]
fn what_is_mapped_are_whole_sections_of_what_is_plugged() {
    for (memory, boot, mapped) in [
        (1050, Some(256), 1152),
        (1280, Some(256), 1280),
        (258, Some(256), 384),
        (512, None, 512),
    ] {
        let resources = of(memory, boot, None).resources;
        assert_eq!(resources.mapped(), ByteSize::mib(mapped), "{memory} MiB");
    }
}

#[test]
fn what_is_held_is_what_it_had_until_somebody_knows_better() {
    let old = of(512, Some(256), Some(1024)).resources;
    assert_eq!(old.held(), ByteSize::mib(1024), "nobody has kept it");
    let kept = old.holding(ByteSize(0));
    assert_eq!((kept.held(), kept.mapped()), (ByteSize::mib(512), ByteSize::mib(512)));
    let less = kept.resized(ByteSize::mib(256)).unwrap();
    assert_eq!((less.memory, less.held()), (ByteSize::mib(256), ByteSize::mib(512)));
    assert_eq!(less.mapped(), ByteSize::mib(512));
    let again = less.resized(ByteSize::mib(300)).unwrap();
    assert_eq!(again.held(), ByteSize::mib(512), "it gives back still");
    let more = again.resized(ByteSize::mib(1024)).unwrap();
    assert_eq!(more.held(), ByteSize::mib(1024));
    assert_eq!(more.of_machine().held_memory, None);
    let fixed = of(512, None, None).resources.holding(ByteSize::mib(1024));
    assert_eq!((fixed.held_memory, fixed.held()), (None, ByteSize::mib(512)));
    for held in [256, 2048] {
        let mut config = of(512, Some(256), Some(1024));
        config.resources.held_memory = Some(ByteSize::mib(held));
        let told = config.validate().unwrap_err().to_string();
        assert!(told.contains("leave held_memory out"), "{told}");
    }
}
