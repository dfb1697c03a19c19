//! What a client asks of its server besides an API's calls: which of its callbacks are due.
//!
//! By hand, because no registry has it. Knows no API.

use crate::call::{Call, Effect, Object, Reply};
use crate::plain::{List, Members, MembersMut, Plain};
use crate::reader::Source;
use crate::refused::Refused;
use crate::values::{Callback, Span};
use crate::writer::Writer;

/// Waits until one of the client's callbacks is due, and tells those that are. It holds up whatever comes behind it on its end of the
/// connection, so that a client has a thread and an end for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AwaitCompletions {
    /// How many it would be told at most.
    pub most: u32,
    /// How long the server may wait; nothing is told then. A server may wait for less.
    pub milliseconds: u32,
    /// Where in the arena the reply goes if it does not fit into a record.
    pub reply: Span,
}

/// A callback that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Its number.
    pub callback: Callback,
    /// What it is called with, if that is a status: of an event, its own; of a program, that of the build.
    pub status: i32,
}

impl Plain for Completion {
    const SIZE: usize = Callback::SIZE + <i32 as Plain>::SIZE;

    fn get(bytes: &[u8]) -> Self {
        let mut members = Members(bytes);
        Self {
            callback: members.next(),
            status: members.next(),
        }
    }

    fn put(&self, bytes: &mut [u8]) {
        let mut members = MembersMut(bytes);
        members.next(self.callback);
        members.next(self.status);
    }
}

impl<'a> Call<'a> for AwaitCompletions {
    const OP: u16 = 0x0001;
    type Reply<'r> = AwaitCompletionsReply<'r>;

    fn read<S: Source<'a>>(source: &mut S) -> Result<Self, Refused> {
        Ok(Self {
            most: source.count("most")?,
            milliseconds: source.value("milliseconds")?,
            reply: source.area("reply")?,
        })
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.value(self.most);
        writer.value(self.milliseconds);
        writer.area(self.reply);
    }

    fn failed(&self, status: i32) -> Self::Reply<'static> {
        AwaitCompletionsReply {
            status,
            completions: List::new(&[]),
        }
    }

    fn effects(&self, _: &mut dyn FnMut(Effect, Object)) {}

    fn spans(&self, each: &mut dyn FnMut(Span)) {
        each(self.reply);
    }
}

/// The callbacks that are due, in the order in which they became so.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AwaitCompletionsReply<'r> {
    /// The error code.
    pub status: i32,
    /// Which.
    pub completions: List<'r, Completion>,
}

impl<'r> Reply<'r, AwaitCompletions> for AwaitCompletionsReply<'r> {
    fn status(&self) -> i32 {
        self.status
    }

    fn read<S: Source<'r>>(source: &mut S, call: &AwaitCompletions) -> Result<Self, Refused> {
        Ok(Self {
            status: source.value("status")?,
            completions: source.counted(Some(u64::from(call.most)), "completions")?,
        })
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.value(self.status);
        writer.counted(&self.completions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::{Limits, Reader};

    #[test]
    fn what_is_written_is_read_as_it_was() {
        let call = AwaitCompletions {
            most: 2,
            milliseconds: 500,
            reply: Span { offset: 64, length: 36 },
        };
        let mut bytes = [0; 64];
        let mut writer = Writer::new(&mut bytes);
        call.write(&mut writer);
        let length = writer.finish().unwrap();
        let limits = Limits { arena: 100 };
        assert_eq!(
            AwaitCompletions::read(&mut Reader::new(&bytes[..length], limits)),
            Ok(call)
        );
        let completions = [1, 2].map(|number| Completion {
            callback: Callback(number),
            status: -1,
        });
        let reply = AwaitCompletionsReply {
            status: 0,
            completions: List::new(&completions),
        };
        let mut writer = Writer::new(&mut bytes);
        Reply::<AwaitCompletions>::write(&reply, &mut writer);
        let length = writer.finish().unwrap();
        assert_eq!(length, 4 + 4 + 2 * Completion::SIZE);
        let read = |call: &AwaitCompletions| {
            AwaitCompletionsReply::read(&mut Reader::new(&bytes[..length], limits), call).map(|_| ())
        };
        assert_eq!(read(&call), Ok(()));
        let fewer = AwaitCompletions { most: 1, ..call };
        assert!(matches!(read(&fewer), Err(Refused::Capacity { count: 2, most: 1, .. })));
    }
}
