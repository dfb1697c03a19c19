//! What generated code has in common: calls, replies, all calls of an API as one type, and what is known of each command.
//!
//! Knows no API.

use crate::handle::{AnyHandle, Handle, Kind};
use crate::plain::{List, Plain};
use crate::reader::Source;
use crate::refused::Refused;
use crate::values::{Memory, Span, SvmAddress, Value};
use crate::writer::Writer;

/// A command with its arguments.
pub trait Call<'a>: Sized {
    /// Its number on the wire, which is this layout's for ever (`accel/spec/ops.lock`).
    const OP: u16;

    /// What comes back.
    type Reply<'r>: Reply<'r, Self>;

    /// Reads the arguments.
    ///
    /// # Errors
    ///
    /// What is none of this command.
    fn read<S: Source<'a>>(source: &mut S) -> Result<Self, Refused>;

    /// Writes the arguments.
    fn write(&self, writer: &mut Writer<'_>);

    /// The reply of one that has failed: an error code of the API, and nothing of what was asked for.
    fn failed(&self, status: i32) -> Self::Reply<'static>;

    /// What it does to which object, for the log of snapshots.
    fn effects(&self, each: &mut dyn FnMut(Effect, Object));

    /// What of the arena it reads or writes.
    fn spans(&self, each: &mut dyn FnMut(Span));
}

/// The results of a call.
pub trait Reply<'r, C>: Sized {
    /// The error code of the API; zero for none.
    fn status(&self) -> i32;

    /// Reads the results of this call; no list is longer than what the call has asked for.
    ///
    /// # Errors
    ///
    /// What is no reply to it.
    fn read<S: Source<'r>>(source: &mut S, call: &C) -> Result<Self, Refused>;

    /// Writes the results.
    fn write(&self, writer: &mut Writer<'_>);
}

/// The reply of a command that gives nothing but its error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// The error code.
    pub status: i32,
}

impl<'r, C> Reply<'r, C> for Done {
    fn status(&self) -> i32 {
        self.status
    }

    fn read<S: Source<'r>>(source: &mut S, _: &C) -> Result<Self, Refused> {
        let status = source.value("status")?;
        Ok(Self { status })
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.value(self.status);
    }
}

/// What a command does to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Makes it: the call is logged as its maker.
    Creates,
    /// Changes its state: the call is logged behind its maker.
    Changes,
    /// Changes its bytes, which are saved themselves.
    Content,
    /// Drops it. What is logged of it is needed as long as anything lives that was made with it.
    Drops,
    /// Needs it, and leaves it as it is: whatever the call makes or changes is made again after it.
    Uses,
}

/// An object that something happens to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    /// By its handle; one that is NULL is left out.
    Handle(AnyHandle),
    /// An allocation of shared virtual memory, by a place in it.
    Svm(SvmAddress),
}

/// Something happens to one object.
pub(crate) fn touch<T: Touched>(each: &mut dyn FnMut(Effect, Object), effect: Effect, one: T) {
    if let Some(object) = one.object() {
        each(effect, object);
    }
}

/// The same to several.
pub(crate) fn touch_all<T: Touched>(each: &mut dyn FnMut(Effect, Object), effect: Effect, all: List<'_, T>) {
    all.iter().for_each(|one| touch(each, effect, one));
}

/// The same to memory, unless it is the client's own.
pub(crate) fn touch_memory(each: &mut dyn FnMut(Effect, Object), effect: Effect, memory: Memory) {
    if let Memory::Svm(address) = memory {
        touch(each, effect, address);
    }
}

/// The same to what a value is, if that is an object.
pub(crate) fn touch_value(each: &mut dyn FnMut(Effect, Object), effect: Effect, value: Value<'_>) {
    if let Value::Object(object) = value
        && object.raw != 0
    {
        each(effect, Object::Handle(object));
    }
}

/// Something that names an object.
pub(crate) trait Touched: Plain {
    /// Which; nothing if it is NULL.
    fn object(self) -> Option<Object>;
}

impl<K: Kind> Touched for Handle<K> {
    fn object(self) -> Option<Object> {
        (!self.is_null()).then(|| Object::Handle(self.any()))
    }
}

impl Touched for SvmAddress {
    fn object(self) -> Option<Object> {
        (self != Self::NULL).then_some(Object::Svm(self))
    }
}

/// How a command travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Never leaves the client.
    Local,
    /// Asked for once; answers that are errors are not kept.
    Cached {
        /// Commands after which the answer has to be asked for again.
        until: &'static [&'static str],
    },
    /// The client goes on.
    Async {
        /// The parameter whose queue keeps order and errors, if there is one.
        queue: Option<&'static str>,
        /// The parameter that makes the client wait when it is not zero.
        sync_if: Option<&'static str>,
    },
    /// The client waits.
    Sync,
}

/// Who serves a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// What is generated.
    Generated,
    /// A body by hand, on one side at least.
    ByHand,
    /// Another command, of which this is another name.
    As(&'static str),
    /// Nobody; callers get this code.
    No(i32),
}

/// What device memory a command takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// None.
    Nothing,
    /// The product of these parameters, in bytes.
    Bytes(&'static [&'static str]),
    /// What the back end says of the new object.
    Backend,
}

