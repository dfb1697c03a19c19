//! Runs a guest of a few bytes: 64-bit kernel mode, one `lock cmpxchg16b`, one port write.
//!
//! Every Linux kernel executes cmpxchg16b (the slab allocator's fast path), and KVM's instruction emulator does not
//! know it; a KVM that emulates guest kernel mode fails here within a millisecond. Knows nothing of Basalt's engine.

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::thread::JoinHandleExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::mm::{MapFlags, ProtFlags};

use crate::kvm::Unusable;

const MEMORY: usize = 64 << 10;
const PML4: usize = 0x1000;
const PDPT: usize = 0x2000;
const PD: usize = 0x3000;
const CODE: usize = 0x4000;
const DATA: usize = 0x5000;
const PORT: u16 = 0xf4;
const ANSWER: u8 = b'K';

/// Compares 16 bytes at \[rdi\] with rdx:rax, stores rcx:rbx, and reports success through the port.
const PROGRAM: [u8; 15] = [
    0xf0, 0x48, 0x0f, 0xc7, 0x0f, // lock cmpxchg16b [rdi]
    0x75, 0x07, //                   jne to the hlt
    0xb0, ANSWER, //                 mov al, ANSWER
    0x66, 0xba, 0xf4, 0x00, //       mov dx, PORT
    0xee, //                         out dx, al
    0xf4, //                         hlt
];

/// What cmpxchg16b stores (rbx, rcx).
const STORED: [u64; 2] = [0x6261_7361_6c74_0001, 0x6261_7361_6c74_0002];

// Page table entry bits (AMD64 APM volume 2, 5.3.3): present, writable, and page size in the PD.
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;
// CR0: PE, MP, ET, NE, WP, PG; CR4: PAE; EFER: LME, LMA (APM volume 2, 3.1).
const CR0: u64 = 0x8001_0033;
const CR4: u64 = 0x20;
const EFER: u64 = 0x500;

/// Wraps an open `/dev/kvm`.
pub(crate) fn kvm_from(fd: OwnedFd) -> Kvm {
    // SAFETY: `from_raw_fd` wants a descriptor of /dev/kvm that nobody else owns; `into_raw_fd` has just given up ours.
    unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) }
}

/// Runs the trial guest within `limit`; says how long it took.
pub(crate) fn run(kvm: &Kvm, limit: Duration) -> Result<Duration, Unusable> {
    let begun = Instant::now();
    let memory = Memory::new().map_err(|cause| Unusable::TrialSetup { step: "mmap", cause })?;
    memory.write_guest();
    let vm = kvm.create_vm().map_err(|e| setup("KVM_CREATE_VM", e))?;
    memory.give_to(&vm)?;
    let vcpu = prepare_vcpu(kvm, &vm)?;
    let outcome = run_watched(vcpu, limit)?;
    // The vCPU and its thread are gone; the VM goes before the memory that it maps.
    drop(vm);
    outcome?;
    let stored = [memory.read(DATA), memory.read(DATA + 8)];
    if stored == STORED {
        Ok(begun.elapsed())
    } else {
        Err(Unusable::Trial(format!(
            "cmpxchg16b stored {stored:x?} instead of {STORED:x?}"
        )))
    }
}

fn setup(step: &'static str, error: kvm_ioctls::Error) -> Unusable {
    Unusable::TrialSetup {
        step,
        cause: io::Error::from_raw_os_error(error.errno()),
    }
}

/// The guest's memory, mapped here.
struct Memory(NonNull<u8>);

impl Memory {
    fn new() -> io::Result<Self> {
        // SAFETY: `mmap_anonymous` wants an address range that is free or chosen by the kernel: a null hint chooses.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                MEMORY,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        NonNull::new(start.cast())
            .map(Self)
            .ok_or_else(|| io::Error::other("mmap returned null"))
    }

    fn write_guest(&self) {
        let present = |next: usize| next as u64 | PRESENT_WRITABLE;
        self.copy_in(PML4, &present(PDPT).to_le_bytes());
        self.copy_in(PDPT, &present(PD).to_le_bytes());
        self.copy_in(PD, &(PRESENT_WRITABLE | LARGE).to_le_bytes());
        self.copy_in(CODE, &PROGRAM);
    }

    fn copy_in(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= MEMORY);
        // SAFETY: `add` stays inside the mapping of MEMORY bytes, as asserted.
        let target = unsafe { self.0.add(at) };
        // SAFETY: `copy_from` wants (1) `bytes.len()` readable bytes: a slice; (2) as many writable ones: inside the
        // mapping, as asserted; (3) no overlap: nobody else holds a reference into the mapping.
        unsafe { target.copy_from(NonNull::from(bytes).cast(), bytes.len()) };
    }

    fn read(&self, at: usize) -> u64 {
        assert!(at + 8 <= MEMORY && at.is_multiple_of(8));
        // SAFETY: `add` stays inside the mapping, as asserted.
        let source = unsafe { self.0.add(at) };
        // SAFETY: `read_volatile` wants eight readable, aligned, initialised bytes: asserted; anonymous memory is zeroed.
        unsafe { source.cast::<u64>().read_volatile() }
    }

    fn give_to(&self, vm: &VmFd) -> Result<(), Unusable> {
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: self.0.as_ptr() as u64,
        };
        // SAFETY: KVM writes to the region while the VM lives: it is a mapping of exactly this size, no reference
        // points into it, and `run` drops the VM before the mapping.
        unsafe { vm.set_user_memory_region(region) }.map_err(|e| setup("KVM_SET_USER_MEMORY_REGION", e))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `munmap` wants that nothing uses the range any more: it is ours, of this size, and `self` ends here.
        if let Err(error) = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), MEMORY) } {
            debug_assert!(false, "munmap of the trial guest's memory: {error}");
        }
    }
}

