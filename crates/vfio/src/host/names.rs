//! What vendors, devices and classes are called: the list of pci.ids, as Debian's packages `pci.ids` and `hwdata` install it. Reads it line by
//! line and keeps what is asked for. Knows no host: without the list there are numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead, Read};

use super::error::DeviceError;
use super::files::Sysfs;

/// Where it may be, below /usr/share.
const PLACES: [&str; 2] = ["misc/pci.ids", "hwdata/pci.ids"];

/// No line of it is longer; the rest of one that is becomes lines that say nothing.
const LINE: u64 = 4096;

/// Which names are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Vendors with devices of theirs.
    pub(super) devices: BTreeSet<(u16, u16)>,
    /// Base classes with subclasses of theirs.
    pub(super) classes: BTreeSet<(u8, u8)>,
}

/// Names of what was wanted, as far as the list has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    vendors: BTreeMap<u16, String>,
    devices: BTreeMap<(u16, u16), String>,
    bases: BTreeMap<u8, String>,
    classes: BTreeMap<(u8, u8), String>,
}

/// What the lines that follow belong to.
#[derive(Clone, Copy, Debug)]
enum Section {
    Vendor(u16),
    Class(u8),
    /// Nothing that is wanted, or none of both.
    Other,
}

impl Names {
    /// From the host's list; empty where it has none.
    pub(super) fn find(sysfs: &Sysfs, wanted: &Wanted) -> Result<Self, DeviceError> {
        for place in PLACES {
            let path = sysfs.share(place);
            if let Some(list) = sysfs.open(&path)? {
                return Self::read(list, wanted).map_err(DeviceError::file("read", &path));
            }
        }
        Ok(Self::default())
    }

    fn read(mut list: impl BufRead, wanted: &Wanted) -> io::Result<Self> {
        let mut names = Self::default();
        let mut section = Section::Other;
        let mut line = Vec::new();
        loop {
            line.clear();
            if list.by_ref().take(LINE).read_until(b'\n', &mut line)? == 0 {
                return Ok(names);
            }
            let text = String::from_utf8_lossy(&line);
            names.take(text.trim_end(), &mut section, wanted);
        }
    }

    /// One line: a vendor or a class begins at the left, what belongs to it after one tab, what belongs to that after two.
    fn take(&mut self, line: &str, section: &mut Section, wanted: &Wanted) {
        if line.is_empty() || line.starts_with('#') || line.starts_with("\t\t") {
            return;
        }
        if let Some(below) = line.strip_prefix('\t') {
            match *section {
                Section::Vendor(vendor) => {
                    if let Some((device, name)) = entry(below, 4)
                        && wanted.devices.contains(&(vendor, device))
                    {
                        self.devices.insert((vendor, device), name);
                    }
                }
                Section::Class(base) => {
                    if let Some((sub, name)) = entry(below, 2)
                        && let Ok(sub) = u8::try_from(sub)
                        && wanted.classes.contains(&(base, sub))
                    {
                        self.classes.insert((base, sub), name);
                    }
                }
                Section::Other => (),
            }
            return;
        }
        *section = Section::Other;
        if let Some(class) = line.strip_prefix("C ") {
            if let Some((base, name)) = entry(class, 2)
                && let Ok(base) = u8::try_from(base)
                && wanted.classes.iter().any(|class| class.0 == base)
            {
                self.bases.insert(base, name);
                *section = Section::Class(base);
            }
        } else if let Some((vendor, name)) = entry(line, 4)
            && wanted.devices.iter().any(|device| device.0 == vendor)
        {
            self.vendors.insert(vendor, name);
            *section = Section::Vendor(vendor);
        }
    }

    /// A vendor's.
    pub(super) fn vendor(&self, vendor: u16) -> Option<String> {
        self.vendors.get(&vendor).cloned()
    }

    /// A device's, without its vendor's.
    pub(super) fn device(&self, vendor: u16, device: u16) -> Option<String> {
        self.devices.get(&(vendor, device)).cloned()
    }

    /// A subclass's, or its base class's.
    pub(super) fn class(&self, base: u8, sub: u8) -> Option<String> {
        self.classes.get(&(base, sub)).or(self.bases.get(&base)).cloned()
    }
}

/// A hexadecimal number of so many digits, and the name behind it.
fn entry(text: &str, digits: usize) -> Option<(u16, String)> {
    let (number, name) = text.split_once(char::is_whitespace)?;
    let is_number = number.len() == digits && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = is_number.then(|| u16::from_str_radix(number, 16).ok()).flatten()?;
    let name = name.trim();
    (!name.is_empty()).then(|| (number, name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
# a comment
1af4  Red Hat, Inc.
\t1041  Virtio network device
\t\t1af4 1100  not this one
8086  Intel Corporation
\t1041  another one's
\t10c9  82576 Gigabit Network Connection
C 01  Mass storage controller
\t08  Non-Volatile memory controller
\t\t02  NVM Express
C 02  Network controller
\t00  Ethernet controller
C ff
";

    fn wanted(devices: &[(u16, u16)], classes: &[(u8, u8)]) -> Wanted {
        Wanted {
            devices: devices.iter().copied().collect(),
            classes: classes.iter().copied().collect(),
        }
    }

    #[test]
    fn what_is_wanted_is_found_and_nothing_else_is_kept() {
        let wanted = wanted(&[(0x1af4, 0x1041), (0x8086, 0x9999)], &[(1, 8), (2, 0x80)]);
        let names = Names::read(LIST.as_bytes(), &wanted).unwrap();
        assert_eq!(names.vendor(0x1af4).as_deref(), Some("Red Hat, Inc."));
        assert_eq!(names.device(0x1af4, 0x1041).as_deref(), Some("Virtio network device"));
        assert_eq!(names.vendor(0x8086).as_deref(), Some("Intel Corporation"));
        assert_eq!(names.device(0x8086, 0x9999), None);
        assert_eq!(names.class(1, 8).as_deref(), Some("Non-Volatile memory controller"));
        assert_eq!(names.class(2, 0x80).as_deref(), Some("Network controller"));
        assert_eq!(names.class(3, 0), None);
        assert_eq!((names.devices.len(), names.classes.len()), (1, 1));
    }

    #[test]
    fn a_list_that_is_none_gives_no_names_and_no_errors() {
        let wanted = wanted(&[(0x1af4, 0x1041)], &[(1, 8)]);
        let long = format!("1af4  {}\n", "x".repeat(20_000));
        let cases: [&[u8]; 4] = [
            b"",
            b"\t1041  nobody's\n1af4\nC \nC zz  y\n+af4  x\n",
            b"\xff\xfe\x00\n\t\t\n",
            long.as_bytes(),
        ];
        for list in cases {
            let names = Names::read(list, &wanted).unwrap();
            assert!(names.devices.is_empty() && names.classes.is_empty(), "{names:?}");
        }
    }
}
