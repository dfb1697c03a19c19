//! The agent's protocol from a client's side, without threads: one connection ([`Channel`]) and a command on it ([`Listener`],
//! [`Sender`]). What the
//! agent does is said where its messages are, in `agent-api`. Bounded in size and time: what comes from a guest is never trusted.

mod channel;
mod command;
mod reach;

pub(crate) use channel::{ANSWER_LIMIT, Channel, Frame, WRITE_LIMIT, failed, unexpected};
pub(crate) use command::{Happening, Listener, Sender};
pub(crate) use reach::Reach;
