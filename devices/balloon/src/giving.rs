//! From what a guest says that it has no use for to what is done for the host. Each page is an allegation: it has to be one of the guest's
//! memory, whole; a request has a limit, beyond which its pages stay. Knows no queue.

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

/// What gives pages back; the device's thread has it while there is one.
pub(crate) struct Giving {
    pages: Box<dyn FreePages>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Giving {
    pub(crate) fn new(pages: Box<dyn FreePages>, metrics: Arc<Metrics>) -> Self {
        Self { pages, metrics }
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
        self.give(memory, pages::merged(own));
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
