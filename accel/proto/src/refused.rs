//! Why bytes are no call, and what does not fit.
//!
//! Knows no call: the names of parameters come with the errors.

/// Bytes of the other side that are refused. Nothing was read beyond them, and nothing was allocated for them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Flags that mean nothing.
    #[error("the record has the flags {0:#06x}, of which some are unknown; both sides must be of one version")]
    Flags(u16),
    /// A number that is no call's.
    #[error("there is no call {0:#06x}; both sides must be of one version")]
    Op(u16),
    /// More bytes of arguments than a record or a message can have.
    #[error("the record says {length} bytes, and {most} is the most")]
    Length {
        /// What it says.
        length: u32,
        /// The most.
        most: usize,
    },
    /// Something is outside of the arena.
    #[error("{what} is at {offset:#x} and {length} bytes long, outside of the arena's {arena}")]
    Arena {
        /// The parameter.
        what: &'static str,
        /// Where it begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// The arena's size.
        arena: u64,
    },
    /// The bytes end too early.
    #[error("{what} needs {needs} bytes, and {has} are left")]
    Short {
        /// The parameter.
        what: &'static str,
        /// What it needs.
        needs: u64,
        /// What is left.
        has: usize,
    },
    /// Bytes are left over.
    #[error("{0} bytes are left over")]
    Trailing(usize),
    /// A length that no number can hold.
    #[error("the length of {what} is beyond 64 bits")]
    Overflow {
        /// The parameter.
        what: &'static str,
    },
    /// Parameters are said to be there that the call has not.
    #[error("the parameters that are there are {0:#x}, of which some do not exist")]
    Present(u32),
    /// A string without its end, or with two.
    #[error("{what} is no string that ends with its only zero")]
    Text {
        /// The parameter.
        what: &'static str,
    },
    /// A form that the parameter cannot have.
    #[error("{what} has no form {tag}")]
    Form {
        /// The parameter.
        what: &'static str,
        /// The form.
        tag: u32,
    },
    /// A reply with more than was asked for.
    #[error("{what} has {count} elements, and {most} were asked for")]
    Capacity {
        /// The parameter.
        what: &'static str,
        /// How many there are.
        count: u64,
        /// How many were asked for.
        most: u64,
    },
}

/// What was to be written is longer than the place for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needs} bytes do not fit; put them into a message of that length")]
pub struct NoRoom {
    /// How long all of it is.
    pub needs: usize,
}
