//! A function's interrupts as VFIO numbers them, and how a request about them is written (`struct vfio_irq_set`). Pure.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::uapi;

/// A kind of interrupts, by VFIO's number of it (`VFIO_PCI_INTX_IRQ_INDEX` and those that follow).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Irq {
    /// The interrupt pin (PCI 3.0, 2.2.6): a level, which the host masks when it comes, until it is unmasked.
    IntX = 0,
    /// Message signalled interrupts (PCI 3.0, 6.8.1).
    Msi = 1,
    /// MSI-X (PCI 3.0, 6.8.2).
    MsiX = 2,
    /// The function has reported an error that it could not correct (PCI Express only).
    Err = 3,
    /// The host wants the function back.
    Req = 4,
}

/// What the kernel tells of one kind (`struct vfio_irq_info`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// How many there are; zero if the function has none.
    pub count: u32,
    /// They can signal events.
    pub signals: bool,
    /// They can be masked and unmasked.
    pub maskable: bool,
    /// Each is masked when it comes.
    pub masks_itself: bool,
    /// More can be turned on while some are; otherwise all have to be turned off first.
    pub resizable: bool,
}

/// What is done to the mask of INTx.
#[derive(Clone, Copy, Debug)]
pub enum IntxMask<'a> {
    /// It comes no more.
    Mask,
    /// It comes again, at once if the pin is asserted.
    Unmask,
    /// Each signal of the event unmasks it: an engine's resample event.
    UnmaskBy(BorrowedFd<'a>),
    /// The event of before does so no more.
    UnmaskByNone,
}

impl IrqInfo {
    pub(crate) fn new(flags: u32, count: u32) -> Self {
        Self {
            count,
            signals: flags & uapi::IRQ_INFO_EVENTFD != 0,
            maskable: flags & uapi::IRQ_INFO_MASKABLE != 0,
            masks_itself: flags & uapi::IRQ_INFO_AUTOMASKED != 0,
            resizable: flags & uapi::IRQ_INFO_NORESIZE == 0,
        }
    }
}

/// The request that has each interrupt from the first on signal its event, or turns the whole kind off without any.
pub(crate) fn triggers(irq: Irq, events: &[BorrowedFd<'_>]) -> Vec<u32> {
    let data = match events {
        [] => uapi::IRQ_SET_DATA_NONE,
        _ => uapi::IRQ_SET_DATA_EVENTFD,
    };
    let events: Vec<u32> = events.iter().map(number).collect();
    let count = u32::try_from(events.len()).unwrap_or(u32::MAX);
    request(data | uapi::IRQ_SET_ACTION_TRIGGER, irq, count, &events)
}

/// The request about INTx's mask.
pub(crate) fn masking(mask: IntxMask<'_>) -> Vec<u32> {
    // No event is -1.
    let (flags, events) = match mask {
        IntxMask::Mask => (uapi::IRQ_SET_DATA_NONE | uapi::IRQ_SET_ACTION_MASK, None),
        IntxMask::Unmask => (uapi::IRQ_SET_DATA_NONE | uapi::IRQ_SET_ACTION_UNMASK, None),
        IntxMask::UnmaskBy(event) => (
            uapi::IRQ_SET_DATA_EVENTFD | uapi::IRQ_SET_ACTION_UNMASK,
            Some(number(&event)),
        ),
        IntxMask::UnmaskByNone => (uapi::IRQ_SET_DATA_EVENTFD | uapi::IRQ_SET_ACTION_UNMASK, Some(u32::MAX)),
    };
    request(flags, Irq::IntX, 1, events.as_slice())
}

fn number(event: &BorrowedFd<'_>) -> u32 {
    event.as_raw_fd().cast_unsigned()
}

/// As `struct vfio_irq_set`: its size, flags, index, first, count, events.
fn request(flags: u32, irq: Irq, count: u32, events: &[u32]) -> Vec<u32> {
    let bytes = u32::try_from((5 + events.len()) * size_of::<u32>()).unwrap_or(u32::MAX);
    let mut words = vec![bytes, flags, irq as u32, 0, count];
    words.extend(events);
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn requests_are_as_the_header_has_them() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = number(&file.as_fd());
        let events = [file.as_fd(), file.as_fd()];
        assert_eq!(triggers(Irq::MsiX, &events), [28, 4 | 1 << 5, 2, 0, 2, fd, fd]);
        assert_eq!(triggers(Irq::Msi, &[]), [20, 1 | 1 << 5, 1, 0, 0]);
        assert_eq!(triggers(Irq::Req, &events[..1]), [24, 4 | 1 << 5, 4, 0, 1, fd]);
        assert_eq!(masking(IntxMask::Mask), [20, 1 | 1 << 3, 0, 0, 1]);
        assert_eq!(masking(IntxMask::Unmask), [20, 1 | 1 << 4, 0, 0, 1]);
        assert_eq!(masking(IntxMask::UnmaskBy(file.as_fd())), [24, 4 | 1 << 4, 0, 0, 1, fd]);
        assert_eq!(masking(IntxMask::UnmaskByNone), [24, 4 | 1 << 4, 0, 0, 1, u32::MAX]);
    }

    #[test]
    fn kinds_are_told_apart_by_their_flags() {
        // INTx, and MSI-X, as vfio-pci of Linux 6.1 has them.
        let intx = IrqInfo::new(7, 1);
        assert!(intx.signals && intx.maskable && intx.masks_itself && intx.resizable);
        let msix = IrqInfo::new(9, 65);
        assert!(msix.signals && !msix.maskable && !msix.masks_itself && !msix.resizable);
        assert_eq!((IrqInfo::default().count, msix.count), (0, 65));
    }
}
