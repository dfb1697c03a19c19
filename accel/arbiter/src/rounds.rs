//! Who may use how much of the device: deficit round robin (Shreedhar and Varghese, 1995) over tenants with weights and two priorities.
//!
//! ```text
//!   one tenant awake ──▶ no limit, no rounds
//!   several ──▶ a round: to each by its weight ── all that are busy have used theirs, or twice its time is over ──▶ the next
//! ```
//!
//! Of the tenants that are busy the one of the least weight has a quantum in a round, and the others as many times that as their weights are
//! of its, so that only proportions count; where that is more than [`MOST_QUANTA`] for one, all have less.
//!
//! What a command took is known when it is over, so a tenant can use more than it has; that is a debt, which its next rounds pay. Low
//! priority has credit only while no tenant of high priority is busy. Knows no clock, no device and no process: all numbers are given.

use std::collections::BTreeMap;

/// How long a tenant that has nothing to do counts as one that soon has something again, in microseconds.
const AWAKE: u64 = 50_000;

/// Rounds whose credit a tenant can save that has work and is slow to use it, as its server gets no CPU.
const SAVED: i64 = 8;

/// The most that a round gives to a tenant, in quanta: what the others may have to wait for each time, however its weight is beside theirs.
const MOST_QUANTA: i64 = 25;

/// The weight of a tenant of which nobody says one: some others can have less, and some more.
pub const DEFAULT_WEIGHT: u32 = 100;

/// Which tenants go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Priority {
    /// Served while no tenant of high priority has work.
    Low,
    /// Served first.
    #[default]
    High,
}

/// A tenant's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Of the device's time: two tenants with 1 and 3 that always have work have a quarter and three quarters.
    pub weight: u32,
    /// Which go first.
    pub priority: Priority,
}

impl Default for Share {
    fn default() -> Self {
        Self {
            weight: DEFAULT_WEIGHT,
            priority: Priority::High,
        }
    }
}

/// What is seen of a tenant at a moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// Microseconds of the device that it has used since it was last seen.
    pub spent: u64,
    /// Whether it has commands on the device, or some that wait for credit.
    pub busy: bool,
    /// Whether some wait for credit.
    pub waits: bool,
}

/// What a tenant may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credit {
    /// Anything: nobody else has work.
    Unlimited,
    /// Commands that take so many microseconds from now on; none with zero.
    Microseconds(u64),
}

/// A tenant.
#[derive(Debug)]
struct Tenant {
    weight: i64,
    priority: Priority,
    /// What is left of its credit; below zero, what it owes.
    deficit: i64,
    seen: Seen,
    /// When it was last busy.
    busy_at: Option<u64>,
}

/// All tenants of a device.
#[derive(Debug)]
pub struct Rounds {
    tenants: BTreeMap<u64, Tenant>,
    /// Microseconds for the least weight.
    quantum: i64,
    /// When the round began, and how long its credits are together; none while nobody is limited.
    round: Option<(u64, u64)>,
}

impl Rounds {
    /// With so many microseconds in each round for the least weight of those that are busy.
    #[must_use]
    pub fn new(quantum: u32) -> Self {
        Self {
            tenants: BTreeMap::new(),
            quantum: i64::from(quantum.max(1)),
            round: None,
        }
    }

    /// One tenant more; a number that is there already has another share from now on.
    pub fn join(&mut self, tenant: u64, share: Share) {
        let weight = i64::from(share.weight.max(1));
        let joined = self.tenants.entry(tenant).or_insert(Tenant {
            weight,
            priority: share.priority,
            deficit: 0,
            seen: Seen::default(),
            busy_at: None,
        });
        (joined.weight, joined.priority) = (weight, share.priority);
    }

    /// Tenants that are not of these are gone, and what they had with them.
    pub fn keep(&mut self, is_there: impl Fn(u64) -> bool) {
        self.tenants.retain(|number, _| is_there(*number));
    }

    /// What a tenant has done until now.
    pub fn see(&mut self, tenant: u64, seen: Seen, now: u64) {
        let limited = self.round.is_some();
        let spent = i64::try_from(seen.spent).unwrap_or(i64::MAX);
        let Some(own) = self.tenants.get_mut(&tenant) else {
            return;
        };
        own.seen = seen;
        if seen.busy {
            own.busy_at = Some(now);
        }
        if limited {
            own.deficit = own.deficit.saturating_sub(spent);
            return;
        }
        // Nobody else was held up by it; what others owe is paid by what it has had meanwhile.
        let weight = own.weight;
        own.deficit = own.deficit.min(0);
        for (_, other) in self.tenants.iter_mut().filter(|(number, _)| **number != tenant) {
            let paid = spent.saturating_mul(other.weight) / weight;
            other.deficit = other.deficit.min(0).saturating_add(paid).min(0);
        }
    }

