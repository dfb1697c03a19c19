//! A PCI function of the host's that a guest has, by VFIO. Knows no kind of function and no machine.
//!
//! ```text
//!  configuration space ── ours: ids and BARs as the function has them, MSI-X, nothing else ──▶ of writes, two bits of the command register
//!  BARs ── MSI-X table and pending bits: ours ── the rest ──▶ the function's registers
//!  memory ◀── the function's DMA: all of the guest's, by the host's IOMMU
//!  interrupts ◀── an event for each vector, which the engine's interrupts are attached to
//! ```
//! Sections cited are those of the PCI Local Bus Specification 3.0.
#![allow(
    unsafe_code,
    reason = "the host's hardware is told of the guest's memory; the block says what that relies on"
)]

mod description;
mod registers;
mod windows;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use base::EventFd;
use device::{CreateError, FdTable, FunctionModule, HostFunction, parse_config};
use engine::Vm;
use memory::Ram;
use pci::PciFunction;
use vfio::{AddressSpace, CONFIG_REGION, Device, Function, Mapped, Piece, Type1, VfioError};
use vm_memory::{Address, GuestMemoryRegion};
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, VfioPciConfig};

use description::Description;
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

    fn create(&self, spec: &DeviceSpec, fds: &mut FdTable) -> Result<Box<dyn HostFunction>, CreateError> {
        let config: VfioPciConfig = parse_config(spec)?;
        let space = Type1::from_fd(fds.take(config.container)?).map_err(refused("a container of VFIO's"))?;
        let function = Function::from_fd(fds.take(config.function)?).map_err(refused("a PCI function of the host"))?;
        let description = describe(&function)?;
        Ok(Box::new(Unplugged {
            space,
            function,
            description,
        }))
    }
}

fn refused(what: &'static str) -> impl Fn(VfioError) -> CreateError {
    move |error| CreateError::Host {
        what,
        source: io::Error::other(error),
    }
}

/// What the function says of itself.
fn describe(function: &Function) -> Result<Description, CreateError> {
    let what = "its configuration space";
    let region = function.region(CONFIG_REGION).map_err(refused(what))?;
    let mut bytes = [0; pci::config::SIZE];
    function
        .read(&region, 0, &mut bytes)
        .map_err(|source| CreateError::Host { what, source })?;
    let mut sizes = [0; pci::BAR_COUNT];
    for (index, size) in (0..).zip(&mut sizes) {
        *size = function.region(index).map_err(refused("its BARs"))?.size;
    }
    Description::read(&bytes, sizes).map_err(|what| CreateError::Value(what.into()))
}

/// A function before there is a VM.
struct Unplugged {
    space: Type1,
    function: Function,
    description: Description,
}

impl HostFunction for Unplugged {
    fn plug(self: Box<Self>, vm: &Arc<dyn Vm>, ram: &Ram) -> Result<Arc<dyn PciFunction>, CreateError> {
        let Self {
            space,
            function,
            description,
        } = *self;
        let mut mapped: Vec<Mapped> = Vec::new();
        for region in ram.regions() {
            let piece = Piece {
                iova: region.start_addr().raw_value(),
                address: region.as_ptr() as u64,
                length: region.len(),
            };
            // SAFETY: 1. the range is one whole mapping that the region owns, and `Registers` keeps the regions until it has closed the
            // descriptors; 2. it is a guest's memory, which anybody may change at any time.
            match unsafe { space.map(piece) } {
                Ok(piece) => mapped.push(piece),
                Err(error) => {
                    // It ends with its mappings.
                    drop((function, space));
                    return Err(refused("the guest's memory")(error));
                }
            }
        }
        let mut interrupts = Vec::new();
        let mut events = Vec::new();
        for _ in 0..description.vectors() {
            let event = || {
                EventFd::new().map_err(|source| CreateError::Host {
                    what: "an event fd",
                    source,
                })
            };
            let (event, interrupt) = (event()?, vm.create_interrupt());
            let theirs = event.try_clone().map_err(|source| CreateError::Host {
                what: "a copy of an event fd",
                source,
            })?;
            interrupt
                .attach(theirs)
                .map_err(|error| CreateError::Value(error.to_string()))?;
            interrupts.push(interrupt);
            events.push(event);
        }
        let windows = Windows::new(vm, &function, &description)?;
        let registers = Registers::new(
            function,
            (space, mapped),
            ram,
            &description,
            (interrupts, events, windows),
        )?;
        Ok(Arc::new(registers))
    }
}

/// The events as VFIO wants them.
fn borrowed(events: &[EventFd]) -> Vec<BorrowedFd<'_>> {
    events.iter().map(AsFd::as_fd).collect()
}
