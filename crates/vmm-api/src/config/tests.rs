//! What a configuration may say, and what is refused by its name.

use super::*;
use crate::devices::RngConfig;

fn config() -> VmConfig {
    VmConfig {
        cpus: 1,
        memory: ByteSize::mib(128),
        cpu: CpuModel::V3,
        kernel: FdRef(0),
        initramfs: None,
        cmdline: String::new(),
        kvm: None,
        reservation: None,
        memory_mode: MemoryMode::default(),
        busy_poll_us: None,
        serial: None,
        serial_keep: None,
        acpi_hotplug: false,
        devices: vec![DeviceSpec::new("rng", &RngConfig {}).unwrap()],
    }
}

#[test]
fn a_sensible_one_passes_and_survives_json() {
    let config = config();
    assert_eq!(config.validate(), Ok(()));
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<VmConfig>(&text).unwrap(), config);
}

#[test]
fn fields_by_the_names_of_former_daemons_are_understood() {
    let asked = VmConfig {
        reservation: Some(FdRef(1)),
        busy_poll_us: Some(7),
        ..config()
    };
    let text = serde_json::to_string(&asked).unwrap();
    let former = text
        .replace("busy_poll_us", "linger_us")
        .replace("reservation", "claim");
    assert!(former.contains("linger_us") && former.contains("claim"), "{former}");
    assert_eq!(serde_json::from_str::<VmConfig>(&former).unwrap(), asked);
}

#[test]
fn what_a_vm_is_restored_from_is_checked_too() {
    let files = SnapshotFiles {
        state: FdRef(0),
        memory: vec![FdRef(1), FdRef(2)],
    };
    let mut restore = RestoreConfig {
        reservation: None,
        files,
        kvm: None,
        serial: None,
        serial_keep: None,
        devices: config().devices,
        write_set: vec![(1, 2)],
        skip_notification: true,
        paging: Paging::Mapped,
        anonymous_holes: false,
    };
    assert_eq!(restore.validate(), Ok(()));
    let (userfaultfd, order) = (FdRef(3), vec![(7, 1)]);
    for paging in [Paging::Mapped, Paging::Eager, Paging::OnDemand { userfaultfd, order }] {
        restore.paging = paging;
        let text = serde_json::to_string(&restore).unwrap();
        // A VMM of before knows no other way.
        assert_eq!(text.contains("paging"), restore.paging != Paging::Mapped, "{text}");
        assert_eq!(serde_json::from_str::<RestoreConfig>(&text).unwrap(), restore);
        // Neither does it know that field but by its former name.
        let renamed = text.replace("untold", "skip_notification");
        assert_ne!(renamed, text);
        assert_eq!(serde_json::from_str::<RestoreConfig>(&renamed).unwrap(), restore);
    }
    restore.devices.push(restore.devices[0].clone());
    assert_eq!(restore.validate(), Err(ConfigError::DuplicateDevice("rng".into())));
    let function = VfioPciConfig {
        name: "0000:00:04.0".into(),
        group: Some(FdRef(5)),
        container: Some(FdRef(4)),
        ..VfioPciConfig::default()
    };
    restore.devices[1] = DeviceSpec::new("disk", &function).unwrap();
    let refused = restore.validate().unwrap_err();
    assert_eq!(refused, ConfigError::Function("disk".into()));
}

