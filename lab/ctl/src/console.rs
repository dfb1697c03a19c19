//! Follows the lab's console while it boots, and tells from its lines how far the boot is. Knows what the init writes and
//! what a kernel writes when it panics.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use lab_init::contract::{FAILED_PREFIX, LOG_PREFIX, READY_LINE};

/// Lines of the console that are shown with a failure.
const TAIL: usize = 12;

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A step of the init.
    Step(String),
    /// The protocol is served.
    Ready,
    /// The init gave up.
    Failed(String),
    /// The kernel did.
    Panic(String),
}

/// A console file that is read as it grows.
pub(crate) struct Console {
    path: PathBuf,
    file: Option<File>,
    text: String,
    seen: usize,
}

impl Console {
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: None,
            text: String::new(),
            seen: 0,
        }
    }

    /// The events of the lines that were completed since the last call.
    pub(crate) fn poll(&mut self) -> Result<Vec<Event>> {
        if self.file.is_none() {
            // The emulator makes it, a moment after it was started.
            self.file = File::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else {
            return Ok(Vec::new());
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .with_context(|| format!("cannot read {}", self.path.display()))?;
        self.text.push_str(&String::from_utf8_lossy(&bytes));
        let fresh = self.text.get(self.seen..).unwrap_or_default();
        let whole = fresh.rfind('\n').map_or(0, |end| end + 1);
        let events = fresh
            .get(..whole)
            .unwrap_or_default()
            .lines()
            .filter_map(event)
            .collect();
        self.seen += whole;
        Ok(events)
    }

    /// The last lines, to be shown with an error.
    pub(crate) fn tail(&self) -> String {
        let lines: Vec<&str> = self
            .text
            .lines()
            .map(str::trim_end)
            .filter(|line| !line.is_empty())
            .collect();
        let from = lines.len().saturating_sub(TAIL);
        lines.get(from..).unwrap_or_default().join("\n")
    }
}

fn event(line: &str) -> Option<Event> {
    // The kernel may have written the beginning of the line.
    let from = |mark: &str| {
        line.find(mark)
            .and_then(|at| line.get(at + mark.len()..))
            .map(|rest| rest.trim().to_owned())
    };
    if let Some(reason) = from(FAILED_PREFIX) {
        return Some(Event::Failed(reason));
    }
    if from(READY_LINE).is_some() {
        return Some(Event::Ready);
    }
    if let Some(reason) = from("Kernel panic - not syncing: ") {
        return Some(Event::Panic(reason));
    }
    from(LOG_PREFIX).map(|step| match step.rsplit_once(" [") {
        // The lab's own clock is of no use beside ours.
        Some((step, _)) => Event::Step(step.to_owned()),
        None => Event::Step(step),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_become_events() {
        assert_eq!(
            event("lab-init: kernel is up [3.22 s]\r"),
            Some(Event::Step("kernel is up".into()))
        );
        assert_eq!(event("lab-init: ready [6.20 s]"), Some(Event::Ready));
        assert_eq!(
            event("lab-init: failed: no disk [6.20 s]"),
            Some(Event::Failed("no disk [6.20 s]".into()))
        );
        assert_eq!(
            event("[    3.1] Kernel panic - not syncing: Attempted to kill init!"),
            Some(Event::Panic("Attempted to kill init!".into()))
        );
        assert_eq!(event("[    1.0] something else"), None);
    }

    #[test]
    fn half_a_line_waits_for_the_rest() {
        let path = std::env::temp_dir().join(format!("basalt-lab-console-{}", std::process::id()));
        let mut console = Console::new(&path);
        assert_eq!(console.poll().unwrap(), []);
        let mut file = File::create(&path).unwrap();
        file.write_all(b"noise\nlab-init: rea").unwrap();
        assert_eq!(console.poll().unwrap(), []);
        file.write_all(b"dy [1.00 s]\n").unwrap();
        assert_eq!(console.poll().unwrap(), [Event::Ready]);
        assert_eq!(console.poll().unwrap(), []);
        assert_eq!(console.tail(), "noise\nlab-init: ready [1.00 s]");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn the_tail_is_short() {
        let mut console = Console::new(Path::new("/nonexistent"));
        console.text = (0..100).map(|n| format!("{n}\r\n\n")).collect();
        let tail = console.tail();
        assert_eq!(tail.lines().count(), TAIL);
        assert!(tail.starts_with("88") && tail.ends_with("99"), "{tail}");
    }
}
