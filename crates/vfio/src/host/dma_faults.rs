//! DMA that an IOMMU has not let pass, as the host's kernel tells it: in its log and nowhere else. Knows no sandbox.
//!
//! The kernel limits how many of these lines it writes, so that who counts them counts the least that there were.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use base::PciAddress;

/// Where a program reads the kernel's log, a record each time (Linux' Documentation/ABI/testing/dev-kmsg).
const LOG: &str = "/dev/kmsg";

/// No record is longer (`PRINTKRB_RECORD_MAX`, `CONSOLE_EXT_LOG_MAX`).
const RECORD: usize = 8192;

/// One line about DMA that was not let pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DmaFault {
    /// Whose it was. Without its domain where the kernel does not say that.
    device: PciAddress,
    has_domain: bool,
    /// Where it was to go, by the guest's addresses for a device of a guest; as the kernel writes it.
    address: String,
}

impl DmaFault {
    /// Of a line as drivers of IOMMUs write it: Intel's (drivers/iommu/intel/dmar.c, `dmar_fault_do_one`) or AMD's (drivers/iommu/amd/iommu.c,
    /// `amd_iommu_report_page_fault`; AMD I/O Virtualization Technology Specification 3.08, 2.5.3). `None` of any other.
    pub fn of_line(line: &str) -> Option<Self> {
        of_intel(line).or_else(|| of_amd(line))
    }

    /// Whether it was this function's.
    pub fn is_of(&self, function: PciAddress) -> bool {
        let place = |it: PciAddress| (it.bus(), it.device(), it.function());
        place(self.device) == place(function) && (!self.has_domain || self.device.domain() == function.domain())
    }
}

impl std::fmt::Display for DmaFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "the IOMMU refused DMA of {} to address {}",
            self.device, self.address
        )
    }
}

/// `DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0x1000 [fault reason 0x06] PTE Read access is not set`.
fn of_intel(line: &str) -> Option<DmaFault> {
    let (_, rest) = line.split_once("Request device [")?;
    let (device, rest) = rest.split_once(']')?;
    // An interrupt that was not let pass has an index there.
    let (_, rest) = rest.split_once("fault addr ")?;
    Some(DmaFault {
        device: device.parse().ok()?,
        has_domain: false,
        address: hexadecimal(rest)?,
    })
}

/// `vfio-pci 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0010 address=0x1000 flags=0x0020]`, or without a function in front and
/// with `device=0000:01:00.0` behind the event.
fn of_amd(line: &str) -> Option<DmaFault> {
    let (front, event) = line.split_once("[IO_PAGE_FAULT ")?;
    let field = |name: &str| event.split([' ', ']']).find_map(|word| word.strip_prefix(name));
    let in_front = || front.split(' ').find_map(|word| word.strip_suffix(':')?.parse().ok());
    let device = match field("device=") {
        Some(device) => device.parse().ok(),
        None => in_front(),
    };
    Some(DmaFault {
        device: device?,
        has_domain: field("device=").is_none_or(|device| device.matches(':').count() == 2),
        address: hexadecimal(field("address=")?)?,
    })
}

/// The number at the start of a text, with its `0x` also where the kernel leaves that out.
fn hexadecimal(text: &str) -> Option<String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let end = digits.find(|it: char| !it.is_ascii_hexdigit()).unwrap_or(digits.len());
    (end > 0).then(|| format!("0x{}", &digits[..end]))
}

/// The kernel's log, from when this was opened on.
#[derive(Debug)]
pub struct FaultLog(File);

