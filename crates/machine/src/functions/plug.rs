//! How a function of the host's comes to the guest's bus. Knows neither when, nor what has become of others.

use std::sync::Arc;

use boot::GuestIommu;
use device::{DmaMemory, EndpointDma, Endpoints, HostFunction, InterruptPin, Reach};
use engine::Vm;
use pci::PciBus;

use super::interrupt_pins::{InterruptPins, Line};
use crate::platform::IoApic;

/// What functions are put on.
#[derive(Clone, Copy)]
pub(crate) struct Board<'a> {
    pub(crate) vm: &'a Arc<dyn Vm>,
    pub(crate) bus: &'a Arc<PciBus>,
    pub(crate) ioapic: &'a Arc<IoApic>,
    pub(crate) memory: &'a DmaMemory,
}

/// A function on the bus.
pub(super) struct Plugged {
    pub(super) slot: usize,
    /// Its interrupt pin, where there are any.
    pub(super) line: Option<Arc<Line>>,
}

/// Puts a function on the bus, and tells where before the guest can find it; or why that cannot be.
pub(super) fn plug(
    function: Box<dyn HostFunction>,
    reach: Reach,
    board: Board<'_>,
    pins: &mut InterruptPins,
    before: impl FnOnce(usize),
) -> Result<Plugged, String> {
    let line = pins
        .make(board.ioapic)
        .map_err(|error| format!("the host refused what its interrupt pin needs: {error}"))?;
    let plugged = plug_with(function, reach, board, line.as_ref(), before);
    if plugged.is_err()
        && let Some(line) = &line
    {
        pins.remove(line);
    }
    plugged.map(|slot| Plugged { slot, line })
}

fn plug_with(
    function: Box<dyn HostFunction>,
    reach: Reach,
    Board { vm, bus, .. }: Board<'_>,
    line: Option<&Arc<Line>>,
    before: impl FnOnce(usize),
) -> Result<usize, String> {
    let pin = line.map(|line| Arc::clone(line) as Arc<dyn InterruptPin>);
    let function = function.plug(vm, pin, reach).map_err(|error| error.to_string())?;
    let connected = |slot: usize| {
        before(slot);
        line.map_or(Ok(()), |line| line.connect(slot))
    };
    let mut pinned = Ok(());
    let added = bus.add_after(function, |slot| pinned = connected(slot));
    let slot = added.map_err(|error| error.to_string())?;
    if let Err(error) = pinned {
        // Its other interrupts are there.
        log::warn!("a PCI function of the host's cannot interrupt its guest by its pin: {error}");
    }
    Ok(slot)
}

/// The same behind a guest's IOMMU.
pub(super) fn plug_behind(
    iommu: &Endpoints,
    function: Box<dyn HostFunction>,
    board: Board<'_>,
    pins: &mut InterruptPins,
) -> Result<Plugged, String> {
    let endpoint = EndpointDma::new(function.space(), board.memory).map_err(|error| error.to_string())?;
    let reach = Reach::Mapped(Arc::clone(&endpoint));
    plug(function, reach, board, pins, |slot| {
        iommu.insert(GuestIommu::endpoint(slot), &endpoint);
    })
}
