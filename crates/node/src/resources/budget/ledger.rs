//! Who was promised what, as numbers: sums, and whether one more fits. Pure: knows no host, no lock and no sandbox.
//!
//! Memory: a machine that has booted can use all of its memory and counts whole. One that was restored maps the files that it was
//! restored from, as all others of these files do, and uses what it changes: of such ones the largest counts whole, so that each
//! can grow to its size while the others are as usual, and the others by a share of their size. What is plugged is in none of these files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base::Ratio;

/// What a machine is promised as long as it is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Machine {
    /// The most of Linux's memory that it can use, with its VMM.
    pub(crate) memory: u64,
    /// It maps most of that from files.
    pub(crate) shared: bool,
    /// All but so much, which its guest plugs.
    pub(crate) own: u64,
    /// So much of it may lie in huge pages that were set aside.
    pub(crate) huge: u64,
    /// Of the memory that is reserved for guests whose memory is not translated.
    pub(crate) reserved: u64,
    /// What it needs of `memory` until it runs; nothing from then on.
    pub(crate) at_once: u64,
    /// Descriptors of the daemon.
    pub(crate) descriptors: u64,
}

/// All that was promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    /// Of Linux's memory, without huge pages.
    pub(crate) memory: u64,
    pub(crate) reserved: u64,
    /// What those need that are being started.
    pub(crate) at_once: u64,
    /// Held for machines.
    pub(crate) descriptors: u64,
    /// Held for requests under way; and for those of them that start a machine or keep one.
    pub(crate) leased: u64,
    pub(crate) starting: u64,
}

/// A disk: a sparse file that may grow to its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Disk {
    pub(crate) size: u64,
    pub(crate) path: PathBuf,
}

/// The table.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    next: u64,
    machines: BTreeMap<u64, Machine>,
    disks: BTreeMap<u64, Disk>,
    /// Descriptors of requests under way, and of those of them that start a machine or keep one.
    leased: u64,
    starting: u64,
    /// Bytes that lie ready zeroed, or are being filled: promised to nobody, and nobody else's memory.
    zeroed: u64,
}

impl Ledger {
    /// Adds a machine; its number.
    pub(crate) fn add_machine(&mut self, machine: Machine) -> u64 {
        let number = self.number();
        self.machines.insert(number, machine);
        number
    }

    pub(crate) fn machine(&self, number: u64) -> Option<Machine> {
        self.machines.get(&number).copied()
    }

    pub(crate) fn set_machine(&mut self, number: u64, machine: Machine) {
        self.machines.insert(number, machine);
    }

    /// Adds a disk; its number.
    pub(crate) fn add_disk(&mut self, disk: Disk) -> u64 {
        let number = self.number();
        self.disks.insert(number, disk);
        number
    }

    /// A machine or a disk goes.
    pub(crate) fn remove(&mut self, number: u64) {
        self.machines.remove(&number);
        self.disks.remove(&number);
    }

    pub(crate) fn lease(&mut self, descriptors: u64, starts: bool) {
        self.leased = self.leased.saturating_add(descriptors);
        if starts {
            self.starting = self.starting.saturating_add(descriptors);
        }
    }

    pub(crate) fn end_lease(&mut self, descriptors: u64, starts: bool) {
        self.leased = self.leased.saturating_sub(descriptors);
        if starts {
            self.starting = self.starting.saturating_sub(descriptors);
        }
    }

    /// Bytes of zeroed memory come, or go.
    pub(crate) fn add_zeroed(&mut self, bytes: u64) {
        self.zeroed = self.zeroed.saturating_add(bytes);
    }

    pub(crate) fn remove_zeroed(&mut self, bytes: u64) {
        self.zeroed = self.zeroed.saturating_sub(bytes);
    }

