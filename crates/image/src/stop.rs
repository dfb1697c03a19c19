//! How a caller ends work that takes long: it is asked again and again while the work goes on.
//!
//! Knows neither who wants it to end nor why.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use crate::Error;

/// Asks whether to stop; by itself it never does.
#[derive(Clone, Default)]
pub(crate) struct Stop(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Stop {
    /// Stops when `when` says so.
    pub(crate) fn when(when: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(when)))
    }

    /// Whether anybody could ever stop it.
    pub(crate) fn is_possible(&self) -> bool {
        self.0.is_some()
    }

    /// An error if it is to stop.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match &self.0 {
            Some(when) if when() => Err(Error::Stopped),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stop").field("possible", &self.is_possible()).finish()
    }
}

/// A file that is written until it is to stop.
pub(crate) struct StoppableFile<'a> {
    pub(crate) file: &'a File,
    pub(crate) stop: &'a Stop,
}

impl Write for StoppableFile<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        // The caller asks again and finds out that this was not the disk.
        self.stop.check().map_err(io::Error::other)?;
        self.file.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
