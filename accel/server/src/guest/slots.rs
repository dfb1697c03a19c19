//! Parts of the window's memory that clients of a guest get, one each: who has which, and that the next one finds it empty.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, SeekFrom};
use serde::{Deserialize, Serialize};
use wire::ring::Region;

use crate::Output;

/// Bytes of the window that are written at a time.
const CHUNK: usize = 64 << 10;

/// A part of the window: a file of its file system, whose bytes are in one piece.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// The file's name.
    pub name: String,
    /// Where its bytes begin in the window.
    pub offset: u64,
    /// How many there are.
    pub length: u64,
}

/// A client can have no part of the window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// All are somebody's.
    #[error(
        "all {0} parts of the sandbox's accelerator window are in use: end a program that uses the accelerator, or start another sandbox"
    )]
    InUse(usize),
}

/// All of them.
#[derive(Debug)]
pub struct Slots {
    /// The window, mapped once.
    region: Region,
    file: File,
    /// The guest's machine has its pages pinned, so that others in their place would be seen by one side alone.
    pinned: bool,
    /// The largest first.
    all: Vec<Slot>,
    taken: Mutex<BTreeSet<usize>>,
    given_back: Condvar,
}

/// One that is a client's, until this is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    slots: Arc<Slots>,
    index: usize,
    slot: Slot,
}

