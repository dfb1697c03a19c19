//! The host's PCI functions as sandboxes may have them: what they are, whose they are, what is asked of them. Plain data.

use std::fmt;

use base::{CdiName, PciAddress};
use serde::{Deserialize, Serialize};

/// What is asked of the host's devices. Each is answered by items, the devices that it was about as they are then, and
/// [`crate::Reply::Done`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceRequest {
    /// All of them.
    List,
    /// Take one from the host, for sandboxes; it is fine if it was taken before.
    Bind {
        /// Which.
        address: PciAddress,
        /// On which terms; of one that was taken before, from now on.
        terms: BindTerms,
    },
    /// Give one back to the host; it is fine if it is the host's. Refused while a sandbox has it.
    Unbind {
        /// Which.
        address: PciAddress,
    },
    /// Give devices to a sandbox that runs, all of them or none.
    Attach {
        /// Which sandbox.
        sandbox: String,
        /// Which devices.
        addresses: Vec<PciAddress>,
        /// And which by names of the Container Device Interface. Variables of theirs are for commands that are started with them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        cdi: Vec<CdiName>,
    },
    /// Take devices from a sandbox that runs.
    Detach {
        /// Which sandbox.
        sandbox: String,
        /// Which devices.
        addresses: Vec<PciAddress>,
        /// And which by names of the Container Device Interface.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        cdi: Vec<CdiName>,
        /// Also if the guest does not let go of them.
        force: bool,
    },
    /// Have a physical function make so many virtual ones, in place of those that there are.
    MakeVfs {
        /// The physical function.
        address: PciAddress,
        /// How many; none removes them.
        count: u32,
    },
}

/// What whoever binds a device wants of it, and takes upon himself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindTerms {
    /// It is bound again by the daemon's first start after the host has booted.
    #[serde(default)]
    pub persist: bool,
    /// Also if it cannot be reset between two sandboxes.
    #[serde(default)]
    pub allow_no_reset: bool,
    /// Also if other functions of its group are the host's, its interface is up, or it is the firmware's display.
    #[serde(default)]
    pub force: bool,
}

/// Whose a device is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceState {
    /// The host's, or nobody's: no sandbox can have it.
    #[default]
    Host,
    /// On its way from the host; where that was left on the way, asking for it again goes on.
    Binding,
    /// Sandboxes can have it.
    Ready,
    /// A sandbox has it.
    Claimed,
    /// A sandbox had it, and it is being reset.
    Resetting,
    /// A sandbox had it, and it could not be reset: nobody can have it.
    Quarantined,
    /// It is to be bound at each boot, and could not be at this one.
    Waiting,
    /// On its way to the host; where that was left on the way, asking for it again goes on.
    Unbinding,
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "host",
            Self::Binding => "binding",
            Self::Ready => "ready",
            Self::Claimed => "claimed",
            Self::Resetting => "resetting",
            Self::Quarantined => "quarantined",
            Self::Waiting => "waiting",
            Self::Unbinding => "unbinding",
        })
    }
}

/// A PCI function of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Where it is.
    pub address: PciAddress,
    /// What it is; `None` where it is gone and only known to the daemon.
    pub identity: Option<DeviceIdentity>,
    /// The driver that has it.
    pub driver: Option<String>,
    /// What the IOMMU cannot tell apart from it; `None` where the host has no IOMMU, or it is off.
    pub group: Option<DeviceGroup>,
    /// The NUMA node that it is near to, where the host says.
    pub numa_node: Option<u32>,
    /// In which ways it can be reset, the first used first (`flr`, `pm`, `bus`, ...).
    pub reset_methods: Vec<String>,
    /// The virtual functions that it can make, where it can.
    pub sriov: Option<Vfs>,
    /// The function that has made it, if it is a virtual one.
    pub physical: Option<PciAddress>,
    /// Sizes of its BARs in bytes, with their numbers.
    pub bars: Vec<(u8, u64)>,
    /// Whose it is.
    pub state: DeviceState,
    /// What is wrong, or in the way.
    pub why: Option<String>,
    /// The id of the sandbox that has it.
    pub sandbox: Option<String>,
    /// What that is called.
    pub sandbox_name: Option<String>,
    /// How it was bound, if it was.
    pub terms: Option<BindTerms>,
    /// What it is called by the Container Device Interface, where it has such names; of a list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdi: Vec<CdiName>,
    /// As the guest has it, which was given it just now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestDevice>,
}

