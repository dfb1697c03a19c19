//! Resets under way, each in a scope of the host's buses: one function, or all of a bus where the kernel may reset that. Two of one scope go one
//! after the other, and all others beside each other: a reset takes what the device takes, and one that stands still keeps nobody else waiting.
//! Knows no sandbox, and resets nothing.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::PciAddress;
use vfio::host::inventory::PciFunction;

/// What of the host a reset changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    Function(PciAddress),
    /// Domain and number of a bus.
    Bus(u32, u8),
}

impl Scope {
    /// That of a function as it is; of one that is gone, its own place.
    pub(super) fn of(address: PciAddress, function: Option<&PciFunction>) -> Self {
        // The kernel goes through the methods until one has worked (Linux, Documentation/ABI/testing/sysfs-bus-pci, `reset_method`).
        let may_be_bus = function.is_some_and(|its| its.reset_methods.iter().any(|method| method == "bus"));
        match may_be_bus {
            true => Self::Bus(address.domain(), address.bus()),
            false => Self::Function(address),
        }
    }

    fn overlaps(self, other: Self) -> bool {
        let bus = |scope: Self| match scope {
            Self::Function(address) => (address.domain(), address.bus()),
            Self::Bus(domain, bus) => (domain, bus),
        };
        match (self, other) {
            (Self::Function(one), Self::Function(other)) => one == other,
            (one, other) => bus(one) == bus(other),
        }
    }
}

/// All that are under way.
#[derive(Debug, Default)]
pub(super) struct Resets {
    under_way: Mutex<BTreeSet<Scope>>,
    ended: Condvar,
}

/// One that is, until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay<'r> {
    resets: &'r Resets,
    scope: Scope,
}

impl Resets {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<Scope>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for its turn.
    pub(super) fn begin(&self, scope: Scope) -> UnderWay<'_> {
        let mut under_way = self.lock();
        while under_way.iter().any(|other| other.overlaps(scope)) {
            under_way = self.ended.wait(under_way).unwrap_or_else(PoisonError::into_inner);
        }
        self.enter(under_way, scope)
    }

    /// The same for who does not wait.
    pub(super) fn try_begin(&self, scope: Scope) -> Option<UnderWay<'_>> {
        let under_way = self.lock();
        let is_free = !under_way.iter().any(|other| other.overlaps(scope));
        is_free.then(|| self.enter(under_way, scope))
    }

    fn enter(&self, mut under_way: MutexGuard<'_, BTreeSet<Scope>>, scope: Scope) -> UnderWay<'_> {
        under_way.insert(scope);
        UnderWay { resets: self, scope }
    }

    /// Waits until `waits` says no more, which is asked when one has ended, or `limit` is over. Between two of one sandbox's none is under way.
    pub(super) fn wait_while(&self, limit: Duration, waits: impl Fn() -> bool) {
        let end = Instant::now() + limit;
        let mut under_way = self.lock();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !waits() {
                return;
            }
            let waited = self.ended.wait_timeout(under_way, left);
            under_way = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.resets.lock().remove(&self.scope);
        self.resets.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use vfio::host::inventory;
    use vfio::host::simulated::Kernel;

    use super::*;

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    #[test]
    fn functions_go_side_by_side_and_what_a_bus_has_one_after_the_other() {
        let resets = Resets::default();
        let one = Scope::Function(address("0000:02:10.0"));
        let under_way = resets.begin(one);
        assert!(resets.try_begin(one).is_none());
        let other = resets.try_begin(Scope::Function(address("0000:02:10.2"))).unwrap();
        assert!(resets.try_begin(Scope::Bus(0, 2)).is_none());
        let bus = resets.try_begin(Scope::Bus(0, 3)).unwrap();
        assert!(resets.try_begin(Scope::Function(address("0000:03:00.0"))).is_none());
        assert!(resets.try_begin(Scope::Bus(1, 3)).is_some());
        drop((under_way, other, bus));
        drop(resets.try_begin(Scope::Bus(0, 2)).unwrap());
        assert_eq!(*resets.lock(), BTreeSet::new());
    }

    #[test]
    fn the_kernel_says_which_may_reset_a_bus() {
        let kernel = Kernel::typical();
        let scope = |text: &str| {
            let function = inventory::find(&kernel.sysfs(), address(text)).ok();
            Scope::of(address(text), function.as_ref())
        };
        assert_eq!(scope("0000:01:00.0"), Scope::Bus(0, 1));
        assert_eq!(scope("0000:02:00.0"), Scope::Function(address("0000:02:00.0")));
        assert_eq!(scope("0000:7f:00.0"), Scope::Function(address("0000:7f:00.0")));
    }
}
