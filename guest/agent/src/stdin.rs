//! Standard input on its way to a command: the bytes, from whom they came, and who waits for room. Knows neither descriptors of
//! the command nor connections.
//!
//! ```text
//!  offer ─► at the head of the line, and there is room ─► bytes ─ front, took ─► the command
//!    └───► in the line ◄─ woken when there is room for its head
//! ```

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_api::message::STDIN_WINDOW;
use base::EventFd;

/// From whom bytes came, so that he is told when the command has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source(u64);

impl Source {
    /// This agent itself: nobody is told.
    pub(crate) const AGENT: Self = Self(0);
    /// The one client of a command that ends with it.
    pub(crate) const CLIENT: Self = Self(1);

    /// One that is like no other.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(2);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The queue. What is in it at once is bounded by those who put it there.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    bytes: VecDeque<u8>,
    /// Whose they are, in order; the lengths are those of `bytes` together.
    sources: VecDeque<(Source, usize)>,
    /// Those who wait for room, in the order in which they came.
    line: VecDeque<Arc<EventFd>>,
    /// No more will be queued.
    closed: bool,
    /// Nobody reads it in the command; what comes is thrown away.
    unread: bool,
}

/// What has become of bytes that were offered.
#[derive(Debug)]
pub(crate) enum Offer {
    /// They are queued, or nobody wants them.
    Settled,
    /// They come later in the line; this is signalled when they should be offered again.
    Wait(Arc<EventFd>),
}

