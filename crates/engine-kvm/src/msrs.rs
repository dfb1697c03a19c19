//! Saving and restoring model-specific registers: all that this host's KVM says it can save.

use engine::{EngineError, MSRS_OF_HOST, Msr, Result, failed};
use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};

/// `IA32_TSC_DEADLINE` must follow the local APIC's state and the TSC (KVM ignores it while the timer's mode is
/// another), so it is written last.
const TSC_DEADLINE: u32 = 0x6e0;

/// A batch that `KVM_GET_MSRS` takes whole on every kernel.
const BATCH: usize = 256;

/// Reads every MSR that KVM lists; those that this vCPU's CPUID does not have are left out.
pub(crate) fn save(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Vec<Msr>> {
    let list = kvm.get_msr_index_list().map_err(failed("KVM_GET_MSR_INDEX_LIST"))?;
    let mut wanted: Vec<u32> = list.as_slice().to_vec();
    let mut saved = Vec::with_capacity(wanted.len());
    while !wanted.is_empty() {
        let batch: Vec<kvm_msr_entry> = wanted
            .iter()
            .take(BATCH)
            .map(|&index| kvm_msr_entry {
                index,
                ..kvm_msr_entry::default()
            })
            .collect();
        let mut msrs = Msrs::from_entries(&batch).map_err(|error| EngineError::State(format!("{error:?}")))?;
        let read = vcpu.get_msrs(&mut msrs).map_err(failed("KVM_GET_MSRS"))?;
        saved.extend(msrs.as_slice().iter().take(read).map(|msr| Msr {
            index: msr.index,
            value: msr.data,
        }));
        // KVM stops at the first that it cannot read: leave that one out and go on behind it.
        let skip = if read < batch.len() { read + 1 } else { read };
        wanted.drain(..skip);
    }
    Ok(saved)
}

/// Leaves nothing in a new vCPU that tells of this host, as a guest that is not shown it by CPUID may still try: it would be part of
/// what is saved.
pub(crate) fn hide_host(vcpu: &VcpuFd) -> Result<()> {
    for index in MSRS_OF_HOST {
        let entry = kvm_msr_entry {
            index,
            ..kvm_msr_entry::default()
        };
        let msrs = Msrs::from_entries(&[entry]).map_err(|error| EngineError::State(format!("{error:?}")))?;
        if vcpu.set_msrs(&msrs).map_err(failed("KVM_SET_MSRS"))? == 0 {
            log::debug!("this host's KVM has no MSR {index:#x}, so guests have none either");
        }
    }
    Ok(())
}

/// Writes what [`save`] read. What was zero may be missing here.
pub(crate) fn restore(vcpu: &VcpuFd, saved: &[Msr]) -> Result<()> {
    let (last, first): (Vec<Msr>, Vec<Msr>) = saved.iter().partition(|msr| msr.index == TSC_DEADLINE);
    for batch in first.chunks(BATCH).chain(last.chunks(BATCH)) {
        let entries: Vec<kvm_msr_entry> = batch
            .iter()
            .map(|msr| kvm_msr_entry {
                index: msr.index,
                data: msr.value,
                ..kvm_msr_entry::default()
            })
            .collect();
        let mut rest = entries.as_slice();
        while !rest.is_empty() {
            let msrs = Msrs::from_entries(rest).map_err(|error| EngineError::State(format!("{error:?}")))?;
            let written = vcpu.set_msrs(&msrs).map_err(failed("KVM_SET_MSRS"))?;
            match rest.get(written) {
                None => break,
                // KVM lists what its host's processor has, and reads zero where a guest was not shown it.
                Some(refused) if refused.data == 0 => {
                    log::debug!("this host's KVM has no MSR {:#x}, which was zero", refused.index);
                    rest = rest.get(written + 1..).unwrap_or_default();
                }
                Some(refused) => {
                    return Err(EngineError::State(format!(
                        "this host's KVM refuses {:#x} for MSR {:#x}",
                        refused.data, refused.index
                    )));
                }
            }
        }
    }
    Ok(())
}
