//! What a person sees of the steps: a line per finished step and, below, what is running now.
//!
//! On a terminal the last line is redrawn; elsewhere running steps say a word every ten seconds. With `--json` each
//! finished step is one JSON object a line. Knows names, times and last output lines, not what steps do.

use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::termios::tcgetwinsize;
use serde_json::json;

/// How often the live line is redrawn.
const REDRAW: Duration = Duration::from_millis(250);
/// How often running steps are named where there is no terminal.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// A live last line.
    Terminal,
    /// Lines only.
    Plain,
    /// One object a line.
    Json,
    /// Nothing; for tests.
    #[cfg(test)]
    Silent,
}

impl Mode {
    /// What suits standard output.
    pub(crate) fn choose(json: bool, ci: bool) -> Self {
        if json {
            Self::Json
        } else if !ci && io::stdout().is_terminal() && std::env::var("TERM").is_ok_and(|term| term != "dumb") {
            Self::Terminal
        } else {
            Self::Plain
        }
    }
}

/// The shared display. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Board {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    closed: Condvar,
}

struct State {
    mode: Mode,
    rows: Vec<Row>,
    closed: bool,
    live: bool,
}

struct Row {
    name: String,
    running: Option<Running>,
}

struct Running {
    since: Instant,
    last: String,
}

impl Board {
    /// A board for steps with these names; starts its ticker.
    pub(crate) fn new(mode: Mode, names: &[&str]) -> Result<Self> {
        let board = Self::without_ticker(mode, names);
        let ticking = board.clone();
        let period = if mode == Mode::Terminal { REDRAW } else { HEARTBEAT };
        if matches!(mode, Mode::Terminal | Mode::Plain) {
            thread::Builder::new()
                .name("display".into())
                .spawn(move || ticking.tick(period))?;
        }
        Ok(board)
    }

    fn without_ticker(mode: Mode, names: &[&str]) -> Self {
        let rows = names
            .iter()
            .map(|name| Row {
                name: (*name).to_owned(),
                running: None,
            })
            .collect();
        let state = Mutex::new(State {
            mode,
            rows,
            closed: false,
            live: false,
        });
        Self {
            shared: Arc::new(Shared {
                state,
                closed: Condvar::new(),
            }),
        }
    }

    /// A board that shows nothing.
    #[cfg(test)]
    pub(crate) fn silent(steps: usize) -> Self {
        Self::without_ticker(Mode::Silent, &vec!["step"; steps])
    }

    /// A step begins.
    pub(crate) fn begin(&self, index: usize) {
        let mut state = self.lock();
        state.rows[index].running = Some(Running {
            since: Instant::now(),
            last: String::new(),
        });
    }

    /// A running step has said something.
    pub(crate) fn progress(&self, index: usize, line: &str) {
        let line = line.trim();
        if let Some(running) = self.lock().rows[index].running.as_mut()
            && !line.is_empty()
        {
            running.last = plain(line);
        }
    }

    /// A step is over; `result` is a word such as `ok`, with `detail` after the time.
    pub(crate) fn end(&self, index: usize, result: &str, seconds: f64, detail: &str) {
        let mut state = self.lock();
        state.rows[index].running = None;
        state.erase_live();
        let total = state.rows.len();
        let name = &state.rows[index].name;
        match state.mode {
            Mode::Terminal | Mode::Plain => {
                let width = total.to_string().len();
                let place = format!("[{:>width$}/{total}]", index + 1);
                let dots = ".".repeat(24_usize.saturating_sub(name.chars().count()).max(2));
                let gap = if detail.is_empty() { "" } else { "  " };
                state.print(&format!(
                    "{place} {name} {dots} {result:<10} {seconds:>7.1} s{gap}{detail}"
                ));
            }
            Mode::Json => {
                let object = json!({"step": name, "result": result, "seconds": seconds, "detail": detail});
                state.print(&object.to_string());
            }
            #[cfg(test)]
            Mode::Silent => {}
        }
        state.draw_live();
    }

