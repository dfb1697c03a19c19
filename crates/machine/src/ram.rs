//! The memory of a machine: of one that boots as its engine wants it, and of any what is mapped before its guest touches it. Knows no layout.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use device::PluggableDma;
use engine::{Engine, Vm};
use memory::layout::MemorySize;
use memory::{MemoryError, Pins, Ram};
use observe::Registry;
use vm_memory::GuestRegionMmap;

use crate::error::MachineError;
use crate::machine::{Machine, MachineConfig};

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

/// The same memory, and files that are memory beside it.
pub(crate) fn with_pmem(
    ram: Ram,
    pmem: Vec<Arc<GuestRegionMmap<()>>>,
    has_functions: bool,
) -> Result<Ram, MachineError> {
    match pmem.is_empty() {
        true => Ok(ram),
        false if has_functions => Err(MachineError::FunctionsAndPmem),
        false if ram.identity_layout().is_some() => {
            let why = "its guest has addresses of the host's, where they are not";
            Err(MachineError::NoPmem(why))
        }
        false => {
            let room = "there are no addresses left for them: give smaller files";
            ram.with_pmem(pmem).map_err(|_| MachineError::NoPmem(room))
        }
    }
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

/// Has pages be in the guest's second stage of translation before it touches them ([`Vm::map_ahead`]), by the pages' numbers as those of
/// [`Ram::populate_write`]. Nothing of it is an error: what is not mapped now is when it is touched, and after one that is refused no more are
/// tried.
pub fn map_ahead(vm: &dyn Vm, ram: &Ram, runs: &[(u64, u64)]) {
    for (guest, bytes) in ram.guest_ranges(runs) {
        if let Err(error) = vm.map_ahead(guest, bytes) {
            return log::debug!("memory is mapped when the guest touches it: {error}");
        }
    }
}

/// What takes files of zeroes of a VM's memory, or why nothing does.
fn zeroed(ram: &Ram, has_iommu: bool, pluggable: Option<&PluggableDma>) -> Result<PluggableDma, MachineError> {
    ram.takes_zeroed().map_err(MachineError::NoZeroedMemory)?;
    if has_iommu {
        let why = "its guest maps memory for functions of the host's itself, and may have mapped what is not plugged";
        return Err(MachineError::NoZeroedMemory(why));
    }
    let none = MachineError::NoZeroedMemory("it has no device that plugs memory");
    pluggable.cloned().ok_or(none)
}

impl Machine {
    /// Has memory of its own, zeroed and in huge pages, in the place of what has no content in the files that it is mapped from and was not written
    /// since, as functions of the host's are about to reach all of it: of a file each page would come by the page cache, to be copied. vCPUs and
    /// devices stand still meanwhile, if there is something to do, so that nobody writes between the look at the page map and the new mapping.
    /// Only a help: what could not be done is in the log, and mapped as ever. How many bytes that were.
    pub fn own_unwritten_holes(&mut self, pagemap: &File) -> u64 {
        let stays = self.has_iommu() || self.is_pinned() || self.pins().is_pinned();
        let nothing = |holes: Result<Vec<_>, MemoryError>| holes.is_ok_and(|holes| holes.is_empty());
        if stays || self.ram.layers().is_none() || nothing(self.ram.unwritten_holes(pagemap)) {
            return 0;
        }
        let begun = Instant::now();
        let mapped = self.standing_still(|machine| machine.ram.map_unwritten_holes_anonymous(pagemap));
        match mapped {
            Ok(bytes) => {
                log::info!(
                    "{} MiB without content are memory of the VM's own after {:?}",
                    bytes >> 20,
                    begun.elapsed()
                );
                bytes
            }
            Err(error) => {
                log::warn!("memory without content is copied from its files: {error}");
                0
            }
        }
    }

    fn zeroed(&self) -> Result<PluggableDma, MachineError> {
        zeroed(&self.ram, self.has_iommu(), self.functions.pluggable())
    }

    /// Bytes of the memory that can be plugged that came zeroed so far ([`Machine::add_zeroed_memory`]).
    ///
    /// # Errors
    /// It takes none.
    pub fn zeroed_memory(&self) -> Result<u64, MachineError> {
        Ok(self.zeroed()?.zeroed())
    }

    /// Has files of zeroes take the places of the lowest parts of the memory that can be plugged that nobody uses, as far as there are such
    /// ([`PluggableDma::place_zeroed`]).
    ///
    /// # Errors
    /// The machine takes none, or one of them cannot be used, and nothing has changed; or the host refused one.
    pub fn add_zeroed_memory(&self, files: Vec<File>) -> Result<(), MachineError> {
        Ok(self.zeroed()?.place_zeroed(&self.ram, files)?)
    }
}

#[cfg(test)]
mod tests {
    use base::ByteSize;
    use virtio::conformance::fakes::FakeVm;

    use super::*;

    #[test]
    fn runs_are_mapped_in_their_order_until_one_is_refused() {
        let (vm, ram) = (FakeVm::default(), Ram::allocate(ByteSize::mib(64)).unwrap());
        let pages = 64 << 8;
        map_ahead(&vm, &ram, &[(8, 2), (0, 1), (pages, 1), (pages - 3, 3)]);
        let all = [(0x8000, 0x2000), (0, 0x1000), ((64 << 20) - 0x3000, 0x3000)];
        assert_eq!(vm.asked_ahead(), all);
        let vm = FakeVm::default();
        vm.refuse_ahead(0);
        map_ahead(&vm, &ram, &[(8, 2), (0, 1), (pages - 3, 3)]);
        assert_eq!(vm.asked_ahead(), all[..2]);
    }

    #[test]
    fn zeroed_memory_is_taken_where_only_the_vmm_says_what_is_mapped() {
        let size = MemorySize::from(ByteSize::mib(64)).with_hotplug(ByteSize::mib(128));
        let (ram, without) = (Ram::allocate(size).unwrap(), Ram::allocate(size.boot).unwrap());
        let dma = PluggableDma::new(ram.hotplug().unwrap());
        assert_eq!(zeroed(&ram, false, Some(&dma)).unwrap().zeroed(), 0);
        let pinned = ram.clone().with_pins(Pins::default());
        pinned.pins().pin().for_ever();
        for (ram, has_iommu, dma, words) in [
            (&ram, true, Some(&dma), "its guest maps memory"),
            (&ram, false, None, "no device that plugs memory"),
            (&without, false, Some(&dma), "no memory that can be plugged"),
            (&pinned, false, Some(&dma), "has to stay where it is"),
        ] {
            let told = zeroed(ram, has_iommu, dma).err().unwrap().to_string();
            assert!(told.contains(words) && told.contains("zero it here"), "{told}");
        }
    }
}
