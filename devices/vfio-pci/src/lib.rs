//! A PCI function of the host's that a guest has, by VFIO. Knows no kind of function and no machine.
//!
//! ```text
//!  configuration space ── ours: ids and BARs as the function has them, capabilities by `policy` ──▶ of writes, what `policy` passes
//!  BARs ── MSI-X table and pending bits: ours ── the rest ──▶ the function's registers
//!  memory ◀── the function's DMA: all of the guest's, by the host's IOMMU, in the VM's one address space
//!  interrupts ◀── an event for each vector, which the engine's interrupts are attached to
//! ```
//! Sections cited are those of the PCI Local Bus Specification 3.0 unless another is named.

mod capabilities;
mod description;
mod interrupts;
mod policy;
mod registers;
mod tables;
#[cfg(test)]
mod tests;
mod windows;

use std::io;
use std::sync::Arc;

use device::{CreateError, DmaSpace, DmaSpaces, FdTable, FunctionModule, HostFunction, parse_config};
use engine::Vm;
use memory::Ram;
use pci::{BAR_COUNT, PciFunction};
use vfio::{CONFIG_REGION, Device, Function, Irq, VfioError};
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, VfioPciConfig};

use capabilities::EXTENDED_SIZE;
use description::{Description, Facts};
use interrupts::Interrupts;
use registers::Registers;
use windows::Windows;

/// This kind of device.
pub static MODULE: VfioPciModule = VfioPciModule;

/// Takes over PCI functions of the host.
#[derive(Debug)]
pub struct VfioPciModule;

impl FunctionModule for VfioPciModule {
    fn kind(&self) -> &'static str {
        VfioPciConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        spaces: &mut DmaSpaces,
    ) -> Result<Box<dyn HostFunction>, CreateError> {
        let config: VfioPciConfig = parse_config(spec)?;
        let space = spaces.of(config.container, fds)?;
        let function = Function::from_fd(fds.take(config.function)?).map_err(refused("a PCI function of the host"))?;
        Ok(Box::new(Unplugged::new(Box::new(function), space)?))
    }
}

fn refused(what: &'static str) -> impl Fn(VfioError) -> CreateError {
    move |error| CreateError::Host {
        what,
        source: io::Error::other(error),
    }
}

/// What the function says of itself.
fn describe(function: &dyn Device) -> Result<Description, CreateError> {
    let what = "its configuration space";
    let region = function.region(CONFIG_REGION).map_err(refused(what))?;
    let size = usize::try_from(region.size).unwrap_or(usize::MAX);
    let mut config = vec![
        0;
        if size >= EXTENDED_SIZE {
            EXTENDED_SIZE
        } else {
            pci::config::SIZE
        }
    ];
    function
        .read(&region, 0, &mut config)
        .map_err(|source| CreateError::Host { what, source })?;
    let mut bars = [0; BAR_COUNT];
    for (index, size) in (0..).zip(&mut bars) {
        *size = function.region(index).map_err(refused("its BARs"))?.size;
    }
    let count = |irq| Ok(function.irq_info(irq).map_err(refused("its interrupts"))?.count);
    let facts = Facts {
        config: &config,
        bars,
        msi: count(Irq::Msi)?,
        msix: count(Irq::MsiX)?,
        can_reset: function.can_reset(),
    };
    Description::read(&facts).map_err(CreateError::Value)
}

/// A function before there is a VM.
struct Unplugged {
    // It is closed before the address space is.
    function: Box<dyn Device>,
    space: Arc<DmaSpace>,
    shown: Description,
}

impl Unplugged {
    fn new(function: Box<dyn Device>, space: Arc<DmaSpace>) -> Result<Self, CreateError> {
        let shown = describe(function.as_ref())?;
        Ok(Self { function, space, shown })
    }

    /// In a VM.
    fn registers(self, vm: &Arc<dyn Vm>, ram: &Ram) -> Result<Registers, CreateError> {
        let Self { function, space, shown } = self;
        // Whatever fails, the function is closed before the memory is unmapped.
        let (dma, function) = (space.map(ram)?, function);
        let interrupts = Interrupts::new(vm.as_ref(), &shown)?;
        let windows = Windows::new(vm, function.as_ref(), &shown.tables)?;
        Registers::new(dma, function, shown, (interrupts, windows))
    }
}

impl HostFunction for Unplugged {
    fn plug(self: Box<Self>, vm: &Arc<dyn Vm>, ram: &Ram) -> Result<Arc<dyn PciFunction>, CreateError> {
        Ok(Arc::new(self.registers(vm, ram)?))
    }
}
