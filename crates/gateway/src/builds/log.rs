//! The log of a build while it goes on: bounded in lines and bytes, and read by whoever asks how far it is.

use std::sync::{Mutex, MutexGuard, PoisonError};

use control::{LogLevel, LogLine};

use crate::time_text;

/// The most lines, and the most bytes of them.
const MAX_LINES: usize = 10_000;
const MAX_BYTES: usize = 256 << 10;

/// The longest line.
const MAX_LINE: usize = 4 << 10;

/// A log.
#[derive(Debug, Default)]
pub(crate) struct Log(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    lines: Vec<LogLine>,
    bytes: usize,
    is_cut: bool,
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more line.
    pub(crate) fn say(&self, level: LogLevel, step: Option<&str>, message: &str) {
        let mut kept = self.lock();
        // The last word on it is always there.
        let is_full = kept.lines.len() >= MAX_LINES || kept.bytes >= MAX_BYTES;
        let message = match (is_full, level) {
            (true, level) if level < LogLevel::Error && kept.is_cut => return,
            (true, level) if level < LogLevel::Error => {
                kept.is_cut = true;
                "the log is cut here, as it has become too long"
            }
            _ => message,
        };
        let message = cut(message);
        kept.bytes += message.len();
        kept.lines.push(LogLine {
            time_ns: time_text::now_ns(),
            level,
            step: step.map(str::to_owned),
            message: message.to_owned(),
        });
    }

    /// All of it until now.
    pub(crate) fn lines(&self) -> Vec<LogLine> {
        self.lock().lines.clone()
    }
}

/// The beginning of a line that is too long.
fn cut(line: &str) -> &str {
    let end = (0..=MAX_LINE.min(line.len()))
        .rev()
        .find(|at| line.is_char_boundary(*at));
    line.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// Bytes as they come become lines: of one stream of one step.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<u8>);

impl Lines {
    /// Takes bytes; whole lines are told.
    pub(crate) fn take(&mut self, bytes: &[u8], mut tell: impl FnMut(&str)) {
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            self.0.extend_from_slice(part);
            let is_whole = part.ends_with(b"\n") || part.ends_with(b"\r");
            if is_whole || self.0.len() >= MAX_LINE {
                self.end(&mut tell);
            }
        }
    }

    /// What is left is a line, too.
    pub(crate) fn end(&mut self, mut tell: impl FnMut(&str)) {
        let text = String::from_utf8_lossy(&self.0);
        let text = text.trim_end_matches(['\n', '\r']);
        if !text.is_empty() {
            tell(text);
        }
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_lines() {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        for bytes in [&b"a\nb"[..], b"c\n\n", b"50%\r100%\r\nend", &[0xff]] {
            lines.take(bytes, |line| seen.push(line.to_owned()));
        }
        lines.end(|line| seen.push(line.to_owned()));
        assert_eq!(seen, ["a", "bc", "50%", "100%", "end\u{fffd}"]);
        let mut count = 0;
        lines.take(&vec![b'x'; 10 * MAX_LINE], |_| count += 1);
        assert_eq!(count, 1);
    }

    #[test]
    fn it_is_bounded_and_has_the_last_word() {
        let log = Log::default();
        for _ in 0..MAX_LINES + 100 {
            log.say(LogLevel::Info, Some("1"), "x");
        }
        log.say(LogLevel::Error, None, "failed");
        let lines = log.lines();
        assert_eq!(lines.len(), MAX_LINES + 2);
        assert!(lines[MAX_LINES].message.contains("cut here"));
        assert_eq!(lines[MAX_LINES + 1].message, "failed");
        let log = Log::default();
        for _ in 0..2000 {
            log.say(LogLevel::Info, None, &"ü".repeat(MAX_LINE));
        }
        assert!(log.lock().bytes <= MAX_BYTES + 2 * MAX_LINE);
        assert_eq!(log.lines()[0].message.len(), MAX_LINE);
    }
}