    /// Prints lines for a person, above the live line; a machine does not get them.
    pub(crate) fn note(&self, text: &str) {
        let mut state = self.lock();
        state.erase_live();
        if matches!(state.mode, Mode::Terminal | Mode::Plain) {
            state.print(text);
        }
        state.draw_live();
    }

    /// Prints one object for a machine; a person does not get it.
    pub(crate) fn object(&self, value: &serde_json::Value) {
        let state = self.lock();
        if state.mode == Mode::Json {
            state.print(&value.to_string());
        }
    }

    /// Erases the live line and ends the ticker.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.erase_live();
        state.closed = true;
        self.shared.closed.notify_all();
    }

    fn tick(&self, period: Duration) {
        let mut state = self.lock();
        loop {
            let waited = self.shared.closed.wait_timeout(state, period);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.closed {
                return;
            }
            match state.mode {
                Mode::Terminal => {
                    state.erase_live();
                    state.draw_live();
                }
                _ => state.heartbeat(),
            }
        }
    }

    /// A thread that panicked while it held the lock left whole rows behind; the display goes on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn running(&self) -> impl Iterator<Item = (&str, &Running)> {
        self.rows
            .iter()
            .filter_map(|row| row.running.as_ref().map(|running| (row.name.as_str(), running)))
    }

    fn heartbeat(&self) {
        let lines: Vec<_> = self
            .running()
            .filter(|(_, running)| running.since.elapsed() + REDRAW >= HEARTBEAT)
            .map(|(name, running)| {
                format!(
                    "      {name}: {} s: {}",
                    running.since.elapsed().as_secs(),
                    running.last
                )
            })
            .map(|line| cut(&line, 160))
            .collect();
        if !lines.is_empty() {
            self.print(&lines.join("\n"));
        }
    }

    fn draw_live(&mut self) {
        if self.mode != Mode::Terminal || self.closed {
            return;
        }
        let count = self.running().count();
        if count == 0 {
            return;
        }
        let columns = tcgetwinsize(io::stdout())
            .map_or(80, |size| usize::from(size.ws_col))
            .max(20);
        let share = (columns - 1) / count;
        let line: String = self
            .running()
            .map(|(name, running)| format!("{name} {} s {} ", running.since.elapsed().as_secs(), running.last))
            .map(|part| format!("{:<share$}", cut(&part, share)))
            .collect();
        write_out(&format!("\r{}", cut(&line, columns - 1)));
        self.live = true;
    }

    fn erase_live(&mut self) {
        if self.live {
            write_out("\r\x1b[2K");
            self.live = false;
        }
    }

    fn print(&self, text: &str) {
        write_out(&format!("{text}\n"));
    }
}

/// Standard output may be a pipe that was closed (`| head`); the work goes on, so a failed write is dropped here.
fn write_out(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn cut(text: &str, columns: usize) -> String {
    text.chars().take(columns).collect()
}

/// Without escape sequences and control characters, which would move the cursor of the live line.
fn plain(line: &str) -> String {
    let mut chars = line.chars().peekable();
    let mut kept = String::new();
    while let Some(char) = chars.next() {
        if char == '\x1b' && chars.peek() == Some(&'[') {
            // A CSI sequence ends with a byte from '@' to '~'; the '[' after ESC is not that byte.
            chars.next();
            for next in chars.by_ref() {
                if ('@'..='~').contains(&next) {
                    break;
                }
            }
        } else if !char.is_control() {
            kept.push(char);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_do_not_reach_the_live_line() {
        assert_eq!(
            plain("\x1b[1m\x1b[32m   Compiling\x1b[0m base\t1"),
            "   Compiling base1"
        );
        assert_eq!(plain("\x1b"), "");
    }

    #[test]
    fn cutting_counts_characters_not_bytes() {
        assert_eq!(cut("äöü", 2), "äö");
    }
}
