//! The window itself: made or found in a region, and its parts.

use std::fs::File;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use base::Mapping;
use rustix::fs::SealFlags;
use wire::ring::{Consumer, ConsumerPosition, Producer, ProducerPosition, Region, RingMemory, Sequence, Word};

use crate::geometry::PAGE;
use crate::{Error, Geometry, Life};

/// The versions of the layout that this release knows.
pub const VERSIONS: RangeInclusive<u32> = 1..=1;

const MAGIC: [u8; 8] = *b"BSLTACCW";

/// A page of them.
const ZEROES: [u8; 4096] = [0; 4096];

/// Where things are in the header.
const LOWEST: u64 = 8;
const HIGHEST: u64 = 12;
const PAIRS: u64 = 16;
const RECORDS: u64 = 20;
const ARENA: u64 = 24;
const EPOCH: u64 = 128;
const HOLDER: u64 = 132;

/// Where things are in a pair.
const CLIENT_BELL: u64 = 0;
const SERVER_BELL: u64 = 128;
const CLIENT_CPU: u64 = 256;

/// Maps a descriptor that another process sent, or that was made here.
///
/// # Errors
/// [`Error::Unsealed`] if it could be shrunk beneath the mapping, or it cannot be mapped.
pub fn map(fd: impl AsFd) -> Result<Region, Error> {
    let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| Error::Unsealed)?;
    match seals.contains(SealFlags::SHRINK) {
        true => map_file(fd),
        false => Err(Error::Unsealed),
    }
}

/// Maps a file that nobody shrinks: one who did would end this process (SIGBUS).
///
/// # Errors
/// Those of mmap(2).
pub fn map_file(fd: impl AsFd) -> Result<Region, Error> {
    let size = rustix::fs::fstat(&fd).map_err(|error| Error::io("ask for the size")(error.into()))?;
    let length = usize::try_from(size.st_size).unwrap_or_default();
    Ok(Region::new(Mapping::new(fd, length).map_err(Error::io("map a file"))?))
}

/// A window in memory.
#[derive(Clone, Debug)]
pub struct Window {
    region: Region,
    geometry: Geometry,
}

/// Which side of a pair's bells somebody is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that calls.
    Client,
    /// The one that serves.
    Server,
}

/// A client's ends of a pair of rings. Each pair has one in all.
#[derive(Debug)]
pub struct ClientPair {
    /// What is asked; the ring counts the records.
    pub submissions: Producer,
    /// What is answered; numbers are those of what was asked.
    pub completions: Consumer,
}

/// A server's ends of a pair of rings. Each pair has one in all.
#[derive(Debug)]
pub struct ServerPair {
    /// What is asked.
    pub submissions: Consumer,
    /// What is answered.
    pub completions: Producer,
}

impl Window {
    /// A fresh one, in a memfd whose size is sealed.
    ///
    /// # Errors
    /// Those of memfd_create(2) and mmap(2).
    pub fn create(geometry: Geometry) -> Result<(File, Self), Error> {
        let file = base::memfd::sized("accel-window", geometry.length()).map_err(Error::io("have memory"))?;
        let window = Self::format(map(&file)?, geometry)?;
        Ok((file, window))
    }

