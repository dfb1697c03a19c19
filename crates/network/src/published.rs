//! What is published, as the host's table has it: that table is the only place where it is kept.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::Value;

use crate::plan::Ranges;
use crate::ports::{PortMapping, Protocol};
use crate::{Error, rules};

/// An element of one of the table's maps.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Element {
    map: String,
    /// As nft writes it: `80` or `127.0.0.1 . 80`.
    key: String,
    address: IpAddr,
    guest_port: u16,
}

/// All elements of the table's maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published(Vec<Element>);

impl Published {
    /// What the table `name` has in this thread's namespace; nothing if there is no such table.
    pub(crate) fn read(name: &str) -> Result<Self, Error> {
        match rules::run("published ports", &["-j", "list", "table", "inet", name], "") {
            Ok(text) => Self::parse(&text).ok_or(Error::Answer("published ports")),
            Err(Error::Nft { message, .. }) if message.contains("No such file or directory") => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let document: Value = serde_json::from_str(text).ok()?;
        let mut elements = Vec::new();
        for object in document.get("nftables")?.as_array()? {
            let Some(map) = object.get("map") else { continue };
            let name = map.get("name")?.as_str()?;
            for element in map.get("elem").and_then(Value::as_array).into_iter().flatten() {
                let [key, value] = element.as_array()?.as_slice() else {
                    return None;
                };
                let (address, port) = pair(value)?;
                let key = match pair(key) {
                    Some((address, port)) => format!("{address} . {port}"),
                    None => number(key)?.to_string(),
                };
                elements.push(Element {
                    map: name.to_owned(),
                    key,
                    address,
                    guest_port: port,
                });
            }
        }
        Some(Self(elements))
    }

    /// The elements for one mapping.
    pub(crate) fn of(mapping: &PortMapping, ranges: &Ranges, slot: u32) -> Result<Self, Error> {
        let (v4, v6) = (IpAddr::V4(ranges.slot_v4(slot)?), IpAddr::V6(ranges.slot_v6(slot)?));
        let protocol = match mapping.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        let element = |map: String, key: String, address| Element {
            map,
            key,
            address,
            guest_port: mapping.guest_port,
        };
        let port = mapping.host_port;
        Ok(Self(match mapping.host_ip {
            None => vec![
                element(format!("{protocol}4"), port.to_string(), v4),
                element(format!("{protocol}6"), port.to_string(), v6),
            ],
            Some(IpAddr::V4(ip)) => vec![element(format!("{protocol}4_at"), format!("{ip} . {port}"), v4)],
            Some(IpAddr::V6(ip)) => vec![element(format!("{protocol}6_at"), format!("{ip} . {port}"), v6)],
        }))
    }

    /// Those of one slot.
    pub(crate) fn of_slot(&self, ranges: &Ranges, slot: u32) -> Result<Self, Error> {
        let (v4, v6) = (IpAddr::V4(ranges.slot_v4(slot)?), IpAddr::V6(ranges.slot_v6(slot)?));
        let elements = self.0.iter().filter(|element| [v4, v6].contains(&element.address));
        Ok(Self(elements.cloned().collect()))
    }

    /// Everything, slot by slot.
    pub(crate) fn by_slot(&self, ranges: &Ranges) -> BTreeMap<u32, Vec<PortMapping>> {
        let mut slots: BTreeMap<u32, Vec<PortMapping>> = BTreeMap::new();
        for element in &self.0 {
            let slot = match element.address {
                IpAddr::V4(address) => ranges.slot_of_v4(address),
                IpAddr::V6(address) => ranges.slot_of_v6(address),
            };
            let (Some(slot), Some(mapping)) = (slot, element.mapping()) else {
                continue;
            };
            let mappings = slots.entry(slot).or_default();
            if !mappings.contains(&mapping) {
                mappings.push(mapping);
            }
        }
        slots
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The commands that add these to a table; none may be there.
    pub(crate) fn add(&self, table: &str) -> String {
        let mut text = String::new();
        for Element {
            map,
            key,
            address,
            guest_port,
        } in &self.0
        {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "create element inet {table} {map} {{ {key} : {address} . {guest_port} }}"
            );
        }
        text
    }

    /// The commands that take these out of a table.
    pub(crate) fn delete(&self, table: &str) -> String {
        let mut text = String::new();
        for Element { map, key, .. } in &self.0 {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "delete element inet {table} {map} {{ {key} }}");
        }
        text
    }
}

impl Element {
    fn mapping(&self) -> Option<PortMapping> {
        let protocol = if self.map.starts_with("tcp") {
            Protocol::Tcp
        } else {
            Protocol::Udp
        };
        let (host_ip, port) = match self.key.split_once(" . ") {
            Some((ip, port)) => (Some(ip.parse().ok()?), port),
            None => (None, self.key.as_str()),
        };
        Some(PortMapping {
            host_ip,
            host_port: port.parse().ok()?,
            guest_port: self.guest_port,
            protocol,
        })
    }
}

/// An address and a port, as nft joins them.
fn pair(value: &Value) -> Option<(IpAddr, u16)> {
    let [address, port] = value.get("concat")?.as_array()?.as_slice() else {
        return None;
    };
    let text = address.as_str()?;
    let address = text.parse::<Ipv4Addr>().map(IpAddr::V4);
    let address = address.or_else(|_| text.parse::<Ipv6Addr>().map(IpAddr::V6)).ok()?;
    Some((address, number(port)?))
}

fn number(value: &Value) -> Option<u16> {
    u16::try_from(value.as_u64()?).ok()
}
