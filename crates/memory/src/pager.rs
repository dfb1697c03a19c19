//! Guest memory whose pages come from a snapshot's files when somebody first touches them, and before that in the order in which
//! another VM has asked for them. A thread brings them; who touches a page earlier waits for it.
//!
//! ```text
//!  guest, device, kernel ── fault ──► userfaultfd ──► pager ◄── order of another VM
//!                        ◄─ page ─────────────────────  │
//!                                                     files
//! ```
//! All that comes is this process's own: nothing is shared with other VMs of the snapshot, and what has changed since cannot be told. A page
//! that is discarded is missing again: it comes from the files once more when it is touched, and is the files' in a snapshot until then.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base::EventFd;
use base::epoll::{Epoll, Interest};
use vm_memory::GuestMemoryRegion;

use crate::layout::MemorySize;
use crate::userfault::Userfault;
use crate::{HUGE_PAGE, Layers, MemoryError, PAGE, Ram};

/// Of the thread.
const NAME: &str = "pager";
const STACK: usize = 128 << 10;

/// What comes at a time where nobody waits for it.
const AHEAD: u64 = 16;

/// The most runs of pages of an order that is kept.
const MAX_RUNS: usize = 4096;

const FAULT: u64 = 0;
const STOP: u64 = 1;

type Runs = Vec<(u64, u64)>;

/// The thread, which ends when this is dropped: nobody may touch the memory then.
#[derive(Debug)]
pub(crate) struct Pager {
    layers: Layers,
    asked: Arc<Mutex<Runs>>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.stop.signal();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Pager {
    /// Where the pages come from.
    pub(crate) fn layers(&self) -> &Layers {
        &self.layers
    }
}

impl Ram {
    /// Memory that holds what is in files and reads each page when it is first touched, or earlier if it is in `order`: runs of pages,
    /// by first page and number. `device` is /dev/userfaultfd.
    ///
    /// # Errors
    /// A file has another size, the layers make no sense, or the host has no memory or no userfaultfd for it.
    pub fn paged(
        layers: Layers,
        size: impl Into<MemorySize>,
        device: &OwnedFd,
        mut order: Runs,
    ) -> Result<Self, MemoryError> {
        let sizes = size.into();
        let size = sizes.all();
        layers.check(sizes)?;
        let pages = size.bytes() / PAGE as u64;
        let asked = order.len();
        order.retain(|&(first, run)| first.checked_add(run).is_some_and(|end| end <= pages));
        if order.len() < asked {
            log::warn!("a page list has pages beyond the memory's {size}: they are ignored");
        }
        let mut ram = Self::anonymous(sizes, |_| HUGE_PAGE, |_| Ok(()))?;
        let userfault = Userfault::new(device).map_err(|error| MemoryError::Userfault { source: error.into() })?;
        let pager = ram
            .page_from(layers, userfault, order)
            .map_err(|source| MemoryError::Pager { source })?;
        ram.pager = Some(Arc::new(pager));
        Ok(ram)
    }

    fn page_from(&self, layers: Layers, userfault: Userfault, order: Runs) -> std::io::Result<Pager> {
        let mut places = Vec::new();
        let mut first = 0;
        for region in self.regions() {
            let (start, pages) = (region.as_ptr().addr(), region.len() / PAGE as u64);
            userfault.register(start, region.size())?;
            places.push(Range { first, pages, start });
            first += pages;
        }
        let (epoll, stop) = (Epoll::new()?, EventFd::new()?);
        epoll.add(&userfault, FAULT, Interest::READ)?;
        epoll.add(&stop, STOP, Interest::READ)?;
        let asked = Arc::new(Mutex::new(Runs::new()));
        let work = Work {
            userfault,
            epoll,
            layers: layers.clone(),
            places,
            noted: match order.is_empty() {
                true => Some(vec![
                    0;
                    usize::try_from(first.div_ceil(u64::from(u64::BITS))).unwrap_or(0)
                ]),
                false => None,
            },
            left: order.into_iter().rev().collect(),
            asked: Arc::clone(&asked),
            page: Box::new([0; PAGE]),
        };
        Ok(Pager {
            layers,
            asked,
            stop,
            thread: Some(base::thread::spawn(NAME, STACK, move || work.run())?),
        })
    }

