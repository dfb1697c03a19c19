//! Registers of devices of the host's as memory slots of KVM: the guest reaches them without an exit. Knows no device.
//!
//! Slots are taken from the upper half of those that a VM can have, the lower is RAM's, whose slots count from 0 on. They are no RAM to
//! anybody else: no record of what is written there, nothing of them in a saved state. KVM refuses two slots in one place, so
//! RAM cannot be covered; what is refused exits, and is served by whoever has the device.
//!
//! Taking a slot from a VM has KVM forget all of the guest's pages, which come back one fault each, and waits for its vCPUs
//! (0.1 to 4 ms, median of 200, with the giving; Linux 6.18): guests move BARs while they boot.
//!
//! **Registers that go.** VFIO takes a function's registers from this process while its memory space is off or it is reset.
//! A guest that touches them then would find nothing behind the slot, for which `KVM_RUN` fails with `EFAULT`. The slot is
//! taken from the VM instead: the guest exits there, like everywhere else, and gets it back when next any registers are given,
//! as when its driver turns the function's memory on again. Where KVM does not tell the address (before Linux 6.8), all slots of registers
//! are taken.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use engine::{EngineError, HostRange, Result, failed};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Cap, VmFd};

/// What can be mapped.
const PAGE: u64 = 4096;

/// What of KVM this needs.
pub(crate) trait Slots: Send + Sync {
    /// How many a VM can have.
    fn most(&self) -> u32;

    /// Gives the slot a place and what is there; no bytes take it away.
    ///
    /// # Safety
    /// Whatever is mapped there in this process is the guest's until the slot is taken away.
    unsafe fn set(&self, slot: u32, guest: u64, registers: HostRange) -> io::Result<()>;
}

impl Slots for VmFd {
    fn most(&self) -> u32 {
        u32::try_from(self.check_extension_int(Cap::NrMemslots)).unwrap_or(0)
    }

    unsafe fn set(&self, slot: u32, guest: u64, registers: HostRange) -> io::Result<()> {
        let request = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: guest,
            memory_size: registers.length,
            userspace_addr: registers.address,
        };
        // SAFETY: the caller's, word for word.
        Ok(unsafe { self.set_user_memory_region(request) }?)
    }
}

/// All registers that a VM's guest has.
pub(crate) struct Registers<K = VmFd> {
    kvm: Arc<K>,
    /// How many slots a VM can have, once somebody has asked.
    most: OnceLock<u32>,
    // Held for the time of a few system calls, which wait for vCPUs to leave their guest and for nothing that a guest does.
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    given: Vec<Given>,
    /// How often some were taken because they had gone.
    withdrawals: u64,
}

/// Registers in a row.
#[derive(Clone, Copy)]
struct Given {
    slot: u32,
    guest: u64,
    registers: HostRange,
    /// KVM has the slot.
    there: bool,
}

impl Given {
    fn has(&self, guest: u64) -> bool {
        guest
            .checked_sub(self.guest)
            .is_some_and(|offset| offset < self.registers.length)
    }
}

impl<K: Slots> Registers<K> {
    pub(crate) fn new(kvm: Arc<K>) -> Self {
        Self {
            kvm,
            most: OnceLock::new(),
            table: Mutex::default(),
        }
    }

