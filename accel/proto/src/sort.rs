//! The kinds of OpenCL's objects as values, for who has a table for each. Knows no object.

use crate::handle::Kind;
use crate::opencl::{CommandQueue, Context, Device, Event, Kernel, Mem, Platform, Program, Sampler};

/// A kind of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sort {
    /// `cl_platform_id`.
    Platform,
    /// `cl_device_id`.
    Device,
    /// `cl_context`.
    Context,
    /// `cl_command_queue`.
    CommandQueue,
    /// `cl_mem`.
    Mem,
    /// `cl_program`.
    Program,
    /// `cl_kernel`.
    Kernel,
    /// `cl_event`.
    Event,
    /// `cl_sampler`.
    Sampler,
}

impl Sort {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Platform,
        Self::Device,
        Self::Context,
        Self::CommandQueue,
        Self::Mem,
        Self::Program,
        Self::Kernel,
        Self::Event,
        Self::Sampler,
    ];

    /// By the type in C.
    #[must_use]
    pub fn of(c_type: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|sort| sort.c_type() == c_type)
    }

    /// The type in C.
    #[must_use]
    pub const fn c_type(self) -> &'static str {
        match self {
            Self::Platform => Platform::C_TYPE,
            Self::Device => Device::C_TYPE,
            Self::Context => Context::C_TYPE,
            Self::CommandQueue => CommandQueue::C_TYPE,
            Self::Mem => Mem::C_TYPE,
            Self::Program => Program::C_TYPE,
            Self::Kernel => Kernel::C_TYPE,
            Self::Event => Event::C_TYPE,
            Self::Sampler => Sampler::C_TYPE,
        }
    }

    /// The error code for what is no object of this kind (cl.h).
    #[must_use]
    pub const fn invalid(self) -> i32 {
        match self {
            Self::Platform => -32,
            Self::Device => -33,
            Self::Context => -34,
            Self::CommandQueue => -36,
            Self::Mem => -38,
            Self::Sampler => -41,
            Self::Program => -44,
            Self::Kernel => -48,
            Self::Event => -58,
        }
    }
}

/// A kind that is one of them.
pub trait Sorted: Kind {
    /// Which.
    const SORT: Sort;
}

macro_rules! sorted {
    ($($kind:ident),*) => {
        $(impl Sorted for $kind {
            const SORT: Sort = Sort::$kind;
        })*
    };
}

sorted!(
    Platform,
    Device,
    Context,
    CommandQueue,
    Mem,
    Program,
    Kernel,
    Event,
    Sampler
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_found_by_its_type_and_stands_at_its_number() {
        for (number, sort) in Sort::ALL.into_iter().enumerate() {
            assert_eq!((sort as usize, Sort::of(sort.c_type())), (number, Some(sort)));
        }
        assert_eq!(Sort::of("cl_lamp"), None);
        assert_eq!(<Mem as Sorted>::SORT.c_type(), Mem::C_TYPE);
    }
}
