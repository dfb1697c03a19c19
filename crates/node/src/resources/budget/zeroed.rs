//! Zeroed memory that lies ready, as the budget has it: it counts as memory that nobody else can have, and it goes when a machine would be
//! refused for it. Knows who can drain it, and neither what a piece of it is nor whom it is for.

use std::fmt;
use std::sync::{PoisonError, Weak};
use std::time::Duration;

use node_api::SandboxConfig;

use super::{Budget, Ledger, Machine, Memory, Refused, Wish};
use base::Ratio;

/// Who has zeroed memory ready.
pub(crate) trait Drain: fmt::Debug + Send + Sync {
    /// Gives up one piece, or what it is about to make one of: false where it has none, or cannot in time. The caller holds no lock of the
    /// budget's, and what is given up is taken from it before this returns.
    fn give_up_one(&self) -> bool;
}

/// How what lies ready counts for a machine that is to be promised memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// As what it is.
    There,
    /// As if it had been given up.
    GivenUp,
}

impl Counted {
    /// So many bytes are nobody else's, and so many are available besides what the host says.
    pub(super) fn of(self, ledger: &Ledger) -> (u64, u64) {
        match self {
            Self::There => (ledger.zeroed(), 0),
            Self::GivenUp => (0, ledger.zeroed()),
        }
    }
}

/// Bytes that are zeroed, or about to be, as long as this is there.
#[derive(Debug)]
pub(crate) struct Held {
    budget: Budget,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.0.ledger().remove_zeroed(self.bytes);
        self.budget.0.changed.notify_all();
    }
}

impl Budget {
    /// From here on this one is asked to give up what it has before a machine is refused for it. Only the first is.
    pub(crate) fn drain_first(&self, pool: Weak<dyn Drain>) {
        if self.0.zeroed.set(pool).is_err() {
            log::error!("two pools of zeroed memory: the second one is not drained for sandboxes");
        }
    }

    /// Enters a machine in the table by `enter` if there is room for it, for which zeroed memory is given up, piece by piece. What would be
    /// refused without any of that as well is refused at once.
    pub(super) fn enter_machine<T>(
        &self,
        wish: &Wish,
        config: &SandboxConfig,
        change: (Option<u64>, Machine),
        enter: impl FnOnce(&mut Ledger) -> T,
    ) -> Result<T, Refused> {
        loop {
            let mut ledger = self.0.ledger();
            let Err(refused) = self.check_machine(wish, config, &ledger, change, Counted::There) else {
                return Ok(enter(&mut ledger));
            };
            if ledger.zeroed() == 0 {
                return Err(refused);
            }
            self.check_machine(wish, config, &ledger, change, Counted::GivenUp)?;
            drop(ledger);
            let pool = self.0.zeroed.get().and_then(Weak::upgrade);
            if !pool.is_some_and(|pool| pool.give_up_one()) {
                return Err(refused);
            }
        }
    }

    /// Takes `bytes` for zeroed memory, if no machine is being started and there is room for it: beside what sandboxes are promised, without
    /// overcommitting, and of what is available now, beside what the host keeps and what machines need that come up.
    pub(crate) fn hold_if_idle(&self, bytes: u64) -> Option<Held> {
        let mut ledger = self.0.ledger();
        let read = self.0.host.memory();
        let read = read
            .inspect_err(|error| log::debug!("no memory is zeroed ahead: {error}"))
            .ok()?;
        let host = Memory::of(read, Ratio::whole(1));
        let sum = ledger.sum(read.huge.bytes(), self.0.overcommit.clones);
        let all = sum.memory.saturating_add(ledger.zeroed()).saturating_add(bytes);
        let at_once = host.kept.saturating_add(sum.at_once).saturating_add(bytes);
        if sum.starting > 0 || all > host.total || at_once > read.available.bytes() {
            return None;
        }
        ledger.add_zeroed(bytes);
        Some(Held {
            budget: self.clone(),
            bytes,
        })
    }

    /// Waits until something is given back, a request ends, or so long.
    pub(crate) fn wait_for_change(&self, limit: Duration) {
        let ledger = self.0.ledger();
        drop(
            self.0
                .changed
                .wait_timeout(ledger, limit)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}