/// What is known of a command besides its layout. Parameters are named as in C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Its C name.
    pub name: &'static str,
    /// The version or the extension that brought it.
    pub since: &'static str,
    /// Its number on the wire, if it ever crosses.
    pub op: Option<u16>,
    /// How it travels.
    pub flow: Flow,
    /// Who serves it.
    pub service: Service,
    /// What it does to the objects of which parameters.
    pub effects: &'static [(Effect, &'static str)],
    /// What it takes of the quota.
    pub quota: Quota,
    /// What the server compares with objects' states: a name, and parameters.
    pub checks: &'static [(&'static str, &'static [&'static str])],
    /// Constants whose answers, and keys whose values, are objects of a C type.
    pub objects: &'static [(i64, &'static str)],
    /// Constants whose answers the client knows itself.
    pub own_answers: &'static [i64],
}

/// All calls of an API as one type, for whoever takes what comes. One line for each: its number, its name, its type, and its reply's.
macro_rules! calls {
    ($($op:literal $name:ident $call:ty, $reply:ty;)*) => {
        /// Any call.
        #[derive(Debug, Clone, PartialEq)]
        pub enum AnyCall<'a> {
            $(#[doc = concat!("`", stringify!($name), "`.")] $name($call),)*
        }

        /// Any reply.
        #[derive(Debug, Clone, PartialEq)]
        pub enum AnyReply<'a> {
            $(#[doc = concat!("Of `", stringify!($name), "`.")] $name($reply),)*
        }

        /// The numbers of all calls.
        pub const OPS: &[u16] = &[$($op),*];

        impl<'a> AnyCall<'a> {
            /// Decodes a call: the server's way in. `bytes` are a copy of a record's or a message's arguments.
            ///
            /// # Errors
            ///
            /// A number that is no call's, and bytes that are not exactly its arguments.
            pub fn decode(op: u16, bytes: &'a [u8], limits: $crate::Limits) -> Result<Self, $crate::Refused> {
                let mut reader = $crate::Reader::new(bytes, limits);
                let call = Self::read(op, &mut reader)?;
                reader.finish()?;
                Ok(call)
            }

            /// Reads a call from anything.
            ///
            /// # Errors
            ///
            /// A number that is no call's, and what is none of its arguments.
            pub fn read<S: $crate::Source<'a>>(op: u16, source: &mut S) -> Result<Self, $crate::Refused> {
                match op {
                    $($op => <$call as $crate::Call<'a>>::read(source).map(Self::$name),)*
                    _ => Err($crate::Refused::Op(op)),
                }
            }

            /// Writes it.
            pub fn write(&self, writer: &mut $crate::Writer<'_>) {
                match self {
                    $(Self::$name(call) => $crate::Call::write(call, writer),)*
                }
            }

            /// Its number.
            #[must_use]
            pub fn op(&self) -> u16 {
                match self {
                    $(Self::$name(_) => <$call as $crate::Call<'a>>::OP,)*
                }
            }

            /// The reply of one that has failed.
            #[must_use]
            pub fn failed(&self, status: i32) -> AnyReply<'static> {
                match self {
                    $(Self::$name(call) => AnyReply::$name($crate::Call::failed(call, status)),)*
                }
            }

            /// What it does to which object.
            pub fn effects(&self, each: &mut dyn FnMut($crate::Effect, $crate::Object)) {
                match self {
                    $(Self::$name(call) => $crate::Call::effects(call, each),)*
                }
            }

            /// What of the arena it reads or writes.
            pub fn spans(&self, each: &mut dyn FnMut($crate::Span)) {
                match self {
                    $(Self::$name(call) => $crate::Call::spans(call, each),)*
                }
            }

            /// Decodes its reply: the client's way in.
            ///
            /// # Errors
            ///
            /// Bytes that are not exactly a reply to it.
            pub fn decode_reply<'r>(&self, bytes: &'r [u8], limits: $crate::Limits) -> Result<AnyReply<'r>, $crate::Refused> {
                let mut reader = $crate::Reader::new(bytes, limits);
                let reply = self.read_reply(&mut reader)?;
                reader.finish()?;
                Ok(reply)
            }

            /// Reads its reply from anything.
            ///
            /// # Errors
            ///
            /// What is no reply to it.
            pub fn read_reply<'r, S: $crate::Source<'r>>(&self, source: &mut S) -> Result<AnyReply<'r>, $crate::Refused> {
                match self {
                    $(Self::$name(call) => $crate::Reply::read(source, call).map(AnyReply::$name),)*
                }
            }
        }

        impl<'a> AnyReply<'a> {
            /// Writes it.
            pub fn write(&self, writer: &mut $crate::Writer<'_>) {
                match self {
                    $(Self::$name(reply) => $crate::Reply::<$call>::write(reply, writer),)*
                }
            }

            /// Its error code; zero for none.
            #[must_use]
            pub fn status(&self) -> i32 {
                match self {
                    $(Self::$name(reply) => $crate::Reply::<$call>::status(reply),)*
                }
            }
        }
    };
}

pub(crate) use calls;
