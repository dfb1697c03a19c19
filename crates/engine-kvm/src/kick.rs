//! Making a vCPU leave guest mode.
//!
//! A kick sets `immediate_exit` in the vCPU's shared page and then sends its thread a signal. Whichever side of the
//! `KVM_RUN` boundary the thread is on, one of the two makes the call return `EINTR`: there is no window.

use std::io;
use std::os::fd::AsFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use engine::Kick;
use kvm_bindings::kvm_run;
use rustix::mm::{MapFlags, ProtFlags};

/// The first real-time signal is the C library's in some builds; this one is nobody's.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

extern "C" fn ignore(_: libc::c_int) {}

/// A signal that is ignored would not interrupt a system call; one with a handler does.
fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a zeroed sigaction is a valid one: no flags (so calls are not restarted), empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
        // SAFETY: 1. `action` lives through the call; 2. the handler is async-signal-safe: it does nothing.
        let result = unsafe { libc::sigaction(signal(), &raw const action, std::ptr::null_mut()) };
        if result != 0 {
            log::error!("the kick signal has no handler: {}", io::Error::last_os_error());
        }
    });
}

/// A second mapping of the vCPU's `kvm_run` page, so that other threads can reach `immediate_exit` for as long as
/// they hold the kicker, whatever becomes of the vCPU, and the vCPU's own thread what kvm-ioctls does not pass on.
pub(crate) struct Kicker {
    run: *mut kvm_run,
    length: usize,
    thread: AtomicI32,
}

// SAFETY: 1. the mapping belongs to the kicker and is unmapped by its Drop only; 2. what other threads
// access through it is one byte, atomically.
unsafe impl Send for Kicker {}
// SAFETY: as for Send.
unsafe impl Sync for Kicker {}

impl Kicker {
    pub(crate) fn new(vcpu: impl AsFd, length: usize) -> io::Result<Self> {
        install_handler();
        // SAFETY: 1. the kernel chooses the address; 2. the descriptor is a vCPU, whose first page is `kvm_run`.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                vcpu,
                0,
            )
        }?;
        Ok(Self {
            run: address.cast(),
            length,
            thread: AtomicI32::new(0),
        })
    }

    /// How many bytes each access of a port exit has: KVM tells of a whole `rep ins` at once (KVM API, 5, `io.size` and
    /// `io.count`), and kvm-ioctls passes on only the product of the two. For the vCPU's own thread, right after the exit.
    pub(crate) fn port_access_width(&self) -> usize {
        // SAFETY: the mapping holds a whole `kvm_run` and lives as long as `self`; only the field's address is taken.
        let size = unsafe { &raw const (*self.run).__bindgen_anon_1.io.size };
        // SAFETY: 1. the address is that of a byte in the mapping, and any byte is a `u8`; 2. the kernel writes it only
        // within KVM_RUN, which the caller is not in.
        usize::from(unsafe { size.read() }).max(1)
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: the mapping holds a whole `kvm_run` and lives as long as `self`.
        let byte = unsafe { &raw mut (*self.run).immediate_exit };
        // SAFETY: 1. a byte is aligned; 2. it is read by the kernel and accessed by us only atomically.
        unsafe { AtomicU8::from_ptr(byte) }
    }
}

impl Kick for Kicker {
    fn kick(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
        let thread = self.thread.load(Ordering::SeqCst);
        if thread != 0 {
            let process = rustix::process::getpid().as_raw_nonzero().get();
            let signal = signal();
            // SAFETY: tgkill takes plain numbers; a thread that has ended gives ESRCH. Thread ids are not reused
            // within the process while the VM stands, as vCPU threads end last.
            unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
        }
    }

    fn adopt_current_thread(&self) {
        self.thread
            .store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::SeqCst);
    }

    fn hold(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
    }

    fn clear(&self) {
        self.immediate_exit().store(0, Ordering::SeqCst);
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own and no reference into it is left.
        if let Err(error) = unsafe { rustix::mm::munmap(self.run.cast(), self.length) } {
            log::error!("a vCPU's page could not be unmapped: {error}");
        }
    }
}
