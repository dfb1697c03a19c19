//! For how long records that nobody waits for are left in their ring, so that a server is not woken for each of them. Knows no ring, and
//! nothing of what wakes it.
//!
//! ```text
//!            the next record has come soon
//!   one ────────────────────────────────────▶ several: it is woken when several are there, by a client that waits for an answer or for
//!    ▲                                          │      which records have lain there for too long, and by itself after `BACKSTOP`
//!    └────── nothing has come ──────────────────┘
//! ```
//!
//! As network devices moderate their interrupts (ethtool(8), `--coalesce`), by records and by time. That a client has put records is no
//! secret meanwhile: they are in the ring, and a server that is awake takes them. A client looks at its clock when it puts a record and at
//! no other time; so that one which then does nothing more has its records carried out all the same, the server looks by itself, seldom
//! enough that its timer is not the next one of its CPU: setting that one is an exit in a virtual machine.

use std::time::Duration;

/// How long records are left if nobody says another time: several times what it takes to wake a thread, and little to a device.
pub const DEFAULT: Duration = Duration::from_micros(50);

/// A server that leaves records looks after so long. Longer than a tick of a kernel with CONFIG_HZ=250.
pub(crate) const BACKSTOP: Duration = Duration::from_millis(5);

/// What a server does about it.
#[derive(Debug)]
pub(crate) struct Coalesce {
    /// Records that are worth waking for; with one, it leaves none.
    batch: u32,
    is_often: bool,
}

/// How a side sleeps until there is something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sleep {
    /// It is woken by so many records, or by who waits.
    pub(crate) records: u32,
    /// Nobody need wake it then.
    pub(crate) most: Duration,
}

impl Sleep {
    /// Woken by the first one.
    pub(crate) const UNTIL_ONE: Self = Self {
        records: 1,
        most: Duration::MAX,
    };
}

impl Coalesce {
    /// So many records are worth waking for.
    pub(crate) fn of(batch: u32) -> Self {
        Self { batch, is_often: false }
    }

    /// Whether it has to be told how long was slept.
    pub(crate) fn is_used(&self) -> bool {
        self.batch > 1
    }

    /// How it is to sleep now.
    pub(crate) fn next(&self) -> Sleep {
        match self.is_often && self.is_used() {
            true => Sleep {
                records: self.batch,
                most: BACKSTOP,
            },
            false => Sleep::UNTIL_ONE,
        }
    }

    /// It has slept so, for so long, and whether there is something now.
    pub(crate) fn slept(&mut self, sleep: Sleep, long: Duration, has_come: bool) {
        self.is_often = has_come && (sleep != Sleep::UNTIL_ONE || long <= BACKSTOP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_micros(50);
    const SEVERAL: Sleep = Sleep {
        records: 32,
        most: BACKSTOP,
    };

    #[test]
    fn records_that_come_often_are_left_together() {
        let mut coalesce = Coalesce::of(32);
        assert_eq!(coalesce.next(), Sleep::UNTIL_ONE);
        coalesce.slept(Sleep::UNTIL_ONE, BACKSTOP * 2, true);
        assert_eq!(coalesce.next(), Sleep::UNTIL_ONE, "it has taken its time");
        coalesce.slept(Sleep::UNTIL_ONE, SOON, true);
        assert_eq!(coalesce.next(), SEVERAL);
        coalesce.slept(SEVERAL, BACKSTOP * 2, true);
        assert_eq!(coalesce.next(), SEVERAL, "it has looked by itself, and found some");
        coalesce.slept(SEVERAL, BACKSTOP * 2, false);
        assert_eq!(coalesce.next(), Sleep::UNTIL_ONE, "nothing has come");
    }

    #[test]
    fn who_leaves_none_is_woken_by_each() {
        let mut coalesce = Coalesce::of(1);
        coalesce.slept(Sleep::UNTIL_ONE, SOON, true);
        assert!(!coalesce.is_used());
        assert_eq!(coalesce.next(), Sleep::UNTIL_ONE);
    }
}