    /// What each may do from now on.
    pub fn decide(&mut self, now: u64) -> Vec<(u64, Credit)> {
        let awake = self.tenants.values().filter(|tenant| tenant.is_awake(now)).count();
        if awake == 0 {
            // The device has had time for everybody.
            self.tenants.values_mut().for_each(|tenant| tenant.deficit = 0);
        }
        if awake <= 1 {
            self.round = None;
            return self.alone(awake, now);
        }
        let first = self.tenants.values().filter(|tenant| tenant.seen.busy);
        let first = first.map(|tenant| tenant.priority).max().unwrap_or_default();
        if self.is_over(first, now) {
            self.next(first, now);
        }
        let credit = |tenant: &Tenant| match tenant.priority >= first {
            true => Credit::Microseconds(u64::try_from(tenant.deficit).unwrap_or_default()),
            false => Credit::Microseconds(0),
        };
        (self.tenants.iter())
            .map(|(number, tenant)| (*number, credit(tenant)))
            .collect()
    }

    /// What each may do while no more than one is awake. Whoever wakes up begins before this is asked again: with a quantum, or, if it owes,
    /// with none.
    fn alone(&self, awake: usize, now: u64) -> Vec<(u64, Credit)> {
        let credit = |tenant: &Tenant| match awake == 0 || tenant.is_awake(now) {
            true => Credit::Unlimited,
            false if tenant.deficit < 0 => Credit::Microseconds(0),
            false => Credit::Microseconds(self.quantum.unsigned_abs()),
        };
        (self.tenants.iter())
            .map(|(number, tenant)| (*number, credit(tenant)))
            .collect()
    }

    /// Whether more than one tenant has work, so that somebody has to look often.
    #[must_use]
    pub fn is_contended(&self) -> bool {
        self.round.is_some()
    }

    /// Whether a tenant has nothing to do, and had nothing for a while.
    #[must_use]
    pub fn is_asleep(&self, tenant: u64, now: u64) -> bool {
        !self.tenants.get(&tenant).is_some_and(|tenant| tenant.is_awake(now))
    }

    /// Whether somebody waits, and nobody who has work has credit left. A tenant that has both and does not use it, as it says, ends a round
    /// by the time that the round should have taken, twice.
    fn is_over(&self, first: Priority, now: u64) -> bool {
        let Some((begun, length)) = self.round else { return true };
        let mut busy = self
            .tenants
            .values()
            .filter(|tenant| tenant.priority >= first && tenant.seen.busy);
        let waits = busy.clone().any(|tenant| tenant.seen.waits && tenant.deficit <= 0);
        let late = now.saturating_sub(begun) > length.saturating_mul(2);
        waits && (late || busy.all(|tenant| tenant.deficit <= 0))
    }

    /// As many rounds at once as it takes until somebody who has work may go on.
    fn next(&mut self, first: Priority, now: u64) {
        let of = |tenant: &&Tenant| tenant.priority >= first && tenant.seen.busy;
        let each = Each::of(
            self.quantum,
            self.tenants.values().filter(of).map(|tenant| tenant.weight),
        );
        let rounds = |tenant: &Tenant| (-tenant.deficit.min(0)) / each.credit(tenant.weight) + 1;
        let rounds = self.tenants.values().filter(of).map(rounds).min().unwrap_or(1);
        let mut length = 0_u64;
        for tenant in self.tenants.values_mut().filter(|tenant| tenant.priority >= first) {
            let most = each.credit(tenant.weight);
            let more = most.saturating_mul(rounds);
            // A round that ended by its time has left credit to one that has work, which is its to catch up with.
            let kept = if tenant.seen.busy { most * SAVED } else { 0 };
            tenant.deficit = tenant.deficit.saturating_add(more).min(most + kept);
            if tenant.seen.busy {
                length += u64::try_from(most).unwrap_or_default();
            }
        }
        self.round = Some((now, length));
    }
}

/// What a round gives: so many microseconds for so much weight.
#[derive(Debug, Clone, Copy)]
struct Each {
    microseconds: i64,
    weight: i64,
    most: i64,
}

impl Each {
    /// To tenants of these weights.
    fn of(quantum: i64, weights: impl Iterator<Item = i64> + Clone) -> Self {
        let least = weights.clone().min().unwrap_or(1);
        let greatest = weights.max().unwrap_or(1);
        let most = quantum.saturating_mul(MOST_QUANTA);
        let (microseconds, weight) = match greatest > least.saturating_mul(MOST_QUANTA) {
            true => (most, greatest),
            false => (quantum, least),
        };
        Self {
            microseconds,
            weight,
            most,
        }
    }

    /// To a tenant of this weight, which may be one that is not busy and has another weight than all that are.
    fn credit(self, weight: i64) -> i64 {
        (self.microseconds.saturating_mul(weight) / self.weight).clamp(1, self.most)
    }
}

impl Tenant {
    fn is_awake(&self, now: u64) -> bool {
        self.seen.busy || self.busy_at.is_some_and(|at| now.saturating_sub(at) < AWAKE)
    }
}

#[cfg(test)]
mod tests;
