//! Address windows and a first-fit allocator of BARs in them. Addresses come back when a function leaves the bus.

use std::collections::BTreeMap;

use crate::PciError;

/// A range of guest physical addresses for BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address.
    pub start: u64,
    /// Number of bytes.
    pub length: u64,
}

/// The ranges for BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Below 4 GiB.
    pub low: Window,
    /// Above all RAM.
    pub high: Window,
    /// Ports, in a machine that has any for BARs.
    pub ports: Option<Window>,
}

impl Windows {
    pub(crate) fn get(&self, kind: WindowKind) -> Window {
        match kind {
            WindowKind::Low => self.low,
            WindowKind::High => self.high,
            WindowKind::Ports => self.ports.unwrap_or(Window { start: 0, length: 0 }),
        }
    }
}

/// One of the windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowKind {
    /// Below 4 GiB, for 32-bit BARs.
    Low,
    /// Above all RAM, for 64-bit BARs.
    High,
    /// Ports.
    Ports,
}

/// Gives out addresses of a window, the lowest that fit.
#[derive(Debug)]
pub struct WindowAllocator {
    window: Window,
    /// First address and end of each range that is given out.
    taken: BTreeMap<u64, u64>,
}

impl WindowAllocator {
    /// All of `window` is free.
    pub fn new(window: Window) -> Self {
        Self {
            window,
            taken: BTreeMap::new(),
        }
    }

    /// An address for a BAR of `size` bytes, aligned to its size as BARs have to be (6.2.5.1).
    ///
    /// # Errors
    /// No room is left.
    pub fn allocate(&mut self, size: u64) -> Result<u64, PciError> {
        let full = PciError::WindowFull {
            size,
            window: self.window.start,
        };
        let window_end = self.window.start.saturating_add(self.window.length);
        // Before each range that is taken, and behind the last.
        let ends = std::iter::once(self.window.start).chain(self.taken.values().copied());
        let starts = self.taken.keys().copied().chain(std::iter::once(window_end));
        let at = ends.zip(starts).find_map(|(after, before)| {
            let at = after.checked_next_multiple_of(size.max(1))?;
            at.checked_add(size).filter(|&end| end <= before).map(|_| at)
        });
        let at = at.ok_or(full)?;
        self.taken.insert(at, at + size);
        Ok(at)
    }

    /// Takes back what [`WindowAllocator::allocate`] gave.
    pub fn free(&mut self, address: u64) {
        self.taken.remove(&address);
    }
}

/// Where a BAR was put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assigned {
    kind: WindowKind,
    pub(crate) address: u64,
}

/// What is free of each window.
#[derive(Debug)]
pub(crate) struct Free {
    low: WindowAllocator,
    high: WindowAllocator,
    ports: WindowAllocator,
}

impl Free {
    /// All of them.
    pub(crate) fn new(windows: &Windows) -> Self {
        Self {
            low: WindowAllocator::new(windows.low),
            high: WindowAllocator::new(windows.high),
            ports: WindowAllocator::new(windows.get(WindowKind::Ports)),
        }
    }

    /// As [`WindowAllocator::allocate`].
    pub(crate) fn take(&mut self, kind: WindowKind, size: u64) -> Result<Assigned, PciError> {
        let address = self.window(kind).allocate(size)?;
        Ok(Assigned { kind, address })
    }

    /// As [`WindowAllocator::free`].
    pub(crate) fn give_back(&mut self, assigned: Assigned) {
        self.window(assigned.kind).free(assigned.address);
    }

    fn window(&mut self, kind: WindowKind) -> &mut WindowAllocator {
        match kind {
            WindowKind::Low => &mut self.low,
            WindowKind::High => &mut self.high,
            WindowKind::Ports => &mut self.ports,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_aligned_and_end_with_the_window() {
        let mut allocator = WindowAllocator::new(Window {
            start: 0x1000,
            length: 0x8000,
        });
        assert_eq!(allocator.allocate(0x10), Ok(0x1000));
        assert_eq!(allocator.allocate(0x4000), Ok(0x4000));
        assert_eq!(allocator.allocate(0x1000), Ok(0x2000), "what alignment has left over");
        assert_eq!(
            allocator.allocate(0x2000),
            Err(PciError::WindowFull {
                size: 0x2000,
                window: 0x1000
            })
        );
    }

    #[test]
    fn what_comes_back_is_given_out_again() {
        let mut allocator = WindowAllocator::new(Window {
            start: 0x1000,
            length: 0x4000,
        });
        let taken: Vec<u64> = (0..4).map(|_| allocator.allocate(0x1000).unwrap()).collect();
        assert_eq!(taken, [0x1000, 0x2000, 0x3000, 0x4000]);
        assert!(allocator.allocate(0x10).is_err());
        allocator.free(0x3000);
        assert!(allocator.allocate(0x2000).is_err(), "one page is free");
        allocator.free(0x4000);
        // Two pages are, but BARs are aligned to their size.
        assert!(allocator.allocate(0x2000).is_err());
        allocator.free(0x2000);
        assert_eq!(allocator.allocate(0x2000), Ok(0x2000));
        assert_eq!(allocator.allocate(0x10), Ok(0x4000));
        // Of a window at the end of all addresses.
        let mut last = WindowAllocator::new(Window {
            start: u64::MAX - 0xfff,
            length: 0x1000,
        });
        assert!(last.allocate(0x1000).is_err() && last.allocate(u64::MAX).is_err());
    }
}
