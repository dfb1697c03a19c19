//! Credit: how much each side may still send without filling the other's buffer (virtio 1.2, 5.10.6.3).
//!
//! All counters run freely and wrap at 2^32. Knows no packet queue and no socket.

use crate::packet::Header;

/// What the device promises to hold for each connection.
pub(crate) const BUF_ALLOC: u32 = 256 << 10;

/// The guest is told of room without being asked once so much of it is news. A quarter: with everything forwarded,
/// a guest that is not told has three quarters left, more than any packet.
const NEWS: u32 = BUF_ALLOC / 4;

/// One connection's counters.
#[derive(Debug, Default)]
pub(crate) struct Credit {
    peer_alloc: u32,
    peer_forwarded: u32,
    sent: u32,
    asked: bool,
    forwarded: u32,
    announced: u32,
}

impl Credit {
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

    /// Whether the guest should hear of the room it has.
    pub(crate) fn is_news(&self) -> bool {
        self.forwarded.wrapping_sub(self.announced) >= NEWS
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
        credit.forwarded(65_535);
        assert!(!credit.is_news());
        credit.forwarded(1);
        assert!(credit.is_news());
        assert_eq!(credit.announce(), 65_536);
        assert!(!credit.is_news());
    }
}
