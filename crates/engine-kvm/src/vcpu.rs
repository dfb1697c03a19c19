//! One virtual CPU.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use engine::state::{KVM_TIMER_KHZ, VcpuState};
use engine::{
    APIC_BYTES, BootState, EngineError, Exit, Kick, Result, SystemEvent, Vcpu, failed, same_timer_rate, same_tsc_rate,
};
use kvm_bindings::{
    CpuId, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED, KVM_SYSTEM_EVENT_CRASH,
    KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_xcrs,
    kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};

use crate::convert;
use crate::cpuid;
use crate::kick::Kicker;
use crate::msrs;
use crate::registers::{Registers, Withdrawals};

/// `RFLAGS.IF` (Intel SDM 1, 3.4.3).
const INTERRUPTS_ON: u64 = 1 << 9;

pub(crate) struct KvmVcpu {
    id: u32,
    kvm: Arc<Kvm>,
    fd: VcpuFd,
    kicker: Arc<Kicker>,
    /// It has been in its guest: KVM lets nobody change what CPUID says from then on.
    has_run: bool,
    withdrawals: Withdrawals,
}

impl KvmVcpu {
    pub(crate) fn new(kvm: &Arc<Kvm>, vm: &VmFd, registers: Arc<Registers>, id: u32, cpuid: &CpuId) -> Result<Self> {
        let fd = vm.create_vcpu(u64::from(id)).map_err(failed("KVM_CREATE_VCPU"))?;
        fd.set_cpuid2(cpuid).map_err(failed("KVM_SET_CPUID2"))?;
        let size = kvm.get_vcpu_mmap_size().map_err(failed("KVM_GET_VCPU_MMAP_SIZE"))?;
        let kicker = Kicker::new(descriptor(&fd), size).map_err(failed("mmap of a vCPU"))?;
        Ok(Self {
            id,
            kvm: Arc::clone(kvm),
            fd,
            kicker: Arc::new(kicker),
            has_run: false,
            withdrawals: Withdrawals::of(registers),
        })
    }
}

fn descriptor(fd: &VcpuFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open for as long as `fd` lives, which is as long as what is made of it.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

impl AsFd for KvmVcpu {
    fn as_fd(&self) -> BorrowedFd<'_> {
        descriptor(&self.fd)
    }
}

/// What KVM's exit is to a machine. `kicker` has the same page as the exit comes from.
fn translate<'a>(exit: VcpuExit<'a>, kicker: &Kicker) -> Exit<'a> {
    match exit {
        VcpuExit::IoIn(port, data) => Exit::PortRead {
            port,
            width: kicker.port_access_width(),
            data,
        },
        VcpuExit::IoOut(port, data) => Exit::PortWrite {
            port,
            width: kicker.port_access_width(),
            data,
        },
        VcpuExit::MmioRead(address, data) => Exit::MmioRead { address, data },
        VcpuExit::MmioWrite(address, data) => Exit::MmioWrite { address, data },
        VcpuExit::IoapicEoi(vector) => Exit::IoapicEoi(vector),
        VcpuExit::Intr => Exit::Interrupted,
        VcpuExit::Hlt => Exit::Halted,
        VcpuExit::Shutdown => Exit::Shutdown,
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => Exit::System(SystemEvent::PowerOff),
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _) => Exit::System(SystemEvent::Reset),
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _) => Exit::System(SystemEvent::Crash),
        VcpuExit::FailEntry(reason, cpu) => Exit::Failed(format!(
            "the processor refused to enter the guest: reason {reason:#x} on CPU {cpu}"
        )),
        VcpuExit::InternalError => {
            Exit::Failed("KVM could not emulate an instruction of the guest (KVM_EXIT_INTERNAL_ERROR)".to_owned())
        }
        other => Exit::Failed(format!(
            "KVM exit {other:?}, which no guest of this machine should cause"
        )),
    }
}

