//! Where a function is on the host's PCI buses, as Linux writes it. Knows nothing of what is there.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most of 5 bits (PCI Local Bus 3.0, 3.2.2.3.2).
const LAST_DEVICE: u8 = 31;

/// The most of 3 bits.
const LAST_FUNCTION: u8 = 7;

/// A PCI function's address. Written as Linux does, such as `0000:01:00.0`; read without the domain, too, which is 0 then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// The domain, also called segment; 32 bits, as some controllers make domains of their own beyond 16.
    domain: u32,
    bus: u8,
    /// 0 to 31.
    device: u8,
    /// 0 to 7.
    function: u8,
}

/// A text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no PCI function's address: write it as lspci -D does, such as 0000:01:00.0 (`basalt device ls` lists them)"
)]
pub struct PciAddressError(String);

impl PciAddress {
    /// The domain.
    pub fn domain(self) -> u32 {
        self.domain
    }

    /// The bus.
    pub fn bus(self) -> u8 {
        self.bus
    }

    /// The device, 0 to 31.
    pub fn device(self) -> u8 {
        self.device
    }

    /// The function, 0 to 7.
    pub fn function(self) -> u8 {
        self.function
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // As in `pci_setup_device` (drivers/pci/probe.c): the name of its directory.
        let text = format!(
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        );
        f.pad(&text)
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        parse(text).ok_or_else(|| PciAddressError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = match rest.rsplit_once(':') {
        Some((domain, bus)) => (number(domain, 4..=8)?, bus),
        None => (0, rest),
    };
    let small = |text, digits| u8::try_from(number(text, digits)?).ok();
    let address = PciAddress {
        domain,
        bus: small(bus, 2..=2)?,
        device: small(device, 2..=2)?,
        function: small(function, 1..=1)?,
    };
    (address.device <= LAST_DEVICE && address.function <= LAST_FUNCTION).then_some(address)
}

/// A hexadecimal number of so many digits, and nothing else: `from_str_radix` would take a sign.
fn number(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let is_number = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl TryFrom<String> for PciAddress {
    type Error = PciAddressError;

    fn try_from(text: String) -> Result<Self, PciAddressError> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_as_linux_names_its_directory() {
        for (text, written) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("01:1f.7", "0000:01:1f.7"),
            ("0001:AB:10.3", "0001:ab:10.3"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            let address: PciAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), written);
            assert_eq!(written.parse(), Ok(address));
        }
        let address: PciAddress = "0002:03:1e.5".parse().unwrap();
        let parts = (address.domain(), address.bus(), address.device(), address.function());
        assert_eq!(parts, (2, 3, 0x1e, 5));
    }

    #[test]
    fn what_is_none_is_refused_and_nothing_leads_elsewhere() {
        for text in [
            "",
            "nvme0",
            "0000:01:00",
            "0000:01:00.8",
            "0000:01:20.0",
            "000:01:00.0",
            "+000:01:00.0",
            "0000:01:00.0/..",
            "../01:00.0",
            "0000:1:00.0",
            "0000:0000:01:00.0",
            "01:00.00",
            " 01:00.0",
            "0000:01:00.-1",
            "123456789:01:00.0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }

    #[test]
    fn they_are_in_the_order_of_the_buses() {
        let mut all: Vec<PciAddress> = ["0001:00:00.0", "0000:10:00.0", "0000:0a:1f.0", "0000:0a:02.1"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        all.sort();
        let sorted: Vec<_> = all.iter().map(ToString::to_string).collect();
        assert_eq!(sorted, ["0000:0a:02.1", "0000:0a:1f.0", "0000:10:00.0", "0001:00:00.0"]);
    }

    #[test]
    fn it_is_text_for_machines() {
        let address: PciAddress = "0000:01:00.0".parse().unwrap();
        let deserializer = serde::de::value::StrDeserializer::<serde::de::value::Error>::new("01:00.0");
        assert_eq!(PciAddress::deserialize(deserializer).unwrap(), address);
        let deserializer = serde::de::value::StrDeserializer::<serde::de::value::Error>::new("01:00");
        PciAddress::deserialize(deserializer).unwrap_err();
    }
}
