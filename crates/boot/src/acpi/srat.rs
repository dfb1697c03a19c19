//! The SRAT (ACPI 6.5, 5.2.16): which proximity domain processors and memory are in, of a machine with memory that can be plugged. The
//! memory map (e820) does not have that memory; by this table Linux knows how far its memory can reach (`max_possible_pfn`), and so whether a
//! device that addresses 32 bits needs bounce buffers, before any of it is there.

use acpi_tables::sdt::Sdt;
use acpi_tables::srat::MemoryAffinity;
use acpi_tables::{Aml, AmlSink};
use memory::layout::Range;

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};

/// The table's revision.
const REVISION: u8 = 3;

/// Processor Local APIC Affinity (5.2.16.1).
const LOCAL_APIC: u8 = 0;
const LOCAL_APIC_BYTES: u8 = 16;

/// Of that structure's flags: it counts.
const ENABLED: u32 = 1;

/// The domain of everything that a machine boots with.
const BOOT_NODE: u32 = 0;

/// Where memory is, and where it may come.
pub(super) struct Nodes<'a> {
    pub(super) ram: &'a [Range],
    pub(super) hotplug: Range,
    pub(super) hotplug_node: u16,
}

/// A finished table.
pub(super) struct Srat(Sdt);

impl Aml for Srat {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.0.as_slice());
    }
}

/// Builds the table.
pub(super) fn build(apic_ids: &[u32], nodes: &Nodes<'_>) -> Srat {
    // Reserved, to be 1; reserved, to be 0.
    let mut body = [1_u32.to_le_bytes(), [0; 4], [0; 4]].concat();
    // As in the MADT, there are no ids of more than 8 bits.
    for id in apic_ids.iter().map_while(|id| u8::try_from(*id).ok()) {
        let [domain, domain_high @ ..] = BOOT_NODE.to_le_bytes();
        body.extend([LOCAL_APIC, LOCAL_APIC_BYTES, domain, id]);
        body.extend(ENABLED.to_le_bytes());
        // The SAPIC's id, the rest of the domain, the clock's domain.
        body.push(0);
        body.extend(domain_high);
        body.extend([0; 4]);
    }
    for range in nodes.ram {
        MemoryAffinity::new(BOOT_NODE, range.start, range.length)
            .enabled()
            .to_aml_bytes(&mut body);
    }
    MemoryAffinity::new(u32::from(nodes.hotplug_node), nodes.hotplug.start, nodes.hotplug.length)
        .enabled()
        .hotpluggable()
        .to_aml_bytes(&mut body);
    let mut table = Sdt::new(*b"SRAT", 36, REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(&body);
    Srat(table)
}