    /// A fresh one that no other process gets, in memory that is no file.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn private(geometry: Geometry) -> Result<Self, Error> {
        let length = usize::try_from(geometry.length()).unwrap_or(usize::MAX);
        let mapping = Mapping::private(length).map_err(Error::io("have memory"))?;
        Self::format(Region::new(mapping), geometry)
    }

    /// Makes a window in a region, for a server. What was in it before is over for those who had it: the epoch is another. Nobody else may
    /// use the region as a server.
    ///
    /// # Errors
    /// [`Error::TooSmall`].
    pub fn format(region: Region, geometry: Geometry) -> Result<Self, Error> {
        let window = Self { region, geometry };
        window.check_size()?;
        let epoch = window.region.word(EPOCH)?;
        epoch.add(1, Ordering::SeqCst);
        window.holder()?.store(0, Ordering::SeqCst);
        window.region.write(0, &[0; 8])?;
        for page in (PAGE..geometry.arena_at()).step_by(ZEROES.len()) {
            window.region.write(page, &ZEROES)?;
        }
        let (lowest, highest) = (*VERSIONS.start(), *VERSIONS.end());
        let words = [
            (LOWEST, lowest),
            (HIGHEST, highest),
            (PAIRS, geometry.pairs()),
            (RECORDS, geometry.records()),
        ];
        for (at, value) in words {
            window.region.write(at, &value.to_le_bytes())?;
        }
        window.region.write(ARENA, &geometry.arena().to_le_bytes())?;
        window.region.write(0, &MAGIC)?;
        Ok(window)
    }

    /// The window that a server had whose memory has the same bytes now, for a server that goes on. What the header says is not looked at.
    ///
    /// # Errors
    /// [`Error::TooSmall`].
    pub fn resume(region: Region, geometry: Geometry) -> Result<Self, Error> {
        let window = Self { region, geometry };
        window.check_size().map(|()| window)
    }

    /// A region whose window is nobody's any more: clients that have it see that at once.
    ///
    /// # Errors
    /// [`Error::TooSmall`].
    pub fn abandon(region: &Region) -> Result<(), Error> {
        region.word(HOLDER)?.store(0, Ordering::SeqCst);
        Ok(())
    }

    /// Finds the window that a server made, for a client that knows `versions` of it. Tells the highest version that both know. Each number
    /// of the header is read once, and checked.
    ///
    /// # Errors
    /// [`Error::NoWindow`], [`Error::Version`], [`Error::Geometry`], [`Error::TooSmall`].
    pub fn open(region: Region, versions: RangeInclusive<u32>) -> Result<(Self, u32), Error> {
        if region.length() < PAGE {
            return Err(Error::TooSmall {
                needed: PAGE,
                available: region.length(),
            });
        }
        let mut magic = [0; 8];
        region.read(0, &mut magic)?;
        if magic != MAGIC {
            return Err(Error::NoWindow(magic));
        }
        let number = |at| {
            let mut bytes = [0; 4];
            region.read(at, &mut bytes).map(|()| u32::from_le_bytes(bytes))
        };
        let theirs = number(LOWEST)?..=number(HIGHEST)?;
        let version = common_version(&theirs, &versions).ok_or(Error::Version { theirs, ours: versions })?;
        let mut arena = [0; 8];
        region.read(ARENA, &mut arena)?;
        let geometry = Geometry::new(number(PAIRS)?, number(RECORDS)?, u64::from_le_bytes(arena))?;
        let window = Self { region, geometry };
        window.check_size()?;
        Ok((window, version))
    }

    fn check_size(&self) -> Result<(), Error> {
        let (needed, available) = (self.geometry.length(), self.region.length());
        match needed <= available {
            true => Ok(()),
            false => Err(Error::TooSmall { needed, available }),
        }
    }

    /// Where everything is.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// All of its memory. Whoever writes into the rings' part breaks the calls of both sides.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The time of the server that has it now; over from the beginning if none has.
    ///
    /// # Errors
    /// None: the header was found to be there.
    pub fn life(&self) -> Result<Life, Error> {
        let epoch = self.region.word(EPOCH)?;
        Ok(Life {
            met: epoch.load(Ordering::Acquire),
            epoch,
            holder: self.holder()?,
        })
    }

    /// The word that says which thread of the server holds it.
    pub(crate) fn holder(&self) -> Result<Word, Error> {
        Ok(self.region.word(HOLDER)?)
    }

    /// A pair's region.
    fn pair(&self, pair: u32) -> Result<Region, Error> {
        let pairs = self.geometry.pairs();
        if pair >= pairs {
            return Err(Error::Pair { pair, pairs });
        }
        let (at, length) = (self.geometry.pair_at(pair), self.geometry.stride());
        Ok(self.region.part(at, length)?)
    }

    /// The rings of a pair: of submissions, and of completions.
    fn rings(&self, pair: u32) -> Result<[RingMemory; 2], Error> {
        let (region, ring) = (self.pair(pair)?, self.geometry.ring());
        let at = |offset| RingMemory::new(&region.part(offset, ring)?, self.geometry.records());
        Ok([at(Geometry::PAIR_HEADER)?, at(Geometry::PAIR_HEADER + ring)?])
    }

    /// A client's ends of a pair, of which it takes one. A second one would break its calls, and nothing else.
    ///
    /// # Errors
    /// [`Error::Pair`].
    pub fn client_pair(&self, pair: u32) -> Result<ClientPair, Error> {
        let [submissions, completions] = self.rings(pair)?;
        Ok(ClientPair {
            submissions: Producer::new(submissions, Sequence::Stamped),
            completions: Consumer::new(completions, Sequence::Callers),
        })
    }

    /// A server's ends of a pair, of which it takes one.
    ///
    /// # Errors
    /// [`Error::Pair`].
    pub fn server_pair(&self, pair: u32) -> Result<ServerPair, Error> {
        let [submissions, completions] = self.rings(pair)?;
        Ok(ServerPair {
            submissions: Consumer::new(submissions, Sequence::Stamped),
            completions: Producer::new(completions, Sequence::Callers),
        })
    }

    /// The same of a server that goes on with a pair from there.
    ///
    /// # Errors
    /// [`Error::Pair`]; a position that cannot be.
    pub fn resume_server_pair(
        &self,
        pair: u32,
        (submissions_at, completions_at): (ConsumerPosition, ProducerPosition),
    ) -> Result<ServerPair, Error> {
        let [submissions, completions] = self.rings(pair)?;
        Ok(ServerPair {
            submissions: Consumer::resume(submissions, Sequence::Stamped, submissions_at)?,
            completions: Producer::resume(completions, Sequence::Callers, completions_at)?,
        })
    }

    /// The word on which a side of a pair waits.
    ///
    /// # Errors
    /// [`Error::Pair`].
    pub fn bell(&self, pair: u32, side: Side) -> Result<Word, Error> {
        let at = match side {
            Side::Client => CLIENT_BELL,
            Side::Server => SERVER_BELL,
        };
        Ok(self.pair(pair)?.word(at)?)
    }

    /// The word in which a client's thread says on which CPU it is, plus one.
    ///
    /// # Errors
    /// [`Error::Pair`].
    pub fn client_cpu(&self, pair: u32) -> Result<Word, Error> {
        Ok(self.pair(pair)?.word(CLIENT_CPU)?)
    }

    /// A part of the arena, of an offset and a length that the other side named. They may be anything.
    ///
    /// # Errors
    /// [`wire::ring::Error::Bounds`], with the arena's size.
    pub fn slice(&self, offset: u64, length: u64) -> Result<Region, Error> {
        let arena = self.region.part(self.geometry.arena_at(), self.geometry.arena())?;
        Ok(arena.part(offset, length)?)
    }
}

/// The highest version in both ranges.
fn common_version(a: &RangeInclusive<u32>, b: &RangeInclusive<u32>) -> Option<u32> {
    let highest = *a.end().min(b.end());
    (a.contains(&highest) && b.contains(&highest)).then_some(highest)
}
