//! The 64 bytes that a ring carries: a call or a reply, or where in the arena one is.
//!
//! ```text
//! 0   op      u16   which call
//! 2   flags   u16   MESSAGE, REPLY, WAITS
//! 4   length  u32   bytes of the arguments
//! 8   seq     u64   the client's number of the call, which its reply repeats
//! 16  48 bytes      the arguments; with MESSAGE, their offset in the arena (u64), and zeroes
//! ```
//!
//! All numbers are little-endian. Knows neither rings, nor what a call means.

use crate::call::{Call, Reply};
use crate::plain::Plain;
use crate::reader::Limits;
use crate::refused::{NoRoom, Refused};
use crate::values::Span;
use crate::writer::Writer;

/// Bytes of a record.
pub const RECORD: usize = 64;
/// Bytes of arguments that a record has itself.
pub const INLINE: usize = 48;
/// Bytes of the longest message: what the server has to have for a copy of one.
pub const MESSAGE: usize = 64 << 10;

const HEADER: usize = RECORD - INLINE;

/// What a record says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags(u16);

impl Flags {
    /// The arguments are in the arena.
    const MESSAGE: u16 = 1;
    /// From the server.
    const REPLY: u16 = 2;
    /// The client waits for the reply.
    const WAITS: u16 = 4;
    const ALL: u16 = Self::MESSAGE | Self::REPLY | Self::WAITS;

    /// Whether it is from the server.
    #[must_use]
    pub const fn is_reply(self) -> bool {
        self.0 & Self::REPLY != 0
    }

    /// Whether the client waits for the reply.
    #[must_use]
    pub const fn waits(self) -> bool {
        self.0 & Self::WAITS != 0
    }
}

/// A record, as somebody has copied it out of the ring or will copy it in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record([u8; RECORD]);

/// Where a record's arguments are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arguments<'a> {
    /// In the record.
    Inline(&'a [u8]),
    /// In the arena, at most [`MESSAGE`] bytes; to be copied before they are decoded.
    Message(Span),
}

