//! How requests reach the file.

use std::io;
use std::time::Duration;

use crate::request::Io;

/// A request and what one call made of it.
pub(crate) type Done<'m> = (Io<'m>, io::Result<usize>);

/// Something that carries out requests on the disk's file.
pub(crate) trait Backend<'m> {
    /// Takes a request. It may begin at once, and begins with the next [`Backend::wait`] at the latest.
    fn submit(&mut self, io: Io<'m>);

    /// Appends what is done to `done`. Waits until something is, or the driver kicks, or the worker shall stop, as long as
    /// `patience` says (`None`: for ever). Tells whether the worker shall stop, at least once.
    fn wait(&mut self, patience: Option<Duration>, done: &mut Vec<Done<'m>>) -> bool;
}
