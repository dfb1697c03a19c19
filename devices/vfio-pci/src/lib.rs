//! A PCI function of the host's that a guest has, by VFIO. Knows no kind of function and no machine.
//!
//! ```text
//!  configuration space ── ours: ids and BARs as the function has them, capabilities by `policy` ──▶ of writes, what `policy` passes
//!  BARs ── MSI-X table and pending bits: ours ── the rest ──▶ the function's registers
//!  memory ◀── the function's DMA: all of the guest's, by the host's IOMMU, in the VM's one address space; or what the guest maps for it
//!  interrupts ◀── an event for each vector, which the engine's interrupts are attached to; for the pin a line of the machine's
//! ```
//! Sections cited are those of the PCI Local Bus Specification 3.0 unless another is named.
#![allow(
    unsafe_code,
    reason = "the guest is given registers of the host's hardware; each block says what that relies on"
)]

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
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use device::{
    CreateError, DmaSpace, DmaSpaces, FdTable, FunctionModule, HostFunction, InterruptPin, KnownBy, Reach, Taken,
    parse_config,
};
use engine::{FunctionGuard, Vm};
use pci::{BAR_COUNT, PciFunction};
use vfio::{CONFIG_REGION, Device, Irq, VfioError};
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
        let Taken {
            function,
            space,
            known_by,
        } = spaces.take(&config, fds)?;
        Ok(Box::new(Unplugged::new(Box::new(function), Some(known_by), space)?))
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
        intx: count(Irq::IntX)?,
        can_reset: function.can_reset(),
    };
    Description::read(&facts).map_err(CreateError::Value)
}

/// A function before it is on a bus.
struct Unplugged {
    // It is closed before the address space is.
    function: Box<dyn Device>,
    /// By what the engine is told of it; nothing tells it of one in a test.
    known_by: Option<KnownBy>,
    space: Arc<DmaSpace>,
    shown: Description,
}

impl Unplugged {
    fn new(function: Box<dyn Device>, known_by: Option<KnownBy>, space: Arc<DmaSpace>) -> Result<Self, CreateError> {
        let shown = describe(function.as_ref())?;
        Ok(Self {
            function,
            known_by,
            space,
            shown,
        })
    }

    /// In a VM.
    fn registers(
        self,
        vm: &Arc<dyn Vm>,
        pin: Option<Arc<dyn InterruptPin>>,
        reach: Reach,
    ) -> Result<Registers, CreateError> {
        let Self {
            function,
            known_by,
            shown,
            ..
        } = self;
        let shown = match pin {
            Some(_) => shown,
            None => shown.without_pin().map_err(CreateError::Value)?,
        };
        let engine = |error: engine::EngineError| CreateError::Value(error.to_string());
        // Whatever fails, the function is closed before the engine forgets it, and that before the memory is unmapped.
        let reach = reach;
        let tell = |file: BorrowedFd<'_>| vm.add_host_function(file).map_err(engine);
        let (known, group) = match known_by {
            Some(KnownBy::Group(group)) => (tell(group.as_fd())?, Some(group)),
            Some(KnownBy::Itself(file)) => (tell(file.as_fd())?, None),
            None => (FunctionGuard::nothing(), None),
        };
        let function = function;
        let interrupts = Interrupts::new(vm.as_ref(), &shown, pin)?;
        let windows = Windows::new(vm, function.as_ref(), &shown.tables)?;
        Registers::new((reach, group), (function, known), shown, (interrupts, windows))
    }
}

impl HostFunction for Unplugged {
    fn space(&self) -> Arc<DmaSpace> {
        Arc::clone(&self.space)
    }

    fn plug(
        self: Box<Self>,
        vm: &Arc<dyn Vm>,
        pin: Option<Arc<dyn InterruptPin>>,
        reach: Reach,
    ) -> Result<Arc<dyn PciFunction>, CreateError> {
        Ok(Arc::new(self.registers(vm, pin, reach)?))
    }
}
