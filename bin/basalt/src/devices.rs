//! `basalt device`: each verb asks the daemon and shows what it says.

use anyhow::Result;
use node_api::message::Item;
use node_api::{BindTerms, Device, DeviceGroup, DeviceRequest, Request};

use crate::cli::{DeviceName, DeviceVerb};
use crate::output::{Output, table};
use crate::{cdi_spec, daemon};

/// `basalt device ...`.
pub(crate) fn device(verb: &DeviceVerb, output: &Output) -> Result<u8> {
    let (asked, shown): (_, fn(&[Device]) -> String) = match verb {
        DeviceVerb::Cdi(args) => {
            let spec = cdi_spec::make(&args.kind, &args.addresses, &ask(DeviceRequest::List)?)?;
            // Whoever keeps it keeps JSON.
            let text = serde_json::to_string_pretty(&spec)?;
            output.result(&spec, || format!("{text}\n"))?;
            return Ok(0);
        }
        DeviceVerb::Ls => (DeviceRequest::List, list),
        DeviceVerb::Bind(args) => {
            let terms = BindTerms {
                persist: args.persist,
                allow_no_reset: args.allow_no_reset,
                force: args.force,
            };
            let address = args.address;
            (DeviceRequest::Bind { address, terms }, states)
        }
        DeviceVerb::Unbind(args) => (DeviceRequest::Unbind { address: args.address }, drivers),
        DeviceVerb::Attach(args) => {
            let sandbox = args.sandbox.clone();
            let (addresses, cdi) = DeviceName::split(&args.devices);
            let asked = DeviceRequest::Attach {
                sandbox,
                addresses,
                cdi,
            };
            (asked, in_guest)
        }
        DeviceVerb::Detach(args) => {
            let (addresses, cdi) = DeviceName::split(&args.devices);
            let asked = DeviceRequest::Detach {
                sandbox: args.sandbox.clone(),
                addresses,
                cdi,
                force: args.force,
            };
            (asked, states)
        }
        DeviceVerb::Vfs(args) => {
            let (address, count) = (args.address, args.count);
            (DeviceRequest::MakeVfs { address, count }, addresses)
        }
    };
    let devices = ask(asked)?;
    output.result(&devices, || shown(&devices))?;
    Ok(0)
}

fn ask(asked: DeviceRequest) -> Result<Vec<Device>> {
    let mut devices: Vec<Device> = Vec::new();
    daemon::connect()?.ask_each(Request::Devices(asked), &mut |item| {
        if let Item::Device(device) = item {
            devices.push(*device);
        }
    })?;
    Ok(devices)
}

const COLUMNS: [&str; 11] = [
    "ADDRESS", "STATE", "SANDBOX", "DRIVER", "GROUP", "NODE", "RESET", "VFS", "CDI", "CLASS", "NAME",
];

/// A row each, and below what is wrong.
fn list(devices: &[Device]) -> String {
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    rows.extend(devices.iter().map(row));
    let mut text = table(&rows);
    for (device, why) in devices.iter().filter_map(|device| Some((device, device.why.as_ref()?))) {
        text.push_str(&format!("{}: {why}\n", device.address));
    }
    text
}

fn row(device: &Device) -> Vec<String> {
    let sandbox = device.sandbox_name.as_ref().or(device.sandbox.as_ref());
    let identity = device.identity.as_ref();
    let names: Vec<String> = device.cdi.iter().map(ToString::to_string).collect();
    vec![
        device.address.to_string(),
        device.state.to_string(),
        sandbox.cloned().unwrap_or_default(),
        device.driver.clone().unwrap_or_default(),
        device.group.as_ref().map(group).unwrap_or_default(),
        device.numa_node.map(|node| node.to_string()).unwrap_or_default(),
        device.reset_methods.join(","),
        device
            .sriov
            .map(|vfs| format!("{}/{}", vfs.used, vfs.total))
            .unwrap_or_default(),
        names.join(","),
        identity.map(|identity| identity.kind()).unwrap_or_default(),
        identity.map(ToString::to_string).unwrap_or_default(),
    ]
}

/// Its number, and what goes along with the device.
fn group(group: &DeviceGroup) -> String {
    let others: Vec<&str> = group.others.iter().map(|member| member.name.as_str()).collect();
    match others.is_empty() {
        true => group.number.to_string(),
        false => format!("{} with {}", group.number, others.join(",")),
    }
}

fn states(devices: &[Device]) -> String {
    let line = |device: &Device| format!("{} is {}\n", device.address, device.state);
    devices.iter().map(line).collect()
}

