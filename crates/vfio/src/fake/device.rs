//! A function whose registers are bytes, and which remembers what was done to it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::{CONFIG_REGION, Device, IntxMask, Irq, IrqInfo, Mapping, Region, VfioError};

/// BARs, the ROM and configuration space.
const REGIONS: usize = 8;

/// In the command register (PCI 3.0, 6.2.2), which VFIO keeps for INTx: while the bit is set nothing is signalled.
const COMMAND: u64 = 4;
const INTERRUPT_DISABLE: u8 = 1 << 2;

/// In the status register (6.2.3): the function wants something, whether or not it may say so.
const STATUS: u64 = 6;
const INTERRUPT_STATUS: u8 = 1 << 3;

/// What lies between regions in the file: more than any BAR of a test.
const STRIDE: u64 = 1 << 24;

/// A write that has reached the function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Of which region.
    pub region: u32,
    /// Where in it.
    pub offset: u64,
    /// What.
    pub data: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    written: Vec<Written>,
    on: BTreeMap<Irq, Vec<OwnedFd>>,
    masks: u64,
    resets: u64,
    intx: Intx,
}

/// INTx as VFIO has it while it is on.
#[derive(Debug, Default)]
struct Intx {
    /// The function wants something.
    is_asserted: bool,
    /// It has been signalled, and nobody has unmasked it.
    is_masked: bool,
    unmask: Option<OwnedFd>,
    signals: u64,
}

/// A function without hardware.
#[derive(Debug)]
pub struct FakeDevice {
    registers: File,
    regions: [Region; REGIONS],
    irqs: BTreeMap<Irq, u32>,
    /// As many interrupts of one kind as the host has.
    vectors: u32,
    resettable: bool,
    state: Mutex<State>,
}

impl FakeDevice {
    /// One with this configuration space, of 256 or 4096 bytes.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn new(config: &[u8]) -> io::Result<Self> {
        let registers = base::memfd::sized("function", STRIDE * REGIONS as u64)?;
        let at = STRIDE * u64::from(CONFIG_REGION);
        registers.write_all_at(config, at)?;
        let mut regions: [Region; REGIONS] = Default::default();
        regions[REGIONS - 1] = Region {
            mappable: Vec::new(),
            ..Region::plain(config.len() as u64, at)
        };
        Ok(Self {
            registers,
            regions,
            irqs: BTreeMap::new(),
            vectors: u32::MAX,
            resettable: true,
            state: Mutex::default(),
        })
    }

    /// With a BAR of so many bytes, 16 MiB at most, all of which can be mapped.
    #[must_use]
    pub fn with_bar(mut self, index: usize, size: u64) -> Self {
        self.regions[index] = Region::plain(size.min(STRIDE), STRIDE * index as u64);
        self
    }

    /// With so many interrupts of one kind.
    #[must_use]
    pub fn with_irqs(mut self, irq: Irq, count: u32) -> Self {
        self.irqs.insert(irq, count);
        self
    }

    /// On a host that has no more interrupts for it than that.
    #[must_use]
    pub fn with_vectors(mut self, vectors: u32) -> Self {
        self.vectors = vectors;
        self
    }

    /// Without a way to reset it.
    #[must_use]
    pub fn without_reset(mut self) -> Self {
        self.resettable = false;
        self
    }

    /// What was written since the last call, in order.
    pub fn take_written(&self) -> Vec<Written> {
        std::mem::take(&mut self.state().written)
    }

    /// How many interrupts of one kind are on.
    pub fn on(&self, irq: Irq) -> usize {
        self.state().on.get(&irq).map_or(0, Vec::len)
    }

    /// The function interrupts; whether anybody hears it.
    ///
    /// # Errors
    /// The event could not be signalled.
    pub fn interrupt(&self, irq: Irq, number: usize) -> io::Result<bool> {
        let state = self.state();
        let Some(event) = state.on.get(&irq).and_then(|events| events.get(number)) else {
            return Ok(false);
        };
        rustix::io::write(event, &1_u64.to_ne_bytes())?;
        Ok(true)
    }

    /// The function asserts its interrupt pin, or does so no more: VFIO signals that once, if INTx is on, until it is unmasked.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn assert_pin(&self, asserted: bool) -> io::Result<()> {
        let mut state = self.state();
        state.intx.is_asserted = asserted;
        let at = STRIDE * u64::from(CONFIG_REGION) + STATUS;
        let mut status = [0];
        self.registers.read_exact_at(&mut status, at)?;
        let others = status[0] & !INTERRUPT_STATUS;
        let bit = if asserted { INTERRUPT_STATUS } else { 0 };
        self.registers.write_all_at(&[others | bit], at)?;
        self.follow_pin(&mut state)
    }

    /// How often INTx has been signalled; what its driver's other thread would do is done before.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn pin_signals(&self) -> io::Result<u64> {
        let mut state = self.state();
        self.follow_pin(&mut state)?;
        Ok(state.intx.signals)
    }

    fn is_disabled(&self) -> io::Result<bool> {
        let mut command = [0];
        let at = STRIDE * u64::from(CONFIG_REGION) + COMMAND + 1;
        self.registers.read_exact_at(&mut command, at)?;
        Ok(command[0] & INTERRUPT_DISABLE != 0)
    }

    fn follow_pin(&self, state: &mut State) -> io::Result<()> {
        if let Some(unmask) = &state.intx.unmask {
            let mut count = [0; 8];
            // It is empty, or it is not.
            state.intx.is_masked &= rustix::io::read(unmask, &mut count) != Ok(8);
        }
        let Some(event) = state.on.get(&Irq::IntX).and_then(|events| events.first()) else {
            return Ok(());
        };
        if state.intx.is_asserted && !state.intx.is_masked && !self.is_disabled()? {
            rustix::io::write(event, &1_u64.to_ne_bytes())?;
            state.intx.is_masked = true;
            state.intx.signals += 1;
        }
        Ok(())
    }

    /// How often it was reset.
    pub fn resets(&self) -> u64 {
        self.state().resets
    }

    /// How often INTx was masked, unmasked, or given an event to be unmasked by.
    pub fn masks(&self) -> u64 {
        self.state().masks
    }

    /// The function writes a register of its own.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn set(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.registers.write_all_at(data, STRIDE * u64::from(region) + offset)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(errno: Errno) -> VfioError {
    VfioError::Call {
        call: "VFIO_DEVICE_SET_IRQS",
        source: errno.into(),
    }
}

