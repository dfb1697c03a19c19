//! Which exits come out to user space, by what they reached.

use boot::Ports;
use engine::Exit;
use memory::layout::{self, Range};
use observe::{Counter, Registry};

use crate::platform::{BAR_PORTS, PORTS};

/// What an exit was about. The order is that of the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    PciConfigPort,
    Serial,
    PowerAndEvents,
    OtherPort,
    Ecam,
    PciBar,
    IoApic,
    OtherMmio,
    Other,
}

const NAMES: [(Kind, &str); 9] = [
    (Kind::PciConfigPort, "pci-config-port"),
    (Kind::Serial, "serial"),
    (Kind::PowerAndEvents, "power-and-events"),
    (Kind::OtherPort, "other-port"),
    (Kind::Ecam, "pci-ecam"),
    (Kind::PciBar, "pci-bar"),
    (Kind::IoApic, "ioapic"),
    (Kind::OtherMmio, "other-mmio"),
    (Kind::Other, "other"),
];

/// The counters of one vCPU.
pub(crate) struct ExitCounters {
    counters: Vec<Counter>,
}

impl ExitCounters {
    pub(crate) fn new(registry: &Registry, vcpu: u32) -> Self {
        let vcpu = vcpu.to_string();
        let counters = NAMES
            .iter()
            .map(|(_, name)| registry.counter("vcpu_exits_total", &[("vcpu", &vcpu), ("reason", name)]));
        Self {
            counters: counters.collect(),
        }
    }

    pub(crate) fn count(&self, exit: &Exit<'_>) {
        let kind = match exit {
            Exit::PortRead { port, .. } | Exit::PortWrite { port, .. } => port_kind(&PORTS, *port),
            Exit::MmioRead { address, .. } | Exit::MmioWrite { address, .. } => mmio_kind(*address),
            Exit::IoapicEoi(_) => Kind::IoApic,
            _ => Kind::Other,
        };
        if let Some(counter) = self.counters.get(kind as usize) {
            counter.increment();
        }
    }
}

fn port_kind(ports: &Ports, port: u16) -> Kind {
    match port {
        0xcf8..=0xcff => Kind::PciConfigPort,
        port if port & !7 == ports.serial => Kind::Serial,
        port if port & !7 == ports.sleep_control => Kind::PowerAndEvents,
        port if u64::from(port) >= BAR_PORTS.start => Kind::PciBar,
        _ => Kind::OtherPort,
    }
}

fn mmio_kind(address: u64) -> Kind {
    let within = |range: Range| {
        address
            .checked_sub(range.start)
            .is_some_and(|offset| offset < range.length)
    };
    if within(layout::ECAM) {
        Kind::Ecam
    } else if within(layout::PCI_WINDOW_32) || address >= layout::HIGH_RAM_START {
        Kind::PciBar
    } else if within(layout::IOAPIC) {
        Kind::IoApic
    } else {
        Kind::OtherMmio
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_the_counter_of_its_name() {
        for (index, (kind, _)) in NAMES.iter().enumerate() {
            assert_eq!(*kind as usize, index);
        }
        let registry = Registry::new();
        let counters = ExitCounters::new(&registry, 0);
        counters.count(&Exit::PortWrite {
            port: 0x3f8,
            width: 1,
            data: &[0],
        });
        counters.count(&Exit::MmioWrite {
            address: 0x40_0000_0000,
            data: &[0],
        });
        counters.count(&Exit::PortWrite {
            port: 0xc0c4,
            width: 2,
            data: &[0, 0],
        });
        let counted: Vec<_> = registry
            .samples()
            .into_iter()
            .filter(|sample| sample.value > 0)
            .collect();
        assert_eq!(
            counted.iter().map(|s| s.labels[1].1.as_str()).collect::<Vec<_>>(),
            ["serial", "pci-bar"]
        );
    }
}
