//! The runtime's functions by hand, by what they are about.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which read and write where their callers say"
)]
#![allow(non_snake_case, clippy::too_many_arguments, reason = "names and parameters are C's")]

mod device;
mod error;
mod launch;
mod library;
mod memory;
mod rows;
mod stream;
mod symbol;

pub(crate) use self::device::*;
pub(crate) use self::error::*;
pub(crate) use self::launch::*;
pub(crate) use self::library::*;
pub(crate) use self::memory::*;
pub(crate) use self::rows::*;
pub(crate) use self::stream::*;
pub(crate) use self::symbol::*;