impl Queue {
    /// An empty one, into which nothing will come if it is `closed`.
    pub(crate) fn new(closed: bool) -> Self {
        Self {
            closed,
            ..Self::default()
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// What is queued goes to the command, more may come.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.closed && !self.unread
    }

    /// All that will ever come was taken.
    pub(crate) fn is_at_end(&self) -> bool {
        self.closed && self.bytes.is_empty()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Queues bytes, whether there is room or not.
    pub(crate) fn push(&mut self, source: Source, bytes: &[u8]) {
        self.bytes.extend(bytes);
        match self.sources.back_mut() {
            Some((last, length)) if *last == source => *length += bytes.len(),
            _ => self.sources.push_back((source, bytes.len())),
        }
    }

    /// Queues at most a window of bytes as soon as they fit. `place` is `None` at first, and the caller's place in the line afterwards.
    ///
    /// # Errors
    /// There is no descriptor left to wait by.
    pub(crate) fn offer(
        &mut self,
        source: Source,
        bytes: &[u8],
        place: &mut Option<Arc<EventFd>>,
    ) -> io::Result<Offer> {
        if !self.is_wanted() {
            self.leave(place);
            return Ok(Offer::Settled);
        }
        let is_next = match (&*place, self.line.front()) {
            (Some(mine), Some(first)) => Arc::ptr_eq(mine, first),
            (_, first) => first.is_none(),
        };
        if is_next && self.bytes.len() + bytes.len() <= STDIN_WINDOW {
            self.push(source, bytes);
            self.leave(place);
            return Ok(Offer::Settled);
        }
        if let Some(mine) = place {
            return Ok(Offer::Wait(Arc::clone(mine)));
        }
        let mine = Arc::new(EventFd::new()?);
        self.line.push_back(Arc::clone(&mine));
        *place = Some(Arc::clone(&mine));
        Ok(Offer::Wait(mine))
    }

    /// Gives a place in the line up.
    pub(crate) fn leave(&mut self, place: &mut Option<Arc<EventFd>>) {
        if let Some(mine) = place.take() {
            self.line.retain(|other| !Arc::ptr_eq(other, &mine));
            self.wake_first();
        }
    }

    /// The next bytes; not all of them, if there are many.
    pub(crate) fn front(&self) -> &[u8] {
        self.bytes.as_slices().0
    }

    /// The command has the first `count` bytes; from whom they were.
    pub(crate) fn took(&mut self, count: usize) -> Vec<(Source, usize)> {
        let count = count.min(self.bytes.len());
        self.bytes.drain(..count);
        let (mut left, mut taken) = (count, Vec::new());
        while left > 0
            && let Some((source, length)) = self.sources.front_mut()
        {
            let part = left.min(*length);
            taken.push((*source, part));
            *length -= part;
            left -= part;
            if *length == 0 {
                self.sources.pop_front();
            }
        }
        self.wake_first();
        taken
    }

    /// No more will come. What is queued is still taken, what waits for room is not queued any more.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.wake_all();
    }

    /// Nobody takes anything any more.
    pub(crate) fn discard(&mut self) {
        self.unread = true;
        // The memory, too.
        self.bytes = VecDeque::new();
        self.sources = VecDeque::new();
        self.wake_all();
    }

    fn wake_first(&self) {
        if let Some(first) = self.line.front() {
            first.signal();
        }
    }

    fn wake_all(&self) {
        self.line.iter().for_each(|place| place.signal());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_settled(offer: io::Result<Offer>) -> bool {
        matches!(offer.unwrap(), Offer::Settled)
    }

    #[test]
    fn bytes_go_in_order_and_come_back_to_whom_they_were_from() {
        let mut queue = Queue::new(false);
        let (a, b) = (Source::new(), Source::new());
        queue.push(a, b"aa");
        queue.push(a, b"A");
        queue.push(b, b"bb");
        queue.push(a, b"a");
        assert_eq!(queue.len(), 6);
        assert_eq!(queue.took(1), [(a, 1)]);
        assert_eq!(queue.took(3), [(a, 2), (b, 1)]);
        assert_eq!(queue.front(), b"ba");
        assert_eq!(queue.took(9), [(b, 1), (a, 1)]);
        assert!(queue.is_empty() && queue.took(1).is_empty());
    }

    #[test]
    fn what_does_not_fit_waits_in_line() {
        let mut queue = Queue::new(false);
        let (a, b) = (Source::new(), Source::new());
        assert!(is_settled(queue.offer(a, &[1; STDIN_WINDOW - 1], &mut None)));
        let (mut first, mut second) = (None, None);
        let Offer::Wait(room) = queue.offer(b, &[2; 2], &mut first).unwrap() else {
            panic!("it does not fit")
        };
        // It would fit, but is not its turn.
        assert!(!is_settled(queue.offer(a, &[3; 1], &mut second)));
        assert!(!is_settled(queue.offer(b, &[2; 2], &mut first)));
        assert!(!room.consume());
        queue.took(1);
        assert!(room.consume(), "nobody said that there is room");
        assert!(!is_settled(queue.offer(a, &[3; 1], &mut second)));
        assert!(is_settled(queue.offer(b, &[2; 2], &mut first)));
        assert!(first.is_none());
        assert!(second.as_ref().unwrap().consume(), "the next one was not told");
        assert!(!is_settled(queue.offer(a, &[3; 1], &mut second)));
        queue.took(1);
        assert!(is_settled(queue.offer(a, &[3; 1], &mut second)));
        assert_eq!(queue.len(), STDIN_WINDOW);
    }

    #[test]
    fn who_leaves_the_line_makes_way() {
        let mut queue = Queue::new(false);
        queue.push(Source::new(), &[0; STDIN_WINDOW - 1]);
        let (mut large, mut small) = (None, None);
        assert!(!is_settled(queue.offer(Source::new(), &[0; 9], &mut large)));
        assert!(!is_settled(queue.offer(Source::new(), &[0], &mut small)));
        queue.leave(&mut large);
        assert!(small.as_ref().unwrap().consume());
        assert!(is_settled(queue.offer(Source::new(), &[0], &mut small)));
    }

    #[test]
    fn those_who_wait_learn_that_nobody_takes_more() {
        for end in [Queue::close, Queue::discard] {
            let mut queue = Queue::new(false);
            queue.push(Source::new(), &[0; STDIN_WINDOW]);
            let mut place = None;
            assert!(!is_settled(queue.offer(Source::new(), &[0], &mut place)));
            end(&mut queue);
            assert!(place.as_ref().unwrap().consume());
            assert!(is_settled(queue.offer(Source::new(), &[0], &mut place)));
            assert!(place.is_none() && queue.line.is_empty());
            assert!([0, STDIN_WINDOW].contains(&queue.len()));
        }
    }

    /// Whatever is done, the queue is the bytes that were queued and not taken, in order, and never more than a window.
    #[test]
    fn any_order_of_steps_keeps_the_bytes() {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |limit: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random % u64::try_from(limit).unwrap()).unwrap()
        };
        let sources: Vec<Source> = (0..4).map(|_| Source::new()).collect();
        let mut places: Vec<(Option<Arc<EventFd>>, Vec<u8>)> = vec![(None, Vec::new()); 4];
        let (mut queue, mut expected) = (Queue::new(false), VecDeque::new());
        for step in 0..400_usize {
            let who = next(4);
            let (place, bytes) = &mut places[who];
            match next(5) {
                0 if place.is_some() => {
                    queue.leave(place);
                    bytes.clear();
                }
                0..3 => {
                    if place.is_none() {
                        *bytes = vec![u8::try_from(step % 251).unwrap(); 1 + next(STDIN_WINDOW)];
                    }
                    if is_settled(queue.offer(sources[who], bytes, place)) {
                        expected.extend(bytes.drain(..).map(|byte| (sources[who], byte)));
                    }
                }
                _ => {
                    let want = next(queue.front().len() + 1);
                    let front = queue.front()[..want].to_vec();
                    let taken = queue.took(want);
                    let whose = taken
                        .iter()
                        .flat_map(|(source, count)| std::iter::repeat_n(*source, *count));
                    let due: Vec<_> = expected.drain(..want).collect();
                    assert_eq!(whose.zip(front).collect::<Vec<_>>(), due);
                }
            }
            assert!(queue.len() == expected.len() && queue.len() <= STDIN_WINDOW);
        }
    }
}
