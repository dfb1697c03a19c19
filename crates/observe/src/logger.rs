//! Log lines on standard error: one line each, level and target first. No colours, no timestamps by default, as
//! whoever collects the lines adds its own.

use std::io::Write;

use log::{LevelFilter, Log, Metadata, Record};

struct Logger {
    prefix: String,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let mut line = format!(
            "{}{}: {}: {}",
            self.prefix,
            record.level().as_str().to_lowercase(),
            record.target(),
            record.args()
        );
        // One record is one line, whatever a guest managed to get into it.
        line.retain(|c| !c.is_control());
        line.push('\n');
        // There is nowhere left to report that standard error is closed.
        drop(std::io::stderr().lock().write_all(line.as_bytes()));
    }

    fn flush(&self) {}
}

/// Starts logging to standard error, each line beginning with `prefix`.
///
/// # Errors
/// A logger was set before.
pub fn init(prefix: &str, level: LevelFilter) -> Result<(), log::SetLoggerError> {
    log::set_boxed_logger(Box::new(Logger {
        prefix: prefix.to_owned(),
    }))?;
    log::set_max_level(level);
    Ok(())
}
