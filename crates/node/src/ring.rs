//! The last of what somebody writes into a pipe: a thread reads it all, keeps the end, and passes lines on to the log.
//!
//! The writer is a guest or its VMM: it may write for ever, and nothing of it is kept but the last few thousand bytes.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::pipe::{PipeFlags, pipe_with};

/// What is kept.
const KEEP: usize = 32 << 10;

/// How many lines an error shows.
const SHOWN: usize = 12;

/// The end of a text, as an error shows it: printable, a few lines, each with a mark.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    title: &'static str,
    lines: Vec<String>,
}

impl Tail {
    /// The lines.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lines.is_empty() {
            return Ok(());
        }
        write!(f, "\n  the end of {}:", self.title)?;
        self.lines.iter().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

/// A pipe whose reading end is here.
#[derive(Debug)]
pub(crate) struct Ring {
    title: &'static str,
    kept: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Ring {
    /// A pipe and the thread that reads it until all writers are gone. `copy` gets every byte, too.
    pub(crate) fn start(title: &'static str, copy: Option<File>) -> io::Result<(Self, OwnedFd)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let kept = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&kept);
        let reader = std::thread::Builder::new()
            .name("ring".into())
            .spawn(move || drain(File::from(read), &shared, copy, title))?;
        Ok((Self { title, kept, reader }, write))
    }

    /// The last lines so far; waits a moment for what the writer has written just before it ended.
    pub(crate) fn tail(&self) -> Tail {
        for _ in 0..20 {
            if self.reader.is_finished() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&kept);
        let lines: Vec<String> = text
            .lines()
            .map(printable)
            .filter(|line| !line.trim().is_empty())
            .collect();
        let skip = lines.len().saturating_sub(SHOWN);
        Tail {
            title: self.title,
            lines: lines.into_iter().skip(skip).collect(),
        }
    }

    /// The first kept line that holds `needle`.
    pub(crate) fn find(&self, needle: &str) -> Option<String> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&kept);
        text.lines().find(|line| line.contains(needle)).map(printable)
    }
}

/// What a guest writes must not steer the terminal of whoever reads about it.
fn printable(line: &str) -> String {
    line.chars()
        .filter(|c| !c.is_control() || *c == '\t')
        .take(240)
        .collect()
}

fn drain(mut pipe: File, kept: &Mutex<Vec<u8>>, mut copy: Option<File>, title: &str) {
    let mut buffer = vec![0; 4096];
    let mut line = Vec::new();
    loop {
        let read = match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                log::warn!("reading {title} failed: {error}");
                break;
            }
        };
        let bytes = buffer.get(..read).unwrap_or_default();
        if let Some(file) = &mut copy
            && let Err(error) = file.write_all(bytes)
        {
            log::warn!("copying {title} failed: {error}");
            copy = None;
        }
        keep(kept, bytes);
        log_lines(&mut line, bytes, title);
    }
}

fn keep(kept: &Mutex<Vec<u8>>, bytes: &[u8]) {
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    kept.extend_from_slice(bytes);
    if kept.len() > 2 * KEEP {
        let surplus = kept.len() - KEEP;
        kept.drain(..surplus);
    }
}

fn log_lines(line: &mut Vec<u8>, bytes: &[u8], title: &str) {
    if !log::log_enabled!(log::Level::Debug) {
        return;
    }
    for byte in bytes {
        if *byte != b'\n' && line.len() < 1024 {
            line.push(*byte);
            continue;
        }
        log::debug!("{title}: {}", printable(&String::from_utf8_lossy(line)));
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_flood_is_kept_and_printable() {
        let (ring, write) = Ring::start("a test", None).unwrap();
        let mut write = File::from(write);
        for number in 0..50_000 {
            writeln!(write, "line {number}\x1b[31m").unwrap();
        }
        drop(write);
        let tail = loop {
            let tail = ring.tail();
            if ring.reader.is_finished() {
                break tail;
            }
        };
        assert_eq!(tail.lines().len(), SHOWN);
        assert_eq!(tail.lines().last().map(String::as_str), Some("line 49999[31m"));
        assert!(tail.to_string().starts_with("\n  the end of a test:\n  | line 4998"));
        assert!(ring.kept.lock().unwrap().len() <= 2 * KEEP + 4096);
        assert_eq!(ring.find("line 49990").as_deref(), Some("line 49990[31m"));
        assert_eq!(ring.find("line 1\n"), None);
    }

    #[test]
    fn nothing_written_shows_nothing() {
        assert_eq!(Tail::default().to_string(), "");
    }
}
