//! A specification of the Container Device Interface for the devices that sandboxes can have: made of what the daemon says, and asked of nobody
//! else.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use base::{CdiKind, PciAddress};
use cdi::{ContainerEdits, DeviceNode, Spec};
use node_api::{Device, DeviceState};

/// The first version in which a name may begin with a digit, as addresses do (CDI 1.1.0, Released versions); readers that are older than
/// the last one know it as well.
const VERSION: &str = "0.5.0";

/// What each of them wants besides its group.
const SPACE: &str = "/dev/vfio/vfio";

/// Of these devices, or of all that are bound.
pub(crate) fn make(kind: &CdiKind, wanted: &[PciAddress], all: &[Device]) -> Result<Spec> {
    let is_bound = |device: &&Device| matches!(device.state, DeviceState::Ready | DeviceState::Claimed);
    let mut devices = Vec::new();
    for device in all.iter().filter(is_bound) {
        let Some(group) = &device.group else { continue };
        if wanted.is_empty() || wanted.contains(&device.address) {
            devices.push(cdi::Device {
                name: device.address.to_string(),
                annotations: BTreeMap::new(),
                container_edits: edits(&format!("/dev/vfio/{}", group.number)),
            });
        }
    }
    let has = |address: &&PciAddress| !devices.iter().any(|device| device.name == address.to_string());
    if let Some(address) = wanted.iter().find(has) {
        bail!("the device {address} is none that sandboxes can have: `basalt device bind {address}` takes it for them");
    }
    if devices.is_empty() {
        bail!("there is no device that sandboxes can have: `basalt device bind ADDRESS` takes one for them");
    }
    Ok(Spec {
        cdi_version: VERSION.to_owned(),
        kind: kind.clone(),
        annotations: BTreeMap::new(),
        devices,
        container_edits: edits(SPACE),
    })
}

fn edits(path: &str) -> ContainerEdits {
    ContainerEdits {
        device_nodes: vec![DeviceNode {
            path: path.to_owned(),
            ..DeviceNode::default()
        }],
        ..ContainerEdits::default()
    }
}

#[cfg(test)]
mod tests {
    use cdi::Format;
    use node_api::DeviceGroup;

    use super::*;

    fn device(address: &str, group: u32, state: DeviceState) -> Device {
        Device {
            group: Some(DeviceGroup {
                number: group,
                kind: "DMA".into(),
                viable: true,
                others: Vec::new(),
            }),
            state,
            ..Device::unknown(address.parse().unwrap())
        }
    }

    #[test]
    fn what_is_written_can_be_read_and_names_what_is_bound() {
        let all = [
            device("0000:01:00.0", 7, DeviceState::Ready),
            device("0000:02:00.0", 8, DeviceState::Host),
            device("0000:03:00.0", 9, DeviceState::Claimed),
        ];
        let kind: CdiKind = "basalt/pci".parse().unwrap();
        let spec = make(&kind, &[], &all).unwrap();
        let text = serde_json::to_string(&spec).unwrap();
        let read = Spec::parse(&text, Format::Json).unwrap();
        assert_eq!(read, spec);
        let names: Vec<_> = read.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["0000:01:00.0", "0000:03:00.0"]);
        assert_eq!(read.devices[1].container_edits.device_nodes[0].path, "/dev/vfio/9");
        let one = make(&kind, &[all[2].address], &all).unwrap();
        assert_eq!(one.devices.len(), 1);
        let refused = make(&kind, &[all[1].address], &all).unwrap_err().to_string();
        assert!(refused.contains("basalt device bind 0000:02:00.0"), "{refused}");
        let none = make(&kind, &[], &all[1..2]).unwrap_err().to_string();
        assert!(none.contains("basalt device bind ADDRESS"), "{none}");
    }
}