impl Slots {
    /// Those of a window.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn new(window: File, mut all: Vec<Slot>) -> Result<Self, accel_window::Error> {
        all.sort_by_key(|slot| std::cmp::Reverse(slot.length));
        Ok(Self {
            region: accel_window::map(window.as_fd())?,
            file: window,
            pinned: false,
            all,
            taken: Mutex::default(),
            given_back: Condvar::new(),
        })
    }

    /// Of a machine that has its pages pinned, as those have that own their CPUs: they are zeroed, and not given back.
    #[must_use]
    pub fn pinned(self, pinned: bool) -> Self {
        Self { pinned, ..self }
    }

    /// The largest that nobody has, here or, by what the guest says, there; waits for one that is being emptied.
    pub(crate) fn take(self: &Arc<Self>, free: &[String], most: Duration) -> Result<Taken, SlotError> {
        let deadline = Instant::now() + most;
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let found = self.all.iter().enumerate();
            let found = found.filter(|(_, slot)| free.contains(&slot.name));
            if let Some((index, slot)) = found.clone().find(|(index, _)| !taken.contains(index)) {
                taken.insert(index);
                // A server before this one may have left it with something in it.
                if self.empty(slot) {
                    return Ok(Taken {
                        slots: Arc::clone(self),
                        index,
                        slot: slot.clone(),
                    });
                }
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || found.count() == 0 {
                return Err(SlotError::InUse(self.all.len()));
            }
            (taken, _) = self
                .given_back
                .wait_timeout(taken, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// All of them, the largest first.
    pub(crate) fn all(&self) -> &[Slot] {
        &self.all
    }

    /// Bytes of the window.
    pub(crate) fn length(&self) -> u64 {
        self.region.length()
    }

    /// All of the window that is not zero.
    pub(crate) fn save(&self, output: &mut dyn Output) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        let mut at = 0;
        while let Some((begin, end)) = data(&self.file, at)? {
            at = begin;
            while at < end {
                let length = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
                let part = chunk.get_mut(..length).unwrap_or_default();
                self.region.read(at, part).map_err(io::Error::other)?;
                if part.iter().any(|byte| *byte != 0) {
                    output.put(at, part)?;
                }
                at += length as u64;
            }
        }
        Ok(())
    }

    /// One that a client had when its machine was saved, with what is in it; nothing if there is none of that name, or it is another client's.
    pub(crate) fn take_again(self: &Arc<Self>, name: &str) -> Option<Taken> {
        let (index, slot) = self.all.iter().enumerate().find(|(_, slot)| slot.name == name)?;
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.insert(index).then(|| Taken {
            slots: Arc::clone(self),
            index,
            slot: slot.clone(),
        })
    }

    /// Nobody serves what is in the window: its clients see that at once.
    ///
    /// # Errors
    /// A part is too small for one.
    pub fn abandon(&self) -> Result<(), accel_window::Error> {
        for slot in &self.all {
            let region = self.region.part(slot.offset, slot.length)?;
            accel_window::Window::abandon(&region)?;
        }
        Ok(())
    }

    /// Gives its memory back; whether that was possible.
    fn empty(&self, slot: &Slot) -> bool {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let emptied = match self.pinned {
            true => zero(&self.region, slot),
            false => rustix::fs::fallocate(&self.file, flags, slot.offset, slot.length).map_err(io::Error::from),
        };
        // What the next one would find is the last one's.
        if let Err(error) = &emptied {
            log::error!(
                "{} of the accelerator's window cannot be emptied, and is given to nobody any more: {error}",
                slot.name
            );
        }
        emptied.is_ok()
    }
}

/// The next part of a file that is no hole, from there on.
pub(crate) fn data(file: &File, from: u64) -> io::Result<Option<(u64, u64)>> {
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(begin) => Ok(Some((begin, rustix::fs::seek(file, SeekFrom::Hole(begin))?))),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes zeroes to all of it.
fn zero(region: &Region, slot: &Slot) -> io::Result<()> {
    let zeroes = vec![0; 1 << 20];
    let mut done = 0;
    while done < slot.length {
        let length = (slot.length - done).min(zeroes.len() as u64);
        let chunk = zeroes.get(..usize::try_from(length).unwrap_or(0)).unwrap_or(&zeroes);
        region.write(slot.offset + done, chunk).map_err(io::Error::other)?;
        done += length;
    }
    Ok(())
}

impl Taken {
    pub(crate) fn name(&self) -> &str {
        &self.slot.name
    }

    /// Its memory.
    pub(crate) fn region(&self) -> Result<Region, wire::ring::Error> {
        self.slots.region.part(self.slot.offset, self.slot.length)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.slots.empty(&self.slot) {
            let mut taken = self.slots.taken.lock().unwrap_or_else(PoisonError::into_inner);
            taken.remove(&self.index);
            self.slots.given_back.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots() -> Slots {
        let file = base::memfd::sized("window", 1 << 20).unwrap();
        let slot = |name: &str, offset, length| Slot {
            name: name.to_owned(),
            offset,
            length,
        };
        Slots::new(file, vec![slot("slot-1", 4096, 8192), slot("slot-0", 16384, 65536)]).unwrap()
    }

    fn free(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_largest_that_both_sides_have_free_is_taken_and_comes_back_empty() {
        let slots = Arc::new(slots());
        let both = free(&["slot-0", "slot-1", "slot-7"]);
        let first = slots.take(&both, Duration::ZERO).unwrap();
        assert_eq!((first.name(), first.region().unwrap().length()), ("slot-0", 65536));
        first.region().unwrap().write(100, b"mine").unwrap();
        let second = slots.take(&both, Duration::ZERO).unwrap();
        assert_eq!(second.name(), "slot-1");
        assert_eq!(slots.take(&both, Duration::ZERO).unwrap_err(), SlotError::InUse(2));
        drop(first);
        // A guest that still has it does not get it again.
        assert!(slots.take(&free(&["slot-1"]), Duration::ZERO).is_err());
        let again = slots.take(&both, Duration::ZERO).unwrap();
        let mut found = [1; 4];
        again.region().unwrap().read(100, &mut found).unwrap();
        assert_eq!((again.name(), found), ("slot-0", [0; 4]));
    }

    #[test]
    fn one_of_before_is_taken_once_with_what_is_in_it() {
        let slots = Arc::new(slots());
        slots.region.write(16384 + 100, b"mine").unwrap();
        let again = slots.take_again("slot-0").unwrap();
        let mut found = [1; 4];
        again.region().unwrap().read(100, &mut found).unwrap();
        assert_eq!(&found, b"mine");
        assert!(slots.take_again("slot-0").is_none() && slots.take_again("slot-7").is_none());
        assert!(slots.take(&free(&["slot-0"]), Duration::ZERO).is_err());
        drop(again);
        assert!(slots.take(&free(&["slot-0"]), Duration::ZERO).is_ok());
    }

    #[test]
    fn pages_that_are_pinned_stay_and_are_zeroed() {
        use std::os::unix::fs::MetadataExt;
        for (pinned, stays) in [(true, true), (false, false)] {
            let slots = Arc::new(slots().pinned(pinned));
            let taken = slots.take(&free(&["slot-0"]), Duration::ZERO).unwrap();
            taken.region().unwrap().write(8192, b"mine").unwrap();
            let blocks = || slots.file.metadata().unwrap().blocks();
            assert!(blocks() > 0);
            drop(taken);
            assert_eq!(blocks() > 0, stays, "pinned: {pinned}");
            let taken = slots.take(&free(&["slot-0"]), Duration::ZERO).unwrap();
            let mut found = [1; 4];
            taken.region().unwrap().read(8192, &mut found).unwrap();
            assert_eq!(found, [0; 4]);
        }
    }

    #[test]
    fn one_that_is_being_emptied_is_waited_for() {
        let slots = Arc::new(slots());
        let all = free(&["slot-0", "slot-1"]);
        let (first, second) = (slots.take(&all, Duration::ZERO), slots.take(&all, Duration::ZERO));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| slots.take(&all, Duration::from_secs(30)).map(|taken| taken.index));
            std::thread::sleep(Duration::from_millis(20));
            drop(second);
            assert_eq!(waiting.join().unwrap(), Ok(1));
        });
        drop(first);
    }
}