impl FaultLog {
    /// # Errors
    /// This process may not read it: that takes CAP_SYSLOG on most hosts (`kernel.dmesg_restrict`).
    pub fn open() -> io::Result<Self> {
        let mut log = OpenOptions::new().read(true).open(LOG)?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self(log))
    }

    /// Waits for the next fault.
    ///
    /// # Errors
    /// The log cannot be read any more.
    pub fn wait(&mut self) -> io::Result<DmaFault> {
        let mut record = [0; RECORD];
        loop {
            match self.0.read(&mut record) {
                Ok(length) => {
                    let fault = record.get(..length).and_then(of_record);
                    if let Some(fault) = fault {
                        return Ok(fault);
                    }
                }
                // It was overwritten before it was read, and the next one is the oldest that there is.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => (),
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Of a record of the log: `priority,number,time,flags[,...];line`, and lines about the line behind that.
fn of_record(record: &[u8]) -> Option<DmaFault> {
    let text = String::from_utf8_lossy(record);
    let (head, text) = text.split_once(';')?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    // The three lowest bits are the level, the others who speaks: 0 is the kernel, and any program that may write to the log is not.
    if priority >> 3 != 0 {
        return None;
    }
    DmaFault::of_line(text.lines().next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEL: &str = "3,1043,59512,-;DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0x180000000 [fault reason 0x06] PTE Read \
         access is not set\n";

    fn told(record: &str) -> Option<(String, bool)> {
        let fault = of_record(record.as_bytes())?;
        Some((fault.to_string(), fault.has_domain))
    }

    #[test]
    fn faults_are_known_as_drivers_write_them() {
        let intel = "the IOMMU refused DMA of 0000:01:00.0 to address 0x180000000";
        assert_eq!(told(INTEL), Some((intel.into(), false)));
        // Linux 5.12 and before.
        let old = "3,1,2,-;DMAR: [DMA Write] Request device [02:1f.7] PASID ffffffff fault addr ffffc030b000 [fault reason 05] x";
        let told_old = "the IOMMU refused DMA of 0000:02:1f.7 to address 0xffffc030b000";
        assert_eq!(told(old), Some((told_old.into(), false)));
        let amd = "4,7,8,-;vfio-pci 0001:00:04.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0010 address=0x7b657064 flags=0x0000]\n \
                   SUBSYSTEM=pci\n DEVICE=+pci:0001:00:04.0\n";
        let told_amd = "the IOMMU refused DMA of 0001:00:04.0 to address 0x7b657064";
        assert_eq!(told(amd), Some((told_amd.into(), true)));
        for (device, has_domain) in [("0a:00.0", false), ("0000:0a:00.0", true)] {
            let behind = format!(
                "3,1,2,-;AMD-Vi: Event logged [IO_PAGE_FAULT device={device} domain=0x1 address=0x637c000 flags=0x0]"
            );
            let expected = "the IOMMU refused DMA of 0000:0a:00.0 to address 0x637c000";
            assert_eq!(told(&behind), Some((expected.into(), has_domain)));
        }
    }

    #[test]
    fn nothing_else_is_one() {
        for other in [
            "3,1,2,-;DMAR: DRHD: handling fault status reg 3",
            "3,1,2,-;DMAR: [INTR-REMAP] Request device [02:00.1] fault index 0x8080 [fault reason 0x25] x",
            "3,1,2,-;DMAR: [DMA Read] Request device [nobody] fault addr 0x1 [fault reason 06] x",
            "3,1,2,-;DMAR: [DMA Read] Request device [01:00.0] fault addr ",
            "4,1,2,-;AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x1 flags=0x0]",
            "4,1,2,-;vfio-pci 0000:00:04.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 flags=0x0]",
            "4,1,2,-;",
            "no record",
            "",
        ] {
            assert_eq!(told(other), None, "{other}");
        }
        // A program has written it.
        assert_eq!(told(&INTEL.replacen('3', "11", 1)), None);
        assert!(of_record(&[0xff, b';', 0xff]).is_none());
    }

    #[test]
    fn a_fault_is_of_one_function_and_in_any_domain_where_that_is_not_told() {
        let of = |record: &str, function: &str| of_record(record.as_bytes()).unwrap().is_of(function.parse().unwrap());
        assert!(of(INTEL, "0000:01:00.0") && of(INTEL, "10000:01:00.0"));
        for other in ["0000:01:00.1", "0000:01:01.0", "0000:02:00.0"] {
            assert!(!of(INTEL, other), "{other}");
        }
        let amd =
            "4,7,8,-;vfio-pci 0001:00:04.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x7 flags=0x0]";
        assert!(of(amd, "0001:00:04.0") && !of(amd, "0000:00:04.0"));
    }
}
