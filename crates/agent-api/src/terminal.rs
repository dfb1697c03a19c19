//! The local terminal: its size, and raw mode that ends by itself. Knows no agent.

use std::env;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::Error;
use crate::message::{Tty, WinSize};

/// The terminal for a remote command: size of the local one (24 by 80 if there is none), and `TERM`.
pub fn local_tty() -> Tty {
    let size = window_size(rustix::stdio::stdin())
        .or_else(|| window_size(rustix::stdio::stdout()))
        .unwrap_or(WinSize { rows: 24, cols: 80 });
    Tty {
        size,
        term: env::var("TERM").ok(),
    }
}

/// The size of the terminal behind `fd`, if it is one and knows.
pub fn window_size(fd: impl AsFd) -> Option<WinSize> {
    let size = tcgetwinsize(fd).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some(WinSize {
        rows: size.ws_row,
        cols: size.ws_col,
    })
}

/// Raw mode; dropping it restores what was before.
#[derive(Debug)]
pub struct RawMode {
    fd: OwnedFd,
    before: Termios,
}

impl RawMode {
    /// Makes the terminal behind `fd` raw; `None` if it is no terminal.
    pub fn enter(fd: BorrowedFd<'_>) -> Result<Option<Self>, Error> {
        if !isatty(fd) {
            return Ok(None);
        }
        let before = tcgetattr(fd).map_err(Error::local("reading the terminal's mode"))?;
        let mut raw = before.clone();
        raw.make_raw();
        let fd = fd.try_clone_to_owned().map_err(|source| Error::Local {
            what: "keeping the terminal",
            source,
        })?;
        tcsetattr(&fd, OptionalActions::Drain, &raw).map_err(Error::local("making the terminal raw"))?;
        Ok(Some(Self { fd, before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // If the terminal is gone there is nothing to restore.
        let _ = tcsetattr(&self.fd, OptionalActions::Drain, &self.before);
    }
}