impl Device {
    /// One of which nothing is known but where it is.
    pub fn unknown(address: PciAddress) -> Self {
        Self {
            address,
            identity: None,
            driver: None,
            group: None,
            numa_node: None,
            reset_methods: Vec::new(),
            sriov: None,
            physical: None,
            bars: Vec::new(),
            state: DeviceState::Host,
            why: None,
            sandbox: None,
            sandbox_name: None,
            terms: None,
            cdi: Vec::new(),
            guest: None,
        }
    }
}

/// A device as a guest has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestDevice {
    /// Where the host has it.
    pub host: PciAddress,
    /// Where the guest has it.
    pub guest: String,
    /// The guest's driver, if it has one.
    pub driver: Option<String>,
    /// Disks and network interfaces that it is used by there.
    pub names: Vec<String>,
}

/// What a function is, by numbers and, where the host has them (Debian's package `pci.ids`), names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceIdentity {
    /// Base class, subclass and programming interface, 8 bits each (PCI Code and ID Assignment).
    pub class: u32,
    /// The class's name.
    pub class_name: Option<String>,
    /// Its vendor's number.
    pub vendor: u16,
    /// Its vendor's name.
    pub vendor_name: Option<String>,
    /// Its number among its vendor's.
    pub device: u16,
    /// Its name.
    pub device_name: Option<String>,
}

impl fmt::Display for DeviceIdentity {
    /// Vendor and name, or the numbers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.vendor_name, &self.device_name) {
            (Some(vendor), Some(device)) => write!(f, "{vendor} {device}"),
            (Some(vendor), None) => write!(f, "{vendor} {:04x}", self.device),
            (None, _) => write!(f, "{:04x}:{:04x}", self.vendor, self.device),
        }
    }
}

impl DeviceIdentity {
    /// What kind of function it is, by name or number.
    pub fn kind(&self) -> String {
        self.class_name.clone().unwrap_or_else(|| format!("{:06x}", self.class))
    }
}

/// What an IOMMU tells apart: all of it goes to one sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceGroup {
    /// Its number.
    pub number: u32,
    /// How its functions' DMA is translated while they are the host's: `DMA`, `DMA-FQ`, `identity`, or another word of the kernel's.
    pub kind: String,
    /// Nothing of it is in the host's use.
    pub viable: bool,
    /// The others in it.
    pub others: Vec<GroupMember>,
}

/// Another device of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMember {
    /// Its name, an address but on hosts that have other buses.
    pub name: String,
    /// Its driver.
    pub driver: Option<String>,
}

/// Virtual functions of a physical one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vfs {
    /// How many it can make.
    pub total: u32,
    /// How many there are.
    pub used: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_called_the_same_for_people_and_machines() {
        for state in [
            DeviceState::Host,
            DeviceState::Binding,
            DeviceState::Ready,
            DeviceState::Claimed,
            DeviceState::Resetting,
            DeviceState::Quarantined,
            DeviceState::Waiting,
            DeviceState::Unbinding,
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
        }
    }

    #[test]
    fn a_device_is_called_by_what_is_known_of_it() {
        let mut identity = DeviceIdentity {
            class: 0x01_0802,
            class_name: None,
            vendor: 0x1b36,
            vendor_name: None,
            device: 0x10,
            device_name: None,
        };
        assert_eq!(
            (identity.to_string(), identity.kind()),
            ("1b36:0010".into(), "010802".into())
        );
        identity.vendor_name = Some("Red Hat, Inc.".into());
        assert_eq!(identity.to_string(), "Red Hat, Inc. 0010");
        identity.device_name = Some("NVM Express Controller".into());
        identity.class_name = Some("Non-Volatile memory controller".into());
        assert_eq!(
            (identity.to_string(), identity.kind()),
            (
                "Red Hat, Inc. NVM Express Controller".into(),
                "Non-Volatile memory controller".into()
            )
        );
    }

    #[test]
    fn a_request_names_an_address_and_no_other_text() {
        let asked = DeviceRequest::Unbind {
            address: "0000:01:00.0".parse().unwrap(),
        };
        let text = serde_json::to_string(&asked).unwrap();
        assert_eq!(text, r#"{"unbind":{"address":"0000:01:00.0"}}"#);
        let elsewhere = text.replace("0000:01:00.0", "../../x");
        serde_json::from_str::<DeviceRequest>(&elsewhere).unwrap_err();
        let bind = r#"{"bind":{"address":"01:00.0","terms":{}}}"#;
        let DeviceRequest::Bind { terms, .. } = serde_json::from_str(bind).unwrap() else {
            panic!()
        };
        assert_eq!(terms, BindTerms::default());
    }
}
