//! Interrupts: what a message or a command says, and what devices send them by.

mod message;
mod source;

pub(crate) use message::{Command, Message};
pub(crate) use source::Source;