impl Device for FakeDevice {
    fn region(&self, index: u32) -> Result<Region, VfioError> {
        let region = usize::try_from(index).ok().and_then(|index| self.regions.get(index));
        region.cloned().ok_or_else(|| refused(Errno::INVAL))
    }

    fn read(&self, region: &Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let at = region
            .place(offset, data.len() as u64)
            .ok_or(io::ErrorKind::InvalidInput)?;
        self.registers.read_exact_at(data, at)
    }

    fn write(&self, region: &Region, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = region
            .place(offset, data.len() as u64)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let mut state = self.state();
        state.written.push(Written {
            region: u32::try_from(at / STRIDE).unwrap_or(u32::MAX),
            offset,
            data: data.to_vec(),
        });
        self.registers.write_all_at(data, at)?;
        let has_pin = self.irqs.get(&Irq::IntX).is_some_and(|count| *count > 0);
        let is_command = at == STRIDE * u64::from(CONFIG_REGION) + COMMAND;
        assert!(
            !(has_pin && is_command) || self.is_disabled()? || state.on.contains_key(&Irq::IntX),
            "it may assert a pin that nobody listens to"
        );
        self.follow_pin(&mut state)
    }

    fn map(&self, region: &Region, offset: u64, length: u64) -> io::Result<Option<Mapping>> {
        let at = region.place(offset, length).ok_or(io::ErrorKind::InvalidInput)?;
        if !region.can_map(offset, length) {
            return Ok(None);
        }
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?;
        Mapping::new(&self.registers, at, length).map(Some)
    }

    fn irq_info(&self, irq: Irq) -> Result<IrqInfo, VfioError> {
        let count = self.irqs.get(&irq).copied().unwrap_or(0);
        Ok(IrqInfo {
            count,
            signals: true,
            maskable: irq == Irq::IntX,
            masks_itself: irq == Irq::IntX,
            resizable: irq == Irq::IntX,
        })
    }

    fn set_interrupts(&self, irq: Irq, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        let mut state = self.state();
        // Any change turns off what is on.
        state.on.remove(&irq);
        if irq == Irq::IntX {
            state.intx.is_masked = false;
            state.intx.unmask = None;
        }
        if events.is_empty() {
            return Ok(());
        }
        let exclusive = [Irq::IntX, Irq::Msi, Irq::MsiX];
        let other = state.on.keys().any(|on| exclusive.contains(on));
        let count = u32::try_from(events.len()).unwrap_or(u32::MAX);
        if count > self.irqs.get(&irq).copied().unwrap_or(0) || (exclusive.contains(&irq) && other) {
            return Err(refused(Errno::INVAL));
        }
        if count > self.vectors {
            return Err(VfioError::Vectors {
                asked: events.len(),
                available: self.vectors,
            });
        }
        let events: Result<_, _> = events.iter().map(BorrowedFd::try_clone_to_owned).collect();
        state
            .on
            .insert(irq, events.map_err(|error| crate::failed("dup")(error))?);
        self.follow_pin(&mut state).map_err(crate::failed("write"))
    }

