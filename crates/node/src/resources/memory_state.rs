//! How much of its memory, and which of its devices, a machine has now, by its VMM's word and what its entry knows. Changes nothing, and waits
//! for nobody.

use host::cgroup::MemoryUsage;
use node_api::{DmaState, MemoryState};
use vmm_api::VmmClient;

use crate::sandbox::entry::Entry;
use crate::vmm::tail;

/// What is charged to a machine's cgroup, and what it has besides of memory that came zeroed, so many bytes at most, which is charged to another.
pub(crate) fn with_zeroed(memory: MemoryUsage, bytes: u64) -> MemoryUsage {
    MemoryUsage {
        current: memory.current.saturating_add(bytes),
        peak: memory.peak.map(|peak| peak.saturating_add(bytes)),
        ..memory
    }
}

/// Of one that has a region of memory that is plugged, or devices, or was to get some, or whose guest gives memory back; `None` of others, and where
/// its VMM does not tell now. DMA faults are not known where this daemon does not see them.
pub(crate) fn of(entry: &Entry, has_devices: bool, sees_faults: bool) -> Option<MemoryState> {
    let (resources, zeroed, vm, coming, failed, memory_failed, faults) = {
        let inner = entry.lock();
        (
            inner.stored.sandbox.config.resources.clone(),
            inner.stored.came_zeroed.bytes,
            inner.vm.clone(),
            inner.coming.clone(),
            inner.not_come.clone(),
            inner.memory_failed.clone(),
            inner.dma_faults,
        )
    };
    let asks = resources.region().is_some() || resources.free_page_reporting || resources.inflated.is_some();
    if !asks && !has_devices && failed.is_none() {
        return None;
    }
    let vm = vm?;
    let (boot, target) = (resources.boots_with().bytes(), resources.memory.bytes());
    let mut state = MemoryState {
        present: boot,
        target,
        zeroed,
        coming,
        failed,
        memory_failed,
        ..MemoryState::default()
    };
    if asks {
        let info = vm.ask_now(VmmClient::info)?.ok()?;
        let plugged = info.hotplug_memory.map_or(0, |memory| memory.plugged);
        state.present = boot.saturating_add(plugged);
        let balloon = info.balloon.unwrap_or_default();
        (state.reported, state.discarded) = (balloon.reported, balloon.discarded);
        if resources.inflated.is_some() {
            state.present = state.present.saturating_sub(balloon.inflated);
            state.fell_back = balloon.fell_back;
        }
    }
    if has_devices {
        let told = vm.ask_now(VmmClient::functions)?.ok()?;
        state.dma = DmaState {
            mapped: told.mapped,
            total: told.total,
            map_calls: told.map_calls,
            map_bytes: told.map_bytes,
            map_usec: told.map_usec,
            plug_hits: told.plug_hits,
            plug_misses: told.plug_misses,
            faults: sees_faults.then_some(faults),
        };
        state.map_error = told.error.map(|why| tail::lines(why.as_bytes()).join(" "));
    }
    Some(state)
}
