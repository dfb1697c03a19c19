//! One virtual machine.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use base::EventFd;
use engine::{
    Clock, CpuModel, Doorbell, EngineError, FunctionGuard, HostRange, Interrupt, MsiMessage, Presence, Result, Vcpu,
    Vm, VmState, failed,
};
use kvm_bindings::{
    CpuId, KVM_CAP_HALT_POLL, KVM_CAP_SPLIT_IRQCHIP, KVM_CAP_X2APIC_API, KVM_CAP_X86_DISABLE_EXITS,
    KVM_MEM_LOG_DIRTY_PAGES, KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, KVM_X2APIC_API_USE_32BIT_IDS, kvm_clock_data,
    kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VmFd};
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use crate::host_functions::HostFunctions;
use crate::interrupt::{self, Sender};
use crate::irqfd::{Routes, Source, borrow};
use crate::map_ahead::MapAhead;
use crate::registers::Registers;
use crate::vcpu::KvmVcpu;
use crate::{OwnCpus, cpuid};

/// Three pages that Intel processors without unrestricted guests need for real mode; just below the firmware
/// range, where no machine of ours has anything.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// One page that the same processors need for identity mapping, before the TSS.
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

pub(crate) struct KvmVm {
    kvm: Arc<Kvm>,
    vm: Arc<VmFd>,
    model: CpuModel,
    // Asked of the kernel once: it is the same for every vCPU but for the ids.
    shown_cpuid: CpuId,
    // Keeps what KVM has mapped mapped, slot by slot.
    slots: Mutex<Vec<(u32, Arc<GuestRegionMmap<()>>)>>,
    // Of devices of the host's: their interrupts, their registers, and what KVM knows of them.
    routes: Arc<Routes<VmFd>>,
    registers: Arc<Registers>,
    functions: HostFunctions,
    // Once vCPU 0 is there, on a host that maps ahead.
    ahead: OnceLock<MapAhead>,
}

impl KvmVm {
    pub(crate) fn new(kvm: Arc<Kvm>, model: CpuModel) -> Result<Self> {
        let vm = loop {
            match kvm.create_vm() {
                // Creation waits for a kernel thread, and a signal may cut the wait short.
                Err(error) if error.errno() == libc::EINTR => (),
                other => break other.map_err(failed("KVM_CREATE_VM"))?,
            }
        };
        vm.set_identity_map_address(IDENTITY_MAP_ADDRESS)
            .map_err(failed("KVM_SET_IDENTITY_MAP_ADDR"))?;
        vm.set_tss_address(TSS_ADDRESS).map_err(failed("KVM_SET_TSS_ADDR"))?;
        let x2apic = u64::from(KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK);
        enable(&vm, KVM_CAP_X2APIC_API, x2apic, "KVM_CAP_X2APIC_API")?;
        let supported = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("KVM_GET_SUPPORTED_CPUID"))?;
        let vm = Arc::new(vm);
        Ok(Self {
            kvm,
            model,
            shown_cpuid: cpuid::for_model(&supported, model)?,
            slots: Mutex::default(),
            routes: Arc::new(Routes::new(Arc::clone(&vm))),
            registers: Arc::new(Registers::new(Arc::clone(&vm))),
            functions: HostFunctions::new(Arc::clone(&vm)),
            ahead: OnceLock::new(),
            vm,
        })
    }

    /// Its guest's HLT, MWAIT and PAUSE cause no exits, and a vCPU that leaves its guest does not poll. Before any vCPU.
    pub(crate) fn keep_cpus(&self, OwnCpus { exits, halt_poll }: OwnCpus) -> Result<()> {
        enable(&self.vm, KVM_CAP_X86_DISABLE_EXITS, exits, "KVM_CAP_X86_DISABLE_EXITS")?;
        match halt_poll {
            true => enable(&self.vm, KVM_CAP_HALT_POLL, 0, "KVM_CAP_HALT_POLL"),
            false => Ok(()),
        }
    }
}

fn enable(vm: &VmFd, cap: u32, argument: u64, name: &'static str) -> Result<()> {
    let mut request = kvm_enable_cap {
        cap,
        ..kvm_enable_cap::default()
    };
    request.args[0] = argument;
    vm.enable_cap(&request).map_err(failed(name))
}

fn address(bell: Doorbell) -> IoEventAddress {
    match bell {
        Doorbell::Mmio(address) => IoEventAddress::Mmio(address),
        Doorbell::Port(port) => IoEventAddress::Pio(u64::from(port)),
    }
}