fn prepare_vcpu(kvm: &Kvm, vm: &VmFd) -> Result<VcpuFd, Unusable> {
    let vcpu = vm.create_vcpu(0).map_err(|e| setup("KVM_CREATE_VCPU", e))?;
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|e| setup("KVM_GET_SUPPORTED_CPUID", e))?;
    vcpu.set_cpuid2(&cpuid).map_err(|e| setup("KVM_SET_CPUID2", e))?;
    let mut sregs = vcpu.get_sregs().map_err(|e| setup("KVM_GET_SREGS", e))?;
    enter_long_mode(&mut sregs);
    vcpu.set_sregs(&sregs).map_err(|e| setup("KVM_SET_SREGS", e))?;
    let [rbx, rcx] = STORED;
    let regs = kvm_regs {
        rip: CODE as u64,
        rdi: DATA as u64,
        rbx,
        rcx,
        rflags: 2,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs).map_err(|e| setup("KVM_SET_REGS", e))?;
    Ok(vcpu)
}

/// Flat 64-bit kernel mode (APM volume 2, 4.8: in long mode only L, D and the type count).
fn enter_long_mode(sregs: &mut kvm_sregs) {
    let flat = kvm_segment {
        limit: u32::MAX,
        present: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cs = kvm_segment {
        selector: 8,
        type_: 11,
        l: 1,
        ..flat
    };
    let data = kvm_segment {
        selector: 16,
        type_: 3,
        db: 1,
        ..flat
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, PML4 as u64, CR4, EFER);
}

/// Runs the vCPU on its own thread. When `limit` has passed, signals end KVM_RUN with EINTR until the thread is gone:
/// one signal may come just before the ioctl and be lost.
fn run_watched(mut vcpu: VcpuFd, limit: Duration) -> Result<Result<(), Unusable>, Unusable> {
    install_kick_handler().map_err(|cause| Unusable::TrialSetup {
        step: "sigaction",
        cause,
    })?;
    let give_up = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&give_up);
    let (done, wait) = mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("kvm-trial".into())
        .spawn(move || {
            let outcome = run_once(&mut vcpu, &asked).unwrap_or(Err(Unusable::TrialHung(limit)));
            drop(vcpu);
            // The receiver is gone only when this thread has been given up.
            done.send(outcome).unwrap_or_default();
        })
        .map_err(|cause| Unusable::TrialSetup { step: "clone", cause })?;
    let mut outcome = wait.recv_timeout(limit).ok();
    if outcome.is_none() && !thread.is_finished() {
        give_up.store(true, Ordering::Release);
        outcome = Some(Err(Unusable::TrialHung(limit)));
        while !thread.is_finished() {
            // SAFETY: `pthread_kill` wants a thread that has not been joined: it is joined below. (glibc has a number
            // where musl has a pointer; both are the same word.)
            unsafe { libc::pthread_kill(thread.as_pthread_t() as libc::pthread_t, kick_signal()) };
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let joined = thread.join();
    match (outcome, joined) {
        (Some(outcome), Ok(())) => Ok(outcome),
        _ => Err(Unusable::Trial("the thread that ran it panicked".into())),
    }
}

/// Runs until the guest says how it went; `None` when it was given up before.
fn run_once(vcpu: &mut VcpuFd, give_up: &AtomicBool) -> Option<Result<(), Unusable>> {
    loop {
        return Some(match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT, [ANSWER])) => Ok(()),
            Ok(VcpuExit::Hlt) => failed("cmpxchg16b found other memory than was written"),
            Ok(VcpuExit::InternalError) => failed("KVM cannot execute cmpxchg16b in guest kernel mode"),
            Ok(VcpuExit::Shutdown) => failed("triple fault"),
            Ok(VcpuExit::FailEntry(reason, _)) => {
                failed(format!("the CPU refused to enter the guest, reason {reason:#x}"))
            }
            Ok(other) => failed(format!("unexpected exit {other:?}")),
            Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {
                if give_up.load(Ordering::Acquire) {
                    return None;
                }
                continue;
            }
            Err(e) => Err(setup("KVM_RUN", e)),
        });
    }
}

fn failed(how: impl Into<String>) -> Result<(), Unusable> {
    Err(Unusable::Trial(how.into()))
}

fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN() + 7
}

extern "C" fn ignore(_: libc::c_int) {}

fn install_kick_handler() -> io::Result<()> {
    // SAFETY: `zeroed` wants a type for which zeroes are valid: sigaction is plain data.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: `sigaction` wants (1) valid structures: a local one and null for the old one; (2) a handler that is
    // async-signal-safe: it does nothing.
    let result = unsafe { libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
