//! The page that a vCPU shares with the module: why it came out, and what is answered.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use base::Mapping;

use crate::module::uapi::{AboutFailure, AboutIo, AboutMemory, AboutMsr, REFUSED, Run};

const BYTES: usize = 4096;

/// One vCPU's page. What is in it is the vCPU's own thread's, between two runs, but for [`Page::immediate_exit`] and the counts, which
/// other threads access as well, atomically.
pub(crate) struct Page(Mapping<Run>);

impl Page {
    pub(crate) fn map(vcpu: impl AsFd) -> io::Result<Self> {
        Mapping::new(vcpu, BYTES).map(Self)
    }

    /// Whether the next run is to be none.
    pub(crate) fn immediate_exit(&self) -> bool {
        self.word().load(Ordering::SeqCst) != 0
    }

    pub(crate) fn set_immediate_exit(&self, on: bool) {
        self.word().store(u32::from(on), Ordering::SeqCst);
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the mapping holds a whole `Run` and lives as long as `self`.
        let word = unsafe { &raw mut (*self.0.as_ptr()).immediate_exit };
        // SAFETY: 1. the word is aligned; 2. it is read by the module and accessed by us only atomically.
        unsafe { AtomicU32::from_ptr(word) }
    }

    fn read<T: Copy>(&self, field: impl FnOnce(*mut Run) -> *const T) -> T {
        // SAFETY: 1. the field is one of the mapping's; 2. any bits are a value of it; 3. the module writes it only within a run, which
        // the caller is not in.
        unsafe { field(self.0.as_ptr()).read_volatile() }
    }

    pub(crate) fn reason(&self) -> u32 {
        // SAFETY: the mapping holds a whole `Run`; only the field's address is taken.
        self.read(|run| unsafe { &raw const (*run).reason })
    }

    pub(crate) fn io(&self) -> AboutIo {
        // SAFETY: as for `reason`.
        self.read(|run| unsafe { &raw const (*run).about.io })
    }

    pub(crate) fn memory(&self) -> AboutMemory {
        // SAFETY: as for `reason`.
        self.read(|run| unsafe { &raw const (*run).about.memory })
    }

    pub(crate) fn msr(&self) -> AboutMsr {
        // SAFETY: as for `reason`.
        self.read(|run| unsafe { &raw const (*run).about.msr })
    }

    pub(crate) fn failure(&self) -> AboutFailure {
        // SAFETY: as for `reason`.
        self.read(|run| unsafe { &raw const (*run).about.failed })
    }

    /// How often it has come out for the reason with this number in [`crate::module::uapi::COUNTS`], or was refused something ([`REFUSED`]);
    /// from any thread.
    pub(crate) fn count(&self, reason: usize) -> u64 {
        if reason > REFUSED {
            return 0;
        }
        // SAFETY: the mapping holds a whole `Run`; only the field's address is taken.
        let counts = unsafe { &raw mut (*self.0.as_ptr()).counts }.cast::<u64>();
        // SAFETY: the number is within the field, which has 32.
        let count = unsafe { counts.add(reason) };
        // SAFETY: 1. the count is aligned; 2. it is written by the module and read by us only as a whole.
        unsafe { AtomicU64::from_ptr(count) }.load(Ordering::Relaxed)
    }

    /// What a port's read gives.
    pub(crate) fn answer_io(&self, value: u32) {
        // SAFETY: as for `reason`.
        let to = unsafe { &raw mut (*self.0.as_ptr()).about.io.value };
        // SAFETY: 1. the field is one of the mapping's; 2. the module reads it only within a run, which the caller is not in.
        unsafe { to.write_volatile(value) };
    }

    /// What a register's access comes to: a value, or a fault.
    pub(crate) fn answer_msr(&self, answer: Option<u64>) {
        let about = AboutMsr {
            fault: u8::from(answer.is_none()),
            value: answer.unwrap_or(0),
            ..self.msr()
        };
        // SAFETY: as for `reason`.
        let to = unsafe { &raw mut (*self.0.as_ptr()).about.msr };
        // SAFETY: as in `answer_io`.
        unsafe { to.write_volatile(about) };
    }
}