/// Where the guest has them, and by what.
fn in_guest(devices: &[Device]) -> String {
    let line = |device: &Device| {
        let Some(guest) = &device.guest else {
            return format!("{} is {}\n", device.address, device.state);
        };
        let used = match (guest.names.as_slice(), &guest.driver) {
            ([], None) => ", for which its kernel has no driver".to_owned(),
            ([], Some(driver)) => format!(" ({driver})"),
            (names, _) => format!(": {}", names.join(", ")),
        };
        format!("{} is {} in the guest{used}\n", device.address, guest.guest)
    };
    devices.iter().map(line).collect()
}

fn drivers(devices: &[Device]) -> String {
    let line = |device: &Device| match &device.driver {
        Some(driver) => format!("{} is the host's again ({driver})\n", device.address),
        None => format!("{} is the host's again, without a driver\n", device.address),
    };
    devices.iter().map(line).collect()
}

fn addresses(devices: &[Device]) -> String {
    devices.iter().map(|device| format!("{}\n", device.address)).collect()
}

#[cfg(test)]
mod tests {
    use node_api::{DeviceIdentity, DeviceState, GroupMember, GuestDevice, Vfs};

    use super::*;

    fn plain(address: &str) -> Device {
        Device::unknown(address.parse().unwrap())
    }

    #[test]
    fn a_device_is_a_row_and_what_is_wrong_stands_below() {
        let nvme = Device {
            identity: Some(DeviceIdentity {
                class: 0x01_0802,
                class_name: Some("Non-Volatile memory controller".into()),
                vendor: 0x1b36,
                vendor_name: None,
                device: 0x10,
                device_name: None,
            }),
            driver: Some("vfio-pci".into()),
            group: Some(DeviceGroup {
                number: 6,
                kind: "DMA".into(),
                viable: true,
                others: ["0000:00:1f.0", "0000:00:1f.3"]
                    .map(|name| GroupMember {
                        name: name.into(),
                        driver: None,
                    })
                    .to_vec(),
            }),
            numa_node: Some(1),
            reset_methods: vec!["flr".into(), "bus".into()],
            sriov: Some(Vfs { total: 7, used: 2 }),
            state: DeviceState::Claimed,
            sandbox: Some("aaaaaaaaaaaa".into()),
            sandbox_name: Some("web".into()),
            cdi: vec!["v.com/disk=a".parse().unwrap(), "v.com/all=0".parse().unwrap()],
            ..plain("0000:01:00.0")
        };
        let waiting = Device {
            state: DeviceState::Waiting,
            why: Some("its interface eth0 is up".into()),
            ..plain("0000:02:00.0")
        };
        let text = list(&[nvme, waiting]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], COLUMNS);
        let wanted = "0000:01:00.0 claimed web vfio-pci 6 with 0000:00:1f.0,0000:00:1f.3 1 flr,bus 2/7 v.com/disk=a,v.com/all=0 Non-Volatile memory controller 1b36:0010";
        assert_eq!(lines[1].join(" "), wanted);
        assert_eq!(lines[2], ["0000:02:00.0", "waiting"]);
        assert_eq!(lines[3].join(" "), "0000:02:00.0: its interface eth0 is up");
    }

    #[test]
    fn a_verb_says_what_has_become_of_the_device() {
        let mut device = plain("0000:01:00.0");
        assert_eq!(
            drivers(std::slice::from_ref(&device)),
            "0000:01:00.0 is the host's again, without a driver\n"
        );
        (device.driver, device.state) = (Some("nvme".into()), DeviceState::Ready);
        assert_eq!(
            drivers(std::slice::from_ref(&device)),
            "0000:01:00.0 is the host's again (nvme)\n"
        );
        assert_eq!(states(std::slice::from_ref(&device)), "0000:01:00.0 is ready\n");
        assert_eq!(addresses(std::slice::from_ref(&device)), "0000:01:00.0\n");
        let mut guest = GuestDevice {
            host: device.address,
            guest: "0000:00:07.0".into(),
            driver: Some("nvme".into()),
            names: vec!["nvme0n1".into()],
        };
        let mut told = |guest: &GuestDevice| {
            device.guest = Some(guest.clone());
            in_guest(std::slice::from_ref(&device))
        };
        assert_eq!(told(&guest), "0000:01:00.0 is 0000:00:07.0 in the guest: nvme0n1\n");
        guest.names.clear();
        assert_eq!(told(&guest), "0000:01:00.0 is 0000:00:07.0 in the guest (nvme)\n");
        guest.driver = None;
        assert_eq!(
            told(&guest),
            "0000:01:00.0 is 0000:00:07.0 in the guest, for which its kernel has no driver\n"
        );
    }
}
