//! Pages of a function's BARs that the guest reaches without us. They follow where the guest has the BARs, and are taken from it before
//! they go.

use std::sync::Arc;

use device::CreateError;
use engine::{HostRange, Vm};
use pci::{BAR_COUNT, MemoryRanges};
use vfio::{Device, Mapping};

use crate::refused;
use crate::tables::Tables;

/// Pages in a row.
struct Window<M> {
    bar: usize,
    offset: u64,
    mapping: M,
    /// Where the guest has it.
    at: Option<u64>,
}

/// A mapping in this process.
pub(crate) trait Mapped {
    fn range(&self) -> HostRange;
}

impl Mapped for Mapping {
    fn range(&self) -> HostRange {
        HostRange {
            address: self.address(),
            length: self.length(),
        }
    }
}

/// All of a function's.
pub(crate) struct Windows<M: Mapped = Mapping> {
    vm: Arc<dyn Vm>,
    windows: Vec<Window<M>>,
}

impl Windows {
    pub(crate) fn new(vm: &Arc<dyn Vm>, function: &dyn Device, tables: &Tables) -> Result<Self, CreateError> {
        let mut windows = Vec::new();
        for (number, bar) in (0..).zip(0..BAR_COUNT) {
            let region = function.region(number).map_err(refused("its BARs"))?;
            for run in tables.open_pages(bar, region.mappable()) {
                let mapping = function
                    .map(&region, run.start, run.end - run.start)
                    .map_err(|source| CreateError::Host {
                        what: "mapping its registers",
                        source,
                    })?;
                windows.extend(mapping.map(|mapping| Window {
                    bar,
                    offset: run.start,
                    mapping,
                    at: None,
                }));
            }
        }
        Ok(Self {
            vm: Arc::clone(vm),
            windows,
        })
    }
}

impl<M: Mapped> Windows<M> {
    /// The guest has its BARs there now. What the engine does not map exits, and is served all the same.
    pub(crate) fn follow(&mut self, ranges: &MemoryRanges) {
        let wanted = |window: &Window<M>| ranges[window.bar].map(|range| range.start() + window.offset);
        // All old ones first: BARs may have changed places.
        for window in &mut self.windows {
            if window.at != wanted(window) {
                window.take(self.vm.as_ref());
            }
        }
        for window in &mut self.windows {
            let Some(at) = wanted(window).filter(|_| window.at.is_none()) else {
                continue;
            };
            // SAFETY: 1. the range is one whole mapping of the function's registers, which the window owns; 2. the window takes it back
            // before the mapping goes, or never lets it go.
            match unsafe { self.vm.map_registers(at, window.mapping.range(), true) } {
                Ok(()) => window.at = Some(at),
                Err(error) => log::debug!("registers at {at:#x} cause exits: {error}"),
            }
        }
    }
}

impl<M: Mapped> Drop for Windows<M> {
    /// Other memory of this process may be where the mappings were.
    fn drop(&mut self) {
        for mut window in self.windows.drain(..) {
            if !window.take(self.vm.as_ref()) {
                std::mem::forget(window);
            }
        }
    }
}

impl<M: Mapped> Window<M> {
    /// Takes it from the guest, if that has it. Whether it has it no more.
    fn take(&mut self, vm: &dyn Vm) -> bool {
        let Some(at) = self.at else {
            return true;
        };
        // SAFETY: nothing is given.
        match unsafe { vm.map_registers(at, self.mapping.range(), false) } {
            Ok(()) => self.at = None,
            Err(error) => log::error!("registers at {at:#x} could not be taken from the guest: {error}"),
        }
        self.at.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard};

    use base::EventFd;
    use engine::{Doorbell, EngineError, Interrupt, MsiMessage, Presence, Result, Vcpu, VmState};
    use pci::MemoryRange;
    use vm_memory::GuestRegionMmap;

    use super::*;

    /// Gives and takes, and nothing else.
    #[derive(Default)]
    struct Guest {
        state: Mutex<State>,
    }

    #[derive(Default)]
    struct State {
        given: Vec<(u64, HostRange)>,
        /// It gives nothing at this address, and takes nothing from there.
        stubborn: Option<u64>,
        /// Mappings that are still there, by their addresses.
        mapped: Vec<u64>,
    }

    impl Guest {
        fn state(&self) -> MutexGuard<'_, State> {
            self.state.lock().unwrap()
        }

