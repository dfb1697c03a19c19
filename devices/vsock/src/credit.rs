//! Credit: how much each side may still send without filling the other's buffer (virtio 1.2, 5.10.6.3).
//!
//! All counters run freely and wrap at 2^32. Knows no packet queue and no socket.

use crate::packet::Header;
use crate::table::MAX_CONNECTIONS;

/// What the device promises to hold for a connection, while there are few.
pub(crate) const PLENTY: u32 = 256 << 10;

/// The same once [`FEW`] have as much: enough for a connection to work, if not at full speed.
const LITTLE: u32 = 32 << 10;

/// How many connections may have plenty.
const FEW: usize = 128;

/// The most that is ever held for a guest, as docs/threat-model.md says.
pub(crate) const MOST: u32 = 64 << 20;

const _: () = assert!(FEW * PLENTY as usize + (MAX_CONNECTIONS - FEW) * LITTLE as usize <= MOST as usize);

/// What is promised to all connections of a guest. A promise is kept for a connection's life: taking room back that
/// the guest may be using already would break connections that did nothing wrong.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    with_plenty: usize,
}

impl Budget {
    /// Room for a new connection.
    pub(crate) fn grant(&mut self) -> u32 {
        if self.with_plenty == FEW {
            return LITTLE;
        }
        self.with_plenty += 1;
        PLENTY
    }

    /// A connection with so much room is gone.
    pub(crate) fn take_back(&mut self, size: u32) {
        if size == PLENTY {
            self.with_plenty -= 1;
        }
    }
}

/// One connection's counters.
#[derive(Debug, Default)]
pub(crate) struct Credit {
    alloc: u32,
    peer_alloc: u32,
    peer_forwarded: u32,
    sent: u32,
    asked: bool,
    forwarded: u32,
    announced: u32,
}

impl Credit {
    /// From now on there is so much room for what the guest sends.
    pub(crate) fn promise(&mut self, alloc: u32) {
        self.alloc = alloc;
    }

    /// How much room there is for what the guest sends: the `buf_alloc` of a header.
    pub(crate) fn alloc(&self) -> u32 {
        self.alloc
    }

    /// Takes note of what the guest says in every header.
    pub(crate) fn heard(&mut self, header: &Header) {
        self.peer_alloc = header.buf_alloc;
        self.peer_forwarded = header.fwd_cnt;
        if self.free() > 0 {
            self.asked = false;
        }
    }

    /// How much may be sent to the guest now. A guest that claims to have forwarded more than it was sent gets nothing.
    pub(crate) fn free(&self) -> u32 {
        self.peer_alloc
            .saturating_sub(self.sent.wrapping_sub(self.peer_forwarded))
    }

    /// `count` bytes went to the guest.
    pub(crate) fn sent(&mut self, count: u32) {
        self.sent = self.sent.wrapping_add(count);
    }

    /// Whether to ask the guest for credit. True once, until it has given some: an answer of zero is not asked about
    /// again, or two sides with nothing to give would talk for ever.
    pub(crate) fn ask(&mut self) -> bool {
        self.free() == 0 && !std::mem::replace(&mut self.asked, true)
    }

    /// `count` bytes of the guest's left our buffer.
    pub(crate) fn forwarded(&mut self, count: usize) {
        // Never more than the buffer holds, so nothing is cut off.
        self.forwarded = self.forwarded.wrapping_add(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Whether the guest should hear without asking of the room it has. Of a quarter: with everything forwarded, a
    /// guest that is not told has three quarters left.
    pub(crate) fn is_news(&self) -> bool {
        let news = self.forwarded.wrapping_sub(self.announced);
        news > 0 && news >= self.alloc / 4
    }

    /// The `fwd_cnt` of a header that is about to be sent.
    pub(crate) fn announce(&mut self) -> u32 {
        self.announced = self.forwarded;
        self.forwarded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(buf_alloc: u32, fwd_cnt: u32) -> Header {
        Header {
            buf_alloc,
            fwd_cnt,
            ..Header::default()
        }
    }

    #[test]
    fn what_is_under_way_is_not_free() {
        let mut credit = Credit::default();
        assert_eq!(credit.free(), 0);
        credit.heard(&header(100, 0));
        credit.sent(70);
        assert_eq!(credit.free(), 30);
        credit.heard(&header(100, 50));
        assert_eq!(credit.free(), 80);
    }

    #[test]
    fn counters_wrap_and_lies_give_nothing() {
        let mut credit = Credit {
            sent: u32::MAX - 9,
            ..Credit::default()
        };
        credit.heard(&header(100, u32::MAX - 9));
        credit.sent(20);
        assert_eq!(credit.free(), 80);
        credit.heard(&header(100, 11));
        assert_eq!(credit.free(), 0, "more forwarded than was sent");
        credit.heard(&header(10, 5));
        assert_eq!(credit.free(), 5, "the buffer shrank under what is in it");
        credit.heard(&header(4, 5));
        assert_eq!(credit.free(), 0);
    }

    #[test]
    fn credit_is_asked_for_once() {
        let mut credit = Credit::default();
        assert!(credit.ask());
        assert!(!credit.ask());
        credit.heard(&header(0, 0));
        assert!(!credit.ask(), "the guest still has none");
        credit.heard(&header(1, 0));
        credit.sent(1);
        assert!(credit.ask());
    }

    #[test]
    fn room_is_news_in_quarters() {
        let mut credit = Credit::default();
        credit.promise(PLENTY);
        credit.forwarded(65_535);
        assert!(!credit.is_news());
        credit.forwarded(1);
        assert!(credit.is_news());
        assert_eq!(credit.announce(), 65_536);
        assert!(!credit.is_news());
    }

    #[test]
    fn the_sum_of_all_promises_is_bounded_and_nobody_gets_none() {
        let mut budget = Budget::default();
        let granted: Vec<u32> = (0..MAX_CONNECTIONS).map(|_| budget.grant()).collect();
        assert_eq!((granted[0], granted[127], granted[128]), (PLENTY, PLENTY, LITTLE));
        assert!(granted.iter().all(|&size| size >= LITTLE));
        assert!(granted.iter().sum::<u32>() <= MOST);
        for size in granted {
            budget.take_back(size);
        }
        assert_eq!(budget.grant(), PLENTY, "room that was given back is given again");
    }
}