impl Record {
    /// As it was copied out of the ring.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; RECORD]) -> Self {
        Self(bytes)
    }

    /// To be copied into the ring.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; RECORD] {
        &self.0
    }

    /// A call whose arguments fit.
    ///
    /// # Errors
    ///
    /// They do not: write them into a message, and take [`Self::call_in`].
    pub fn call<'a, C: Call<'a>>(call: &C, seq: u64, waits: bool) -> Result<Self, NoRoom> {
        let mut arguments = [0; INLINE];
        let mut writer = Writer::new(&mut arguments);
        call.write(&mut writer);
        let length = writer.finish()?;
        Ok(Self::new(C::OP, Self::waiting(waits), length, seq, &arguments))
    }

    /// A call whose arguments have been encoded already, if they fit.
    ///
    /// # Errors
    ///
    /// They do not: copy them into a message, and take [`Self::call_in`].
    pub fn encoded_call<'a, C: Call<'a>>(encoded: &[u8], seq: u64, waits: bool) -> Result<Self, NoRoom> {
        Self::encoded(C::OP, Self::waiting(waits), encoded, seq)
    }

    /// A call whose arguments have been written into the arena.
    #[must_use]
    pub fn call_in<'a, C: Call<'a>>(message: Span, seq: u64, waits: bool) -> Self {
        Self::in_arena(C::OP, Self::waiting(waits), message, seq)
    }

    /// The reply to a call, if it fits.
    ///
    /// # Errors
    ///
    /// It does not: write it to where the call says (`reply`), and take [`Self::reply_in`].
    pub fn reply<'a, 'r, C: Call<'a>>(reply: &C::Reply<'r>, seq: u64) -> Result<Self, NoRoom> {
        let mut arguments = [0; INLINE];
        let mut writer = Writer::new(&mut arguments);
        Reply::<C>::write(reply, &mut writer);
        let length = writer.finish()?;
        Ok(Self::new(C::OP, Flags::REPLY, length, seq, &arguments))
    }

    /// A reply that has been written into the arena.
    #[must_use]
    pub fn reply_in<'a, C: Call<'a>>(message: Span, seq: u64) -> Self {
        Self::in_arena(C::OP, Flags::REPLY, message, seq)
    }

    /// A reply that has been encoded already, by its call's number, if it fits.
    ///
    /// # Errors
    ///
    /// It does not: write it to where the call says (`reply`), and take [`Self::encoded_reply_in`].
    pub fn encoded_reply(op: u16, encoded: &[u8], seq: u64) -> Result<Self, NoRoom> {
        Self::encoded(op, Flags::REPLY, encoded, seq)
    }

    fn encoded(op: u16, flags: u16, encoded: &[u8], seq: u64) -> Result<Self, NoRoom> {
        let mut arguments = [0; INLINE];
        let place = arguments.get_mut(..encoded.len());
        place.ok_or(NoRoom { needs: encoded.len() })?.copy_from_slice(encoded);
        Ok(Self::new(op, flags, encoded.len(), seq, &arguments))
    }

    /// A reply that has been encoded into the arena, by its call's number.
    #[must_use]
    pub fn encoded_reply_in(op: u16, message: Span, seq: u64) -> Self {
        Self::in_arena(op, Flags::REPLY, message, seq)
    }

    const fn waiting(waits: bool) -> u16 {
        if waits { Flags::WAITS } else { 0 }
    }

    fn in_arena(op: u16, flags: u16, message: Span, seq: u64) -> Self {
        let mut arguments = [0; INLINE];
        message.offset.put(&mut arguments);
        // A message that is too long for the number is too long for the reader, too.
        let length = usize::try_from(message.length).unwrap_or(usize::MAX);
        Self::new(op, flags | Flags::MESSAGE, length, seq, &arguments)
    }

    fn new(op: u16, flags: u16, length: usize, seq: u64, arguments: &[u8; INLINE]) -> Self {
        let mut bytes = [0; RECORD];
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        bytes[0..2].copy_from_slice(&op.to_le_bytes());
        bytes[2..4].copy_from_slice(&flags.to_le_bytes());
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes[8..HEADER].copy_from_slice(&seq.to_le_bytes());
        bytes[HEADER..].copy_from_slice(arguments);
        Self(bytes)
    }

    /// Which call.
    #[must_use]
    pub fn op(&self) -> u16 {
        u16::from_le_bytes([self.0[0], self.0[1]])
    }

    /// The client's number of the call.
    #[must_use]
    pub fn seq(&self) -> u64 {
        u64::get(&self.0[8..])
    }

    /// What it says of itself.
    ///
    /// # Errors
    ///
    /// Flags that mean nothing.
    pub fn flags(&self) -> Result<Flags, Refused> {
        let flags = u16::from_le_bytes([self.0[2], self.0[3]]);
        if flags & !Flags::ALL == 0 {
            Ok(Flags(flags))
        } else {
            Err(Refused::Flags(flags))
        }
    }

    /// Where its arguments are.
    ///
    /// # Errors
    ///
    /// Unknown flags, a length that a record or a message cannot have, a message outside of the arena.
    pub fn arguments(&self, limits: Limits) -> Result<Arguments<'_>, Refused> {
        let length = u32::get(&self.0[4..]);
        let arguments = &self.0[HEADER..];
        if self.flags()?.0 & Flags::MESSAGE == 0 {
            let inline = usize::try_from(length).ok().and_then(|length| arguments.get(..length));
            let most = INLINE;
            return Ok(Arguments::Inline(inline.ok_or(Refused::Length { length, most })?));
        }
        if u64::from(length) > MESSAGE as u64 {
            let most = MESSAGE;
            return Err(Refused::Length { length, most });
        }
        let span = limits.span(u64::get(arguments), length.into(), "the message")?;
        Ok(Arguments::Message(span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { arena: 1 << 20 };

    fn with(flags: u16, length: u32, offset: u64) -> Record {
        let mut arguments = [7; INLINE];
        offset.put(&mut arguments);
        Record::new(0x1234, flags, length as usize, 0x0102_0304_0506_0708, &arguments)
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let record = with(Flags::WAITS, 8, 5);
        let bytes = record.as_bytes();
        assert_eq!(bytes[..16], [0x34, 0x12, 4, 0, 8, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[16..25], [5, 0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!((record.op(), record.seq()), (0x1234, 0x0102_0304_0506_0708));
        let flags = record.flags().unwrap();
        assert!(flags.waits() && !flags.is_reply());
        assert_eq!(Record::from_bytes(*bytes), record);
    }

    #[test]
    fn arguments_are_where_the_record_says_and_never_elsewhere() {
        assert_eq!(
            with(0, 48, 5)
                .arguments(LIMITS)
                .map(|found| matches!(found, Arguments::Inline(bytes) if bytes.len() == 48)),
            Ok(true)
        );
        assert_eq!(
            with(0, 49, 5).arguments(LIMITS),
            Err(Refused::Length { length: 49, most: 48 })
        );
        assert_eq!(with(8, 0, 0).arguments(LIMITS), Err(Refused::Flags(8)));
        let longest = u32::try_from(MESSAGE).unwrap();
        let span = |offset| Span {
            offset,
            length: longest.into(),
        };
        let end = LIMITS.arena - MESSAGE as u64;
        assert_eq!(
            with(1, longest, end).arguments(LIMITS),
            Ok(Arguments::Message(span(end)))
        );
        assert!(matches!(
            with(1, longest, end + 1).arguments(LIMITS),
            Err(Refused::Arena { .. })
        ));
        assert!(matches!(
            with(1, longest, u64::MAX).arguments(LIMITS),
            Err(Refused::Arena { .. })
        ));
        assert!(matches!(
            with(1, longest + 1, 0).arguments(LIMITS),
            Err(Refused::Length { .. })
        ));
    }
}