    pub(crate) fn zeroed(&self) -> u64 {
        self.zeroed
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The sum of all disks' sizes.
    pub(crate) fn disks(&self) -> u64 {
        self.disks.values().fold(0, |sum, disk| sum.saturating_add(disk.size))
    }

    /// Where they are.
    pub(crate) fn disk_paths(&self) -> impl Iterator<Item = &Path> {
        self.disks.values().map(|disk| disk.path.as_path())
    }

    /// What all machines and requests were promised, where there are `huge` bytes in huge pages.
    pub(crate) fn sum(&self, huge: u64, clones: Ratio) -> Sum {
        self.sum_with(None, huge, clones)
    }

    /// The same if a machine were added, or were another one.
    pub(crate) fn sum_with(&self, change: Option<(Option<u64>, Machine)>, huge: u64, clones: Ratio) -> Sum {
        let (replaced, added) = change.map_or((None, None), |(number, machine)| (number, Some(machine)));
        let others = self.machines.iter().filter(|(number, _)| Some(**number) != replaced);
        let all = others.map(|(_, machine)| *machine).chain(added);
        let mut sum = Sum {
            leased: self.leased,
            starting: self.starting,
            ..Sum::default()
        };
        let (mut own, mut in_huge, mut shared, mut largest) = (0_u64, 0_u64, 0_u64, 0);
        for machine in all {
            match machine.shared {
                true => {
                    let mapped = machine.memory.saturating_sub(machine.own);
                    own = own.saturating_add(machine.memory - mapped);
                    shared = shared.saturating_add(mapped);
                    largest = mapped.max(largest);
                }
                false => own = own.saturating_add(machine.memory),
            }
            in_huge = in_huge.saturating_add(machine.huge);
            sum.reserved = sum.reserved.saturating_add(machine.reserved);
            sum.at_once = sum.at_once.saturating_add(machine.at_once);
            sum.descriptors = sum.descriptors.saturating_add(machine.descriptors);
        }
        let expected = clones.divides(shared - largest).saturating_add(largest);
        sum.memory = own.saturating_add(expected).saturating_sub(in_huge.min(huge));
        sum
    }

    /// Nobody has anything.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.machines.is_empty() && self.disks.is_empty() && self.leased == 0 && self.zeroed == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLONES: Ratio = Ratio::whole(16);

    fn machine(memory: u64, shared: bool) -> Machine {
        Machine {
            memory,
            shared,
            at_once: 1,
            descriptors: 3,
            ..Machine::default()
        }
    }

    #[test]
    fn what_has_booted_counts_whole_and_of_clones_the_largest() {
        let mut ledger = Ledger::default();
        let booted = ledger.add_machine(machine(1000, false));
        assert_eq!(ledger.sum(0, CLONES).memory, 1000);
        let clones: Vec<u64> = [160, 320, 160]
            .map(|memory| ledger.add_machine(machine(memory, true)))
            .into();
        let sum = ledger.sum(0, CLONES);
        assert_eq!(sum.memory, 1000 + 320 + 320 / 16);
        assert_eq!((sum.at_once, sum.descriptors), (4, 12));
        // One that is larger than all others counts by all that it adds.
        let with = ledger.sum_with(Some((None, machine(3200, true))), 0, CLONES);
        assert_eq!(with.memory, 1000 + 3200 + 640 / 16);
        // One that boots after all counts whole from then on.
        let with = ledger.sum_with(Some((clones.first().copied(), machine(160, false))), 0, CLONES);
        assert_eq!(with.memory, 1000 + 160 + 320 + 10);
        ledger.remove(booted);
        for clone in clones {
            ledger.remove(clone);
        }
        assert!(ledger.is_empty());
    }

    #[test]
    fn what_a_clone_plugs_is_its_own() {
        let mut ledger = Ledger::default();
        let clone = Machine {
            own: 300,
            ..machine(460, true)
        };
        for count in 1..=3 {
            ledger.add_machine(clone);
            assert_eq!(ledger.sum(0, CLONES).memory, 300 * count + 160 + (count - 1) * 10);
        }
    }

    #[test]
    fn huge_pages_and_reserved_memory_are_none_of_linuxs_own() {
        let mut ledger = Ledger::default();
        let pinned = Machine {
            huge: 512,
            ..machine(600, false)
        };
        ledger.add_machine(pinned);
        ledger.add_machine(pinned);
        assert_eq!(ledger.sum(0, CLONES).memory, 1200);
        assert_eq!(ledger.sum(768, CLONES).memory, 1200 - 768);
        assert_eq!(ledger.sum(1 << 20, CLONES).memory, 1200 - 1024);
        ledger.add_machine(Machine {
            reserved: 4096,
            ..machine(100, false)
        });
        let sum = ledger.sum(0, CLONES);
        assert_eq!((sum.memory, sum.reserved), (1300, 4096));
    }

    #[test]
    fn sums_do_not_overflow() {
        let mut ledger = Ledger::default();
        ledger.add_machine(machine(u64::MAX, false));
        ledger.add_machine(machine(u64::MAX, true));
        for size in [u64::MAX, 1] {
            let path = PathBuf::from("/disk");
            ledger.add_disk(Disk { size, path });
        }
        assert_eq!((ledger.sum(0, CLONES).memory, ledger.disks()), (u64::MAX, u64::MAX));
    }
}
