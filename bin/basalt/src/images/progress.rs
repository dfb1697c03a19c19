//! How a pull or push goes on, for people: a line for each layer that is through and, on a terminal, below them one that
//! moves for each that is on its way. Knows nothing of registries but what they tell.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base::ByteSize;
use registry::{BlobState, Progress};

use super::{phase_name, short_digest};
use crate::output::Output;

/// How often the lines move.
const TICK: Duration = Duration::from_millis(100);

/// The steps of one pull or push.
pub(crate) struct Steps {
    output: Output,
    tell: bool,
    terminal: bool,
    live: Mutex<Live>,
}

/// What is on its way.
struct Live {
    /// What has happened to a layer that is through.
    moved: &'static str,
    blobs: Vec<Blob>,
    converting: Option<image::Progress>,
    shown: Option<Instant>,
    /// Lines on the terminal that will be drawn anew.
    lines: usize,
}

struct Blob {
    digest: String,
    state: BlobState,
    done: u64,
    total: u64,
}

impl Steps {
    /// Steps that are told if `tell`, and never to machines; `moved` is what has happened to a layer that is through.
    pub(crate) fn new(output: &Output, moved: &'static str, tell: bool) -> Self {
        Self {
            output: *output,
            tell: tell && !output.json(),
            terminal: io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb"),
            live: Mutex::new(Live::new(moved)),
        }
    }

    /// Shows a step. Called by several threads.
    pub(crate) fn show(&self, step: Progress) {
        if !self.tell {
            return;
        }
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        let news = live.take(step);
        let due = live.shown.is_none_or(|shown| shown.elapsed() >= TICK);
        if self.terminal && (due || news.is_some()) {
            draw(&live.erasure());
        }
        if let Some(line) = &news {
            self.output.note(line);
        }
        if self.terminal && (due || news.is_some()) {
            draw(&live.text());
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let live = self.live.get_mut().unwrap_or_else(PoisonError::into_inner);
        draw(&live.erasure());
    }
}

/// The terminal may be gone; there is nobody left to show it to.
fn draw(text: &str) {
    let mut terminal = io::stderr().lock();
    terminal.write_all(text.as_bytes()).unwrap_or_default();
}

impl Live {
    fn new(moved: &'static str) -> Self {
        Self {
            moved,
            blobs: Vec::new(),
            converting: None,
            shown: None,
            lines: 0,
        }
    }

    /// Takes a step in; the line that it is worth, if it is.
    fn take(&mut self, step: Progress) -> Option<String> {
        match step {
            Progress::Blob {
                digest,
                state,
                done,
                total,
            } => self.take_blob(Blob {
                digest,
                state,
                done,
                total,
            }),
            Progress::Converting(now) => {
                let before = self.converting.replace(now);
                let begun = before.is_none_or(|before| before.phase != now.phase);
                begun.then(|| phase_name(now.phase).to_owned())
            }
        }
    }

    fn take_blob(&mut self, blob: Blob) -> Option<String> {
        let at = self.blobs.iter().position(|known| known.digest == blob.digest);
        let known = at.map(|at| self.blobs.remove(at));
        let (short, size) = (short_digest(&blob.digest).to_owned(), ByteSize(blob.total));
        match blob.state {
            BlobState::Done => Some(format!("{short} {} ({size})", self.moved)),
            BlobState::Present => Some(format!("{short} is there already ({size})")),
            BlobState::Waiting | BlobState::Moving => {
                let waits = blob.state == BlobState::Waiting;
                let begun = waits && known.is_none_or(|known| known.state != BlobState::Waiting);
                self.blobs.insert(at.unwrap_or(self.blobs.len()), blob);
                begun.then(|| format!("{short} is being {} by another pull ({size})", self.moved))
            }
        }
    }

    /// Removes from the screen what was drawn.
    fn erasure(&mut self) -> String {
        match std::mem::take(&mut self.lines) {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\x1b[J"),
        }
    }

    /// What is on its way, a line each.
    fn text(&mut self) -> String {
        let blob = |blob: &Blob| {
            let (done, total) = (ByteSize(blob.done), ByteSize(blob.total));
            format!("  {}  {done} of {total}\n", short_digest(&blob.digest))
        };
        let mut lines: Vec<String> = self.blobs.iter().map(blob).collect();
        lines.extend(self.converting.map(|now| {
            let percent = u128::from(now.done) * 100 / u128::from(now.total.max(1));
            format!("  {}  {}%\n", phase_name(now.phase), percent.min(100))
        }));
        self.shown = Some(Instant::now());
        self.lines = lines.len();
        lines.concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(digit: char, state: BlobState, done: u64) -> Progress {
        Progress::Blob {
            digest: format!("sha256:{}", digit.to_string().repeat(64)),
            state,
            done,
            total: 4 << 20,
        }
    }

    #[test]
    fn what_is_through_is_told_once_and_what_moves_is_drawn_anew() {
        let mut live = Live::new("fetched");
        assert_eq!(live.take(blob('a', BlobState::Moving, 0)), None);
        assert_eq!(live.take(blob('b', BlobState::Moving, 0)), None);
        assert_eq!(live.take(blob('a', BlobState::Moving, 1 << 20)), None);
        assert_eq!(
            live.text(),
            "  aaaaaaaaaaaa  1 MiB of 4 MiB\n  bbbbbbbbbbbb  0 B of 4 MiB\n"
        );
        assert_eq!(live.erasure(), "\x1b[2A\x1b[J");
        assert_eq!(live.erasure(), "");
        let done = live.take(blob('a', BlobState::Done, 4 << 20));
        assert_eq!(done.as_deref(), Some("aaaaaaaaaaaa fetched (4 MiB)"));
        assert_eq!(live.text().lines().count(), 1);
        let present = live.take(blob('c', BlobState::Present, 4 << 20)).unwrap();
        assert!(present.contains("there already"), "{present}");
        assert!(live.take(blob('d', BlobState::Waiting, 0)).is_some());
        assert_eq!(live.take(blob('d', BlobState::Waiting, 0)), None);
    }
}
