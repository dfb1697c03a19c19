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
use crate::end::Counters;
use crate::peer::Peer;
use crate::placement::Placement;
use crate::{Error, Signal};

/// Records that travel together at most.
pub(crate) const BATCH: u64 = 32;

/// Who puts a record finds that those before it have waited for so long: they go.
const BATCH_TIME: Duration = Duration::from_micros(50);

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
    pub(crate) batch: u64,
    /// When the first of those was put that were not published.
    pub(crate) since: Option<Instant>,
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
    /// Puts a record, and tells its number. It goes when [`BATCH`] have been put, when the first of them has waited for
    /// [`BATCH_TIME`], or by [`RingEnd::flush`].
    pub(crate) fn send(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        let number = self.put(record, most)?;
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if now.duration_since(since) >= BATCH_TIME {
            self.flush()?;
        }
        Ok(number)
    }

    /// The same without a look at the clock, for records that go soon anyway.
    pub(crate) fn put(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        let number = loop {
            if let Some(number) = self.outgoing.push(record)? {
                break number;
            }
            self.flush()?;
            self.wait(Want::Space, Some(most))?;
        };
        self.counters.sent += 1;
        if self.outgoing.unpublished() >= self.batch {
            self.flush()?;
        }
        Ok(number)
    }

    /// Lets all that was put go.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        self.since = None;
        match self.outgoing.publish() {
            true => self.wake(),
            false => Ok(()),
        }
    }

    fn wake(&mut self) -> Result<(), Error> {
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
        if self.arm(want)? {
            return Ok(());
        }
        if self.peer.is_gone() {
            return self.gone(want);
        }
        let what = match want {
            Want::Record => "a record",
            Want::Space => "space for a record",
        };
        let most = patience.left(what)?.min(self.peer.looks());
        self.counters.sleeps += 1;
        let begun = self.poll.is_used().then(Instant::now);
        let woken = self.signal.wait(seen, most)?;
        if let Some(begun) = begun {
            self.poll.slept(begun.elapsed());
        }
        if self.placement.after_sleep()? {
            self.counters.moves += 1;
        }
        match !woken && self.peer.look()? {
            true => self.gone(want),
            false => Ok(()),
        }
    }

    fn arm(&mut self, want: Want) -> Result<bool, Error> {
        Ok(match want {
            Want::Record => self.incoming.arm(),
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