impl Vm for KvmVm {
    fn create_vcpu(&self, id: u32, count: u32) -> Result<Box<dyn Vcpu>> {
        let cpuid = cpuid::for_vcpu(&self.shown_cpuid, self.model, id, count)?;
        let vcpu = KvmVcpu::new(&self.kvm, &self.vm, Arc::clone(&self.registers), id, &cpuid)?;
        if self.model != CpuModel::Host {
            vcpu.hide_host()?;
        }
        if id == 0
            && let Some(ahead) = MapAhead::of(&self.vm, &vcpu)?
        {
            // There is one vCPU 0.
            drop(self.ahead.set(ahead));
        }
        Ok(Box::new(vcpu))
    }

    fn map_ram(&self, slot: u32, region: Arc<GuestRegionMmap<()>>, _: Presence) -> Result<()> {
        let request = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: 1. the range is one whole mapping that the region owns; 2. the region is kept in `slots` for as
        // long as the VM lives, so the mapping outlives KVM's use of it.
        unsafe { self.vm.set_user_memory_region(request) }.map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        self.slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((slot, region));
        Ok(())
    }

    fn map_ahead(&self, guest: u64, bytes: u64) -> Result<()> {
        self.ahead.get().map_or(Ok(()), |ahead| ahead.map(guest, bytes))
    }

    fn add_host_function(&self, file: BorrowedFd<'_>) -> Result<FunctionGuard> {
        // A VM without slots has none for registers either, and these exit.
        self.registers.most();
        self.functions.add(file)
    }

    unsafe fn map_registers(&self, guest: u64, registers: HostRange, give: bool) -> Result<()> {
        match give {
            // SAFETY: the caller's, word for word.
            true => unsafe { self.registers.give(guest, registers) },
            false => self.registers.take(guest, registers),
        }
    }

    fn set_dirty_tracking(&self, slot: u32, on: bool) -> Result<()> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, region) = slots
            .iter()
            .find(|(number, _)| *number == slot)
            .ok_or_else(|| no_slot(slot))?;
        let request = kvm_userspace_memory_region {
            slot,
            flags: if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the range is the one that `map_ram` gave for this slot, still kept in `slots`; only the flags differ.
        unsafe { self.vm.set_user_memory_region(request) }.map_err(failed("KVM_SET_USER_MEMORY_REGION"))
    }

    fn dirty_log(&self, slot: u32) -> Result<Vec<u64>> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, region) = slots
            .iter()
            .find(|(number, _)| *number == slot)
            .ok_or_else(|| no_slot(slot))?;
        self.vm
            .get_dirty_log(slot, region.size())
            .map_err(failed("KVM_GET_DIRTY_LOG"))
    }

    fn send_msi(&self, message: MsiMessage) -> Result<()> {
        interrupt::send(&self.vm, message)
            .map_err(failed("KVM_SIGNAL_MSI"))
            .map(drop)
    }

    fn create_interrupt(&self) -> Arc<dyn Interrupt> {
        Arc::new(Source::new(Arc::clone(&self.routes), Sender(Arc::clone(&self.vm))))
    }

    fn attach_doorbell(&self, bell: Doorbell, event: &EventFd) -> Result<()> {
        self.vm
            .register_ioevent(&borrow(event), &address(bell), NoDatamatch)
            .map_err(failed("KVM_IOEVENTFD"))
    }

    fn detach_doorbell(&self, bell: Doorbell, event: &EventFd) -> Result<()> {
        self.vm
            .unregister_ioevent(&borrow(event), &address(bell), NoDatamatch)
            .map_err(failed("KVM_IOEVENTFD"))
    }

    fn reserve_ioapic_pins(&self, pins: u32) -> Result<()> {
        enable(
            &self.vm,
            KVM_CAP_SPLIT_IRQCHIP,
            u64::from(pins),
            "KVM_CAP_SPLIT_IRQCHIP",
        )?;
        self.routes.reserve(pins);
        Ok(())
    }

    fn save(&self) -> Result<VmState> {
        let clock = self.vm.get_clock().map_err(failed("KVM_GET_CLOCK"))?;
        Ok(VmState {
            clock: Clock {
                nanoseconds: clock.clock,
            },
        })
    }

    fn restore(&self, state: &VmState) -> Result<()> {
        let clock = kvm_clock_data {
            clock: state.clock.nanoseconds,
            ..kvm_clock_data::default()
        };
        self.vm.set_clock(&clock).map_err(failed("KVM_SET_CLOCK"))
    }
}

fn no_slot(slot: u32) -> EngineError {
    EngineError::State(format!("memory slot {slot} is not mapped"))
}
