//! The memory of a machine that boots, as its engine wants it. Knows no layout.

use std::sync::Arc;

use engine::{Engine, Vm};
use memory::layout::MemorySize;
use memory::{MemoryError, Pins, Ram};
use observe::Registry;

use crate::machine::{MachineConfig, MachineError};

/// How much of it lies in pages that the host had set aside, by the pages' size.
const HUGE: &str = "memory_huge_bytes";

/// The memory of a guest that boots, and its VM where that comes with it.
pub(crate) fn make(
    engine: &dyn Engine,
    config: &MachineConfig,
    pins: Pins,
    registry: &Registry,
) -> Result<(Option<Arc<dyn Vm>>, Ram), MachineError> {
    if engine.pins_memory() && config.memory.hotplug.bytes() > 0 {
        return Err(MachineError::PinnedMemory);
    }
    if engine.pins_memory() || config.identity_memory {
        pins.pin().for_ever();
    }
    if !config.identity_memory {
        let ram = allocate(engine, config.memory, registry)?;
        return Ok((None, ram.with_pins(pins)));
    }
    let size = config.memory.boot.bytes().saturating_add(memory::TABLES);
    let (vm, placed) = engine.create_identity_vm(config.cpu, size)?;
    let ram = Ram::identity(placed.low, placed.main, config.memory.boot)?;
    Ok((Some(vm), ram.with_pins(pins)))
}

/// Zeroed memory; in huge pages of the host's where it is pinned anyway.
fn allocate(engine: &dyn Engine, size: MemorySize, registry: &Registry) -> Result<Ram, MemoryError> {
    if !engine.pins_memory() {
        return Ram::allocate(size);
    }
    let ram = Ram::allocate_pinned(size.boot)?;
    let huge = ram.huge();
    for (size, bytes) in [("1g", huge.in_1g), ("2m", huge.in_2m)] {
        registry.counter(HUGE, &[("size", size)]).add(bytes);
    }
    Ok(ram)
}