        fn at(&self) -> Vec<u64> {
            self.state().given.iter().map(|(at, _)| *at).collect()
        }
    }

    fn no() -> EngineError {
        EngineError::State("not of this VM".into())
    }

    impl Vm for Guest {
        unsafe fn map_registers(&self, guest: u64, registers: HostRange, give: bool) -> Result<()> {
            let mut state = self.state();
            if state.stubborn == Some(guest) {
                return Err(no());
            }
            assert!(state.mapped.contains(&registers.address), "a mapping that is gone");
            let before = state.given.len();
            state.given.retain(|given| *given != (guest, registers));
            if give {
                assert_eq!(state.given.len(), before, "it was given already");
                state.given.push((guest, registers));
            } else {
                assert_eq!(state.given.len() + 1, before, "it was not given");
            }
            Ok(())
        }

        fn create_vcpu(&self, _: u32, _: u32) -> Result<Box<dyn Vcpu>> {
            Err(no())
        }

        fn map_ram(&self, _: u32, _: Arc<GuestRegionMmap<()>>, _: Presence) -> Result<()> {
            Err(no())
        }

        fn set_dirty_tracking(&self, _: u32, _: bool) -> Result<()> {
            Err(no())
        }

        fn dirty_log(&self, _: u32) -> Result<Vec<u64>> {
            Err(no())
        }

        fn send_msi(&self, _: MsiMessage) -> Result<()> {
            Err(no())
        }

        fn create_interrupt(&self) -> Arc<dyn Interrupt> {
            panic!("windows have no interrupts")
        }

        fn attach_doorbell(&self, _: Doorbell, _: &EventFd) -> Result<()> {
            Err(no())
        }

        fn detach_doorbell(&self, _: Doorbell, _: &EventFd) -> Result<()> {
            Err(no())
        }

        fn reserve_ioapic_pins(&self, _: u32) -> Result<()> {
            Err(no())
        }

        fn save(&self) -> Result<VmState> {
            Err(no())
        }

        fn restore(&self, _: &VmState) -> Result<()> {
            Err(no())
        }
    }

    struct Fake {
        guest: Arc<Guest>,
        address: u64,
    }

    impl Mapped for Fake {
        fn range(&self) -> HostRange {
            HostRange {
                address: self.address,
                length: 0x1000,
            }
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let mut state = self.guest.state();
            let used = state.given.iter().any(|(_, range)| range.address == self.address);
            state.mapped.retain(|address| *address != self.address);
            drop(state);
            assert!(!used || std::thread::panicking(), "the guest still has it");
        }
    }

    /// Two windows of BAR 0, around a page of its own, and one of BAR 2.
    fn windows(guest: &Arc<Guest>) -> Windows<Fake> {
        let window = |bar, offset, address| {
            guest.state().mapped.push(address);
            Window {
                bar,
                offset,
                mapping: Fake {
                    guest: Arc::clone(guest),
                    address,
                },
                at: None,
            }
        };
        Windows {
            vm: Arc::<Guest>::clone(guest),
            windows: vec![window(0, 0, 0x1000), window(0, 0x2000, 0x2000), window(2, 0, 0x3000)],
        }
    }

    fn bars(first: Option<u64>, third: Option<u64>) -> MemoryRanges {
        let range = |start| MemoryRange::new(start, 0x3000);
        let mut ranges = MemoryRanges::default();
        (ranges[0], ranges[2]) = (first.and_then(range), third.and_then(range));
        ranges
    }

    #[test]
    fn windows_follow_their_bars_and_are_taken_before_they_go() {
        let guest = Arc::<Guest>::default();
        let mut windows = windows(&guest);
        assert!(guest.at().is_empty());
        windows.follow(&bars(Some(0xc000_0000), Some(0xd000_0000)));
        assert_eq!(guest.at(), [0xc000_0000, 0xc000_2000, 0xd000_0000]);
        // They change places.
        windows.follow(&bars(Some(0xd000_0000), Some(0xc000_0000)));
        assert_eq!(guest.at(), [0xd000_0000, 0xd000_2000, 0xc000_0000]);
        windows.follow(&bars(None, Some(0xc000_0000)));
        assert_eq!(guest.at(), [0xc000_0000]);
        drop(windows);
        assert!(guest.at().is_empty() && guest.state().mapped.is_empty());
    }

    #[test]
    fn what_the_engine_refuses_exits_and_what_it_keeps_stays_mapped() {
        let guest = Arc::<Guest>::default();
        let mut windows = windows(&guest);
        guest.state().stubborn = Some(0x2000);
        windows.follow(&bars(Some(0), None));
        assert_eq!(guest.at(), [0]);
        windows.follow(&bars(Some(0x10_0000), Some(0xd000_0000)));
        assert_eq!(guest.at(), [0x10_0000, 0x10_2000, 0xd000_0000]);
        // Not taken back: it is where it was, is tried once more, and never becomes other memory.
        guest.state().stubborn = Some(0x10_0000);
        windows.follow(&bars(Some(0x20_0000), None));
        assert_eq!(guest.at(), [0x10_0000, 0x20_2000]);
        guest.state().stubborn = None;
        windows.follow(&bars(Some(0x20_0000), None));
        assert_eq!(guest.at(), [0x20_2000, 0x20_0000]);
        guest.state().stubborn = Some(0x20_0000);
        drop(windows);
        assert_eq!(
            (guest.at(), guest.state().mapped.clone()),
            (vec![0x20_0000], vec![0x1000])
        );
    }
}
