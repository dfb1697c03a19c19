//! One side of a pair of rings: what it puts, what it takes, and how it waits. Knows nothing of calls.
//!
//! ```text
//!   looks ──(window over)──▶ takes `seen`, gives slots back, arms ──(still nothing)──▶ sleeps ──▶ looks
//!     └──────── record ◀──────────────────┘ (something came)             └─ the other side is gone, or the time is over
//! ```

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use wire::ring::{Consumer, ConsumerPosition, Producer, ProducerPosition, Record};

use crate::busy_poll::BusyPoll;
use crate::coalesce::{Coalesce, Sleep};
use crate::end::Counters;
use crate::peer::Peer;
use crate::placement::Placement;
use crate::{Error, Signal};

/// Records that travel together at most.
pub(crate) const BATCH: u32 = 32;

/// What is waited for.
#[derive(Clone, Copy, Debug)]
enum Want {
    Record,
    Space,
}

/// Where a side is in its two rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// In what comes in.
    pub incoming: ConsumerPosition,
    /// In what goes out.
    pub outgoing: ProducerPosition,
}

/// One side.
#[derive(Debug)]
pub(crate) struct RingEnd {
    pub(crate) outgoing: Producer,
    pub(crate) incoming: Consumer,
    pub(crate) signal: Box<dyn Signal>,
    pub(crate) peer: Peer,
    pub(crate) poll: BusyPoll,
    pub(crate) placement: Placement,
    /// Records that travel together at most; half of a small ring.
    pub(crate) batch: u32,
    /// Records were published for which the other side was not woken.
    pub(crate) is_left: bool,
    /// Since when one that sleeps has left them, where it says for how long.
    pub(crate) since: Option<Instant>,
    /// A server's: what it leaves.
    pub(crate) coalesce: Coalesce,
    pub(crate) next: Option<Record>,
    pub(crate) counters: Counters,
}

/// How long something is waited for; the clock is asked when somebody sleeps.
struct Patience {
    most: Option<Duration>,
    begun: Option<Instant>,
}

impl Patience {
    /// What is left of it.
    fn left(&mut self, what: &'static str) -> Result<Duration, Error> {
        let Some(most) = self.most else {
            return Ok(Duration::MAX);
        };
        let waited = self.begun.get_or_insert_with(Instant::now).elapsed();
        let left = most.checked_sub(waited).filter(|left| !left.is_zero());
        left.ok_or(Error::Deadline { what, waited })
    }
}

impl RingEnd {
    /// Puts a record, and tells its number. It is there at once, and the other side is woken for it as far as it has asked to be.
    pub(crate) fn send(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        let number = self.put(record, most)?;
        match self.outgoing.publish() {
            true => self.wake()?,
            false => self.leave()?,
        }
        Ok(number)
    }

    /// What was published may lie there for as long as the other side says.
    fn leave(&mut self) -> Result<(), Error> {
        self.is_left = true;
        let patience = self.outgoing.patience();
        if patience == u32::MAX || !self.outgoing.consumer_may_sleep() {
            self.since = None;
            return Ok(());
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        match since.elapsed() >= Duration::from_micros(patience.into()) {
            true => self.wake(),
            false => Ok(()),
        }
    }

    /// The same of a record that a flush follows soon.
    pub(crate) fn put(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        let number = loop {
            if let Some(number) = self.outgoing.push(record)? {
                break number;
            }
            self.flush()?;
            self.wait(Want::Space, Some(most))?;
        };
        self.counters.sent += 1;
        if self.outgoing.unpublished() >= u64::from(self.batch) {
            self.flush()?;
        }
        Ok(number)
    }

    /// What comes in and is not waited for may lie there for that long, or if that is nothing for as long as this side leaves it.
    pub(crate) fn leave_records(&mut self, most: Option<Duration>) {
        let half = self.outgoing.capacity() / 2;
        let (patience, batch) = match most {
            Some(most) if most.is_zero() => (0, 1),
            Some(most) => {
                let micros = u32::try_from(most.as_micros()).unwrap_or(u32::MAX - 1);
                (micros.clamp(1, u32::MAX - 1), half.min(BATCH))
            }
            None => (u32::MAX, half),
        };
        self.incoming.leave_for(patience);
        self.coalesce = Coalesce::of(batch);
    }

    /// Lets all that was put go, and wakes the other side if it sleeps, whatever it has asked for.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        let is_left = std::mem::take(&mut self.is_left) || self.outgoing.unpublished() > 0;
        self.since = None;
        match self.outgoing.publish() || is_left && self.outgoing.consumer_may_sleep() {
            true => self.wake(),
            false => Ok(()),
        }
    }