    /// How many slots a VM can have. Asked before any are given, it is not asked again: threads of vCPUs, which give them, may not ask.
    pub(crate) fn most(&self) -> u32 {
        *self.most.get_or_init(|| self.kvm.most())
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the guest have them.
    ///
    /// # Safety
    /// As of [`engine::Vm::map_registers`].
    pub(crate) unsafe fn give(&self, guest: u64, registers: HostRange) -> Result<()> {
        check(guest, registers)?;
        let mut table = self.table();
        let most = self.most();
        let mut free = (most / 2..most).rev();
        let slot = free
            .find(|slot| table.given.iter().all(|given| given.slot != *slot))
            .ok_or_else(|| {
                EngineError::Unusable(format!(
                    "all {} memory slots for registers of devices are taken",
                    most - most / 2
                ))
            })?;
        // SAFETY: the caller's; the slot is taken away again by `take`.
        unsafe { self.kvm.set(slot, guest, registers) }.map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        table.given.push(Given {
            slot,
            guest,
            registers,
            there: true,
        });
        for given in table.given.iter_mut().filter(|given| !given.there) {
            // SAFETY: it was given, and not taken since.
            match unsafe { self.kvm.set(given.slot, given.guest, given.registers) } {
                Ok(()) => given.there = true,
                Err(error) => log::debug!("registers at {:#x} go on causing exits: {error}", given.guest),
            }
        }
        Ok(())
    }

    /// Takes back what was given, by the same place and range.
    pub(crate) fn take(&self, guest: u64, registers: HostRange) -> Result<()> {
        let mut table = self.table();
        let same = |given: &Given| (given.guest, given.registers) == (guest, registers);
        let index = table
            .given
            .iter()
            .position(same)
            .ok_or_else(|| EngineError::State(format!("no registers were given at {guest:#x}")))?;
        if table.given[index].there {
            self.remove(table.given[index])
                .map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        }
        table.given.swap_remove(index);
        Ok(())
    }

    /// A guest has touched, at `guest` where that is known, what is not mapped in this process: registers there are taken from it. How
    /// often any were so far.
    fn withdraw(&self, guest: Option<u64>) -> u64 {
        let mut table = self.table();
        let touched = |given: &&mut Given| given.there && guest.is_none_or(|guest| given.has(guest));
        let mut gone = false;
        for given in table.given.iter_mut().filter(touched) {
            match self.remove(*given) {
                Ok(()) => (given.there, gone) = (false, true),
                Err(error) => log::error!(
                    "registers at {:#x} that are gone stay the guest's: {error}",
                    given.guest
                ),
            }
        }
        if gone {
            log::debug!("registers of a device are gone ({guest:x?}): the guest exits there");
            table.withdrawals += 1;
        }
        table.withdrawals
    }

    fn remove(&self, given: Given) -> io::Result<()> {
        let nothing = HostRange {
            length: 0,
            ..given.registers
        };
        // SAFETY: a slot without bytes gives the guest nothing.
        unsafe { self.kvm.set(given.slot, given.guest, nothing) }
    }
}

/// What one vCPU knows of registers that were taken because they had gone.
pub(crate) struct Withdrawals<K = VmFd> {
    registers: Arc<Registers<K>>,
    seen: u64,
}

impl<K: Slots> Withdrawals<K> {
    pub(crate) fn of(registers: Arc<Registers<K>>) -> Self {
        Self { registers, seen: 0 }
    }