#[test]
fn further_functions_of_a_group_come_by_name_alone() {
    let function = |fds: Option<u32>| VfioPciConfig {
        name: "0000:00:04.0".into(),
        group: fds.map(FdRef),
        container: fds.map(|fd| FdRef(fd + 1)),
        ..VfioPciConfig::default()
    };
    let text = |fds| serde_json::to_string(&function(fds)).unwrap();
    assert_eq!(text(None), r#"{"name":"0000:00:04.0"}"#);
    for fds in [None, Some(3)] {
        let read = serde_json::from_str::<VfioPciConfig>(&text(fds)).unwrap();
        assert_eq!(read, function(fds));
    }
}

#[test]
fn each_limit_is_named() {
    let broken = |change: fn(&mut VmConfig)| {
        let mut config = config();
        change(&mut config);
        config.validate().unwrap_err()
    };
    assert_eq!(broken(|c| c.cpus = 0), ConfigError::Cpus(0));
    assert_eq!(broken(|c| c.cpus = 1000), ConfigError::Cpus(1000));
    assert_eq!(
        broken(|c| c.memory = ByteSize::mib(1)),
        ConfigError::MemoryTooSmall(ByteSize::mib(1))
    );
    assert_eq!(
        broken(|c| c.memory.0 += 1),
        ConfigError::MemoryAlignment(ByteSize((128 << 20) + 1))
    );
    assert_eq!(broken(|c| c.cmdline = "x".repeat(2048)), ConfigError::Cmdline(2048));
    assert_eq!(broken(|c| c.cmdline = "a\0b".into()), ConfigError::CmdlineZero);
    let both = broken(|c| (c.kvm, c.reservation) = (Some(FdRef(1)), Some(FdRef(2))));
    assert_eq!(both, ConfigError::TwoEngines);
    assert_eq!(broken(|c| c.busy_poll_us = Some(1)), ConfigError::BusyPoll);
    let identity = broken(|c| c.memory_mode = MemoryMode::Identity);
    assert_eq!(identity, ConfigError::Identity);
    let function = VfioPciConfig {
        name: "0000:00:04.0".into(),
        group: Some(FdRef(1)),
        container: Some(FdRef(2)),
        ..VfioPciConfig::default()
    };
    let mut given = config();
    given.devices.push(DeviceSpec::new("disk", &function).unwrap());
    assert_eq!(given.validate(), Ok(()), "KVM's guests can have it, too");
    (given.reservation, given.memory_mode) = (Some(FdRef(3)), MemoryMode::Identity);
    assert_eq!(given.validate(), Err(ConfigError::Identity));
    assert!(given.devices.pop().is_some());
    assert_eq!(given.validate(), Ok(()));
    given.acpi_hotplug = true;
    assert_eq!(given.validate(), Err(ConfigError::Identity), "it gets no function");
    given.acpi_hotplug = false;
    given.reservation = Some(FdRef(3));
    assert_eq!(given.validate(), Ok(()));
    assert_eq!(
        broken(|c| c.devices.push(c.devices[0].clone())),
        ConfigError::DuplicateDevice("rng".into())
    );
}

#[test]
fn a_vm_has_one_balloon_smaller_than_its_memory() {
    let balloon = |id: &str, text: &str| DeviceSpec {
        id: id.into(),
        kind: "balloon".into(),
        config: serde_json::from_str(text).unwrap(),
    };
    let with = |devices: Vec<DeviceSpec>| VmConfig { devices, ..config() }.validate();
    assert_eq!(with(vec![balloon("a", r#"{"target":134213632}"#)]), Ok(()));
    for target in [128 << 20, 4097, u64::MAX] {
        let refused = with(vec![balloon("a", &format!(r#"{{"target":{target}}}"#))]).unwrap_err();
        assert!(matches!(refused, ConfigError::BalloonTarget { .. }), "{refused:?}");
    }
    let (target, memory) = (ByteSize(4097), ByteSize::mib(128));
    let told = ConfigError::BalloonTarget { target, memory }.to_string();
    assert!(told.contains("4097") && told.contains("128 MiB"), "{told}");
    let odd = with(vec![balloon("a", r#"{"size":1}"#)]).unwrap_err();
    assert!(matches!(odd, ConfigError::Balloon { .. }), "{odd:?}");
    let two = vec![balloon("a", "{}"), balloon("b", "{}")];
    assert_eq!(check_devices(&two, false), Err(ConfigError::SecondBalloon("b".into())));
    assert_eq!(balloon_device(&two[..1]), Ok(Some(BalloonConfig::default())));
}

#[test]
fn a_vm_has_one_iommu_and_then_all_of_its_memory_from_the_boot_on() {
    let device = |id: &str, kind: &str, text: &str| DeviceSpec {
        id: id.into(),
        kind: kind.into(),
        config: serde_json::from_str(text).unwrap(),
    };
    let iommu = |id| device(id, "iommu", "{}");
    assert_eq!(check_devices(&[iommu("a")], false), Ok(()));
    let refused = [
        (
            vec![iommu("a"), iommu("b")],
            false,
            ConfigError::SecondIommu("b".into()),
        ),
        (vec![iommu("a")], true, ConfigError::IommuMemory("a".into())),
        (
            vec![device("m", "mem", r#"{"region_size":134217728}"#), iommu("a")],
            false,
            ConfigError::IommuMemory("a".into()),
        ),
    ];
    for (devices, owns_cpus, error) in refused {
        assert_eq!(check_devices(&devices, owns_cpus), Err(error));
    }
}

#[test]
fn hot_pluggable_memory_is_one_region_that_a_guest_can_use() {
    let json = |text: &str| DeviceSpec {
        id: "memory".into(),
        kind: "mem".into(),
        config: serde_json::from_str(text).unwrap(),
    };
    let with = |devices: Vec<DeviceSpec>| VmConfig { devices, ..config() }.validate();
    let region = |text: &str| with(vec![json(text)]);
    assert_eq!(region(r#"{"region_size":536870912}"#), Ok(()));
    let all = r#"{"region_size":536870912,"requested_size":536870912,"block_size":4194304,"node_id":1}"#;
    assert_eq!(region(all), Ok(()));
    for size in [0, 64 << 20, (128 << 20) + 4096, (512_u64 << 30) + (128 << 20)] {
        let refused = region(&format!(r#"{{"region_size":{size}}}"#));
        assert_eq!(refused, Err(ConfigError::MemRegion(ByteSize(size))));
    }
    for block in [0, 1 << 20, 3 << 20, 256 << 20] {
        let refused = region(&format!(r#"{{"region_size":536870912,"block_size":{block}}}"#));
        assert_eq!(refused, Err(ConfigError::MemBlock(ByteSize(block))));
    }
    for requested in [1 << 20, (512 << 20) + (2 << 20)] {
        let refused = region(&format!(r#"{{"region_size":536870912,"requested_size":{requested}}}"#));
        assert!(matches!(refused, Err(ConfigError::MemRequested { .. })), "{refused:?}");
    }
    for max in [1_u64 << 20, (512 << 20) + (128 << 20)] {
        let refused = region(&format!(r#"{{"region_size":536870912,"max_size":{max}}}"#));
        assert!(matches!(refused, Err(ConfigError::MemMax { .. })), "{refused:?}");
    }
    let part = r#"{"region_size":536870912,"max_size":134217728,"requested_size":"#;
    assert_eq!(region(&format!("{part}134217728}}")), Ok(()));
    assert!(region(&format!("{part}136314880}}")).is_err(), "there is no more of it");
    assert_eq!(region(r#"{"region_size":536870912,"max_size":0}"#), Ok(()));
    assert!(matches!(region(r#"{"size":1}"#), Err(ConfigError::Mem { .. })));
    let two = with(vec![
        json(all),
        DeviceSpec {
            id: "more".into(),
            ..json(all)
        },
    ]);
    assert_eq!(two, Err(ConfigError::SecondMem("more".into())));
    let mut pinned = VmConfig {
        devices: vec![json(all)],
        ..config()
    };
    pinned.reservation = Some(FdRef(1));
    assert_eq!(pinned.validate(), Err(ConfigError::MemPinned("memory".into())));
    let function = VfioPciConfig {
        name: "0000:00:04.0".into(),
        group: Some(FdRef(1)),
        container: Some(FdRef(2)),
        ..VfioPciConfig::default()
    };
    let beside = [json(all), DeviceSpec::new("disk", &function).unwrap()];
    assert_eq!(
        check_devices(&beside, false),
        Ok(()),
        "a block is mapped before it is plugged"
    );
}
