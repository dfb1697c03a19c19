//! Address windows and a first-fit allocator of BARs in them. Addresses are never given back: the machine is built once.

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

/// Gives out addresses of a window from its start on.
#[derive(Debug)]
pub struct WindowAllocator {
    window: Window,
    next: u64,
}

impl WindowAllocator {
    /// All of `window` is free.
    pub fn new(window: Window) -> Self {
        Self {
            window,
            next: window.start,
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
        let fits = |start: u64| start.checked_add(size).filter(|&end| end <= window_end);
        match self.next.checked_next_multiple_of(size.max(1)) {
            Some(start) => {
                self.next = fits(start).ok_or(full)?;
                Ok(start)
            }
            None => Err(full),
        }
    }
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
    pub(crate) fn take(&mut self, kind: WindowKind, size: u64) -> Result<u64, PciError> {
        let window = match kind {
            WindowKind::Low => &mut self.low,
            WindowKind::High => &mut self.high,
            WindowKind::Ports => &mut self.ports,
        };
        window.allocate(size)
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
        assert_eq!(allocator.allocate(0x1000), Ok(0x8000));
        assert_eq!(
            allocator.allocate(0x10),
            Err(PciError::WindowFull {
                size: 0x10,
                window: 0x1000
            })
        );
    }
}
