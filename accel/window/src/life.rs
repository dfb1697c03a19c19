//! Whether the server that a client has met is still there, by a look at the header. Knows nothing of sockets.

use std::sync::atomic::Ordering;

use wire::ring::Word;

/// What of the word of a robust futex is a thread's number (Linux, `FUTEX_TID_MASK`).
pub(crate) const THREAD_MASK: u32 = 0x3fff_ffff;

/// One server's time, as a client sees it: two loads, no system call. What a hostile server writes there ends this time or does not, and
/// nothing else.
#[derive(Clone, Debug)]
pub struct Life {
    pub(crate) epoch: Word,
    pub(crate) holder: Word,
    pub(crate) met: u32,
}

impl Life {
    /// The server that was met holds the window no longer: it has ended, or another has come. Stays so.
    pub fn is_over(&self) -> bool {
        self.holder.load(Ordering::Acquire) & THREAD_MASK == 0 || self.epoch.load(Ordering::Relaxed) != self.met
    }

    /// Which server it is of all that had the window.
    pub fn epoch(&self) -> u32 {
        self.met
    }
}
