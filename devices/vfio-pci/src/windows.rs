//! Pages of a function's BARs that the guest reaches without us. They follow where the guest has the BARs.

use std::sync::Arc;

use device::CreateError;
use engine::{HostRange, Vm};
use pci::{BAR_COUNT, MemoryRanges};
use vfio::{Device, Mapping};

use crate::refused;
use crate::tables::Tables;

/// Pages in a row.
struct Window {
    bar: usize,
    offset: u64,
    mapping: Mapping,
    /// Where the guest has it.
    at: Option<u64>,
}

/// All of a function's.
pub(crate) struct Windows {
    vm: Arc<dyn Vm>,
    windows: Vec<Window>,
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

    /// The guest has its BARs there now. What the engine does not map exits, and is served all the same.
    pub(crate) fn follow(&mut self, ranges: &MemoryRanges) {
        let wanted = |window: &Window| ranges[window.bar].map(|range| range.start() + window.offset);
        // All old ones first: BARs may have changed places.
        for window in &mut self.windows {
            let range = window.range();
            if window.at != wanted(window)
                && let Some(at) = window.at.take()
                && let Err(error) = self.vm.map_registers(at, range, false)
            {
                log::error!("registers at {at:#x} could not be taken from the guest: {error}");
            }
        }
        for window in &mut self.windows {
            let Some(at) = wanted(window).filter(|_| window.at.is_none()) else {
                continue;
            };
            match self.vm.map_registers(at, window.range(), true) {
                Ok(()) => window.at = Some(at),
                Err(error) => log::debug!("registers at {at:#x} cause exits: {error}"),
            }
        }
    }
}

impl Window {
    fn range(&self) -> HostRange {
        HostRange {
            address: self.mapping.address(),
            length: self.mapping.length(),
        }
    }
}
