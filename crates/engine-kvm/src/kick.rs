//! Making a vCPU leave guest mode.
//!
//! A kick sets `immediate_exit` in the vCPU's shared page and then sends its thread a signal. Whichever side of the
//! `KVM_RUN` boundary the thread is on, one of the two makes the call return `EINTR`: there is no window.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};

use base::{Mapping, Nudge};
use engine::Kick;
use kvm_bindings::kvm_run;

/// A second mapping of the vCPU's `kvm_run` page, so that other threads can reach `immediate_exit` for as long as
/// they hold the kicker, whatever becomes of the vCPU, and the vCPU's own thread what kvm-ioctls does not pass on.
pub(crate) struct Kicker {
    page: Mapping<kvm_run>,
    thread: Nudge,
}

impl Kicker {
    pub(crate) fn new(vcpu: impl AsFd, length: usize) -> io::Result<Self> {
        Ok(Self {
            page: Mapping::new(vcpu, length)?,
            thread: Nudge::new(),
        })
    }

    /// How many bytes each access of a port exit has: KVM tells of a whole `rep ins` at once (KVM API, 5, `io.size` and
    /// `io.count`), and kvm-ioctls passes on only the product of the two. For the vCPU's own thread, right after the exit.
    pub(crate) fn port_access_width(&self) -> usize {
        // SAFETY: the mapping holds a whole `kvm_run` and lives as long as `self`; only the field's address is taken.
        let size = unsafe { &raw const (*self.page.as_ptr()).__bindgen_anon_1.io.size };
        // SAFETY: 1. the address is that of a byte in the mapping, and any byte is a `u8`; 2. the kernel writes it only
        // within KVM_RUN, which the caller is not in.
        usize::from(unsafe { size.read() }).max(1)
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: the mapping holds a whole `kvm_run` and lives as long as `self`.
        let byte = unsafe { &raw mut (*self.page.as_ptr()).immediate_exit };
        // SAFETY: 1. a byte is aligned; 2. it is read by the kernel and accessed by us, from any thread, only atomically.
        unsafe { AtomicU8::from_ptr(byte) }
    }
}

impl Kick for Kicker {
    fn kick(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
        self.thread.nudge();
    }

    fn adopt_current_thread(&self) {
        self.thread.adopt_current_thread();
    }

    fn hold(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
    }

    fn clear(&self) {
        self.immediate_exit().store(0, Ordering::SeqCst);
    }
}
