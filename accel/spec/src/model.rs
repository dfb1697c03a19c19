//! A specification whose shape and meaning have been put together and checked: what generators read.
//!
//! Plain data. Knows neither XML nor TOML, and not what is generated.

use std::collections::BTreeMap;

use crate::length::Length;

/// An API.
#[derive(Debug, Clone)]
pub struct Api {
    /// What it is called in paths and modules, such as `opencl`.
    pub name: String,
    /// What the names of its commands begin with, such as `cl`.
    pub prefix: String,
    /// Kinds of objects, in the registry's order.
    pub handles: Vec<HandleKind>,
    /// Structures that parameters point to.
    pub structs: Vec<Struct>,
    /// All commands of the core and the annotated ones of extensions: by version, then in the registry's order.
    pub commands: Vec<Command>,
}

/// A kind of objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandleKind {
    /// Its C type, such as `cl_mem`.
    pub c_type: String,
}

/// A structure in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Struct {
    /// Its C type, such as `cl_image_format`.
    pub c_type: String,
    /// Members in their order; of a union, the last one.
    pub members: Vec<(String, Element)>,
}

/// What one element of memory or a value is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Element {
    /// One byte.
    Byte,
    /// `cl_int` and what is defined as it.
    I32,
    /// `cl_uint` and what is defined as it.
    U32,
    /// `intptr_t` and what is defined as it; 64 bits.
    I64,
    /// `cl_ulong`, `size_t` and what is defined as one of them; 64 bits.
    U64,
    /// An object, by its C type.
    Handle(String),
    /// A structure, by its C type.
    Struct(String),
}

/// A command.
#[derive(Debug, Clone)]
pub struct Command {
    /// Its C name.
    pub name: String,
    /// The version of the API that brought it, or the extension.
    pub since: String,
    /// The file of annotations that has it, without its ending.
    pub group: String,
    /// Parameters in their order. A returned object or address is the last one and is called `returned`.
    pub params: Vec<Param>,
    /// How it travels.
    pub flow: Flow,
    /// Who serves it.
    pub service: Service,
    /// What a log for snapshots keeps of it.
    pub effects: Vec<Effect>,
    /// Device memory that it takes.
    pub quota: Option<Quota>,
    /// What the server compares with the state of objects, beyond what the decoder checks.
    pub checks: Vec<Check>,
    /// Of a query: which answers are objects.
    pub answers: Vec<Key>,
    /// Of a query: names and numbers of constants whose answers the client knows itself.
    pub own_answers: Vec<(String, i64)>,
}

/// A parameter, or what is returned.
#[derive(Debug, Clone)]
pub struct Param {
    /// Its C name.
    pub name: String,
    /// Its C declaration, for documents.
    pub c_text: String,
    /// Whether NULL means something.
    pub null: bool,
    /// What it is.
    pub kind: Kind,
}

/// What a parameter is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A number; `counts` if the length of another parameter follows from it.
    Scalar {
        /// Its type.
        element: Element,
        /// Whether a length is computed from it.
        counts: bool,
    },
    /// One object, by value or by a pointer to one.
    Handle {
        /// The C type.
        c_type: String,
        /// What happens to it.
        life: Life,
    },
    /// Several objects.
    Handles {
        /// The C type.
        c_type: String,
        /// What happens to them.
        life: Life,
        /// How many.
        length: Length,
    },
    /// Elements that travel with the call or its reply.
    Array {
        /// Which way.
        direction: Direction,
        /// What each is.
        element: Element,
        /// How many.
        length: Length,
    },
    /// Bytes that travel through the arena.
    Bulk {
        /// Which way.
        direction: Direction,
        /// How many bytes.
        length: Length,
    },
    /// A string that ends with a zero byte.
    Text,
    /// Several pieces of bytes, which travel through the arena one behind the other.
    Pieces {
        /// How many.
        count: Length,
    },
    /// Pairs of numbers that end with a zero; values of these keys are objects.
    Properties {
        /// What keys and values are.
        element: Element,
        /// Keys whose values are objects.
        keys: Vec<Key>,
    },
    /// Bytes of which one form is an object's handle.
    Value {
        /// How many bytes, where it is none.
        length: Length,
        /// Which objects it can be.
        c_types: Vec<String>,
    },
    /// An address in shared virtual memory.
    Svm {
        /// What happens to the allocation.
        life: Life,
    },
    /// Several of them.
    SvmList {
        /// What happens to the allocations.
        life: Life,
        /// How many.
        length: Length,
    },
    /// An address in shared virtual memory, or the client's memory, which travels through the arena.
    SvmOrBulk {
        /// Which way.
        direction: Direction,
        /// How many bytes.
        length: Length,
    },
    /// A function of the client's; a number stands for it.
    Callback {
        /// Whether it can be called more than once.
        many: bool,
    },
    /// Where the error code goes; it is every reply's own.
    Status,
    /// It never leaves the client.
    Local,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the server.
    In,
    /// From the server.
    Out,
    /// Both.
    InOut,
}