    /// It has touched what is not mapped in this process. Whether that were registers that are gone, as it finds out now, or another
    /// vCPU has since it did the last time: it does it once more then, and exits. If it was something else it comes here once more.
    pub(crate) fn explain(&mut self, guest: Option<u64>) -> bool {
        let now = self.registers.withdraw(guest);
        std::mem::replace(&mut self.seen, now) != now
    }
}

fn check(guest: u64, registers: HostRange) -> Result<()> {
    let HostRange { address, length } = registers;
    let whole = [guest, address, length].iter().all(|value| value % PAGE == 0);
    if length == 0 || !whole || guest.checked_add(length).is_none() {
        return Err(EngineError::State(format!(
            "{length:#x} bytes of registers at {guest:#x}, in this process at {address:#x}, are no whole pages"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Slots like KVM's: none covers another.
    struct Fake {
        most: u32,
        slots: Mutex<BTreeMap<u32, (u64, HostRange)>>,
        /// It does nothing more.
        broken: Mutex<bool>,
    }

    impl Slots for Fake {
        fn most(&self) -> u32 {
            self.most
        }

        unsafe fn set(&self, slot: u32, guest: u64, registers: HostRange) -> io::Result<()> {
            let mut slots = self.slots.lock().unwrap();
            if *self.broken.lock().unwrap() {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            if registers.length == 0 {
                return slots.remove(&slot).map(drop).ok_or(io::ErrorKind::InvalidInput.into());
            }
            let covers = |(at, other): &(u64, HostRange)| guest < at + other.length && *at < guest + registers.length;
            match slots.values().any(covers) || slots.contains_key(&slot) {
                true => Err(io::ErrorKind::AlreadyExists.into()),
                false => {
                    slots.insert(slot, (guest, registers));
                    Ok(())
                }
            }
        }
    }

    fn registers(most: u32) -> (Arc<Registers<Fake>>, Arc<Fake>) {
        let fake = Arc::new(Fake {
            most,
            slots: Mutex::default(),
            broken: Mutex::default(),
        });
        (Arc::new(Registers::new(Arc::clone(&fake))), fake)
    }

    const fn pages(address: u64, count: u64) -> HostRange {
        HostRange {
            address,
            length: count * PAGE,
        }
    }

    fn give(registers: &Registers<Fake>, guest: u64, range: HostRange) -> Result<()> {
        // SAFETY: the slots are none of KVM's.
        unsafe { registers.give(guest, range) }
    }

    #[test]
    fn slots_are_of_the_upper_half_and_come_back() {
        let (registers, fake) = registers(8);
        // RAM.
        // SAFETY: the slots are none of KVM's.
        unsafe { fake.set(0, 0, pages(0x10_0000, 16)) }.unwrap();
        for bar in 0..4 {
            give(&registers, 0xc000_0000 + (bar << 16), pages(bar << 20, 4)).unwrap();
        }
        let slots: Vec<_> = fake.slots.lock().unwrap().keys().copied().collect();
        assert_eq!(slots, [0, 4, 5, 6, 7]);
        let error = give(&registers, 0xd000_0000, pages(5 << 20, 1))
            .unwrap_err()
            .to_string();
        assert!(error.contains("all 4 memory slots"), "{error}");
        // Moved, as a guest moves its BARs: what was taken back has room elsewhere, but not where RAM or another BAR is.
        registers.take(0xc001_0000, pages(1 << 20, 4)).unwrap();
        for taken in [0x4000, 0xc000_3000, 0xbfff_d000] {
            assert!(give(&registers, taken, pages(1 << 20, 4)).is_err(), "{taken:#x}");
        }
        give(&registers, 0xbfff_c000, pages(1 << 20, 4)).unwrap();
        assert_eq!(fake.slots.lock().unwrap().len(), 5);
        // Only what was given, where it was.
        assert!(registers.take(0xc001_0000, pages(1 << 20, 4)).is_err());
        assert!(registers.take(0xbfff_c000, pages(1 << 20, 3)).is_err());
    }

    #[test]
    fn what_are_no_whole_pages_is_refused_before_kvm_sees_it() {
        let (registers, fake) = registers(8);
        let odd = HostRange {
            address: 0x1000,
            length: 0x800,
        };
        for (guest, range) in [
            (0x800, pages(0x1000, 1)),
            (0, pages(0x1001, 1)),
            (0, odd),
            (0, pages(0x1000, 0)),
            (u64::MAX - 0xfff, pages(0x1000, 1)),
        ] {
            let error = give(&registers, guest, range).unwrap_err().to_string();
            assert!(error.contains("no whole pages"), "{error}");
        }
        assert!(fake.slots.lock().unwrap().is_empty());
    }

    #[test]
    fn registers_that_are_gone_are_taken_and_come_back_with_the_next() {
        let (registers, fake) = registers(8);
        let (one, two) = (pages(0x10_0000, 2), pages(0x20_0000, 1));
        give(&registers, 0xc000_0000, one).unwrap();
        give(&registers, 0xc100_0000, two).unwrap();
        let there = || -> Vec<u64> { fake.slots.lock().unwrap().values().map(|(at, _)| *at).collect() };
        let vcpu = || Withdrawals::of(Arc::clone(&registers));
        let (mut first, mut second) = (vcpu(), vcpu());
        assert!(!first.explain(Some(0xc000_2000)), "behind its end");
        assert!(first.explain(Some(0xc000_1fff)));
        assert_eq!(there(), [0xc100_0000]);
        // The other one was on its way there, too; nobody is twice.
        assert!(second.explain(Some(0xc000_0000)));
        assert!(!first.explain(Some(0xc000_0000)) && !second.explain(Some(0xc000_0000)));
        // Without an address all are.
        assert!(first.explain(None));
        assert!(there().is_empty());
        assert!(!first.explain(None));
        give(&registers, 0xc200_0000, pages(0x30_0000, 1)).unwrap();
        assert_eq!(there().len(), 3);
        // What is not there is taken back without KVM.
        assert!(first.explain(Some(0xc100_0000)));
        registers.take(0xc100_0000, two).unwrap();
        give(&registers, 0xc100_0000, two).unwrap();
        assert_eq!(there().len(), 3);
    }

    #[test]
    fn what_kvm_does_not_take_back_is_still_given() {
        let (registers, fake) = registers(8);
        let range = pages(0x10_0000, 1);
        give(&registers, 0xc000_0000, range).unwrap();
        *fake.broken.lock().unwrap() = true;
        assert!(registers.take(0xc000_0000, range).is_err());
        let mut vcpu = Withdrawals::of(Arc::clone(&registers));
        assert!(!vcpu.explain(None), "it would find nothing again");
        *fake.broken.lock().unwrap() = false;
        registers.take(0xc000_0000, range).unwrap();
        assert!(fake.slots.lock().unwrap().is_empty());
    }
}
