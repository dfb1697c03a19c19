//! A progress bar on standard error, for those who wait and look. Knows nothing of what is being done.

use std::io::{self, IsTerminal, Read, Write};
use std::time::{Duration, Instant};

use crate::output::Output;

/// What is quicker needs no bar.
const QUIET: Duration = Duration::from_secs(2);

/// How often the bar moves.
const TICK: Duration = Duration::from_millis(100);

/// Width of the bar.
const WIDTH: usize = 30;

/// The bar. Dropping it removes it from the screen.
#[derive(Debug)]
pub(crate) struct Bar {
    wanted: bool,
    begun: Instant,
    shown: Option<Instant>,
}

impl Bar {
    /// A bar that will be shown if the work takes long and somebody looks.
    pub(crate) fn new(output: &Output) -> Self {
        Self {
            wanted: !output.json() && io::stderr().is_terminal(),
            begun: Instant::now(),
            shown: None,
        }
    }

    /// Shows how far it is, if it is time to.
    pub(crate) fn show(&mut self, what: &str, done: u64, total: u64) {
        let due = self.shown.map_or(self.begun + QUIET, |shown| shown + TICK);
        if self.wanted && Instant::now() >= due {
            self.shown = Some(Instant::now());
            write!(io::stderr().lock(), "\r{}\x1b[K", text(what, done, total)).unwrap_or_default();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if self.shown.is_some() {
            write!(io::stderr().lock(), "\r\x1b[K").unwrap_or_default();
        }
    }
}

/// A reader or writer whose progress is shown.
#[derive(Debug)]
pub(crate) struct Shown<R> {
    reader: R,
    bar: Bar,
    what: &'static str,
    done: u64,
    total: u64,
}

impl<R> Shown<R> {
    /// Shows how much of `total` bytes has passed.
    pub(crate) fn new(reader: R, bar: Bar, what: &'static str, total: u64) -> Self {
        Self {
            reader,
            bar,
            what,
            done: 0,
            total,
        }
    }
}

impl<R> Shown<R> {
    /// What was shown; the bar goes.
    pub(crate) fn into_inner(self) -> R {
        self.reader
    }
}

impl<W: Write> Write for Shown<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.reader.write(bytes)?;
        self.done += written as u64;
        self.bar.show(self.what, self.done, self.total);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.reader.flush()
    }
}

impl<R: Read> Read for Shown<R> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(space)?;
        self.done += read as u64;
        self.bar.show(self.what, self.done, self.total);
        Ok(read)
    }
}

fn text(what: &str, done: u64, total: u64) -> String {
    let part =
        |of: u64| usize::try_from(u128::from(done.min(total)) * u128::from(of) / u128::from(total.max(1))).unwrap_or(0);
    let filled = part(WIDTH as u64);
    format!(
        "[{}{}] {:3}% {what}",
        "#".repeat(filled),
        "-".repeat(WIDTH.saturating_sub(filled)),
        part(100)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills() {
        let at = |done, total| text("reading", done, total);
        assert_eq!(at(0, 10), format!("[{}]   0% reading", "-".repeat(30)));
        assert_eq!(at(10, 10), format!("[{}] 100% reading", "#".repeat(30)));
        assert!(at(5, 10).contains(" 50% "));
        assert!(at(1, 0).contains("  0% "));
        assert!(at(u64::MAX, u64::MAX).contains("100%"));
    }
}