    /// Runs of pages in the order in which they were asked for; none of memory that is not paged, or was in an order from the start.
    pub fn page_order(&self) -> Runs {
        let asked = self.pager.as_ref().map(|pager| pager.asked.lock());
        asked.map_or_else(Runs::new, |asked| asked.unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Pages that follow each other in memory and in the files.
struct Range {
    first: u64,
    pages: u64,
    start: usize,
}

struct Work {
    userfault: Userfault,
    epoll: Epoll,
    layers: Layers,
    places: Vec<Range>,
    /// What comes ahead, the last first.
    left: Runs,
    asked: Arc<Mutex<Runs>>,
    /// Which pages stand in it, a bit each: one that was discarded is asked for again. `None` if no order is kept.
    noted: Option<Vec<u64>>,
    page: Box<[u8; PAGE]>,
}

impl Work {
    fn run(mut self) {
        if let Err(error) = self.serve() {
            // Whoever waits for a page would do so for ever, and there is no other content to give.
            log::error!("the guest cannot go on: {error}");
            std::process::abort();
        }
    }

    fn serve(&mut self) -> Result<(), MemoryError> {
        let (mut ready, mut faults) = (Vec::new(), Vec::new());
        loop {
            let timeout = (!self.left.is_empty()).then_some(Duration::ZERO);
            let waited = self.epoll.wait(&mut ready, timeout);
            waited.map_err(|source| MemoryError::Pager { source })?;
            if ready.iter().any(|ready| ready.token == STOP) {
                return Ok(());
            }
            self.userfault.faults(&mut faults).map_err(pager)?;
            for (at, &address) in faults.iter().enumerate() {
                let Some(page) = self.page_at(address) else { continue };
                // Before whoever waits for it goes on, and asks. Several may wait for one.
                if !faults[..at].contains(&address) {
                    self.note(page);
                }
                self.bring(page, 1)?;
            }
            if let Some((first, pages)) = self.left.pop() {
                let now = pages.min(AHEAD);
                if pages > now {
                    self.left.push((first + now, pages - now));
                }
                self.bring(first, now)?;
            }
        }
    }

    fn page_at(&self, address: usize) -> Option<u64> {
        self.places.iter().find_map(|range| {
            let page = (address.checked_sub(range.start)? / PAGE) as u64;
            (page < range.pages).then_some(range.first + page)
        })
    }

    fn address_of(&self, page: u64) -> Result<usize, MemoryError> {
        let found = self.places.iter().find_map(|range| {
            let at = page.checked_sub(range.first).filter(|at| *at < range.pages)?;
            Some(range.start + usize::try_from(at).ok()? * PAGE)
        });
        found.ok_or(MemoryError::Segments(self.layers.files().len()))
    }

    /// Puts pages there that are not there yet.
    fn bring(&mut self, first: u64, pages: u64) -> Result<(), MemoryError> {
        for page in first..first + pages {
            self.layers.read(page, &mut self.page)?;
            let to = self.address_of(page)?;
            self.userfault.put(to, &self.page).map_err(pager)?;
        }
        Ok(())
    }

    fn note(&mut self, page: u64) {
        let Some(noted) = &mut self.noted else { return };
        let (word, bit) = (page / u64::from(u64::BITS), 1 << (page % u64::from(u64::BITS)));
        let Some(word) = usize::try_from(word).ok().and_then(|word| noted.get_mut(word)) else {
            return;
        };
        if *word & bit != 0 {
            return;
        }
        *word |= bit;
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let runs = asked.len();
        match asked.last_mut() {
            Some((first, pages)) if *first + *pages == page => *pages += 1,
            _ if runs < MAX_RUNS => asked.push((page, 1)),
            _ => (),
        }
    }
}

fn pager(error: rustix::io::Errno) -> MemoryError {
    MemoryError::Pager { source: error.into() }
}

#[cfg(test)]
mod tests;