/// What a command does to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// Looks at it or changes it.
    Use,
    /// Makes it: the client names it, and it exists when the reply says so.
    Create,
    /// Makes it: the client names it and goes on, and errors are told later.
    Shadow,
    /// Tells of one that is there for as long as the connection is.
    Get,
    /// Counts one reference more; the client counts.
    Retain,
    /// Counts one less; crosses with the last one alone.
    Release,
}

/// How a command travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flow {
    /// Never: the client knows the answer.
    Local,
    /// Once: the client keeps the answer for as long as the object lives and none of these is called for it.
    Cached {
        /// Commands that change the answer.
        until: Vec<String>,
    },
    /// The client goes on.
    Async {
        /// The parameter whose queue keeps order and errors, if it is a queue's.
        queue: Option<String>,
        /// The parameter that makes the client wait when it is not zero.
        sync_if: Option<String>,
    },
    /// The client waits for the reply.
    Sync,
}

/// Who serves a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Service {
    /// What is generated.
    Generated,
    /// What is generated, around a body by hand; with the reason.
    Manual(String),
    /// The command that it is another name of.
    Alias(String),
    /// Nobody.
    Unsupported {
        /// The error that callers get.
        code: String,
        /// Its number.
        value: i64,
        /// Why.
        reason: String,
    },
}

/// What a log for snapshots keeps of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// It makes the parameter's objects.
    Creates(String),
    /// It changes the state of the parameter's object, and is repeated when that is made again.
    Changes(String),
    /// It changes the bytes of the parameter's object, which are saved themselves.
    Content(String),
    /// It drops the parameter's object; what was kept for it is needed as long as anything lives that was made with it.
    Drops(String),
    /// It needs the parameter's object and leaves it as it is.
    Uses(String),
}

/// Device memory that a command takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quota {
    /// So many bytes.
    Bytes(Length),
    /// What the back end says of the new object.
    Backend,
}

/// A comparison with the state of objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Which one.
    pub name: String,
    /// Parameters.
    pub arguments: Vec<String>,
}

/// A constant of the API behind which an object stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// The constant.
    pub name: String,
    /// Its number.
    pub value: i64,
    /// The object's C type.
    pub c_type: String,
}

impl Api {
    /// A structure by its C type.
    #[must_use]
    pub fn structure(&self, c_type: &str) -> Option<&Struct> {
        self.structs.iter().find(|found| found.c_type == c_type)
    }

    /// How many commands each group has, for splitting.
    #[must_use]
    pub fn groups(&self) -> BTreeMap<&str, Vec<&Command>> {
        let mut groups: BTreeMap<&str, Vec<&Command>> = BTreeMap::new();
        for command in &self.commands {
            groups.entry(&command.group).or_default().push(command);
        }
        groups
    }
}

impl Command {
    /// Whether anything of it ever leaves the client.
    #[must_use]
    pub fn crosses(&self) -> bool {
        self.flow != Flow::Local && matches!(self.service, Service::Generated | Service::Manual(_))
    }
}