    fn wake(&mut self) -> Result<(), Error> {
        (self.is_left, self.since) = (false, None);
        self.placement.before_wake();
        self.counters.bells += 1;
        self.signal.wake()
    }

    /// The next record; what was put goes before it is waited for.
    pub(crate) fn receive(&mut self, most: Option<Duration>) -> Result<Record, Error> {
        self.flush()?;
        loop {
            if let Some(record) = self.try_receive()? {
                return Ok(record);
            }
            self.wait(Want::Record, most)?;
        }
    }

    /// The next record, if it is there.
    pub(crate) fn try_receive(&mut self) -> Result<Option<Record>, Error> {
        if self.next.is_none() {
            self.release_some()?;
            self.next = self.incoming.pop()?;
        }
        let record = self.next.take();
        self.counters.received += u64::from(record.is_some());
        Ok(record)
    }

    /// Gives slots back when it is time to: before a record is taken, so that the one that is worked on is still in the ring for whoever
    /// goes on from [`RingEnd::position`].
    fn release_some(&mut self) -> Result<(), Error> {
        match self.incoming.should_release() && self.incoming.release() {
            true => self.wake(),
            false => Ok(()),
        }
    }

    /// Where both rings are. What was put has to be published, and what was taken is what was received.
    pub(crate) fn position(&self) -> Position {
        Position {
            incoming: self.incoming.position(),
            outgoing: self.outgoing.position(),
        }
    }

    /// Whether what is wanted is there.
    fn look(&mut self, want: Want) -> Result<bool, Error> {
        match want {
            Want::Space => Ok(self.outgoing.has_space()?),
            Want::Record => {
                self.release_some()?;
                self.next = self.incoming.pop()?;
                Ok(self.next.is_some())
            }
        }
    }

    /// Until it is there.
    fn wait(&mut self, want: Want, most: Option<Duration>) -> Result<(), Error> {
        let mut patience = Patience { most, begun: None };
        loop {
            let poll = std::mem::replace(&mut self.poll, BusyPoll::up_to(Duration::ZERO));
            let came = poll.until(|| self.look(want));
            self.poll = poll;
            if came? {
                return Ok(());
            }
            self.sleep(want, &mut patience)?;
        }
    }

    /// Until the other side wakes this one, or for a while; at once if what is wanted is there when the other side has been told to.
    fn sleep(&mut self, want: Want, patience: &mut Patience) -> Result<(), Error> {
        let seen = self.signal.seen();
        if self.incoming.release() {
            self.wake()?;
        }
        let sleep = match want {
            Want::Record => self.coalesce.next(),
            Want::Space => Sleep::UNTIL_ONE,
        };
        if self.arm(want, sleep)? {
            self.is_awake(sleep);
            return Ok(());
        }
        if self.peer.is_gone() {
            return self.gone(want);
        }
        let what = match want {
            Want::Record => "a record",
            Want::Space => "space for a record",
        };
        let most = patience.left(what)?.min(self.peer.looks()).min(sleep.most);
        self.counters.sleeps += 1;
        let begun = (self.poll.is_used() || self.coalesce.is_used()).then(Instant::now);
        let woken = self.signal.wait(seen, most)?;
        self.is_awake(sleep);
        if let Some(begun) = begun {
            let long = begun.elapsed();
            self.poll.slept(long);
            self.coalesce.slept(sleep, long, woken || self.incoming.has_record());
        }
        if self.placement.after_sleep()? {
            self.counters.moves += 1;
        }
        match !woken && self.peer.look()? {
            true => self.gone(want),
            false => Ok(()),
        }
    }

    /// One that asked to be woken for several records need not be woken for them now, nor by who waits.
    fn is_awake(&mut self, sleep: Sleep) {
        if sleep.records > 1 {
            self.incoming.disarm();
        }
    }

    fn arm(&mut self, want: Want, sleep: Sleep) -> Result<bool, Error> {
        Ok(match want {
            Want::Record => self.incoming.arm_for(sleep.records),
            Want::Space => self.outgoing.arm()?,
        })
    }

    /// What a side put before it ended is still taken.
    fn gone(&mut self, want: Want) -> Result<(), Error> {
        match want {
            Want::Record if self.incoming.arm() => Ok(()),
            _ => Err(Error::PeerGone),
        }
    }
}