impl Vcpu for KvmVcpu {
    fn run(&mut self) -> Result<Exit<'_>> {
        self.has_run = true;
        let (touched, error) = match self.fd.run() {
            Ok(VcpuExit::MemoryFault { gpa, .. }) => (Some(gpa), kvm_ioctls::Error::new(libc::EFAULT)),
            Ok(exit) => return Ok(translate(exit, &self.kicker)),
            Err(error) => (None, error),
        };
        match error.errno() {
            libc::EINTR | libc::EAGAIN => Ok(Exit::Interrupted),
            libc::EFAULT if self.withdrawals.explain(touched) => Ok(Exit::Interrupted),
            _ => Err(failed("KVM_RUN")(error)),
        }
    }

    fn kicker(&self) -> Arc<dyn Kick> {
        let kicker: Arc<dyn Kick> = Arc::<Kicker>::clone(&self.kicker);
        kicker
    }

    fn set_boot_state(&mut self, boot: &BootState) -> Result<()> {
        let mut system = convert::system_to_kvm(&boot.system);
        // The local APIC's base belongs to KVM; the boot protocol has no say in it.
        system.apic_base = self.fd.get_sregs().map_err(failed("KVM_GET_SREGS"))?.apic_base;
        self.fd.set_sregs(&system).map_err(failed("KVM_SET_SREGS"))?;
        self.fd
            .set_regs(&convert::general_to_kvm(&boot.general))
            .map_err(failed("KVM_SET_REGS"))
    }

    fn save(&mut self) -> Result<VcpuState> {
        self.complete_exit()?;
        // First: it makes KVM accept pending INIT and SIPI into the rest of the state.
        let activity = self.fd.get_mp_state().map_err(failed("KVM_GET_MP_STATE"))?.mp_state;
        let activity = convert::activity_from_kvm(activity)
            .ok_or_else(|| EngineError::State(format!("KVM reports activity state {activity}, which is unknown")))?;
        let debug = self.fd.get_debug_regs().map_err(failed("KVM_GET_DEBUGREGS"))?;
        let xcrs = self.fd.get_xcrs().map_err(failed("KVM_GET_XCRS"))?;
        let xsave = self.fd.get_xsave().map_err(failed("KVM_GET_XSAVE"))?;
        let lapic = self.fd.get_lapic().map_err(failed("KVM_GET_LAPIC"))?;
        let cpuid = self
            .fd
            .get_cpuid2(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("KVM_GET_CPUID2"))?;
        let [db0, db1, db2, db3] = debug.db;
        Ok(VcpuState {
            id: self.id,
            cpuid: cpuid::got(&cpuid),
            general: convert::general_from_kvm(&self.fd.get_regs().map_err(failed("KVM_GET_REGS"))?),
            system: convert::system_from_kvm(&self.fd.get_sregs().map_err(failed("KVM_GET_SREGS"))?),
            xsave: xsave.region.iter().flat_map(|word| word.to_le_bytes()).collect(),
            xcr0: xcrs.xcrs[0].value,
            debug: [db0, db1, db2, db3, debug.dr6, debug.dr7],
            msrs: msrs::save(&self.kvm, &self.fd)?,
            lapic: lapic.regs.iter().map(|&byte| byte.cast_unsigned()).collect(),
            events: convert::events_from_kvm(&self.fd.get_vcpu_events().map_err(failed("KVM_GET_VCPU_EVENTS"))?),
            activity,
            tsc_khz: self.fd.get_tsc_khz().map_err(failed("KVM_GET_TSC_KHZ"))?,
            apic_timer_khz: KVM_TIMER_KHZ,
        })
    }

    fn reports_halts(&self) -> bool {
        true
    }

    fn has_halted(&mut self) -> Result<bool> {
        let activity = self.fd.get_mp_state().map_err(failed("KVM_GET_MP_STATE"))?.mp_state;
        Ok(match activity {
            KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED => true,
            KVM_MP_STATE_HALTED => {
                let flags = self.fd.get_regs().map_err(failed("KVM_GET_REGS"))?.rflags;
                flags & INTERRUPTS_ON == 0
            }
            _ => false,
        })
    }

    fn restore(&mut self, state: &VcpuState) -> Result<()> {
        self.run_tsc_at(state.tsc_khz)?;
        same_timer(state.apic_timer_khz)?;
        if !self.has_run {
            let cpuid = cpuid::to_kvm(&state.cpuid)?;
            self.fd.set_cpuid2(&cpuid).map_err(failed("KVM_SET_CPUID2"))?;
        }
        self.fd
            .set_sregs(&convert::system_to_kvm(&state.system))
            .map_err(failed("KVM_SET_SREGS"))?;
        self.fd
            .set_regs(&convert::general_to_kvm(&state.general))
            .map_err(failed("KVM_SET_REGS"))?;
        self.restore_extended(state)?;
        self.restore_lapic(state.apic_registers()?)?;
        msrs::restore(&self.fd, &state.msrs)?;
        self.fd
            .set_vcpu_events(&convert::events_to_kvm(&state.events))
            .map_err(failed("KVM_SET_VCPU_EVENTS"))?;
        let activity = kvm_mp_state {
            mp_state: convert::activity_to_kvm(state.activity),
        };
        self.fd.set_mp_state(activity).map_err(failed("KVM_SET_MP_STATE"))
    }
}

impl KvmVcpu {
    /// What KVM tells a guest of this host by MSRs, whatever CPUID says.
    pub(crate) fn hide_host(&self) -> Result<()> {
        msrs::hide_host(&self.fd)
    }