    fn mask_intx(&self, mask: IntxMask<'_>) -> Result<(), VfioError> {
        let mut state = self.state();
        if !state.on.contains_key(&Irq::IntX) {
            return Err(refused(Errno::INVAL));
        }
        state.masks += 1;
        match mask {
            IntxMask::Mask => state.intx.is_masked = true,
            IntxMask::Unmask => state.intx.is_masked = false,
            IntxMask::UnmaskBy(event) => {
                let event = event.try_clone_to_owned();
                state.intx.unmask = Some(event.map_err(|error| crate::failed("dup")(error))?);
            }
            IntxMask::UnmaskByNone => state.intx.unmask = None,
        }
        self.follow_pin(&mut state).map_err(crate::failed("write"))
    }

    fn can_reset(&self) -> bool {
        self.resettable
    }

    fn reset(&self) -> Result<(), VfioError> {
        if !self.resettable {
            return Err(crate::failed("VFIO_DEVICE_RESET")(Errno::NOTTY.into()));
        }
        self.state().resets += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::EventFd;
    use std::os::fd::AsFd;

    #[test]
    fn it_remembers_writes_and_signals_what_is_on() {
        let device = FakeDevice::new(&[7; 256]).unwrap();
        let device = device
            .with_bar(2, 0x100)
            .with_irqs(Irq::Msi, 2)
            .with_irqs(Irq::MsiX, 4)
            .with_vectors(1);
        let bar = device.region(2).unwrap();
        device.write(&bar, 0xfc, &[1, 2]).unwrap();
        assert!(device.write(&bar, 0xff, &[1, 2]).is_err());
        let written = Written {
            region: 2,
            offset: 0xfc,
            data: vec![1, 2],
        };
        assert_eq!(device.take_written(), [written]);
        let (event, other) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        device.set_interrupts(Irq::Msi, &[event.as_fd()]).unwrap();
        assert!(device.interrupt(Irq::Msi, 0).unwrap() && event.consume());
        assert!(!device.interrupt(Irq::Msi, 1).unwrap());
        assert!(
            device.set_interrupts(Irq::MsiX, &[event.as_fd()]).is_err(),
            "one kind at a time"
        );
        let both = [event.as_fd(), other.as_fd()];
        let error = device.set_interrupts(Irq::Msi, &both).unwrap_err();
        assert!(matches!(error, VfioError::Vectors { asked: 2, available: 1 }));
        assert_eq!(device.on(Irq::Msi), 0);
    }

    #[test]
    fn intx_is_masked_only_while_it_is_on() {
        let device = FakeDevice::new(&[0; 256])
            .unwrap()
            .with_irqs(Irq::IntX, 1)
            .without_reset();
        assert!(device.mask_intx(IntxMask::Unmask).is_err());
        let event = EventFd::new().unwrap();
        device.set_interrupts(Irq::IntX, &[event.as_fd()]).unwrap();
        device.mask_intx(IntxMask::UnmaskBy(event.as_fd())).unwrap();
        assert_eq!((device.masks(), device.can_reset()), (1, false));
        assert!(device.reset().is_err());
    }

    #[test]
    fn a_pin_is_signalled_once_until_it_is_unmasked() {
        let device = FakeDevice::new(&[0; 256]).unwrap().with_irqs(Irq::IntX, 1);
        let (event, unmask) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        device.assert_pin(true).unwrap();
        device.set_interrupts(Irq::IntX, &[event.as_fd()]).unwrap();
        assert!(event.consume());
        device.assert_pin(true).unwrap();
        device.mask_intx(IntxMask::UnmaskBy(unmask.as_fd())).unwrap();
        assert_eq!((device.pin_signals().unwrap(), event.consume()), (1, false));
        unmask.signal();
        assert_eq!((device.pin_signals().unwrap(), event.consume()), (2, true));
        device.assert_pin(false).unwrap();
        unmask.signal();
        assert_eq!(device.pin_signals().unwrap(), 2);
        // The command register's bit holds it back.
        let config = device.region(CONFIG_REGION).unwrap();
        device.write(&config, COMMAND, &[0, INTERRUPT_DISABLE]).unwrap();
        device.assert_pin(true).unwrap();
        assert_eq!(device.pin_signals().unwrap(), 2);
        device.write(&config, COMMAND, &[0, 0]).unwrap();
        assert_eq!((device.pin_signals().unwrap(), event.consume()), (3, true));
        device.mask_intx(IntxMask::Unmask).unwrap();
        assert_eq!(device.pin_signals().unwrap(), 4);
    }
}
