//! The PCI bus of a machine: how its guest reaches it, and what is on it.

use std::sync::Arc;

use boot::Root;
use bus::BusError;
use engine::Vm;
use memory::Ram;
use memory::layout::{self, Range};
use observe::Registry;
use pci::{PciBus, Window, WindowKind, Windows};
use virtio::{Reach, VirtioPciDevice};

use crate::devices::NamedDevice;
use crate::error::MachineError;
use crate::platform::BAR_PORTS;
use crate::vcpu::Shared;

/// How guests with this memory reach their devices: where nobody translates, no access to memory comes out.
pub(crate) fn root(ram: &Ram) -> Root {
    match ram.identity_layout() {
        Some(place) => Root::Ports {
            ports: BAR_PORTS,
            tables: place.tables,
        },
        None => Root::Memory {
            window_64: layout::pci_window_64(ram.sizes()),
        },
    }
}

fn window(range: Range) -> Window {
    Window {
        start: range.start,
        length: range.length,
    }
}

/// Makes a bus and puts it on the machine's.
fn add_bus(root: Root, shared: &Shared) -> Result<Arc<PciBus>, BusError> {
    let low = layout::PCI_WINDOW_32;
    let (high, ports) = match root {
        Root::Memory { window_64 } => (window_64, None),
        Root::Ports { ports, tables } => (tables, Some(ports)),
    };
    let bus = PciBus::new(Windows {
        low: window(low),
        high: window(high),
        ports: ports.map(window),
    });
    let config = (u64::from(pci::CONFIG_PORTS), u64::from(pci::CONFIG_PORT_COUNT));
    shared.ports.insert(config.0, config.1, bus.ports())?;
    match ports {
        Some(ports) => shared
            .ports
            .insert(ports.start, ports.length, bus.window(WindowKind::Ports))?,
        None => {
            let (ecam, mmio) = (layout::ECAM, &shared.mmio);
            mmio.insert(ecam.start, ecam.length, bus.ecam())?;
            mmio.insert(low.start, low.length, bus.window(WindowKind::Low))?;
            mmio.insert(high.start, high.length, bus.window(WindowKind::High))?;
        }
    }
    Ok(bus)
}

/// Puts PCI and everything on it on the buses.
pub(crate) fn add_devices(
    vm: &Arc<dyn Vm>,
    ram: &Ram,
    shared: &Shared,
    devices: Vec<NamedDevice>,
    registry: &Registry,
) -> Result<(Vec<Arc<VirtioPciDevice>>, Arc<PciBus>), MachineError> {
    let root = root(ram);
    let reach = match root {
        Root::Memory { .. } => Reach::Memory,
        Root::Ports { .. } => Reach::Ports,
    };
    let bus = add_bus(root, shared)?;
    let mut transports = Vec::with_capacity(devices.len());
    for NamedDevice { id, device } in devices {
        let made = VirtioPciDevice::reached_by(reach, (&id, device), Arc::clone(vm), Arc::clone(ram.guest()), registry);
        let transport = made.map_err(|source| MachineError::Transport { id: id.clone(), source })?;
        bus.add(Arc::<VirtioPciDevice>::clone(&transport))
            .map_err(|source| MachineError::Pci { id, source })?;
        transports.push(transport);
    }
    Ok((transports, bus))
}
