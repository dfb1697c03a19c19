//! From what a guest says that it has no use for to what is done for the host. Each page is an allegation: it has to be one of the guest's
//! memory, whole; a request has a limit, beyond which its pages stay. Knows no queue.

use std::io;
use std::sync::Arc;

use ::device::{Discard, FreePages};
use memory::layout::Range;
use memory::{GuestRam, place_of};
use virtio::Chain;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::metrics::{Kept, Metrics};
use crate::pages;
use crate::protocol::{PAGE, read_numbers};

/// The most that one report gives back: more than Linux's 32 ranges of the largest pages that its allocator has (4 MiB). Discarding it takes
/// some ten milliseconds at most, and who pauses the device waits for that.
pub(crate) const MOST_REPORTED: u64 = 128 << 20;

/// The most pages that one request inflates: sixteen times as many as Linux asks for.
pub(crate) const MOST_INFLATED: usize = 4096;

/// The most pages that one request takes back: one that names more is not answered, as all of them would have to be made ready. They are
/// asked for at once, so that whoever maps them limits what it does for one request.
pub(crate) const MOST_DEFLATED: usize = MOST_INFLATED;

/// What gives pages back; the device's thread has it while there is one.
pub(crate) struct Giving {
    pages: Box<dyn FreePages>,
    /// The driver tells before it takes pages back.
    tells: bool,
    /// What a driver of before has left is to be made ready.
    unsettled: bool,
    pub(crate) metrics: Arc<Metrics>,
}

impl Giving {
    pub(crate) fn new(pages: Box<dyn FreePages>, metrics: Arc<Metrics>) -> Self {
        Self {
            pages,
            tells: false,
            unsettled: false,
            metrics,
        }
    }

    /// A driver is there.
    pub(crate) fn begin(&mut self, tells: bool) {
        self.tells = tells;
    }

    /// The driver has gone, and has left all pages to the next.
    pub(crate) fn forget(&mut self) {
        self.unsettled = self.pages.forget();
    }

    /// Makes a part of that ready; whether that could be.
    pub(crate) fn settle(&mut self) -> bool {
        match self.pages.settle() {
            Ok(is_all) => {
                self.unsettled = !is_all;
                true
            }
            Err(error) => {
                self.tell("memory of a balloon that was given up is not mapped yet", &error);
                false
            }
        }
    }

    /// Whether [`Giving::settle`] has nothing to do.
    pub(crate) fn is_settled(&self) -> bool {
        !self.unsettled
    }

    fn tell(&self, what: &str, error: &io::Error) {
        if self.metrics.log_limit.allow() {
            log::warn!("balloon: {what}: {error}");
        }
    }

    /// Pages by their numbers that the guest takes back; whether it may be answered.
    pub(crate) fn deflate(&mut self, chain: &Chain<'_>) -> bool {
        let numbers = read_numbers(&mut chain.reader(), MOST_DEFLATED);
        let ready = match chain.readable_bytes() / size_of::<u32>() {
            0..=MOST_DEFLATED => {
                let pages = pages::merged(numbers.into_iter().map(pages::page).collect());
                self.pages.deflate(&pages)
            }
            _ => Err(io::Error::other("it names more pages at once than any driver does")),
        };
        if let Err(error) = &ready {
            self.tell("what the guest takes back is not mapped yet, so that it waits", error);
        }
        ready.is_ok()
    }

    /// Pages by their numbers, which the guest does without until it deflates them (5.5.6.1).
    pub(crate) fn inflate(&mut self, memory: &GuestRam, chain: &Chain<'_>) {
        let numbers = read_numbers(&mut chain.reader(), MOST_INFLATED);
        let asked = chain.readable_bytes() / size_of::<u32>();
        self.metrics.kept(Kept::Limit, (asked - numbers.len()) as u64 * PAGE);
        let named: Vec<_> = numbers.into_iter().map(pages::page).collect();
        let count = named.len();
        let is_memory = |page: &Range| {
            let last = GuestAddress(page.start + page.length - 1);
            memory.address_in_range(GuestAddress(page.start)) && memory.address_in_range(last)
        };
        let own: Vec<_> = named.into_iter().filter(is_memory).collect();
        self.metrics.refused_ranges.add((count - own.len()) as u64);
        let own = pages::merged(own);
        if self.tells {
            self.pages.inflated(&own);
        }
        self.give(memory, own);
    }

    /// Buffers that are free pages themselves (5.5.6.7). They lie in guest memory, or there would be no chain.
    pub(crate) fn report(&mut self, memory: &GuestRam, chain: &Chain<'_>) {
        let parts = chain.readable().iter().chain(chain.writable());
        let (whole, others): (Vec<_>, Vec<_>) = parts
            .filter_map(|part| place_of(memory, part))
            .partition(pages::is_whole);
        self.metrics.refused_ranges.add(others.len() as u64);
        let free = pages::merged(whole);
        self.metrics.reported.add(pages::bytes(&free));
        let (now, left) = pages::limited(free, MOST_REPORTED);
        self.metrics.kept(Kept::Limit, left);
        self.give(memory, now);
    }

    fn give(&mut self, memory: &GuestRam, ranges: Vec<Range>) {
        for range in ranges {
            match self.pages.discard(memory, range) {
                Ok(Discard::Done) => self.metrics.discarded.add(range.length),
                Ok(Discard::Pinned) => self.metrics.kept(Kept::Pinned, range.length),
                Ok(Discard::Unplugged) => self.metrics.kept(Kept::Unplugged, range.length),
                Err(error) => {
                    self.metrics.kept(Kept::Host, range.length);
                    if self.metrics.log_limit.allow() {
                        log::warn!("balloon: what the guest gives back stays: {error}");
                    }
                }
            }
        }
    }
}