    /// A guest has measured its TSC once and for all: where this host's runs otherwise, KVM has to scale it.
    fn run_tsc_at(&self, saved: u32) -> Result<()> {
        let here = self.fd.get_tsc_khz().map_err(failed("KVM_GET_TSC_KHZ"))?;
        match tsc_to_set(saved, here, || self.kvm.check_extension(Cap::TscControl))? {
            Some(khz) => self.fd.set_tsc_khz(khz).map_err(failed("KVM_SET_TSC_KHZ")),
            None => Ok(()),
        }
    }

    /// Lets KVM finish the port or memory access that the last exit was about: until then the instruction pointer is
    /// still before the instruction, and a copy of the vCPU would carry it out a second time.
    fn complete_exit(&mut self) -> Result<()> {
        self.fd.set_kvm_immediate_exit(1);
        let unfinished = match self.fd.run() {
            Err(error) if error.errno() == libc::EINTR => None,
            Err(error) => Some(failed("KVM_RUN")(error)),
            Ok(exit) => Some(EngineError::State(format!(
                "an access of the guest takes several exits and is not over ({exit:?}): run the vCPU once more"
            ))),
        };
        self.fd.set_kvm_immediate_exit(0);
        unfinished.map_or(Ok(()), Err)
    }

    fn restore_extended(&self, state: &VcpuState) -> Result<()> {
        let area = state.xsave_area()?;
        let mut xcrs = kvm_xcrs {
            nr_xcrs: 1,
            ..kvm_xcrs::default()
        };
        xcrs.xcrs[0].value = state.xcr0;
        self.fd.set_xcrs(&xcrs).map_err(failed("KVM_SET_XCRS"))?;
        let mut xsave = kvm_xsave::default();
        for (to, from) in xsave.region.iter_mut().zip(area.as_chunks::<4>().0) {
            *to = u32::from_le_bytes(*from);
        }
        // SAFETY: KVM reads more than the 4 KiB that a `kvm_xsave` has only after user space was granted a dynamic
        // feature (arch_prctl), which this process never asks for.
        unsafe { self.fd.set_xsave(&xsave) }.map_err(failed("KVM_SET_XSAVE"))?;
        let [db0, db1, db2, db3, dr6, dr7] = state.debug;
        let debug = kvm_debugregs {
            db: [db0, db1, db2, db3],
            dr6,
            dr7,
            ..kvm_debugregs::default()
        };
        self.fd.set_debug_regs(&debug).map_err(failed("KVM_SET_DEBUGREGS"))
    }

    fn restore_lapic(&self, registers: &[u8; APIC_BYTES]) -> Result<()> {
        let lapic = kvm_lapic_state {
            regs: registers.map(u8::cast_signed),
        };
        self.fd.set_lapic(&lapic).map_err(failed("KVM_SET_LAPIC"))
    }
}

/// What KVM is told of a guest's TSC. Only one that would run otherwise here needs a KVM that can scale it: this is the one place
/// that asks for the capability (`ASKED_BY_VCPUS`).
fn tsc_to_set(saved: u32, here: u32, can_scale: impl FnOnce() -> bool) -> Result<Option<u32>> {
    match same_tsc(saved, here) {
        Err(_) if saved != 0 && can_scale() => Ok(Some(saved)),
        same => same.map(|()| None),
    }
}

/// Whether the timer of a guest's APIC goes right: it has found out once how fast that counts.
fn same_timer(saved: u32) -> Result<()> {
    if same_timer_rate(saved, KVM_TIMER_KHZ) {
        return Ok(());
    }
    Err(EngineError::State(format!(
        "its APIC's timer counted at {saved} kHz, as that of the CPU that it owned, and KVM's counts at {KVM_TIMER_KHZ} kHz"
    )))
}

/// Whether a guest's clocks go right without scaling.
fn same_tsc(saved: u32, here: u32) -> Result<()> {
    if same_tsc_rate(saved, here) {
        return Ok(());
    }
    Err(EngineError::State(format!(
        "its TSC ran at {saved} kHz and would run at {here} kHz here, where KVM cannot scale it: restore on a host like the one it was saved on"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_of_other_rates_are_refused_by_their_numbers() {
        same_tsc(2_000_500, 2_000_000).unwrap();
        let error = same_tsc(2_000_501, 2_000_000).unwrap_err().to_string();
        assert!(error.contains("would run at 2000000 kHz here"), "{error}");
        same_timer(1_030_000).unwrap();
        assert!(same_timer(900_000).unwrap_err().to_string().contains("1000000 kHz"));
    }

    #[test]
    fn only_a_tsc_that_runs_otherwise_has_to_be_scaled() {
        let set = |saved, can_scale| tsc_to_set(saved, 2_000_000, || can_scale).ok();
        for can_scale in [true, false] {
            assert_eq!(set(2_000_500, can_scale), Some(None), "within what KVM lets pass");
            assert_eq!(set(0, can_scale), None, "no rate at all");
        }
        assert_eq!(set(2_000_501, true), Some(Some(2_000_501)));
        assert_eq!(set(2_000_501, false), None);
    }
}
